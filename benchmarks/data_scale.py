"""Data at scale: a million training rows (about 300 MB of JSONL) loaded, checked, read, and the first round begun.

    python benchmarks/data_scale.py
    python benchmarks/data_scale.py --rows 100000 --shape prompt
    python benchmarks/data_scale.py --only load,datasets

Each part runs in a process of its own and is printed with its wall-clock seconds and the peak memory of its whole
process tree. `load` finds faults, exact copies and conflicting answers, then reads every row once; `datasets` is
`datasets.load_dataset("json")` and the same reading, without any of these checks, in a fresh cache; `round` is
everything from the file to a rendered first round of 10 steps of 8 rows, once the program and its tokenizer are loaded
(comparing the rows with evaluation items has a limit of its own).
Aims on two processors: load under 10 s and 1 GB, a round within 15 s.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

ROWS, STEPS, BATCH = 1_000_000, 10, 8
PARTS = ("load", "datasets", "round")
AIMS = {"load_s": 10.0, "load_mb": 1000.0, "round_s": 15.0}
WORDS = (ROOT / "README.md").read_text(encoding="utf-8").split()


def write_rows(path: Path, rows: int, shape: str, seed: int = 1) -> None:
    """Invented questions of about 30 words; one row in 20 is an exact copy of the one before it, one in 100 repeats its
    question with another answer."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        asked, line = "", ""
        for number in range(rows):
            if number % 20 == 19:
                file.write(line)
                continue
            if number % 100 != 50:
                asked = f"{number}: " + " ".join(rng.choices(WORDS, k=26))
            answer = " ".join(rng.choices(WORDS, k=6))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            record: Any = {"messages": turns} if shape == "messages" else {"prompt": asked, "completion": answer}
            line = json.dumps(record) + "\n"
            file.write(line)


# Parts: each is called in a fresh process and returns seconds by name.


def load(train: Path) -> dict[str, Any]:
    started = time.perf_counter()
    from row_files import load_rows

    imported = time.perf_counter()
    spent = time.process_time()
    loaded = load_rows(train, purpose="train")
    spent = time.process_time() - spent
    ended = time.perf_counter()
    read = sum(1 for _ in loaded.rows)
    figures = {"import": imported - started, "load": ended - imported, "iterate": time.perf_counter() - ended}
    note = f"{loaded.describe()}; {len(loaded.conflicts)} conflicts; {read} rows read; the load took this process "
    return {"seconds": figures, "note": note + f"{spent:.1f} s of processor time"}


def datasets(train: Path) -> dict[str, Any]:
    started = time.perf_counter()
    import datasets as library

    imported = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        loaded = library.load_dataset("json", data_files=str(train), split="train", cache_dir=cache)
        ended = time.perf_counter()
        read = sum(1 for _ in loaded)
        figures = {"import": imported - started, "load": ended - imported, "iterate": time.perf_counter() - ended}
    return {"seconds": figures, "note": f"{read} rows read"}


def round(train: Path) -> dict[str, Any]:
    import base_models
    import data_loader
    import rendering
    from config_groups import SelectionConfig
    from data_selector import DataSelector

    figures: dict[str, float] = {}
    last = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        figures[name], last = now - last, now

    folder = ROOT / "data" / "base_model"
    chat_format = rendering.get_chat_format(str(folder), base_models.load_tokenizer(folder), model_folder=folder)
    loader = data_loader.DataLoader(chat_format, max_seq_length=2048)
    data_loader.make_datum(rendering.TokenSequence((1, 2), (0.0, 1.0)))  # loads what making one needs
    lap("program")
    rows = data_loader.load_run_data(train).train.rows
    lap("load")
    stats = loader.check(rows)
    lap("check")
    selector = DataSelector(
        loader.usable(rows), [], [], selection_config=SelectionConfig(), seed=1, can_train=loader.can_train
    )
    chosen = [row.row for row in selector.select(round=1, count=STEPS * BATCH, seen={}, samples=()).rows]
    lap("select")
    tokens = 0
    for step in range(STEPS):
        batch = data_loader.batch_rows(chosen, batch_size=BATCH, seed=1, round=1, step_in_round=step)
        tokens += sum(example.n_tokens for row in batch for example in loader.render(row))
    lap("render")
    return {"seconds": figures, "note": f"{stats.describe()}; {STEPS} steps of {BATCH} rows, {tokens} tokens"}


# Measuring


def tree_memory(pid: int) -> int:
    """Resident bytes of a process and all below it; 0 when it has ended. Shared pages count once for each process."""
    total, waiting = 0, [pid]
    while waiting:
        folder = Path("/proc") / str(waiting.pop())
        try:
            total += int((folder / "statm").read_text().split()[1]) * 4096
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (OSError, IndexError):
            continue
    return total


def measure(part: str, train: Path) -> dict[str, Any]:
    """Run a part in a process of its own: its figures, the whole's seconds, and the peak of its tree in MB."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, "--part", part, "--file", str(train)], stdout=subprocess.PIPE, text=True
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_memory(process.pid))
        time.sleep(0.05)
    total = time.perf_counter() - started
    assert process.stdout is not None
    answer = process.stdout.read().splitlines()
    if process.returncode or not answer:
        raise SystemExit(f"{part} failed")
    return {**json.loads(answer[-1]), "total": total, "mb": peak / 1e6}


def tell(part: str, result: dict[str, Any]) -> None:
    laps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["seconds"].items())
    print(f"{part:<9} {result['total']:6.1f} s, peak {result['mb']:5.0f} MB  ({laps})\n          {result['note']}")


def verdict(name: str, value: float, unit: str) -> str:
    return f"{value:.1f} {unit} ({'within' if value <= AIMS[name] else 'ABOVE'} {AIMS[name]:g})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of the file (default {ROWS:,})")
    parser.add_argument("--shape", choices=("messages", "prompt"), default="messages", help="shape of the rows")
    parser.add_argument("--file", type=Path, help="measure this file and make none")
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"parts, separated by commas (default: {','.join(PARTS)})"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(globals()[args.part](args.file)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        train = args.file or Path(folder) / "train.jsonl"
        if not args.file:
            write_rows(train, args.rows, args.shape)
        print(f"{train.name}: {train.stat().st_size / 1e6:.0f} MB")
        results = {part: measure(part, train) for part in args.only.split(",")}
    for part, result in results.items():
        tell(part, result)
    if "load" in results:
        loaded = results["load"]
        print(f"load: {verdict('load_s', loaded['seconds']['load'], 's')}, {verdict('load_mb', loaded['mb'], 'MB')}")
    if "round" in results:
        laps = results["round"]["seconds"]
        print(f"a round begins after {verdict('round_s', sum(laps.values()) - laps['program'], 's')}")
    if {"load", "datasets"} <= results.keys():
        ours, theirs = (results[part]["seconds"] for part in ("load", "datasets"))
        both = (theirs["load"] + theirs["iterate"]) / (ours["load"] + ours["iterate"])
        print(f"datasets takes {theirs['load'] / ours['load']:.2f} x as long to load, {both:.2f} x to load and read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
