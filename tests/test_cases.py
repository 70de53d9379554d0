"""Every file of `tests/cases`, used as a person would: on the command line, or in a run. See `cases/README.md`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mini_run import MODEL, mini_run

import run_summary
import trainer_with_eval
from checkpoint_evaluation import tell_score
from checkpoint_manager import Checkpoint, CheckpointManager
from config_schema import TrainingConfig
from error_handling import EXIT_USAGE
from evaluation import SampleResult, TaskRules, summarise
from logger import StructuredLogger, current_steps, read_events
from round_decision import RoundRecord, decide

CASES = Path(__file__).parent / "cases"


@pytest.fixture(autouse=True)
def _mock_mode(monkeypatch):
    monkeypatch.setenv("TINKER_MOCK", "1")


@pytest.fixture
def use(tmp_path, capsys):
    """Run the command line on a training file; returns (exit code, what was printed). Nothing is left but a run."""
    other = tmp_path / "other.jsonl"
    other.write_text('{"input": "Which river is the longest one here?", "target": "The Main"}\n')

    def _use(train: str | Path, *words: str, eval_file: str | Path = other, **changes: Any) -> tuple[int, str]:
        config = {
            "base_model": MODEL,
            "train_file": str(CASES / train),
            "eval_file": str(CASES / eval_file),
            "max_seq_length": 512,
            "evaluation": {"evaluator": "simple", "max_tokens": 8},
            **changes,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        code = trainer_with_eval.main(
            ["--config", str(tmp_path / "config.json"), "--runs-dir", str(tmp_path / "r"), *words]
        )
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return _use


def accepted(use, name: str, **changes: Any) -> str:
    code, shown = use(name, "--dry-run", **changes)
    assert code == 0, shown
    return shown


def refused(use, tmp_path: Path, name: str, **changes: Any) -> dict[int, str]:
    """What a run is told of each line of the file; it must not have begun."""
    code, shown = use(name, **changes)
    assert code == EXIT_USAGE
    assert not (tmp_path / "r").exists()
    told = [line.split(f"{name}:", 1)[1] for line in shown.splitlines() if f"{name}:" in line]
    return {int(number): reason.strip() for number, _, reason in (line.partition(":") for line in told)}


def test_01_byte_order_mark(use):
    shown = accepted(use, "01_bom.jsonl")
    assert "01_bom.jsonl: 2 rows (messages 2)" in shown
    assert "01_bom.jsonl:1: trained tokens" in shown


def test_02_line_ends_and_blank_lines(use, tmp_path):
    assert "02_crlf_blank_no_final_newline.jsonl: 3 rows" in accepted(use, "02_crlf_blank_no_final_newline.jsonl")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_bytes((CASES / "02_crlf_blank_no_final_newline.jsonl").read_bytes()[:-1])
    assert list(refused(use, tmp_path, "damaged.jsonl", train_file=str(damaged))) == [6]


def test_04_trailing_comma(use, tmp_path):
    told = refused(use, tmp_path, "04_trailing_comma.jsonl")
    assert list(told) == [2]
    assert told[2].startswith("not JSON: trailing comma")


def test_06_rows_that_are_no_objects(use, tmp_path):
    told = refused(use, tmp_path, "06_non_object_rows.jsonl")
    words = ["a list", "a text", "a number", "null", "true or false", "the object is empty"]
    assert [number for number, word in enumerate(words, start=1) if word in told[number]] == list(told)


def test_08_another_encoding(use, tmp_path):
    told = refused(use, tmp_path, "08_not_utf8_cp1252.jsonl")
    assert told == {1: "not UTF-8: byte 0xe9 at byte 55 of the line (offset 54 of the file); convert the file to UTF-8"}


def test_11_nan_and_repeated_keys(use, tmp_path):
    told = refused(use, tmp_path, "11_nan_and_duplicate_keys.jsonl")
    assert told == {1: "NaN is not JSON", 2: "the key 'messages' appears more than once"}


def test_13_empty_file(use, tmp_path):
    assert refused(use, tmp_path, "13_empty_file.jsonl") == {1: "the file holds no rows"}


def test_20_shapes(use):
    shown = accepted(use, "20_mixed_schemas.jsonl")
    assert "7 rows (instruction/input/output 2, messages 1, prompt/completion 1, conversations 1" in shown
    assert "in 7 examples" in shown


def test_21_unknown_roles(use, tmp_path):
    told = refused(use, tmp_path, "21_unknown_roles.jsonl")
    roles = {1: "'hummany'", 2: "'User'", 3: "'developer'", 4: "'bot'"}
    assert told.keys() == roles.keys()
    assert all(f"has the role {roles[line]}; allowed are " in reason for line, reason in told.items())


@pytest.mark.parametrize(("trained", "lines"), [("last_assistant_turn", 4), ("all_assistant_messages", 5)])
def test_22_empty_replies(use, tmp_path, trained, lines):
    told = refused(use, tmp_path, "22_empty_or_null_assistant.jsonl", train_on_what=trained)
    assert list(told) == list(range(1, lines + 1))
    assert ("is empty" in told[2], "is null" in told[3], "has no 'content'" in told[4]) == (True, True, True)


def test_24_nothing_to_learn(use, tmp_path):
    assert list(refused(use, tmp_path, "24_nothing_to_learn.jsonl")) == [1, 2, 5, 6]
    lines = (CASES / "24_nothing_to_learn.jsonl").read_text().splitlines()
    kept = tmp_path / "kept.jsonl"
    kept.write_text(lines[3])
    shown = accepted(use, "kept.jsonl", train_file=str(kept))
    assert "1 rows: turns after the last assistant turn were left out, nothing answers them" in shown
    assert "ends on user" not in shown


def test_26_a_row_longer_than_the_limit(use, tmp_path):
    shown = accepted(use, "26_prompt_longer_than_max_length.jsonl")
    assert "in 1 examples, 1 of 2 rows dropped" in shown
    alone = tmp_path / "alone.jsonl"
    alone.write_text((CASES / "26_prompt_longer_than_max_length.jsonl").read_text().splitlines()[0])
    told = refused(use, tmp_path, "alone.jsonl", train_file=str(alone))
    assert "longer than max_seq_length 512" in told[1]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [dict(event) for event in current_steps(read_events(run / "metrics.jsonl")[0])]


@pytest.mark.parametrize(
    ("name", "steps", "rows"),
    [
        ("26_prompt_longer_than_max_length.jsonl", 1, [1]),
        ("30_one_row.jsonl", 1, [1]),
        ("31_nine_rows.jsonl", 3, [4, 4, 1]),
    ],
)
def test_an_epoch_trains_every_row_that_can_be_trained_once(tmp_path, name, steps, rows):
    run = mini_run(tmp_path, train_file=str(CASES / name), max_seq_length=512, batch_size=4, steps_per_round=steps)
    trained = steps_of(run)
    assert [step["rows"] for step in trained] == rows
    assert all(math.isfinite(step["loss"]) and step["trained_tokens"] > 0 for step in trained)


def test_32_copies(use):
    shown = accepted(use, "32_duplicates.jsonl")
    assert "32_duplicates.jsonl: 4 rows (messages 4); 1 exact copy removed" in shown
    assert "32_duplicates.jsonl:1 and" in shown
    assert "32_duplicates.jsonl:4: the same question with two different answers" in shown
    assert "32_duplicates.jsonl:3: the same question and answer but for case and spaces" in shown


def test_33_questions_on_both_sides(use, tmp_path):
    code, shown = use("33_leak_train.jsonl", eval_file="33_leak_eval.jsonl")
    assert (code, (tmp_path / "r").exists()) == (EXIT_USAGE, False)
    assert "33_leak_train.jsonl:1: asks exactly what evaluation item 'exact'" in shown
    assert "33_leak_train.jsonl:2: asks up to case, spaces and punctuation what evaluation item 'case_space'" in shown
    assert "33_leak_eval.jsonl:5: the id 'clean' is already that of line 4" in shown
    nearest = next(line for line in shown.splitlines() if line.startswith("Nearest pair"))
    assert "What time is the final ferry?" in nearest
    assert "When does the last ferry leave?" in nearest


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of five steps over forty questions, with a state saved after the third."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_MOCK", "1")
        return mini_run(tmp_path_factory.mktemp("run"), rows=40, steps_per_round=5, save_every=3, eval_threshold=0.85)


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "runs" / finished.name))


def resume(run: Path) -> dict[str, Any]:
    return asyncio.run(trainer_with_eval.run_loop(None, runs_dir=run.parent, resume=str(run)))


def within_the_round(folder: CheckpointManager) -> Checkpoint:
    """A state said to be of step 3 that the service has: those of a finished round are deleted, so its end is taken."""
    ended = folder.checkpoint_of_round(1)
    return dataclasses.replace(ended, name="round_01_step_000003", kind="state", batch=3, step=3, sampler_path=None)


def test_40_torn_and_stale_metrics(run, capsys):
    with CheckpointManager.open(run) as folder:
        kept = within_the_round(folder)
        folder.redo_from(1, "train", status="interrupted")
        folder.checkpoints_path.write_text(json.dumps(kept.to_row()) + "\n")
    shutil.copy(CASES / "40_metrics_torn_and_stale.jsonl", run / "metrics.jsonl")
    resume(run)
    shown = capsys.readouterr().out
    assert "metrics.jsonl: dropped a torn last line" in shown
    assert "steps after 3 are done again" in shown
    events, note = read_events(run / "metrics.jsonl")
    assert note is None
    assert Counter((event["step"], bool(event.get("superseded"))) for event in events if "loss" in event) == {
        (1, False): 1, (2, False): 1, (3, False): 1, (4, True): 1, (4, False): 1, (5, False): 1,
    }  # fmt: skip
    losses = [step["loss"] for step in steps_of(run)]
    assert losses[:3] == [2.0, 1.5, 1.2]
    assert len(losses) == 5
    assert losses[3] != 1.1


def test_42_a_checkpoint_without_its_state(run, capsys):
    good, newest = map(json.loads, (CASES / "42_checkpoints_half_written.jsonl").read_text().splitlines())
    with CheckpointManager.open(run) as folder:
        kept = within_the_round(folder)
        folder.redo_from(1, "train", status="interrupted")
        here = {"state_path": kept.state_path, "sampler_path": None, "round": 1, "step": 3}
        rows = [good | here, newest | {"round": 1, "step": 6}]
        folder.checkpoints_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    resume(run)
    shown = " ".join(capsys.readouterr().out.split())
    assert "checkpoint '000006' has no saved state, passed over" in shown
    assert "restoring 000003 (step 3) with its optimizer state" in shown
    steps = [event["step"] for event in read_events(run / "metrics.jsonl")[0] if event["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 4, 5]


def test_50_samples_that_failed(capsys):
    samples = []
    for line in (CASES / "50_scores_with_errors.jsonl").read_text().splitlines():
        row = json.loads(line)
        failed = "HTTP 503" if row["status"] == "error" else None
        samples.append(SampleResult("t", str(row["id"]), 1, "q", "a", "", row["score"] or 0.0, error=failed))
    result = summarise(samples, rules={"t": TaskRules(metric="accuracy")})
    figures = run_summary.measured(result, nll=None)
    assert (figures["score"], round(figures["answered_score"], 3)) == (0.8, 0.889)
    assert (figures["errors"], figures["n"]) == (10, 100)
    tell_score({**figures, "round": 1}, 8, StructuredLogger(None))
    assert "0.800" in (shown := capsys.readouterr().out)
    assert "10 failed, 0.889 of the answered" in shown
    config = TrainingConfig(base_model=MODEL, train_file="t", eval_file="e", eval_threshold=0.85, max_rounds=1)
    scored = RoundRecord(1, result.score, figures["ci_low"], figures["ci_high"], n=100, errors=10, checkpoint="c")
    decision = decide([RoundRecord(0, 0.1), scored], config, learning_rate=1e-4)
    assert (decision.action, decision.status) == ("stop", "target_missed")


def test_55_a_gain_within_noise(run, capsys):
    pairs = [json.loads(line) for line in (CASES / "55_paired_not_significant.jsonl").read_text().splitlines()]
    with CheckpointManager.open(run) as folder:
        asked = {number: sorted(folder.load_samples(number), key=lambda sample: sample.id) for number in (0, 1)}
        folder.redo_from(0, "baseline", status="interrupted")
        folder.checkpoints_path.unlink()
        for number, key in ((0, "base_ok"), (1, "tuned_ok")):
            for sample, pair in zip(asked[number], pairs, strict=True):
                folder.append_sample(number, dataclasses.replace(sample, score=float(pair[key])))
    summary = resume(run)
    scores = [row["score"] for row in summary["rounds"]]
    assert (scores, summary["exit_code"], summary["rounds"][1]["decision"]) == ([29 / 40, 34 / 40], 0, "target_met")
    lead = summary["leads"][0]
    assert (round(lead["p"], 2), lead["within_noise"]) == (0.18, True)
    page = (run / "report.html").read_text()
    for shown in (capsys.readouterr().out, page):
        told = " ".join(shown.split())
        assert "the score reaches the target of 0.85" in told
        assert "within noise (paired test over 40 samples, p = 0.18)" in told


def test_60_misspelt_keys(use, tmp_path, capsys):
    name = str(CASES / "60_config_typo.json")
    assert trainer_with_eval.main(["--config", name, "--dry-run"]) == EXIT_USAGE
    told = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert told == [
        f"{name}:1: learning_rte: unknown key; did you mean learning_rate?",
        f"{name}:1: eval_treshold: unknown key; did you mean eval_threshold?",
    ]


def test_62_warm_up_longer_than_the_run(capsys):
    name = str(CASES / "62_config_warmup_past_end.json")
    assert trainer_with_eval.main(["--config", name, "--dry-run"]) == EXIT_USAGE
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"error: {name}:1: warmup_steps: 15 steps planned")
    assert "warm-up 100 written" in told


def test_every_case_is_used_here_and_described():
    readme, tests = (CASES / "README.md").read_text(), Path(__file__).read_text()
    names = {path.name for path in CASES.iterdir()} - {"README.md"}
    assert {name for name in names if f"`{name}`" not in readme or name.removesuffix(".jsonl") not in tests} == set()
