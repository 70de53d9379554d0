"""Where a run writes: in its folder and in the one cache, under names that every system takes, from any path."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "Über uns, 100 % größe «ñ» 日本"
TASK = """from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match


@task(name="farbe: a/b? *")
def farben():
    samples = [Sample(input=f"Which colour has {n}?", target="red", id=f"c{n}:\\\\?") for n in range(2)]
    return Task(dataset=samples, scorer=match())
"""

pytestmark = pytest.mark.timeout(600)  # two programs start one after the other, each with all it imports

_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def unfit_for_windows(name: str) -> bool:
    """Whether Windows refuses a file of this name, or stores it under another one."""
    return bool(re.search(r'[<>:"/\\|?*\x00-\x1f]', name) or _RESERVED.fullmatch(name)) or name != name.rstrip(". ")


def test_what_windows_refuses():
    assert all(map(unfit_for_windows, ["a:b", "NUL", "con.txt", "x.", "x ", "a?", "lpt1"]))
    assert not any(map(unfit_for_windows, ["console.txt", ".hidden", "a%3Ab", "round_01.jsonl"]))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders under a path with blanks and letters of several alphabets; `left` is what a run and its resume left in
    them beside what was there."""
    folder = tmp_path_factory.mktemp("place") / FOLDER
    for name in ("home", "work", "data ü", "tmp"):
        (folder / name).mkdir(parents=True)
    rows = [{"id": f"é {n}/:*?", "question": f"Colour of {n}?", "answer": ("red", "blue")[n % 2]} for n in range(4)]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for name in ("zeilen ü.jsonl", "fragen 日.jsonl"):
        (folder / "data ü" / name).write_text(lines, encoding="utf-8")
    (folder / "data ü" / "aufgabe ñ.py").write_text(TASK, encoding="utf-8")
    config = {
        "base_model": "Qwen/Qwen3-8B",
        "train_file": "zeilen ü.jsonl",
        "eval_file": "fragen 日.jsonl",
        "eval_tasks": ["aufgabe ñ.py@farbe: a/b? *"],
        "allow_overlap": True,
        "lora_rank": 4,
        "batch_size": 2,
        "max_rounds": 1,
        "steps_per_round": 2,
        "save_every": 1,
        "eval_threshold": 1.0,
        "evaluation": {"max_tokens": 2},
    }
    (folder / "data ü" / "konfig ñ.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    settings = {key: os.environ[key] for key in ("PATH", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE") if key in os.environ}
    settings |= {"TINKER_MOCK": "1", "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    settings |= {"PYTHONDONTWRITEBYTECODE": "1"}
    before = state_of(folder)
    told = []
    for words in (["--config", "../data ü/konfig ñ.json"], ["--resume", "max_rounds=2"]):
        ended = subprocess.run(
            [sys.executable, str(ROOT / "trainer_with_eval.py"), *words, "--runs-dir", "../läufe & co"],
            cwd=folder / "work",
            env=settings,
            capture_output=True,
            check=False,
        )
        assert ended.returncode == 3, ended.stderr.decode()
        told.append(ended.stdout.decode())
    after = state_of(folder)
    return folder, sorted(path for path in after if after[path] != before.get(path)), told


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    empty = [path for path in folder.rglob("*") if path.is_dir() and not any(path.iterdir())]
    written = {path.relative_to(folder): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files}
    return written | {path.relative_to(folder): (0, 0) for path in empty}


def test_a_run_and_its_resume_write_in_the_run_folder_and_the_cache_only(place):
    folder, left, _ = place
    (run,) = (folder / "läufe & co").iterdir()
    allowed = (Path("läufe & co", run.name), Path("home/.cache/eval-loop"))
    assert [path for path in left if not any(path.is_relative_to(place) for place in allowed)] == []
    assert {"state.json", "summary.json", "report.html"} <= {path.name for path in run.iterdir()}
    assert not [path for path in run.rglob("*") if path.name.endswith(".tmp")]


def test_names_in_the_run_folder_are_ones_that_windows_takes(place):
    _, left, _ = place
    names = [path.relative_to("läufe & co") for path in left if path.parts[0] == "läufe & co"]
    assert [name for name in names if any(map(unfit_for_windows, name.parts))] == []
    assert len({str(name).casefold() for name in names}) == len(names)
    assert max(len(str(name)) for name in names) <= 160  # of 260, so that 100 are left for the folder of runs


def test_a_run_in_a_path_of_blanks_and_other_letters_goes_on_there(place):
    folder, _, (first, second) = place
    (run,) = (folder / "läufe & co").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert [row["round"] for row in summary["rounds"]] == [0, 1, 2]
    assert {row["n"] for row in summary["rounds"]} == {6}
    assert f"../läufe & co/{run.name}" in first
    assert "round 2: " in second
    ids = {json.loads(line)["id"] for line in (run / "samples" / "round_02.jsonl").read_text().splitlines()}
    assert {"é 0/:*?", "c1:\\?"} <= ids
