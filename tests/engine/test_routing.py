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
    router.assign(home, PROMPT[:1], lead - 1)
    assert (router.load(home), router.load(1 - home)) == (lead, 0)
    assert router.route(PROMPT, 1) == (home if keeps else 1 - home)


def test_an_engine_of_few_slots_keeps_a_prefix_for_one_sample() -> None:
    router = Router()
    for number in range(2):
        router.add_engine(number, 1)
    home = router.route(PROMPT, 1)
    assert router.route(PROMPT, 1) == home
    assert router.route(PROMPT, 1) == 1 - home


def test_the_able_engine_with_the_lowest_load_is_chosen_always() -> None:
    rng, router, loads = np.random.default_rng(0), Router(), dict[int, int]()
    requests = list[tuple[int, int]]()
    for turn in range(4000):
        event = rng.random()
        if len(loads) < 3 or event < 0.02:
            router.add_engine(turn, NUM_SLOTS)
            loads[turn] = 0
        elif event < 0.03:
            leaving = int(rng.choice(list(loads)))
            router.remove_engine(leaving)
            del loads[leaving]
        elif event < 0.5 and requests:
            number, num_samples = requests.pop(int(rng.integers(len(requests))))
            router.complete(number, num_samples)
            if number in loads:
                loads[number] -= num_samples
        else:
            able = set(rng.choice(list(loads), int(rng.integers(len(loads) + 1)), replace=False))
            num_samples = int(rng.integers(1, 5))
            number = router.route(PROMPT[:1], num_samples, able.__contains__)
            assert number in (able or loads)
            assert loads[number] == min(loads[each] for each in able or loads)
            loads[number] += num_samples
            requests.append((number, num_samples))
    assert {number: router.load(number) for number in loads} == loads
