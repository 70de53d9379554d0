"""Everything that can be checked before anything is spent: data, renderer, tasks, learning rate, the model's presence.

`prepare` turns a configuration and an open connection into a `Prepared` run, or raises with the place and the remedy.
It trains, samples and saves nothing, so a dry run is `prepare` and `Prepared.lines` alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import cost_estimate
import data_loader
import data_selector
import evaluation
import hyperparam_utils
import inspect_eval
import rendering
import simple_eval
import token_sizes
from contamination import NearMatch
from error_handling import ConfigurationError, DataError, DependencyError
from evaluation import EVAL_FILE_TASK
from record_files import first_ten

if TYPE_CHECKING:
    import tinker

    from config_schema import TrainingConfig
    from tinker_backend import Backend, ServedModel


@dataclass(frozen=True)
class Prepared:
    """A run that passed every check. `lines` is what the terminal shows of it; `warnings` need a person's eye."""

    config: TrainingConfig
    served: ServedModel
    service: str
    chat_format: rendering.ChatFormat
    loader: data_loader.DataLoader
    train: data_loader.LoadedRows
    pool: data_loader.LoadedRows | None
    evaluation_rows: data_loader.LoadedRows | None
    test: data_loader.LoadedRows | None
    evaluator: str
    tasks: tuple[inspect_eval.TaskSpec, ...]
    task_digests: Mapping[str, str]
    n_samples: int
    labels: tuple[str, ...]
    learning_rate: float
    warmup_steps: int
    on_training_data: bool
    near_matches: tuple[NearMatch, ...]
    estimate: cost_estimate.RunEstimate
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    mask_preview: str

    @property
    def data_digests(self) -> dict[str, str]:
        """sha256 of every data file and of every Inspect task's samples, for telling on resume what has changed."""
        files = {"train_file": self.train, "pool_file": self.pool, "eval_file": self.evaluation_rows}
        files["heldout.test_file"] = self.test
        found = {name: loaded.digest for name, loaded in files.items() if loaded is not None}
        return found | {f"task {name}": digest for name, digest in self.task_digests.items()}


def prepare(config: TrainingConfig, backend: Backend, *, warmup_steps: int | None = None) -> Prepared:
    """Check `config` against its files and the connected service; see `Prepared`.

    `warmup_steps` is what a resumed run was begun with: the default of the configuration moves with `max_rounds`.
    Raises `ConfigurationError`, `DataError` or `DependencyError` (exit code 2) for what the user can mend.
    """
    warnings: list[str] = []
    lines = [f"service: {backend.describe()}"]

    data_selector.check_settings(config.selection)
    evaluator, evaluator_note = choose_evaluator(config)
    lines.append(f"evaluator: {evaluator}{evaluator_note}")

    served = backend.check_model(config.base_model)
    if served.unchecked:
        warnings.append(f"whether the service offers {served.name} stayed unchecked: {served.unchecked}")
    if served.stand_in:
        lines.append(
            f"model: {served.name}, for which the local engine serves its own small stand-in: good for testing a loop, "
            "not for judging the model"
        )
    else:
        lines.append(f"model: {served.name}")

    max_length = config.max_seq_length
    if served.max_context is not None and served.max_context < max_length:
        max_length = served.max_context
        lines.append(f"max_seq_length: {max_length}, the model's context length (configured: {config.max_seq_length})")

    data = data_loader.load_run_data(
        _from_here(config.train_file),
        pool_file=_from_here(config.selection.pool_file),
        eval_file=_from_here(config.eval_file),
        test_file=_from_here(config.heldout.test_file),
        category_field=config.evaluation.category_field,
        train_on_what=config.train_on_what,
        allow_overlap=config.allow_overlap,
    )
    train, pool, eval_rows = data.train, data.pool, data.evaluation
    warnings += data.warnings
    for name, loaded in (("training", train), ("pool", pool), ("evaluation", eval_rows), ("test", data.test)):
        if loaded is not None:
            lines.append(f"{name} data: {loaded.describe()}")
    if data.nearest is not None:
        row, item, score = data.nearest
        lines.append(f"most similar rows of training and evaluation (similarity {score:.2f}, judge them yourself):")
        lines += [f"  {shown.where}: {_excerpt(shown.question)}" for shown in (row, item)]
    warnings += near_matches_told(data.near)
    on_training_data = data.on_training_data
    if on_training_data:
        nearly = sum(match.kept for match in data.near)
        warnings.append(
            f"allow_overlap: {len({row.id for row, _ in data.overlap})} training rows are also evaluation rows"
            + (f" and {nearly} nearly so" if nearly else "")
            + ", so every score of this run is on training data"
        )

    tokenizer = backend.get_tokenizer(config.base_model)
    chat_format = rendering.get_chat_format(
        config.base_model,
        tokenizer,
        renderer_name=config.renderer_name,
        enable_thinking=config.evaluation.enable_thinking,
    )
    lines.append(f"renderer: {chat_format.name}")
    if chat_format.fallback_note:
        warnings.append(chat_format.fallback_note)
    chatty = next((row for row in train.rows if row.text is None), None)
    if chatty is not None:
        rendering.check_prefix(chat_format, [dict(message) for message in chatty.messages])

    loader = data_loader.DataLoader(chat_format, max_seq_length=max_length, train_on_what=config.train_on_what)
    stats = loader.check(train.rows, seed=config.seed)
    lines.append(stats.describe())
    if pool is not None and len(pool.rows):
        lines.append(f"of the pool: {loader.check(pool.rows, seed=config.seed).describe()}")
    elif pool is not None:
        warnings.append(
            f"{pool.path}: no row of the pool is left, as each is a near match of an evaluation item or a copy of a "
            "training row; the run goes on without a pool"
        )
    prompt_lengths: tuple[int, ...] = ()
    if eval_rows is not None:
        settings = config.evaluation
        simple_eval.check_rows(eval_rows.rows, cluster_by=settings.cluster_by, category_field=settings.category_field)
        prompt_lengths = check_prompt_lengths(eval_rows.rows, chat_format, max_length, config.evaluation.max_tokens)

    plans: tuple[inspect_eval.PlannedTask, ...] = ()
    tasks: tuple[inspect_eval.TaskSpec, ...] = ()
    n_samples = len(eval_rows.rows) if eval_rows else 0
    if evaluator == "inspect":
        tasks = task_specs(config)
        plans = inspect_eval.check_tasks(tasks)
        n_samples = sum(len(plan.keys) for plan in plans)
        lines.append(
            "evaluation tasks: "
            + ", ".join(
                f"{plan.name} ({_count(len(plan.keys), 'sample')}; {plan.scoring.describe()})" for plan in plans
            )
        )
    labels = evaluation.closed_label_set([row.target for row in eval_rows.rows]) if eval_rows else ()
    if labels:
        lines.append(f"labels: {', '.join(labels)}")

    if config.init_from and not served.unchecked:
        state = backend.state_info(config.init_from)
        if state.base_model != config.base_model:
            raise ConfigurationError(
                f"init_from: {config.init_from} is an adapter of {state.base_model}, not of base_model "
                f"{config.base_model}"
            )
        if state.lora_rank is not None and state.lora_rank != config.lora_rank:
            raise ConfigurationError(
                f"init_from: {config.init_from} has rank {state.lora_rank} and lora_rank is {config.lora_rank}. "
                f"Write lora_rank={state.lora_rank}; the rank of an adapter cannot change."
            )

    rate = starting_learning_rate(config)
    steps = config.steps_per_round
    warmup = config.resolved_warmup_steps if warmup_steps is None else warmup_steps
    lines.append(
        f"plan: up to {_count(config.max_rounds, 'round')} of {_count(steps, 'step')} of "
        f"{_count(config.batch_size, 'row')}, LoRA rank "
        f"{config.lora_rank}, learning rate {rate:.3g} (x{config.lr_decay:g} after a missed round, "
        f"warm-up {_count(warmup, 'step')}), until the validation score reaches {config.eval_threshold:g}"
    )
    estimate = token_sizes.estimate(
        config,
        loader,
        evaluation_rows=eval_rows.rows if eval_rows else (),
        prompt_lengths=prompt_lengths,
        plans=plans,
        train=train.rows,
        pool=pool.rows if pool else (),
    )
    lines += cost_estimate.describe(estimate, config.prices.get(config.base_model))
    return Prepared(
        config=config,
        served=served,
        service=backend.kind,
        chat_format=chat_format,
        loader=loader,
        train=train,
        pool=pool,
        evaluation_rows=eval_rows,
        test=data.test,
        evaluator=evaluator,
        tasks=tasks,
        task_digests={plan.name: plan.digest for plan in plans},
        n_samples=n_samples,
        labels=labels,
        learning_rate=rate,
        warmup_steps=warmup,
        on_training_data=on_training_data,
        near_matches=data.near,
        estimate=estimate,
        lines=tuple(lines),
        warnings=tuple(warnings),
        mask_preview=loader.mask_preview(next(row for row in train.rows if loader.can_train(row))),
    )


def near_matches_told(matches: Sequence[NearMatch]) -> list[str]:
    """What a person is told of training rows that hold most of an evaluation or test item: of those left out, and of
    those that `allow_overlap` keeps."""
    told = []
    for kept, fate in ((False, "left out of training"), (True, "kept, as overlap is allowed")):
        rows = [match for match in matches if match.kept == kept]
        if rows:
            listed = "\n".join(f"  {line}" for line in first_ten(rows))
            told.append(
                f"{_count(len(rows), 'training row')} with at least 80 % of an evaluation "
                f"{'item' if kept else 'or test item'}'s word sequences {fate} "
                f"(near_matches.jsonl in the run folder):\n{listed}"
            )
    return told


def choose_evaluator(config: TrainingConfig) -> tuple[str, str]:
    """("inspect" or "simple", a note for the terminal when the choice was not the configured one)."""
    wanted = config.evaluation.evaluator
    if wanted == "simple" or inspect_eval.inspect_available():
        return wanted, ""
    if config.eval_tasks:
        raise DependencyError(
            "eval_tasks needs the inspect-ai package, which is not installed: "
            "python -m pip install -r requirements.txt, or use eval_file alone"
        )
    return "simple", " (the built-in one, because the inspect-ai package is not installed)"


def task_specs(config: TrainingConfig) -> tuple[inspect_eval.TaskSpec, ...]:
    """The Inspect tasks of the run; our own for `eval_file` comes first."""
    specs = []
    if config.eval_file:
        arguments: dict[str, Any] = {"eval_file": config.eval_file}
        if config.evaluation.category_field:
            arguments["category_field"] = config.evaluation.category_field
        if config.evaluation.cluster_by:
            arguments["cluster_by"] = config.evaluation.cluster_by
        specs.append(
            inspect_eval.TaskSpec(
                task=inspect_eval.LABELLED_ROWS,
                args=arguments,
                name=EVAL_FILE_TASK,
                cluster_by=config.evaluation.cluster_by,
            )
        )
    for item in config.eval_tasks:
        specs.append(
            inspect_eval.TaskSpec(
                task=item.task,
                args=item.args,
                weight=item.weight,
                threshold=item.threshold,
                category_field=config.evaluation.category_field,
                scorer=item.scorer,
                metric=item.metric,
                reducer=item.reducer,
                cluster_by=config.evaluation.cluster_by,
            )
        )
    return tuple(specs)


def check_prompt_lengths(
    rows: Sequence[data_loader.Row], chat_format: rendering.ChatFormat, max_length: int, max_tokens: int
) -> tuple[int, ...]:
    """The tokens of every evaluation row's prompt.

    Raises `DataError` for rows whose prompt leaves no room for `max_tokens` of reply.
    """
    long = []
    lengths = []
    for row in rows:
        n_prompt = len(chat_format.prompt_tokens([dict(message) for message in row.prompt]))
        lengths.append(n_prompt)
        if n_prompt + max_tokens > max_length:
            long.append(f"  {row.where}: {n_prompt} prompt tokens + evaluation.max_tokens {max_tokens}")
    if long:
        shown = "\n".join(long[:10]) + (f"\n  and {len(long) - 10} more" if len(long) > 10 else "")
        raise DataError(
            f"{len(long)} evaluation rows do not fit the context of {max_length} tokens:\n{shown}\n"
            "Shorten them, lower evaluation.max_tokens, or raise max_seq_length where the model allows it."
        )
    return tuple(lengths)


def starting_learning_rate(config: TrainingConfig) -> float:
    """The first round's base learning rate, recommended by formula when the configuration asks for that."""
    rate = hyperparam_utils.get_recommended_lr(config.base_model) if config.use_recommended_lr else config.learning_rate
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigurationError(f"learning_rate must be a finite number above 0, got {rate!r}")
    return rate


@overload
def _from_here(path: str) -> str: ...
@overload
def _from_here(path: None) -> None: ...
def _from_here(path: str | None) -> str | None:
    """`path` as a person in the working folder would write it: that is what messages show."""
    if path is None:
        return None
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _excerpt(text: str) -> str:
    """The end of a question, where what tells it from others mostly stands."""
    folded = " ".join(text.split())
    return folded if len(folded) <= 110 else f"...{folded[-107:]}"


def target_examples(
    prepared: Prepared, samples: Sequence[evaluation.SampleResult]
) -> tuple[list[tinker.Datum], list[Mapping[str, str]]]:
    """Evaluation targets as weighted examples, for their likelihood, and those left out with the reason.

    From `eval_file` where there is one, else from the samples' own input and target texts.
    """
    data: list[tinker.Datum] = []
    left_out: list[Mapping[str, str]] = []
    loader = data_loader.DataLoader(
        prepared.chat_format, max_seq_length=prepared.loader.max_seq_length, train_on_what="last_assistant_turn"
    )
    rows: list[data_loader.Row] = []
    if prepared.evaluation_rows is not None:
        rows = list(prepared.evaluation_rows.rows)
    else:
        asked: dict[tuple[str, str], evaluation.SampleResult] = {}
        for sample in samples:
            asked.setdefault((sample.task, sample.id), sample)
        for (task, identity), sample in sorted(asked.items()):
            if sample.input.strip() and sample.target.strip():
                turns = (*_prompt_of(sample), {"role": "assistant", "content": sample.target})
                rows.append(
                    data_loader.Row(
                        id=f"{task}:{identity}",
                        messages=turns,
                        text=None,
                        shape="sample",
                        source=task,
                        line=0,
                        category=sample.category,
                        metadata={},
                    )
                )
    for row in rows:
        data += [example.datum for example in loader.render(row)]
    left_out += [{"id": identity, "reason": reason} for identity, reason in loader.dropped.items()]
    return data, left_out


def _prompt_of(sample: evaluation.SampleResult) -> list[dict[str, str]]:
    """The turns that a sample asked, where they are a dialogue that ends on the user, else its input alone."""
    turns = [dict(turn) for turn in sample.turns or ()]
    if not turns or turns[-1]["role"] != "user" or {turn["role"] for turn in turns} - {"system", "user", "assistant"}:
        return [{"role": "user", "content": sample.input}]
    return turns
