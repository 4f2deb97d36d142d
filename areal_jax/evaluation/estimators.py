"""Estimators of pass@k, maj@k and their uncertainty. Numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean

Interval = tuple[float, float]

Z_95 = 1.959964
"""Standard deviations around the mean that contain 95 % of a normal distribution."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the probability that at least one of k samples is correct, without bias.

    It is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374, equation 1); k = 1 gives the
    share of correct samples.
    """
    _require(
        1 <= k <= num_samples and 0 <= num_correct <= num_samples,
        f"{num_correct} of {num_samples} samples, k={k}",
    )
    chosen = math.comb(num_samples, k)
    return (chosen - math.comb(num_samples - num_correct, k)) / chosen


def majority_at_k(
    num_samples: int, num_correct: int, wrong_votes: Collection[int], k: int
) -> float:
    """Compute the probability that the majority answer of k samples is correct, over all choices of
    k of the samples.

    Ties share the vote evenly; samples that are neither correct nor in `wrong_votes` have no answer
    and do not vote. The count is exact: m of the k samples are correct, t other answers also have
    m, all others fewer.

    Args:
        num_samples: number of samples.
        num_correct: number of correct samples.
        wrong_votes: number of samples of each wrong answer.
        k: size of the vote.
    """
    silent = num_samples - num_correct - sum(wrong_votes)
    _require(
        1 <= k <= num_samples and num_correct >= 0 and silent >= 0,
        f"{num_correct} + {wrong_votes} of {num_samples}, {k=}",
    )
    total = 0.0
    for m in range(1, min(num_correct, k) + 1):
        # Number of ways in which wrong answers take `sampled` samples, `ties` of them with exactly
        # m and none with more.
        ways = {(0, 0): 1}
        for votes in wrong_votes:
            following = dict[tuple[int, int], int]()
            for (sampled, ties), count in ways.items():
                for taken in range(min(votes, m, k - m - sampled) + 1):
                    key = sampled + taken, ties + (taken == m)
                    following[key] = following.get(key, 0) + count * math.comb(votes, taken)
            ways = following
        by_ties = dict[int, int]()
        for (sampled, ties), count in ways.items():
            by_ties[ties] = by_ties.get(ties, 0) + count * math.comb(silent, k - m - sampled)
        chosen = math.comb(num_samples, k)
        total += sum(
            math.comb(num_correct, m) * count / ((ties + 1) * chosen)
            for ties, count in sorted(by_ties.items())
        )
    return total


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length())]


def standard_error(scores: Sequence[float]) -> float:
    """Compute the standard error of the mean, sqrt(sum (x - mean)^2 / (n (n - 1))); 0 for one
    score.
    """
    mean, n = fmean(scores), len(scores)
    return math.sqrt(sum((score - mean) ** 2 for score in scores) / (n * (n - 1))) if n > 1 else 0.0


def wilson_interval(share: float, error: float, num_tasks: int) -> Interval:
    """Compute Wilson's 95 % interval of a mean of numbers from 0 to 1.

    It is that of as many binary tasks as have this standard error, and has a positive width at
    means of 0 and 1 too.

    Args:
        share: the mean.
        error: its standard error.
        num_tasks: number of tasks, used if the standard error is 0.
    """
    n = share * (1 - share) / error**2 if error else num_tasks
    centre = (share + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _require(holds: bool, found: str) -> None:
    if not holds:
        raise ValueError(
            f"expected 1 <= k <= samples, and no more answers than samples, found {found}"
        )
