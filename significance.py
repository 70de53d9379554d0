"""How sure a score is: 95 % intervals, and paired tests between two evaluations of the same samples.

Pure and repeatable: what is resampled is resampled with a fixed seed. Unknown is None, never zero width::

    low, high = score_interval([1.0, 0.0, 1.0, 1.0])
    low, high = score_interval(scores, clusters=documents)    # questions about one document stand or fall together
    p = paired_p_value(base_scores, tuned_scores)
    difference, low, high = paired_difference(base_scores, tuned_scores)

`clusters` names each score's cluster, in the order of the scores; without it every score is a cluster of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist, fmean
from typing import NamedTuple

from error_handling import EvaluationError

_SEED = 20240229
_RESAMPLES = 9_999
# A figure that is not a mean is worked out anew for every resample, in Python.
_FIGURE_RESAMPLES = 999
_ALL_SIGNS_UP_TO = 12
# Values that differ by no more than this are equal but for rounding.
_NO_SPREAD = 1e-12
# Draws held in memory at once while resampling (about 32 MB).
_CHUNK_VALUES = 4_000_000

Interval = tuple[float | None, float | None]


class PairedDifference(NamedTuple):
    """Mean of tuned minus base, in [-1, 1], and its 95 % interval; None where that is not known."""

    difference: float
    low: float | None
    high: float | None


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, as (low, high) in [0, 1].

    Wilson, E. B. (1927), Probable inference, the law of succession, and statistical inference, JASA 22, 209-212. It
    keeps its coverage at proportions of 0 and 1, where the normal approximation has zero width.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"an interval needs 0 <= successes <= n and n >= 1, got {successes} of {n}")
    return _wilson(successes / n, n, NormalDist().inv_cdf(0.5 + confidence / 2))


def _wilson(share: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share of `n` trials, which need not be a whole number, at the quantile `z`."""
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # The formula gives exactly 0 and 1 at the ends; rounding gives nearly so.
    return 0.0 if share == 0 else max(0.0, centre - half), 1.0 if share == 1 else min(1.0, centre + half)


def score_interval(
    scores: Sequence[float], confidence: float = 0.95, *, clusters: Sequence[Hashable] | None = None
) -> Interval:
    """The interval of the mean of `scores`: Wilson's when each is 0 or 1, a percentile bootstrap otherwise.

    (None, None) where nothing can be said: fewer than 2 scores, or graded scores that are all equal, whose spread a
    bootstrap would report as 0. Bootstrap: Efron and Tibshirani (1993), An Introduction to the Bootstrap, 13.3.

    With `clusters`, of which two scores share one, the interval rests on the cluster-robust variance of the mean
    (see `cluster_variance`) and Student's t with one degree of freedom fewer than there are G clusters. Graded
    scores: mean +- t sqrt(V), cut to [0, 1]. Scores of 0 or 1: Wilson's at t and the effective sample size n / D, where
    D = V / (p (1 - p) / n) is the design effect, at least 1 (Kish 1965, Survey Sampling, 8.2; Korn and Graubard 1998,
    Survey Methodology 24, 193-201). When all of them are equal D is not known, and a cluster counts as one score:
    n / D = G. (None, None) for a single cluster, and for graded scores whose clusters show no spread.
    """
    _check_finite(scores)
    n = len(scores)
    if n < 2:
        return None, None
    if clusters is not None and (groups := _cluster_count(scores, clusters)) < n:
        return _clustered_interval(scores, clusters, groups, confidence)
    if _all_binary(scores):
        return wilson_interval(round(sum(scores)), n, confidence)
    return _bootstrap_mean(scores, confidence)


def _clustered_interval(
    scores: Sequence[float], clusters: Sequence[Hashable], groups: int, confidence: float
) -> Interval:
    if groups < 2:
        return None, None
    n, mean, variance = len(scores), fmean(scores), cluster_variance(scores, clusters)
    t = _t_quantile(groups - 1, confidence)
    if not _all_binary(scores):
        half = t * math.sqrt(variance)
        # Clusters with equal means show no spread, as equal scores do not.
        return (max(0.0, mean - half), min(1.0, mean + half)) if half > _NO_SPREAD else (None, None)
    independent = mean * (1 - mean) / n
    effective = groups if independent == 0 else n / max(1.0, variance / independent)
    return _wilson(mean, effective, t)


def cluster_variance(scores: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """Variance of the mean of `scores` when those of one cluster may go together.

    V = G / (G - 1) * sum over the G clusters of (sum of the cluster's residuals)^2 / n^2, the cluster-robust variance
    of an intercept (Liang and Zeger 1986, Biometrika 73, 13-22; Miller 2024, Adding Error Bars to Evals,
    arXiv:2411.00640, section 2.2), with the usual correction for few clusters. Needs two clusters.
    """
    mean = fmean(scores)
    residuals = _cluster_sums([score - mean for score in scores], clusters)
    groups = len(residuals)
    if groups < 2:
        raise EvaluationError("the variance between clusters needs at least two of them")
    return groups / (groups - 1) * math.fsum(total * total for total in residuals) / len(scores) ** 2


def figure_interval(
    n: int,
    figure: Callable[[Sequence[int]], float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> Interval:
    """Percentile bootstrap of a figure that is no mean, such as an F1 score: resampled are the `n` samples it is over.

    `figure` works it out from the positions (0 to n - 1, repeated as drawn) it is given; with `clusters`, whole
    clusters are drawn. (None, None) with fewer than 2 samples or clusters, when every draw gives the same, and when
    `figure` raises `EvaluationError` on a draw: it is then not defined on samples like these.
    """
    import numpy as np

    members: list[list[int]] = [[index] for index in range(n)]
    if clusters is not None:
        _cluster_count(range(n), clusters)
        by_cluster: dict[Hashable, list[int]] = {}
        for index, cluster in enumerate(clusters):
            by_cluster.setdefault(cluster, []).append(index)
        members = list(by_cluster.values())
    if len(members) < 2:
        return None, None
    rng = np.random.default_rng(_SEED)
    drawn = []
    for _ in range(_FIGURE_RESAMPLES):
        chosen = rng.integers(0, len(members), size=len(members)).tolist()
        try:
            drawn.append(figure([index for group in chosen for index in members[group]]))
        except EvaluationError:
            return None, None
    _check_finite(drawn)
    if max(drawn) - min(drawn) <= _NO_SPREAD:
        return None, None
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _bootstrap_mean(scores: Sequence[float], confidence: float) -> Interval:
    n = len(scores)
    if max(scores) - min(scores) <= _NO_SPREAD:
        return None, None
    import numpy as np

    values = np.asarray(scores, dtype=float)
    rng = np.random.default_rng(_SEED)
    means: list[float] = []
    rows = max(1, _CHUNK_VALUES // n)
    while len(means) < _RESAMPLES:
        draws = rng.integers(0, n, size=(min(rows, _RESAMPLES - len(means)), n))
        means.extend(values[draws].mean(axis=1))
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p of McNemar's exact test; `b` and `c` count the pairs that differ in each direction.

    The exact binomial form: under no difference b is Binomial(b + c, 1/2). McNemar, Q. (1947), Note on the sampling
    error of the difference between correlated proportions, Psychometrika 12, 153-157. 1.0 when no pair differs.
    """
    if b < 0 or c < 0:
        raise EvaluationError(f"counts of differing pairs cannot be negative, got {b} and {c}")
    if b + c == 0:
        return 1.0
    from scipy import stats

    return float(stats.binomtest(b, b + c, 0.5).pvalue)


def paired_p_value(base: Sequence[float], tuned: Sequence[float], clusters: Sequence[Hashable] | None = None) -> float:
    """Two-sided p that the mean of two evaluations of the same samples, in the same order, differs by chance alone.

    Exact McNemar when every score is 0 or 1; otherwise a sign-flip permutation test of the differences (Fisher 1935,
    The Design of Experiments, 21; all sign patterns up to 12 differing pairs, else 9,999 random ones with the observed
    one counted in, as in Phipson and Smyth 2010). 1.0 when no pair differs.

    With `clusters`, of which two samples share one, whole clusters change sign: what is flipped are the sums of the
    clusters' differences, whatever the scores are. A single cluster gives 1.0.
    """
    _check_pairs(base, tuned)
    if clusters is not None and _cluster_count(base, clusters) < len(base):
        sums = _cluster_sums([y - x for x, y in zip(base, tuned, strict=True)], clusters)
        return _sign_flip_p([total for total in sums if abs(total) > _NO_SPREAD])
    if _all_binary(base) and _all_binary(tuned):
        pairs = list(zip(base, tuned, strict=True))
        return mcnemar_exact(sum(x > y for x, y in pairs), sum(x < y for x, y in pairs))
    return _sign_flip_p([y - x for x, y in zip(base, tuned, strict=True) if y != x])


def paired_difference(
    base: Sequence[float], tuned: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> PairedDifference:
    """Mean of tuned minus base over the same samples in the same order, with its 95 % interval.

    Scores of 0 or 1: Newcombe's square-and-add interval of paired proportions (1998, Statistics in Medicine 17,
    2635-2650, method 10), which keeps a width where no pair differs. Graded ones: percentile bootstrap of the
    differences. With `clusters`, of which two samples share one: mean +- t sqrt(V) with the cluster-robust variance V
    of the differences and G - 1 degrees of freedom, cut to [-1, 1]. The interval is (None, None) for fewer than 2
    samples or clusters and, but for Newcombe's, where all differences (of clusters: their means) are equal.
    """
    _check_pairs(base, tuned)
    differences = [y - x for x, y in zip(base, tuned, strict=True)]
    mean, n = fmean(differences), len(differences)
    if n < 2:
        return PairedDifference(mean, None, None)
    if clusters is not None and (groups := _cluster_count(base, clusters)) < n:
        if groups < 2:
            return PairedDifference(mean, None, None)
        half = _t_quantile(groups - 1) * math.sqrt(cluster_variance(differences, clusters))
        if half <= _NO_SPREAD:
            return PairedDifference(mean, None, None)
        return PairedDifference(mean, max(-1.0, mean - half), min(1.0, mean + half))
    if _all_binary(base) and _all_binary(tuned):
        pairs = list(zip(base, tuned, strict=True))
        counts = [sum(pair == kind for pair in pairs) for kind in ((1, 1), (0, 1), (1, 0), (0, 0))]
        return PairedDifference(mean, *_newcombe_paired(*counts))
    return PairedDifference(mean, *_bootstrap_mean(differences, 0.95))


def _newcombe_paired(both: int, only_tuned: int, only_base: int, neither: int) -> tuple[float, float]:
    """Newcombe's method 10 from the counts of pairs that are right in both, in one, or in neither evaluation."""
    n = both + only_tuned + only_base + neither
    tuned, base = both + only_tuned, both + only_base
    tuned_low, tuned_high = wilson_interval(tuned, n)
    base_low, base_high = wilson_interval(base, n)
    margins = tuned * (n - tuned) * base * (n - base)
    product = both * neither - only_tuned * only_base
    # A positive correlation, which narrows the interval, is corrected for continuity.
    correlation = (max(0.0, product - n / 2) if product > 0 else product) / math.sqrt(margins) if margins else 0.0

    def reach(mine: float, other: float) -> float:
        return math.sqrt(max(0.0, mine * mine - 2 * correlation * mine * other + other * other))

    p_tuned, p_base = tuned / n, base / n
    low = p_tuned - p_base - reach(p_tuned - tuned_low, base_high - p_base)
    high = p_tuned - p_base + reach(tuned_high - p_tuned, p_base - base_low)
    return max(-1.0, low), min(1.0, high)


def _sign_flip_p(differences: Sequence[float]) -> float:
    if not differences:
        return 1.0
    import numpy as np

    values = np.asarray(differences, dtype=float)
    n = len(values)
    # Sums that are equal in exact arithmetic must compare as equal.
    observed = abs(values.sum()) * (1 - 1e-9)
    if n <= _ALL_SIGNS_UP_TO:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
        return float(np.mean(np.abs(signs @ values) >= observed))
    rng = np.random.default_rng(_SEED)
    as_extreme = done = 0
    rows = max(1, _CHUNK_VALUES // n)
    while done < _RESAMPLES:
        size = min(rows, _RESAMPLES - done)
        signs = 1 - 2 * rng.integers(0, 2, size=(size, n), dtype=np.int8)
        as_extreme += int(np.sum(np.abs(signs @ values) >= observed))
        done += size
    return (as_extreme + 1) / (_RESAMPLES + 1)


def _t_quantile(degrees: int, confidence: float = 0.95) -> float:
    from scipy import stats

    return float(stats.t.ppf(0.5 + confidence / 2, degrees))


def _cluster_count(scores: Sequence[float], clusters: Sequence[Hashable]) -> int:
    if len(clusters) != len(scores):
        raise EvaluationError(f"{len(scores)} scores have {len(clusters)} clusters; each needs its own")
    return len(set(clusters))


def _cluster_sums(values: Sequence[float], clusters: Sequence[Hashable]) -> list[float]:
    parts: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        parts.setdefault(cluster, []).append(value)
    return [math.fsum(part) for part in parts.values()]


def _check_pairs(base: Sequence[float], tuned: Sequence[float]) -> None:
    if len(base) != len(tuned):
        raise EvaluationError(f"a paired test needs the same samples twice, got {len(base)} and {len(tuned)} scores")
    if not base:
        raise EvaluationError("a paired test of no samples says nothing")
    _check_finite(base)
    _check_finite(tuned)


def _all_binary(scores: Sequence[float]) -> bool:
    return all(score in (0, 1) for score in scores)


def _check_finite(scores: Sequence[float]) -> None:
    bad = next((index for index, score in enumerate(scores) if not math.isfinite(score)), None)
    if bad is not None:
        raise EvaluationError(f"score {bad + 1} of {len(scores)} is {scores[bad]}: only finite scores can be compared")
