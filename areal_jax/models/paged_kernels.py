"""Kernel of paged attention for GPUs, for one new token per row; it reads only pages with tokens of
the row.

Axes: B rows, N query heads, K key-value heads, G = N / K, H head size, P pages, p tokens of a page,
M pages of a table, W tokens of a block of pages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from areal_jax.models.gpu_kernels import MIN_TILE

BLOCK_TOKENS = 64
"""Tokens that a kernel processes at once; at least one page."""
_PROGRAMS = 2048
"""Target number of programs, several per processor of a large GPU; decides the number of parts."""
_NUM_WARPS, _NUM_STAGES = 2, 3
"""With the number of programs the fastest of those tried on an H200, for heads of 128."""
_LOWEST = float(jnp.finfo(jnp.float32).min)


def gpu_paged_attention(
    q: Float[Array, "B N H"],
    keys: Array,
    values: Array,
    key_scales: Float[Array, "K P p"] | None,
    value_scales: Float[Array, "K P p"] | None,
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    window: int | None = None,
    sinks: Float[Array, "N"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Compute softmax(q·k / sqrt(H)) · v over the tokens of each row's pages.

    Each program processes a part of one row's tokens for all query heads of one key-value head; the
    parts are then combined in float32 (flash decoding, arXiv:2311.01282). The function has more
    than 60 lines because it lists the blocks of every argument.

    Args:
        q: queries, one per row.
        keys: keys of all pages.
        values: values of all pages.
        key_scales: scales of quantized keys; None if not quantized.
        value_scales: scales of quantized values.
        table: page table of each row.
        lengths: number of tokens of each row.
        window: number of last tokens that a query sees; None for all.
        sinks: score of one more key of each head, whose value is 0; None: there is none.
        interpret: run the kernel in interpret mode, without a GPU.

    Page size p is a power of two, head size H a multiple of 16.

    Raises:
        ValueError: the keys are too large for 32-bit indices.
    """
    B, N, H = q.shape
    K, P, p = keys.shape[:3]
    if keys.size >= 2**31:
        raise ValueError(
            f"expected less than 2**31 numbers in the keys of a layer on one device, found "
            f"{keys.size}; lower engine.kv_tokens or use more devices"
        )
    G, width = N // K, max(BLOCK_TOKENS // p, 1)
    rows, num_parts = (
        max(MIN_TILE, pl.next_power_of_2(G)),
        max(1, min(16, _PROGRAMS // (B * K))),
    )
    q = jnp.pad(
        (q * jnp.asarray(H**-0.5, q.dtype)).reshape(B, K, G, H),
        ((0, 0), (0, 0), (0, rows - G), (0, 0)),
    )
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % width)))
    page_spec = pl.BlockSpec((None, P, p, H), lambda b, k, i: (k, 0, 0, 0))
    scale_spec = (
        None if key_scales is None else pl.BlockSpec((None, P, p), lambda b, k, i: (k, 0, 0))
    )
    parts, highest, weight = pl.pallas_call(
        partial(_attend_to_part, num_parts=num_parts, width=width, window=window, dot=triton.dot),
        grid=(B, K, num_parts),
        in_specs=[
            pl.BlockSpec((None, None, rows, H), lambda b, k, i: (b, k, 0, 0)),
            page_spec,
            page_spec,
            scale_spec,
            scale_spec,
            pl.BlockSpec((None, table.shape[1]), lambda b, k, i: (b, 0)),
            pl.BlockSpec((None, 1), lambda b, k, i: (b, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, H), lambda b, k, i: (b, k, i, 0, 0)),
            *[pl.BlockSpec((None, None, None, rows), lambda b, k, i: (b, k, i, 0))] * 2,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, num_parts, rows, H), jnp.float32),
            *[jax.ShapeDtypeStruct((B, K, num_parts, rows), jnp.float32)] * 2,
        ],
        compiler_params=triton.CompilerParams(num_warps=_NUM_WARPS, num_stages=_NUM_STAGES),
        interpret=interpret,
        name="paged_attention",
    )(q, keys, values, key_scales, value_scales, table, lengths[:, None])
    if sinks is not None:
        # One more part, with the sink's weight and the value 0.
        score = jnp.pad(sinks.astype(jnp.float32).reshape(K, 1, G), ((0, 0), (0, 0), (0, rows - G)))
        score = jnp.broadcast_to(score, (B, K, 1, rows))
        highest = jnp.concatenate([highest, score], axis=2)
        weight = jnp.pad(weight, ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=1)
        parts = jnp.pad(parts, ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0)))
    share = jnp.exp(highest - highest.max(axis=2, keepdims=True))
    total = (weight * share).sum(axis=2)
    out = (parts * share[..., None]).sum(axis=2) / total[..., None]
    return out[:, :, :G].reshape(B, N, H).astype(q.dtype)


def _attend_to_part(
    q_ref: Any,  # [rows, H], scaled
    k_ref: Any,  # [P, p, H]
    v_ref: Any,
    k_scale_ref: Any,  # [P, p], or None
    v_scale_ref: Any,
    table_ref: Any,  # [M]
    length_ref: Any,  # [1]
    out_ref: Any,  # [rows, H]
    highest_ref: Any,  # [rows]
    weight_ref: Any,
    *,
    num_parts: int,
    width: int,
    window: int | None,
    dot: Any,
) -> None:
    """Compute a running softmax over one part of the blocks of a row (arXiv:2205.14135).

    Triton's arrays have sizes that are powers of two: a head is read in pieces of such sizes. The
    function has more than 60 lines because the loop's body reads the references of all arguments.
    """
    (rows, H), p = q_ref.shape, k_ref.shape[1]
    pieces = [pl.ds(start, size) for start, size in _pieces(H)]
    W, length = width * p, length_ref[0]
    first = 0 if window is None else jnp.maximum(length - window, 0) // W
    num_blocks = pl.cdiv(length, W)
    blocks_per_part = pl.cdiv(num_blocks - first, num_parts)
    start = first + pl.program_id(2) * blocks_per_part
    q = [q_ref[:, piece] for piece in pieces]

    def add_block(j: Array, sums: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
        out, highest, weight = sums
        ids = table_ref[pl.ds(j * width, width)]

        def read(ref: Any) -> list[Array]:
            return [ref[ids, :, each].reshape(W, -1).astype(q[0].dtype) for each in pieces]

        scores = sum(
            dot(of_q, of_k.T).astype(jnp.float32) for of_q, of_k in zip(q, read(k_ref), strict=True)
        )
        if k_scale_ref is not None:
            scores = scores * k_scale_ref[ids].reshape(1, W)
        columns = j * W + jnp.arange(W)
        sees = (
            columns < length
            if window is None
            else (columns < length) & (columns >= length - window)
        )
        scores = jnp.where(jnp.broadcast_to(sees[None], (rows, W)), scores, _LOWEST)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        exp = jnp.exp(scores - new_highest[:, None])
        shrink = jnp.exp(highest - new_highest)
        weight = shrink * weight + exp.sum(axis=-1)
        if v_scale_ref is not None:
            exp = exp * v_scale_ref[ids].reshape(1, W)
        exp = exp.astype(q[0].dtype)
        out = [
            shrink[:, None] * of_out + dot(exp, of_v).astype(jnp.float32)
            for of_out, of_v in zip(out, read(v_ref), strict=True)
        ]
        return out, new_highest, weight

    none = (
        [jnp.zeros((rows, size), jnp.float32) for _, size in _pieces(H)],
        jnp.full((rows,), _LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    out, highest, weight = jax.lax.fori_loop(
        start, jnp.minimum(start + blocks_per_part, num_blocks), add_block, none
    )
    for piece, of_out in zip(pieces, out, strict=True):
        out_ref[:, piece] = of_out
    highest_ref[...], weight_ref[...] = highest, weight


def _pieces(size: int) -> list[tuple[int, int]]:
    """Return starts and sizes of the fewest pieces that are powers of two: 80 is 64 and 16."""
    starts, start = [], 0
    for bit in reversed(range(size.bit_length())):
        if size & 1 << bit:
            starts.append((start, 1 << bit))
            start += 1 << bit
    return starts
