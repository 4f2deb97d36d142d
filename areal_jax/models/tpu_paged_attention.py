"""Kernel of paged attention for TPUs, for one new token per row.

Axes: B rows, N query heads, K key-value heads, G = N / K, H head size, P pages, p tokens of a page,
M pages of a table, W tokens of a block of pages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

LANES = 128
"""Head sizes of pages are padded to multiples of this, as a TPU pads the last dimension anyway."""

BLOCK_NUMBERS = 2**19
"""Target size of a block of keys: large enough that transfers take longer than starting them, and
small enough that four blocks fit a TPU's memory on the chip."""

_MIN_ROWS = 8  # of an array in vector registers
_LOWEST = -0.7 * float(jnp.finfo(jnp.float32).max)


def padded_head_dim(head_dim: int) -> int:
    """Return the head size of pages that the kernel reads."""
    return -(-head_dim // LANES) * LANES


def tpu_paged_attention(
    q: Float[Array, "B N H"],
    keys: Shaped[Array, "K P p L"],
    values: Shaped[Array, "K P p L"] | None,
    key_scales: Float[Array, "K P p"] | None,
    value_scales: Float[Array, "K P p"] | None,
    table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    window: int | None = None,
    sinks: Float[Array, "N"] | None = None,
    interpret: Any = False,
) -> Float[Array, "B N H"]:
    """Compute softmax(q·k / sqrt(H)) · v over the tokens of each row's pages.

    A program processes all heads of a row by a running softmax over blocks of pages
    (arXiv:2205.14135). Pages are copied to the chip one block ahead, also from the last block of a
    row to the first of the next. Pages beyond a row's length, or before its window, are not read.
    The function has more than 60 lines because it lists the blocks of every argument.

    Args:
        q: queries, one per row.
        keys: keys of all pages, with a head size of `padded_head_dim`.
        values: values of all pages; None: keys are also the values.
        key_scales: scales of quantized keys; None if not quantized.
        value_scales: scales of quantized values.
        table: page table of each row.
        lengths: number of tokens of each row, at least 1.
        window: number of last tokens that a query sees; None for all.
        sinks: score of one more key of each head, whose value is 0; None: there is none.
        interpret: run the kernel in interpret mode, without a TPU.
    """
    B, N, H = q.shape
    K, _, p, L = keys.shape
    rows = -(-(N // K) // _MIN_ROWS) * _MIN_ROWS
    width = max(1, min(table.shape[1], BLOCK_NUMBERS // (K * p * L)))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % width)))
    num_pages = table.shape[1]

    def by_group(x: Array) -> Array:
        x = x.reshape(*x.shape[:-2], K, N // K, x.shape[-1])
        return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, rows - N // K), (0, 0)))

    def of_rows(scales: Array | None) -> Array | None:
        """Scales of every row, in the order of its tokens."""
        if scales is None:
            return None
        gathered = jnp.moveaxis(scales[:, table], 1, 0)
        return gathered.reshape(B, K, num_pages // width, 1, width * p).swapaxes(1, 2)

    scaled = jnp.pad(q * jnp.asarray(H**-0.5, q.dtype), ((0, 0), (0, 0), (0, L - H)))
    # The first dimension is cut over the cores of a chip that has two.
    cores = 2 if B % 2 == 0 else 1
    per_core = B // cores

    def of_row(*shape: int, memory: Any = pltpu.VMEM, ahead: int = 0) -> pl.BlockSpec:
        def index(core: Any, i: Any) -> tuple[Any, ...]:
            row = core * per_core + jnp.minimum(i + ahead, per_core - 1)
            return (row, *(0,) * len(shape))

        return pl.BlockSpec((None, *shape), index, memory_space=memory)

    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    scale_spec = of_row(num_pages // width, K, 1, width * p)
    table_specs = [of_row(1, num_pages, memory=pltpu.SMEM, ahead=ahead) for ahead in (0, 1)]
    sink_spec = pl.BlockSpec((K, rows, 1), lambda core, i: (0, 0, 0), memory_space=pltpu.VMEM)
    block = pltpu.VMEM((2, K, width, p, L), keys.dtype)
    out = pl.pallas_call(
        partial(_attend_to_row, window=window),
        grid=(cores, per_core),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            *table_specs,
            of_row(K, rows, L),
            everywhere,
            None if values is None else everywhere,
            None if key_scales is None else scale_spec,
            None if value_scales is None else scale_spec,
            None if sinks is None else sink_spec,
        ],
        out_specs=of_row(K, rows, L),
        out_shape=jax.ShapeDtypeStruct((B, K, rows, L), q.dtype),
        scratch_shapes=[
            block,
            None if values is None else block,
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SMEM((1,), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_attention",
    )(
        lengths.astype(jnp.int32),
        *(table[:, None].astype(jnp.int32),) * 2,
        by_group(scaled),
        keys,
        values,
        of_rows(key_scales),
        of_rows(value_scales),
        None if sinks is None else by_group(sinks.astype(jnp.float32)[:, None]),
    )
    return out[:, :, : N // K, :H].reshape(B, N, H)


def _attend_to_row(
    lengths_ref: Any,  # [B]
    table_ref: Any,  # [1, M]
    next_table_ref: Any,  # of the next row
    q_ref: Any,  # [K, rows, L], scaled
    keys_ref: Any,  # [K, P, p, L], in the main memory
    values_ref: Any,  # or None
    key_scales_ref: Any,  # [M / width, K, 1, W], or None
    value_scales_ref: Any,
    sinks_ref: Any,  # [K, rows, 1], or None
    out_ref: Any,  # [K, rows, L]
    keys_buffer: Any,  # [2, K, width, p, L]
    values_buffer: Any,
    semaphores: Any,  # [2 buffers, 2]
    turn_ref: Any,  # [1]: buffer of the row's first block
    *,
    window: int | None,
) -> None:
    """Compute a running softmax over the blocks of a row.

    The function has more than 60 lines because its parts share the references to memory.
    """
    i, per_core = pl.program_id(1), pl.num_programs(1)
    row = pl.program_id(0) * per_core + i
    _, K, width, p, L = keys_buffer.shape
    W = width * p
    arrays = [(keys_ref, keys_buffer)]
    if values_ref is not None:
        arrays.append((values_ref, values_buffer))

    def blocks(row: Array) -> tuple[Array, Array]:
        """Number of a row's first block, and of the one after its last."""
        length = lengths_ref[row]
        # Not //, which besides rounds negative numbers down.
        first = 0 if window is None else jax.lax.div(jnp.maximum(length - window, 0), W)
        return jnp.int32(first), jax.lax.div(length + W - 1, W)

    def copy(do: str, table: Any, row: Array, block: Array, turn: Array) -> None:
        """Start to copy the pages of a block, or wait for them."""

        def of_page(n: Array, _: None) -> None:
            page = table[0, block * width + n]
            for which, (source, buffer) in enumerate(arrays):
                transfer = pltpu.make_async_copy(
                    source.at[:, page], buffer.at[turn, :, n], semaphores.at[turn, which]
                )
                getattr(transfer, do)()

        num_pages = jax.lax.div(lengths_ref[row] + p - 1, p) - block * width
        jax.lax.fori_loop(0, jnp.minimum(num_pages, width), of_page, None)

    first, end = blocks(row)

    @pl.when(i == 0)
    def _() -> None:
        turn_ref[0] = 0
        # Tokens beyond a row's length have weight 0, and 0 · nan would be nan.
        arrays[-1][1][...] = jnp.zeros_like(arrays[-1][1])
        copy("start", table_ref, row, first, jnp.int32(0))

    first_turn = turn_ref[0]
    length = lengths_ref[row]
    q = q_ref[...]

    def add_block(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, weight, weighted = sums
        turn = jax.lax.rem(first_turn + j - first, 2)

        @pl.when(j + 1 < end)
        def _() -> None:
            copy("start", table_ref, row, j + 1, 1 - turn)

        @pl.when((j + 1 == end) & (i + 1 < per_core))
        def _() -> None:
            turn_ref[0] = 1 - turn
            copy("start", next_table_ref, row + 1, blocks(row + 1)[0], 1 - turn)

        copy("wait", table_ref, row, j, turn)
        k = keys_buffer[turn].reshape(K, W, L).astype(q.dtype)
        v = k if values_ref is None else values_buffer[turn].reshape(K, W, L).astype(q.dtype)
        scores = jnp.einsum("kgh,kwh->kgw", q, k, preferred_element_type=jnp.float32)
        if key_scales_ref is not None:
            scores = scores * key_scales_ref[j]
        columns = j * W + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
        sees = columns < length
        if window is not None:
            sees &= columns >= length - window
        scores = jnp.where(sees, scores, _LOWEST)
        new_highest = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
        # A block in which the query sees no key cannot be the first: it sees itself.
        exp = jnp.where(sees, jnp.exp(scores - new_highest), 0.0)
        shrink = jnp.exp(highest - new_highest)
        weight = shrink * weight + exp.sum(axis=-1, keepdims=True)
        of_values = key_scales_ref if values_ref is None else value_scales_ref
        if of_values is not None:
            exp = exp * of_values[j]
        products = jnp.einsum(
            "kgw,kwh->kgh", exp.astype(q.dtype), v, preferred_element_type=jnp.float32
        )
        return new_highest, weight, shrink * weighted + products

    shape = (K, q.shape[1], 1)
    none = jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks_ref is not None:
        none = sinks_ref[...], jnp.ones(shape, jnp.float32)
    _, weight, weighted = jax.lax.fori_loop(
        first, end, add_block, (*none, jnp.zeros(q.shape, jnp.float32))
    )
    out_ref[...] = (weighted / weight).astype(out_ref.dtype)
