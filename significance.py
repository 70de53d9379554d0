"""How sure a score is: 95 % intervals, and paired tests between two evaluations of the same samples.

Pure and repeatable: what is resampled is resampled with a fixed seed. Unknown is None, never zero width::

    low, high = score_interval([1.0, 0.0, 1.0, 1.0])
    p = paired_p_value(base_scores, tuned_scores)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from error_handling import EvaluationError

_SEED = 20240229
_RESAMPLES = 9_999
_ALL_SIGNS_UP_TO = 12
# Draws held in memory at once while resampling (about 32 MB).
_CHUNK_VALUES = 4_000_000


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, as (low, high) in [0, 1].

    Wilson, E. B. (1927), Probable inference, the law of succession, and statistical inference, JASA 22, 209-212. It
    keeps its coverage at proportions of 0 and 1, where the normal approximation has zero width.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"an interval needs 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # The formula gives exactly 0 and 1 at the ends; rounding gives nearly so.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return low, 1.0 if successes == n else min(1.0, centre + half)


def score_interval(scores: Sequence[float], confidence: float = 0.95) -> tuple[float | None, float | None]:
    """The interval of the mean of `scores`: Wilson's when each is 0 or 1, a percentile bootstrap otherwise.

    (None, None) where nothing can be said: fewer than 2 scores, or graded scores that are all equal, whose spread a
    bootstrap would report as 0. Bootstrap: Efron and Tibshirani (1993), An Introduction to the Bootstrap, 13.3.
    """
    _check_finite(scores)
    n = len(scores)
    if n < 2:
        return None, None
    if _all_binary(scores):
        return wilson_interval(round(sum(scores)), n, confidence)
    if min(scores) == max(scores):
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


def paired_p_value(base: Sequence[float], tuned: Sequence[float]) -> float:
    """Two-sided p that the mean of two evaluations of the same samples, in the same order, differs by chance alone.

    Exact McNemar when every score is 0 or 1; otherwise a sign-flip permutation test of the differences (Fisher 1935,
    The Design of Experiments, 21; all sign patterns up to 12 differing pairs, else 9,999 random ones with the observed
    one counted in, as in Phipson and Smyth 2010). 1.0 when no pair differs.
    """
    if len(base) != len(tuned):
        raise EvaluationError(f"a paired test needs the same samples twice, got {len(base)} and {len(tuned)} scores")
    if not base:
        raise EvaluationError("a paired test of no samples says nothing")
    _check_finite(base)
    _check_finite(tuned)
    if _all_binary(base) and _all_binary(tuned):
        pairs = list(zip(base, tuned, strict=True))
        return mcnemar_exact(sum(x > y for x, y in pairs), sum(x < y for x, y in pairs))
    return _sign_flip_p([y - x for x, y in zip(base, tuned, strict=True) if y != x])


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


def _all_binary(scores: Sequence[float]) -> bool:
    return all(score in (0, 1) for score in scores)


def _check_finite(scores: Sequence[float]) -> None:
    bad = next((index for index, score in enumerate(scores) if not math.isfinite(score)), None)
    if bad is not None:
        raise EvaluationError(f"score {bad + 1} of {len(scores)} is {scores[bad]}: only finite scores can be compared")
