"""GAE: advantages of tokens by a critic."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.rl.advantages import (
    Trajectory,
    compute_advantages,
    generalized_advantages,
    value_targets,
)
from areal_jax.rl.config import GAE

VALUES = np.arange(1, 9) / 10
"""Of the state after each of 8 tokens."""


def before(values: np.ndarray) -> np.ndarray:
    """Of the state before each token; nothing is said of that before the first."""
    return np.append(np.nan, values[:-1])


def by_definition(config: GAE, given: Trajectory) -> np.ndarray:
    """Backwards, token by token: where none was sampled, next value and sum pass through as they
    are (AReaL)."""
    assert given.values is not None and given.token_rewards is not None
    advantages, next_value, accumulated, reward = (
        np.zeros(len(given.action_mask)),
        given.value_after,
        0.0,
        given.reward,
    )
    for t in reversed(range(len(given.action_mask))):
        if given.action_mask[t]:
            delta = given.token_rewards[t] + reward + config.gamma * next_value - given.values[t]
            advantages[t] = accumulated = delta + config.gamma * config.lam * accumulated
            next_value, reward = given.values[t], 0.0
    return advantages


def test_an_answer_that_ended_equals_areals_numbers() -> None:
    # 2 tokens of prompt, 3 of answer, reward 5 on the last; AReaL's places are those of the states,
    # one earlier. Backwards: 5 - .4 = 4.6;  .9 · .4 - .3 + .72 · 4.6 = 3.372;  .9 · .3 - .2 + .72 ·
    # 3.372 = 2.49784.
    action_mask = np.array([0, 0, 1, 1, 1], bool)
    found = generalized_advantages(
        GAE(gamma=0.9, lam=0.8),
        Trajectory(5.0, action_mask, action_mask, values=before(VALUES)[:5]),
    )
    np.testing.assert_allclose(found, [0, 0, 2.49784, 3.372, 4.6], atol=1e-6)
    # gamma = lambda = 1 without a critic's opinion: the reward.
    found = generalized_advantages(
        GAE(gamma=1.0, lam=1.0), Trajectory(5.0, action_mask, action_mask, values=np.zeros(5))
    )
    np.testing.assert_array_equal(found, [0, 0, 5, 5, 5])


def test_an_answer_that_was_cut_off_goes_on_in_the_critics_opinion_and_tools_cost_no_time() -> None:
    # Tokens 3 and 4 are a tool's. -5 + .9 · .8 - .7 = -4.98 on the last, the value of the state
    # behind it being .8; then .9 · .7 - .6 - .72 · 4.98 = -3.5556;  .9 · .6 - .5 - .72 · 3.5556 =
    # -2.520032;  over the tool, whose own values are not read: .9 · .5 - .2 - .72 · 2.520032 =
    # -1.564423;  .9 · .2 - .1 - .72 · 1.564423 = -1.046385.
    action_mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], bool)
    given = Trajectory(-5.0, action_mask, action_mask, values=before(VALUES), value_after=0.8)
    found = generalized_advantages(GAE(gamma=0.9, lam=0.8), given)
    np.testing.assert_allclose(
        found[action_mask], [-1.046385, -1.564423, -2.520032, -3.5556, -4.98], atol=1e-6
    )
    assert not found[~action_mask].any()


def test_it_equals_the_loop_on_a_thousand_random_masks() -> None:
    rng = np.random.default_rng(0)
    for i in range(1000):
        length = int(rng.integers(1, 70))
        action_mask = rng.random(length) < rng.random()
        config = GAE(
            gamma=float(rng.choice([1.0, 0.9, 0.0])), lam=float(rng.choice([1.0, 0.95, 0.5, 0.0]))
        )
        # What is said where no token was sampled is not read.
        rewards, values = (np.where(action_mask, rng.normal(size=length), np.nan) for _ in range(2))
        value_after = float(rng.normal()) if i % 2 else 0.0
        given = Trajectory(
            float(rng.normal()), action_mask, action_mask, rewards, values, value_after
        )
        np.testing.assert_allclose(
            generalized_advantages(config, given), by_definition(config, given), atol=1e-12
        )


def test_with_lambda_1_the_return_is_all_that_is_still_to_come() -> None:
    # r_t + gamma r_{t+1} + ..., whatever the critic says: 1 + .5 · 2 + .25 · (4 + .5 · 8) = 4. Of a
    # prompt nothing is said.
    action_mask = np.array([False, True, True, True])
    values, earned = np.array([np.nan, 9.0, -3.0, 0.5]), np.array([0.0, 1.0, 2.0, 3.0])
    given = Trajectory(1.0, action_mask, action_mask, earned, values, value_after=8.0)
    ((found,),) = value_targets(GAE(gamma=0.5, lam=1.0), [[given]])
    np.testing.assert_allclose(found, [0.0, 4.0, 6.0, 8.0])


def test_advantages_are_normalized_over_the_tokens_in_the_loss_and_stale_ones_still_act() -> None:
    # lambda = 0 and values of 0: each advantage is what the token earns. Of those in the loss, 1,
    # 2, 4, 6, 8, 9, the mean is 5 and the unbiased std sqrt(52 / 5) = 3.2249; the 100 is too old to
    # be in it: 95 / 3.2249 = 29.4583.
    earned = [np.array([0.0, 1.0, 100.0, 2.0]), np.array([0.0, 4.0, 6.0, 8.0, 9.0])]
    groups = [
        [
            Trajectory(
                0.0, rewards > 0, (rewards > 0) & (rewards < 100), rewards, np.zeros(len(rewards))
            )
        ]
        for rewards in earned
    ]
    (first,), (second,) = compute_advantages(GAE(lam=0.0, eps=0.0), groups)
    np.testing.assert_allclose(first[1:], [-1.2403, 29.4583, -0.9303], atol=1e-4)
    np.testing.assert_allclose(second[1:], [-0.3101, 0.3101, 0.9303, 1.2403], atol=1e-4)
    (first,), (second,) = compute_advantages(GAE(lam=0.0, normalize=False), groups)
    np.testing.assert_array_equal([*first, *second], [*earned[0], *earned[1]])
    # To the token before it, the stale one's reward is still to come.
    ((first,), _) = compute_advantages(GAE(lam=1.0, normalize=False), groups)
    np.testing.assert_array_equal(first[1:], [103.0, 102.0, 2.0])


@pytest.mark.parametrize("trained", [[False, True, True], [False, False, False]])
def test_equal_advantages_and_none_at_all_become_zero(trained: list[bool]) -> None:
    given = Trajectory(
        0.1, np.array([False, True, True]), np.array(trained), values=np.array([0.0, 0.1, 0.1])
    )
    ((found,),) = compute_advantages(GAE(), [[given]])
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.0])


def test_without_a_critic_there_is_no_gae() -> None:
    action_mask = np.ones(2, bool)
    with pytest.raises(ValueError, match=r"trainer\.advantages"):
        compute_advantages(GAE(), [[Trajectory(1.0, action_mask, action_mask)]])
