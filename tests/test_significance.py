import itertools
import math
import random

import numpy as np
import pytest
from scipy import stats

from error_handling import EvaluationError
from significance import (
    cluster_variance,
    figure_interval,
    mcnemar_exact,
    paired_difference,
    paired_p_value,
    score_interval,
    wilson_interval,
)


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


# ---- clusters


def clustered(groups: int, size: int, seed: int = 5) -> tuple[list[float], list[str]]:
    """Right/wrong scores whose clusters have a share of right ones of their own."""
    rng = random.Random(seed)
    scores, clusters = [], []
    for group in range(groups):
        share = rng.random()
        for _ in range(size + group % 3):
            scores.append(float(rng.random() < share))
            clusters.append(f"doc {group}")
    return scores, clusters


def sandwich(values: list[float], clusters: list[str]) -> float:
    """Liang and Zeger's variance of an intercept by matrices, with the correction G / (G - 1)."""
    y = np.array(values)
    x = np.ones((len(y), 1))
    names = sorted(set(clusters))
    bread = np.linalg.inv(x.T @ x)
    residual = y - (x @ (bread @ x.T @ y[:, None]))[:, 0]
    meat = np.zeros((1, 1))
    for name in names:
        rows = np.array([cluster == name for cluster in clusters])
        score = x[rows].T @ residual[rows][:, None]
        meat += score @ score.T
    return float((bread @ meat @ bread)[0, 0]) * len(names) / (len(names) - 1)


def test_the_variance_between_clusters_is_the_sandwich_s_and_without_ties_that_of_the_mean():
    scores, clusters = clustered(9, 4)
    assert cluster_variance(scores, clusters) == pytest.approx(sandwich(scores, clusters))
    graded = [0.1, 0.9, 0.4, 0.4]
    assert cluster_variance(graded, range(4)) == pytest.approx(stats.sem(graded) ** 2)
    # Two clusters with sums of residuals 1 and -1 over four scores: 2/1 * (1 + 1) / 16.
    assert cluster_variance([1, 1, 0, 0], "aabb") == pytest.approx(0.25)
    with pytest.raises(EvaluationError, match="at least two"):
        cluster_variance([1, 0], "aa")


def test_right_and_wrong_scores_in_clusters_get_wilsons_interval_on_their_effective_number():
    scores, clusters = clustered(9, 4)
    n, share = len(scores), sum(scores) / len(scores)
    effect = sandwich(scores, clusters) / (share * (1 - share) / n)
    assert effect > 1.5
    t, size = stats.t.ppf(0.975, 8), n / effect
    # Wilson's limits are the roots of (x - share)^2 = t^2 x (1 - x) / size.
    roots = np.roots([1 + t * t / size, -2 * share - t * t / size, share * share])
    assert score_interval(scores, clusters=clusters) == pytest.approx(sorted(roots))
    low, high = wilson_interval(round(sum(scores)), n)
    found = score_interval(scores, clusters=clusters)
    assert found[0] < low < high < found[1]


def test_equal_scores_in_clusters_count_a_cluster_as_one_and_never_have_zero_width():
    t = stats.t.ppf(0.975, 4)
    assert score_interval([1.0] * 50, clusters=[n // 10 for n in range(50)]) == pytest.approx((5 / (5 + t * t), 1.0))
    assert score_interval([0.0] * 50, clusters=[n // 10 for n in range(50)]) == pytest.approx((0, t * t / (5 + t * t)))


def test_clusters_that_agree_never_narrow_the_interval():
    # Each cluster holds one right and one wrong: the variance between them is 0, which is no evidence of precision.
    t, n = stats.t.ppf(0.975, 9), 20
    half = t * math.sqrt(0.25 / n + t * t / (4 * n * n)) / (1 + t * t / n)
    found = score_interval([1.0, 0.0] * 10, clusters=[k // 2 for k in range(20)])
    assert found == pytest.approx((0.5 - half, 0.5 + half))


def test_graded_scores_in_clusters_get_the_robust_interval_and_unknown_ones_stay_unknown():
    rng = random.Random(2)
    clusters = [k // 4 for k in range(40)]
    levels = [rng.random() for _ in range(10)]
    scores = [min(1.0, max(0.0, levels[c] + rng.gauss(0, 0.05))) for c in clusters]
    half = stats.t.ppf(0.975, 9) * math.sqrt(sandwich(scores, clusters))
    mean = sum(scores) / 40
    assert score_interval(scores, clusters=clusters) == pytest.approx((max(0, mean - half), min(1, mean + half)))
    assert score_interval([0.2, 0.4], clusters="aa") == (None, None)
    assert score_interval([1.0, 0.0, 1.0], clusters="aaa") == (None, None)
    assert score_interval([0.2, 0.4, 0.2, 0.4], clusters="aabb") == (None, None)
    assert score_interval([1.0], clusters="a") == (None, None)


def test_clusters_of_one_change_nothing_and_each_score_needs_one():
    scores = [1.0, 0.0, 1.0, 1.0]
    assert score_interval(scores, clusters="abcd") == score_interval(scores)
    assert paired_p_value([1, 1, 1, 1, 1], [0, 0, 0, 0, 0], "abcde") == pytest.approx(2 / 32)
    assert paired_difference([0, 1, 0], [1, 1, 0], "abc") == paired_difference([0, 1, 0], [1, 1, 0])
    with pytest.raises(EvaluationError, match="4 scores have 3 clusters"):
        score_interval(scores, clusters="abc")


def test_the_clustered_interval_covers_the_true_share_where_the_plain_one_does_not():
    rng = np.random.default_rng(11)
    clusters = [k // 10 for k in range(100)]
    hits = {True: 0, False: 0}
    for _ in range(300):
        share = rng.beta(0.8 * 7 / 3, 0.2 * 7 / 3, size=10)  # correlation 0.3 within a cluster, mean 0.8
        scores = [float(value) for value in rng.random(100) < np.repeat(share, 10)]
        for known in hits:
            low, high = score_interval(scores, clusters=clusters if known else None)
            hits[known] += low <= 0.8 <= high
    assert hits[True] >= 0.92 * 300
    assert hits[False] < 0.8 * 300


def test_clusters_change_sign_as_one():
    # Gains per cluster 3, 2, -1 and 0: of the 8 patterns of the three that differ, +++ and --- (6) and those of 4.
    base = [0, 0, 0, 0, 0, 1, 1, 0]
    tuned = [1, 1, 1, 1, 1, 0, 1, 0]
    clusters = ["a", "a", "a", "b", "b", "c", "d", "d"]
    sums = [3, 2, -1]
    expected = np.mean([abs(np.dot(signs, sums)) >= 4 for signs in itertools.product((1, -1), repeat=3)])
    assert paired_p_value(base, tuned, clusters) == pytest.approx(expected)
    assert expected == 0.5
    assert paired_p_value(base, tuned) == pytest.approx(2 * 7 / 64)
    assert paired_p_value([0, 0, 0], [1, 1, 1], "aaa") == 1.0
    assert paired_p_value([0, 1, 0], [1, 0, 0], "aab") == 1.0


def test_graded_clusters_agree_with_scipys_permutation_of_their_sums():
    rng = random.Random(4)
    clusters = [k % 20 for k in range(80)]
    base = [rng.random() for _ in clusters]
    tuned = [value + 0.05 + 0.1 * math.sin(c) for value, c in zip(base, clusters, strict=True)]
    sums = [sum(y - x for x, y, c in zip(base, tuned, clusters, strict=True) if c == k) for k in range(20)]
    expected = stats.permutation_test(
        (sums,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", vectorized=True, rng=1
    ).pvalue
    assert paired_p_value(base, tuned, clusters) == pytest.approx(expected, abs=0.015)


# ---- differences


def pairs(both: int, only_tuned: int, only_base: int, neither: int) -> tuple[list[int], list[int]]:
    base = [1] * both + [0] * only_tuned + [1] * only_base + [0] * neither
    return base, [1] * both + [1] * only_tuned + [0] * only_base + [0] * neither


def test_newcombes_paired_interval_as_published_and_by_hand():
    # The example of Newcombe (1998), table II: 36, 12, 2 and 0 pairs.
    assert paired_difference(*pairs(36, 12, 2, 0)) == pytest.approx((0.2, 0.0569, 0.3404), abs=1e-4)
    # No correction below n/2 is left: product 14 * 22 - 5 * 0 = 308, less 41 / 2.
    base, tuned = pairs(14, 5, 0, 22)
    (l1, u1), (l2, u2) = wilson_interval(19, 41), wilson_interval(14, 41)
    p1, p2, phi = 19 / 41, 14 / 41, (308 - 20.5) / math.sqrt(19 * 22 * 14 * 27)
    low = p1 - p2 - math.sqrt((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2)
    high = p1 - p2 + math.sqrt((p2 - l2) ** 2 - 2 * phi * (p2 - l2) * (u1 - p1) + (u1 - p1) ** 2)
    assert paired_difference(base, tuned) == pytest.approx((5 / 41, low, high))


def test_a_difference_turns_its_sign_with_its_sides_and_keeps_a_width_at_the_ends():
    base, tuned = pairs(20, 9, 3, 8)
    there, back = paired_difference(base, tuned), paired_difference(tuned, base)
    assert (back.difference, back.low, back.high) == pytest.approx((-there.difference, -there.high, -there.low))
    same = paired_difference([1] * 10, [1] * 10)
    assert same.difference == 0
    assert same.low < 0 < same.high
    assert paired_difference([0] * 10, [1] * 10).low < 1


def test_graded_differences_get_a_bootstrap_and_unknown_ones_stay_unknown():
    rng = random.Random(6)
    base = [rng.random() for _ in range(300)]
    tuned = [value + rng.gauss(0.05, 0.1) for value in base]
    error = stats.sem([y - x for x, y in zip(base, tuned, strict=True)])
    mean, low, high = paired_difference(base, tuned)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.2 * error)
    assert paired_difference([0.5], [0.75]) == (0.25, None, None)
    assert paired_difference([1], [1]) == (0, None, None)
    assert paired_difference([0.1, 0.2], [0.3, 0.4])[1:] == (None, None)
    with pytest.raises(EvaluationError):
        paired_difference([1], [])


def test_a_difference_over_clusters_has_the_robust_interval():
    base, clusters = clustered(8, 5, seed=1)
    tuned, _ = clustered(8, 5, seed=3)
    differences = [y - x for x, y in zip(base, tuned, strict=True)]
    half = stats.t.ppf(0.975, 7) * math.sqrt(sandwich(differences, clusters))
    mean = sum(differences) / len(differences)
    expected = (mean, max(-1, mean - half), min(1, mean + half))
    assert paired_difference(base, tuned, clusters) == pytest.approx(expected)
    assert paired_difference([0, 0, 0], [1, 0, 0], "aaa") == (pytest.approx(1 / 3), None, None)
    assert paired_difference([0, 0, 0], [1, 1, 1], "aab") == (1, None, None)


# ---- figures that are no mean


def test_a_figure_is_bootstrapped_over_samples_or_whole_clusters():
    scores, clusters = clustered(12, 6)

    def mean(positions):
        return sum(scores[position] for position in positions) / len(positions)

    low, high = figure_interval(len(scores), mean)
    error = stats.sem(scores)
    centre = sum(scores) / len(scores)
    assert (low, high) == pytest.approx((centre - 1.96 * error, centre + 1.96 * error), abs=0.25 * error)
    wide = figure_interval(len(scores), mean, clusters=clusters)
    assert wide[1] - wide[0] > 1.3 * (high - low)
    assert figure_interval(len(scores), mean) == (low, high)
    assert figure_interval(1, mean) == (None, None)
    assert figure_interval(5, lambda _: 1.0) == (None, None)
    assert figure_interval(4, mean, clusters="aaaa") == (None, None)
