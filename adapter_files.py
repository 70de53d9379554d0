"""A LoRA adapter in memory, and the files of a checkpoint that hold it: PEFT's format, Adam's moments beside it.

    write_adapter(adapter, lora_config, folder, optimizer=True)
    read_adapter(adapter, checkpoint, optimizer=True)

Everything is safetensors and JSON: reading a checkpoint never unpickles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from adapter_store import AdapterSpec, Checkpoint
from error_handling import CheckpointError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Adapter:
    """A LoRA adapter in memory. `parameters` are keyed by their names in PEFT's file; `step` counts optimizer steps."""

    name: str
    spec: AdapterSpec
    parameters: dict[str, torch.nn.Parameter] = field(repr=False)
    optimizer: torch.optim.AdamW = field(repr=False)
    step: int = 0
    optimizer_steps: int = 0


def new_optimizer(parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(parameters.values()), weight_decay=0.0, fused=True)


def write_adapter(adapter: Adapter, lora_config: LoraConfig, folder: Path, *, optimizer: bool) -> None:
    """Write the adapter's files into `folder`; with `optimizer` its Adam state too, once it has one."""
    tensors = {key: parameter.detach().cpu().contiguous() for key, parameter in adapter.parameters.items()}
    _write_tensors(tensors, folder / WEIGHTS_FILE)
    config = lora_config.to_dict()
    config.update(inference_mode=True, target_modules=sorted(config["target_modules"]))
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    if optimizer and adapter.optimizer_steps:
        states = {key: adapter.optimizer.state[parameter] for key, parameter in adapter.parameters.items()}
        moments = {f"{name}.{key}": state[name].cpu().contiguous() for key, state in states.items() for name in MOMENTS}
        _write_tensors(moments, folder / OPTIMIZER_FILE)


def _write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file; a disk that refuses is an `OSError`, as it is for every other file."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as err:
        number = re.search(r"\(os error (\d+)\)", str(err))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from err


def read_adapter(adapter: Adapter, checkpoint: Checkpoint, *, optimizer: bool) -> None:
    """Put a checkpoint's weights, and with `optimizer` its Adam state, into `adapter`; gradients are dropped.

    Raises `CheckpointError` when the checkpoint does not fit; the adapter is then as it was.
    """
    info = checkpoint.info
    weights = _read_tensors(checkpoint.folder / WEIGHTS_FILE, adapter.parameters, ("",))
    moments = None
    if optimizer and info.optimizer_steps:
        prefixes = tuple(f"{name}." for name in MOMENTS)
        moments = _read_tensors(checkpoint.folder / OPTIMIZER_FILE, adapter.parameters, prefixes)
    with torch.no_grad():
        for key, parameter in adapter.parameters.items():
            parameter.copy_(weights[key])
            parameter.grad = None
    adapter.optimizer = new_optimizer(adapter.parameters)
    adapter.step = info.step
    adapter.optimizer_steps = info.optimizer_steps if moments else 0
    for key, parameter in adapter.parameters.items() if moments else ():
        assert moments is not None, "guarded by the loop"
        adapter.optimizer.state[parameter] = {
            "step": torch.tensor(float(info.optimizer_steps), device=parameter.device),
            **{name: moments[f"{name}.{key}"].to(parameter.device) for name in MOMENTS},
        }


def _read_tensors(
    path: Path, parameters: Mapping[str, torch.Tensor], prefixes: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file: for each prefix one per parameter, of its shape, and no others."""
    try:
        loaded = load_file(path)
    except Exception as err:
        raise CheckpointError(f"{path}: cannot be read ({type(err).__name__}: {err})") from err
    expected = {prefix + key: parameter for prefix in prefixes for key, parameter in parameters.items()}
    for name in {**expected, **loaded}:
        shapes = [
            list(found.shape) if found is not None else "absent" for found in (loaded.get(name), expected.get(name))
        ]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{path}: {name} is {shapes[0]} in the file and {shapes[1]} in the model: rank or trained layers "
                "differ. Create the training client from the checkpoint instead of loading it into another one"
            )
    return loaded


def _shape(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))


def fingerprint(folder: Path) -> str:
    """Tells base weights apart without reading all: a digest of the config, and of each file's size and beginning."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(1 << 20))
    return digest.hexdigest()[:32]


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
