"""The smallest run there is: a few rows, one step a round, on the local engine, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import config_schema
import trainer_with_eval

MODEL = "Qwen/Qwen3-8B"


def mini_run(folder: Path, *, rows: int = 4, console: bool = False, **changes: Any) -> Path:
    """Run to the end and return the run folder; what ends the run early is raised."""
    loaded = config_schema.load_and_validate_config(write_config(folder, colour_rows(rows), **changes))
    asyncio.run(trainer_with_eval.run_loop(loaded, runs_dir=folder / "runs", console=console))
    return run_folder(folder)


def colour_rows(count: int) -> list[dict[str, Any]]:
    return [{"question": f"The colour of thing {n}?", "answer": ("red", "blue")[n % 2]} for n in range(count)]


def write_config(folder: Path, rows: Sequence[Mapping[str, Any]], **changes: Any) -> Path:
    """The configuration of the smallest run, beside the rows that it trains on and is asked."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "base_model": MODEL,
        "train_file": str(data),
        "eval_file": str(data),
        "allow_overlap": True,
        "lora_rank": 4,
        "learning_rate": 1e-3,
        "min_lr": 0.0,
        "warmup_steps": 0,
        "batch_size": 2,
        "max_rounds": 1,
        "eval_threshold": 1.0,
        "evaluation": {"evaluator": "simple", "max_tokens": 2},
        "selection": {"strategy": "none"},
        **changes,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def run_folder(folder: Path) -> Path:
    (made,) = (folder / "runs").iterdir()
    return made
