"""The claim of benchmarks/adaptive_split.py, simulated."""

from __future__ import annotations

from itertools import pairwise

import pytest
from adaptive_split import SHIFTS, simulate, speed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "before", "after"), [("600 to 9000 tokens", 3, 6), ("9000 to 600 tokens", 6, 4)]
)
def test_moves_reach_95_percent_of_the_best_split_in_ten_steps(
    shift: str, before: int, after: int
) -> None:
    """Answers change at step 20. Static splits are best with `before` rollout devices until then,
    and with `after` over steps 30 to 40.
    """
    moving = simulate(before, SHIFTS[shift], adaptive=True, seed=1)
    best = simulate(after, SHIFTS[shift], adaptive=False, seed=1)
    stays = simulate(before, SHIFTS[shift], adaptive=False, seed=1)
    assert speed(moving, 30, 40) >= 0.95 * speed(best, 30, 40)
    assert speed(stays, 30, 40) < 0.8 * speed(best, 30, 40)
    # One move, or one more to correct it.
    splits = [step.rollout for step in moving[20:]]
    assert sum(a != b for a, b in pairwise(splits)) <= 2
