"""The built-in evaluator, on real files of rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripted_sampler import ScriptedSampler, write_rows

from data_loader import Row, load_rows
from error_handling import AuthenticationError, ConfigurationError, DataError, EvaluationError, ServiceError
from evaluation import SampleResult
from simple_eval import check_rows, run_simple_evaluation


def triage(tmp_path: Path, count: int = 20) -> list[Row]:
    labels = ("billing", "bug")
    rows = [{"id": f"r{n:03d}", "input": f"ticket {n}", "target": labels[n % 2]} for n in range(count)]
    return list(load_rows(write_rows(tmp_path / "eval.jsonl", rows), purpose="eval").rows)


def right(row: Row) -> str:
    return row.target


async def test_right_wrong_and_failed_replies_are_counted_over_all_rows(tmp_path: Path) -> None:
    rows = triage(tmp_path, 100)
    script: dict[str, str | BaseException] = {}
    for n, row in enumerate(rows):
        script[row.question] = ServiceError("HTTP 503") if n >= 90 else ("nonsense" if n >= 80 else right(row))
    result = await run_simple_evaluation(ScriptedSampler(script), rows, max_errors=0.10)
    assert (result.score, result.n, result.errors) == (0.80, 100, 10)
    failed = [sample for sample in result.samples if sample.error]
    assert {(sample.score, sample.lenient_score, sample.output) for sample in failed} == {(0.0, None, "")}
    assert failed[0].error == "ServiceError: HTTP 503"
    with pytest.raises(EvaluationError, match=r"10 of 100 samples of eval_file failed.*HTTP 503"):
        await run_simple_evaluation(ScriptedSampler(script), rows, max_errors=0.05)


async def test_every_row_is_asked_and_delivered_before_too_many_failures_are_told(tmp_path: Path) -> None:
    rows = triage(tmp_path)
    sampler = ScriptedSampler(lambda question, _: TimeoutError("slow") if question == "ticket 0" else "bug")
    delivered: list[SampleResult] = []
    with pytest.raises(EvaluationError, match="TimeoutError: slow"):
        await run_simple_evaluation(sampler, rows, on_samples=delivered.extend, max_errors=0.0)
    assert len(delivered) == len(sampler.asked) == len(rows)


async def test_a_sample_holds_what_was_asked_and_said(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "eval.jsonl",
        [
            {
                "id": "one",
                "category": "capitals",
                "source": "atlas",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Capital of France?"},
                    {"role": "assistant", "content": "Paris"},
                ],
            }
        ],
    )
    rows = load_rows(path, purpose="eval").rows
    sampler = ScriptedSampler({"Capital of France?": "It is Paris, of course…"})
    (sample,) = (await run_simple_evaluation(sampler, rows)).samples
    assert sampler.messages == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}]
    ]
    assert (sample.key, sample.input, sample.target) == (("eval_file", "one", 1), "Capital of France?", "Paris")
    assert (sample.output, sample.score, sample.lenient_score) == ("It is Paris, of course…", 0.0, 1.0)
    assert (sample.stop_reason, sample.tokens_in, sample.tokens_out, sample.seconds) == ("max_tokens", 5, 5, 0.25)
    assert (sample.category, sample.metadata["source"]) == ("capitals", "atlas")


async def test_labels_default_to_the_closed_set_of_targets_and_give_the_category(tmp_path: Path) -> None:
    rows = triage(tmp_path)
    result = await run_simple_evaluation(ScriptedSampler(lambda *_: "bug, not billing"), rows)
    assert result.metrics["lenient_score"] == 0.0
    assert {sample.category for sample in result.samples} == {"bug", "billing"}
    named = await run_simple_evaluation(ScriptedSampler(lambda *_: "bug, not billing"), rows, labels=("bug",))
    assert named.metrics["lenient_score"] == 0.5


async def test_the_result_is_in_row_order_whatever_arrives_first(tmp_path: Path) -> None:
    rows = triage(tmp_path)

    class Backwards(ScriptedSampler):
        async def reply(self, messages, *, epoch=1):
            await asyncio.sleep(0.002 * (20 - int(messages[-1]["content"].split()[-1])))
            return await super().reply(messages, epoch=epoch)

    arrived: list[SampleResult] = []
    result = await run_simple_evaluation(Backwards(lambda *_: "bug"), rows, on_samples=arrived.extend)
    assert [sample.id for sample in result.samples] == [row.id for row in rows]
    assert [sample.id for sample in arrived] != [row.id for row in rows]


async def test_no_more_requests_are_in_flight_than_asked_for(tmp_path: Path) -> None:
    sampler = ScriptedSampler(lambda *_: "bug", delay_s=0.001)
    await run_simple_evaluation(sampler, triage(tmp_path, 40), concurrency=3)
    assert sampler.in_flight == [0, 3]
    with pytest.raises(ConfigurationError, match="at least 1"):
        await run_simple_evaluation(sampler, triage(tmp_path, 4), concurrency=0)


async def test_done_rows_are_not_asked_again_but_failed_ones_are(tmp_path: Path) -> None:
    rows = triage(tmp_path)
    first: list[SampleResult] = []
    broken = ScriptedSampler(lambda question, _: ServiceError("HTTP 502") if question == "ticket 3" else "bug")
    whole = await run_simple_evaluation(broken, rows, on_samples=first.extend, max_errors=1.0)
    assert whole.errors == 1
    done = first[:5] + [sample for sample in first[5:] if sample.error]
    sampler = ScriptedSampler(lambda *_: "bug")
    delivered: list[SampleResult] = []
    result = await run_simple_evaluation(sampler, rows, done=done, on_samples=delivered.extend)
    settled = {sample.id for sample in done if not sample.error}
    assert {sample.id for sample in delivered} == {row.id for row in rows} - settled
    assert "r003" in {sample.id for sample in delivered}
    assert (result.n, result.errors, result.score) == (20, 0, 0.5)
    again = await run_simple_evaluation(ScriptedSampler({}), rows, done=result.samples)
    assert again == result


async def test_results_of_another_task_settle_nothing(tmp_path: Path) -> None:
    rows = triage(tmp_path, 4)
    other = [SampleResult("arc", row.id, 1, "q", "a", "a", 1.0) for row in rows]
    sampler = ScriptedSampler(lambda *_: "bug")
    assert (await run_simple_evaluation(sampler, rows, done=other)).score == 0.5
    assert len(sampler.asked) == 4


@pytest.mark.parametrize("error", [AuthenticationError("wrong key"), KeyError("a bug"), ConfigurationError("no model")])
async def test_a_refused_key_or_a_bug_ends_the_evaluation_at_once(tmp_path: Path, error: Exception) -> None:
    cause = OSError("below")
    error.__cause__ = cause
    sampler = ScriptedSampler(lambda question, _: error if question == "ticket 2" else "bug", delay_s=0.001)
    with pytest.raises(type(error)) as caught:
        await run_simple_evaluation(sampler, triage(tmp_path, 40), concurrency=2, max_errors=1.0)
    assert caught.value is error
    assert caught.value.__cause__ is cause
    assert len(sampler.asked) < 8


async def test_an_error_of_the_receiver_is_not_swallowed(tmp_path: Path) -> None:
    def full(_: object) -> None:
        raise OSError("no space left on device")

    sampler = ScriptedSampler(lambda *_: "bug", delay_s=0.001)
    with pytest.raises(OSError, match="no space left"):
        await run_simple_evaluation(sampler, triage(tmp_path), on_samples=full, concurrency=2)
    assert len(sampler.asked) <= 4


async def test_results_that_arrive_together_are_delivered_together_and_none_is_lost_when_one_fails(
    tmp_path: Path,
) -> None:
    batches: list[int] = []
    delivered: list[str] = []

    def take(samples: Sequence[SampleResult]) -> None:
        batches.append(len(samples))
        delivered.extend(sample.id for sample in samples)

    rows = triage(tmp_path, 12)
    await run_simple_evaluation(ScriptedSampler(lambda *_: "bug"), rows, on_samples=take, concurrency=4)
    assert sorted(delivered) == [row.id for row in rows]
    assert max(batches) > 1
    delivered.clear()
    broken = ScriptedSampler(lambda question, _: KeyError("a bug") if question == "ticket 5" else "bug")
    with pytest.raises(KeyError):
        await run_simple_evaluation(broken, rows, on_samples=take, concurrency=3)
    # What was answered before the bug is kept; what was still to be asked never was.
    assert delivered[:5] == [f"r{n:03d}" for n in range(5)]
    assert len(broken.asked) < len(rows)


async def test_cancelling_stops_the_requests(tmp_path: Path) -> None:
    sampler = ScriptedSampler(lambda *_: "bug", delay_s=30)
    running = asyncio.create_task(run_simple_evaluation(sampler, triage(tmp_path), concurrency=4))
    while not sampler.asked:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sampler.in_flight[0] == 0
    assert len(sampler.asked) == 4


def test_targets_that_differ_in_outer_signs_only_are_refused_and_spellings_of_one_are_not(tmp_path: Path) -> None:
    def rows(*targets: str) -> list[Row]:
        lines = [{"input": f"question {n}", "target": target} for n, target in enumerate(targets)]
        return list(load_rows(write_rows(tmp_path / "signs.jsonl", lines), purpose="eval").rows)

    check_rows(rows("Yes.", "yes", '"yes"', "(Yes)", "don’t", "don't", "yes !"))
    for one, other in (("<5", ">5"), ("5", ".5"), ("<5", "5")):
        with pytest.raises(DataError, match=r"signs\.jsonl:2: a reply cannot be told apart.*signs\.jsonl:1"):
            check_rows(rows(one, other))


async def test_rows_that_cannot_be_scored_are_refused_before_any_is_asked(tmp_path: Path) -> None:
    rows = triage(tmp_path, 2)
    sampler = ScriptedSampler({})
    with pytest.raises(DataError, match=r"eval\.jsonl:1: the id 'r000' is already used at .*eval\.jsonl:1"):
        await run_simple_evaluation(sampler, [*rows, rows[0]])
    hollow = Row("x", ({"role": "user", "content": "q"}, {"role": "assistant", "content": "..."}), None, "m", "f", 7)
    with pytest.raises(DataError, match=r"f:7: the target '\.\.\.' has no word"):
        await run_simple_evaluation(sampler, [*rows, hollow])
    with pytest.raises(DataError, match="no rows"):
        await run_simple_evaluation(sampler, [])
    assert sampler.asked == []
