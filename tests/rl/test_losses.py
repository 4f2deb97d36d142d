"""Laws and hand-computed numbers of the policy objectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.rl.config import PPO, DecoupledPPO, Loss
from areal_jax.rl.losses import PolicyLoss, decoupled_ppo_loss, policy_loss, ppo_loss, sft_loss

LOGP = np.array([-1.0, -0.5, -2.0, -1.2], np.float32)
PROXIMAL = np.array([-1.1, -0.9, -1.6, -1.2], np.float32)
BEHAVE = np.array([-1.3, -0.9, -1.6, -3.2], np.float32)
ADVANTAGES = np.array([1.0, 1.0, -1.0, 2.0], np.float32)
ALL = np.ones(4, bool)

# u = theta/proximal = e^[.1, .4, -.4, 0] = [1.105171, 1.491825, .670320, 1];  w = proximal/behave = e^[.2, 0, 0, 2]
#   = [1.221403, 1, 1, 7.389056].  Clip 0.2: min(uA, clip(u)A) = [1.105171, 1.2, -.8, 2]
#   (token 3: A < 0, u < .8, so min(-.670320, -.8)).  w times that: [1.349859, 1.2, -.8, 14.778112], sum 16.527971, / -4.
GOLDEN = [
    ({}, -4.131993),
    # Cap 5: w of the last token is 7.389: it leaves the sum (1.749859 / -4), the denominator stays; or w = 5: 11.749859 / -4.
    ({"behave_weight_cap": 5.0}, -0.437465),
    ({"behave_weight_cap": 5.0, "behave_weight_mode": "clamp"}, -2.937465),
]


@pytest.mark.parametrize(("settings", "expected"), GOLDEN)
def test_decoupled_loss_equals_the_numbers_by_hand(settings: dict[str, Any], expected: float) -> None:
    loss = decoupled_ppo_loss(LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL, clip_eps=0.2, **settings).loss
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_without_the_behave_weight_the_numbers_by_hand() -> None:
    # w = 1: (1.105171 + 1.2 - .8 + 2) / -4; DAPO's upper clip of 1.28 makes the second term 1.28.
    loss = decoupled_ppo_loss(LOGP, PROXIMAL, PROXIMAL, ADVANTAGES, ALL, clip_eps=0.2).loss
    assert float(loss) == pytest.approx(-0.876293, abs=1e-6)
    loss = decoupled_ppo_loss(LOGP, PROXIMAL, PROXIMAL, ADVANTAGES, ALL, clip_eps=0.2, clip_eps_high=0.28).loss
    assert float(loss) == pytest.approx(-0.896293, abs=1e-6)


def test_coupled_loss_equals_the_number_by_hand() -> None:
    # theta/behave = e^[.3, .4, -.4, 2]: all clipped, [1.2, 1.2, -.8, 2.4], sum 4, / -4.
    loss = decoupled_ppo_loss(LOGP, BEHAVE, BEHAVE, ADVANTAGES, ALL, clip_eps=0.2).loss
    assert float(loss) == pytest.approx(-1.0, abs=1e-6)
    assert float(ppo_loss(LOGP, BEHAVE, ADVANTAGES, ALL, clip_eps=0.2).loss) == pytest.approx(-1.0, abs=1e-6)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    # Log-ratio 1.5, A = -1: e^1.5 = 4.481689, bounded by c = 3. A positive advantage is not touched: -min(4.48, 1.2).
    logp, zero = np.array([1.5], np.float32), np.zeros(1, np.float32)
    minus, mask = -np.ones(1, np.float32), np.ones(1, bool)
    assert float(decoupled_ppo_loss(logp, zero, zero, minus, mask).loss) == pytest.approx(4.481689, abs=1e-6)
    bounded = decoupled_ppo_loss(logp, zero, zero, minus, mask, dual_clip=3.0)
    assert float(bounded.loss) == pytest.approx(3.0, abs=1e-6)
    assert mean(bounded, "dual_clip_fraction") == 1.0
    assert float(decoupled_ppo_loss(logp, zero, zero, -minus, mask, dual_clip=3.0).loss) == pytest.approx(-1.2, abs=1e-6)


def test_when_all_policies_are_equal_the_gradient_is_the_policy_gradient() -> None:
    gradient = jax.grad(lambda logp: decoupled_ppo_loss(logp, LOGP, LOGP, ADVANTAGES, ALL).loss)(LOGP)
    np.testing.assert_allclose(gradient, -ADVANTAGES / 4, rtol=1e-6)


def test_a_ratio_on_the_bound_still_learns() -> None:
    # With clip 0 every first ratio lies on both bounds; as in the paper's formula the unclipped branch gives the gradient.
    gradient = jax.grad(lambda logp: decoupled_ppo_loss(logp, LOGP, LOGP, ADVANTAGES, ALL, clip_eps=0.0).loss)(LOGP)
    np.testing.assert_allclose(gradient, -ADVANTAGES / 4, rtol=1e-6)


def test_when_proximal_is_behave_it_is_ppo() -> None:
    draw = random_inputs(np.random.default_rng(0), (5, 7))
    decoupled = decoupled_ppo_loss(draw["logp"], draw["behave_logp"], draw["behave_logp"], draw["advantages"], draw["mask"])
    ratio = np.exp(draw["logp"] - draw["behave_logp"])
    surrogate = np.minimum(ratio * draw["advantages"], np.clip(ratio, 0.8, 1.2) * draw["advantages"])
    assert float(decoupled.loss) == pytest.approx(-surrogate[draw["mask"]].mean(), rel=1e-5)


def test_nothing_flows_through_proximal_or_behave() -> None:
    def loss(proximal: jax.Array, behave: jax.Array) -> jax.Array:
        return decoupled_ppo_loss(LOGP, proximal, behave, ADVANTAGES, ALL, behave_weight_cap=5.0).loss

    for gradient in jax.grad(loss, argnums=(0, 1))(jnp.asarray(PROXIMAL), jnp.asarray(BEHAVE)):
        assert not np.any(gradient)


@pytest.mark.parametrize("settings", [{}, {"dual_clip": 3.0, "clip_eps_high": 0.28}, {"behave_weight_cap": 1.5}])
def test_gradient_equals_finite_differences(settings: dict[str, Any]) -> None:
    draw = random_inputs(np.random.default_rng(1), (3, 5))
    with jax.enable_x64(True):
        draw = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in draw.items()}
        rest = {name: x for name, x in draw.items() if name != "logp"}

        @jax.jit
        def loss(logp: jax.Array) -> jax.Array:
            return decoupled_ppo_loss(logp, **rest, **settings).loss

        gradient, step = jax.grad(loss)(draw["logp"]), 1e-6
        for place in np.ndindex(3, 5):
            nudge = np.zeros((3, 5))
            nudge[place] = step
            slope = (loss(draw["logp"] + nudge) - loss(draw["logp"] - nudge)) / (2 * step)
            assert float(gradient[place]) == pytest.approx(float(slope), abs=1e-7)


def test_a_thousand_random_inputs_equal_float64_numpy() -> None:
    rng = np.random.default_rng(2)
    draws = [random_inputs(rng, (6,)) for _ in range(1000)]
    batch = {name: np.stack([draw[name] for draw in draws]) for name in draws[0]}
    settings: dict[str, Any] = {"clip_eps": 0.2, "clip_eps_high": 0.28, "dual_clip": 3.0, "behave_weight_cap": 2.0}
    losses = jax.jit(jax.vmap(lambda inputs: decoupled_ppo_loss(**inputs, **settings).loss))(batch)
    expected = [paper_loss(**{name: x.astype(np.float64) for name, x in draw.items()}) for draw in draws]
    np.testing.assert_allclose(losses, expected, atol=1e-6, rtol=1e-6)


def test_cutting_into_micro_batches_changes_nothing() -> None:
    draw = random_inputs(np.random.default_rng(3), (8, 5))
    num_tokens = float(draw["mask"].sum())

    def loss_and_gradient(rows: slice) -> tuple[PolicyLoss, jax.Array]:
        rest = {name: x[rows] for name, x in draw.items() if name != "logp"}

        def loss(logp: jax.Array) -> tuple[jax.Array, PolicyLoss]:
            out = decoupled_ppo_loss(logp, **rest, num_tokens=num_tokens)
            return out.loss, out

        gradient, out = jax.grad(loss, has_aux=True)(jnp.asarray(draw["logp"][rows]))
        return out, gradient

    whole, gradient = loss_and_gradient(slice(None))
    parts = [loss_and_gradient(slice(start, end)) for start, end in ((0, 1), (1, 6), (6, 8))]
    assert sum(float(part.loss) for part, _ in parts) == pytest.approx(float(whole.loss), rel=1e-6)
    np.testing.assert_allclose(np.concatenate([part for _, part in parts]), gradient, rtol=1e-6)
    for name, meter in whole.metrics.items():
        for k in range(2):
            assert sum(float(part.metrics[name][k]) for part, _ in parts) == pytest.approx(float(meter[k]), rel=1e-5), name
    # Left to itself, each part would divide by its own tokens.
    assert float(decoupled_ppo_loss(**draw).loss) == pytest.approx(float(whole.loss), rel=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["logp", "proximal_logp", "behave_logp", "advantages"])
def test_what_lies_under_the_mask_poisons_nothing(where: str, poison: float) -> None:
    draw = random_inputs(np.random.default_rng(4), (4, 6))
    poisoned = draw | {where: np.where(draw["mask"], draw[where], np.float32(poison))}

    def run(inputs: dict[str, np.ndarray]) -> tuple[PolicyLoss, jax.Array]:
        rest = {name: x for name, x in inputs.items() if name != "logp"}
        gradient = jax.grad(lambda logp: decoupled_ppo_loss(logp, **rest, behave_weight_cap=2.0).loss)(inputs["logp"])
        return decoupled_ppo_loss(**inputs, behave_weight_cap=2.0), gradient

    for clean, dirty in zip(jax.tree.leaves(run(draw)), jax.tree.leaves(run(poisoned)), strict=True):
        np.testing.assert_array_equal(clean, dirty)


def test_an_overflowing_ratio_that_is_clipped_has_gradient_zero() -> None:
    # exp(200) is inf in float32. A > 0: the clip holds it at 1.2.
    draw = {"proximal_logp": np.zeros(1, np.float32), "behave_logp": np.zeros(1, np.float32)}
    draw |= {"advantages": np.ones(1, np.float32), "mask": np.ones(1, bool)}
    logp = np.array([200.0], np.float32)
    assert float(decoupled_ppo_loss(logp, **draw).loss) == pytest.approx(-1.2)
    assert float(jax.grad(lambda x: decoupled_ppo_loss(x, **draw).loss)(logp)[0]) == 0.0


def test_an_empty_mask_gives_zero_not_nan() -> None:
    nothing = np.zeros(4, bool)
    out, gradient = jax.value_and_grad(lambda x: decoupled_ppo_loss(x, PROXIMAL, BEHAVE, ADVANTAGES, nothing).loss)(LOGP)
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
    assert mean(out, "kl_behave_theta") == pytest.approx((0.049859 + 0.091825 + 0.070320 + 4.389056) / 4, abs=1e-6)
    # theta/proximal = e^[.1, .4, -.4, 0]: [.005171, .091825, .070320, 0]
    assert mean(out, "kl_proximal_theta") == pytest.approx((0.005171 + 0.091825 + 0.070320) / 4, abs=1e-6)
    assert mean(out, "loss") == pytest.approx(float(out.loss), abs=1e-6)


def test_a_row_and_a_batch_of_one_row_are_the_same() -> None:
    row = decoupled_ppo_loss(LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)
    batch = decoupled_ppo_loss(*(x[None] for x in (LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)))
    assert float(row.loss) == float(batch.loss)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DecoupledPPO(), -4.131993),
        (DecoupledPPO(behave_weight_cap=5.0, behave_weight_mode="clamp"), -2.937465),
        (PPO(), -1.0),
    ],
)
def test_the_config_names_the_objective(config: Loss, expected: float) -> None:
    out = policy_loss(config, LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)
    assert float(out.loss) == pytest.approx(expected, abs=1e-6)


def test_an_unknown_objective_is_an_error_that_names_the_knob() -> None:
    with pytest.raises(TypeError, match=r"trainer\.loss"):
        policy_loss(Loss(), LOGP, PROXIMAL, BEHAVE, ADVANTAGES, ALL)
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


def random_inputs(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Three policies near each other, advantages of both signs, and a mask that leaves at least one token."""
    logp, proximal, behave = rng.normal(0.0, 0.3, (3, *shape)).astype(np.float32) - 1.0
    mask = rng.random(shape) < 0.7
    mask.reshape(-1)[0] = True
    advantages = rng.normal(size=shape).astype(np.float32)
    return {"logp": logp, "proximal_logp": proximal, "behave_logp": behave, "advantages": advantages, "mask": mask}


def paper_loss(
    logp: np.ndarray, proximal_logp: np.ndarray, behave_logp: np.ndarray, advantages: np.ndarray, mask: np.ndarray
) -> float:
    """Equation 5 as it is written, token by token, with clip [0.8, 1.28], dual clip 3, and tokens of w > 2 left out."""
    total = 0.0
    for theta, proximal, behave, advantage, counts in zip(logp, proximal_logp, behave_logp, advantages, mask, strict=True):
        u, w = np.exp(theta - proximal), np.exp(proximal - behave)
        if counts and w <= 2.0:
            term = min(u * advantage, np.clip(u, 0.8, 1.28) * advantage)
            total -= w * (max(term, 3.0 * advantage) if advantage < 0 else term)
    return total / mask.sum()
