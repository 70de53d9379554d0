"""What a run is expected to take, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

import cost_estimate
import data_loader
import inspect_eval
import rendering
import token_sizes
from config_schema import Price, TrainingConfig
from cost_estimate import EvaluationSize, TrainingSize, estimate_run, expected_round, limit_passed, rows_trained
from error_handling import ConfigurationError

PRICE = Price(prefill=0.1, sample=0.4, train=2.0)
# 20 prompts of 30 tokens, 20 targets of 33 with their prompts, replies of at most 8 tokens.
EVALUATION = EvaluationSize(asked=20, prompt_tokens=600, target_tokens=660, max_tokens=8)


def config(**changes) -> TrainingConfig:
    prices = {"m": {"prefill": 0.1, "sample": 0.4, "train": 2.0}}
    return TrainingConfig(**{"base_model": "m", "train_file": "t", "eval_file": "e", "prices": prices, **changes})


@pytest.mark.parametrize(
    ("listed", "batch", "steps", "rows"),
    [
        (200, 10, 20, 200),  # one epoch, no rest
        (20, 10, 20, 200),  # ten epochs of two batches
        (25, 10, 20, 6 * 25 + 20),  # an epoch is 10 + 10 + 5: six of them and two steps more
        (25, 10, 2, 20),
        (7, 10, 3, 21),  # every step is the whole list
        (1, 1, 1, 1),
    ],
)
def test_rows_trained_by_cycling_through_a_list(listed, batch, steps, rows):
    assert rows_trained(listed, batch, steps) == rows


def test_the_estimate_of_a_run_by_hand():
    first = TrainingSize(supply=100, row_tokens=40.5, batch_size=4, steps=8, guarded=True)
    later = TrainingSize(supply=150, row_tokens=50.0, batch_size=4, steps=8, guarded=True)
    estimate = estimate_run(EVALUATION, first, later, max_rounds=3)
    assert estimate.baseline == {"train": 0, "prefill": 1260, "sample": 160}
    assert estimate.first_round == {"train": 1296, "prefill": 1260, "sample": 160}  # 32 rows of 40.5
    assert estimate.later_round == {"train": 1600, "prefill": 1260 + 1600, "sample": 160}  # and the guard looks at them
    assert estimate.total == {"train": 1296 + 2 * 1600, "prefill": 4 * 1260 + 2 * 1600, "sample": 4 * 160}
    # Rows that differ by 5 tokens: three deviations of the sum of 32 out of 100 are 3 * 5 * sqrt(32 * 0.68) = 69.97.
    uneven = estimate_run(EVALUATION, dataclasses.replace(first, row_sd=5.0), max_rounds=1)
    assert uneven.first_round["train"] == 1366
    everything = dataclasses.replace(first, supply=32, row_sd=5.0)
    assert estimate_run(EVALUATION, everything, max_rounds=1).first_round["train"] == 1296
    lines = cost_estimate.describe(estimate, PRICE)
    assert lines[1] == "  baseline: 1,260 prefilled, up to 160 sampled; up to $0.00019"  # (126 + 64) / 1e6
    # (4,496 * 2 + 8,240 * 0.1 + 640 * 0.4) / 1e6 = 0.010072
    assert lines[4] == "  baseline and 3 rounds: up to 4,496 trained, 8,240 prefilled, up to 640 sampled; up to $0.01"
    assert "$" not in "".join(cost_estimate.describe(estimate, None))


def test_a_small_supply_is_cycled_and_measured_once_by_the_guard():
    size = TrainingSize(supply=10, row_tokens=2.0, batch_size=4, steps=6, max_repeats=1, guarded=True)
    estimate = estimate_run(EvaluationSize(1, 1, 1, 1), size, max_rounds=2)
    # 10 rows are 4 + 4 + 2: six steps are two epochs, 20 rows; the guard looks at the 10.
    assert estimate.later_round == {"train": 40, "prefill": 2 + 20, "sample": 1}
    assert estimate.first_round == {"train": 40, "prefill": 2, "sample": 1}


def test_what_the_next_round_takes_is_the_estimate_or_what_one_took_where_that_was_more():
    upper = {"train": 1000, "prefill": 500, "sample": 400}
    baseline = {"train": 0, "prefill": 510, "sample": 300}
    assert expected_round(upper, baseline, []) == {"train": 1000, "prefill": 510, "sample": 400}
    # Short replies so far promise nothing: the next round's may be as long as they can get.
    rounds = [{"train": 990, "prefill": 500, "sample": 20}, {"train": 1010, "prefill": 500, "sample": 40}]
    assert expected_round(upper, baseline, rounds) == {"train": 1010, "prefill": 510, "sample": 400}
    # Samples that were asked twice are paid twice, in the baseline as in a round.
    assert expected_round(upper, {**baseline, "sample": 450}, [])["sample"] == 450
    assert expected_round(upper, baseline, [{**rounds[0], "sample": 420}])["sample"] == 420


def test_a_large_file_is_measured_by_a_seeded_sample():
    lengths = list(range(10_000))
    looked_at: list[int] = []

    def length(item: int) -> int:
        looked_at.append(item)
        return item

    mean = cost_estimate.mean_length(lengths, length, seed=3)
    assert len(set(looked_at)) == len(looked_at) == cost_estimate.LENGTH_SAMPLE
    assert mean == sum(looked_at) / 500
    # The standard error of such a mean is 10,000 / sqrt(12) / sqrt(500) = 129; four of them.
    assert abs(mean - 4999.5) < 4 * 129
    assert mean == cost_estimate.mean_length(lengths, int, seed=3)
    assert cost_estimate.mean_length([1, 2, 6], int, seed=3) == 3
    assert cost_estimate.mean_length([], int, seed=3) == 0


def test_the_length_of_rows_comes_from_what_is_rendered(tmp_path, small_tokenizer):
    chat_format = rendering.get_chat_format("Qwen/Qwen3-8B", small_tokenizer)
    loader = data_loader.DataLoader(chat_format, max_seq_length=40)
    files = []
    for name, sizes in (("short", [1, 90]), ("long", [9, 13])):
        rows = [{"id": f"{name}{size}", "question": "q", "answer": "word " * size} for size in sizes]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(data_loader.load_rows(tmp_path / name, purpose="train").rows)
    settings = config(batch_size=2, steps_per_round=3)
    first = token_sizes.training_size(settings, loader, files[0])
    assert loader.render(files[0][1]) == ()  # 90 words are too long, and the row is dropped
    assert (first.supply, first.row_tokens, first.row_sd) == (1, loader.render(files[0][0])[0].n_tokens, 0.0)
    both = token_sizes.training_size(settings, loader, *files)
    lengths = [loader.render(row)[0].n_tokens for row in files[1]]
    assert both.supply == 3
    assert both.row_tokens == sum(lengths) / 2 > first.row_tokens
    assert both.row_sd == (lengths[1] - lengths[0]) / 2


def test_a_task_s_samples_are_measured_as_they_are_asked(tmp_path, small_tokenizer):
    (tmp_path / "riddles.py").write_text(
        "from inspect_ai import Task, task\n"
        "from inspect_ai.dataset import Sample\n"
        "from inspect_ai.scorer import exact\n"
        "@task\n"
        "def riddles():\n"
        "    samples = [Sample(id='a', input='What is red?', target='a rose'),"
        " Sample(id='b', input='Why?', target='no')]\n"
        "    return Task(dataset=samples, scorer=exact(), epochs=2)\n"
    )
    chat_format = rendering.get_chat_format("Qwen/Qwen3-8B", small_tokenizer)
    loader = data_loader.DataLoader(chat_format, max_seq_length=400)
    plans = inspect_eval.check_tasks([inspect_eval.TaskSpec(f"{tmp_path}/riddles.py@riddles")])
    size = token_sizes.evaluation_size(config(evaluation={"max_tokens": 9}), loader, (), (), plans)
    prompts = [chat_format.prompt_tokens([{"role": "user", "content": text}]) for text in ("What is red?", "Why?")]
    answers = sum(len(small_tokenizer.encode(text)) for text in ("a rose", "no"))
    once = sum(map(len, prompts))
    # Two samples in two epochs are asked four times; their likelihood is measured once each.
    assert size == EvaluationSize(asked=4, prompt_tokens=2 * once, target_tokens=once + answers, max_tokens=9)


def test_a_budget_has_room_up_to_its_limit_and_no_further():
    spent, expected = {"train": 10, "prefill": 20, "sample": 30}, {"train": 1, "prefill": 2, "sample": 3}
    said = {"spent": spent, "expected": expected, "price": PRICE}
    assert limit_passed(config(budget={"tokens": 66}).budget, **said) is None
    passed = limit_passed(config(budget={"tokens": 65}).budget, **said)
    assert passed == "60 tokens are spent and up to 6 more would pass budget.tokens=65"
    # 11 * 2 + 22 * 0.1 + 33 * 0.4 = 37.4 millionths of a dollar.
    assert limit_passed(config(budget={"money": 37.5e-6}).budget, **said) is None
    assert "would pass budget.money" in str(limit_passed(config(budget={"money": 37.3e-6}).budget, **said))
    clock = {**said, "seconds_spent": 50.0, "seconds_expected": 10.0}
    assert limit_passed(config(budget={"seconds": 60}).budget, **clock) is None
    assert "50 s are spent" in str(limit_passed(config(budget={"seconds": 59}).budget, **clock))


def test_a_baseline_that_the_budget_does_not_hold_is_refused():
    baseline = {"train": 0, "prefill": 1260, "sample": 160}
    cost_estimate.refuse_over_budget("the baseline", baseline, config(budget={"tokens": 1420}))
    with pytest.raises(ConfigurationError, match=r"does not hold the baseline .* up to 1,420 more .*tokens=1419"):
        cost_estimate.refuse_over_budget("the baseline", baseline, config(budget={"tokens": 1419}))
