"""A run folder's plots and its report for people.

    write_report("runs/<run_id>")   # plots/score.png, plots/loss.png, report.html

The page is one file that needs nothing else: plots are embedded, and whatever came from data or a model is escaped.
A run that is still going, or was interrupted, gets a report of what there is.
"""

from __future__ import annotations

import base64
import io
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cost_estimate
import durable_files
import run_summary
from checkpoint_manager import CheckpointManager
from evaluation import SampleResult
from logger import ROUND_COLUMNS, current_steps, read_events, redact, round_cells, utc_now, visible
from near_matches import told_share
from record_files import first_ten
from report_template import TEMPLATE

_EXAMPLES = 6
_EXAMPLES_OF_CATEGORY = 2
_CATEGORIES = 40
_TEXT_LIMIT = 600
_BLUE, _ORANGE, _GREY = "#2563eb", "#d97706", "#64748b"


def write_report(run_dir: Path | str) -> list[Path]:
    """Write what can be shown of the run and return the files written: the plots there is data for, then `report.html`.

    Only reads the run's records, so it can be called while another process holds the run. Raises `RunNotFoundError`,
    `DataError` (a record is damaged) or `StorageError`.
    """
    manager = CheckpointManager.open(run_dir, lock=False)
    events, note = read_events(manager.metrics_path)
    summary = manager.load_summary() or {}
    config = manager.load_config()
    state = manager.load_state()
    rounds = summary.get("rounds") or manager.round_results()
    threshold = summary.get("threshold", config.get("eval_threshold"))
    scores_are = summary.get("scores_are") or state.get("scores_are")
    samples = {row["round"]: manager.load_samples(row["round"]) for row in rounds}
    selections = {row["round"]: manager.load_selection(row["round"]) for row in rounds}

    written: list[Path] = []
    plots: dict[str, str] = {}
    for name, data in (
        ("score", score_plot(rounds, threshold, scores_are)),
        ("loss", loss_plot(current_steps(events))),
    ):
        if data is not None:
            path = manager.run_dir / "plots" / f"{name}.png"
            with durable_files.storage_errors(path.parent, "make"):
                path.parent.mkdir(exist_ok=True)
            durable_files.write_atomic(path, data)
            written.append(path)
            plots[name] = "data:image/png;base64," + base64.b64encode(data).decode("ascii")

    shown = [row["round"] for row in rounds if samples[row["round"]]]
    last = samples[shown[-1]] if shown else []
    weak = _weaknesses(last)
    in_weak = {key for part in weak for key in part["keys"]}
    page = _render(
        run_id=manager.run_id,
        written_at=utc_now(),
        scores_are=scores_are,
        facts=_facts(summary, state, threshold),
        plots=plots,
        columns=[*ROUND_COLUMNS, "reason"],
        rounds=[
            {"best": row["round"] == summary.get("best_round"), "cells": [*round_cells(row), row.get("reason") or ""]}
            for row in rounds
        ],
        leads=[str(lead["text"]) for lead in summary.get("leads") or ()],
        costs=_cost_table(rounds, summary.get("taken_back")),
        tasks=_task_table(rounds),
        answered=_answered(rounds),
        categories=category_table(samples),
        examples_round=shown[-1] if shown else None,
        weaknesses=weak,
        examples=_examples([sample for sample in last if sample.key not in in_weak]),
        selections=[_selection_counts(number, rows) for number, rows in selections.items() if rows],
        notes=[
            *_near_match_notes(manager.load_near_matches()),
            *_selection_notes(events),
            *([note] if note else []),
            *manager.notes,
        ],
        config=durable_files.to_json(config, indent=2),
    )
    path = manager.run_dir / "report.html"
    durable_files.write_atomic(path, page)
    return [*written, path]


def score_plot(
    rounds: Sequence[Mapping[str, Any]], threshold: float | None, scores_are: str | None = None
) -> bytes | None:
    """PNG of the validation score by round with its 95 % interval and the target; None without a scored round.

    `scores_are` says what the scores are when they are not validation scores ("on training data").
    """
    scored = [row for row in rounds if row.get("score") is not None]
    if not scored:
        return None
    figure, axes = _figure()
    numbers = [row["round"] for row in scored]
    sure = [row for row in scored if row.get("ci_low") is not None and row.get("ci_high") is not None]
    axes.vlines(
        [row["round"] for row in sure],
        [row["ci_low"] for row in sure],
        [row["ci_high"] for row in sure],
        color=_BLUE,
        alpha=0.35,
        linewidth=6,
        label="95 % interval" if sure else None,
    )
    axes.plot(
        numbers,
        [row["score"] for row in scored],
        "o-",
        color=_BLUE,
        label=f"score {scores_are}" if scores_are else "validation score",
    )
    lenient = [row for row in scored if row.get("lenient_score") is not None]
    if lenient:
        axes.plot(
            [row["round"] for row in lenient],
            [row["lenient_score"] for row in lenient],
            "o:",
            color=_GREY,
            markersize=4,
            label="lenient score",
        )
    if threshold is not None:
        axes.axhline(threshold, color=_ORANGE, linestyle="--", label=f"target {threshold:g}")
    axes.set_xticks(numbers, ["baseline" if number == 0 else str(number) for number in numbers])
    axes.set_xlim(min(numbers) - 0.4, max(numbers) + 0.4)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("round")
    axes.set_ylabel("score")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return _png(figure)


def loss_plot(steps: Sequence[Mapping[str, Any]]) -> bytes | None:
    """PNG of the loss per trained token by step, learning rate on a second axis; None without a step.

    `steps` holds one event a step, as `logger.current_steps` gives them, with `step`, `loss`, and `lr` and `round`
    where known.
    """
    if not steps:
        return None
    figure, axes = _figure()
    numbers = [event["step"] for event in steps]
    few = {"marker": "o", "markersize": 3} if len(steps) < 60 else {}
    axes.plot(numbers, [event["loss"] for event in steps], color=_BLUE, label="loss per trained token", **few)
    for before, after in itertools.pairwise(steps):
        if before.get("round") != after.get("round"):
            axes.axvline((before["step"] + after["step"]) / 2, color=_GREY, linestyle=":", linewidth=1)
    axes.set_xlabel("optimizer step (dotted: a new round)")
    axes.set_ylabel("loss per trained token", color=_BLUE)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    rated = [event for event in steps if event.get("lr") is not None]
    if rated:
        right = axes.twinx()
        right.plot([event["step"] for event in rated], [event["lr"] for event in rated], color=_ORANGE, linewidth=1)
        right.set_ylabel("learning rate", color=_ORANGE)
        right.set_ylim(bottom=0)
        right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        right.spines["top"].set_visible(False)
    return _png(figure)


def category_table(samples: Mapping[int, Sequence[SampleResult]]) -> dict[str, Any] | None:
    """The figures of each category in each round, the surest weakness of the last round first; None without categories.

    `{"rounds": [...], "rows": [{"category", "cells": [an item of run_summary.category_scores or None a round]}],
    "left_out": count}`.
    """
    by_round = {number: scores for number, rows in samples.items() if (scores := run_summary.category_scores(rows))}
    if not by_round:
        return None
    numbers = list(by_round)
    names = list(dict.fromkeys(name for number in reversed(numbers) for name in by_round[number]))
    rows = [{"category": name, "cells": [by_round[n].get(name) for n in numbers]} for name in names[:_CATEGORIES]]
    return {"rounds": numbers, "rows": rows, "left_out": len(names) - len(rows)}


def _weaknesses(samples: Sequence[SampleResult]) -> list[dict[str, Any]]:
    """The weakest categories of a round, each with a few wrong replies."""
    scores, members = run_summary.category_scores(samples), run_summary.by_category(samples)
    found = []
    for name in run_summary.weakest(scores):
        wrong = sorted((s for s in members[name] if s.score < 1), key=lambda sample: (sample.score, sample.key))
        shown = wrong[:_EXAMPLES_OF_CATEGORY]
        found.append(
            {"name": name, **scores[name], "examples": _examples(shown), "keys": [sample.key for sample in shown]}
        )
    return found


def _answered(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """For every round whose score needs it: the score of the samples that did not fail, those without a grade, and the
    share of replies cut at the limit."""
    lines = []
    for row in rounds:
        parts = []
        if row.get("errors") and row.get("answered_score") is not None:
            parts.append(
                f"{row['answered_score']:.3f} of the {row['n'] - row['errors']} answered, {row['errors']} of "
                f"{row['n']} failed"
            )
        if row.get("ungraded"):
            parts.append(f"{row['ungraded']} without a grade, counted as not correct")
        if row.get("truncated"):
            parts.append(f"{row['truncated']:.1%} of the replies cut at the limit of tokens")
        if parts:
            lines.append(f"{'Baseline' if row['round'] == 0 else 'Round ' + str(row['round'])}: {'; '.join(parts)}.")
    return lines


def _facts(summary: Mapping[str, Any], state: Mapping[str, Any], threshold: float | None) -> list[tuple[str, str]]:
    """The figures at the head of the page, as (name, value); what is not known is left out."""
    best, best_round = summary.get("best_score"), summary.get("best_round")
    named = "baseline" if best_round == 0 else f"round {best_round}"
    exit_code = summary.get("exit_code")
    outcome = {0: "target met", 3: "target not met"}.get(exit_code) if exit_code is not None else None
    facts = {
        "status": summary.get("status") or state.get("status"),
        "outcome": outcome,
        "best score": None if best is None else f"{best:.3f} ({named})",
        "scores are": summary.get("scores_are") or state.get("scores_are"),
        "baseline": None if summary.get("baseline_score") is None else f"{summary['baseline_score']:.3f}",
        "target": None if threshold is None else f"{threshold:g}",
        "model": state.get("model"),
        "final checkpoint": summary.get("final_checkpoint"),
        "tokens": _amounts(summary.get("tokens")),
        "cost": _amounts(summary.get("cost")),
        "wall time": None if summary.get("wall_s") is None else f"{summary['wall_s']:.0f} s",
        "started": state.get("started_at"),
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _amounts(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_amount(part)}" for name, part in value.items() if part is not None) or None
    return None if value is None else _amount(value)


def _amount(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _task_table(rounds: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows (round, task, score, 95 % interval, n, errors, score of the answered, what the score is) where an evaluation
    has several tasks."""
    table: list[tuple[str, ...]] = []
    for row in rounds:
        if len(row.get("tasks") or ()) > 1:
            for task in row["tasks"]:
                number, score, interval, _, n, errors, *_ = round_cells({**task, "round": row["round"]})
                answered = task.get("answered_score")
                shown = "-" if answered is None else f"{answered:.3f}"
                table.append(
                    (number, str(task.get("task")), score, interval, n, errors, shown, task.get("metric") or "-")
                )
    return table


def _cost_table(
    rounds: Sequence[Mapping[str, Any]], taken_back: Mapping[str, Any] | None = None
) -> list[tuple[str, ...]]:
    """Rows (round, tokens trained, prefilled, sampled, dollars) of the rounds, of those taken back, and their sum."""
    counted = [row for row in rounds if row.get("tokens")]
    table = [(round_cells(row)[0], row["tokens"], row.get("cost")) for row in counted]
    if taken_back and any(taken_back["tokens"].values()):
        table.append(("taken back", taken_back["tokens"], taken_back["cost"]))
    if table:
        known = [cost for _, _, cost in table if cost is not None]
        whole = run_summary.add_tokens(tokens for _, tokens, _ in table)
        table.append(("together", whole, sum(known) if len(known) == len(table) else None))
    return [
        (
            name,
            *(f"{tokens[kind]:,}" for kind in ("train", "prefill", "sample")),
            "-" if cost is None else cost_estimate.dollars(cost),
        )
        for name, tokens, cost in table
    ]


def _examples(samples: Sequence[SampleResult]) -> list[dict[str, Any]]:
    """A few samples that went wrong: wrong replies first, then ones that failed, in the order of ids."""
    wrong = sorted((s for s in samples if s.score < 1), key=lambda s: (s.error is not None, s.score, s.key))
    return [
        {
            "id": sample.id,
            "task": sample.task,
            "category": sample.category,
            "input": _short(sample.input),
            "target": _short(sample.target),
            "output": _short(sample.output),
            "cut": sample.stop_reason == "max_tokens",
            "error": sample.error,
            "ungraded": sample.grade_missing,
        }
        for sample in wrong[:_EXAMPLES]
    ]


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]} … ({len(text) - _TEXT_LIMIT} characters more)"


def _near_match_notes(matches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which training rows hold most of an evaluation or test item, left out and kept: the first ten and a count."""
    notes = []
    for kept, fate in ((False, "left out of training"), (True, "kept, as overlap is allowed")):
        rows = [row for row in matches if bool(row.get("kept")) == kept]
        shares = [told_share(row["score"], bool(row.get("without_shared_sentences"))) for row in rows]
        told = [
            f"{row['where']} holds {share} of {row['item']} ({row['item_where']})"
            for row, share in zip(rows, shares, strict=True)
        ]
        head = f"{len(rows)} training rows with at least 80 % of an evaluation or test item's word sequences {fate}"
        notes += [f"{head} (near_matches.jsonl): {'; '.join(first_ten(told))}"] if rows else []
    return notes


def _selection_notes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the selection of each round had to say; of a round chosen twice the last."""
    by_round = {event.get("round"): event.get("notes") or [] for event in events if event.get("event") == "selection"}
    return [f"round {number}: {note}" for number, notes in sorted(by_round.items()) for note in notes]


def _selection_counts(number: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    reasons = Counter(_kind_of_reason(str(row.get("why") or "no reason given")) for row in rows)
    return {
        "round": number,
        "rows": len(rows),
        "distinct": len({str(row.get("id")) for row in rows}),
        "reasons": reasons.most_common(20),
    }


def _kind_of_reason(why: str) -> str:
    # Reasons name the sample and its similarity; the table counts the kinds.
    return re.sub(r"(\bsample) \S.*$", r"\1", re.sub(r"\s*\(.*$", "", why)).strip()


def _render(**values: Any) -> str:
    import jinja2

    def shown(value: Any) -> str:
        return redact(visible(str(value)))

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    # Runs on every value put into the page; autoescape then makes markup of it harmless.
    environment.filters["shown"] = shown
    return environment.from_string(TEMPLATE).render(**values)


def _figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(7.2, 3.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
