"""Matrices in 8 bits, with a scale for each output: half the bytes of bfloat16.

Pytree nodes in the place of a matrix, as those of `adapted`. Sampling with rounded weights is
sampling from another policy; the importance weight of the loss corrects for it, as for old weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

_MLP = {"gate": 1, "up": 1, "down": 1}
_INPUTS: Mapping[str, Mapping[str, int]] = {
    "attn": {"q": 1, "k": 1, "v": 1, "o": 2, "q_a": 1, "q_b": 1, "kv_a": 1},
    "linear": {"q": 1, "k": 1, "v": 1, "z": 1, "o": 2},
    "mlp": _MLP,
    "shared": _MLP,
}
"""Number of leading input dimensions of the matrices of a layer that are quantized, by module;
those of its experts are too. Embedding and head are not: their errors reach the logits undamped."""

_EXPERTS = ("expert_gate", "expert_up", "expert_down")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A matrix whose entries are values · scale."""

    values: Any
    """int8 or float8_e4m3fn, of the shape of the matrix."""
    scale: Any
    """float32, of the same shape, but 1 in input dimensions."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)


def quantize_layer(layer: Mapping[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    """Quantize the large matrices of a layer, given its parameters.

    Args:
        layer: parameters of one layer, as those of `Policy.unstack`.
        dtype: int8 or float8_e4m3fn.
    """

    def walk(module: str, tree: Mapping[str, Any]) -> dict[str, Any]:
        quantized = dict[str, Any]()
        for name, node in tree.items():
            if isinstance(node, Mapping):
                quantized[name] = walk(name, node)
            elif name in _EXPERTS:
                quantized[name] = quantize(node, range(1, 2), dtype)
            elif num_inputs := _INPUTS.get(module, {}).get(name):
                quantized[name] = quantize(node, range(num_inputs), dtype)
            else:
                quantized[name] = node
        return quantized

    return walk("", layer)


def quantize(w: Float[Array, "..."], inputs: range, dtype: DTypeLike) -> Quantized:
    """Round a matrix to the nearest multiples of a scale for each output.

    The largest entry of an output becomes the largest number of `dtype`; an output of zeros stays
    zero.

    Args:
        w: the matrix.
        inputs: its input dimensions.
        dtype: int8 or float8_e4m3fn.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = jnp.iinfo(dtype).max if is_integer else float(jnp.finfo(dtype).max)
    w = w.astype(jnp.float32)
    highest = jnp.abs(w).max(axis=tuple(inputs), keepdims=True)
    scale = jnp.where(highest > 0, highest, 1.0) / largest
    # A quotient may be larger than the largest number by its rounding.
    scaled = jnp.clip(w / scale, -largest, largest)
    return Quantized((jnp.round(scaled) if is_integer else scaled).astype(dtype), scale)


def rescale(
    product: Float[Array, "*rows_outputs"], scale: Float[Array, "*outputs"]
) -> Float[Array, "*rows_outputs"]:
    """Multiply a product with the values of a matrix by the scales of its outputs."""
    return (product.astype(jnp.float32) * scale).astype(product.dtype)
