"""The router: which engine a request goes to."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.engine.routing import BLOCK_TOKENS, Router

NUM_SLOTS = 32
PROMPT = np.arange(BLOCK_TOKENS, dtype=np.int32)


@pytest.mark.parametrize(("lead", "keeps"), [(8, True), (9, False)])
def test_prefix_affinity_ends_above_a_quarter_of_the_slots(lead: int, keeps: bool) -> None:
    router = Router()
    for number in range(2):
        router.add_engine(number, NUM_SLOTS)
    home = router.route(PROMPT, 1)
    # The engine that holds the prefix has `lead` more samples to do than the other one.
    router.route(PROMPT[:1], lead - 1, [home])
    assert (router.load(home), router.load(1 - home)) == (lead, 0)
    assert router.route(PROMPT, 1) == (home if keeps else 1 - home)


def test_an_engine_of_few_slots_keeps_a_prefix_for_one_sample() -> None:
    router = Router()
    for number in range(2):
        router.add_engine(number, 1)
    home = router.route(PROMPT, 1)
    assert router.route(PROMPT, 1) == home
    assert router.route(PROMPT, 1) == 1 - home
