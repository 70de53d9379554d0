"""How many tokens an evaluation and a round of training send, measured from the data, for `cost_estimate`.

Nothing is asked of a model. Of large files a seeded sample is measured, and the mean taken for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import cost_estimate
import data_loader
import inspect_eval

if TYPE_CHECKING:
    from config_schema import TrainingConfig

_TASK_NOTE = "what a task's solver adds to its samples' text (instructions, examples, further turns) comes on top"


def estimate(
    config: TrainingConfig,
    loader: data_loader.DataLoader,
    *,
    evaluation_rows: Sequence[data_loader.Row],
    prompt_lengths: Sequence[int],
    plans: Sequence[inspect_eval.PlannedTask],
    train: Sequence[data_loader.Row],
    pool: Sequence[data_loader.Row],
) -> cost_estimate.RunEstimate:
    """The estimate of a run; `prompt_lengths` are the tokens of the evaluation rows' prompts, `plans` the Inspect
    tasks (none for the built-in evaluator), `pool` what rounds after the first may draw on besides `train`."""
    tasks = [plan for plan in plans if plan.spec.task != inspect_eval.LABELLED_ROWS]
    draws_on_pool = bool(pool) and config.selection.strategy != "none"
    return cost_estimate.estimate_run(
        evaluation_size(config, loader, evaluation_rows, prompt_lengths, tasks),
        training_size(config, loader, train),
        training_size(config, loader, train, pool) if draws_on_pool else None,
        max_rounds=config.max_rounds,
        notes=(_TASK_NOTE,) if tasks else (),
    )


def evaluation_size(
    config: TrainingConfig,
    loader: data_loader.DataLoader,
    rows: Sequence[data_loader.Row],
    prompt_lengths: Sequence[int],
    tasks: Sequence[inspect_eval.PlannedTask],
) -> cost_estimate.EvaluationSize:
    """What one evaluation sends: the rows of `eval_file`, and of Inspect tasks the text of their samples."""
    chat_format = loader.chat_format
    whole = data_loader.DataLoader(
        chat_format, max_seq_length=loader.max_seq_length, train_on_what="last_assistant_turn"
    )
    asked, prompts = len(prompt_lengths), sum(prompt_lengths)
    targets = len(rows) * cost_estimate.mean_length(
        rows, lambda row: sum(example.n_tokens for example in whole.render(row)), config.seed
    )
    around = len(chat_format.prompt_tokens([{"role": "user", "content": "x"}])) - 1
    for plan in tasks:
        samples = list(plan.task.dataset)
        mean = cost_estimate.mean_length(
            samples, lambda sample: around + _tokens(chat_format.tokenizer, _question(sample)), config.seed
        )
        asked += len(plan.keys)
        prompts += round(len(plan.keys) * mean)
        if not rows:  # the likelihood is that of the file's targets where there is a file
            answer = cost_estimate.mean_length(
                samples, lambda sample: _tokens(chat_format.tokenizer, _answer(sample)), config.seed
            )
            targets += len(samples) * (mean + answer)
    return cost_estimate.EvaluationSize(asked, prompts, math.ceil(targets), config.evaluation.max_tokens)


def training_size(
    config: TrainingConfig, loader: data_loader.DataLoader, *files: Sequence[data_loader.Row]
) -> cost_estimate.TrainingSize:
    """What a round trains that chooses from `files`; of two, the one with the longer rows in the mean gives lengths."""
    supply, mean, deviation = 0, 0.0, 0.0
    for rows in files:
        measured = cost_estimate.some(rows, config.seed)
        lengths = [
            sum(example.n_tokens for example in loader.render(row)) if loader.can_train(row) else 0 for row in measured
        ]
        kept = [length for length in lengths if length]
        # Of a file whose measured rows were all dropped, no row can be longer than the limit.
        kept = kept or [loader.max_seq_length]
        supply += max(1, round(len(rows) * len(kept) / len(lengths)))
        if fmean(kept) > mean:
            mean, deviation = fmean(kept), pstdev(kept)
    return cost_estimate.TrainingSize(
        supply=supply,
        row_tokens=mean,
        row_sd=deviation,
        batch_size=config.batch_size,
        steps=config.steps_per_round,
        max_repeats=config.selection.max_repeats,
        guarded=config.selection.label_guard,
    )


def _question(sample: Any) -> str:
    """An Inspect sample's question with its choices."""
    asked = sample.input if isinstance(sample.input, str) else "\n".join(message.text for message in sample.input)
    return "\n".join([asked, *(sample.choices or ())])


def _answer(sample: Any) -> str:
    return sample.target if isinstance(sample.target, str) else "\n".join(sample.target)


def _tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer.encode(text))
