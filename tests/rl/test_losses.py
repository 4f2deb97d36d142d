"""Laws and hand-computed numbers of the policy objectives."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.load import find_experiment, load_experiment
from areal_jax.rl import losses
from areal_jax.rl.config import (
    CISPO,
    GSPO,
    M2PO,
    PPO,
    SAPO,
    CustomLoss,
    DecoupledPPO,
    ImportanceWeighting,
    Loss,
    Masked,
    Reinforce,
    Truncated,
    Unweighted,
    Weighted,
)
from areal_jax.rl.losses import (
    PolicyLoss,
    interpolated_proximal,
    policy_loss,
    second_moment_mask,
    sft_loss,
)

SETTINGS = ("clip_eps", "clip_eps_high", "dual_clip", "behave_weight_cap", "behave_weight_mode")
decoupled_ppo_loss = jax.jit(losses.decoupled_ppo_loss, static_argnames=SETTINGS)

LOGP = np.array([-1.0, -0.5, -2.0, -1.2], np.float32)
PROXIMAL = np.array([-1.1, -0.9, -1.6, -1.2], np.float32)
BEHAVE = np.array([-1.3, -0.9, -1.6, -3.2], np.float32)
ADVANTAGES = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
ALL = np.ones(4, bool)


class Draw(NamedTuple):
    """The loss's arguments, in its order."""

    logp: np.ndarray
    proximal_logp: np.ndarray
    behave_logp: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray


# u = theta/proximal = e^[.1, .4, -.4, 0] = [1.105171, 1.491825, .670320, 1];  w = proximal/behave =
# e^[.2, 0, 0, 2]
#   = [1.221403, 1, 1, 7.389056].  Clip 0.2: min(uA, clip(u)A) = [1.105171, 1.2, -.8, 2]
# (token 3: A < 0, u < .8, so min(-.670320, -.8)).  w times that: [1.349859, 1.2, -.8, 14.778112],
# sum 16.527971, / -4.
GOLDEN = [
    ({}, -4.131993),
    # Cap 5: w of the last token is 7.389: it leaves the sum (1.749859 / -4), the denominator stays;
    # or w = 5: 11.749859 / -4.
    ({"behave_weight_cap": 5.0}, -0.437465),
    ({"behave_weight_cap": 5.0, "behave_weight_mode": "clamp"}, -2.937465),
]


@pytest.mark.parametrize(("settings", "expected"), GOLDEN)
def test_decoupled_loss_equals_the_numbers_by_hand(
    settings: dict[str, Any], expected: float
) -> None:
    loss = decoupled_ppo_loss(
        LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL, clip_eps=0.2, **settings
    ).loss
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_without_the_behave_weight_the_numbers_by_hand() -> None:
    # w = 1: (1.105171 + 1.2 - .8 + 2) / -4; DAPO's upper clip of 1.28 makes the second term 1.28.
    loss = decoupled_ppo_loss(LOGP, PROXIMAL, PROXIMAL, ADVANTAGES, ALL, clip_eps=0.2).loss
    assert float(loss) == pytest.approx(-0.876293, abs=1e-6)
    loss = decoupled_ppo_loss(
        LOGP, PROXIMAL, PROXIMAL, ADVANTAGES, ALL, clip_eps=0.2, clip_eps_high=0.28
    ).loss
    assert float(loss) == pytest.approx(-0.896293, abs=1e-6)


def test_coupled_loss_equals_the_number_by_hand() -> None:
    # theta/behave = e^[.3, .4, -.4, 2]: all clipped, [1.2, 1.2, -.8, 2.4], sum 4, / -4.
    loss = decoupled_ppo_loss(LOGP, BEHAVE, BEHAVE, ADVANTAGES, ALL, clip_eps=0.2).loss
    assert float(loss) == pytest.approx(-1.0, abs=1e-6)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    # Log-ratio 1.5, A = -1: e^1.5 = 4.481689, bounded by c = 3. A positive advantage is not
    # touched: -min(4.48, 1.2).
    logp, zero = np.array([1.5], np.float32), np.zeros(1, np.float32)
    minus, mask = -np.ones(1, np.float32), np.ones(1, bool)
    assert float(decoupled_ppo_loss(logp, zero, zero, minus, mask).loss) == pytest.approx(
        4.481689, abs=1e-6
    )
    bounded = decoupled_ppo_loss(logp, zero, zero, minus, mask, dual_clip=3.0)
    assert float(bounded.loss) == pytest.approx(3.0, abs=1e-6)
    assert mean(bounded, "dual_clip_fraction") == 1.0
    assert float(
        decoupled_ppo_loss(logp, zero, zero, -minus, mask, dual_clip=3.0).loss
    ) == pytest.approx(-1.2, abs=1e-6)


def test_when_all_policies_are_equal_the_gradient_is_the_policy_gradient() -> None:
    gradient = jax.grad(lambda logp: decoupled_ppo_loss(logp, LOGP, LOGP, ADVANTAGES, ALL).loss)(
        LOGP
    )
    np.testing.assert_allclose(gradient, -ADVANTAGES / 4, rtol=1e-6)


def test_a_ratio_on_the_bound_still_learns() -> None:
    # With clip 0 every first ratio lies on both bounds; as in the paper's formula the unclipped
    # branch gives the gradient.
    gradient = jax.grad(
        lambda logp: decoupled_ppo_loss(logp, LOGP, LOGP, ADVANTAGES, ALL, clip_eps=0.0).loss
    )(LOGP)
    np.testing.assert_allclose(gradient, -ADVANTAGES / 4, rtol=1e-6)


def test_when_proximal_is_behave_it_is_ppo() -> None:
    draw = random_inputs(np.random.default_rng(0), (5, 7))
    decoupled = decoupled_ppo_loss(*draw._replace(proximal_logp=draw.behave_logp))
    ratio = np.exp(draw.logp - draw.behave_logp)
    surrogate = np.minimum(ratio * draw.advantages, np.clip(ratio, 0.8, 1.2) * draw.advantages)
    assert float(decoupled.loss) == pytest.approx(-surrogate[draw.mask].mean(), rel=1e-5)


def test_nothing_flows_through_proximal_or_behave() -> None:
    def loss(proximal: jax.Array, behave: jax.Array) -> jax.Array:
        return decoupled_ppo_loss(
            LOGP, proximal, behave, ADVANTAGES, ALL, behave_weight_cap=5.0
        ).loss

    for gradient in jax.grad(loss, argnums=(0, 1))(jnp.asarray(PROXIMAL), jnp.asarray(BEHAVE)):
        assert not np.any(gradient)


@pytest.mark.parametrize(
    "settings", [{}, {"dual_clip": 3.0, "clip_eps_high": 0.28}, {"behave_weight_cap": 1.5}]
)
def test_gradient_equals_finite_differences(settings: dict[str, Any]) -> None:
    draw = random_inputs(np.random.default_rng(1), (3, 5))
    with jax.enable_x64(True):
        logp, *rest = (x.astype(np.float64) if x.dtype == np.float32 else x for x in draw)
        loss = jax.jit(
            jax.vmap(lambda logp: losses.decoupled_ppo_loss(logp, *rest, **settings).loss)
        )
        nudges = 1e-6 * np.eye(15).reshape(15, 3, 5)
        slopes = (loss(logp + nudges) - loss(logp - nudges)) / 2e-6
        gradient = jax.grad(lambda logp: decoupled_ppo_loss(logp, *rest, **settings).loss)(logp)
    np.testing.assert_allclose(gradient.reshape(15), slopes, atol=1e-7)


def test_a_thousand_random_inputs_equal_float64_numpy() -> None:
    rng = np.random.default_rng(2)
    draws = [random_inputs(rng, (6,)) for _ in range(1000)]
    loss = partial(
        losses.decoupled_ppo_loss,
        clip_eps=0.2,
        clip_eps_high=0.28,
        dual_clip=3.0,
        behave_weight_cap=2.0,
    )
    batch = Draw(*(np.stack(arrays) for arrays in zip(*draws, strict=True)))
    expected = [paper_loss(Draw(*(x.astype(np.float64) for x in draw))) for draw in draws]
    np.testing.assert_allclose(
        jax.jit(jax.vmap(lambda draw: loss(*draw).loss))(batch), expected, atol=1e-6, rtol=1e-6
    )


def test_cutting_into_micro_batches_changes_nothing() -> None:
    draw = random_inputs(np.random.default_rng(3), (8, 5))
    num_tokens = float(draw.mask.sum())

    @partial(jax.grad, has_aux=True)
    def gradient_and_loss(logp: jax.Array, *rest: np.ndarray) -> tuple[jax.Array, PolicyLoss]:
        out = losses.decoupled_ppo_loss(logp, *rest, num_tokens=num_tokens)
        return out.loss, out

    run = jax.jit(gradient_and_loss)
    gradient, whole = run(*draw)
    parts = [run(*(x[start:end] for x in draw)) for start, end in ((0, 1), (1, 6), (6, 8))]
    assert sum(float(part.loss) for _, part in parts) == pytest.approx(float(whole.loss), rel=1e-6)
    np.testing.assert_allclose(np.concatenate([part for part, _ in parts]), gradient, rtol=1e-6)
    for name, meter in whole.metrics.items():
        for k in range(2):
            assert sum(float(part.metrics[name][k]) for _, part in parts) == pytest.approx(
                float(meter[k]), rel=1e-5
            ), name
    # num_tokens left out, the mask is counted.
    assert float(decoupled_ppo_loss(*draw).loss) == pytest.approx(float(whole.loss), rel=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["logp", "proximal_logp", "behave_logp", "advantages"])
def test_what_lies_under_the_mask_poisons_nothing(where: str, poison: float) -> None:
    draw = random_inputs(np.random.default_rng(4), (4, 6))
    poisoned = draw._replace(
        **{where: np.where(draw.mask, getattr(draw, where), np.float32(poison))}
    )

    def run(draw: Draw) -> tuple[PolicyLoss, jax.Array]:
        gradient = jax.grad(
            lambda logp: decoupled_ppo_loss(logp, *draw[1:], behave_weight_cap=2.0).loss
        )(draw.logp)
        return decoupled_ppo_loss(*draw, behave_weight_cap=2.0), gradient

    for clean, dirty in zip(
        jax.tree.leaves(run(draw)), jax.tree.leaves(run(poisoned)), strict=True
    ):
        np.testing.assert_array_equal(clean, dirty)


def test_a_token_that_the_cap_takes_out_may_overflow() -> None:
    # proximal/behave = e^110 is above any cap; theta/proximal = e^190 is inf in float32, and 0 *
    # inf would be nan.
    logp, proximal, behave = (jnp.array([x, -1.0]) for x in (-10.0, -200.0, -310.0))
    config = Reinforce(importance_weighting=Masked(cap=2.0))
    loss, slope = jax.value_and_grad(
        lambda logp: policy_loss(config, logp, proximal, behave, jnp.ones(2), np.ones(2, bool)).loss
    )(logp)
    # The other token: ratio and weight 1, advantage 1, over two tokens.
    assert float(loss) == pytest.approx(-0.5)
    assert slope.tolist() == pytest.approx([0.0, -0.5])


def test_an_overflowing_ratio_that_is_clipped_has_gradient_zero() -> None:
    # exp(200) is inf in float32. A > 0: the clip holds it at 1.2.
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    draw = Draw(200.0 * one, zero, zero, one, np.ones(1, bool))
    loss, gradient = jax.value_and_grad(lambda x: decoupled_ppo_loss(x, *draw[1:]).loss)(draw.logp)
    assert float(loss) == pytest.approx(-1.2)
    assert float(gradient[0]) == 0.0


def test_an_empty_mask_gives_zero_not_nan() -> None:
    nothing = np.zeros(4, bool)
    out, gradient = jax.value_and_grad(
        lambda x: decoupled_ppo_loss(x, PROXIMAL, BEHAVE, ADVANTAGES, nothing).loss
    )(LOGP)
    assert float(out) == 0.0 and not np.any(gradient)
    assert float(sft_loss(LOGP, nothing).loss) == 0.0


def test_metrics_equal_the_numbers_by_hand() -> None:
    out = decoupled_ppo_loss(LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL, behave_weight_cap=5.0)
    assert mean(out, "clip_fraction") == 0.5  # tokens 2 (above 1.2) and 3 (below 0.8)
    assert mean(out, "dual_clip_fraction") == 0.0
    assert mean(out, "behave_weight_capped_fraction") == 0.25  # the last, 7.389 > 5
    assert mean(out, "behave_weight") == pytest.approx((1.221403 + 1 + 1 + 0) / 4, abs=1e-6)
    assert mean(out, "behave_weight_squared") == pytest.approx((1.491825 + 1 + 1 + 0) / 4, abs=1e-6)
    # theta/behave = e^[.3, .4, -.4, 2]: e^x - 1 - x = [.049859, .091825, .070320, 4.389056]
    assert mean(out, "kl_behave_theta") == pytest.approx(
        (0.049859 + 0.091825 + 0.070320 + 4.389056) / 4, abs=1e-6
    )
    # theta/proximal = e^[.1, .4, -.4, 0]: [.005171, .091825, .070320, 0]
    assert mean(out, "kl_proximal_theta") == pytest.approx(
        (0.005171 + 0.091825 + 0.070320) / 4, abs=1e-6
    )
    assert mean(out, "loss") == pytest.approx(float(out.loss), abs=1e-6)


def test_a_row_and_a_batch_of_one_row_are_the_same() -> None:
    row = decoupled_ppo_loss(LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)
    batch = decoupled_ppo_loss(*(x[None] for x in (LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)))
    assert float(row.loss) == float(batch.loss)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DecoupledPPO(), -4.131993),
        (DecoupledPPO(importance_weighting=Truncated(cap=5.0)), -2.937465),
        (DecoupledPPO(importance_weighting=Masked(cap=5.0)), -0.437465),
        (DecoupledPPO(importance_weighting=Unweighted()), -0.876293),
        (PPO(), -1.0),
    ],
)
def test_the_config_names_the_objective(config: Loss, expected: float) -> None:
    out = policy_loss(config, LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)
    assert float(out.loss) == pytest.approx(expected, abs=1e-6)


# Every objective and every correction.

EVERY: list[Loss] = [
    DecoupledPPO(dual_clip=3.0),
    DecoupledPPO(importance_weighting=Masked(cap=1.5)),
    DecoupledPPO(importance_weighting=Truncated(cap=1.5, level="geometric")),
    DecoupledPPO(importance_weighting=Weighted(level="sequence")),
    PPO(),
    GSPO(clip_eps=0.1, clip_eps_high=0.2),
    GSPO(clip_eps=0.1, importance_weighting=Masked(cap=1.2, level="geometric")),
    SAPO(),
    CISPO(clip_eps_low=0.3),
    M2PO(),
    Reinforce(),
]
every_loss = pytest.mark.parametrize("config", EVERY, ids=repr)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2]], np.int32)


def packed_inputs(seed: int) -> Draw:
    """Two rows of three and two sequences, the first with padding at its end."""
    draw = random_inputs(np.random.default_rng(seed), SEGMENTS.shape)
    return draw._replace(mask=draw.mask & (SEGMENTS > 0))


@every_loss
def test_equal_policies_give_the_policy_gradient(config: Loss) -> None:
    draw = packed_inputs(5)
    # Advantages equal within a sequence, as GSPO wants them.
    draw = draw._replace(advantages=np.where(SEGMENTS == 2, np.float32(-0.7), np.float32(1.3)))
    draw = draw._replace(proximal_logp=draw.logp, behave_logp=draw.logp)
    gradient = jax.jit(
        jax.grad(lambda logp: policy_loss(config, logp, *draw[1:], segment_ids=SEGMENTS).loss)
    )(draw.logp)
    np.testing.assert_allclose(
        gradient, -np.where(draw.mask, draw.advantages, 0.0) / draw.mask.sum(), rtol=2e-6, atol=1e-8
    )


@every_loss
def test_gradients_of_every_objective_equal_finite_differences(config: Loss) -> None:
    draw = packed_inputs(6)
    with jax.enable_x64(True):
        logp, *rest = (x.astype(np.float64) if x.dtype == np.float32 else x for x in draw)

        def loss(logp: jax.Array) -> jax.Array:
            if isinstance(config, CISPO):
                # Its ratio is a weight: the slope is that of the weighted log-probability, the
                # weight held where it is.
                held = np.clip(
                    np.exp(np.asarray(draw.logp, np.float64) - rest[0]), 0.7, 1.2
                ) * np.exp(rest[0] - rest[1])
                return -jnp.sum(jnp.where(draw.mask, held * rest[2] * logp, 0.0)) / draw.mask.sum()
            return policy_loss(config, logp, *rest, segment_ids=SEGMENTS).loss

        nudges = 1e-6 * np.eye(logp.size).reshape(logp.size, *logp.shape)
        many = jax.jit(jax.vmap(loss))
        slopes = (many(logp + nudges) - many(logp - nudges)) / 2e-6
        gradient = jax.jit(
            jax.grad(lambda logp: policy_loss(config, logp, *rest, segment_ids=SEGMENTS).loss)
        )(logp)
    np.testing.assert_allclose(gradient.reshape(-1), slopes, atol=1e-7)


@every_loss
def test_a_thousand_random_inputs_of_every_objective_equal_float64_numpy(config: Loss) -> None:
    draws = [packed_inputs(seed) for seed in range(1000)]
    batch = Draw(*(np.stack(arrays) for arrays in zip(*draws, strict=True)))
    losses_1000 = jax.jit(
        jax.vmap(lambda draw: policy_loss(config, *draw, segment_ids=SEGMENTS).loss)
    )(batch)
    expected = [
        textbook_loss(config, Draw(*(x.astype(np.float64) for x in draw))) for draw in draws
    ]
    np.testing.assert_allclose(losses_1000, expected, atol=1e-6, rtol=2e-6)


@every_loss
def test_padding_and_packing_change_no_objective(config: Loss) -> None:
    draw, num_tokens = packed_inputs(7), 11.0
    packed = policy_loss(config, *draw, segment_ids=SEGMENTS, num_tokens=num_tokens).loss
    places = [
        np.flatnonzero(SEGMENTS[row] == segment)
        for row, segment in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2))
    ]
    rows = [
        [np.pad(x[row][here], (0, 8 - len(here))) for x in draw]
        for row, here in zip((0, 0, 0, 1, 1), places, strict=True)
    ]
    own = jax.jit(jax.vmap(lambda draw: policy_loss(config, *draw, num_tokens=num_tokens).loss))
    alone = own(Draw(*(np.stack(arrays) for arrays in zip(*rows, strict=True))))
    assert float(packed) == pytest.approx(float(alone.sum()), rel=1e-5)


@every_loss
def test_what_lies_under_the_mask_poisons_no_objective(config: Loss) -> None:
    draw = packed_inputs(8)
    poisoned = Draw(*(np.where(draw.mask, x, np.float32(np.nan)) for x in draw))._replace(
        mask=draw.mask
    )

    @jax.jit
    def run(draw: Draw) -> tuple[PolicyLoss, jax.Array]:
        gradient = jax.grad(
            lambda logp: policy_loss(config, logp, *draw[1:], segment_ids=SEGMENTS).loss
        )(draw.logp)
        return policy_loss(config, *draw, segment_ids=SEGMENTS), gradient

    for clean, dirty in zip(
        jax.tree.leaves(run(draw)), jax.tree.leaves(run(poisoned)), strict=True
    ):
        np.testing.assert_array_equal(clean, dirty)


def test_gspo_equals_areals_numbers() -> None:
    # Two sequences of log-ratios (.5, .5) and (1, 1): ratios e^.5 and e^1, which a clip of 0.2
    # holds at 1.2. Advantages 1, 2 and 1, 1 have means 1.5 and 1: -(1.2 · 1.5 · 2 + 1.2 · 2) / 4 =
    # -1.5.
    logp, zero = np.array([[0.5, 0.5], [1.0, 1.0]], np.float32), np.zeros((2, 2), np.float32)
    advantages, mask = np.array([[1.0, 2.0], [1.0, 1.0]], np.float32), np.ones((2, 2), bool)
    out = policy_loss(GSPO(clip_eps=0.2, clip_eps_high=None), logp, zero, zero, advantages, mask)
    assert float(out.loss) == pytest.approx(-1.5)
    assert mean(out, "ratio") == pytest.approx((np.exp(0.5) + np.exp(1.0)) / 2)
    assert mean(out, "clip_fraction") == 1.0


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_sapos_gate_has_value_2_over_tau_and_slope_1_where_nothing_has_changed(tau: float) -> None:
    # AReaL's own test: at ratio 1 the gate is 4/tau · 1/2, and its slope 4 sigmoid'(0) = 1 for
    # every tau.
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    config = SAPO(temperature_positive=tau, temperature_negative=tau)
    for advantage in (one, -one):
        loss, slope = jax.value_and_grad(
            lambda x, a=advantage: policy_loss(config, x, zero, zero, a, one).loss
        )(zero)
        assert float(loss) == pytest.approx(-2.0 / tau * advantage[0])
        assert float(slope[0]) == pytest.approx(-advantage[0])


def test_m2po_keeps_the_tokens_nearest_to_who_drew_them() -> None:
    # Squares .01, .25, .09, .0025, 1: .0025, .01 and .09 have mean .0342, with .25 it would be .088
    # and above .04.
    log_weight = np.array([0.1, 0.5, -0.3, 0.05, 1.0], np.float32)
    kept = second_moment_mask(log_weight, np.ones(5, bool), 0.04)
    assert kept.tolist() == [True, False, True, True, False]
    # Without the first two of these: .0025 alone; .0025 and .09 have mean .04625.
    kept = second_moment_mask(log_weight, np.array([False, False, True, True, True]), 0.04)
    assert kept.tolist() == [False, False, False, True, False]
    assert not second_moment_mask(log_weight, np.zeros(5, bool), 0.04).any()
    poisoned = np.where([True, True, False, True, True], log_weight, np.nan).astype(np.float32)
    assert second_moment_mask(
        poisoned, np.array([True, True, False, True, True]), 0.04
    ).tolist() == [
        True,
        False,
        False,
        True,
        False,
    ]


def test_m2po_keeps_the_same_tokens_on_host_and_device() -> None:
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(50):
        log_weight, mask = rng.normal(0.0, 0.3, 200), rng.random(200) < 0.8
        kept = np.asarray(second_moment_mask(log_weight, mask, 0.04))
        on_device = second_moment_mask(
            jnp.asarray(log_weight, jnp.float32), jnp.asarray(mask), 0.04
        )
        np.testing.assert_array_equal(kept, np.asarray(on_device))
        # By its definition: kept are the nearest, as many as can be.
        nearest = np.sort(log_weight[mask] ** 2)
        most = max(n for n in range(len(nearest) + 1) if nearest[:n].sum() <= 0.04 * n)
        np.testing.assert_allclose(np.sort(log_weight[kept] ** 2), nearest[:most])
        shares.append(most / mask.sum())
    assert 0.2 < np.mean(shares) < 0.9


def test_corrections_equal_the_numbers_by_hand() -> None:
    # log(proximal/behave) of two sequences: (2, 0) and (.1, .3). Products e^2 and e^.4, geometric
    # means e^1 and e^.2.
    behave, zero = np.array([-2.0, 0.0, -0.1, -0.3], np.float32), np.zeros(4, np.float32)
    segments, ones = np.array([1, 1, 2, 2], np.int32), np.ones(4, np.float32)

    def weights(importance_weighting: ImportanceWeighting) -> list[float]:
        loss = jax.grad(
            lambda logp: (
                policy_loss(
                    Reinforce(importance_weighting=importance_weighting),
                    logp,
                    zero,
                    behave,
                    ones,
                    ones,
                    segments,
                ).loss
            )
        )
        return (-4.0 * loss(zero)).tolist()

    e = np.exp
    assert weights(Unweighted()) == pytest.approx([1.0] * 4)
    assert weights(Weighted()) == pytest.approx([e(2), 1.0, e(0.1), e(0.3)])
    assert weights(Weighted(level="sequence")) == pytest.approx([e(2), e(2), e(0.4), e(0.4)])
    assert weights(Weighted(level="geometric")) == pytest.approx([e(1), e(1), e(0.2), e(0.2)])
    # AReaL's own test: e^2 = 7.39 above a cap of 5.
    assert weights(Truncated(cap=5.0)) == pytest.approx([5.0, 1.0, e(0.1), e(0.3)])
    assert weights(Masked(cap=5.0)) == pytest.approx([0.0, 1.0, e(0.1), e(0.3)])
    assert weights(Masked(cap=5.0, level="sequence")) == pytest.approx([0.0, 0.0, e(0.4), e(0.4)])
    assert weights(Masked(cap=5.0, level="geometric")) == pytest.approx(
        [e(1), e(1), e(0.2), e(0.2)]
    )


def test_an_objective_of_ones_own_is_weighted_and_averaged_like_any_other() -> None:
    spo = load_experiment("own_objective").trainer.loss
    assert (
        isinstance(spo, CustomLoss)
        and len(find_experiment("own_objective").read_text().splitlines()) < 40
    )
    out = policy_loss(spo, LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)
    # u A - |A| / .4 (u - 1)² with u = [1.105171, 1.491825, .670320, 1]: [1.077518, .887094,
    # -.942042, 2], weighted by w = [1.221403, 1, 1, 7.389056].
    assert float(out.loss) == pytest.approx(
        -(1.221403 * 1.077518 + 0.887094 - 0.942042 + 2 * 7.389056) / 4, abs=1e-5
    )
    gradient = jax.grad(lambda logp: policy_loss(spo, logp, LOGP, LOGP, ADVANTAGES, ALL).loss)(LOGP)
    np.testing.assert_allclose(gradient, -ADVANTAGES / 4, rtol=1e-6)
    without_gain: Any = CustomLoss
    with pytest.raises(TypeError, match="gain"):
        without_gain()


def test_an_unknown_objective_is_an_error_that_names_the_knob() -> None:
    with pytest.raises(TypeError, match=r"trainer\.loss"):
        policy_loss(Loss(), LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)
    with pytest.raises(TypeError, match=r"trainer\.loss\.importance_weighting"):
        policy_loss(
            Reinforce(importance_weighting=ImportanceWeighting()),
            LOGP,
            PROXIMAL,
            BEHAVE,
            ADVANTAGES,
            ALL,
        )
    with pytest.raises(ValueError, match=r"trainer\.loss\.importance_weighting\.cap"):
        policy_loss(
            Reinforce(importance_weighting=Masked(cap=0.0)), LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL
        )
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        decoupled_ppo_loss(LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL, dual_clip=0.9)


def test_sft_loss_is_the_mean_over_the_mask() -> None:
    # -(-.5 - 2) / 2; with the tokens of a mini-batch of 10: 2.5 / 10.
    mask = np.array([False, True, True, False])
    assert float(sft_loss(LOGP, mask).loss) == pytest.approx(1.25)
    assert float(sft_loss(LOGP, mask, 10.0).loss) == pytest.approx(0.25)


def mean(out: PolicyLoss, name: str) -> float:
    total, weight = out.metrics[name]
    return float(total) / float(weight)


def random_inputs(rng: np.random.Generator, shape: tuple[int, ...]) -> Draw:
    """Three policies near each other, advantages of both signs, and a mask that leaves at least one
    token."""
    logp, proximal, behave = rng.normal(-1.0, 0.3, (3, *shape)).astype(np.float32)
    mask = rng.random(shape) < 0.7
    mask.reshape(-1)[0] = True
    return Draw(logp, proximal, behave, rng.normal(size=shape).astype(np.float32), mask)


def paper_loss(draw: Draw) -> float:
    """Equation 5 as it is written, token by token, with clip [0.8, 1.28], dual clip 3, and tokens
    of w > 2 left out."""
    total = 0.0
    for theta, proximal, behave, advantage, counts in zip(*draw, strict=True):
        u, w = np.exp(theta - proximal), np.exp(proximal - behave)
        if counts and w <= 2.0:
            term = min(u * advantage, np.clip(u, 0.8, 1.28) * advantage)
            total -= w * (max(term, 3.0 * advantage) if advantage < 0 else term)
    return total / draw.mask.sum()


def textbook_loss(config: Loss, draw: Draw) -> float:
    """Every objective as its paper writes it, sequence by sequence and token by token, over the two
    rows of SEGMENTS."""
    total = 0.0
    for row in range(2):
        for segment in range(1, 4):
            here = (SEGMENTS[row] == segment) & draw.mask[row].astype(bool)
            if not here.any():
                continue
            theta, proximal, behave, advantages = (x[row][here] for x in draw[:4])
            if isinstance(config, PPO):
                proximal = behave
            for t in range(len(theta)):
                w = textbook_weight(config, proximal - behave, t)
                total -= w * textbook_gain(config, theta, proximal, advantages, t)
    return total / draw.mask.sum()


def textbook_weight(config: Loss, log_weights: np.ndarray, t: int) -> float:
    importance_weighting = getattr(config, "importance_weighting", Unweighted())
    if isinstance(importance_weighting, Unweighted):
        return 1.0
    w = float(
        np.exp(
            {
                "token": log_weights[t],
                "sequence": log_weights.sum(),
                "geometric": log_weights.mean(),
            }[importance_weighting.level]
        )
    )
    match importance_weighting:
        case Truncated(cap=cap):
            return min(w, cap)
        case Masked(cap=cap):
            return w if w <= cap else 0.0
    return w


def textbook_gain(
    config: Loss, theta: np.ndarray, proximal: np.ndarray, advantages: np.ndarray, t: int
) -> float:
    u, advantage = float(np.exp(theta[t] - proximal[t])), float(advantages[t])
    match config:
        case DecoupledPPO() | PPO():
            term = min(u * advantage, np.clip(u, 0.8, 1.2) * advantage)
            return (
                max(term, config.dual_clip * advantage)
                if config.dual_clip and advantage < 0
                else term
            )
        case GSPO():
            s, mean_advantage = float(np.exp((theta - proximal).mean())), float(advantages.mean())
            high = 1.0 + (config.clip_eps if config.clip_eps_high is None else config.clip_eps_high)
            return min(s * mean_advantage, np.clip(s, 1.0 - config.clip_eps, high) * mean_advantage)
        case SAPO():
            tau = 1.0 if advantage > 0 else 1.05
            return 4.0 / tau / (1.0 + np.exp(-tau * (u - 1.0))) * advantage
        case CISPO():
            return float(np.clip(u, 0.7, 1.2)) * advantage * theta[t]
    return u * advantage


@pytest.mark.parametrize(
    ("age", "behave", "theta", "expected"),
    [
        # Sampled by version 0, version 1 is about to be trained into 2: halfway.
        (1, -1.0, -1.5, -1.25),
        # Versions 0 and 2 of a step from 3 to 4: three quarters of the way, and half of it.
        (3, -1.0, -1.5, -1.375),
        (1, -2.0, -2.2, -2.1),
        # Sampled by the very policy that is about to be trained: it is the proximal one.
        (0, -1.0, -1.5, -1.0),
        # A prompt's version is -1; what is newer than the trainer, if that could be, would not be
        # extrapolated.
        (-2, -1.0, -1.5, -1.0),
    ],
)
def test_the_interpolated_proximal_policy_lies_between_behave_and_theta(
    age: int, behave: float, theta: float, expected: float
) -> None:
    found = interpolated_proximal(
        np.full(1, theta, np.float32), np.full(1, behave, np.float32), np.full(1, age, np.int32)
    )
    np.testing.assert_allclose(found, [expected], rtol=1e-6)


def test_the_interpolated_proximal_policy_carries_no_gradient() -> None:
    gradient = jax.grad(lambda logp: interpolated_proximal(logp, BEHAVE, np.full(4, 3)).sum())(
        jnp.asarray(LOGP)
    )
    np.testing.assert_array_equal(gradient, 0.0)
