"""Generalized advantage estimation with a critic."""

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
"""Values of the states after each of 8 tokens."""


def before(values: np.ndarray) -> np.ndarray:
    """Values of the states before each token; that before the first token is unknown."""
    return np.append(np.nan, values[:-1])


def by_definition(config: GAE, trajectory: Trajectory) -> np.ndarray:
    """AReaL's loop, backwards over tokens; unsampled tokens pass next value and sum through."""
    assert trajectory.values is not None and trajectory.token_rewards is not None
    advantages, next_value, accumulated, reward = (
        np.zeros(len(trajectory.action_mask)),
        trajectory.value_after,
        0.0,
        trajectory.reward,
    )
    for t in reversed(range(len(trajectory.action_mask))):
        if trajectory.action_mask[t]:
            delta = (
                trajectory.token_rewards[t]
                + reward
                + config.gamma * next_value
                - trajectory.values[t]
            )
            advantages[t] = accumulated = delta + config.gamma * config.lam * accumulated
            next_value, reward = trajectory.values[t], 0.0
    return advantages


def test_gae_of_finished_answer_equals_areal() -> None:
    # 2 tokens of prompt, 3 of answer, reward 5 on the last; AReaL's places are those of the states,
    # one earlier. Backwards: 5 - .4 = 4.6;  .9 · .4 - .3 + .72 · 4.6 = 3.372;  .9 · .3 - .2 + .72 ·
    # 3.372 = 2.49784.
    action_mask = np.array([0, 0, 1, 1, 1], bool)
    found = generalized_advantages(
        GAE(gamma=0.9, lam=0.8),
        Trajectory(5.0, action_mask, action_mask, values=before(VALUES)[:5]),
    )
    np.testing.assert_allclose(found, [0, 0, 2.49784, 3.372, 4.6], atol=1e-6)
    # gamma = lambda = 1 with values of zero: the reward.
    found = generalized_advantages(
        GAE(gamma=1.0, lam=1.0), Trajectory(5.0, action_mask, action_mask, values=np.zeros(5))
    )
    np.testing.assert_array_equal(found, [0, 0, 5, 5, 5])


def test_gae_bootstraps_truncated_answers_and_skips_tool_tokens() -> None:
    # Tokens 3 and 4 are a tool's. -5 + .9 · .8 - .7 = -4.98 on the last, the value of the state
    # behind it being .8; then .9 · .7 - .6 - .72 · 4.98 = -3.5556;  .9 · .6 - .5 - .72 · 3.5556 =
    # -2.520032;  over the tool, whose own values are not read: .9 · .5 - .2 - .72 · 2.520032 =
    # -1.564423;  .9 · .2 - .1 - .72 · 1.564423 = -1.046385.
    action_mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], bool)
    trajectory = Trajectory(-5.0, action_mask, action_mask, values=before(VALUES), value_after=0.8)
    found = generalized_advantages(GAE(gamma=0.9, lam=0.8), trajectory)
    np.testing.assert_allclose(
        found[action_mask], [-1.046385, -1.564423, -2.520032, -3.5556, -4.98], atol=1e-6
    )
    assert not found[~action_mask].any()


def test_turns_as_steps_equal_areal() -> None:
    # Turns of values .2 and .6: 5 - .6 = 4.4; .9 · .6 - .2 + .72 · 4.4 = 3.508; returns 3.708 and 5.
    action_mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], bool)
    config = GAE(gamma=0.9, lam=0.8, step="turn")
    ended = Trajectory(5.0, action_mask, action_mask, values=VALUES)
    np.testing.assert_allclose(
        generalized_advantages(config, ended), [0, *[3.508] * 2, 0, 0, *[4.4] * 3], atol=1e-12
    )
    ((targets,),) = value_targets(config, [[ended]])
    np.testing.assert_allclose(targets, [0, *[3.708] * 2, 0, 0, *[5.0] * 3], rtol=1e-6)
    # Turn 0 earns 1, wherever in it, and the answer is cut off at value .8: 5 + .72 - .6 = 5.12;
    # 1 + .34 + .72 · 5.12 = 5.0264.
    for place in (1, 2):
        cut_off = ended._replace(token_rewards=np.eye(8)[place], value_after=0.8)
        np.testing.assert_allclose(
            generalized_advantages(config, cut_off)[action_mask],
            [*[5.0264] * 2, *[5.12] * 3],
            atol=1e-12,
        )


def test_turns_of_one_token_are_token_steps() -> None:
    rng = np.random.default_rng(1)
    action_mask = np.arange(40) % 2 == 1
    rewards, values = rng.normal(size=(2, 40))
    trajectory = Trajectory(1.0, action_mask, action_mask, rewards, values, 0.3)
    by_turn, by_token = (
        generalized_advantages(GAE(gamma=0.9, step=step), trajectory) for step in ("turn", "token")
    )
    np.testing.assert_allclose(by_turn, by_token, atol=1e-12)


@pytest.mark.parametrize(
    ("length", "lam"), [(10, 0.0), (20, 0.0), (100, 0.8), (1000, 0.98), (8000, 0.9975)]
)
def test_lambda_by_length_equals_vapo(length: int, lam: float) -> None:
    # 1 - 1 / (.05 L), not below 0. The prompt's tokens do not count.
    action_mask = np.arange(length + 7) >= 7
    values = np.random.default_rng(length).normal(size=length + 7)
    trajectory = Trajectory(1.0, action_mask, action_mask, values=values)
    np.testing.assert_allclose(
        generalized_advantages(GAE(length_alpha=0.05), trajectory),
        generalized_advantages(GAE(lam=lam), trajectory),
        atol=1e-9,
    )


def test_critic_has_its_own_lambda() -> None:
    # V = [.2, .4, .6], R = 1. lambda .5: .4; .2 + .5 · .4 = .4; .2 + .5 · .4 = .4. lambda 1: the
    # return.
    action_mask = np.ones(3, bool)
    trajectory = Trajectory(1.0, action_mask, action_mask, values=np.array([0.2, 0.4, 0.6]))
    config = GAE(lam=0.5, critic_lam=1.0)
    np.testing.assert_allclose(generalized_advantages(config, trajectory), [0.4, 0.4, 0.4])
    ((targets,),) = value_targets(config, [[trajectory]])
    np.testing.assert_allclose(targets, [1.0, 1.0, 1.0])
    ((targets,),) = value_targets(GAE(lam=0.5), [[trajectory]])
    np.testing.assert_allclose(targets, [0.6, 0.8, 1.0], rtol=1e-6)


def test_gae_equals_the_loop_on_a_thousand_random_masks() -> None:
    rng = np.random.default_rng(0)
    for i in range(1000):
        length = int(rng.integers(1, 70))
        action_mask = rng.random(length) < rng.random()
        config = GAE(
            gamma=float(rng.choice([1.0, 0.9, 0.0])), lam=float(rng.choice([1.0, 0.95, 0.5, 0.0]))
        )
        # Values outside the action mask are not read.
        rewards, values = (np.where(action_mask, rng.normal(size=length), np.nan) for _ in range(2))
        value_after = float(rng.normal()) if i % 2 else 0.0
        trajectory = Trajectory(
            float(rng.normal()), action_mask, action_mask, rewards, values, value_after
        )
        np.testing.assert_allclose(
            generalized_advantages(config, trajectory),
            by_definition(config, trajectory),
            atol=1e-12,
        )


def test_lambda_one_gives_the_discounted_return() -> None:
    # r_t + gamma r_{t+1} + ..., for any value: 1 + .5 · 2 + .25 · (4 + .5 · 8) = 4. Of a
    # prompt token the target is 0.
    action_mask = np.array([False, True, True, True])
    values, earned = np.array([np.nan, 9.0, -3.0, 0.5]), np.array([0.0, 1.0, 2.0, 3.0])
    trajectory = Trajectory(1.0, action_mask, action_mask, earned, values, value_after=8.0)
    ((found,),) = value_targets(GAE(gamma=0.5, lam=1.0), [[trajectory]])
    np.testing.assert_allclose(found, [0.0, 4.0, 6.0, 8.0])


def test_gae_normalises_over_loss_tokens_and_includes_stale_actions() -> None:
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
    (first,), (second,) = compute_advantages(GAE(lam=0.0, eps=1e-30), groups)
    np.testing.assert_allclose(first[1:], [-1.2403, 29.4583, -0.9303], atol=1e-4)
    np.testing.assert_allclose(second[1:], [-0.3101, 0.3101, 0.9303, 1.2403], atol=1e-4)
    (first,), (second,) = compute_advantages(GAE(lam=0.0, normalize=False), groups)
    np.testing.assert_array_equal([*first, *second], [*earned[0], *earned[1]])
    # To the token before it, the stale one's reward is still to come.
    ((first,), _) = compute_advantages(GAE(lam=1.0, normalize=False), groups)
    np.testing.assert_array_equal(first[1:], [103.0, 102.0, 2.0])


@pytest.mark.parametrize("trained", [[False, True, True], [False, False, False]])
def test_equal_or_no_advantages_normalise_to_zero(trained: list[bool]) -> None:
    trajectory = Trajectory(
        0.1, np.array([False, True, True]), np.array(trained), values=np.array([0.0, 0.1, 0.1])
    )
    ((found,),) = compute_advantages(GAE(), [[trajectory]])
    np.testing.assert_array_equal(found, [0.0, 0.0, 0.0])


def test_gae_requires_critic_values() -> None:
    action_mask = np.ones(2, bool)
    with pytest.raises(ValueError, match=r"trainer\.advantages"):
        compute_advantages(GAE(), [[Trajectory(1.0, action_mask, action_mask)]])
