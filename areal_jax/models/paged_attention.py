"""Paged KV cache of a layer, and attention over it (PagedAttention, arXiv:2309.06180).

A page has a fixed number of tokens of one sequence; the page table of a row lists the pages of its
sequence in order. Tables may share pages, so that a common prefix is stored once.

Axes: B rows, T new tokens of a row, N query heads, K key-value heads, G = N / K, H head size,
P pages, p tokens of a page, M pages of a table, W tokens of a block of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Shaped

from areal_jax.models.decoder import Attend
from areal_jax.models.paged_kernels import gpu_paged_attention
from areal_jax.models.tpu_paged_attention import padded_head_dim, tpu_paged_attention
from areal_jax.parallel.sharding import Rules, on_shards, specs

PagedKernel: TypeAlias = Literal["plain", "gpu", "tpu"]
"""plain: blocks of pages in sequence, in plain XLA. gpu, tpu: a kernel, for one new token per row;
several new tokens are several rows with the same pages."""

BLOCK_TOKENS = 128
"""Tokens that the plain path processes at once."""

_LOWEST = float(jnp.finfo(jnp.float32).min)


class Pages(NamedTuple):
    """KV cache of one layer."""

    keys: Shaped[Any, "K P p H"]
    """With the head size of `stored_head_dim`: numbers after the head's own are 0."""
    values: Any
    """Of the shape of keys. None: keys are also the values (latent attention)."""
    key_scales: Float32[Any, "K P p"] | None = None
    """Scales of quantized keys, one per token and head; None if not quantized."""
    value_scales: Float32[Any, "K P p"] | None = None
    """Scales of quantized values."""


def quantize(
    x: Float[Array, "... H"], dtype: DTypeLike
) -> tuple[Shaped[Array, "... H"], Float32[Array, "..."]]:
    """Quantize x, so that the largest number of each token and head is the largest of `dtype`.

    Returns:
        The quantized numbers, and their scales.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    scale = jnp.maximum(jnp.abs(x.astype(jnp.float32)).max(axis=-1), 1e-30) / largest
    scaled = x.astype(jnp.float32) / scale[..., None]
    return (jnp.round(scaled) if is_integer else scaled).astype(dtype), scale


def as_stored(x: Float[Array, "... H"], dtype: DTypeLike) -> Float[Array, "... H"]:
    """Round x as a write to pages of `dtype` and a read from them do."""
    if jnp.dtype(dtype) == x.dtype:
        return x
    quantized, scale = quantize(x, dtype)
    return (quantized.astype(jnp.float32) * scale[..., None]).astype(x.dtype)


PAGE_AXES = ("kv_heads", "pages")
"""Logical axes of a page array."""


def write_pages(
    pages: Pages,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"] | None,
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    counts: Int[Array, "B"],
) -> Pages:
    """Write new tokens of every row into its pages.

    Args:
        pages: KV cache of the layer.
        k: keys of new tokens.
        v: values of new tokens; None: there are none.
        table: page table of each row.
        starts: position of the first new token of each row.
        counts: number of new tokens of each row; further ones are dropped.
    """
    K, P, p = pages.keys.shape[:3]
    new = jnp.arange(k.shape[1], dtype=jnp.int32)
    positions = starts[:, None] + new
    page = jnp.take_along_axis(table, jnp.minimum(positions // p, table.shape[1] - 1), axis=1)
    rows = (jnp.arange(K, dtype=jnp.int32)[:, None, None] * P + page) * p + positions % p
    # Tokens beyond `counts` get an index beyond the pages, and are dropped.
    rows = jnp.where(new < counts[:, None], rows, K * P * p).reshape(-1)

    def put(into: Array, tokens: Array) -> Array:
        missing = into.shape[-1] - tokens.shape[-1] if into.ndim == 4 else 0
        tokens = jnp.pad(tokens, (*((0, 0),) * (tokens.ndim - 1), (0, missing)))
        # Along the first dimension: for others, XLA on GPUs transposes all pages and back.
        flat = into.reshape(K * P * p, *into.shape[3:])
        tokens = jnp.moveaxis(tokens, 2, 0).reshape(-1, *tokens.shape[3:])
        return flat.at[rows].set(tokens, mode="drop", unique_indices=True).reshape(into.shape)

    def put_scaled(
        into: Array | None, scales: Array | None, tokens: Array | None
    ) -> tuple[Array | None, Array | None]:
        if into is None or tokens is None:
            return None, None
        if scales is None:
            return put(into, tokens.astype(into.dtype)), None
        quantized, own_scales = quantize(tokens, into.dtype)
        return put(into, quantized), put(scales, own_scales)

    keys, key_scales = put_scaled(pages.keys, pages.key_scales, k)
    values, value_scales = put_scaled(pages.values, pages.value_scales, v)
    return Pages(keys, values, key_scales, value_scales)


def read_pages(
    pages: Pages, ids: Int[Array, "*B M"], dtype: DTypeLike, head_dim: int | None = None
) -> tuple[Float[Array, "K *B S H"], Float[Array, "K *B S H"]]:
    """Read keys and values of pages, concatenated along tokens; without values, keys twice.

    Args:
        pages: KV cache of the layer.
        ids: numbers of the pages.
        dtype: type of the result.
        head_dim: head size; None: as in the pages, with their padding.
    """
    K, P = pages.keys.shape[:2]
    rows = jnp.arange(K, dtype=jnp.int32).reshape(K, *(1,) * ids.ndim) * P + ids

    def gather(x: Array) -> Array:
        return x.reshape(K * P, *x.shape[2:])[rows]

    def read(x: Array, scales: Array | None) -> Array:
        numbers = gather(x)[..., :head_dim]
        if scales is not None:
            numbers = numbers.astype(jnp.float32) * gather(scales)[..., None]
        return numbers.astype(dtype).reshape(K, *ids.shape[:-1], -1, numbers.shape[-1])

    keys = read(pages.keys, pages.key_scales)
    return keys, keys if pages.values is None else read(pages.values, pages.value_scales)


def attend_to_pages(
    q: Float[Array, "B T N H"],
    pages: Pages,
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    window: int | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Compute softmax(q·k / sqrt(H)) · v over each row's sequence up to the query's position.

    A running softmax over blocks of pages (arXiv:2205.14135): memory besides the pages depends on
    the new tokens alone. Blocks after the last token of every row, or before the window of every
    row, are not read.

    Args:
        q: queries of new tokens; query t has position starts + t.
        pages: KV cache of the layer.
        table: page table of each row.
        starts: position of the first query of each row.
        window: number of keys that a query sees, including its own; None for all.
        sinks: score of one more key of each head, whose value is 0; None: there is none.
    """
    B, T, N, H = q.shape
    K, p = pages.keys.shape[0], pages.keys.shape[2]
    width = max(BLOCK_TOKENS // p, 1)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % width)))
    positions = starts[:, None] + jnp.arange(T, dtype=jnp.int32)
    q = (q * jnp.asarray(H**-0.5, q.dtype)).reshape(B, T, K, N // K, H)

    def add_block(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, weight, weighted = sums
        ids = jax.lax.dynamic_slice_in_dim(table, j * width, width, 1)
        k, v = read_pages(pages, ids, q.dtype, H)
        scores = jnp.einsum("btkgh,kbsh->bkgts", q, k, preferred_element_type=jnp.float32)
        ages = positions[:, :, None] - j * width * p - jnp.arange(width * p, dtype=jnp.int32)
        sees = ages >= 0 if window is None else (ages >= 0) & (ages < window)
        scores = jnp.where(sees[:, None, None], scores, _LOWEST)
        new_highest = jnp.maximum(highest, scores.max(axis=-1))
        exp = jnp.exp(scores - new_highest[..., None])
        # Sums from blocks in which a query sees no key are later multiplied by 0: it sees itself.
        shrink = jnp.exp(highest - new_highest)
        values = jnp.einsum(
            "bkgts,kbsh->bkgth", exp.astype(q.dtype), v, preferred_element_type=jnp.float32
        )
        return (
            new_highest,
            shrink * weight + exp.sum(axis=-1),
            shrink[..., None] * weighted + values,
        )

    shape = (B, K, N // K, T)
    none = jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, H))
    if sinks is not None:
        # The running softmax begins with the sink.
        score = sinks.astype(jnp.float32).reshape(K, N // K, 1)
        none = jnp.broadcast_to(score, shape), jnp.ones(shape), none[2]
    first = 0 if window is None else jnp.maximum(starts.min() - window + 1, 0) // (width * p)
    last = (starts.max() + T - 1) // (width * p)
    _, weight, weighted = jax.lax.fori_loop(
        first, jnp.minimum(last + 1, table.shape[1] // width), add_block, none
    )
    return (
        (weighted / weight[..., None]).astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    )


def attend_as_rows(
    kernel: Callable[..., Array],
    q: Float[Array, "B T N H"],
    pages: Pages,
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    window: int | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attend by a kernel for one new token per row: each token is a row with the same pages.

    Args:
        kernel: `gpu_paged_attention` or `tpu_paged_attention`.
        q: as of `attend_to_pages`, and so are all others.
    """
    T = q.shape[1]
    lengths = starts[:, None] + 1 + jnp.arange(T, dtype=jnp.int32)
    # Tokens beyond the table's pages are not written, and what they attend to is not read.
    lengths = jnp.minimum(lengths, table.shape[1] * pages.keys.shape[2]).reshape(-1)
    rows = q.reshape(-1, *q.shape[2:])
    tables = jnp.repeat(table, T, axis=0)
    return kernel(rows, *pages, tables, lengths, window=window, sinks=sinks).reshape(q.shape)


def choose_paged_kernel(
    platform: str, head_dim: int, page_tokens: int, *, is_latent: bool = False
) -> PagedKernel:
    """Choose the fastest kernel of paged attention that supports the settings.

    Args:
        platform: platform of the devices, as named by jax.
        head_dim: head size.
        page_tokens: tokens of a page.
        is_latent: whether keys are also the values.
    """
    match platform:
        case "gpu" | "cuda" if (
            not is_latent
            and head_dim % 16 == 0
            and (page_tokens >= 16 and page_tokens.bit_count() == 1)
        ):
            return "gpu"
        case "tpu" if page_tokens % 8 == 0:
            return "tpu"
        case _:
            return "plain"


def stored_head_dim(kernel: str, head_dim: int) -> int:
    """Return the head size of pages that a kernel reads."""
    return padded_head_dim(head_dim) if kernel == "tpu" else head_dim


def sharded_write(
    pages: Pages,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"] | None,
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    counts: Int[Array, "B"],
    mesh: Mesh,
    rules: Rules,
) -> Pages:
    """Apply `write_pages` on a mesh; tables contain page numbers of the device of their row."""
    page_specs = specs(mesh, PAGE_AXES, pages, rules)
    token_specs = specs(mesh, ("batch", None, "kv_heads"), k, rules)
    row_specs = specs(mesh, ("batch",), (table, starts, counts), rules)
    value_specs = None if v is None else token_specs
    in_specs = (page_specs, token_specs, value_specs, *row_specs)
    return on_shards(write_pages, mesh, in_specs, page_specs)(pages, k, v, table, starts, counts)


def paged_attention(
    table: Int[Array, "B M"],
    starts: Int[Array, "B"],
    counts: Int[Array, "B"],
    kernel: PagedKernel,
    mesh: Mesh,
    rules: Rules,
) -> Attend:
    """Make attention that writes new tokens into pages and attends to them; the cache is `Pages`.

    Args:
        table: page table of each row, with page numbers of its device.
        starts: position of the first new token of each row.
        counts: number of new tokens of each row.
        kernel: see `choose_paged_kernel`.
        mesh: rollout mesh.
        rules: logical axes to mesh axes.
    """

    def read(
        q: Array,
        pages: Pages,
        table: Array,
        starts: Array,
        sinks: Array | None,
        *,
        window: int | None,
    ) -> Array:
        if kernel == "plain":
            return attend_to_pages(q, pages, table, starts, window, sinks)
        attend_last = gpu_paged_attention if kernel == "gpu" else tpu_paged_attention
        if q.shape[1] > 1:
            return attend_as_rows(attend_last, q, pages, table, starts, window, sinks)
        return attend_last(q[:, 0], *pages, table, starts + 1, window=window, sinks=sinks)[:, None]

    def attend(
        q: Array,
        k: Array,
        v: Array | None,
        pages: Pages,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Pages]:
        pages = sharded_write(pages, k, v, table, starts, counts, mesh, rules)
        page_specs = specs(mesh, PAGE_AXES, pages, rules)
        # Query heads are on the device of their key-value head; one alone is on every device.
        has_head = page_specs.keys[0] is not None or k.shape[2] == 1
        q_specs = specs(mesh, ("batch", None, "heads" if has_head else None), q, rules)
        row_specs = specs(mesh, ("batch",), (table, starts), rules)
        in_specs = (q_specs, page_specs, *row_specs, PartitionSpec(q_specs[2]))
        run = on_shards(partial(read, window=window), mesh, in_specs, q_specs)
        return run(q, pages, table, starts, sinks), pages

    return attend
