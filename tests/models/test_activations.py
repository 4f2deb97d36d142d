"""Gated activations: the formula, rounded once."""

from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.activations import SWISH_ALPHA, SWISH_LIMIT, gated
from areal_jax.models.traits import Activation


def in_float64(activation: Activation, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    match activation:
        case "silu":
            return gate / (1 + np.exp(-gate)) * up
        case "gelu_tanh":
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            return gate * (1 + np.tanh(inner)) / 2 * up
        case "clipped_swish":
            gate, up = np.minimum(gate, SWISH_LIMIT), np.clip(up, -SWISH_LIMIT, SWISH_LIMIT)
            return (up + 1) * gate / (1 + np.exp(-SWISH_ALPHA * gate))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_values_and_gradients_are_rounded_once(activation: Activation, dtype: type) -> None:
    rng = np.random.default_rng(0)
    gate, up, d = (jnp.asarray(rng.normal(size=(4, 500)), dtype) for _ in range(3))
    value, pull_back = jax.vjp(partial(gated, activation), gate, up)
    found: list[jax.Array] = [value, *pull_back(d)]
    exact, step = [np.asarray(x, np.float64) for x in (gate, up)], 1e-6
    slopes = [
        (in_float64(activation, *after) - in_float64(activation, *before)) / (2 * step)
        for after, before in (
            (
                [x + step * (i == j) for i, x in enumerate(exact)],
                [x - step * (i == j) for i, x in enumerate(exact)],
            )
            for j in range(2)
        )
    ]
    expected = in_float64(activation, *exact), *(np.asarray(d, np.float64) * s for s in slopes)
    # Half a step between neighbours, and the error of float32 and of the differences; gelu cancels
    # far below 0.
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-24
    for each, right in zip(found, expected, strict=True):
        assert each.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(each, np.float64), right, rtol=rounding + 4e-6, atol=1e-5
        )
