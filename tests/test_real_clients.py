"""tinker-cookbook's own programs run unmodified against the engine; longer runs of them are in `benchmarks/clients`.

They run in this process, as importing the cookbook anew for each would cost more than all of them. What they load from
a hub is given them through the cookbook's own register of tokenizers and as folders in the working folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CLIENTS = Path(__file__).resolve().parent.parent / "benchmarks" / "clients"
RENDERER = "qwen3_disable_thinking"


@pytest.fixture(autouse=True)
def workplace(engine: Any, small_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder, and an environment in which the cookbook finds the engine, a tokenizer and data sets."""
    from tinker_cookbook import tokenizer_utils

    monkeypatch.syspath_prepend(CLIENTS)
    import run

    for name, value in run.client_environment(tmp_path, engine.base_url).items():
        if name.startswith("TINKER_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.chdir(tmp_path)
    run.prepare(tmp_path, engine.base_url)
    tokenizer_utils.register_tokenizer(run.MODEL, lambda: small_tokenizer)
    root = logging.getLogger()
    kept = root.handlers[:], root.level
    yield tmp_path
    root.handlers[:], root.level = kept
    tokenizer_utils.unregister_tokenizer(run.MODEL)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_flat_supervised_loop_learns_and_saves(workplace: Path, base_model_name: str) -> None:
    import tinker
    from tinker_cookbook.recipes import sl_loop

    config = sl_loop.Config(
        model_name=base_model_name,
        log_path=str(workplace / "log"),
        batch_size=16,
        learning_rate=2e-3,
        max_steps=6,
        save_every=4,
    )
    sl_loop.main(config)
    rows = metrics(workplace / "log")
    assert len(rows) == 6
    assert rows[-1]["train_mean_nll"] < 0.7 * rows[0]["train_mean_nll"]
    saved = [json.loads(line) for line in (workplace / "log" / "checkpoints.jsonl").read_text().splitlines()]
    assert [row["name"] for row in saved] == ["000004", "final"]
    listed = tinker.RestClient().list_user_checkpoints().result(timeout=20).checkpoints
    assert {saved[-1]["state_path"], saved[-1]["sampler_path"]} <= {checkpoint.tinker_path for checkpoint in listed}


def test_reinforcement_learning_raises_the_reward(workplace: Path) -> None:
    import rl_one_word
    from tinker_cookbook.rl import train

    settings = {
        "log_path": str(workplace / "log"),
        "dataset_builder": rl_one_word.OneWordDatasetBuilder(steps=5, groups=4, group_size=8),
        "learning_rate": 5e-3,
    }
    asyncio.run(train.main(rl_one_word.build_blueprint().apply(settings).make()))
    rows = metrics(workplace / "log")
    assert len(rows) == 5
    assert rows[-1]["env/all/reward/total"] > rows[0]["env/all/reward/total"] + 0.2
    assert max(abs(row["optim/kl_sample_train_v2"]) for row in rows) < 1e-6


def test_pairs_of_replies_are_told_apart(workplace: Path, base_model_name: str) -> None:
    from tinker_cookbook.recipes.preference.dpo import train

    config = train.CLIConfig(
        model_name=base_model_name,
        dataset="hhh",
        renderer_name=RENDERER,
        log_path=str(workplace / "log"),
        batch_size=8,
        learning_rate=1e-3,
        max_steps=3,
    )
    train.cli_main(config)
    rows = metrics(workplace / "log")
    # Before the first step both models are the same, so the loss is ln 2 whatever the pairs.
    assert rows[0]["dpo_loss"] == pytest.approx(0.693147, abs=1e-4)
    assert rows[-1]["dpo_loss"] < 0.6
    assert rows[-1]["accuracy"] == 1.0


def test_the_inspect_evaluator_scores_what_the_pipelined_loop_trains(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inspect keeps the display of a process's first evaluation for all later ones, and the cookbook's is not silent.
    monkeypatch.setattr("inspect_ai._display.core.active._active_display", None)
    monkeypatch.setattr("inspect_ai.util._display._display_type", None)
    import sft_quiz
    from tinker_cookbook.supervised import train

    blueprint = sft_quiz.build_blueprint(workplace)
    settings = {"log_path": str(workplace / "log"), "num_epochs": 8, "eval_every": 15, "lr_schedule": "constant"}
    asyncio.run(train.main(blueprint.apply(settings).make()))
    rows = metrics(workplace / "log")
    scores = [row["quiz/mean"] for row in rows if "quiz/mean" in row]
    assert scores[0] == 0.0
    assert scores[1] > 0.2
    assert rows[-1]["train_mean_nll"] < 0.5 * rows[0]["train_mean_nll"]
