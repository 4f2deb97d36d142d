"""Packed attention in blocks, with memory linear in the row length.

FlashAttention (arXiv:2205.14135, arXiv:2307.08691) in plain XLA, for any platform. Pairs of blocks
that are fully masked (causality, segments, window) are skipped, so that a row of short segments
costs no more than its segments.

Axes: B rows, T tokens, N query heads, K key-value heads, G = N / K, H head size, C tokens of a
block, c tokens of a block of keys, n blocks of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

ATTENDED = "attended"
"""Checkpoint name of what the backward pass of attention needs besides q, k and v."""

BLOCK_TOKENS = 128
"""The fastest size on a CPU for rows of 512 tokens or more: slightly without segments, twofold with
eight segments in a row."""

_LOWEST = float(jnp.finfo(jnp.float32).min)
"""Score of masked keys: differences of -inf would be nan. Sums from blocks in which a query sees no
key are later multiplied by 0, because every query sees itself in its last block."""

Blocks: TypeAlias = Array
"""[n, B, K, ...]: blocks are the leading dimension, so that indexing copies one block only."""


class Visibility(NamedTuple):
    """The keys that each query of a row sees.

    A key is seen from its own place up to the place `until`, exclusively: thus sequences see the
    tokens that they share, which are packed once (`areal_jax.data.prefixes`).
    """

    until: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    """Position of the token in its sequence, by which a window is measured."""

    @classmethod
    def of_segments(cls, segment_ids: Int[Array, "B T"]) -> Visibility:
        """Return that of segments that share nothing. Tokens of segment 0, padding, see only
        themselves.
        """
        places = jnp.arange(segment_ids.shape[1])
        continues = jnp.pad(segment_ids[:, :-1] == segment_ids[:, 1:], ((0, 0), (0, 1)))
        ends = jnp.where(continues, places.size, places + 1)
        until = jax.lax.cummin(ends, axis=1, reverse=True)
        return cls(
            jnp.where(segment_ids == 0, places + 1, until),
            jnp.broadcast_to(places, segment_ids.shape),
        )

    @classmethod
    def of_shared(
        cls,
        segment_ids: Int[Array, "B T"],
        visible_until: Int[Array, "B T"],
        positions: Int[Array, "B T"],
    ) -> Visibility:
        """Return that of sequences that share tokens; arguments as in `PackedBatch`."""
        places = jnp.arange(segment_ids.shape[1])
        is_padding = segment_ids == 0
        return cls(
            jnp.where(is_padding, places + 1, visible_until),
            jnp.where(is_padding, places, positions),
        )


class _Blocks(NamedTuple):
    """A `Visibility` by blocks of queries or keys."""

    until: Int[Array, "n B C"]
    positions: Int[Array, "n B C"]
    sees: Bool[Array, "n n"]
    """Whether any query of block i sees any key of block j."""


def blocked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    window: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Compute softmax(q·k / sqrt(H)) · v over the keys that each query sees.

    Args:
        q: queries.
        k: keys.
        v: values.
        visibility: keys that a query sees, apart from the window.
        window: number of keys that a query sees, including its own; None for all.
        block_tokens: tokens of a block; affects speed and memory only.
        sinks: score of one more key of each head, whose value is 0; None: there is none.
    """
    return _attend(q, k, v, visibility, sinks, window, block_tokens)


def _forward(
    q: Array,
    k: Array,
    v: Array,
    visibility: Visibility,
    sinks: Array | None,
    window: int | None,
    block_tokens: int,
) -> tuple[Array, tuple[Any, ...]]:
    blocks = _cut(visibility, window, block_tokens)
    order, num_seen = _seen(blocks.sees)
    q_blocks, k_blocks, v_blocks = (
        _query_blocks(_scaled(q), k.shape[2], block_tokens),
        *_key_blocks(k, v, block_tokens),
    )
    _, B, K, G, C, H = q_blocks.shape

    def attend_block(i: Array) -> tuple[Array, Array]:
        def add_keys(turn: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            j, (highest, weight, weighted) = order[i, turn], sums
            scores = _scores(q_blocks[i], k_blocks[j], _sees(blocks, i, j, window))
            new_highest = jnp.maximum(highest, scores.max(axis=-1))
            exp = jnp.exp(scores - new_highest[..., None])
            shrink = jnp.exp(highest - new_highest)
            values = _product("bkgqs,bksh->bkgqh", exp.astype(v.dtype), v_blocks[j])
            return (
                new_highest,
                shrink * weight + exp.sum(axis=-1),
                shrink[..., None] * weighted + values,
            )

        none = jnp.full((B, K, G, C), _LOWEST), jnp.zeros((B, K, G, C)), jnp.zeros((B, K, G, C, H))
        if sinks is not None:
            # The running softmax begins with the sink.
            score = sinks.astype(jnp.float32).reshape(K, G, 1)
            none = jnp.broadcast_to(score, (B, K, G, C)), jnp.ones((B, K, G, C)), none[2]
        highest, weight, weighted = jax.lax.fori_loop(0, num_seen[i], add_keys, none)
        return (weighted / weight[..., None]).astype(q.dtype), highest + jnp.log(weight)

    out_blocks, log_weights = jax.lax.map(attend_block, jnp.arange(len(q_blocks)))
    out = checkpoint_name(_rows(out_blocks, q.shape), ATTENDED)
    return out, (q, k, v, visibility, sinks, out, checkpoint_name(log_weights, ATTENDED))


def _backward(
    window: int | None, block_tokens: int, saved: tuple[Any, ...], d_out: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    """Compute the gradients of q, k, v and sinks.

    With p = exp(scores - log_weight): dv = pᵀ·do, ds = p ∘ (do·vᵀ - rowsum(do ∘ o)), dq = ds·k,
    dk = dsᵀ·q (arXiv:2307.08691, algorithm 2). With the value 0, d_sink = -p · rowsum(do ∘ o).
    """
    q, k, v, visibility, sinks, out, log_weights = saved
    blocks = _cut(visibility, window, block_tokens)
    order, num_seeing = _seen(blocks.sees.T)
    K, dtype = k.shape[2], q.dtype
    q_blocks, k_blocks, v_blocks = (
        _query_blocks(_scaled(q), K, block_tokens),
        *_key_blocks(k, v, block_tokens),
    )
    d_out_blocks = _query_blocks(d_out, K, block_tokens)
    wide = d_out.astype(jnp.float32) * out.astype(jnp.float32)
    row_sums = _query_blocks(wide.sum(axis=-1, keepdims=True), K, block_tokens)

    def backward_block(dq: Blocks, j: Array) -> tuple[Blocks, tuple[Array, Array]]:
        def add_queries(
            turn: Array, sums: tuple[Blocks, Array, Array]
        ) -> tuple[Blocks, Array, Array]:
            i, (dq, dk, dv) = order[j, turn], sums
            scores = _scores(q_blocks[i], k_blocks[j], _sees(blocks, i, j, window))
            p = jnp.exp(scores - log_weights[i][..., None])
            dv = dv + _product("bkgqs,bkgqh->bksh", p.astype(dtype), d_out_blocks[i])
            ds = (
                p * (_product("bkgqh,bksh->bkgqs", d_out_blocks[i], v_blocks[j]) - row_sums[i])
            ).astype(dtype)
            dq = dq.at[i].add(_product("bkgqs,bkhs->bkgqh", ds, k_blocks[j]))
            return dq, dk + _product("bkgqs,bkgqh->bksh", ds, q_blocks[i]), dv

        none = jnp.zeros(v_blocks.shape[1:], jnp.float32)
        dq, dk, dv = jax.lax.fori_loop(0, num_seeing[j], add_queries, (dq, none, none))
        return dq, (dk, dv)

    dq, (dk, dv) = jax.lax.scan(
        backward_block, jnp.zeros(q_blocks.shape, jnp.float32), jnp.arange(len(q_blocks))
    )
    # dk needs no scale, since q is scaled.
    dk, dv = (_rows(x[:, :, :, None], k.shape).astype(k.dtype) for x in (dk, dv))
    d_sinks = None
    if sinks is not None:
        p = jnp.exp(sinks.astype(jnp.float32).reshape(K, -1, 1) - log_weights)
        d_sinks = -(p * row_sums[..., 0]).sum(axis=(0, 1, 4)).reshape(sinks.shape)
        d_sinks = d_sinks.astype(sinks.dtype)
    return _rows(_scaled(dq), q.shape).astype(dtype), dk, dv, None, d_sinks


_attend = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], nondiff_argnums=(5, 6))
_attend.defvjp(_forward, _backward)


def _scaled(q: Float[Array, "... H"]) -> Float[Array, "... H"]:
    return q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)


def _query_blocks(
    x: Float[Array, "B T N H"], K: int, block_tokens: int
) -> Float[Array, "n B K G C H"]:
    B, _, N, H = x.shape
    return (
        _padded(x, block_tokens)
        .reshape(B, -1, block_tokens, K, N // K, H)
        .transpose(1, 0, 3, 4, 2, 5)
    )


def _key_blocks(
    k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], block_tokens: int
) -> tuple[Float[Array, "n B K H c"], Float[Array, "n B K c H"]]:
    B, _, K, H = k.shape
    k, v = (_padded(x, block_tokens).reshape(B, -1, block_tokens, K, H) for x in (k, v))
    return k.transpose(1, 0, 3, 4, 2), v.transpose(1, 0, 3, 2, 4)


def _rows(blocks: Float[Array, "n B K G C H"], shape: tuple[int, ...]) -> Float[Array, "B T N H"]:
    """The inverse of `_query_blocks`."""
    B, T, N, H = shape
    return blocks.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, N, H)[:, :T]


def _padded(x: Array, block_tokens: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_tokens), *((0, 0),) * (x.ndim - 2)))


def _cut(visibility: Visibility, window: int | None, block_tokens: int) -> _Blocks:
    until, positions = (
        _padded(x, block_tokens).reshape(len(x), -1, block_tokens).swapaxes(0, 1)
        for x in visibility
    )
    n = jnp.arange(len(until))
    sees = (until.max(axis=-1)[None] > n[:, None, None] * block_tokens) & (
        n[:, None, None] >= n[:, None]
    )
    if window is not None:
        sees &= positions.min(axis=-1)[:, None] - positions.max(axis=-1) < window
    # Every block sees itself, also one that is padded to its whole length.
    return _Blocks(until, positions, sees.any(axis=-1) | jnp.eye(len(n), dtype=bool))


def _seen(sees: Bool[Array, "n n"]) -> tuple[Int[Array, "n n"], Int[Array, "_"]]:
    """Return the blocks that each sees, in ascending order and first, and their number."""
    return jnp.argsort(~sees, axis=1, stable=True), sees.sum(axis=1)


def _sees(blocks: _Blocks, i: Array, j: Array, window: int | None) -> Bool[Array, "B 1 1 C c"]:
    """Mask of the keys of block j that the queries of block i see."""
    offsets = jnp.arange(blocks.until.shape[2])
    places, keys = i * len(offsets) + offsets[:, None], j * len(offsets) + offsets
    sees = (keys <= places) & (places < blocks.until[j][:, None])
    if window is not None:
        sees &= blocks.positions[i][:, :, None] - blocks.positions[j][:, None] < window
    return sees[:, None, None]


def _scores(
    q: Float[Array, "B K G C H"], k: Float[Array, "B K H c"], sees: Bool[Array, "B 1 1 C c"]
) -> Array:
    return jnp.where(sees, _product("bkgqh,bkhs->bkgqs", q, k), _LOWEST)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
