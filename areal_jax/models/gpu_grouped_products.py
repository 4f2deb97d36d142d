"""Kernels for GPUs of products of groups of rows, each with its own matrix (MegaBlocks,
arXiv:2211.15841).

Every expert's rows are a whole number of blocks, so that a program reads one matrix. Blocks after
all groups are skipped, and a matrix is read only by the blocks that use it.

Axes: R rows, b rows of a block, N blocks, E groups, I inputs, O outputs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from areal_jax.models.gpu_kernels import MIN_TILE, call_kernel

MAX_BLOCK = 128


class Tiling(NamedTuple):
    """Largest sizes of a tile of the result, of a turn of the sum, and how Triton compiles it."""

    rows: int
    columns: int
    turn: int
    num_warps: int
    num_stages: int


class Tilings(NamedTuple):
    """`Tiling` of the products, of those with transposed matrices, and of the gradients."""

    product: Tiling
    transposed: Tiling
    gradient: Tiling


def choose_tilings(block: int) -> Tilings:
    """Choose tiles for the rows of a block; for 16 and 128 the fastest of those tried on an H200,
    with the widths of Qwen3-30B-A3B.
    """
    if block < 64:
        few = Tiling(block, 128, 64, 4, 4)
        return Tilings(few, few, Tiling(64, 128, block, 4, 3))
    if block < MAX_BLOCK:
        half = Tiling(block, 128, 64, 4, 3)
        return Tilings(half._replace(columns=256, num_warps=8), half, Tiling(128, 128, 64, 8, 3))
    whole = Tiling(block, 128, 64, 8, 3)
    return Tilings(whole._replace(columns=256), whole, whole)


def gpu_grouped_product(
    x: Float[Array, "R _"],
    w: Num[Array, "E I O"],
    sizes: Int[Array, "E"],
    block: int,
    *,
    is_transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "R _"]:
    """Compute x · w[e], or x · w[e]ᵀ, with e the group of the row; 0 after all groups.

    Args:
        x: inputs [R, I]; the number of rows is a multiple of `block`.
        w: a matrix of each group; one of 8 bits is converted in the kernel.
        sizes: rows of each group, multiples of `block`.
        block: rows of a block, a power of two.
        is_transposed: multiply with the transposed matrices: x is [R, O], the result [R, I].
        interpret: run the kernel in interpret mode, without a GPU.
    """
    tilings = choose_tilings(block)
    tiling = tilings.transposed if is_transposed else tilings.product
    columns_of_result = w.shape[1 if is_transposed else 2]
    x, w = _pad(x, 1), _pad(w, 2)
    num_inputs, num_outputs = (w.shape[2], w.shape[1]) if is_transposed else w.shape[1:]
    turn, columns = _divide(num_inputs, tiling.turn), _divide(num_outputs, tiling.columns)
    groups = find_groups(sizes, block, len(x) // block)
    # No turn for a block after all groups.
    is_used = jnp.arange(0, len(x), block) < sizes.sum()
    turns = jnp.where(is_used, jnp.int32(num_inputs // turn), 0)
    return call_kernel(
        partial(_product_kernel, turn=turn, is_transposed=is_transposed),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        grid=(num_outputs // columns, len(x) // block),
        in_specs=[
            pl.BlockSpec((block, num_inputs), lambda o, r: (r, 0)),
            pl.BlockSpec((len(w), columns, num_inputs), lambda o, r: (0, o, 0))
            if is_transposed
            else pl.BlockSpec((len(w), num_inputs, columns), lambda o, r: (0, 0, o)),
            *[pl.BlockSpec((1,), lambda o, r: (r,))] * 2,
        ],
        out_specs=pl.BlockSpec((block, columns), lambda o, r: (r, o)),
        out_shape=jax.ShapeDtypeStruct((len(x), num_outputs), x.dtype),
        name="grouped_product",
    )(x, w, groups, turns)[:, :columns_of_result]


def gpu_grouped_gradient(
    x: Float[Array, "R I"],
    dy: Float[Array, "R O"],
    sizes: Int[Array, "E"],
    block: int,
    dtype: DTypeLike,
    *,
    interpret: bool = False,
) -> Float[Array, "E I O"]:
    """Compute the gradient of the matrices: xᵀ · dy over the rows of each group, in float32.

    Args:
        x: inputs.
        dy: gradient of the outputs.
        sizes: rows of each group, multiples of `block`.
        block: rows of a block, a power of two.
        dtype: what the sums are rounded to.
        interpret: run the kernel in interpret mode, without a GPU.
    """
    tiling, sizes_of_result = choose_tilings(block).gradient, (x.shape[1], dy.shape[1])
    x, dy = _pad(x, 1), _pad(dy, 1)
    rows, columns = _divide(x.shape[1], tiling.rows), _divide(dy.shape[1], tiling.columns)
    ends = jnp.cumsum(sizes).astype(jnp.int32)
    turn = min(block, tiling.turn)
    return call_kernel(
        partial(_gradient_kernel, turn=turn),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        grid=(dy.shape[1] // columns, x.shape[1] // rows, len(sizes)),
        in_specs=[
            pl.BlockSpec((len(x), rows), lambda o, i, e: (0, i)),
            pl.BlockSpec((len(x), columns), lambda o, i, e: (0, o)),
            *[pl.BlockSpec((1,), lambda o, i, e: (e,))] * 2,
        ],
        out_specs=pl.BlockSpec((None, rows, columns), lambda o, i, e: (e, i, o)),
        out_shape=jax.ShapeDtypeStruct((len(sizes), x.shape[1], dy.shape[1]), dtype),
        name="grouped_gradient",
    )(x, dy, ends - sizes.astype(jnp.int32), ends)[:, : sizes_of_result[0], : sizes_of_result[1]]


def find_groups(sizes: Int[Array, "E"], block: int, num_blocks: int) -> Int[Array, "N"]:
    """Find the group of each block; for blocks after all groups the last one."""
    ends, blocks = jnp.cumsum(sizes) // block, jnp.arange(num_blocks)
    # Compared at once: a binary search is one small kernel after another on a GPU.
    groups = (ends <= blocks[:, None]).sum(axis=1, dtype=jnp.int32)
    return jnp.minimum(groups, len(sizes) - 1)


def _pad(x: Array, num_dims: int) -> Array:
    """Pad the last dimensions with zeros to multiples of what tensor cores need."""
    missing = [-size % MIN_TILE for size in x.shape[-num_dims:]]
    if not any(missing):
        return x
    return jnp.pad(x, [(0, 0)] * (x.ndim - num_dims) + [(0, each) for each in missing])


def _divide(size: int, most: int) -> int:
    """Return the largest power of two that divides a size, and at most `most`."""
    return math.gcd(size, most)


def _product_kernel(
    x_ref: Any,  # [b, I]
    w_ref: Any,  # [E, I, columns], or [E, columns, I]
    group_ref: Any,  # [1]
    num_turns_ref: Any,  # [1]
    y_ref: Any,  # [b, columns]
    *,
    turn: int,
    is_transposed: bool,
) -> None:
    group = group_ref[0]

    def add(step: Array, total: Array) -> Array:
        inputs = pl.ds(step * turn, turn)
        x = x_ref[:, inputs]
        w = w_ref[group, :, inputs] if is_transposed else w_ref[group, inputs, :]
        w = w.astype(x.dtype)
        return total + triton.dot(x, w.T if is_transposed else w)

    y = jax.lax.fori_loop(0, num_turns_ref[0], add, jnp.zeros(y_ref.shape, jnp.float32))
    y_ref[...] = y.astype(y_ref.dtype)


def _gradient_kernel(
    x_ref: Any,  # [R, rows]
    dy_ref: Any,  # [R, columns]
    start_ref: Any,  # [1]
    end_ref: Any,  # [1]
    dw_ref: Any,  # [rows, columns]
    *,
    turn: int,
) -> None:
    start = start_ref[0]

    def add(step: Array, total: Array) -> Array:
        rows = pl.ds(start + step * turn, turn)
        return total + triton.dot(x_ref[rows, :].T, dy_ref[rows, :])

    num_turns = jax.lax.div(end_ref[0] - start, turn)
    dw = jax.lax.fori_loop(0, num_turns, add, jnp.zeros(dw_ref.shape, jnp.float32))
    dw_ref[...] = dw.astype(dw_ref.dtype)
