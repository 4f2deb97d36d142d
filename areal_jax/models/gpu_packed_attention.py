"""Kernels of packed attention for GPUs, with memory linear in the row length.

FlashAttention (arXiv:2205.14135, arXiv:2307.08691). Like `blocked_attention` they skip pairs of
blocks that are fully masked (causality, segments, shared prefixes, window).

The file has more than 400 lines because the forward kernel and the two backward ones are one
algorithm: they share masks, blocks and what the forward one saves.

Axes: B rows, T tokens, N query heads, K key-value heads, G = N / K, H head size, C tokens of a
block of queries, c tokens of a block of keys, n and m blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.blocked_attention import ATTENDED, Visibility
from areal_jax.models.gpu_kernels import MIN_TILE, call_kernel

TILE = 128
"""Rows are padded to a multiple of this."""

_LOWEST = float(jnp.finfo(jnp.float32).min)
_LOG2_E = math.log2(math.e)


class Blocking(NamedTuple):
    """Sizes of a kernel's blocks in tokens, and how Triton compiles it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


class Blockings(NamedTuple):
    """`Blocking` of the forward kernel and of the two backward ones."""

    forward: Blocking
    queries: Blocking
    keys: Blocking


def choose_blockings(head_dim: int) -> Blockings:
    """Choose blocks for a head size; at 128 the fastest of those tried on an H100."""
    if head_dim <= 128:
        return Blockings(Blocking(64, 64, 4, 3), Blocking(128, 32, 4, 3), Blocking(64, 128, 8, 3))
    if head_dim <= 256:
        return Blockings(Blocking(64, 32, 8, 2), Blocking(64, 32, 8, 2), Blocking(32, 64, 8, 2))
    # Latents in place of keys and values, 1024 with padding: more does not fit shared memory.
    return Blockings(*[Blocking(16, 16, 8, 1)] * 3)


def gpu_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    window: int | None = None,
    sinks: Float[Array, "N"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Compute softmax(q·k / sqrt(H)) · v over the keys that each query sees.

    Args:
        q: queries.
        k: keys.
        v: values.
        visibility: keys that a query sees, apart from the window.
        window: number of keys that a query sees, including its own; None for all.
        sinks: score of one more key of each head, whose value is 0; None: there is none.
        interpret: run the kernels in interpret mode, without a GPU.
    """
    T, H = q.shape[1], q.shape[3]
    # Triton's arrays have sizes that are powers of two. Zeros change no scores.
    missing = max(MIN_TILE, pl.next_power_of_2(H)) - H
    q, k, v = (jnp.pad(x, ((0, 0), (0, -T % TILE), (0, 0), (0, missing))) for x in (q, k, v))
    places = jnp.arange(q.shape[1])
    until, positions = (jnp.pad(x, ((0, 0), (0, -T % TILE))) for x in visibility)
    visibility = Visibility(jnp.maximum(until, places + 1), positions)
    settings = _Settings(H**-0.5, window, interpret)
    return _attend(q, k, v, visibility, sinks, settings)[:, :T, :, :H]


class _Settings(NamedTuple):
    scale: float
    window: int | None
    interpret: bool


class _Seen(NamedTuple):
    """Blocks that each block of queries sees, or by which each block of keys is seen."""

    blocks: Int[Array, "B n m"]
    """In ascending order and first."""
    num_blocks: Int[Array, "B n 1"]

    @classmethod
    def of(cls, sees: Bool[Array, "B n m"]) -> _Seen:
        order = jnp.argsort(~sees, axis=-1, stable=True)
        return cls(order.astype(jnp.int32), sees.sum(axis=-1, keepdims=True, dtype=jnp.int32))


def _find_pairs(
    visibility: Visibility, blocking: Blocking, window: int | None
) -> Bool[Array, "B n m"]:
    """Find the blocks of queries (axis 1) of which some may see keys of a block (axis 2)."""

    def cut(x: Array, size: int) -> Array:
        return x.reshape(len(x), -1, size)

    until = cut(visibility.until, blocking.keys).max(axis=-1)
    starts = jnp.arange(visibility.until.shape[1] // blocking.queries)[:, None] * blocking.queries
    keys = jnp.arange(until.shape[1]) * blocking.keys
    sees = (until[:, None] > starts) & (keys < starts + blocking.queries)
    if window is not None:
        first = cut(visibility.positions, blocking.queries).min(axis=-1)
        last = cut(visibility.positions, blocking.keys).max(axis=-1)
        sees &= first[:, :, None] - last[:, None] < window
    return sees


def _forward(
    q: Array,
    k: Array,
    v: Array,
    visibility: Visibility,
    sinks: Array | None,
    settings: _Settings,
) -> tuple[Array, tuple[Any, ...]]:
    B, T, N, H = q.shape
    blocking = choose_blockings(H).forward
    seen = _Seen.of(_find_pairs(visibility, blocking, settings.window))
    specs = _Specs(blocking, q, k)
    out, log_weights = _call(
        _forward_kernel,
        blocking,
        settings,
        grid=(N, B, T // blocking.queries),
        in_specs=[
            specs.query_block(),
            specs.row_of_keys(),
            specs.row_of_keys(),
            specs.row(),
            specs.row() if settings.window else None,
            specs.seen(seen.blocks),
            specs.seen(seen.num_blocks),
            None if sinks is None else pl.BlockSpec((1,), lambda n, b, i: (n,)),
        ],
        out_specs=[specs.query_block(), specs.of_queries()],
        out_shape=[q, jax.ShapeDtypeStruct((B, N, T), jnp.float32)],
        name="packed_attention",
    )(
        q,
        k,
        v,
        visibility.until,
        visibility.positions if settings.window else None,
        *seen,
        sinks,
    )
    out, log_weights = (checkpoint_name(x, ATTENDED) for x in (out, log_weights))
    return out, (q, k, v, visibility, sinks, out, log_weights)


def _backward(
    settings: _Settings, saved: tuple[Any, ...], d_out: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    """Compute the gradients of q, k, v and sinks; formulas as in `blocked_attention`."""
    q, k, v, visibility, sinks, out, log_weights = saved
    row_sums = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1).swapaxes(1, 2)
    cotangents = (d_out, log_weights, row_sums)
    dq = _find_query_gradient(q, k, v, visibility, cotangents, settings)
    dk, dv = _find_key_gradients(q, k, v, visibility, cotangents, settings)
    d_sinks = None
    if sinks is not None:
        p = jnp.exp2(sinks.astype(jnp.float32)[:, None] * _LOG2_E - log_weights)
        d_sinks = -(p * row_sums).sum(axis=(0, 2)).astype(sinks.dtype)
    return dq, dk, dv, None, d_sinks


def _find_query_gradient(
    q: Array,
    k: Array,
    v: Array,
    visibility: Visibility,
    cotangents: tuple[Array, Array, Array],
    settings: _Settings,
) -> Array:
    B, T, N, H = q.shape
    positions = visibility.positions if settings.window else None
    blocking = choose_blockings(H).queries
    seen = _Seen.of(_find_pairs(visibility, blocking, settings.window))
    specs = _Specs(blocking, q, k)
    return _call(
        _query_gradient_kernel,
        blocking,
        settings,
        grid=(N, B, T // blocking.queries),
        in_specs=[
            specs.query_block(),
            specs.row_of_keys(),
            specs.row_of_keys(),
            specs.row(),
            specs.row() if settings.window else None,
            specs.seen(seen.blocks),
            specs.seen(seen.num_blocks),
            specs.query_block(),
            specs.of_queries(),
            specs.of_queries(),
        ],
        out_specs=specs.query_block(),
        out_shape=q,
        name="packed_attention_dq",
    )(q, k, v, visibility.until, positions, *seen, *cotangents)


def _find_key_gradients(
    q: Array,
    k: Array,
    v: Array,
    visibility: Visibility,
    cotangents: tuple[Array, Array, Array],
    settings: _Settings,
) -> tuple[Array, Array]:
    (B, T, N, H), K = q.shape, k.shape[2]
    positions = visibility.positions if settings.window else None
    blocking = choose_blockings(H).keys
    seen = _Seen.of(_find_pairs(visibility, blocking, settings.window).swapaxes(1, 2))
    block = pl.BlockSpec((None, blocking.keys, None, H), lambda n, b, j: (b, j, n, 0))
    group = pl.BlockSpec((None, T, N // K, H), lambda n, b, j: (b, 0, n, 0))
    of_group = pl.BlockSpec((None, N // K, T), lambda n, b, j: (b, n, 0))
    row = pl.BlockSpec((None, T), lambda n, b, j: (b, 0))
    dk, dv = _call(
        partial(_key_gradient_kernel, group=N // K),
        blocking,
        settings,
        grid=(K, B, T // blocking.keys),
        in_specs=[
            group,
            block,
            block,
            row,
            row if settings.window else None,
            *(pl.BlockSpec((None, None, x.shape[2]), lambda n, b, j: (b, j, 0)) for x in seen),
            group,
            of_group,
            of_group,
        ],
        out_specs=[block, block],
        out_shape=[k, v],
        name="packed_attention_dkv",
    )(q, k, v, visibility.until, positions, *seen, *cotangents)
    return dk, dv


_attend = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(5,))
_attend.defvjp(_forward, _backward)


class _Specs:
    """Blocks of a kernel's arguments, by query head, row and block of queries.

    The blocks of queries run from the last, which sees most keys, to the first.
    """

    def __init__(self, blocking: Blocking, q: Array, k: Array) -> None:
        self._size, (_, self._tokens, N, self._head_dim) = blocking.queries, q.shape
        self._last, self._group = self._tokens // self._size - 1, N // k.shape[2]

    def query_block(self) -> pl.BlockSpec:
        last = self._last
        return pl.BlockSpec(
            (None, self._size, None, self._head_dim), lambda n, b, i: (b, last - i, n, 0)
        )

    def row_of_keys(self) -> pl.BlockSpec:
        group = self._group
        return pl.BlockSpec(
            (None, self._tokens, None, self._head_dim), lambda n, b, i: (b, 0, n // group, 0)
        )

    def row(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self._tokens), lambda n, b, i: (b, 0))

    def of_queries(self) -> pl.BlockSpec:
        last = self._last
        return pl.BlockSpec((None, None, self._size), lambda n, b, i: (b, n, last - i))

    def seen(self, x: Array) -> pl.BlockSpec:
        last = self._last
        return pl.BlockSpec((None, None, x.shape[2]), lambda n, b, i: (b, last - i, 0))


def _call(
    kernel: Callable[..., None], blocking: Blocking, settings: _Settings, **spec: Any
) -> Callable[..., Any]:
    return call_kernel(
        partial(kernel, blocking=blocking, scale=settings.scale, window=settings.window),
        num_warps=blocking.num_warps,
        num_stages=blocking.num_stages,
        interpret=settings.interpret,
        **spec,
    )


def _forward_kernel(
    q_ref: Any,  # [C, H]
    k_ref: Any,  # [T, H]
    v_ref: Any,
    until_ref: Any,  # [T]
    positions_ref: Any,  # [T], or None
    seen_ref: Any,  # [n]
    num_ref: Any,  # [1]
    sink_ref: Any,  # [1], or None
    out_ref: Any,  # [C, H]
    log_weight_ref: Any,  # [C], to the base 2
    *,
    blocking: Blocking,
    scale: float,
    window: int | None,
) -> None:
    C, H = q_ref.shape
    i = pl.num_programs(2) - 1 - pl.program_id(2)
    places = i * C + jnp.arange(C)
    positions = None if window is None else positions_ref[pl.ds(i * C, C)]
    q = q_ref[...]

    def add_keys(turn: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, highest, weight = sums
        keys = pl.ds(seen_ref[turn] * blocking.keys, blocking.keys)
        scores = triton.dot(q, k_ref[keys, :].T) * (scale * _LOG2_E)
        sees = _sees(places, positions, keys, until_ref, positions_ref, window)
        scores = jnp.where(sees, scores, _LOWEST)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        exp = jnp.exp2(scores - new_highest[:, None])
        shrink = jnp.exp2(highest - new_highest)
        v = v_ref[keys, :]
        out = shrink[:, None] * out + triton.dot(exp.astype(v.dtype), v)
        return out, new_highest, shrink * weight + exp.sum(axis=-1)

    highest, weight = jnp.full((C,), _LOWEST, jnp.float32), jnp.zeros((C,), jnp.float32)
    if sink_ref is not None:
        # The running softmax begins with the sink.
        highest = jnp.broadcast_to(sink_ref[0].astype(jnp.float32) * _LOG2_E, (C,))
        weight = jnp.ones((C,), jnp.float32)
    out, highest, weight = jax.lax.fori_loop(
        0, num_ref[0], add_keys, (jnp.zeros((C, H), jnp.float32), highest, weight)
    )
    out_ref[...] = (out / weight[:, None]).astype(out_ref.dtype)
    log_weight_ref[...] = highest + jnp.log2(weight)


def _query_gradient_kernel(
    q_ref: Any,  # [C, H]
    k_ref: Any,  # [T, H]
    v_ref: Any,
    until_ref: Any,  # [T]
    positions_ref: Any,  # [T], or None
    seen_ref: Any,  # [n]
    num_ref: Any,  # [1]
    d_out_ref: Any,  # [C, H]
    log_weight_ref: Any,  # [C]
    row_sum_ref: Any,  # [C]
    dq_ref: Any,  # [C, H]
    *,
    blocking: Blocking,
    scale: float,
    window: int | None,
) -> None:
    C, H = q_ref.shape
    i = pl.num_programs(2) - 1 - pl.program_id(2)
    places = i * C + jnp.arange(C)
    positions = None if window is None else positions_ref[pl.ds(i * C, C)]
    q, d_out = q_ref[...], d_out_ref[...]
    log_weight, row_sum = log_weight_ref[...], row_sum_ref[...]

    def add_keys(turn: Array, dq: Array) -> Array:
        keys = pl.ds(seen_ref[turn] * blocking.keys, blocking.keys)
        k = k_ref[keys, :]
        scores = triton.dot(q, k.T) * (scale * _LOG2_E)
        sees = _sees(places, positions, keys, until_ref, positions_ref, window)
        p = jnp.exp2(jnp.where(sees, scores, _LOWEST) - log_weight[:, None])
        ds = p * (triton.dot(d_out, v_ref[keys, :].T) - row_sum[:, None])
        return dq + triton.dot(ds.astype(k.dtype), k)

    dq = jax.lax.fori_loop(0, num_ref[0], add_keys, jnp.zeros((C, H), jnp.float32))
    dq_ref[...] = (dq * scale).astype(dq_ref.dtype)


def _key_gradient_kernel(
    q_ref: Any,  # [T, G, H]
    k_ref: Any,  # [c, H]
    v_ref: Any,
    until_ref: Any,  # [T]
    positions_ref: Any,  # [T], or None
    seen_ref: Any,  # [n]
    num_ref: Any,  # [1]
    d_out_ref: Any,  # [T, G, H]
    log_weight_ref: Any,  # [G, T]
    row_sum_ref: Any,  # [G, T]
    dk_ref: Any,  # [c, H]
    dv_ref: Any,
    *,
    blocking: Blocking,
    scale: float,
    window: int | None,
    group: int,
) -> None:
    c, H = k_ref.shape
    keys = pl.ds(pl.program_id(2) * c, c)
    k, v = k_ref[...], v_ref[...]

    def add_queries(turn: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        # All scores are transposed, [c, C], because the first factor of a product may stay in
        # registers.
        dk, dv = sums
        block, head = seen_ref[jax.lax.div(turn, group)], jax.lax.rem(turn, group)
        start = block * blocking.queries
        queries = pl.ds(start, blocking.queries)
        q, d_out = q_ref[queries, head, :], d_out_ref[queries, head, :]
        places = start + jnp.arange(blocking.queries)
        positions = None if window is None else positions_ref[queries]
        scores = triton.dot(k, q.T) * (scale * _LOG2_E)
        sees = _sees(places, positions, keys, until_ref, positions_ref, window, transposed=True)
        p = jnp.exp2(jnp.where(sees, scores, _LOWEST) - log_weight_ref[head, queries][None])
        dv = dv + triton.dot(p.astype(q.dtype), d_out)
        ds = p * (triton.dot(v, d_out.T) - row_sum_ref[head, queries][None])
        return dk + triton.dot(ds.astype(q.dtype), q), dv

    none = jnp.zeros((c, H), jnp.float32)
    dk, dv = jax.lax.fori_loop(0, num_ref[0] * group, add_queries, (none, none))
    dk_ref[...], dv_ref[...] = (dk * scale).astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


def _sees(
    places: Int[Array, "C"],
    positions: Int[Array, "C"] | None,
    keys: Any,
    until_ref: Any,
    positions_ref: Any,
    window: int | None,
    *,
    transposed: bool = False,
) -> Bool[Array, "_ _"]:
    """Mask of the keys at `keys` that the queries at `places` see; [c, C] if transposed."""

    def by_query(x: Array) -> Array:
        return x[None] if transposed else x[:, None]

    def by_key(x: Array) -> Array:
        return x[:, None] if transposed else x[None]

    at = keys.start + jnp.arange(keys.size)
    sees = (by_key(at) <= by_query(places)) & (by_query(places) < by_key(until_ref[keys]))
    if positions is not None and window is not None:
        sees &= by_query(positions) - by_key(positions_ref[keys]) < window
    return sees
