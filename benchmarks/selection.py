"""Which rows to train on next: the selection strategies against random choice, by test accuracy, through the real loop.

    python benchmarks/selection.py                             # the small model, 24 seeds
    python benchmarks/selection.py --model smollm2 --seeds 3   # SmolLM2-135M-Instruct
    python benchmarks/selection.py --report-only               # print what the results file holds

Every run is `run_loop` on the local engine: a baseline, a first round of random rows, and rounds chosen by the strategy
from what the one before got wrong. Strategies differ in nothing but the choice: a seed fixes files, adapter and first
round, and all train the same number of rows (the ratio of trained tokens is printed). What is scored is the checkpoint
that the run names as its best, on a test set that no run saw. Control: `random` without the label guard.

Four conditions, of rows made by `selection_data.py` and, for SmolLM2, the demo's tickets:

- imbalanced: three of eight labels make up 3 % of training rows and pool each; evaluation and test are even
- mixed: two tasks, one of which is a fifth of training rows and pool (which one alternates with the seed). The second
  task is the demo's tickets; for the small model, which cannot learn these within such a run, requests of another kind
- wrong labels: 15 % of the labels in training rows and pool are wrong
- clean: even and right

Finished runs are kept in the results file and not run again, so that the benchmark can be stopped and taken up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Read when torch is imported: spinning threads of one process would slow the others many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parent.parent
for _folder in (ROOT, ROOT / "benchmarks"):
    sys.path.insert(0, str(_folder))

from selection_data import DESK, HOME, draw_requests  # noqa: E402 (found beside this file)

CONTROL = "random"
# name: (selection.strategy, selection.label_guard)
STRATEGIES = {
    CONTROL: ("random", False),
    "balanced_failures": ("balanced_failures", True),
    "balanced": ("balanced", True),
    "failures": ("failures", True),
    "random with guard": ("random", True),
    "none": ("none", False),
}
MODELS = {
    "small": {
        "base_model": str(ROOT / "data" / "base_model"),
        "lora_rank": 8,
        # Above 3e-3 some runs lose in the third round what they had learned, whatever the rows. After 40 steps the
        # model knows about half: a guard or a miner that asks what it knows has something to go by.
        "learning_rate": 3e-3,
        "steps_per_round": 40,
        "batch_size": 8,
        "per_label": 10,
        "supply": (160, 600),
        "second": "desk",
    },
    "smollm2": {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "lora_rank": 8,
        "learning_rate": 1e-3,
        "steps_per_round": 8,
        "batch_size": 8,
        "per_label": 5,
        "supply": (120, 400),
        "second": "tickets",
    },
}
Row = dict[str, Any]
Files = dict[str, list[Row]]


def imbalanced(chance: random.Random, sizes: tuple[int, int], per_label: int, **_: Any) -> Files:
    rare = set(chance.sample(list(HOME), 3))

    def counts(size: int) -> dict[str, int]:
        few = max(1, round(0.03 * size))
        return {label: few if label in rare else round((size - 3 * few) / (len(HOME) - 3)) for label in HOME}

    return _requests(chance, HOME, counts(sizes[0]), counts(sizes[1]), per_label)


def clean(chance: random.Random, sizes: tuple[int, int], per_label: int, **_: Any) -> Files:
    return _requests(chance, HOME, _even(HOME, sizes[0]), _even(HOME, sizes[1]), per_label)


def wrong_labels(chance: random.Random, sizes: tuple[int, int], per_label: int, **_: Any) -> Files:
    files = clean(chance, sizes, per_label)
    for name in ("train", "pool"):
        for row in chance.sample(files[name], round(0.15 * len(files[name]))):
            wrong = chance.choice([label for label in HOME if label != row["category"]])
            row["messages"] = [*row["messages"][:-1], {"role": "assistant", "content": wrong}]
            row["category"] = wrong
    return files


def mixed(chance: random.Random, sizes: tuple[int, int], per_label: int, *, seed: int, second: str) -> Files:
    share = 0.2 if seed % 2 else 0.8
    first_sizes = (round(share * sizes[0]), round(share * sizes[1]))
    files = clean(chance, first_sizes, per_label)
    if second == "tickets":
        supply = _tickets("train") + _tickets("pool")
        chance.shuffle(supply)
        other = {
            "train": supply[: sizes[0] - first_sizes[0]],
            "pool": supply[sizes[0] - first_sizes[0] :][: sizes[1] - first_sizes[1]],
            "eval": _evenly(_tickets("eval"), per_label, chance),
            "test": _tickets("test"),
        }
    else:
        rest = [_even(DESK, size - first) for size, first in zip(sizes, first_sizes, strict=True)]
        other = _requests(chance, DESK, *rest, 2 * per_label, name="d")
    for name in ("train", "pool"):
        files[name] += other[name]
        chance.shuffle(files[name])
    return {**files, "second_eval": other["eval"], "second_test": other["test"]}


CONDITIONS: dict[str, Callable[..., Files]] = {
    "imbalanced": imbalanced,
    "mixed": mixed,
    "wrong labels": wrong_labels,
    "clean": clean,
}


def _even(labels: Collection[str], size: int) -> dict[str, int]:
    return dict.fromkeys(labels, max(1, round(size / len(labels))))


def _requests(
    chance: random.Random,
    cores: Mapping[str, tuple[str, ...]],
    train: Mapping[str, int],
    pool: Mapping[str, int],
    per_label: int,
    *,
    name: str = "r",
) -> Files:
    # Training rows and pool are drawn together, so that no request is in both.
    both = draw_requests(chance, cores, per_label={k: train[k] + pool[k] for k in cores}, fillers="train", name=name)
    files: Files = {"train": [], "pool": []}
    taken: Counter[str] = Counter()
    for row in both:
        taken[row["category"]] += 1
        files["train" if taken[row["category"]] <= train[row["category"]] else "pool"].append(row)
    held = draw_requests(chance, cores, per_label=dict.fromkeys(cores, per_label + 20), fillers="held", name=f"{name}h")
    files["eval"] = _evenly(held, per_label, chance)
    chosen = {row["id"] for row in files["eval"]}
    files["test"] = [row for row in held if row["id"] not in chosen]
    return files


def _evenly(rows: Sequence[Row], per_label: int, chance: random.Random) -> list[Row]:
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row["category"], []).append(row)
    return [row for of_label in by_label.values() for row in chance.sample(of_label, min(per_label, len(of_label)))]


def _tickets(name: str) -> list[Row]:
    lines = (ROOT / "data" / f"tickets_{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def run_one(job: tuple[str, str, str, int]) -> dict[str, Any]:
    """One run of the loop and its test score; the result row."""
    model, condition, strategy, seed = job
    os.environ["TINKER_MOCK"] = "1"
    _take_a_core()
    import torch

    import config_schema
    import trainer_with_eval

    torch.set_num_threads(1)
    settings = dict(MODELS[model])
    per_label, sizes, second = (settings.pop(key) for key in ("per_label", "supply", "second"))
    chance = random.Random(f"{condition}/{seed}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {}
        for file, rows in CONDITIONS[condition](chance, sizes, per_label, seed=seed, second=second).items():
            files[file] = folder / f"{file}.jsonl"
            files[file].write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
        choice, guard = STRATEGIES[strategy]
        tasks = []
        if "second_eval" in files:
            task = f"{ROOT / 'inspect_eval.py'}@labelled_rows"
            tasks = [{"task": task, "args": {"eval_file": str(files["second_eval"]), "category_field": "category"}}]
        config = config_schema.TrainingConfig(
            **settings,
            train_file=str(files["train"]),
            eval_file=str(files["eval"]),
            eval_tasks=tasks,
            lr_decay=0.9,
            warmup_steps=4,
            save_every=1000,
            max_rounds=3,
            eval_threshold=1.0,
            seed=seed,
            evaluation={
                "evaluator": "inspect" if tasks else "simple",
                "max_tokens": 6,
                "category_field": "category",
            },
            selection={"strategy": choice, "pool_file": str(files["pool"]), "label_guard": guard},
        )
        summary = asyncio.run(trainer_with_eval.run_loop(config, runs_dir=folder / "runs", console=False))
        run_dir = folder / "runs" / summary["run_id"]
        tests = [files[key] for key in ("test", "second_test") if key in files]
        scores = asyncio.run(test_scores(config, run_dir, summary["final_checkpoint"], tests))
    return {
        "model": model,
        "condition": condition,
        "strategy": strategy,
        "seed": seed,
        "test": statistics.fmean(scores),
        "test_by_task": scores,
        "validation": [row["score"] for row in summary["rounds"]],
        "best_round": summary["best_round"],
        "train_tokens": summary["tokens"]["train"],
        "seconds": time.monotonic() - started,
    }


def _take_a_core() -> None:
    """Keep this process, and so the engine in it, to one core: each of several processes then has its own."""
    number = multiprocessing.current_process()._identity
    if number and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {(number[0] - 1) % (os.cpu_count() or 1)})


async def test_scores(config: Any, run_dir: Path, checkpoint: str | None, tests: Iterable[Path]) -> list[float]:
    """Accuracy of the run's checkpoint (None: the base model) on each test file."""
    import chat_sampler
    import data_loader
    import rendering
    import simple_eval
    import tinker_backend

    scores = []
    with tinker_backend.connect(run_dir / "engine") as backend:
        chat_format = rendering.get_chat_format(config.base_model, backend.get_tokenizer(config.base_model))
        client = await backend.create_sampling_client(
            model_path=checkpoint, base_model=None if checkpoint else config.base_model
        )
        sampler = chat_sampler.ChatSampler(client, chat_format, max_tokens=config.evaluation.max_tokens)
        for path in tests:
            rows = data_loader.load_rows(path, purpose="eval").rows
            scores.append((await simple_eval.run_simple_evaluation(sampler, rows)).score)
    return scores


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval by Student's t."""
    from scipy import stats

    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return mean, -math.inf, math.inf
    half = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def report(rows: Sequence[Mapping[str, Any]], model: str) -> None:
    """Print, for each condition, the control's accuracy and each strategy's paired difference to it in points."""
    found = {(row["condition"], row["strategy"], row["seed"]): row for row in rows if row["model"] == model}
    print(f"{model}: test accuracy of `{CONTROL}` without the label guard, and paired differences to it in points")
    for condition in CONDITIONS:
        control = {seed: row for (of, name, seed), row in found.items() if (of, name) == (condition, CONTROL)}
        if not control:
            continue
        mean = statistics.fmean(row["test"] for row in control.values())
        print(f"{condition}: {CONTROL} {mean:.3f} (n = {len(control)} seeds)")
        for strategy in STRATEGIES:
            pairs = [
                (row, control[seed])
                for (of, name, seed), row in sorted(found.items())
                if (of, name) == (condition, strategy) and seed in control and strategy != CONTROL
            ]
            if not pairs:
                continue
            gain, low, high = interval([100 * (row["test"] - other["test"]) for row, other in pairs])
            tokens = sum(row["train_tokens"] for row, _ in pairs) / sum(other["train_tokens"] for _, other in pairs)
            print(
                f"  {strategy:<18} {gain:+5.1f} [{low:+.1f}, {high:+.1f}] over {len(pairs)} seeds; "
                f"trained tokens x {tokens:.3f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--seeds", type=int, default=24, help="seeds, from 1 (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once (default: one a core)")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=[CONTROL, "balanced_failures"])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--results", type=Path, default=Path("selection_results.jsonl"), help="kept between calls")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    done = {(row["model"], row["condition"], row["strategy"], row["seed"]) for row in rows}
    jobs = [
        (args.model, condition, strategy, seed)
        for seed in range(1, args.seeds + 1)
        for condition in args.conditions
        for strategy in args.strategies
    ]
    jobs = [] if args.report_only else [job for job in jobs if job not in done]
    if jobs:
        with multiprocessing.get_context("spawn").Pool(args.jobs) as pool, args.results.open("a") as file:
            for number, row in enumerate(pool.imap_unordered(run_one, jobs), start=1):
                rows.append(row)
                file.write(f"{json.dumps(row)}\n")
                file.flush()
                named = f"{row['condition']}, {row['strategy']}, seed {row['seed']}"
                print(f"[{number}/{len(jobs)}] {named}: {row['test']:.3f} ({row['seconds']:.0f} s)", file=sys.stderr)
    report(rows, args.model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
