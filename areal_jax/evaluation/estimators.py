"""The figures of an evaluation: what samples of tasks tell of a policy, and how sure that is.
Numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import fmean

Interval = tuple[float, float]

Z_95 = 1.959964
"""A normal variable lies within so many standard deviations of its mean 95 % of the time."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k samples is correct, without bias: 1 - C(n - c, k) / C(n, k)
    (Chen et al., arXiv:2107.03374, equation 1). k = 1 gives the share of correct ones."""
    _require(
        1 <= k <= num_samples and 0 <= num_correct <= num_samples,
        f"{num_correct} of {num_samples} samples, k={k}",
    )
    chosen = math.comb(num_samples, k)
    return (chosen - math.comb(num_samples - num_correct, k)) / chosen


def majority_at_k(
    num_samples: int, num_correct: int, wrong_votes: Collection[int], k: int
) -> float:
    """Chance that the most frequent answer of k samples is the correct one, over all choices of k
    of the samples.

    Answers that tie share the vote evenly; samples that are neither correct nor among the wrong
    votes gave no answer and do not vote. Counted exactly: m of the k samples are correct, t other
    answers also have m, all others fewer.

    Args: wrong_votes: how many samples gave each of the wrong answers."""
    silent = num_samples - num_correct - sum(wrong_votes)
    _require(
        1 <= k <= num_samples and num_correct >= 0 and silent >= 0,
        f"{num_correct} + {wrong_votes} of {num_samples}, {k=}",
    )
    total = 0.0
    for m in range(1, min(num_correct, k) + 1):
        # In how many ways the wrong answers can take `sampled` of the samples, with `ties` of them
        # taking m and none more.
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
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length())]


def standard_error(scores: Sequence[float]) -> float:
    """Standard deviation of the scores' mean, sqrt(sum (x - mean)^2 / (n (n - 1))); 0 for a single
    one."""
    mean, n = fmean(scores), len(scores)
    return math.sqrt(sum((score - mean) ** 2 for score in scores) / (n * (n - 1))) if n > 1 else 0.0


def wilson_interval(share: float, error: float, num_tasks: int) -> Interval:
    """Wilson's 95 % interval of a mean of numbers from 0 to 1, for as many yes-or-no tasks as would
    have this standard error: honest at 0 and 1 too, where tasks sampled anew would all be the
    same."""
    n = share * (1 - share) / error**2 if error else num_tasks
    centre = (share + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _require(holds: bool, came: str) -> None:
    if not holds:
        raise ValueError(
            f"expected 1 <= k <= samples, and no more answers than samples, came {came}"
        )
