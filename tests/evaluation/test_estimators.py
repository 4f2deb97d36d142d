from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import pytest

from areal_jax.evaluation.estimators import (
    majority_at_k,
    pass_at_k,
    powers_of_two,
    standard_error,
    wilson_interval,
)


def enumerated(samples: str, k: int) -> tuple[float, float]:
    """pass@k and maj@k by looking at every choice of k samples. R is right, a dash no answer, other
    letters wrong answers."""
    passes, votes_won = Fraction(0), Fraction(0)
    choices = list(combinations(samples, k))
    for chosen in choices:
        passes += "R" in chosen
        votes = Counter(sample for sample in chosen if sample != "-")
        most = max(votes.values(), default=0)
        winners = [answer for answer, count in votes.items() if count == most]
        votes_won += Fraction("R" in winners, max(1, len(winners)))
    return float(passes / len(choices)), float(votes_won / len(choices))


@pytest.mark.parametrize(
    "samples",
    ["R", "-", "RRa", "RaabbR--", "abcdeR", "RRRaaabbb-", "aaaa", "----", "RRRR", "Raaab--c"],
)
def test_pass_at_k_and_majority_equal_enumeration(samples: str) -> None:
    wrong = [count for answer, count in Counter(samples).items() if answer not in "R-"]
    for k in range(1, len(samples) + 1):
        passes, majority = enumerated(samples, k)
        assert pass_at_k(len(samples), samples.count("R"), k) == pytest.approx(passes)
        assert majority_at_k(len(samples), samples.count("R"), wrong, k) == pytest.approx(majority)


def test_pass_at_k_equals_hand_computed_numbers() -> None:
    # 1 - C(7, 4) / C(10, 4) = 1 - 35 / 210.
    assert pass_at_k(10, 3, 4) == pytest.approx(5 / 6)
    # Fewer wrong samples than k: one of them must be right.
    assert pass_at_k(10, 7, 4) == 1.0
    assert [pass_at_k(32, 0, k) for k in powers_of_two(32)] == [0.0] * 6
    # The estimator.s paper uses 200 samples; nothing overflows.
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    # The biased 1 - (1 - p)^k gives 0.9375 here.
    assert pass_at_k(8, 4, 4) == pytest.approx(1 - 1 / 70)


def test_majority_equals_hand_computed_numbers() -> None:
    # Right 2, wrong 2 and 2: three tie, a third of the vote.
    assert majority_at_k(6, 2, [2, 2], 6) == pytest.approx(1 / 3)
    # Samples without an answer do not vote: 1 vote against none, with 5 of 6 silent.
    assert majority_at_k(6, 1, [], 6) == 1.0
    assert majority_at_k(6, 0, [], 6) == 0.0
    # Sampled once, it is pass@1.
    assert majority_at_k(9, 4, [3, 1], 1) == pytest.approx(4 / 9)
    # As many different wrong answers as the paper.s samples.
    assert majority_at_k(64, 2, [1] * 62, 64) == pytest.approx(1.0)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="k=5"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="3 of 2"):
        pass_at_k(2, 3, 1)
    with pytest.raises(ValueError, match="k=2"):
        majority_at_k(3, 2, [2], 2)


def test_powers_of_two_end_at_the_number_of_samples() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(7) == [1, 2, 4]
    assert powers_of_two(8) == [1, 2, 4, 8]


def test_interval_equals_wilsons() -> None:
    # 5 of 10 (n = 10): centre 1/2, half width z / (1 + z^2 / n) * sqrt(p q / n + z^2 / 4 n^2) =
    # 0.26341.
    error = math.sqrt(0.25 / 10)
    assert wilson_interval(0.5, error, 99) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    # None of 30 does not mean never: z^2 / (n + z^2) = 0.113513.
    assert wilson_interval(0.0, 0.0, 30) == pytest.approx((0.0, 0.113513), abs=1e-6)
    assert wilson_interval(1.0, 0.0, 30) == pytest.approx((0.886487, 1.0), abs=1e-6)


def test_standard_error_is_that_of_the_mean() -> None:
    # 200 of 400: the variance with n - 1 is 100 / 399, over 400 tasks.
    assert standard_error([0.0, 1.0] * 200) == pytest.approx(math.sqrt(100 / 399 / 400))
    assert standard_error([1.0]) == 0.0
