"""State of decoding on the devices: KV-cache pages, the view of them, and the slot records.

Axes: S slots, F fields of a slot, C columns of the view, K key-value heads, H head size, M pages of
a slot's table, n `engine.tokens_per_dispatch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int32, Shaped

from areal_jax.engine.batch import SLOT
from areal_jax.engine.drafts import DraftState
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Params, Policy, is_stacked
from areal_jax.models.delta_rule import RecurrentState
from areal_jax.models.moe import ROUTER
from areal_jax.models.paged_attention import PagedKernel, Pages
from areal_jax.models.quantized import Quantized, quantize_layer

EngineParams: TypeAlias = dict[str, Any]
"""Result of `lay_out_params`: `layers` is a tuple of L trees instead of one stacked tree. With an
adapter, matrices are `Adapted`, with several `AdapterStack`, and never merged: an update smaller
than half a step of bfloat16 would be lost."""

View: TypeAlias = tuple[tuple[Array, Array | None], ...]
"""Keys [S, K, H, n + C] and values [S, K, n + C, H] of each layer, as attention reads them: first n
columns for the tokens of the current dispatch, then one column per position. Empty where attention
reads pages. Without values, keys are also the values (latent attention)."""

Reader: TypeAlias = Literal["view"] | PagedKernel
"""Source of keys and values during sampling: a view of the pages, or the pages themselves through a
kernel."""

CONTINUES, STOPPED = 1, 2
"""Status of a slot after a dispatch; 0: inactive, or its token budget is used up."""

FIELDS: dict[str, tuple[np.dtype, slice]] = {
    name: (dtype, slice(offset // 4, (offset + dtype.itemsize) // 4))
    for name, (dtype, offset, *_) in (SLOT.fields or {}).items()
}
"""Type of each field of `SLOT`, and its columns in the integer array."""


class DecodeState(NamedTuple):
    """Everything that a dispatch reads and writes. `generate` consumes it and returns the next
    one.
    """

    pages: tuple[Pages, ...]
    """By layer."""
    view: View
    slots: Int32[Any, "S F"]
    """`SLOT` records as integers; numpy if slots were just assigned, and so is the table."""
    table: Int32[Any, "S M"]
    """Pages of each slot's sequence, numbered within its data shard."""
    recurrent: tuple[RecurrentState, ...] = ()
    """State of each slot's sequence, by layer with linear attention; such layers have no pages."""
    drafts: DraftState | None = None
    """Present with `engine.draft_tokens`."""


def join_caches(config: ModelConfig, attended: Iterable[Any], recurrent: Iterable[Any]) -> Any:
    """Return the caches of all layers, of which those with linear attention have `recurrent`."""
    if config.linear is None:
        return attended
    by_kind = {False: iter(attended), True: iter(recurrent)}
    layers = range(config.num_hidden_layers)
    return tuple(next(by_kind[i in config.linear_layers]) for i in layers)


def split_caches(config: ModelConfig, caches: Any) -> tuple[Any, tuple[RecurrentState, ...]]:
    """Return the caches of layers with attention, and of those with linear attention."""
    if config.linear is None:
        return caches, ()
    attended, recurrent = (
        tuple(caches[i] for i in layers)
        for layers in (config.attention_layers, config.linear_layers)
    )
    return attended, recurrent


def encode_slots(slots: Shaped[np.ndarray, "S"]) -> Int32[np.ndarray, "S F"]:
    """Convert `SLOT` records to integers.

    The result is a copy, because an array on a CPU device may share memory with the host's.
    """
    return slots.view(np.int32).reshape(len(slots), -1).copy()


def read_field(slots: Int32[Array, "S F"], name: str) -> Shaped[Array, "S ..."]:
    """Return a field of every slot, in its own type."""
    dtype, columns = FIELDS[name]
    values = jax.lax.bitcast_convert_type(slots[:, columns], dtype.base)
    return values if dtype.shape else values[:, 0]


def as_bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """Reinterpret floats as integers, for a transfer in one array."""
    return jax.lax.bitcast_convert_type(x, np.int32)


def pack_experts(ids: Shaped[Array, "n S L k"]) -> Int32[Array, "_ S"]:
    """Pack experts into integers, for a transfer in one array."""
    n, S = ids.shape[:2]
    each = 4 // ids.dtype.itemsize
    flat = ids.reshape(n, S, -1)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, -flat.shape[2] % each)))
    words = jax.lax.bitcast_convert_type(flat.reshape(n, S, -1, each), np.int32)
    return words.swapaxes(1, 2).reshape(-1, S)


def unpack_experts(
    words: Int32[np.ndarray, "_ S"], shape: tuple[int, ...], dtype: DTypeLike
) -> Shaped[np.ndarray, "n S L k"]:
    """Return the experts of the given shape; the inverse of `pack_experts`."""
    n, S, *rest = shape
    flat = np.ascontiguousarray(words.reshape(n, -1, S).swapaxes(1, 2)).view(dtype)
    return flat[:, :, : math.prod(rest)].reshape(shape)


def lay_out_params(
    policy: Policy, params: Params, compute_dtype: DTypeLike, weights_dtype: str = "compute"
) -> EngineParams:
    """Convert a policy's parameters, or its adapter, to the decoder's layout: one tree per layer,
    in the compute dtype, or with matrices quantized to `weights_dtype`.

    Pure, so that a weight channel runs it on the train mesh. Norms and routers stay in float32, as
    in training.
    """

    def narrowed(path: tuple[Any, ...], leaf: Array | Quantized) -> Array | Quantized:
        if isinstance(leaf, Quantized):
            return leaf
        names = tuple(each.key for each in path if isinstance(each, jax.tree_util.DictKey))
        # Layers of a vision tower stay stacked.
        is_vector = leaf.ndim - (names[0] == "vision" and is_stacked(names)) == 1
        is_wide = is_vector or path[-1] == jax.tree_util.DictKey(ROUTER)
        return leaf if is_wide else leaf.astype(compute_dtype)

    params = policy.unstack(params)
    if weights_dtype != "compute":
        layers = (quantize_layer(layer, jnp.dtype(weights_dtype)) for layer in params["layers"])
        params |= {"layers": tuple(layers)}
    return jax.tree.map_with_path(
        narrowed, params, is_leaf=lambda node: isinstance(node, Quantized)
    )
