"""Hand-computed advantages."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import chz
import numpy as np
import pytest

from areal_jax.bounds import ANY_NUMBER
from areal_jax.rl.advantages import (
    Trajectory,
    compute_advantages,
    mean_weights,
    reward_to_go,
    shape_rewards,
)
from areal_jax.rl.config import (
    GDPO,
    VCPO,
    Advantages,
    BatchNormalized,
    CustomAdvantages,
    GroupNormalized,
    LeaveOneOut,
    MaxRL,
    Mean,
    Shaping,
    Unnormalized,
)
from areal_jax.rl.presets import PRESETS


def compute(
    config: Advantages, *rewards_and_tokens: tuple[list[float], list[int]]
) -> list[np.ndarray]:
    """One advantage per sample, by group, after checking that its tokens share it."""
    groups = [
        [trajectory(r, n) for r, n in zip(*group, strict=True)] for group in rewards_and_tokens
    ]
    by_token = compute_advantages(config, groups)
    assert all((advantages == advantages[0]).all() for group in by_token for advantages in group)
    return [np.array([advantages[0] for advantages in group]) for group in by_token]


def trajectory(
    reward: float, num_trained: int, token_rewards: list[float] | None = None
) -> Trajectory:
    """A prompt of two tokens, then loss tokens with their token rewards."""
    action_mask = np.arange(2 + num_trained) >= 2
    return Trajectory(
        reward,
        action_mask,
        action_mask,
        None if token_rewards is None else np.array([0.0, 0.0, *token_rewards]),
    )


def test_group_normalization_equals_hand_computed_numbers() -> None:
    # Mean .5, deviations ±.5, sample variance 4 · .25 / 3 = 1/3, .5 / .577350 = .866025.
    (advantages,) = compute(GroupNormalized(), ([1.0, 0.0, 0.0, 1.0], [1, 1, 1, 1]))
    np.testing.assert_allclose(advantages, [0.866025, -0.866025, -0.866025, 0.866025], atol=2e-6)


def test_groups_of_different_sizes_are_centred_separately() -> None:
    # First group: mean 2, sample std 1. Second: mean 5, std sqrt(2) · 5 = 7.071068, ±5 / that.
    first, second = compute(
        GroupNormalized(), ([1.0, 2.0, 3.0], [5, 9, 1]), ([0.0, 10.0], [1, 100])
    )
    np.testing.assert_allclose(first, [-1.0, 0.0, 1.0], atol=2e-6)
    np.testing.assert_allclose(second, [-0.707107, 0.707107], atol=2e-6)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    (advantages,) = compute(
        GroupNormalized(divide_by="nothing"), ([1.0, 0.0, 0.0, 0.0], [1, 1, 1, 1])
    )
    np.testing.assert_allclose(advantages, [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize(
    "config",
    [
        *(GroupNormalized(divide_by=by) for by in ("group_std", "batch_std", "nothing")),
        LeaveOneOut(),
        BatchNormalized(),
    ],
)
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [-5.0]])
def test_equal_rewards_give_exactly_zero(config: Advantages, rewards: list[float]) -> None:
    # The mean of three times 0.1 is not 0.1 in binary; divided by eps the difference would not be
    # small.
    (advantages,) = compute(config, (rewards, [3] * len(rewards)))
    assert not advantages.any()


def test_lite_ppo_divides_by_the_batch_std() -> None:
    # Centred by group: -1, 1 and -3, 3. Their mean is 0 and their sample variance 20 / 3, 1 /
    # 2.581989 = .387298.
    first, second = compute(
        GroupNormalized(divide_by="batch_std", eps=1e-30),
        ([1.0, 3.0], [1, 9]),
        ([2.0, 8.0], [1, 1]),
    )
    np.testing.assert_allclose(
        [*first, *second], [-0.387298, 0.387298, -1.161895, 1.161895], atol=1e-6
    )


def test_leave_one_out_equals_areal() -> None:
    # AReaL's own test: the others of 1 among 1..6 are 2..6, whose mean is 4: -3.
    (advantages,) = compute(LeaveOneOut(), ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1] * 6))
    np.testing.assert_allclose(advantages, [-3.0, -1.8, -0.6, 0.6, 1.8, 3.0], atol=1e-6)


def test_max_rl_divides_by_the_mean_of_each_group() -> None:
    # Means .25, 1 and 0: (1 - .25) / .25 = 3, -.25 / .25 = -1; (2 - 1) / 1.
    first, second, third = compute(
        MaxRL(), ([1.0, 0.0, 0.0, 0.0], [1, 9, 2, 1]), ([0.0, 2.0], [3, 1]), ([0.0, 0.0], [1, 1])
    )
    np.testing.assert_allclose(first, [3.0, -1.0, -1.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(second, [-1.0, 1.0], rtol=1e-6)
    assert not third.any()
    assert not compute(MaxRL(), ([0.1, 0.1, 0.1], [3, 3, 3]))[0].any()
    with pytest.raises(ValueError, match=r"rewards\.wrong=0"):
        compute(MaxRL(), ([1.0, -1.0], [1, 1]))


def above_least_variance(config: VCPO, rewards: list[float], log_norms: list[float]) -> list[float]:
    group = [
        trajectory(reward, 2)._replace(log_weighted_norm=log_norm)
        for reward, log_norm in zip(rewards, log_norms, strict=True)
    ]
    return [float(advantages[0]) for advantages in compute_advantages(config, [group])[0]]


def test_vcpos_baseline_equals_hand_computed_numbers() -> None:
    weights, norms = np.array([1.0, 2.0, 0.5, 0.1]), np.array([1.0, 2.0, 1.0, 3.0])
    rewards, log_norms = [1.0, 0.0, 1.0, 0.0], np.log(weights * norms)
    # W² g² = 1, 16, .25, .09: 1.25 / 17.34 = .072088.
    expected = np.array([0.927912, -0.072088, 0.927912, -0.072088])
    plain = VCPO(divide_by="nothing")
    assert above_least_variance(plain, rewards, log_norms.tolist()) == pytest.approx(
        expected, abs=1e-6
    )
    # The rewards' deviation is sqrt(1/3). Weights of long samples are beyond any float.
    assert above_least_variance(VCPO(), rewards, (log_norms + 5000).tolist()) == pytest.approx(
        expected * 3**0.5, abs=1e-5
    )
    with pytest.raises(ValueError, match="norm of each sample's gradient"):
        compute(VCPO(), ([1.0, 0.0], [1, 1]))


def test_vcpo_ignores_samples_without_loss_tokens_and_equal_rewards() -> None:
    plain, nothing = VCPO(divide_by="nothing"), -math.inf
    assert above_least_variance(plain, [1.0, 0.0, 9.0], [0.0, 0.0, nothing]) == [0.5, -0.5, 8.5]
    assert above_least_variance(plain, [0.1, 0.1, 0.1], [0.3, 0.7, -2.0]) == [0.0, 0.0, 0.0]
    assert above_least_variance(plain, [1.0, 0.0], [nothing, nothing]) == [0.0, 0.0]


def of_components(weights: tuple[str, ...] = ("second:0.5",), **settings: Any) -> np.ndarray:
    """GDPO's advantages of one group with two components and 1 to 4 loss tokens."""
    group = [
        trajectory(0.0, length)._replace(components={"first": first, "second": second})
        for length, first, second in zip(
            range(1, 5), [1.0, 0.0, 1.0, 1.0], [0.0, 0.5, 0.5, 1.0], strict=True
        )
    ]
    (found,) = compute_advantages(GDPO(weights=weights, **settings), [group])
    return np.array([each[0] for each in found])


def test_gdpo_normalizes_components_and_then_their_sum() -> None:
    # z of the components: [.5, -1.5, .5, .5] and [-1.224745, 0, 0, 1.224745]; with half the second
    # [-.112372, -1.5, .5, 1.112372], divided by their deviation 1.118.
    expected = [-0.100509, -1.341641, 0.447214, 0.994936]
    np.testing.assert_allclose(of_components(), expected, atol=2e-6)
    # Over tokens, of which the samples have 1 to 4 (verl).
    expected = [-0.387417, -1.74468, 0.211556, 0.810528]
    np.testing.assert_allclose(of_components(over="tokens"), expected, atol=2e-6)
    assert not np.allclose(of_components(weights=()), of_components())


def test_gdpo_gives_groups_without_signal_exactly_zero() -> None:
    def sample(**components: float) -> Trajectory:
        return trajectory(-5.0, 2)._replace(components=components)

    # The deviations of the first group do not add up to exactly 0 in binary.
    groups = [
        [sample(a=0.1 * i, b=0.7**i) for i in range(7)],
        [sample(a=0.1, b=0.3), sample(a=0.1, b=0.3)],
        # Texts that are not in rewards.form have no components: the lowest of the group's.
        [sample(a=0.4, b=0.3), sample()],
        [sample(a=0.4, b=0.3), sample(), sample(a=0.6, b=0.3)],
        [sample(), sample()],
    ]
    first, *flat, mixed, unread = compute_advantages(GDPO(), groups)
    assert np.concatenate(first).all()
    assert not any(values.any() for group in (*flat, unread) for values in group)
    low, lowest, high = (float(values[0]) for values in mixed)
    assert low == lowest < 0.0 < high


def test_gdpo_needs_the_same_components_in_every_reward() -> None:
    with pytest.raises(ValueError, match=r"the same named components.*found none, and none in"):
        compute(GDPO(), ([1.0, 0.0], [1, 1]))
    # Where no text is in rewards.form, nothing can be learned.
    (nothing,) = compute(GDPO(), ([-5.0, -5.0], [1, 1]))
    assert nothing.tolist() == [0.0, 0.0]
    first, second = (trajectory(0.0, 1)._replace(components={name: 1.0}) for name in "ab")
    with pytest.raises(ValueError, match="found a, and a, b in the batch"):
        compute_advantages(GDPO(), [[first, second]])
    with pytest.raises(ValueError, match="weights names third; the reward has first, second"):
        of_components(weights=("third:1",))
    with pytest.raises(
        ValueError, match=r"expected NAME:WEIGHT, such as format:0\.5, found 'first'"
    ):
        GDPO(weights=("first",))


def test_group_of_one_sample_gets_zero_advantage() -> None:
    for config in (GroupNormalized(), GroupNormalized(divide_by="batch_std"), LeaveOneOut()):
        first, second = compute(config, ([7.0], [2]), ([1.0, 0.0], [2, 2]))
        assert not first.any() and second.all()


def test_unnormalized_advantages_are_the_rewards() -> None:
    first, second = compute(Unnormalized(), ([5.0, -5.0], [3, 1]), ([5.0], [2]))
    assert [*first, *second] == [5.0, -5.0, 5.0]


def test_shaping_shifts_scales_clips_and_penalises_overlong_answers() -> None:
    rewards, lengths = np.array([1.0, 0.0, 1.0, 1.0, 1.0]), np.array([10, 80, 85, 90, 100])
    np.testing.assert_array_equal(shape_rewards(Shaping(), rewards, lengths, 100), rewards)
    # AReaL's switches for gsm8k: (r - 1/2) · 10, clipped at 20; a clip of 3 bites.
    np.testing.assert_allclose(
        shape_rewards(Shaping(bias=-0.5, scale=10.0, clip=20.0), rewards, lengths, 100),
        [5, -5, 5, 5, 5],
    )
    np.testing.assert_allclose(
        shape_rewards(Shaping(bias=-0.5, scale=10.0, clip=3.0), rewards, lengths, 100),
        [3, -3, 3, 3, 3],
    )
    # The last 20 of 100 tokens cost up to 2: 85 is a quarter of the way, 90 half, 100 all.
    shaping = Shaping(overlong_share=0.2, overlong_penalty=2.0)
    np.testing.assert_allclose(
        shape_rewards(shaping, rewards, lengths, 100), [1.0, 0.0, 0.5, 0.0, -1.0]
    )


def test_mean_weights_turn_token_means_into_every_aggregation() -> None:
    # Losses per token 1, 2 and 4 of samples with 1, 3 and 2 tokens, and one without any; 6 tokens,
    # 3 sequences.
    losses, lengths = np.array([1.0, 2.0, 4.0, 9.0]), np.array([1, 3, 2, 0])

    def mean(name: Mean) -> float:
        return float((losses * lengths * mean_weights(name, lengths, constant_tokens=10)).sum() / 6)

    assert mean("tokens") == pytest.approx((1 + 3 * 2 + 2 * 4) / 6)
    assert mean("sequences") == pytest.approx((1 + 2 + 4) / 3)
    assert mean("constant") == pytest.approx((1 + 6 + 8) / (3 * 10))


def test_batch_normalization_weights_samples_by_tokens() -> None:
    # 3 tokens of 5 and 1 of -5: mean 2.5, variance (3 · 2.5² + 7.5²) / 3 = 25, so 2.5 / 5 and -7.5
    # / 5.
    first, second = compute(BatchNormalized(eps=1e-30), ([5.0], [3]), ([-5.0], [1]))
    np.testing.assert_allclose([first[0], second[0]], [0.5, -1.5], atol=1e-6)


def test_batch_normalization_equals_areal() -> None:
    # AReaL's own test: tokens of 1, 2, 4, 6, 8, 9 have mean 5 and unbiased std sqrt(52 / 5) =
    # 3.2249; -4 / 3.2249 = -1.2403. The samples of 100 have no token in the loss, and count for
    # nothing.
    first, second = compute(
        BatchNormalized(eps=1e-30),
        ([1.0, 2.0, 100.0, 4.0], [1, 1, 0, 1]),
        ([6.0, 8.0, 9.0], [1, 1, 1]),
    )
    np.testing.assert_allclose(first[[0, 1, 3]], [-1.2403, -0.9303, -0.3101], atol=1e-4)
    np.testing.assert_allclose(second, [0.3101, 0.9303, 1.2403], atol=1e-4)


def test_normalized_advantages_have_mean_zero_and_variance_one() -> None:
    rng = np.random.default_rng(0)
    for earns in (False, True):
        groups = [
            [
                trajectory(rng.normal(), n, list(rng.normal(size=n)) if earns else None)
                for n in rng.integers(1, 50, size).tolist()
            ]
            for size in (4, 1, 7)
        ]
        advantages = compute_advantages(BatchNormalized(eps=1e-30), groups)
        per_token = np.concatenate([of[2:] for of in chain(*advantages)])
        assert per_token.mean() == pytest.approx(0.0, abs=1e-6)
        assert per_token.std(ddof=1) == pytest.approx(1.0, abs=1e-6)


def test_batch_without_loss_tokens_gives_zero_advantages() -> None:
    first, second = compute(BatchNormalized(), ([1.0, 0.0], [0, 0]), ([2.0], [0]))
    assert not first.any() and not second.any()


def test_unknown_estimator_error_names_the_setting() -> None:
    with pytest.raises(TypeError, match=r"trainer\.advantages"):
        compute(Advantages(), ([1.0], [1]))


def test_reward_to_go_sums_own_and_later_rewards() -> None:
    rng = np.random.default_rng(1)
    for num_tokens in (1, 2, 17):
        rewards = rng.normal(size=num_tokens)
        naive = [sum(rewards[later] for later in range(t, num_tokens)) for t in range(num_tokens)]
        np.testing.assert_allclose(reward_to_go(rewards), naive, atol=1e-12)


def test_token_rewards_to_go_are_added_to_the_sample_advantage() -> None:
    # Rewards 1 and 0 have centred advantages 1/2 and -1/2; the first sample's tokens earn 1, -2 and
    # 3: 2, 1 and 3 to go.
    groups = [[trajectory(1.0, 3, [1.0, -2.0, 3.0]), trajectory(0.0, 2)]]
    ((first, second),) = compute_advantages(GroupNormalized(divide_by="nothing"), groups)
    np.testing.assert_allclose(first[2:], [2.5, 1.5, 3.5])
    np.testing.assert_allclose(second[2:], [-0.5, -0.5])
    ((first, _),) = compute_advantages(Unnormalized(), groups)
    np.testing.assert_allclose(first[2:], [3.0, 2.0, 4.0])


def test_batch_normalization_normalises_token_returns() -> None:
    # Returns 3, 2, 4 and twice 0: mean 9/5, squares 1.44 + .04 + 4.84 + 2 * 3.24 = 12.8, variance
    # 3.2.
    groups = [[trajectory(1.0, 3, [1.0, -2.0, 3.0])], [trajectory(0.0, 2)]]
    (first,), (second,) = compute_advantages(BatchNormalized(eps=1e-30), groups)
    np.testing.assert_allclose(first[2:], np.array([1.2, 0.2, 2.2]) / 3.2**0.5, rtol=1e-6)
    np.testing.assert_allclose(second[2:], np.array([-1.8, -1.8]) / 3.2**0.5, rtol=1e-6)


def test_rloo_sums_the_tokens_of_a_completion() -> None:
    # arXiv:2402.14740, section 3.1: grad log pi(y|x) is the sum over the tokens of y, whatever
    # their number.
    short, long = mean_weights(PRESETS["rloo"].loss_mean, np.array([1, 8]), constant_tokens=10)
    assert short == long


def test_luspo_is_gspo_times_the_length_of_each_sequence() -> None:
    # Up to a constant, here the 10 tokens.
    luspo, gspo = (
        mean_weights(PRESETS[name].loss_mean, np.array([1, 8]), constant_tokens=10)
        for name in ("luspo", "gspo")
    )
    assert PRESETS["luspo"].loss == PRESETS["gspo"].loss
    np.testing.assert_allclose(luspo / gspo, [0.1, 0.8], rtol=1e-6)


@chz.chz
class AboveMedian(CustomAdvantages):
    scale: float = chz.field(validator=ANY_NUMBER, default=1.0, doc="factor of the advantage")

    def of_group(self, rewards: np.ndarray) -> np.ndarray:
        return self.scale * np.sign(rewards - np.median(rewards))


def test_custom_advantages_are_of_each_group() -> None:
    first, second = ([1.0, 2.0, 5.0], [1, 2, 3]), ([4.0, 0.0], [2, 2])
    found = compute(AboveMedian(scale=0.5), first, second)
    # Medians are 2 and 2.
    assert [group.tolist() for group in found] == [[-0.5, 0.0, 0.5], [0.5, -0.5]]


def test_custom_advantages_are_checked() -> None:
    with pytest.raises(ValueError, match="AboveMedian: expected of_group to return 2 finite"):
        compute(AboveMedian(scale=np.inf), ([1.0, 2.0], [1, 1]))
