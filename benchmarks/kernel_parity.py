"""Kernels that this machine's devices use, against the plain formula.

    python benchmarks/kernel_parity.py

For each case the kernel that a run would choose is compared with the formula, which the host's
processors compute in float32 (an accelerator takes a minute to compile it) from the same inputs,
which are bfloat16 (float32 on a CPU): attention of packed rows with its gradients (with windows,
sinks, shared prefixes, and the heads of latent attention), attention to pages of the KV cache in
each of its dtypes, products of experts with their gradients, and log-probs in chunks. The error is
the largest difference, relative to the largest number of the formula; the bound is 2 % in bfloat16
and 0.001 % in float32. A case whose kernel is `plain`, `dense`, `blocked` or `blocks` has no kernel
of its own on this device. Appends one line to benchmarks/results/kernel_parity.jsonl; exits with 1
if a case exceeds its bound.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from results import append
from rich.console import Console
from rich.table import Table

from areal_jax.models.attention import choose_kernel, masked_attention, packed_attention
from areal_jax.models.blocked_attention import Visibility
from areal_jax.models.moe import GroupedKernel, choose_grouped_kernel, local_experts
from areal_jax.models.paged_attention import (
    Pages,
    attend_to_pages,
    choose_paged_kernel,
    quantize,
    read_pages,
    stored_head_dim,
)
from areal_jax.models.paged_kernels import gpu_paged_attention
from areal_jax.models.tpu_paged_attention import tpu_paged_attention
from areal_jax.rl.logprobs import token_logprobs

NUM_TOKENS = 2048
PAGE_TOKENS, PAGES_PER_ROW = 16, 64


class Case(NamedTuple):
    """A kernel's result beside the formula's."""

    name: str
    kernel: str
    error: float
    """Largest difference, relative to the largest number of the formula; NaN if it raised."""
    raised: str = ""


def compare(name: str, kernel: str, compute: Callable[[], Any], expected: Any) -> Case:
    """Compare two trees of arrays, of which `compute` returns the kernel's."""
    try:
        found = jax.block_until_ready(compute())
    except Exception as error:  # What a kernel raises here is a result, and others have their turn.
        return Case(name, kernel, math.nan, f"{type(error).__name__}: {error}"[:1000])
    errors = [
        float(np.abs(np.asarray(x, np.float32) - y).max() / np.abs(y).max())
        for x, y in zip(
            jax.tree.leaves(found),
            [np.asarray(each, np.float32) for each in jax.tree.leaves(expected)],
            strict=True,
        )
    ]
    return Case(name, kernel, max(errors))


def packed(platform: str, dtype: jnp.dtype, num_tokens: int = NUM_TOKENS) -> Iterator[Case]:
    """Attention of packed rows: values and gradients."""
    rng = np.random.default_rng(0)
    segments = np.repeat([1, 2, 3, 0], num_tokens // 4)[None].astype(np.int32)
    kernel = choose_kernel(platform, num_tokens)
    # A prefix of half of the row, which four branches share.
    places = np.arange(num_tokens, dtype=np.int32)
    branch = num_tokens // 8
    is_prefix = places < num_tokens // 2
    tree = Visibility(
        jnp.asarray(np.where(is_prefix, num_tokens, (places // branch + 1) * branch)[None]),
        jnp.asarray(np.where(is_prefix, places, num_tokens // 2 + places % branch)[None]),
    )
    for head_dim, window, has_sinks, shared in (
        *((64, None, False, None), (128, None, False, None), (128, 256, False, None)),
        *((64, 256, True, None), (128, None, False, tree), (256, None, False, None)),
        (576, None, False, None),
    ):
        sinks = rng.normal(size=8).astype(np.float32) if has_sinks else None
        q, k, v = (
            rng.normal(size=(1, num_tokens, heads, head_dim)).astype(dtype) for heads in (8, 2, 2)
        )
        weight = rng.normal(size=q.shape).astype(np.float32)

        def total(
            qkv: tuple[Array, Array, Array],
            sinks: Array | None,
            weight: Array,
            shared: Visibility | None,
            name: Any,
            window: int | None,
        ) -> tuple[Array, Array]:
            segment_ids = jnp.asarray(segments)
            out, _ = packed_attention(segment_ids, name, shared)(*qkv, None, window, sinks)
            if shared is None:
                out = jnp.where((segment_ids > 0)[..., None, None], out, 0)
            return (out * weight).sum(), out

        grad = jax.jit(jax.grad(total, has_aux=True), static_argnums=(4, 5))
        exact = tuple(each.astype(np.float32) for each in (q, k, v))
        with jax.default_device(jax.devices("cpu")[0]):
            expected = grad(exact, sinks, weight, shared, "dense", window)
        # The kernel for TPUs knows no shared prefixes.
        used = "blocked" if kernel == "tpu" and shared is not None else kernel
        yield compare(
            f"packed attention, head {head_dim}, window {window}"
            f"{', sinks' if has_sinks else ''}{', shared prefix' if shared else ''}",
            used,
            partial(grad, (q, k, v), sinks, weight, shared, used, window),
            expected,
        )


def paged(platform: str, dtype: jnp.dtype) -> Iterator[Case]:
    """Attention of one new token of each row to its pages."""
    rng = np.random.default_rng(1)
    lengths = jnp.asarray([1, 70, 300, PAGES_PER_ROW * PAGE_TOKENS], jnp.int32)
    num_pages = len(lengths) * PAGES_PER_ROW
    table = jnp.asarray(rng.permutation(num_pages).reshape(len(lengths), -1), jnp.int32)

    @jax.jit
    def formula(q: Array, pages: Pages, table: Array, lengths: Array) -> Array:
        k, v = read_pages(pages, table, jnp.float32, q.shape[-1])  # [K, B, S, H]
        mask = jnp.arange(k.shape[2]) < lengths[:, None, None]
        return masked_attention(q[:, None], k.transpose(1, 0, 3, 2), v.swapaxes(0, 1), mask)[:, 0]

    plain = jax.jit(attend_to_pages)
    for head_dim in (64, 80, 96, 128):
        q = jnp.asarray(rng.normal(size=(len(lengths), 8, head_dim)), dtype)
        exact_keys, exact_values = (
            jnp.asarray(rng.normal(size=(2, num_pages, PAGE_TOKENS, head_dim)), dtype)
            for _ in range(2)
        )
        for kv_dtype in (dtype, jnp.dtype("int8"), jnp.dtype("float8_e4m3fn")):
            is_narrow = kv_dtype != dtype
            kernel = choose_paged_kernel(platform, head_dim, PAGE_TOKENS)
            keys, values, key_scales, value_scales = exact_keys, exact_values, None, None
            if is_narrow:
                keys, key_scales = quantize(exact_keys, kv_dtype)
                values, value_scales = quantize(exact_values, kv_dtype)
            missing = stored_head_dim(kernel, head_dim) - head_dim
            keys, values = (
                jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) for x in (keys, values)
            )
            pages = Pages(keys, values, key_scales, value_scales)
            with jax.default_device(jax.devices("cpu")[0]):
                expected = formula(
                    np.asarray(q, np.float32),
                    Pages(*(x if x is None else np.asarray(x) for x in pages)),
                    np.asarray(table),
                    np.asarray(lengths),
                )
            match kernel:
                case "gpu":
                    compute = partial(gpu_paged_attention, q, *pages, table, lengths)
                case "tpu":
                    compute = partial(tpu_paged_attention, q, *pages, table, lengths)
                case "plain":
                    compute = partial(plain, q[:, None], pages, table, lengths - 1)
                    expected = expected[:, None]
            yield compare(
                f"paged attention, head {head_dim}, KV {kv_dtype.name}", kernel, compute, expected
            )


def experts(platform: str, dtype: jnp.dtype) -> Iterator[Case]:
    """Two of eight experts for each token, as in a decode step and in a packed row."""
    rng = np.random.default_rng(3)
    width, inner, num_experts = 128, 192, 8
    gate, up = (
        jnp.asarray(rng.normal(size=(num_experts, width, inner)) * width**-0.5, dtype)
        for _ in range(2)
    )
    down = jnp.asarray(rng.normal(size=(num_experts, inner, width)) * inner**-0.5, dtype)
    kernel = choose_grouped_kernel(platform, *gate.shape)
    for num_tokens in (4, NUM_TOKENS):
        x = jnp.asarray(rng.normal(size=(1, num_tokens, width)), dtype)
        logits = rng.normal(size=(1, num_tokens, num_experts))
        chosen = jnp.asarray(np.argsort(logits)[..., :2], jnp.int32)
        weights = jnp.asarray(rng.random(size=chosen.shape), jnp.float32)
        cotangent = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

        def total(
            arrays: tuple[Array, ...],
            weights: Array,
            chosen: Array,
            cotangent: Array,
            kernel: GroupedKernel,
        ) -> tuple[Array, Array]:
            x, *matrices = arrays
            out = local_experts(x, weights, chosen, *matrices, kernel=kernel)
            return (out.astype(jnp.float32) * cotangent).sum(), out

        grad = jax.jit(jax.grad(total, has_aux=True), static_argnums=4)
        arrays = x, gate, up, down
        with jax.default_device(jax.devices("cpu")[0]):
            exact = jax.tree.map(
                lambda each: jnp.asarray(np.asarray(each, np.float32)), (*arrays, weights)
            )
            others = (np.asarray(chosen), np.asarray(cotangent))
            expected = grad(exact[:4], exact[4], *others, "blocks")
        yield compare(
            f"products of experts, {num_tokens} tokens",
            kernel,
            partial(grad, arrays, weights, chosen, cotangent, kernel),
            expected,
        )


def logprobs(dtype: jnp.dtype) -> Iterator[Case]:
    """Log-probs in chunks against the whole softmax."""
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.normal(size=(1, 512, 256)), dtype)
    head = jnp.asarray(rng.normal(size=(256, 32_000)) / 16, dtype)
    tokens = jnp.asarray(rng.integers(0, 32_000, (1, 512)), jnp.int32)
    with jax.default_device(jax.devices("cpu")[0]):
        logits = np.asarray(hidden, np.float32) @ np.asarray(head, np.float32)
        whole = jax.nn.log_softmax(logits[:, :-1])
        expected = jnp.take_along_axis(whole, np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]

    def in_chunks() -> Array:
        found, _ = token_logprobs(hidden, head, tokens, jnp.ones_like(tokens), chunk_tokens=64)
        return found[:, 1:]

    yield compare("log-probs in chunks", "plain", in_chunks, expected)


def main() -> None:
    device = jax.devices()[0]
    dtype = jnp.dtype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)
    bound = 1e-5 if device.platform == "cpu" else 0.02
    cases = [
        *packed(device.platform, dtype),
        *paged(device.platform, dtype),
        *experts(device.platform, dtype),
        *logprobs(dtype),
    ]
    append(
        "kernel_parity",
        {"dtype": dtype.name, "bound": bound, "cases": [case._asdict() for case in cases]},
    )
    table = Table("case", "kernel", "error", title=f"{device.device_kind}, bound {bound:g}")
    for case in cases:
        table.add_row(case.name, case.kernel, case.raised or f"{case.error:.1e}")
    Console(stderr=True).print(table)
    wrong = [case.name for case in cases if not case.error <= bound]
    sys.exit(f"above the bound of {bound:g}: {'; '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
