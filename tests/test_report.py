"""The plots and the page of a run, made from a real run folder."""

import re
import struct
from html.parser import HTMLParser

import pytest

import durable_files
import evaluation
import report
import run_summary
from checkpoint_manager import CheckpointManager
from error_handling import DataError, RunNotFoundError
from evaluation import SampleResult
from logger import StructuredLogger
from significance import wilson_interval

EVIL = "<script>alert('x')</script>\x1b[31m{{ 7*7 }}"


class Page(HTMLParser):
    """Collects the elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in {"src", "href"} and value]

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def manager(tmp_path):
    config = {"base_model": "tiny", "train_file": "train.jsonl", "eval_threshold": 0.85}
    with CheckpointManager.create(tmp_path, config) as made:
        yield made


def fill(manager: CheckpointManager, text: str = "a question") -> None:
    log = StructuredLogger(manager.metrics_path, console=False)
    for step in range(1, 9):
        log.event("step", round=1 if step < 5 else 2, step=step, loss=2.0 / step, lr=1e-4)
    for number, score in ((0, 0.25), (1, 0.5), (2, 0.75)):
        for index in range(4):
            right = index < 4 * score
            row = SampleResult(
                "t",
                f"{text}-{index}",
                1,
                text,
                "billing",
                text,
                float(right),
                category="billing" if index % 2 else text,
            )
            manager.append_sample(number, row)
        manager.save_round_result(
            number,
            {"score": score, "ci_low": score - 0.2, "ci_high": score + 0.2, "n": 4, "errors": 0, "reason": text},
        )
    manager.append_sample(2, SampleResult("t", "z", 1, text, "billing", "", 0.0, error=f"timeout {text}"))
    manager.write_selection(
        1,
        [{"id": str(i % 3), "weight": 1, "why": f"nearest to failed sample t/{i} (similarity 0.{i})"} for i in range(4)]
        + [{"id": "9", "weight": 1, "why": text}],
    )


def finish(manager: CheckpointManager) -> None:
    rounds = manager.round_results()
    manager.write_summary(
        {
            "status": "completed",
            "exit_code": 3,
            "baseline_score": 0.25,
            "best_round": 2,
            "best_score": 0.75,
            "threshold": 0.85,
            "final_checkpoint": "tinker://r:train:0/weights/r2",
            "tokens": {"trained": 12345},
            "cost": None,
            "wall_s": 12.3,
            "rounds": rounds,
        }
    )


def is_png(data: bytes) -> bool:
    width, height = struct.unpack(">II", data[16:24])
    return data.startswith(b"\x89PNG") and width > 400 and height > 200


def test_a_finished_run_gets_both_plots_and_a_page_that_stands_alone(manager):
    fill(manager)
    finish(manager)
    written = report.write_report(manager.run_dir)
    assert [p.relative_to(manager.run_dir).as_posix() for p in written] == [
        "plots/score.png",
        "plots/loss.png",
        "report.html",
    ]
    assert all(is_png(path.read_bytes()) for path in written[:2])
    page = Page(written[2].read_text("utf-8"))
    assert len(page.sources) == 2
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    text = " ".join(page.text.split())
    for part in ("0.750 (round 2)", "target not met", "0.300-0.700", "12,345", "tinker://r:train:0/weights/r2"):
        assert part in text
    assert "5 rows, 4 different" in text
    assert "4 × nearest to failed sample" in text
    assert "What round 2 got wrong" in text


def test_nothing_from_data_or_model_becomes_markup(manager):
    fill(manager, EVIL)
    finish(manager)
    html = report.write_report(manager.run_dir)[-1].read_text("utf-8")
    page = Page(html)
    assert "script" not in page.tags
    assert "alert('x')" in page.text
    assert "{{ 7*7 }}" in page.text
    assert "\x1b" not in html
    assert "\\x1b[31m" in page.text


def test_no_secret_reaches_the_page(manager, monkeypatch):
    fill(manager, "marked-secret-key")
    finish(manager)
    monkeypatch.setenv("EVALOPS_API_KEY", "marked-secret-key")
    html = report.write_report(manager.run_dir)[-1].read_text("utf-8")
    assert "marked-secret" not in html
    assert "[hidden]" in html


def test_an_unfinished_run_gets_a_report_of_what_there_is(manager):
    fill(manager)
    manager.close()
    text = Page(report.write_report(manager.run_dir)[-1].read_text("utf-8")).text
    assert "interrupted" in text
    assert "0.300-0.700" in text


def test_a_run_without_a_round_gets_a_page_and_no_empty_plot(manager):
    written = report.write_report(manager.run_dir)
    assert [path.name for path in written] == ["report.html"]
    assert "No round has been evaluated yet" in written[0].read_text("utf-8")
    assert not (manager.run_dir / "plots").exists()


def test_superseded_steps_are_not_plotted(manager, monkeypatch):
    log = StructuredLogger(manager.metrics_path, console=False)
    for step in (1, 2, 3, 4):
        log.event("step", round=1, step=step, loss=9.0, lr=1e-4)
    log.supersede_after(2)
    log.event("step", round=1, step=3, loss=1.0, lr=1e-4)
    plotted: list = []
    real = report.loss_plot

    def spy(steps):
        plotted.extend(steps)
        return real(steps)

    monkeypatch.setattr(report, "loss_plot", spy)
    report.write_report(manager.run_dir)
    assert [(event["step"], event["loss"]) for event in plotted] == [(1, 9.0), (2, 9.0), (3, 1.0)]


def test_a_torn_line_is_noted_on_the_page(manager):
    fill(manager)
    with open(manager.metrics_path, "a") as file:
        file.write('{"event": "st')
    assert "dropped a torn last line" in report.write_report(manager.run_dir)[-1].read_text("utf-8")


def test_a_damaged_record_is_an_error_that_names_its_line(manager):
    fill(manager)
    lines = manager.metrics_path.read_text().splitlines()
    manager.metrics_path.write_text("\n".join([lines[0], "{broken", *lines[1:]]) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        report.write_report(manager.run_dir)
    with pytest.raises(RunNotFoundError):
        report.write_report(manager.run_dir.parent)


def test_categories_are_scored_by_round_the_surest_weakness_first():
    def row(id, category, score):
        return SampleResult("t", id, 1, "q", "a", "r", score, category=category)

    first = [row("1", "x", 0.0), row("2", "y", 0.0)]
    last = [row("1", "x", 1.0), *(row(f"y{n}", "y", float(n < 2)) for n in range(4)), row("4", None, 0.0)]
    table = report.category_table({0: first, 1: last})
    alone = {"n": 1, "ci_low": None, "ci_high": None}
    low, high = wilson_interval(2, 4)
    assert table == {
        "rounds": [0, 1],
        "rows": [
            {
                "category": "y",
                "cells": [{"score": 0.0, **alone}, {"score": 0.5, "n": 4, "ci_low": low, "ci_high": high}],
            },
            {"category": "x", "cells": [{"score": 0.0, **alone}, {"score": 1.0, **alone}]},
        ],
        "left_out": 0,
    }
    assert report.category_table({0: [row("1", None, 1.0)]}) is None


def test_the_weakest_categories_are_shown_with_examples_and_the_answered_share_with_the_failures(manager):
    for n in range(20):
        category = ("billing", "login")[n % 2]
        reply = "a wrong reply" if category == "login" and n < 12 else category
        right = float(reply == category)
        manager.append_sample(
            0, SampleResult("t", f"s{n:02d}", 1, f"ask {n}", category, reply, right, category=category)
        )
    manager.append_sample(0, SampleResult("t", "lost", 1, "ask", "login", "", 0.0, error="HTTP 503", category="login"))
    figures = run_summary.measured(evaluation.summarise(manager.load_samples(0)), None)
    manager.save_round_result(0, figures)
    text = " ".join(Page(report.write_report(manager.run_dir)[-1].read_text("utf-8")).text.split())
    assert "Where the baseline is weakest login: 0.400 [0.168, 0.687] (n = 10)" in text
    weakest, rest = text.split("Where the baseline is weakest")[1].split("What the baseline got wrong")
    assert [name for name in re.findall(r"s\d\d", weakest)] == ["s01", "s03"]
    assert [name for name in re.findall(r"s\d\d|lost", rest)] == ["s05", "s07", "s09", "s11", "lost"]
    assert "Baseline: 0.700 of the 20 answered, 1 of 21 failed." in text


def test_a_score_without_interval_is_plotted_and_several_tasks_get_a_table(manager):
    data = report.score_plot([{"round": 0, "score": 1.0, "ci_low": None, "ci_high": None}], None)
    assert data is not None
    assert is_png(data)
    assert report.score_plot([{"round": 0}], 0.5) is None
    task = {"score": 0.5, "n": 10, "errors": 1, "ci_low": None, "ci_high": None}
    manager.save_round_result(
        0,
        {
            "score": 0.5,
            "tasks": [{**task, "task": "one"}, {**task, "task": "two", "answered_score": 5 / 9, "metric": "f1 of x"}],
        },
    )
    text = Page(report.write_report(manager.run_dir)[-1].read_text("utf-8")).text
    assert re.search(r"baseline\s*two\s*0\.500\s*-\s*10\s*1\s*0\.556\s*f1 of x", text)


def test_near_copies_notes_of_selections_and_scores_on_training_data_are_told(manager):
    fill(manager)
    item = {"item": "q7", "item_where": "e.jsonl:7", "score": 0.9}
    near = [{"id": f"train:{n}", "where": f"t.jsonl:{n}", **item} for n in range(12)]
    durable_files.write_jsonl(manager.near_matches_path, near)
    assert manager.load_near_matches() == near
    manager.write_set_aside(2, [{"id": "train:5", "label": "refund", "loss": 3.1}])
    manager.write_set_aside(3, [])
    assert [path.name for path in (manager.run_dir / "selection").glob("*.set_aside.jsonl")] == [
        "round_02.set_aside.jsonl"
    ]
    log = StructuredLogger(manager.metrics_path, console=False)
    log.event("selection", round=2, notes=["label guard: 1 of the 8 rows measured are set aside: t.jsonl:5"])
    report.write_report(manager.run_dir)
    page = Page((manager.run_dir / "report.html").read_text())
    assert (
        "12 training rows with at least 80 % of an evaluation or test item's word sequences left out of training"
        in page.text
    )
    assert "t.jsonl:9 holds 90% of q7 (e.jsonl:7); ... and 2 more" in page.text
    assert "round 2: label guard: 1 of the 8 rows measured are set aside: t.jsonl:5" in page.text
    assert "on training data" not in page.text
    manager.update_state(scores_are=run_summary.ON_TRAINING_DATA)
    report.write_report(manager.run_dir)
    page = Page((manager.run_dir / "report.html").read_text())
    assert "Every score on this page is on training data" in page.text
    assert "Score by category (scores on training data)" in page.text
