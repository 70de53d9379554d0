"""The 20 questions of `data/demo_data.jsonl` as an Inspect task and as rows for supervised training.

    python -m tinker_cookbook.eval.run_inspect_evals tasks=quiz_task.py@quiz model_name=Qwen/Qwen3-8B max_tokens=16

No model knows the answers (they are about an invented company), so a score above zero was trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

QUIZ_FILE = Path(__file__).resolve().parents[2] / "data" / "demo_data.jsonl"


def quiz_rows() -> list[dict[str, Any]]:
    """The questions as conversations, `{"messages": [user, assistant]}`."""
    pairs = [json.loads(line) for line in QUIZ_FILE.read_text(encoding="utf-8").splitlines()]
    return [
        {
            "messages": [
                {"role": "user", "content": pair["question"]},
                {"role": "assistant", "content": pair["answer"]},
            ]
        }
        for pair in pairs
    ]


@task
def quiz() -> Task:
    """20 questions; an answer is right when it is the expected one and nothing else."""
    samples = [
        Sample(input=user["content"], target=assistant["content"])
        for user, assistant in (row["messages"] for row in quiz_rows())
    ]
    return Task(dataset=MemoryDataset(samples, name="quiz"), solver=generate(), scorer=exact())
