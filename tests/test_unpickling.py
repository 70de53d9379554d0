"""Nothing that the engine loads can run code: a pickle in the place of any file is refused and not executed."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import base_models
import embedding_index
import tinker_backend
from error_handling import EvalLoopError
from mock_tinker import LocalTinkerServer

KEY = "tml-local-test"
MODEL_FILES = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
CHECKPOINT_FILES = ("adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json", "checkpoint.json")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The folder that stands when a planted file was executed."""
    return tmp_path / "executed"


@pytest.fixture
def bomb(mark: Path) -> bytes:
    made = pickle.dumps(Bomb(mark))
    pickle.loads(made)
    assert mark.is_dir(), "the pickle works where something unpickles it"
    mark.rmdir()
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that holds the small model."""
    return Path(shutil.copytree(base_models.resolve_base_model("Qwen/Qwen3-8B").folder, tmp_path / "model"))


def train(url: str, base_model: str) -> str:
    """One optimizer step on a new adapter; returns the path of the saved state."""

    async def work(backend: tinker_backend.Backend) -> str:
        client = await backend.create_training_client(base_model, rank=4, seed=1)
        tinker_backend.get_tokenizer(base_model, backend)
        import tinker

        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([5, 6, 7]),
            loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
        )
        await tinker_backend.wait_for(client.forward_backward([datum], "cross_entropy"), "a step")
        await tinker_backend.wait_for(await tinker_backend.optim_step_async(client, 1e-3), "a step")
        saved = await tinker_backend.wait_for(client.save_state("state"), "a state")
        return str(saved.path)

    with tinker_backend.connect(env={"TINKER_API_KEY": KEY, "TINKER_BASE_URL": url}) as backend:
        return asyncio.run(work(backend))


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_pickle_in_the_place_of_a_base_model_s_file_is_refused(
    model: Path, bomb: bytes, mark: Path, tmp_path: Path, name: str
) -> None:
    (model / name).write_bytes(bomb)
    with LocalTinkerServer(tmp_path / "engine", threads=1) as server:
        if name == "generation_config.json":
            train(server.base_url, str(model))  # how others would sample from the model does not matter here
        else:
            with pytest.raises(EvalLoopError):
                train(server.base_url, str(model))
    assert not mark.exists()


def test_pickled_weights_and_programs_beside_the_weights_are_left_alone(
    model: Path, bomb: bytes, mark: Path, tmp_path: Path
) -> None:
    program = f"import os\nos.mkdir({str(mark)!r})\n"
    for name in ("pytorch_model.bin", "model.pt", "optimizer.pt", "adapter_model.bin", "training_args.bin"):
        (model / name).write_bytes(bomb)
    for name in ("modeling_bad.py", "tokenization_bad.py", "configuration_bad.py"):
        (model / name).write_text(program)
    config = json.loads((model / "config.json").read_text())
    auto_map = {"AutoConfig": "configuration_bad.C", "AutoModelForCausalLM": "modeling_bad.M"}
    (model / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "tokenization_bad.T"]}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with LocalTinkerServer(tmp_path / "engine", threads=1) as server:
        assert train(server.base_url, str(model)).endswith("/weights/state")
    assert not mark.exists()


def test_weights_of_which_only_a_pickle_is_there_are_refused(
    model: Path, bomb: bytes, mark: Path, tmp_path: Path
) -> None:
    (model / "model.safetensors").rename(model / "elsewhere")
    (model / "pytorch_model.bin").write_bytes(bomb)
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
    with LocalTinkerServer(tmp_path / "engine", threads=1) as server:
        with pytest.raises(EvalLoopError, match=r"pytorch_model\.bin is not read"):
            train(server.base_url, str(model))
        # An index of safetensors that names the pickle as the place of its tensors.
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(EvalLoopError, match=r"safetensors in place of pytorch_model\.bin, which the index names"):
            train(server.base_url, str(model))
    with pytest.raises(EvalLoopError):
        embedding_index.load_embedder(str(model))(["a text"])
    assert not mark.exists()


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_pickle_in_the_place_of_a_checkpoint_s_file_is_refused(
    bomb: bytes, mark: Path, tmp_path: Path, name: str
) -> None:
    with LocalTinkerServer(tmp_path / "engine", threads=1) as server:
        path = train(server.base_url, "Qwen/Qwen3-8B")
        folder = server.engine.store.find(path).folder
        assert (folder / name).is_file()
        (folder / name).write_bytes(bomb)
        env = {"TINKER_API_KEY": KEY, "TINKER_BASE_URL": server.base_url}
        with tinker_backend.connect(env=env) as backend:
            if name == "adapter_config.json":
                asyncio.run(backend.restore_training_client(path))  # it is for PEFT, the engine has no use for it
            else:
                with pytest.raises(EvalLoopError):
                    asyncio.run(backend.restore_training_client(path))
    assert not mark.exists()
