"""The loop on a server of the Tinker API that is not ours: what differs, and that nothing is lost by it."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from foreign_server import ForeignServer, foreign_server
from tinker.lib.public_interfaces import sampling_client

import base_models
import config_schema
import server_differences
import tinker_backend
import trainer_with_eval
from error_handling import CheckpointError, EvaluationError, ServiceError

MODEL = str(base_models.STAND_IN)
DEMO_DATA = Path(__file__).resolve().parent.parent / "data" / "demo_data.jsonl"
ROWS = 8
RUN = {
    "base_model": MODEL,
    "train_file": "rows.jsonl",
    "eval_file": "rows.jsonl",
    "allow_overlap": True,
    "lora_rank": 8,
    "learning_rate": 6e-3,
    "warmup_steps": 2,
    "batch_size": 4,
    "steps_per_round": 6,
    "max_rounds": 2,
    "eval_threshold": 1.0,
    "max_seq_length": 4096,
    "save_every": 3,
    "seed": 7,
    "evaluation": {"evaluator": "simple", "max_tokens": 8},
    "selection": {"strategy": "none"},
}


@pytest.fixture
def foreign(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForeignServer]:
    """A foreign server that the environment names as the service to use."""
    with foreign_server(engine.base_url, MODEL) as server:
        monkeypatch.delenv("TINKER_MOCK", raising=False)
        monkeypatch.setenv("TINKER_API_KEY", "tml-foreign")
        monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
        yield server


@pytest.fixture
def backend(foreign: ForeignServer) -> Iterator[tinker_backend.Backend]:
    with tinker_backend.connect() as opened:
        yield opened


def run(folder: Path) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(DEMO_DATA.read_text().splitlines(keepends=True)[:ROWS]))
    path = folder / "config.json"
    path.write_text(json.dumps(RUN))
    config = config_schema.load_and_validate_config(path)
    return asyncio.run(trainer_with_eval.run_loop(config, runs_dir=folder / "runs", console=False))


def resume(folder: Path) -> dict[str, Any]:
    return asyncio.run(trainer_with_eval.run_loop(None, runs_dir=folder / "runs", resume="", console=False))


def figures(folder: Path, summary: dict[str, Any]) -> list[Any]:
    """Every round's score and likelihood, and the loss of every step that counts."""
    events = [json.loads(line) for line in (folder / "runs" / summary["run_id"] / "metrics.jsonl").open()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    return [(row["round"], row["score"], row["nll"]) for row in summary["rounds"]] + sorted(losses.items())


@pytest.fixture(scope="module")
def unbroken(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the run comes to on the engine itself, through none of the differences."""
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TINKER_MOCK", raising=False)
        patch.setenv("TINKER_API_KEY", "tml-own")
        patch.setenv("TINKER_BASE_URL", engine.base_url)
        return figures(folder, run(folder))


def test_a_run_whose_server_twice_lets_go_of_its_models_ends_as_an_unbroken_one(foreign, unbroken, tmp_path):
    # The samples of the baseline, then the first of round 1.
    foreign.lose_models_after = ("asample", ROWS + 1)
    with pytest.raises(EvaluationError, match="not loaded"):
        run(tmp_path)
    # The likelihood of round 1, then 4 steps of round 2, of which 3 are saved.
    foreign.lose_models_after = ("forward_backward", 1 + 4)
    with pytest.raises(ServiceError, match="not loaded"):
        resume(tmp_path)
    summary = resume(tmp_path)
    assert figures(tmp_path, summary) == unbroken
    assert all(row["errors"] == 0 for row in summary["rounds"])
    assert summary["rounds"][2]["nll"] < summary["rounds"][1]["nll"] < summary["rounds"][0]["nll"]
    assert set(foreign.met) == {"no sequence ids", "no create from state", "no metrics", "model not loaded"}


def test_the_folder_of_the_model_tells_the_context_that_the_server_does_not(backend):
    stated = json.loads((Path(MODEL) / "config.json").read_text())["max_position_embeddings"]
    assert backend.check_model(MODEL) == tinker_backend.ServedModel(MODEL, stated)
    assert server_differences.context_of_folder("Qwen/Qwen3-8B") is None


def test_a_folder_with_a_tokenizer_alone_leaves_the_context_unknown(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert server_differences.context_of_folder(str(tmp_path)) is None


async def test_restoring_says_nothing_of_deprecated_calls(backend, caplog):
    client = await backend.create_training_client(MODEL, rank=4, seed=1)
    saved = await tinker_backend.wait_for(client.save_state("state"), "a state")
    with warnings.catch_warnings(), caplog.at_level(logging.ERROR):
        warnings.simplefilter("error", FutureWarning)
        restored = await backend.restore_training_client(saved.path, optimizer=False)
    assert restored.model_id != client.model_id
    assert "DEPRECATED" not in caplog.text


async def test_a_state_that_is_not_there_is_told_by_its_own_name(backend):
    with pytest.raises(CheckpointError, match="tinker://gone:train:0/weights/none was not found"):
        await backend.restore_training_client("tinker://gone:train:0/weights/none")


async def test_a_rank_that_nobody_tells_ends_the_restoring():
    saved = tinker.types.WeightsInfoResponse(base_model=MODEL, is_lora=True)
    service = tinker.ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-key")
    with pytest.raises(CheckpointError, match="does not tell its LoRA rank"):
        await server_differences.load_into_new_client(service, saved, "tinker://a/weights/b", optimizer=True)


@pytest.mark.parametrize(
    ("status", "detail", "expected"),
    [
        (422, [{"type": "missing", "loc": ["body", "model_id"]}], True),
        (422, [{"type": "missing", "loc": ["body", "path"]}], False),
        (422, "the state has expired", False),
        (404, [{"type": "missing", "loc": ["body", "model_id"]}], False),
    ],
)
def test_only_a_missing_model_id_is_taken_for_a_server_without_create_from_state(status, detail, expected):
    import httpx

    response = httpx.Response(status, request=httpx.Request("POST", "http://127.0.0.1/api/v1/load_weights"))
    kind = tinker.UnprocessableEntityError if status == 422 else tinker.NotFoundError
    told = ServiceError("as the backend raises it")
    told.__cause__ = kind("refused", response=response, body={"detail": detail})
    assert server_differences.lacks_create_from_state(told) is expected


async def test_another_failure_of_a_sampler_is_not_taken_for_one_that_was_let_go(foreign, backend):
    training = await backend.create_training_client(MODEL, rank=4, seed=1)
    saved = await tinker_backend.wait_for(training.save_weights_for_sampler("weights"), "weights")
    client = await backend.create_sampling_client(model_path=saved.path)
    assert not await server_differences.has_let_go(client)
    foreign.lose_models()
    assert await server_differences.has_let_go(client)
    foreign.refusal = "does not fit"
    with pytest.raises(ValueError, match="does not fit"):
        await server_differences.has_let_go(client)


def test_ids_that_a_server_sends_are_still_attached():
    server_differences.accept_samples_without_ids()
    once = sampling_client._attach_sequence_ids
    server_differences.accept_samples_without_ids()
    assert sampling_client._attach_sequence_ids is once
    sequence = tinker.SampledSequence(stop_reason="stop", sequence_id="", _tokens_list=[1, 2])
    response = tinker.SampleResponse(sequences=[sequence])
    assert once(response, ["a:0"]).sequences[0].sequence_id == "a:0"
    assert once(response, None) is response
    with pytest.raises(AssertionError, match="2 sequence ids for 1 sequences"):
        once(response, ["a:0", "a:1"])
