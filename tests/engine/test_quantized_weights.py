"""Engines whose matrices have 8 bits."""

from __future__ import annotations

from functools import partial

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import CONFIG, POLICY, Shelf, answer, engine, laid_out, request, trainer_logp

from areal_jax.models.decoder import Params
from areal_jax.models.quantized import Quantized, quantize_layer


@partial(jax.jit, static_argnames="dtype")
def rounded(params: Params, *, dtype: str) -> Params:
    def dequantize(node: jax.Array | Quantized) -> jax.Array:
        return node.values.astype(jnp.float32) * node.scale if isinstance(node, Quantized) else node

    layers = (quantize_layer(layer, dtype) for layer in POLICY.unstack(params)["layers"])
    narrow = params | {"layers": tuple(layers)}
    return POLICY.stack(
        jax.tree.map(dequantize, narrow, is_leaf=lambda node: isinstance(node, Quantized))
    )


@pytest.mark.parametrize(
    ("dtype", "devices", "tensor"),
    [("int8", 1, 1), ("float8_e4m3fn", 1, 1), ("int8", 4, 2)],
)
@pytest.mark.slow
def test_sampling_follows_the_rounded_weights_across_updates(
    dtype: str, devices: int, tensor: int
) -> None:
    one = engine(chz.replace(CONFIG, weights_dtype=dtype), devices, tensor)
    narrow = [leaf for leaf in jax.tree.leaves(laid_out(one, 0)) if leaf.dtype == dtype]
    assert len(narrow) == 2 * 7  # q, k, v, o, gate, up and down of two layers
    prompt = [5, 9, 33, 2, 17]
    [group] = answer(one, Shelf(one, (0, 0, 0), (3, 1, 1)), request("a", prompt, 4))
    for completion in group:
        assert set(completion.versions.tolist()) == {0, 1}
        logp = np.stack(
            [
                trainer_logp(prompt, completion, seed, change=partial(rounded, dtype=dtype))
                for seed in range(2)
            ]
        )
        expected = logp[completion.versions, np.arange(20)]
        np.testing.assert_allclose(completion.logp, expected, atol=1e-4)
        exact = np.stack([trainer_logp(prompt, completion, seed) for seed in range(2)])
        assert np.abs(completion.logp - exact[completion.versions, np.arange(20)]).max() > 1e-3
