"""Laws and hand-computed numbers of the policy objectives."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.load import find_experiment, load_experiment
from areal_jax.rl import losses
from areal_jax.rl.config import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    M2PO,
    PPO,
    SAPO,
    VESPO,
    BehaveLoss,
    CustomLoss,
    DecoupledPPO,
    ImportanceWeighting,
    Loss,
    M2POClip,
    Masked,
    OffPolicyReinforce,
    Reinforce,
    Rejection,
    Truncated,
    Unweighted,
    Weighted,
)
from areal_jax.rl.importance_weights import (
    interpolated_proximal,
    second_moment_bound,
    second_moment_mask,
)
from areal_jax.rl.losses import policy_loss
from areal_jax.rl.token_losses import PolicyLoss, positive_nll, sft_loss

SETTINGS = ("clip_eps", "clip_eps_high", "dual_clip", "behave_weight_cap", "behave_weight_mode")
decoupled_ppo_loss = jax.jit(losses.decoupled_ppo_loss, static_argnames=SETTINGS)
compiled_loss = jax.jit(policy_loss, static_argnums=0)

LOGP = np.array([-1.0, -0.5, -2.0, -1.2], np.float32)
PROXIMAL = np.array([-1.1, -0.9, -1.6, -1.2], np.float32)
BEHAVE = np.array([-1.3, -0.9, -1.6, -3.2], np.float32)
ADVANTAGES = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
ALL = np.ones(4, bool)


class Inputs(NamedTuple):
    """Arguments of a loss, in order."""

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
def test_decoupled_loss_equals_hand_computed_numbers(
    settings: dict[str, Any], expected: float
) -> None:
    loss = decoupled_ppo_loss(
        LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL, clip_eps=0.2, **settings
    ).loss
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_unweighted_loss_equals_hand_computed_numbers() -> None:
    # w = 1: (1.105171 + 1.2 - .8 + 2) / -4; DAPO's upper clip of 1.28 makes the second term 1.28.
    loss = decoupled_ppo_loss(LOGP, PROXIMAL, PROXIMAL, ADVANTAGES, ALL, clip_eps=0.2).loss
    assert float(loss) == pytest.approx(-0.876293, abs=1e-6)
    loss = decoupled_ppo_loss(
        LOGP, PROXIMAL, PROXIMAL, ADVANTAGES, ALL, clip_eps=0.2, clip_eps_high=0.28
    ).loss
    assert float(loss) == pytest.approx(-0.896293, abs=1e-6)


def test_coupled_ppo_equals_hand_computed_number() -> None:
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


def test_equal_policies_give_the_policy_gradient_of_decoupled_ppo() -> None:
    gradient = jax.jit(
        jax.grad(lambda logp: losses.decoupled_ppo_loss(logp, LOGP, LOGP, ADVANTAGES, ALL).loss)
    )(LOGP)
    np.testing.assert_allclose(gradient, -ADVANTAGES / 4, rtol=1e-6)


def test_ratio_on_the_clip_bound_has_a_gradient() -> None:
    # With clip 0 every first ratio lies on both bounds; as in the paper's formula the unclipped
    # branch gives the gradient.
    gradient = jax.grad(
        lambda logp: decoupled_ppo_loss(logp, LOGP, LOGP, ADVANTAGES, ALL, clip_eps=1e-30).loss
    )(LOGP)
    np.testing.assert_allclose(gradient, -ADVANTAGES / 4, rtol=1e-6)


def test_decoupled_ppo_with_proximal_equal_to_behave_is_ppo() -> None:
    inputs = random_inputs(np.random.default_rng(0), (5, 7))
    decoupled = decoupled_ppo_loss(*inputs._replace(proximal_logp=inputs.behave_logp))
    ratio = np.exp(inputs.logp - inputs.behave_logp)
    surrogate = np.minimum(ratio * inputs.advantages, np.clip(ratio, 0.8, 1.2) * inputs.advantages)
    assert float(decoupled.loss) == pytest.approx(-surrogate[inputs.mask].mean(), rel=1e-5)


def test_proximal_and_behave_get_no_gradient() -> None:
    def loss(proximal: jax.Array, behave: jax.Array) -> jax.Array:
        return decoupled_ppo_loss(
            LOGP, proximal, behave, ADVANTAGES, ALL, behave_weight_cap=5.0
        ).loss

    for gradient in jax.grad(loss, argnums=(0, 1))(jnp.asarray(PROXIMAL), jnp.asarray(BEHAVE)):
        assert not np.any(gradient)


@pytest.mark.parametrize(
    "settings", [{}, {"dual_clip": 3.0, "clip_eps_high": 0.28}, {"behave_weight_cap": 1.5}]
)
def test_policy_gradient_equals_finite_differences(settings: dict[str, Any]) -> None:
    inputs = random_inputs(np.random.default_rng(1), (3, 5))
    with jax.enable_x64(True):
        logp, *rest = (x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs)
        loss = jax.jit(
            jax.vmap(lambda logp: losses.decoupled_ppo_loss(logp, *rest, **settings).loss)
        )
        nudges = 1e-6 * np.eye(15).reshape(15, 3, 5)
        slopes = (loss(logp + nudges) - loss(logp - nudges)) / 2e-6
        gradient = jax.grad(lambda logp: decoupled_ppo_loss(logp, *rest, **settings).loss)(logp)
    np.testing.assert_allclose(gradient.reshape(15), slopes, atol=1e-7)


def test_decoupled_loss_equals_float64_on_a_thousand_random_inputs() -> None:
    rng = np.random.default_rng(2)
    samples = [random_inputs(rng, (6,)) for _ in range(1000)]
    loss = partial(
        losses.decoupled_ppo_loss,
        clip_eps=0.2,
        clip_eps_high=0.28,
        dual_clip=3.0,
        behave_weight_cap=2.0,
    )
    batch = Inputs(*(np.stack(arrays) for arrays in zip(*samples, strict=True)))
    expected = [paper_loss(Inputs(*(x.astype(np.float64) for x in inputs))) for inputs in samples]
    np.testing.assert_allclose(
        jax.jit(jax.vmap(lambda inputs: loss(*inputs).loss))(batch), expected, atol=1e-6, rtol=1e-6
    )


@pytest.mark.slow
def test_losses_are_independent_of_micro_batching() -> None:
    inputs = random_inputs(np.random.default_rng(3), (8, 5))
    num_tokens = float(inputs.mask.sum())

    @partial(jax.grad, has_aux=True)
    def gradient_and_loss(logp: jax.Array, *rest: np.ndarray) -> tuple[jax.Array, PolicyLoss]:
        out = losses.decoupled_ppo_loss(logp, *rest, num_tokens=num_tokens)
        return out.loss, out

    run = jax.jit(gradient_and_loss)
    gradient, whole = run(*inputs)
    parts = [run(*(x[start:end] for x in inputs)) for start, end in ((0, 1), (1, 6), (6, 8))]
    assert sum(float(part.loss) for _, part in parts) == pytest.approx(float(whole.loss), rel=1e-6)
    np.testing.assert_allclose(np.concatenate([part for part, _ in parts]), gradient, rtol=1e-6)
    for name, meter in whole.metrics.items():
        for k in range(2):
            assert sum(float(part.metrics[name][k]) for _, part in parts) == pytest.approx(
                float(meter[k]), rel=1e-5
            ), name
    # num_tokens left out, the mask is counted.
    assert float(decoupled_ppo_loss(*inputs).loss) == pytest.approx(float(whole.loss), rel=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["logp", "proximal_logp", "behave_logp", "advantages"])
def test_values_outside_the_mask_change_nothing(where: str, poison: float) -> None:
    inputs = random_inputs(np.random.default_rng(4), (4, 6))
    poisoned = inputs._replace(
        **{where: np.where(inputs.mask, getattr(inputs, where), np.float32(poison))}
    )

    def run(inputs: Inputs) -> tuple[PolicyLoss, jax.Array]:
        gradient = jax.grad(
            lambda logp: decoupled_ppo_loss(logp, *inputs[1:], behave_weight_cap=2.0).loss
        )(inputs.logp)
        return decoupled_ppo_loss(*inputs, behave_weight_cap=2.0), gradient

    for clean, dirty in zip(
        jax.tree.leaves(run(inputs)), jax.tree.leaves(run(poisoned)), strict=True
    ):
        np.testing.assert_array_equal(clean, dirty)


def test_masked_token_may_overflow() -> None:
    # proximal/behave = e^110 is above any cap; theta/proximal = e^190 is inf in float32, and 0 *
    # inf would be nan.
    logp, proximal, behave = (np.array([x, -1.0], np.float32) for x in (-10.0, -200.0, -310.0))
    config, ones = Reinforce(importance_weighting=Masked(cap=2.0)), np.ones(2, np.float32)
    loss, slope = jax.jit(
        jax.value_and_grad(
            lambda logp: policy_loss(config, logp, proximal, behave, ones, ones > 0).loss
        )
    )(logp)
    # The other token: ratio and weight 1, advantage 1, over two tokens.
    assert float(loss) == pytest.approx(-0.5)
    assert slope.tolist() == pytest.approx([0.0, -0.5])


def test_clipped_overflowing_ratio_has_zero_gradient() -> None:
    # exp(200) is inf in float32. A > 0: the clip holds it at 1.2.
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    inputs = Inputs(200.0 * one, zero, zero, one, np.ones(1, bool))
    loss, gradient = jax.value_and_grad(lambda x: decoupled_ppo_loss(x, *inputs[1:]).loss)(
        inputs.logp
    )
    assert float(loss) == pytest.approx(-1.2)
    assert float(gradient[0]) == 0.0


def test_empty_mask_gives_zero_not_nan() -> None:
    nothing = np.zeros(4, bool)
    out, gradient = jax.value_and_grad(
        lambda x: decoupled_ppo_loss(x, PROXIMAL, BEHAVE, ADVANTAGES, nothing).loss
    )(LOGP)
    assert float(out) == 0.0 and not np.any(gradient)
    assert float(sft_loss(LOGP, nothing).loss) == 0.0


def test_loss_metrics_equal_hand_computed_numbers() -> None:
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


def test_row_equals_batch_of_one_row() -> None:
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
def test_config_selects_the_objective(config: Loss, expected: float) -> None:
    out = policy_loss(config, LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)
    assert float(out.loss) == pytest.approx(expected, abs=1e-6)


# Every objective and every importance weighting.

EVERY: list[Loss] = [
    DecoupledPPO(dual_clip=3.0),
    DecoupledPPO(importance_weighting=Masked(cap=1.5)),
    DecoupledPPO(importance_weighting=Truncated(cap=1.5, level="geometric")),
    DecoupledPPO(importance_weighting=Weighted(level="sequence")),
    DecoupledPPO(importance_weighting=Masked(floor=0.6, cap=1.5)),
    DecoupledPPO(importance_weighting=Truncated(floor=0.6, cap=1.5)),
    DecoupledPPO(dual_clip=3.0, behave_clip=1.2),
    DecoupledPPO(rejection=Rejection(geometric_min=0.8, geometric_max=1.2, sequence_max=1.5)),
    DecoupledPPO(rejection=Rejection(k3_max=0.1), importance_weighting=Unweighted()),
    Reinforce(rejection=Rejection(binary_kl_max=0.1, negative_log_ratio_max=0.1)),
    DecoupledPPO(proximal="behave", rejection=Rejection(sequence_min=0.7, k3_max=0.1)),
    PPO(),
    GSPO(clip_eps=0.1, clip_eps_high=0.2),
    GSPO(clip_eps=0.1, importance_weighting=Masked(cap=1.2, level="geometric")),
    SAPO(),
    CISPO(clip_eps_low=0.3, clip_eps_high=0.2),
    DPPO(threshold=0.1, log_ratio_penalty=0.01),
    DPPO(divergence="kl", threshold=0.02),
    VESPO(),
    GMPO(clip=0.2),
    GMPO(importance_weighting=Masked(cap=1.2), rejection=Rejection(k3_max=0.1)),
    M2PO(),
    Reinforce(),
    OffPolicyReinforce(
        importance_weighting=Truncated(cap=1.2), rejection=Rejection(geometric_max=1.3)
    ),
]
every_loss = pytest.mark.parametrize("config", EVERY, ids=repr)
NO_REJECTION = Rejection()
# Packed inputs that one program evaluates.
NUM_INPUTS = 200
SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2]], np.int32)


def packed_inputs(seed: int) -> Inputs:
    """Two rows of three and two sequences, the first with padding at its end."""
    inputs = random_inputs(np.random.default_rng(seed), SEGMENTS.shape)
    return inputs._replace(mask=inputs.mask & (SEGMENTS > 0))


@cache
def program(config: Loss) -> Any:
    """Return one program of the loss and the gradient of each of NUM_INPUTS packed inputs."""

    def loss(inputs: Inputs) -> tuple[tuple[jax.Array, PolicyLoss], jax.Array]:
        def of_policy(logp: jax.Array) -> tuple[jax.Array, PolicyLoss]:
            out = policy_loss(config, logp, *inputs[1:], segment_ids=SEGMENTS)
            return out.loss, out

        return jax.value_and_grad(of_policy, has_aux=True)(inputs.logp)

    return jax.jit(jax.vmap(loss))


def evaluate(config: Loss, inputs: Inputs) -> tuple[PolicyLoss, np.ndarray]:
    """Return the losses, metrics and gradients of several packed inputs, stacked."""
    num = len(inputs.logp)
    padding = [(0, NUM_INPUTS - num), (0, 0), (0, 0)]
    (_, out), gradients = program(config)(Inputs(*(np.pad(x, padding, "edge") for x in inputs)))
    return jax.tree.map(lambda x: np.asarray(x)[:num], (out, gradients))


def evaluate_one(config: Loss, inputs: Inputs) -> tuple[PolicyLoss, np.ndarray]:
    found = evaluate(config, Inputs(*(x[None] for x in inputs)))
    return jax.tree.map(lambda x: x[0], found)


@every_loss
def test_equal_policies_give_the_policy_gradient(config: Loss) -> None:
    inputs = packed_inputs(5)
    # Advantages equal within a sequence, as GSPO wants them.
    inputs = inputs._replace(advantages=np.where(SEGMENTS == 2, np.float32(-0.7), np.float32(1.3)))
    inputs = inputs._replace(proximal_logp=inputs.logp, behave_logp=inputs.logp)
    _, gradient = evaluate_one(config, inputs)
    np.testing.assert_allclose(
        gradient,
        -np.where(inputs.mask, inputs.advantages, 0.0) / inputs.mask.sum(),
        rtol=2e-6,
        atol=1e-8,
    )


@every_loss
def test_objective_gradients_equal_finite_differences(config: Loss) -> None:
    inputs = packed_inputs(6)
    exact = Inputs(*(x.astype(np.float64) if x.dtype == np.float32 else x for x in inputs))
    logp, *rest = exact
    nudges = 1e-6 * np.eye(logp.size).reshape(logp.size, *logp.shape)
    policies = np.concatenate([logp[None], logp + nudges, logp - nudges])
    with jax.enable_x64(True):
        out, gradients = evaluate(
            config, Inputs(policies, *(np.stack([x] * len(policies)) for x in rest))
        )
    assert gradients.dtype == np.float64
    if isinstance(config, CISPO | VESPO | OffPolicyReinforce):
        # Its ratio is a weight: the slope is that of the weighted log-probability, the weight held
        # where it is.
        if isinstance(config, CISPO):
            held = np.clip(np.exp(logp - rest[0]), 0.7, 1.2) * np.exp(rest[0] - rest[1])
        else:
            held = held_shares(config, exact)
        slopes = -np.where(inputs.mask, held * rest[2], 0.0).reshape(-1) / inputs.mask.sum()
    else:
        higher, lower = np.split(out.loss[1:], 2)
        slopes = (higher - lower) / 2e-6
    np.testing.assert_allclose(gradients[0].reshape(-1), slopes, atol=1e-7)


@cache
def thousand_sequences() -> tuple[Inputs, list[Inputs]]:
    """Return a batch of packed inputs of five sequences, and each of them in float64."""
    samples = [packed_inputs(seed) for seed in range(NUM_INPUTS)]
    batch = Inputs(*(np.stack(arrays) for arrays in zip(*samples, strict=True)))
    return batch, [Inputs(*(x.astype(np.float64) for x in inputs)) for inputs in samples]


@every_loss
def test_objectives_equal_float64_on_a_thousand_sequences(config: Loss) -> None:
    batch, exact = thousand_sequences()
    expected = [textbook_loss(config, inputs) for inputs in exact]
    np.testing.assert_allclose(evaluate(config, batch)[0].loss, expected, atol=1e-6, rtol=2e-6)


@every_loss
def test_objectives_are_independent_of_padding_and_packing(config: Loss) -> None:
    inputs, num_tokens = packed_inputs(7), 11.0
    packed = evaluate_one(config, inputs)[0].loss * inputs.mask.sum() / num_tokens
    places = [
        np.flatnonzero(SEGMENTS[row] == segment)
        for row, segment in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2))
    ]
    rows = [
        [np.pad(x[row][here], (0, 8 - len(here))) for x in inputs]
        for row, here in zip((0, 0, 0, 1, 1), places, strict=True)
    ]
    own = jax.jit(jax.vmap(lambda inputs: policy_loss(config, *inputs, num_tokens=num_tokens).loss))
    alone = np.asarray(own(Inputs(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))))
    assert float(packed) == pytest.approx(float(alone.sum()), rel=1e-5)


@every_loss
def test_values_outside_the_mask_change_no_objective(config: Loss) -> None:
    inputs = packed_inputs(8)
    poisoned = Inputs(*(np.where(inputs.mask, x, np.float32(np.nan)) for x in inputs))._replace(
        mask=inputs.mask
    )
    clean, dirty = evaluate_one(config, inputs), evaluate_one(config, poisoned)
    for before, after in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(before, after)


def test_gspo_equals_areal() -> None:
    # Two sequences of log-ratios (.5, .5) and (1, 1): ratios e^.5 and e^1, which a clip of 0.2
    # holds at 1.2. Advantages 1, 2 and 1, 1 have means 1.5 and 1: -(1.2 · 1.5 · 2 + 1.2 · 2) / 4 =
    # -1.5.
    logp, zero = np.array([[0.5, 0.5], [1.0, 1.0]], np.float32), np.zeros((2, 2), np.float32)
    advantages, mask = np.array([[1.0, 2.0], [1.0, 1.0]], np.float32), np.ones((2, 2), bool)
    config = GSPO(clip_eps=0.2, clip_eps_high=None)
    out = compiled_loss(config, logp, zero, zero, advantages, mask)
    assert float(out.loss) == pytest.approx(-1.5)
    assert mean(out, "ratio") == pytest.approx((np.exp(0.5) + np.exp(1.0)) / 2)
    assert mean(out, "clip_fraction") == 1.0


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_sapo_gate_has_value_2_over_tau_and_slope_1_at_ratio_1(tau: float) -> None:
    # AReaL's own test: at ratio 1 the gate is 4/tau · 1/2, and its slope 4 sigmoid'(0) = 1 for
    # every tau.
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    config = SAPO(temperature_positive=tau, temperature_negative=tau)
    loss_and_slope = jax.jit(
        jax.value_and_grad(lambda x, a: policy_loss(config, x, zero, zero, a, one).loss)
    )
    for advantage in (one, -one):
        loss, slope = loss_and_slope(zero, advantage)
        assert float(loss) == pytest.approx(-2.0 / tau * advantage[0])
        assert float(slope[0]) == pytest.approx(-advantage[0])


def test_m2po_masks_tokens_furthest_from_the_behaviour_policy() -> None:
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


def test_m2po_clip_equals_the_authors_number() -> None:
    # Harmful are .1, .5, -.3 and 1, of mean square .3375. With .1 the clipped mean is .01, with .3
    # .07 > .04, so that the bound is .1 and the clip [.7, 1.5].
    log_ratio = np.array([0.1, 0.5, -0.3, 0.05, 1.0, -0.6])
    advantages = np.array([1.0, 1.0, -1.0, -1.0, 1.0, 1.0])
    everywhere = np.ones(6, bool)
    assert second_moment_bound(log_ratio, advantages, everywhere, 0.04) == pytest.approx(0.1)
    loss, _ = compiled_loss(
        M2POClip(), log_ratio - 2.0, np.zeros(6), np.full(6, -2.0), advantages, everywhere
    )
    assert float(loss) == pytest.approx(-0.476982, abs=1e-6)
    # Below the bound nothing is clipped; harmless tokens and those outside of the mask do not count.
    assert second_moment_bound(log_ratio, -advantages, everywhere, 0.2) == np.inf
    masked = np.array([True, False, True, True, False, True])
    assert second_moment_bound(log_ratio, advantages, masked, 0.05) == np.inf
    assert second_moment_bound(log_ratio, advantages, everywhere, 0.009) == 0.0
    on_device = jax.jit(second_moment_bound, static_argnums=3)(
        log_ratio, advantages, everywhere, 0.04
    )
    assert float(on_device) == pytest.approx(0.1)


def textbook_m2po_clip(inputs: Inputs, config: M2POClip) -> float:
    """The loss by its definition, with every harmful log-ratio tried as the bound."""
    theta, _, behave, advantages, mask = (each[inputs.mask] for each in inputs)
    del mask
    x = theta - behave
    harmful = np.abs(x[x * advantages > 0])
    most = config.max_second_moment * len(harmful)
    bound = np.inf
    if (harmful**2).sum() > most:
        fitting = [tau for tau in harmful if (np.minimum(harmful, tau) ** 2).sum() <= most]
        bound = max(fitting, default=0.0)
    low, high = min(np.exp(-bound), config.clip_min), max(np.exp(bound), config.clip_max)
    r = np.exp(x)
    return -float(np.minimum(r * advantages, np.clip(r, low, high) * advantages).mean())


def test_m2po_clip_equals_float64_on_random_inputs() -> None:
    config = M2POClip(max_second_moment=0.02, clip_min=0.95, clip_max=1.05)
    samples = [packed_inputs(seed) for seed in range(300)]
    batch = Inputs(*(np.stack(arrays) for arrays in zip(*samples, strict=True)))
    losses = jax.jit(jax.vmap(lambda inputs: policy_loss(config, *inputs).loss))(batch)
    expected = [
        textbook_m2po_clip(
            Inputs(*(x.astype(np.float64) for x in each))._replace(mask=each.mask), config
        )
        for each in samples
    ]
    np.testing.assert_allclose(losses, expected, atol=1e-6, rtol=2e-6)


def test_m2po_mask_is_equal_on_host_and_device() -> None:
    rng, of_device = np.random.default_rng(0), jax.jit(second_moment_mask, static_argnums=2)
    shares = []
    for _ in range(50):
        log_weight, mask = rng.normal(0.0, 0.3, 200), rng.random(200) < 0.8
        kept = np.asarray(second_moment_mask(log_weight, mask, 0.04))
        on_device = of_device(log_weight.astype(np.float32), mask, 0.04)
        np.testing.assert_array_equal(kept, np.asarray(on_device))
        # By its definition: kept are the nearest, as many as can be.
        nearest = np.sort(log_weight[mask] ** 2)
        most = max(n for n in range(len(nearest) + 1) if nearest[:n].sum() <= 0.04 * n)
        np.testing.assert_allclose(np.sort(log_weight[kept] ** 2), nearest[:most])
        shares.append(most / mask.sum())
    assert 0.2 < np.mean(shares) < 0.9


def test_importance_weightings_equal_hand_computed_numbers() -> None:
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


# As BEHAVE, but far above theta on the third token: w = proximal/behave =
# e^[.2, 0, -1, 2] = [1.221403, 1, .367879, 7.389056], gain f = [1.105171, 1.2, -.8, 2], segments of
# two tokens, -Σ w f / 4.
FAR = np.array([-1.3, -0.9, -0.6, -3.2], np.float32)
PAIRS = np.array([1, 1, 2, 2], np.int32)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, -4.258417),
        # IcePop keeps [1.221403, 1]: the values of verl, AReaL and slime.
        ({"importance_weighting": Masked(floor=0.5, cap=5.0)}, -0.637465),
        ({"importance_weighting": Masked(cap=5.0)}, -0.563889),
        # CIS: w = [1.221403, 1, .5, 5].
        ({"importance_weighting": Truncated(floor=0.5, cap=5.0)}, -3.037465),
        # TIS: w = [1.221403, 1, .367879, 2]; by sequence [e^.2, e^.2, 2, 2].
        ({"importance_weighting": Truncated(cap=2.0)}, -1.563889),
        ({"importance_weighting": Truncated(cap=2.0, level="sequence")}, -1.303886),
        # MIS: products [e^.2, e^1 = 2.718282].
        ({"importance_weighting": Masked(cap=3.0, level="sequence")}, -1.51937),
        ({"importance_weighting": Masked(cap=2.0, level="sequence")}, -0.703886),
        # Geo-RS: means e^.1 = 1.105171 and e^.5 = 1.648721.
        (
            {
                "rejection": Rejection(geometric_min=0.9, geometric_max=1.2),
                "importance_weighting": Truncated(cap=2.0),
            },
            -0.637465,
        ),
        ({"rejection": Rejection(sequence_min=0.5, sequence_max=2.0)}, -0.637465),
        # K3-RS: means of w - 1 - log w .010701 and 2.378468.
        ({"rejection": Rejection(k3_max=0.011)}, -0.637465),
        ({"rejection": Rejection(k3_max=0.0107)}, 0.0),
        ({"rejection": Rejection(k3_max=2.378469)}, -4.258417),
        # KPop: binary KLs [.00881, 0, .291475, .38103].
        ({"rejection": Rejection(binary_kl_max=0.1)}, -0.637465),
        ({"rejection": Rejection(binary_kl_max=2.0)}, -4.258417),
    ],
)
def test_weights_and_rejections_equal_reference_code(
    settings: dict[str, Any], expected: float
) -> None:
    config = DecoupledPPO(**settings)
    out = policy_loss(config, LOGP, PROXIMAL, FAR, ADVANTAGES, ALL, PAIRS)
    assert float(out.loss) == pytest.approx(expected, abs=1e-6)
    if "rejection" in settings:
        assert mean(out, "rejected_fraction") == {-0.637465: 0.5, -4.258417: 0.0}.get(expected, 1.0)


def test_off_policy_reinforce_equals_hand_computed_numbers() -> None:
    # r = theta/behave = e^[.3, .4, -1.4, 2] = [1.349859, 1.491825, .246597, 7.389056], by sequence
    # e^[.7, .6], geometric means e^[.35, .3]; A theta = [-1, -.5, 2, -2.4].
    for importance_weighting, rejection, expected in (
        (Truncated(cap=2.0), Rejection(), 1.600645),
        (Truncated(cap=2.0, level="sequence"), Rejection(), 0.932212),
        (Truncated(cap=2.0), Rejection(geometric_max=1.4), 1.076702),
        (Unweighted(), Rejection(geometric_max=1.4), 0.1),
    ):
        config = OffPolicyReinforce(importance_weighting=importance_weighting, rejection=rejection)
        out = policy_loss(config, LOGP, PROXIMAL, FAR, ADVANTAGES, ALL, PAIRS)
        assert float(out.loss) == pytest.approx(expected, abs=1e-6)


def test_dppo_equals_reference_code() -> None:
    # Δ = e^theta - e^behave = [.095348, .199961, -.413477, .260432], A = [1, 1, -1, 2]: the last two
    # are beyond .2. r = e^[.3, .4], and .001 (.09 + .16 + 1.96 + 4) of all tokens.
    def loss(config: Loss) -> Any:
        return lambda logp: policy_loss(config, logp, PROXIMAL, FAR, ADVANTAGES, ALL).loss

    config = DPPO(log_ratio_penalty=0.001)
    value, gradient = jax.value_and_grad(loss(config))(LOGP)
    assert float(value) == pytest.approx(-0.708868, abs=1e-6)
    np.testing.assert_allclose(
        4 * gradient, [-1.349259, -1.491025, -0.0028, 0.004], rtol=1e-4, atol=1e-6
    )
    # Binary KLs of the first two are .0205 and .0826 nats: only the first is within .05, -r_0 / 4.
    kl = DPPO(divergence="kl", threshold=0.05)
    assert float(loss(kl)(LOGP)) == pytest.approx(-0.337465, abs=1e-6)


def test_gmpo_equals_reference_code() -> None:
    # log u = [.1, .4], [-.4, 0]: means .25 and -.2, ratios 1.284025 and .818731. With 0.2 the bounds
    # make them e^.15 and e^-.1.
    advantages = np.array([1.0, 1.0, -1.0, -1.0], np.float32)
    for clip, expected in ((0.4, -0.232647), (0.2, -0.128498)):
        config = GMPO(clip=clip, importance_weighting=Unweighted())
        out = policy_loss(config, LOGP, PROXIMAL, FAR, advantages, ALL, PAIRS)
        assert float(out.loss) == pytest.approx(expected, abs=1e-6)


def test_vespo_weights_equal_reference_code() -> None:
    # phi(W) = W² e^(3 (1 - W)), and W³ e^(2 (1 - W)) for a negative advantage, at W = .5 and 2.
    log_product = np.log([0.5, 2.0, 0.5, 2.0]).astype(np.float32)
    advantages = np.array([1.0, 1.0, -1.0, -1.0], np.float32)
    gradient = jax.grad(
        lambda logp: (
            policy_loss(
                VESPO(), logp, PROXIMAL, np.zeros(4, np.float32), advantages, ALL, np.arange(4)
            ).loss
        )
    )(log_product)
    expected = np.array([1.120422, 0.199148, 0.339785, 1.082682])
    np.testing.assert_allclose(-4.0 * gradient, expected * advantages, atol=1e-6)


@pytest.mark.parametrize(("clip_eps_high", "expected"), [(0.2, 0.691133), (4.0, 0.727611)])
def test_cispo_equals_reference_code(clip_eps_high: float, expected: float) -> None:
    # u = [1.105171, 1.491825, .670320, 1]: -Σ min(u, bound) A theta / 4, with w = 1.
    config = CISPO(clip_eps_high=clip_eps_high, importance_weighting=Unweighted())
    out = policy_loss(config, LOGP, PROXIMAL, FAR, ADVANTAGES, ALL)
    assert float(out.loss) == pytest.approx(expected, abs=1e-6)


def test_opsm_drops_far_sequences_of_negative_advantage() -> None:
    # mean(behave - theta) = -.25 and .2; only the second sequence's advantage is negative. What is
    # left: (1.105171 + 1.2) / 4, with w = 1.
    advantages = np.array([1.0, 1.0, -1.0, -1.0], np.float32)
    for bound, expected in ((0.1, -0.576293), (0.21, -0.576293 + (0.8 + 1.0) / 4)):
        config = DecoupledPPO(rejection=Rejection(negative_log_ratio_max=bound))
        out = policy_loss(config, LOGP, PROXIMAL, PROXIMAL, advantages, ALL, PAIRS)
        assert float(out.loss) == pytest.approx(expected, abs=1e-6)


def test_behave_clip_stops_gradients_in_the_advantages_direction() -> None:
    # theta/behave = e^[.3, .4, -1.4, 2], c = 1.4: token 0 (1.349859) is inside, token 1 (1.491825)
    # is clipped already, token 2 (A < 0, .246597 < 1/1.4) and token 3 (7.389056) are beyond. u is
    # bounded by 1/1.4 / w = 1.941628 from below and by 1.4 / w = .189469 from above: w times that
    # is 1/1.4 and 1.4.
    loss, gradient = jax.value_and_grad(
        lambda logp: (
            policy_loss(DecoupledPPO(behave_clip=1.4), logp, PROXIMAL, FAR, ADVANTAGES, ALL).loss
        )
    )(LOGP)
    assert float(loss) == pytest.approx(-(1.349859 + 1.2 - 1 / 1.4 + 2 * 1.4) / 4, abs=1e-6)
    np.testing.assert_allclose(gradient, [-1.349859 / 4, 0.0, 0.0, 0.0], atol=1e-6)
    # Against the advantage's direction nothing stops: A of the other sign.
    gradient = jax.grad(
        lambda logp: (
            policy_loss(DecoupledPPO(behave_clip=1.4), logp, PROXIMAL, FAR, -ADVANTAGES, ALL).loss
        )
    )(LOGP)
    assert (gradient != 0.0).all()


def test_custom_loss_is_weighted_and_averaged_like_the_others() -> None:
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


def test_unknown_objective_error_names_the_setting() -> None:
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
    with pytest.raises(ValueError, match=r"cap=0\.0: expected a number above 0"):
        Masked(cap=0.0)
    with pytest.raises(ValueError, match=r"dual_clip=0\.9: expected a number above 1"):
        decoupled_ppo_loss(LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL, dual_clip=0.9)


def test_sft_loss_is_the_mean_over_the_mask() -> None:
    # -(-.5 - 2) / 2; with the tokens of a mini-batch of 10: 2.5 / 10.
    mask = np.array([False, True, True, False])
    assert float(sft_loss(LOGP, mask).loss) == pytest.approx(1.25)
    assert float(sft_loss(LOGP, mask, 10.0).loss) == pytest.approx(0.25)


def test_positive_nll_is_the_mean_over_correct_answers() -> None:
    # Tokens 1 and 2 are of correct answers, 3 of the 4 count: weight 3/2. (.5 + 2) / 2, times .1;
    # values outside the mask are not read.
    mask, weights = np.array([True, True, True, False]), np.array([0.0, 1.5, 1.5, np.nan])
    out, gradient = jax.value_and_grad(
        lambda logp: positive_nll(0.1, logp, mask, weights.astype(np.float32)).loss
    )(LOGP)
    assert float(out) == pytest.approx(0.125)
    np.testing.assert_allclose(gradient, [0.0, -0.05, -0.05, 0.0], rtol=1e-6)


def mean(out: PolicyLoss, name: str) -> float:
    total, weight = out.metrics[name]
    return float(total) / float(weight)


def random_inputs(rng: np.random.Generator, shape: tuple[int, ...]) -> Inputs:
    """Three policies near each other, advantages of both signs, and a mask that leaves at least one
    token."""
    logp, proximal, behave = rng.normal(-1.0, 0.3, (3, *shape)).astype(np.float32)
    mask = rng.random(shape) < 0.7
    mask.reshape(-1)[0] = True
    return Inputs(logp, proximal, behave, rng.normal(size=shape).astype(np.float32), mask)


def paper_loss(inputs: Inputs) -> float:
    """Equation 5, token by token, with clip [0.8, 1.28], dual clip 3, and tokens of w > 2
    masked."""
    total = 0.0
    for theta, proximal, behave, advantage, counts in zip(*inputs, strict=True):
        u, w = np.exp(theta - proximal), np.exp(proximal - behave)
        if counts and w <= 2.0:
            term = min(u * advantage, np.clip(u, 0.8, 1.28) * advantage)
            total -= w * (max(term, 3.0 * advantage) if advantage < 0 else term)
    return total / inputs.mask.sum()


def textbook_loss(config: Loss, inputs: Inputs) -> float:
    """Every objective by its paper's formula, by sequence and token, over both rows of SEGMENTS."""
    total = 0.0
    for row in range(2):
        for segment in range(1, 4):
            here = (SEGMENTS[row] == segment) & inputs.mask[row].astype(bool)
            if not here.any():
                continue
            theta, proximal, behave, advantages = (x[row][here] for x in inputs[:4])
            if isinstance(config, BehaveLoss):
                proximal = theta if isinstance(config, OffPolicyReinforce) else behave
            for t in range(len(theta)):
                if textbook_rejection(config, theta, proximal, behave, advantages, t):
                    continue
                w = textbook_weight(config, proximal - behave, t)
                total -= w * textbook_gain(config, theta, proximal, advantages, t, behave)
    return total / inputs.mask.sum()


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
        case Truncated(cap=cap, floor=floor):
            return max(floor, min(w, cap))
        case Masked(cap=cap, floor=floor):
            return w if floor <= w <= cap else 0.0
    return w


def textbook_rejection(
    config: Loss,
    theta: np.ndarray,
    proximal: np.ndarray,
    behave: np.ndarray,
    advantages: np.ndarray,
    t: int,
) -> bool:
    """Whether one of the bounds that are set is violated."""
    bounds = getattr(config, "rejection", NO_REJECTION)
    if bounds == NO_REJECTION:
        return False
    policy = theta if getattr(config, "proximal", "") == "behave" else proximal
    w, q, p = np.exp(policy - behave), behave[t], policy[t]

    def coin(a: float, b: float) -> float:
        rest_a, rest_b = (-np.expm1(min(x, -1e-6)) for x in (a, b))
        return float(np.exp(a) * (a - b) + rest_a * np.log(rest_a / rest_b))

    measured = {
        "geometric": np.prod(w) ** (1 / len(w)),
        "sequence": np.prod(w),
        "k3": (w - 1.0 - np.log(w)).mean(),
        "binary_kl": max(coin(p, q), coin(q, p)),
        "negative_log_ratio": (behave - theta).mean() if advantages.mean() < 0 else -np.inf,
    }
    return any(
        measured[name] > (np.inf if (high := getattr(bounds, f"{name}_max")) is None else high)
        or measured[name] < (getattr(bounds, f"{name}_min", None) or -np.inf)
        for name in measured
    )


def textbook_phi(log_product: float, advantage: float) -> float:
    k, lam = (3.0, 2.0) if advantage < 0 else (2.0, 3.0)
    return float(np.exp(log_product) ** k * np.exp(lam * (1.0 - np.exp(log_product))))


def held_shares(config: Loss, inputs: Inputs) -> np.ndarray:
    """The factor of A log(theta) of every token, which has no gradient."""
    shares = np.zeros(SEGMENTS.shape)
    for row, segment in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2)):
        here = (SEGMENTS[row] == segment) & inputs.mask[row].astype(bool)
        theta, _, behave, advantages = (x[row][here] for x in inputs[:4])
        for i, t in enumerate(np.flatnonzero(here)):
            if isinstance(config, VESPO):
                shares[row, t] = textbook_phi((theta - behave).sum(), advantages[i])
            elif not textbook_rejection(config, theta, theta, behave, advantages, i):
                shares[row, t] = textbook_weight(config, theta - behave, i)
    return shares


def textbook_gain(
    config: Loss,
    theta: np.ndarray,
    proximal: np.ndarray,
    advantages: np.ndarray,
    t: int,
    behave: np.ndarray,
) -> float:
    u, advantage = float(np.exp(theta[t] - proximal[t])), float(advantages[t])
    match config:
        case DecoupledPPO(behave_clip=c) if c is not None:
            from_behave = float(np.exp(behave[t] - proximal[t]))
            if advantage > 0:
                return min(u, 1.2, c * from_behave) * advantage
            held = max(u, 0.8, from_behave / c)
            return max(held * advantage, 3.0 * advantage)
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
        case OffPolicyReinforce():
            return advantage * theta[t]
        case VESPO():
            return textbook_phi((theta - behave).sum(), advantage) * advantage * theta[t]
        case GMPO(clip=clip):
            mean_advantage = float(advantages.mean())
            bounded = [
                min(x, clip) if mean_advantage > 0 else max(x, -clip) for x in theta - proximal
            ]
            return float(np.exp(np.mean(bounded))) * mean_advantage
        case DPPO():
            p, q = min(np.exp(theta[t]), np.exp(-1e-6)), np.exp(behave[t])
            moved = np.exp(theta[t]) - q
            q_rest = 1.0 - min(q, np.exp(-1e-6))
            kl = q * (behave[t] - theta[t]) + q_rest * np.log(q_rest / (1.0 - p))
            distance = abs(moved) if config.divergence == "tv" else kl
            is_kept = distance <= config.threshold or moved * advantage <= 0
            return is_kept * u * advantage - config.log_ratio_penalty * float(np.log(u)) ** 2
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
def test_interpolated_proximal_lies_between_behave_and_theta(
    age: int, behave: float, theta: float, expected: float
) -> None:
    found = interpolated_proximal(
        np.full(1, theta, np.float32), np.full(1, behave, np.float32), np.full(1, age, np.int32)
    )
    np.testing.assert_allclose(found, [expected], rtol=1e-6)


def test_interpolated_proximal_has_no_gradient() -> None:
    gradient = jax.grad(lambda logp: interpolated_proximal(logp, BEHAVE, np.full(4, 3)).sum())(
        jnp.asarray(LOGP)
    )
    np.testing.assert_array_equal(gradient, 0.0)
