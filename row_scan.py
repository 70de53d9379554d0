"""One pass over a JSONL file: columns of its rows and all its faults, a large file in parts side by side.

    columns, faults = scan_lines(path, rules)

A large file is cut at line ends; this process reads the first part and a Python process of its own each further one
(`python row_scan.py`, so that nothing of the program is imported again or shared). A small file costs no process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from record_files import Fault
from row_columns import ColumnBuilder, Columns, joined
from row_record import RowRules

# Bytes that are worth a process: starting one takes as long as reading about 10 MB.
PART_BYTES = 24_000_000
MAX_PARTS = 8
_BLOCK_BYTES = 50_000  # lines decoded together; more of them at once leave the processor's cache

Part = tuple[Columns, list[tuple[int, str]], int]
"""Columns, (line, reason) of each fault, and number of lines of a part; lines count from the part's start."""


def scan_lines(path: Path, rules: RowRules, *, part_bytes: int = PART_BYTES) -> tuple[Columns, list[Fault]]:
    """Columns of all rows of the file, exact copies included, and its faults by line. `OSError` as reading raises."""
    bounds = _part_bounds(path, part_bytes)
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        helpers += [_start_helper(path, rules, start, end) for start, end in bounds[1:]]
        parts = [scan_part(path, rules, *bounds[0])]
        for helper, (start, end) in zip(helpers, bounds[1:], strict=True):
            given, _ = helper.communicate()
            # A helper that was killed or could not start has read nothing; its part is then read here.
            parts.append(scan_part(path, rules, start, end) if helper.returncode else pickle.loads(given))
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()
    return _together(parts, rules.source)


def _part_bounds(path: Path, part_bytes: int) -> list[tuple[int, int]]:
    """(start, end) in bytes of parts that begin at a line, as many as there are processors to read them."""
    size = path.stat().st_size
    count = max(1, min(size // part_bytes, _processors(), MAX_PARTS)) if sys.executable else 1
    starts = [0]
    with path.open("rb") as file:
        for number in range(1, count):
            file.seek(number * size // count)
            file.readline()
            if starts[-1] < file.tell() < size:
                starts.append(file.tell())
    return list(zip(starts, [*starts[1:], size], strict=True))


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def scan_part(path: Path, rules: RowRules, start: int, end: int) -> Part:
    """Read the lines that begin in [start, end); `start` is where a line begins."""
    builder = ColumnBuilder(rules)
    faults: list[tuple[int, str]] = []
    offset, line = start, 1
    with path.open("rb", buffering=1 << 20) as file:
        file.seek(start)
        while offset < end and (lines := file.readlines(min(_BLOCK_BYTES, end - offset))):
            size = sum(map(len, lines))
            while offset + size > end:
                size -= len(lines.pop())
            faults += builder.add_lines(lines, line, offset)
            line += len(lines)
            offset += size
    return builder.columns(), faults, line - 1


def _together(parts: list[Part], source: str) -> tuple[Columns, list[Fault]]:
    before = 0
    columns: list[Columns] = []
    faults: list[Fault] = []
    for part, told, lines in parts:
        columns.append(replace(part, line=part.line + before))
        faults += [Fault(source, line + before, reason) for line, reason in told]
        before += lines
    return joined(columns), faults


def _start_helper(path: Path, rules: RowRules, start: int, end: int) -> subprocess.Popen[bytes]:
    helper = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert helper.stdin is not None
    try:
        helper.stdin.write(pickle.dumps((str(path), rules, start, end)))
        helper.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already; its return code says so
    helper.stdin = None
    return helper


def _help(given: BinaryIO, answer: BinaryIO) -> None:
    path, rules, start, end = pickle.load(given)
    pickle.dump(scan_part(Path(path), rules, start, end), answer, protocol=5)


if __name__ == "__main__":
    _help(sys.stdin.buffer, sys.stdout.buffer)
