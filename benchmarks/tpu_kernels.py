"""Which kernels XLA:TPU and Mosaic compile, for TPUs that are not there.

    python benchmarks/tpu_kernels.py [--only=TEXT]

Needs libtpu (extra `tpu`). Paged attention on v5e, v6e and v5p in every KV dtype, page size, head
size and group; splash attention with and without windows, values and gradients; grouped products of
experts and their gradients; log-probs in chunks. Figures are compiled, not measured: a case has its
kernel, the number of kernel calls in the compiled program, and the compiler's message where it
fails. Appends a row for each device kind to results/tpu_kernels.jsonl.

Expected: all compile, and all have a kernel but log-probs, which need none. A second of one CPU
core for each case.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from areal_jax.cluster.environment import COMPILE_ONLY, set_variables

if __name__ == "__main__":
    # jax reads its flags when it is first imported.
    set_variables(COMPILE_ONLY, "jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from results import append

from areal_jax.models.attention import choose_kernel, packed_attention
from areal_jax.models.moe import local_experts
from areal_jax.models.paged_attention import (
    Pages,
    attend_to_pages,
    choose_paged_kernel,
    stored_head_dim,
)
from areal_jax.models.tpu_paged_attention import tpu_paged_attention
from areal_jax.parallel.topologies import compile_only_devices
from areal_jax.rl.logprobs import token_logprobs

TOPOLOGIES = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")
KV_DTYPES = (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)
HEAD_SIZES, PAGE_SIZES, GROUPS = (64, 80, 96, 128, 256), (8, 16, 32, 64, 128), range(1, 9)
LATENT_WIDTH = 576
"""Of DeepSeek-V3: the width of a latent with its rotated part."""
BF16 = jnp.dtype(jnp.bfloat16)


class Case(NamedTuple):
    """A function to compile, and the shapes of its arguments."""

    name: str
    kernel: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def paged(
    dtype: Any, head_dim: int, page_tokens: int, group: int, *, window: int | None = None
) -> Case:
    """Paged attention of 16 rows of up to 4096 tokens with two key-value heads."""
    rows, heads, pages_per_row = 16, 2, 4096 // page_tokens
    kernel, is_narrow = choose_paged_kernel("tpu", head_dim, page_tokens), dtype != jnp.bfloat16
    page = (heads, rows * pages_per_row + 1, page_tokens, stored_head_dim(kernel, head_dim))
    scales = shape(*page[:-1], dtype=jnp.float32) if is_narrow else None
    pages = Pages(shape(*page, dtype=dtype), shape(*page, dtype=dtype), scales, scales)

    def attend(q: Any, pages: Pages, table: Any, lengths: Any) -> Any:
        if kernel == "tpu":
            return tpu_paged_attention(q, *pages, table, lengths, window=window)
        return attend_to_pages(q[:, None], pages, table, lengths - 1, window)[:, 0]

    name = (
        f"paged attention, KV {jnp.dtype(dtype).name}, head {head_dim}, page {page_tokens}, "
        f"group {group}, window {window}"
    )
    q = shape(rows, heads * group, head_dim)
    table, lengths = (
        shape(rows, pages_per_row, dtype=jnp.int32),
        shape(rows, dtype=jnp.int32),
    )
    return Case(name, kernel, attend, (q, pages, table, lengths))


def latent(dtype: Any) -> Case:
    """Paged attention to latents, which are keys and values."""
    rows, pages_per_row, page_tokens = 16, 128, 32
    kernel = choose_paged_kernel("tpu", LATENT_WIDTH, page_tokens, is_latent=True)
    page = (1, rows * pages_per_row, page_tokens, stored_head_dim(kernel, LATENT_WIDTH))
    scales = None if dtype == jnp.bfloat16 else shape(*page[:-1], dtype=jnp.float32)

    def attend(q: Any, keys: Any, scales: Any, table: Any, lengths: Any) -> Any:
        return tpu_paged_attention(q, keys, None, scales, None, table, lengths)

    q, table = shape(rows, 128, LATENT_WIDTH), shape(rows, pages_per_row, dtype=jnp.int32)
    shapes = (q, shape(*page, dtype=dtype), scales, table, shape(rows, dtype=jnp.int32))
    return Case(f"paged attention to latents, {jnp.dtype(dtype).name}", kernel, attend, shapes)


def packed(head_dim: int, window: int | None) -> Case:
    """Values and gradients of splash attention."""
    kernel = choose_kernel("tpu", 4096)

    def total(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        out, _ = packed_attention(segment_ids, kernel)(q, k, v, None, window)
        return out.astype(jnp.float32).sum()

    kv = shape(1, 4096, 2, head_dim)
    q, segment_ids = shape(1, 4096, 8, head_dim), shape(1, 4096, dtype=jnp.int32)
    name = f"splash attention, head {head_dim}, window {window}"
    return Case(name, kernel, jax.grad(total, (0, 1, 2)), (q, kv, kv, segment_ids))


def grouped(tokens: int, num_experts: int) -> Case:
    """Values and gradients of 8 of some experts for each token, of Qwen3-30B-A3B's widths."""

    def total(x: Any, weights: Any, chosen: Any, *matrices: Any) -> Any:
        out = local_experts(x, weights, chosen, *matrices, kernel="tpu")
        return out.astype(jnp.float32).sum()

    narrow, wide = (shape(num_experts, *sizes) for sizes in ((2048, 768), (768, 2048)))
    chosen = shape(1, tokens, 8, dtype=jnp.int32)
    shapes = (shape(1, tokens, 2048), shape(1, tokens, 8), chosen, narrow, narrow, wide)
    name = f"experts, {tokens} tokens, {num_experts} experts"
    return Case(name, "tpu", jax.grad(total, (0, 3, 4, 5)), shapes)


def logprobs() -> Case:
    def total(hidden: Any, head: Any, tokens: Any) -> Any:
        found, _ = token_logprobs(hidden, head, tokens, jnp.ones_like(tokens), chunk_tokens=1024)
        return found.sum()

    shapes = (shape(1, 4096, 1536), shape(1536, 151_936), shape(1, 4096, dtype=jnp.int32))
    return Case("log-probs in chunks", "none", jax.grad(total, (0, 1)), shapes)


def cases() -> Iterator[Case]:
    for dtype in KV_DTYPES:
        yield from (paged(dtype, head, 16, 7) for head in HEAD_SIZES)
        yield from (paged(dtype, 128, page, 4) for page in PAGE_SIZES if page != 16)
        yield from (paged(dtype, 128, 16, group) for group in GROUPS if group != 7)
        yield paged(dtype, 128, 16, 8, window=1024)
        yield latent(dtype)
    yield from (packed(head, window) for head in (64, 128) for window in (None, 1024))
    yield from (grouped(1024, 16), grouped(8192, 128))
    yield logprobs()


def compile_case(case: Case, mesh: Mesh) -> dict[str, object]:
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), case.shapes
    )
    on_each = partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec())
    function = on_each(case.function, out_specs=PartitionSpec(), check_vma=False)
    start_s = time.process_time()
    found: dict[str, object] = {"name": case.name, "kernel": case.kernel}
    try:
        text = jax.jit(function).lower(*shapes).compile().as_text()
        assert text is not None
        found["num_kernels"] = text.count('custom_call_target="tpu_custom_call"')
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        found["error"] = str(error)[:500]
    return found | {"compile_cpu_s": round(time.process_time() - start_s, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the name of a case")
    only = parser.parse_args().only
    num_failed = 0
    for topology in TOPOLOGIES:
        mesh = Mesh(np.array(compile_only_devices(topology)), ("devices",))
        found = [compile_case(case, mesh) for case in cases() if only in case.name]
        num_failed += sum("error" in each for each in found)
        append("tpu_kernels", {"topology": topology, "cases": found})
    sys.exit(f"{num_failed} cases do not compile" if num_failed else 0)


if __name__ == "__main__":
    main()
