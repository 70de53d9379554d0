import math
import random

import pytest
from scipy import stats

from error_handling import EvaluationError
from significance import mcnemar_exact, paired_p_value, score_interval, wilson_interval


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (1, 1), (29, 40), (34, 40), (80, 80), (850, 1000)])
def test_wilson_agrees_with_scipy(successes, n):
    expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson_interval(successes, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_worked_by_hand():
    # 8 of 10, z = 1.96: centre (.8 + .19208) / 1.38416, half 1.96 * sqrt(.016 + .009604) / 1.38416
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=2e-4)


def test_wilson_has_width_at_the_ends_and_stays_within_range():
    assert wilson_interval(5, 5)[1] == 1.0
    assert wilson_interval(5, 5)[0] < 0.6
    assert wilson_interval(0, 5)[0] == 0.0
    for successes, n in ((6, 5), (-1, 5), (0, 0)):
        with pytest.raises(EvaluationError):
            wilson_interval(successes, n)


def test_right_and_wrong_scores_get_wilsons_interval():
    assert score_interval([1.0] * 34 + [0.0] * 6) == wilson_interval(34, 40)
    assert score_interval([1, 0, True, False]) == wilson_interval(2, 4)


@pytest.mark.parametrize("scores", [[], [1.0], [0.0], [0.5], [0.5, 0.5, 0.5]])
def test_where_nothing_can_be_said_the_interval_is_unknown(scores):
    assert score_interval(scores) == (None, None)


def test_graded_scores_get_a_bootstrap_interval_near_the_normal_one_and_repeatable():
    rng = random.Random(3)
    scores = [round(rng.random(), 2) for _ in range(400)]
    low, high = score_interval(scores)
    mean, error = sum(scores) / 400, stats.sem(scores)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.2 * error)
    assert score_interval(scores) == (low, high)


def test_scores_that_are_not_finite_are_refused():
    with pytest.raises(EvaluationError, match="score 2 of 3 is nan"):
        score_interval([1.0, math.nan, 0.0])
    with pytest.raises(EvaluationError):
        paired_p_value([0.5, math.inf], [0.5, 0.5])


@pytest.mark.parametrize(
    ("b", "c", "p"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (0, 5, 2 / 32),  # both tails: 1/32 each
        (1, 5, 2 * 7 / 64),  # 1 + 6 of 64, twice
        (0, 6, 2 / 64),
        (2, 8, 2 * 56 / 1024),  # 1 + 10 + 45
    ],
)
def test_mcnemar_worked_by_hand(b, c, p):
    assert mcnemar_exact(b, c) == pytest.approx(p)
    assert mcnemar_exact(c, b) == pytest.approx(p)


def test_mcnemar_refuses_negative_counts():
    with pytest.raises(EvaluationError):
        mcnemar_exact(-1, 2)


def test_a_gain_from_29_to_34_of_40_can_be_within_noise():
    # 3 samples lost and 8 won: 2 * (1 + 11 + 55 + 165) / 2048 = 0.2266; 2 lost and 7 won: 2 * 46 / 512 = 0.18
    base = [1] * 29 + [0] * 11
    assert paired_p_value(base, [0] * 3 + [1] * 26 + [1] * 8 + [0] * 3) == pytest.approx(0.2266, abs=1e-4)
    assert paired_p_value(base, [0] * 2 + [1] * 27 + [1] * 7 + [0] * 4) == pytest.approx(0.1797, abs=1e-4)


def test_the_test_is_paired_equal_sums_can_differ_and_order_matters_not():
    assert paired_p_value([1, 1, 0, 0], [1, 1, 0, 0]) == 1.0
    assert paired_p_value([1, 0], [0, 1]) == 1.0


def test_sign_flips_worked_by_hand():
    # Differences .1, .2, .3 (all up): of 8 sign patterns only +++ and --- are as far from 0.
    assert paired_p_value([0.1, 0.2, 0.3, 0.5], [0.2, 0.4, 0.6, 0.5]) == pytest.approx(2 / 8)
    # -.1, .2, .3 sum to .4: +++ .6, -++ .4 and their mirrors; ++-, +-+ give 0 and .2.
    assert paired_p_value([0.2, 0.2, 0.3], [0.1, 0.4, 0.6]) == pytest.approx(4 / 8)


def test_many_graded_pairs_agree_with_scipys_permutation_test():
    rng = random.Random(1)
    base = [rng.random() for _ in range(60)]
    tuned = [min(1.0, max(0.0, value + rng.gauss(0.04, 0.15))) for value in base]
    differences = [y - x for x, y in zip(base, tuned, strict=True)]
    expected = stats.permutation_test(
        (differences,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", vectorized=True, rng=1
    ).pvalue
    p = paired_p_value(base, tuned)
    assert p == pytest.approx(expected, abs=0.015)
    assert paired_p_value(base, tuned) == p
    assert paired_p_value(tuned, base) == pytest.approx(p, abs=0.015)


def test_a_large_graded_gain_is_significant_but_never_has_p_zero():
    p = paired_p_value([0.1] * 50, [0.9] * 50)
    assert 0 < p < 0.001


def test_unequal_and_empty_pairs_are_refused():
    with pytest.raises(EvaluationError, match="2 and 1 scores"):
        paired_p_value([1, 0], [1])
    with pytest.raises(EvaluationError, match="no samples"):
        paired_p_value([], [])
