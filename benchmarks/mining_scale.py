"""How long the contamination check and mining take over a million rows, and how much memory.

    python benchmarks/mining_scale.py                     # about two minutes on two cores
    python benchmarks/mining_scale.py --rows 100000

Writes a pool of made-up rows (300 bytes each, words by Zipf's law, eight labels) into a temporary folder and measures,
each in a process of its own: (1) comparing the pool with 1,000 evaluation items, 20 of which stand in it nearly word
for word; (2) choosing 1,024 rows for a round after an evaluation with 200 failures, the first call (which builds the
index) and the second. Targets: 30 s, and 60 s with at most 3 GB. Loading the file is not part of either.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contamination import compare
from data_selector import DataSelector
from evaluation import SampleResult
from overlap import prompt_key
from row_files import load_rows
from row_supply import RowSupply

ITEMS, COPIED, FAILURES, CHOSEN = 1000, 20, 200, 1024
WORDS_OF_A_ROW, VOCABULARY, LABELS = 46, 50_000, 8
TARGETS = {"contamination": (30.0, None), "mining": (60.0, 3.0)}


@dataclass(frozen=True)
class Settings:
    strategy: str = "balanced_failures"
    hard_fraction: float = 0.25
    max_repeats: int = 1
    label_guard: bool = True
    embedding_model: str | None = None


def questions(count: int, seed: int) -> Iterator[str]:
    """Questions of random words, the k-th commonest word with a probability in proportion to 1 / (k + 3)."""
    syllables = [a + b for a in "bdfglmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "il", "or", "ut")]
    spelling = np.random.default_rng(0)
    words = ["".join(syllables[i] for i in spelling.integers(len(syllables), size=size)) for size in (1, 2, 3)
             for _ in range(VOCABULARY // 3)]  # fmt: skip
    chances = 1 / (np.arange(len(words)) + 3.0)
    cumulated = np.cumsum(chances / chances.sum())
    rng = np.random.default_rng(seed)
    for start in range(0, count, 1000):
        size = min(1000, count - start)
        drawn = np.minimum(np.searchsorted(cumulated, rng.random(size * WORDS_OF_A_ROW)), len(words) - 1)
        for row in drawn.reshape(size, WORDS_OF_A_ROW).tolist():
            yield " ".join(words[number] for number in row).capitalize() + "?"


def write_files(folder: Path, rows: int) -> None:
    items = list(questions(ITEMS, seed=2))
    with (folder / "pool.jsonl").open("w") as file:
        for number, question in enumerate(questions(rows, seed=1)):
            asked = f"Please tell me: {items[number]}" if number < COPIED else question
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"label {number % LABELS}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    with (folder / "eval.jsonl").open("w") as file:
        for number, question in enumerate(items):
            file.write(json.dumps({"input": question, "target": f"label {number % LABELS}"}) + "\n")
    with (folder / "train.jsonl").open("w") as file:
        for number, question in enumerate(questions(ITEMS, seed=3)):
            file.write(json.dumps({"question": question, "answer": f"label {number % LABELS}"}) + "\n")


def cpu_seconds() -> float:
    """Of this process and those it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def contamination(folder: Path) -> str:
    pool, items = load_rows(folder / "pool.jsonl", purpose="train"), load_rows(folder / "eval.jsonl", purpose="eval")
    started, spent = time.perf_counter(), cpu_seconds()
    supply = RowSupply(pool.rows)
    same = set(supply.asking({prompt_key(item) for item in items.rows}).tolist())
    found = compare(supply, items.rows, same)
    seconds, spent = time.perf_counter() - started, cpu_seconds() - spent
    assert len(found.near) == COPIED, f"{len(found.near)} of {COPIED} copies found"
    assert found.nearest is not None
    told = f"{len(found.near)} of {COPIED} copies found, nearest of the rest {found.nearest[2]:.2f}"
    return f"{seconds:.1f} s ({spent:.1f} s CPU), {told}"


def mining(folder: Path) -> str:
    train, pool, items = (
        load_rows(folder / f"{name}.jsonl", purpose="eval" if name == "eval" else "train").rows
        for name in ("train", "pool", "eval")
    )
    samples = [
        SampleResult("eval_file", item.id, 1, item.question, item.target, "", float(number >= FAILURES))
        for number, item in enumerate(items)
    ]
    started, spent = time.perf_counter(), cpu_seconds()
    selector = DataSelector(train, pool, items, selection_config=Settings(), seed=1)
    chosen = selector.select(round=2, count=CHOSEN, seen={}, samples=samples, row_losses={})
    first, spent = time.perf_counter() - started, cpu_seconds() - spent
    started = time.perf_counter()
    losses = {row.row.id: 2.0 for row in chosen.rows}
    selector.select(round=2, count=CHOSEN, seen={}, samples=samples, row_losses=losses)
    again = time.perf_counter() - started
    near = sum(row.why.startswith("nearest") for row in chosen.rows)
    told = f"{len(chosen.rows)} rows, {near} nearest to failures"
    return f"{first:.1f} s ({spent:.1f} s CPU), then {again:.1f} s with the label guard; {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the pool (default: %(default)s)")
    parser.add_argument("--phase", choices=sorted(TARGETS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        told = {"contamination": contamination, "mining": mining}[args.phase](args.folder)
        own, helpers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        peak = (own.ru_maxrss + helpers.ru_maxrss) / 1e6
        seconds, memory = TARGETS[args.phase]
        limit = f"{seconds:g} s" + (f", {memory:g} GB" if memory else "")
        print(
            f"{args.phase}: {told}; peak of all processes {peak:.2f} GB (target at a million rows: {limit})", flush=True
        )
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, args.rows)
        print(f"{args.rows:,} rows, {(folder / 'pool.jsonl').stat().st_size / 1e6:.0f} MB", flush=True)
        for phase in sorted(TARGETS):
            subprocess.run([sys.executable, __file__, "--phase", phase, "--folder", name], check=True)


if __name__ == "__main__":
    main()
