"""A small environment for tinker-cookbook's `rl/train.py`: answer the question in one word.

    python rl_one_word.py log_path=rl max_steps=10        # any field of `rl.train.Config` as key=value

The reward is 1 for an answer of one word made of letters, less 0.1 when the answer does not end by itself. About one
answer in ten of the small base model is a single word, so there is something to reinforce from the first batch on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

import chz
from tinker_cookbook import renderers, tokenizer_utils
from tinker_cookbook.rl import train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder

MODEL = "Qwen/Qwen3-8B"
RENDERER = "qwen3_disable_thinking"
QUESTIONS = (
    "What is a horse?",
    "What is rain?",
    "What do you see in a harbour?",
    "How does a violin sound?",
    "What is kept in a cellar?",
    "What is a lamp for?",
    "Who works in a mill?",
    "What grows in a garden?",
)


class OneWordEnv(ProblemEnv):
    """One question; its answer is right when it is a single word."""

    def __init__(self, renderer: renderers.Renderer, question: str) -> None:
        super().__init__(renderer)
        self.question = question

    def get_question(self) -> str:
        return self.question

    def check_answer(self, sample_str: str) -> bool:
        return sample_str.strip().isalpha()

    def check_format(self, sample_str: str) -> bool:
        return bool(sample_str.strip())

    def get_reference_answer(self) -> str:
        return "any one word"


class OneWordDataset(RLDataset):
    """`steps` batches; each asks `groups` of the questions, every one `group_size` times."""

    def __init__(self, renderer: renderers.Renderer, steps: int, groups: int, group_size: int) -> None:
        self.renderer = renderer
        self.steps = steps
        self.groups = groups
        self.group_size = group_size

    def __len__(self) -> int:
        return self.steps

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        asked = [QUESTIONS[(index * self.groups + offset) % len(QUESTIONS)] for offset in range(self.groups)]
        return [
            ProblemGroupBuilder(partial(OneWordEnv, self.renderer, question), self.group_size, dataset_name="one_word")
            for question in asked
        ]


@chz.chz
class OneWordDatasetBuilder(RLDatasetBuilder):
    """What the cookbook's training program builds its data set with."""

    model_name: str = MODEL
    renderer_name: str = RENDERER
    steps: int = 12
    groups: int = 4
    group_size: int = 16

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        tokenizer = tokenizer_utils.get_tokenizer(self.model_name)
        renderer = renderers.get_renderer(self.renderer_name, tokenizer)
        return OneWordDataset(renderer, self.steps, self.groups, self.group_size), None


def build_blueprint() -> chz.Blueprint[train.Config]:
    """The configuration, less `log_path`."""
    return chz.Blueprint(train.Config).apply(
        {
            "model_name": MODEL,
            "recipe_name": "rl_one_word",
            "renderer_name": RENDERER,
            "dataset_builder": OneWordDatasetBuilder(),
            "learning_rate": 2e-3,
            "max_tokens": 8,
            "eval_every": 0,
            # The pages that show single rollouts cost more than the rollouts.
            "num_groups_to_log": 0,
        }
    )


def main(argv: Sequence[str]) -> None:
    """Train as `argv` says, in the `key=value` form of the cookbook's own programs."""
    asyncio.run(train.main(build_blueprint().make_from_argv(list(argv))))


if __name__ == "__main__":
    main(sys.argv[1:])
