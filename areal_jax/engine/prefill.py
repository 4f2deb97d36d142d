"""Computations on KV-cache pages: prefill, chunked prefill, copies.

Axes: B rows, T tokens, S slots, K key-value heads, H head size, M pages of a slot's table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from areal_jax.engine.decode_shapes import DecodeShapes
from areal_jax.engine.decode_state import EngineParams
from areal_jax.models.attention import choose_kernel, sharded_attention
from areal_jax.models.decoder import Attend
from areal_jax.models.moe import Routing, sharded_experts
from areal_jax.models.paged_attention import Pages, paged_attention, sharded_write
from areal_jax.models.vision.tower import ImageFeatures, ImageInputs
from areal_jax.parallel.sharding import ROLLOUT_RULES


def prefill(
    shapes: DecodeShapes,
    params: EngineParams,
    pages: tuple[Pages, ...],
    tokens: Int32[Array, "B T"],
    table: Int32[Array, "B M"],
    starts: Int32[Array, "B"],
    counts: Int32[Array, "B"],
    positions: Int32[Array, "B T 3"] | None = None,
    images: ImageFeatures | None = None,
) -> tuple[tuple[Pages, ...], Shaped[Array, "B T L k"] | None]:
    """Fill the pages of sequences from their first token on; return the experts, if recorded."""
    # Stacked again: a scan over layers compiles faster, and the copy is small beside a prefill.
    stacked = shapes.policy.stack(params)
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Whole rows: nothing before the padding at the end of a row attends to it.
    rows, kernel = (
        jnp.ones_like(tokens),
        choose_kernel(shapes.mesh.devices.flat[0].platform, tokens.shape[1]),
    )
    attend = _attend_and_keep(sharded_attention(rows, kernel, shapes.mesh, ROLLOUT_RULES))
    experts = sharded_experts(shapes.mesh, ROLLOUT_RULES)
    _, kept, routing = shapes.policy.hidden(
        stacked,
        tokens,
        places if positions is None else positions,
        attend,
        compute_dtype=shapes.compute_dtype,
        experts=experts,
        records_experts=shapes.config.router_replay,
        images=images,
        absorbs=True,
    )
    keys, values = kept
    computed = ((keys[i], None if values is None else values[i]) for i in range(len(pages)))
    pages = write_pages(shapes, pages, computed, table, starts, counts)
    return pages, recorded_experts(routing)


def extend(
    shapes: DecodeShapes,
    params: EngineParams,
    pages: tuple[Pages, ...],
    tokens: Int32[Array, "B T"],
    table: Int32[Array, "B M"],
    starts: Int32[Array, "B"],
    counts: Int32[Array, "B"],
    positions: Int32[Array, "B T 3"] | None = None,
    images: ImageFeatures | None = None,
) -> tuple[tuple[Pages, ...], Shaped[Array, "B T L k"] | None]:
    """Fill pages of sequences whose earlier pages are filled (chunked prefill)."""
    places = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    attend = paged_attention(table, starts, counts, "plain", shapes.mesh, ROLLOUT_RULES)
    experts = sharded_experts(shapes.mesh, ROLLOUT_RULES)
    _, pages, routing = shapes.policy.hidden(
        params,
        tokens,
        places if positions is None else positions,
        attend,
        pages,
        compute_dtype=shapes.compute_dtype,
        unroll=True,
        experts=experts,
        records_experts=shapes.config.router_replay,
        images=images,
        absorbs=True,
    )
    return pages, recorded_experts(routing)


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
    return tuple(
        sharded_write(layer, k, v, table, starts, counts, shapes.mesh, ROLLOUT_RULES)
        for layer, (k, v) in zip(pages, computed, strict=True)
    )


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
