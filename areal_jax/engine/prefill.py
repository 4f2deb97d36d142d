"""Computations on KV-cache pages: prefill, chunked prefill, copies.

Axes: B rows, T tokens, S slots, K key-value heads, H head size, M pages of a slot's table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32, Shaped

from areal_jax.engine.decode_shapes import DRAFT, DecodeShapes
from areal_jax.engine.decode_state import EngineParams, join_caches, split_caches
from areal_jax.models.attention import choose_kernel, sharded_attention
from areal_jax.models.decoder import Attend
from areal_jax.models.delta_rule import RecurrentState, sharded_recurrence
from areal_jax.models.moe import Routing, sharded_experts
from areal_jax.models.paged_attention import Pages, paged_attention, sharded_write
from areal_jax.models.vision.tower import ImageFeatures, ImageInputs
from areal_jax.parallel.sharding import ROLLOUT_RULES, on_shards, sharding

Kept: TypeAlias = tuple[tuple[Pages, ...], tuple[RecurrentState, ...]]
"""What is kept of the tokens: pages, and the recurrent state of every slot."""


def prefill(
    shapes: DecodeShapes,
    params: EngineParams,
    kept: Kept,
    tokens: Int32[Array, "B T"],
    table: Int32[Array, "B M"],
    starts: Int32[Array, "B"],
    counts: Int32[Array, "B"],
    slots: Int32[Array, "B"],
    positions: Int32[Array, "B T 3"] | None = None,
    images: ImageFeatures | None = None,
) -> tuple[Kept, Shaped[Array, "B T L k"] | None]:
    """Fill the pages of sequences from their first token on; return the experts, if recorded."""
    config, (pages, recurrent) = shapes.policy.config, kept
    is_hybrid, caches = config.linear is not None, None
    if is_hybrid:
        nothing = (None,) * len(pages)
        empty = jax.tree.map(lambda x: jnp.zeros((len(tokens), *x.shape[1:]), x.dtype), recurrent)
        caches = join_caches(config, nothing, empty)
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Whole rows: nothing before the padding at the end of a row attends to it.
    rows, kernel = (
        jnp.ones_like(tokens),
        choose_kernel(shapes.mesh.devices.flat[0].platform, tokens.shape[1]),
    )
    attend = _attend_and_keep(sharded_attention(rows, kernel, shapes.mesh, ROLLOUT_RULES))
    experts = sharded_experts(shapes.mesh, ROLLOUT_RULES)
    _, caches, routing = shapes.policy.hidden(
        params if shapes.is_unrolled else shapes.policy.stack(params),
        tokens,
        places if positions is None else positions,
        attend,
        caches,
        compute_dtype=shapes.compute_dtype,
        unroll=shapes.is_unrolled,
        experts=experts,
        recur=sharded_recurrence(shapes.mesh, ROLLOUT_RULES),
        num_tokens=counts,
        records_experts=shapes.config.router_replay,
        images=images,
        absorbs=True,
    )
    if is_hybrid:
        computed, states = split_caches(config, caches)
        recurrent = write_states(shapes, recurrent, states, slots)
    elif shapes.is_unrolled:
        computed = caches
    else:
        keys, values = caches
        computed = ((keys[i], None if values is None else values[i]) for i in range(len(pages)))
    pages = write_pages(shapes, pages, computed, table, starts, counts)
    return (pages, recurrent), recorded_experts(routing)


def extend(
    shapes: DecodeShapes,
    params: EngineParams,
    kept: Kept,
    tokens: Int32[Array, "B T"],
    table: Int32[Array, "B M"],
    starts: Int32[Array, "B"],
    counts: Int32[Array, "B"],
    slots: Int32[Array, "B"],
    positions: Int32[Array, "B T 3"] | None = None,
    images: ImageFeatures | None = None,
) -> tuple[Kept, Shaped[Array, "B T L k"] | None]:
    """Fill pages of sequences whose earlier pages are filled (chunked prefill)."""
    places = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    attend = paged_attention(table, starts, counts, "plain", shapes.mesh, ROLLOUT_RULES)
    experts = sharded_experts(shapes.mesh, ROLLOUT_RULES)
    config, (pages, recurrent) = shapes.policy.config, kept
    states = read_states(shapes, recurrent, slots)
    _, caches, routing = shapes.policy.hidden(
        params,
        tokens,
        places if positions is None else positions,
        attend,
        join_caches(config, pages, states),
        compute_dtype=shapes.compute_dtype,
        unroll=True,
        experts=experts,
        recur=sharded_recurrence(shapes.mesh, ROLLOUT_RULES),
        num_tokens=counts,
        records_experts=shapes.config.router_replay,
        images=images,
        absorbs=True,
    )
    pages, states = split_caches(config, caches)
    return (pages, write_states(shapes, recurrent, states, slots)), recorded_experts(routing)


def with_draft(
    run: Callable[..., tuple[Kept, Any]],
    shapes: DecodeShapes,
    params: EngineParams,
    kept: Kept,
    *batch: Any,
) -> tuple[Kept, Any]:
    """Run `prefill` or `extend` for the policy and, with the same page table, for its draft
    policy.
    """
    pages, recurrent = kept
    own, drafting = shapes.split_layers(pages)
    (own, recurrent), experts = run(shapes, params, (own, recurrent), *batch)
    if shapes.draft is not None:
        (drafting, _), _ = run(shapes.draft, params[DRAFT], (drafting, ()), *batch)
    return ((*own, *drafting), recurrent), experts


def encode(
    shapes: DecodeShapes,
    params: EngineParams,
    patches: Float[Array, "1 P C"],
    layout: Int32[Array, "1 P 5"],
) -> Shaped[Array, "1 G K E"]:
    """Compute the embeddings of an image."""
    inputs = ImageInputs(patches, layout, jnp.zeros((1, 1), jnp.int32))
    return shapes.policy.encode_images(params, inputs, compute_dtype=shapes.compute_dtype).features


def recorded_experts(routing: Routing | None) -> Shaped[Array, "B T L k"] | None:
    """Return the experts of every token in every layer, if they are recorded."""
    return None if routing is None or routing.ids is None else jnp.moveaxis(routing.ids, 0, 2)


def write_pages(
    shapes: DecodeShapes,
    pages: tuple[Pages, ...],
    computed: Iterable[tuple[Float[Array, "B T K H"], Float[Array, "B T K H"] | None]],
    table: Int32[Array, "B M"],
    starts: Int32[Array, "B"],
    counts: Int32[Array, "B"],
) -> tuple[Pages, ...]:
    """Write keys and values of every layer to its pages; without values, keys alone."""
    # Traced and lowered once for all layers; the compiler inlines the calls.
    write = jax.jit(partial(sharded_write, mesh=shapes.mesh, rules=ROLLOUT_RULES))
    return tuple(
        write(layer, k, v, table, starts, counts)
        for layer, (k, v) in zip(pages, computed, strict=True)
    )


def read_states(
    shapes: DecodeShapes, recurrent: tuple[RecurrentState, ...], slots: Int32[Array, "B"]
) -> tuple[RecurrentState, ...]:
    """Return the states of the slots of rows; slots are numbered within their data shard."""
    how, by_row = _specs(shapes)
    read = on_shards(
        lambda all, slots: jax.tree.map(lambda x: x.at[slots].get(mode="clip"), all),
        shapes.mesh,
        (how, by_row),
        how,
    )
    return read(recurrent, slots)


def write_states(
    shapes: DecodeShapes,
    recurrent: tuple[RecurrentState, ...],
    states: tuple[RecurrentState, ...],
    slots: Int32[Array, "B"],
) -> tuple[RecurrentState, ...]:
    """Write the states of rows to their slots; rows without a slot have one beyond the last."""
    how, by_row = _specs(shapes)

    def write(old: Any, new: Any, slots: Array) -> Any:
        put = lambda x, y: x.at[slots].set(y.astype(x.dtype), mode="drop")  # noqa: E731 (an argument below)
        return jax.tree.map(put, old, new)

    return on_shards(write, shapes.mesh, (how, how, by_row), how)(recurrent, states, slots)


def copy_states(
    recurrent: tuple[RecurrentState, ...], pairs: Int32[Array, "S 2"], count: Int32[Array, "1"]
) -> tuple[RecurrentState, ...]:
    """Copy the states of the first `count` pairs of slots, each (from, to)."""

    def one_pair(i: Array, recurrent: tuple[RecurrentState, ...]) -> tuple[RecurrentState, ...]:
        def put(x: Array) -> Array:
            state = jax.lax.dynamic_slice_in_dim(x, pairs[i, 0], 1, 0)
            return jax.lax.dynamic_update_slice_in_dim(x, state, pairs[i, 1], 0)

        return jax.tree.map(put, recurrent)

    return jax.lax.fori_loop(0, count[0], one_pair, recurrent)


def _specs(shapes: DecodeShapes) -> tuple[Any, PartitionSpec]:
    """Return how states and rows are sharded."""
    rows = sharding(shapes.mesh, ("slots",), (shapes.config.num_slots,), ROLLOUT_RULES).spec
    return jax.tree.map(lambda leaf: leaf.sharding.spec, shapes.recurrent()), rows


def copy_pages(
    pages: tuple[Pages, ...], pairs: Int32[Array, "S 2"], count: Int32[Array, "1"]
) -> tuple[Pages, ...]:
    """Copy the first `count` pairs of pages, each (from, to)."""

    def one_pair(i: Array, pages: tuple[Pages, ...]) -> tuple[Pages, ...]:
        def put(x: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(x, pairs[i, 0], 1, 1)
            return jax.lax.dynamic_update_slice_in_dim(x, page, pairs[i, 1], 1)

        return jax.tree.map(put, pages)

    return jax.lax.fori_loop(0, count[0], one_pair, pages)


def _attend_and_keep(attend: Attend) -> Attend:
    """Return `attend` that also returns keys and values; without values, keys alone."""

    def attend_and_keep(
        q: Array, k: Array, v: Array | None, cache: None, *settings: Any
    ) -> tuple[Array, tuple[Array, Array | None]]:
        return attend(q, k, v, cache, *settings)[0], (k, v)

    return attend_and_keep
