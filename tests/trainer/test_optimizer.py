"""Learning rates and updates worked out by hand."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import POLICY, params

from areal_jax.trainer.config import OptimizerConfig
from areal_jax.trainer.optimizer import learning_rate, make_optimizer, num_updates_done


def rates(config: OptimizerConfig, num_updates: int) -> np.ndarray:
    return np.array(
        [learning_rate(config, jnp.asarray(update), num_updates) for update in range(num_updates)]
    )


def test_the_rate_rises_to_the_peak_and_stays() -> None:
    # Four of ten updates rise in equal steps; the first is not wasted on a rate of 0.
    found = rates(OptimizerConfig(learning_rate=2.0, warmup_fraction=0.4), 10)
    np.testing.assert_allclose(found, [0.5, 1.0, 1.5] + [2.0] * 7)


def test_a_short_run_with_the_papers_warm_up_has_none() -> None:
    np.testing.assert_allclose(
        rates(OptimizerConfig(learning_rate=2.0, warmup_fraction=0.001), 4), 2.0
    )


def test_linear_and_cosine_fall_towards_zero() -> None:
    # Two of six rise; of the other four 0, 1/4, 2/4, 3/4 are done. cos(0, 45, 90, 135 degrees).
    linear = rates(OptimizerConfig(learning_rate=1.0, schedule="linear", warmup_fraction=1 / 3), 6)
    np.testing.assert_allclose(linear, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25], atol=1e-6)
    cosine = rates(OptimizerConfig(learning_rate=1.0, schedule="cosine", warmup_fraction=1 / 3), 6)
    np.testing.assert_allclose(cosine, [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447], atol=1e-6)
    assert float(learning_rate(OptimizerConfig(schedule="linear"), jnp.asarray(99), 6)) == 0.0


@pytest.mark.slow
def test_only_matrices_decay() -> None:
    # Without gradient Adam does nothing, so that the direction is the decay alone: 0.1 times the
    # parameter.
    weights = params()
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1), POLICY.axes())
    update: Any = jax.jit(optimizer.update)
    direction, _ = update(jax.tree.map(jnp.zeros_like, weights), optimizer.init(weights), weights)
    attention, expected = direction["layers"]["attn"], weights["layers"]["attn"]
    for name in ("q", "k", "v", "o"):
        np.testing.assert_allclose(attention[name], 0.1 * expected[name], rtol=1e-6)
    for name in ("q_bias", "k_bias", "v_bias"):
        assert not np.any(attention[name])
    for name in ("gate", "up", "down"):
        np.testing.assert_allclose(
            direction["layers"]["mlp"][name], 0.1 * weights["layers"]["mlp"][name], rtol=1e-6
        )
    np.testing.assert_allclose(direction["embed"], 0.1 * weights["embed"], rtol=1e-6)
    np.testing.assert_allclose(direction["head"], 0.1 * weights["head"], rtol=1e-6)
    for norm in (
        direction["norm"],
        direction["layers"]["attn_norm"],
        direction["layers"]["mlp_norm"],
    ):
        assert not np.any(norm)


@pytest.mark.slow
def test_two_updates_equal_the_numbers_by_hand() -> None:
    # Gradient (3, 4) has norm 5 and is cut to (.6, .8); eps = .2, no decay, beta .5 and .5.
    # First: m / (1 - .5) = g, v / (1 - .5) = g², so g / (|g| + .2) = (.75, .8).
    # Then gradient 0: m = .25 g, / (1 - .25) = g / 3; v = .25 g², / .75 = g² / 3: (g/3) / (|g| /
    # sqrt 3 + .2)
    #   = (.2 / (.346410 + .2), .266667 / (.461880 + .2)) = (.366026, .402891).
    config = OptimizerConfig(beta1=0.5, beta2=0.5, eps=0.2, weight_decay=0.0, max_grad_norm=1.0)
    optimizer = make_optimizer(config, {"w": ("embed", "mlp")})
    weights = {"w": jnp.zeros(2)}
    update: Any = optimizer.update
    direction, state = update({"w": jnp.array([3.0, 4.0])}, optimizer.init(weights), weights)
    np.testing.assert_allclose(direction["w"], [0.75, 0.8], rtol=1e-6)
    direction, state = update({"w": jnp.zeros(2)}, state, weights)
    np.testing.assert_allclose(direction["w"], [0.366026, 0.402891], rtol=1e-5)
    assert int(num_updates_done(state)) == 2


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_a_run_of_one_update_has_a_rate(schedule: Literal["constant", "cosine", "linear"]) -> None:
    assert rates(OptimizerConfig(learning_rate=1.0, schedule=schedule), 1).tolist() == [1.0]
