"""GAE: advantages of tokens by a critic."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.rl.advantages import generalized_advantages, normalized
from areal_jax.rl.config import GAE

VALUES = np.arange(1, 9) / 10
"""Of the state after each of 8 tokens."""


def before(values: np.ndarray) -> np.ndarray:
    """Of the state before each token; nothing is said of that before the first."""
    return np.append(np.nan, values[:-1])


def by_definition(config: GAE, rewards: np.ndarray, values: np.ndarray, drawn: np.ndarray, value_after: float) -> np.ndarray:
    """Backwards, token by token: where none was drawn, next value and sum pass through as they are (AReaL)."""
    advantages, next_value, accumulated = np.zeros(len(drawn)), value_after, 0.0
    for t in reversed(range(len(drawn))):
        if drawn[t]:
            delta = rewards[t] + config.gamma * next_value - values[t]
            advantages[t] = accumulated = delta + config.gamma * config.lam * accumulated
            next_value = values[t]
    return advantages


def test_an_answer_that_ended_equals_areals_numbers() -> None:
    # 2 tokens of prompt, 3 of answer, reward 5 on the last; AReaL's places are those of the states, one earlier. Backwards:
    # 5 - .4 = 4.6;  .9 · .4 - .3 + .72 · 4.6 = 3.372;  .9 · .3 - .2 + .72 · 3.372 = 2.49784.
    drawn, rewards = np.array([0, 0, 1, 1, 1], bool), np.array([0, 0, 0, 0, 5.0])
    found = generalized_advantages(GAE(gamma=0.9, lam=0.8), rewards, before(VALUES)[:5], drawn, 0.0)
    np.testing.assert_allclose(found, [0, 0, 2.49784, 3.372, 4.6], atol=1e-6)
    # gamma = lambda = 1 without a critic's opinion: the reward.
    found = generalized_advantages(GAE(gamma=1.0, lam=1.0), rewards, np.zeros(5), drawn, 0.0)
    np.testing.assert_array_equal(found, [0, 0, 5, 5, 5])


def test_an_answer_that_was_cut_off_goes_on_in_the_critics_opinion_and_tools_cost_no_time() -> None:
    # Tokens 3 and 4 are a tool's. -5 + .9 · .8 - .7 = -4.98 on the last, the value of the state behind it being .8; then
    # .9 · .7 - .6 - .72 · 4.98 = -3.5556;  .9 · .6 - .5 - .72 · 3.5556 = -2.520032;  over the tool, whose own values are not
    # read: .9 · .5 - .2 - .72 · 2.520032 = -1.564423;  .9 · .2 - .1 - .72 · 1.564423 = -1.046385.
    drawn = np.array([0, 1, 1, 0, 0, 1, 1, 1], bool)
    rewards = np.array([0, 0, 0, 0, 0, 0, 0, -5.0])
    config = GAE(gamma=0.9, lam=0.8)
    found = generalized_advantages(config, rewards, before(VALUES), drawn, value_after=0.8)
    np.testing.assert_allclose(found[drawn], [-1.046385, -1.564423, -2.520032, -3.5556, -4.98], atol=1e-6)
    assert not found[~drawn].any()


def test_it_equals_the_loop_on_a_thousand_random_masks() -> None:
    rng = np.random.default_rng(0)
    for i in range(1000):
        length = int(rng.integers(1, 70))
        drawn = rng.random(length) < rng.random()
        config = GAE(gamma=float(rng.choice([1.0, 0.9, 0.0])), lam=float(rng.choice([1.0, 0.95, 0.5, 0.0])))
        # What is said where no token was drawn is not read.
        rewards, values = (np.where(drawn, rng.normal(size=length), np.nan) for _ in range(2))
        value_after = float(rng.normal()) if i % 2 else 0.0
        found = generalized_advantages(config, rewards, values, drawn, value_after)
        np.testing.assert_allclose(found, by_definition(config, rewards, values, drawn, value_after), atol=1e-12)


def test_with_lambda_1_the_return_is_all_that_is_still_to_come() -> None:
    # A + V = r_t + gamma r_{t+1} + ..., whatever the critic says: 1 + .5 · 2 + .25 · (4 + .5 · 8) = 4.
    values = np.array([9.0, -3.0, 0.5])
    found = generalized_advantages(GAE(gamma=0.5, lam=1.0), np.array([1.0, 2.0, 4.0]), values, np.ones(3, bool), 8.0)
    np.testing.assert_allclose(found + values, [4.0, 6.0, 8.0])


def test_advantages_are_normalized_over_the_counted_tokens() -> None:
    # 1, 2, 4, 6, 8, 9 have mean 5 and unbiased std sqrt(52 / 5) = 3.2249; the 100 is not counted: 95 / 3.2249 = 29.4583.
    given = [np.array([1.0, 100.0, 2.0]), np.array([4.0, 6.0, 8.0, 9.0])]
    counted = [np.array([True, False, True]), np.ones(4, bool)]
    first, second = normalized(given, counted, eps=0.0)
    np.testing.assert_allclose(first, [-1.2403, 29.4583, -0.9303], atol=1e-4)
    np.testing.assert_allclose(second, [-0.3101, 0.3101, 0.9303, 1.2403], atol=1e-4)


@pytest.mark.parametrize("counted", [[True, True], [False, False]])
def test_equal_advantages_and_none_at_all_become_zero(counted: list[bool]) -> None:
    (found,) = normalized([np.array([0.1, 0.1])], [np.array(counted)], eps=1e-5)
    np.testing.assert_array_equal(found, [0.0, 0.0])
