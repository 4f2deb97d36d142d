from __future__ import annotations

import numpy as np
import pytest
from micro_batching import BUDGET, NUM_FIXED, RANKS, seconds_on_ranks


def test_fixed_micro_batches_wait_and_packed_ones_do_not() -> None:
    # Each rank has 32 micro-batches of one sequence. The first rank's are of 16 384 tokens, all
    # others of 8192: two or four fit into a row, 16 + 7 · 8 rows in all, 9 for each rank.
    lengths = np.full((RANKS, NUM_FIXED), BUDGET // 4)
    lengths[0] *= 2
    for meet in (False, True):
        fixed, packed = seconds_on_ranks(
            lambda tokens, pairs: tokens, lengths.reshape(-1), meet=meet
        )
        assert (fixed, packed) == (32 * BUDGET / 2, 9 * BUDGET)


def test_ranks_that_synchronize_once_wait_once() -> None:
    # Two micro-batches' worth of work on the first rank at its beginning, on the second at its end:
    # meeting in each costs both.
    lengths = np.full((RANKS, NUM_FIXED), 1)
    lengths[0, 0] = lengths[1, -1] = 1001
    once, always = (
        seconds_on_ranks(lambda tokens, pairs: tokens, lengths.reshape(-1), meet=meet)[0]
        for meet in (False, True)
    )
    assert (once, always) == pytest.approx((1032, 2032))
