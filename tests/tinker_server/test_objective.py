"""Tinker's loss functions against their definitions in float64, and against the project's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.errors import InvalidRequest
from areal_jax.rl.config import CISPO, GSPO, PPO
from areal_jax.rl.losses import policy_loss
from areal_jax.rl.token_losses import sft_loss
from areal_jax.tinker.objective import SummedLoss, read_loss, summed_loss

RNG = np.random.default_rng(0)
SHAPE = 3, 40
LOGP = RNG.normal(-1.5, 0.8, SHAPE)
BEHAVE = LOGP + RNG.normal(0.0, 0.5, SHAPE)
ADVANTAGES = RNG.normal(0.0, 1.0, SHAPE) * (RNG.random(SHAPE) < 0.7)
WEIGHTS = RNG.random(SHAPE) * (RNG.random(SHAPE) < 0.7)
MASK = RNG.random(SHAPE) < 0.8
RATIO = np.exp(LOGP - BEHAVE)
IN_RATIO = MASK & (RNG.random(SHAPE) < 0.6)
# Each row is a sequence. The thresholds keep one of three.
MEAN = np.exp(((LOGP - BEHAVE) * IN_RATIO).sum(1, keepdims=True) / IN_RATIO.sum(1, keepdims=True))
MEAN_RATIO = np.broadcast_to(MEAN, SHAPE)

# Sums over the targets, with their gradients by hand: the gradient of u = exp(logp - behave) is u.
EXPECTED = {
    "cross_entropy": (-WEIGHTS * LOGP, -WEIGHTS),
    "importance_sampling": (-RATIO * ADVANTAGES, -RATIO * ADVANTAGES),
    "ppo": (
        -np.minimum(RATIO * ADVANTAGES, np.clip(RATIO, 0.8, 1.2) * ADVANTAGES),
        -RATIO
        * ADVANTAGES
        * ~((ADVANTAGES > 0) & (RATIO > 1.2) | (ADVANTAGES < 0) & (RATIO < 0.8)),
    ),
    "cispo": (
        -np.clip(RATIO, 0.0, 4.0) * ADVANTAGES * LOGP,
        -np.clip(RATIO, 0.0, 4.0) * ADVANTAGES,
    ),
    "dro": (
        -(LOGP * ADVANTAGES - 0.025 * (LOGP - BEHAVE) ** 2),
        -(ADVANTAGES - 0.05 * (LOGP - BEHAVE)),
    ),
    "gspo": (
        -np.minimum(MEAN_RATIO * ADVANTAGES, np.clip(MEAN_RATIO, 0.9997, 1.0004) * ADVANTAGES),
        -MEAN_RATIO
        * ADVANTAGES
        * ~((ADVANTAGES > 0) & (MEAN_RATIO > 1.0004) | (ADVANTAGES < 0) & (MEAN_RATIO < 0.9997)),
    ),
}


def value_and_gradient(loss: SummedLoss, logp: np.ndarray = LOGP) -> tuple[float, np.ndarray]:
    columns = {
        "weights": WEIGHTS,
        "logprobs": BEHAVE,
        "advantages": ADVANTAGES,
        "sequence_ratio_mask": IN_RATIO,
    }
    batch = {name: jnp.asarray(columns[name], jnp.float32) for name in loss.columns}
    value, gradient = jax.value_and_grad(
        lambda x: summed_loss(loss, x, batch, jnp.asarray(MASK), jnp.ones(SHAPE, jnp.int32))
    )(jnp.asarray(logp, jnp.float32))
    return float(value), np.asarray(gradient)


@pytest.mark.parametrize("name", EXPECTED)
def test_loss_and_gradient_are_tinkers_sums(name: str) -> None:
    value, gradient = value_and_gradient(read_loss(name, {}))
    tokens, slopes = EXPECTED[name]
    assert value == pytest.approx((tokens * MASK).sum(), rel=1e-5)
    np.testing.assert_allclose(gradient, slopes * MASK, rtol=1e-5, atol=1e-5)


def test_gspo_is_the_projects_where_advantages_are_those_of_sequences() -> None:
    logp, behave = jnp.asarray(LOGP, jnp.float32), jnp.asarray(BEHAVE, jnp.float32)
    advantages = jnp.broadcast_to(jnp.array([[1.0], [-2.0], [0.5]]), SHAPE)
    mask, segments = jnp.asarray(MASK), jnp.ones(SHAPE, jnp.int32)
    columns = {"logprobs": behave, "advantages": advantages, "sequence_ratio_mask": mask * 1.0}

    def own(logp: jax.Array) -> jax.Array:
        found = policy_loss(GSPO(), logp, behave, behave, advantages, mask, segments)
        return found.loss * MASK.sum()

    def tinkers(logp: jax.Array) -> jax.Array:
        return summed_loss(read_loss("gspo", {}), logp, columns, mask, segments)

    for found, expected in zip(
        jax.value_and_grad(tinkers)(logp), jax.value_and_grad(own)(logp), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cross_entropy", "ppo", "cispo"])
def test_sums_are_the_projects_means_times_the_tokens(name: str) -> None:
    mask = MASK & (ADVANTAGES != 0.0)
    logp, behave, advantages = (jnp.asarray(x, jnp.float32) for x in (LOGP, BEHAVE, ADVANTAGES))
    match name:
        case "ppo":
            mean, loss = (
                policy_loss(PPO(), logp, behave, behave, advantages, mask).loss,
                read_loss("ppo", {}),
            )
        case "cispo":
            thresholds = {"clip_low_threshold": 0.5, "clip_high_threshold": 5.0}
            loss = read_loss("cispo", thresholds)
            mean = policy_loss(CISPO(clip_eps_low=0.5), logp, behave, behave, advantages, mask).loss
        case _:
            mask = MASK
            mean, loss = sft_loss(logp, mask).loss, read_loss("cross_entropy", {})
            columns = {"weights": jnp.ones(SHAPE)}
            value = summed_loss(loss, logp, columns, jnp.asarray(mask), jnp.ones(SHAPE, jnp.int32))
            assert float(value) == pytest.approx(float(mean) * mask.sum(), rel=1e-5)
            return
    assert value_and_gradient(loss)[0] == pytest.approx(float(mean) * mask.sum(), rel=1e-5)


def test_tokens_that_do_not_count_may_have_any_logprob() -> None:
    logp = np.where(MASK & (ADVANTAGES != 0.0), LOGP, -np.inf)
    for name in ("importance_sampling", "ppo", "cispo", "gspo"):
        if name == "gspo":  # its mean counts these tokens too
            logp = np.where(MASK & (ADVANTAGES != 0.0) | IN_RATIO, LOGP, -np.inf)
        value, gradient = value_and_gradient(read_loss(name, {}), logp)
        assert value == pytest.approx((EXPECTED[name][0] * MASK).sum(), rel=1e-5)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("name", "config", "found"),
    [
        ("reinforce", {}, "expected one of cross_entropy"),
        ("stable_reinforce", {}, "not published; set loss_fn to one of cross_entropy"),
        ("ppo", {"clip_low_threshold": 1.1}, "clip_low_threshold < 1"),
        ("ppo", {"clip_high_threshold": float("nan")}, "at least 0"),
        ("ppo", {"beta": 0.1}, "found beta"),
        ("dro", {"beta": "x"}, "to be a number"),
    ],
)
def test_unknown_losses_and_settings_are_refused(
    name: str, config: dict[str, float | str], found: str
) -> None:
    with pytest.raises(InvalidRequest, match=found):
        read_loss(name, config)
