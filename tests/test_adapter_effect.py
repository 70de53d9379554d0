"""Whether an adapter changes anything: the real engine, and runs whose adapter does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from mini_run import MODEL, mini_run, run_folder

import adapter_effect
import local_model
import tinker_backend
import trainer_with_eval
from adapter_effect import TargetLikelihood, canary, mean_nll, same_replies, target_likelihoods, without_effect
from error_handling import NoEffectError, ServiceError
from evaluation import SampleResult


@pytest.fixture(scope="module")
def backend() -> Iterator[tinker_backend.Backend]:
    with tinker_backend.connect(env={"TINKER_MOCK": "1"}) as opened:
        yield opened


def datum(tokens: list[int], weights: list[float]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.array(tokens[1:], dtype=np.int64)),
            "weights": tinker.TensorData.from_numpy(np.array(weights[1:], dtype=np.float32)),
        },
    )


async def nll(client: tinker.TrainingClient, data: list[tinker.Datum]) -> float:
    return mean_nll(await target_likelihoods(client, data))


async def test_likelihood_counts_only_weighted_tokens(backend):
    client = await backend.create_training_client(MODEL, rank=4, seed=1)
    tokens = [11, 23, 5, 8, 40]
    both = await nll(client, [datum(tokens, [0, 0, 0, 1, 1])])
    parts = [await nll(client, [datum(tokens, weights)]) for weights in ([0, 0, 0, 1, 0], [0, 0, 0, 0, 1])]
    assert both == pytest.approx(sum(parts) / 2, abs=1e-5)
    with pytest.raises(ValueError, match="no token"):
        await nll(client, [datum(tokens, [0, 0, 0, 0, 0])])


async def test_training_moves_the_likelihood_and_an_update_of_zero_does_not(backend):
    client = await backend.create_training_client(MODEL, rank=4, seed=1)
    data = [datum([11, 23, 5, 8, 40], [0, 0, 1, 1, 1]), datum([11, 23, 5], [0, 1, 1])]
    before = await target_likelihoods(client, data)
    for rate, moves in ((0.0, False), (1e-2, True)):
        step = await tinker_backend.forward_backward_async(client, data)
        update = await tinker_backend.optim_step_async(client, rate)
        await tinker_backend.wait_for(step, "a step")
        await tinker_backend.wait_for(update, "an update")
        after = await target_likelihoods(client, data)
        assert [one.example for one in after] == [one.example for one in before]
        assert without_effect(before, after) is not moves
        assert (mean_nll(after) < mean_nll(before)) if moves else (after == before)
    rows = json.loads(json.dumps([one.to_row() for one in before]))
    assert [TargetLikelihood.from_row(row) for row in rows] == before


def likelihood(example: str, logprobs: str) -> TargetLikelihood:
    return TargetLikelihood(example, logprobs, 1.0, 1.0)


def test_one_changed_logprob_is_an_effect_and_without_shared_targets_nothing_is_said():
    base = [likelihood("a", "1"), likelihood("b", "2")]
    assert without_effect(base, list(reversed(base)))
    assert without_effect(base, base[:1])
    assert not without_effect(base, [likelihood("a", "1"), likelihood("b", "3")])
    assert not without_effect(base, [likelihood("c", "1")])
    assert not without_effect([], base)


def test_replies_are_the_same_when_every_answered_one_is():
    def sample(identity: str, output: str, error: str | None = None) -> SampleResult:
        return SampleResult("t", identity, 1, "q", "a", output, 0.0, error=error)

    before = [sample("1", "x"), sample("2", "y"), sample("3", "", "gone")]
    assert same_replies(before, [sample("1", "x"), sample("2", "y"), sample("3", "z")]) == 2
    assert same_replies(before, [sample("1", "x"), sample("2", "z")]) == 0
    assert same_replies(before, [sample("1", "", "gone")]) == 0


async def test_the_canary_lets_a_sound_engine_pass_and_leaves_no_adapter_behind(backend):
    before = set(backend._server.engine.runs)
    await canary(backend, MODEL, datum([11, 23, 5, 8, 40], [0, 0, 1, 1, 1]), rank=4, seed=1)
    for _ in range(200):
        if set(backend._server.engine.runs) == before:
            break
        await asyncio.sleep(0.01)
    assert set(backend._server.engine.runs) == before


@pytest.mark.parametrize(("rate", "message"), [(1e-3, "learning rate 0 changed logprobs"), (0.0, "changed no logprob")])
async def test_the_canary_tells_an_engine_whose_steps_do_something_else(backend, monkeypatch, rate, message):
    real = local_model.LocalModel.optim_step

    def wrong(self, adapter, params):
        return real(self, adapter, {**params, "learning_rate": rate})

    monkeypatch.setattr(local_model.LocalModel, "optim_step", wrong)
    with pytest.raises(ServiceError, match=message):
        await canary(backend, MODEL, datum([11, 23, 5, 8, 40], [0, 0, 1, 1, 1]), rank=4, seed=1)


# ---- in a run


def weights(run_dir: Path) -> bytes:
    (saved,) = run_dir.glob("engine/runs/*/weights/round_01/adapter_model.safetensors")
    return saved.read_bytes()


def test_an_adapter_that_moves_no_logprob_ends_the_run_resumably(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_MOCK", "1")
    with pytest.raises(NoEffectError, match=r"round 1: the adapter has no effect. All 4 .* \(it is 1e-25\)"):
        mini_run(tmp_path, learning_rate=1e-25)
    run_dir = run_folder(tmp_path)
    state = json.loads((run_dir / "state.json").read_text())
    assert (state["status"], [row["round"] for row in state["rounds"]]) == ("failed", [0])
    # What is known of the base model is in the run folder, so that another process comes to the same end.
    assert len((run_dir / "likelihood" / "round_00.jsonl").read_text().splitlines()) == 4
    assert trainer_with_eval.main(["--resume", str(run_dir)]) == 1


def test_a_server_that_samples_without_the_adapter_is_found_and_the_canary_changes_no_weight(tmp_path, monkeypatch):
    monkeypatch.setenv("TINKER_MOCK", "1")
    (tmp_path / "sound").mkdir()
    (tmp_path / "unsound").mkdir()
    sound = mini_run(tmp_path / "sound")
    real = tinker_backend.Backend.create_sampling_client

    async def without_adapter(self, **wanted):
        return await real(self, base_model=MODEL)

    async def no_canary(*_, **__):
        return None

    monkeypatch.setattr(tinker_backend.Backend, "create_sampling_client", without_adapter)
    monkeypatch.setattr(adapter_effect, "canary", no_canary)
    with pytest.raises(NoEffectError, match="the server samples without the adapter"):
        mini_run(tmp_path / "unsound")
    unsound = run_folder(tmp_path / "unsound")
    warnings = [json.loads(line) for line in (unsound / "metrics.jsonl").read_text().splitlines()]
    assert any("all 4 replies are, word for word, those of the baseline" in json.dumps(row) for row in warnings)
    assert weights(unsound) == weights(sound)
