"""tinker-cookbook's `supervised/train.py` on the quiz, with its Inspect evaluator before and between the steps.

    python sft_quiz.py log_path=sft num_epochs=30         # any field of `supervised.train.Config` as key=value

The module is not a program in 0.5.8 (its entry point is a lambda, and chz asks for an annotated function), so its
`main(config)` is called, as the cookbook's own recipes do.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import chz
from quiz_task import quiz, quiz_rows
from tinker_cookbook.eval.inspect_evaluators import InspectEvaluatorBuilder
from tinker_cookbook.renderers import TrainOnWhat
from tinker_cookbook.supervised import train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

MODEL = "Qwen/Qwen3-8B"
RENDERER = "qwen3_disable_thinking"


def build_blueprint(folder: Path) -> chz.Blueprint[train.Config]:
    """The configuration, less `log_path`. The training file and Inspect's logs are written to `folder`."""
    file = folder / "quiz.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in quiz_rows()), encoding="utf-8")
    data = FromConversationFileBuilder(
        file_path=str(file),
        common_config=ChatDatasetBuilderCommonConfig(
            model_name_for_tokenizer=MODEL,
            renderer_name=RENDERER,
            max_length=512,
            batch_size=10,
            train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        ),
    )
    inspect = InspectEvaluatorBuilder(
        tasks=quiz(),
        model_name=MODEL,
        renderer_name=RENDERER,
        temperature=0.0,
        max_tokens=16,
        log_dir=str(folder / "inspect-logs"),
    )
    return chz.Blueprint(train.Config).apply(
        {
            "model_name": MODEL,
            "recipe_name": "sft_quiz",
            "renderer_name": RENDERER,
            "dataset_builder": data,
            "evaluator_builders": [inspect],
            "learning_rate": 5e-3,
            "num_epochs": 30,
            "eval_every": 15,
        }
    )


def main(argv: Sequence[str]) -> None:
    """Train as `argv` says, in the `key=value` form of the cookbook's own programs."""
    asyncio.run(train.main(build_blueprint(Path.cwd()).make_from_argv(list(argv))))


if __name__ == "__main__":
    main(sys.argv[1:])
