"""Kernels that Mosaic compiles, for a TPU slice that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.models.adapted import Adapted
from areal_jax.models.moe import local_experts
from areal_jax.models.paged_attention import Pages, choose_paged_kernel, stored_head_dim
from areal_jax.models.tpu_paged_attention import tpu_paged_attention
from areal_jax.parallel.topologies import compile_only_devices


def compile_for(topology: str, function: Callable[..., Any], *shapes: Any) -> jax.stages.Compiled:
    """Compile a function for each device of a slice alone."""
    mesh = Mesh(np.array(compile_only_devices(topology)), ("devices",))
    everywhere = PartitionSpec()
    on_each = jax.shard_map(
        function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    placed = NamedSharding(mesh, everywhere)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), shapes
    )
    return jax.jit(on_each).lower(*shapes).compile()


@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "is_latent"),
    [
        ("bfloat16", 64, 7, False),
        ("int8", 80, 1, False),
        ("int8", 128, 8, False),
        ("float8_e4m3fn", 96, 4, False),
        ("int8", 576, 16, True),
    ],
)
def test_paged_attention_of_every_kv_dtype_compiles_to_a_kernel(
    topology: str, dtype: str, head_dim: int, group: int, is_latent: bool
) -> None:
    kernel = choose_paged_kernel("tpu", head_dim, 16, is_latent=is_latent)
    page = jax.ShapeDtypeStruct((2, 65, 16, stored_head_dim(kernel, head_dim)), dtype)
    scales = None if dtype == "bfloat16" else jax.ShapeDtypeStruct(page.shape[:3], jnp.float32)
    pages = Pages(page, None, scales) if is_latent else Pages(page, page, scales, scales)
    q = jax.ShapeDtypeStruct((8, 2 * group, head_dim), jnp.bfloat16)
    table, lengths = (jax.ShapeDtypeStruct(size, jnp.int32) for size in ((8, 8), (8,)))

    def attend(q: Any, pages: Pages, table: Any, lengths: Any) -> Any:
        return tpu_paged_attention(q, *pages, table, lengths, window=100)

    text = compile_for(topology, attend, q, pages, table, lengths).as_text()
    assert text is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1


NUM_TOKENS = 256
"""Of two experts each. There is then a row of padding for one of a token, the most there may be."""


def test_gradients_of_experts_do_not_multiply_rows_of_other_experts() -> None:
    def flops(num_experts: int) -> float:
        matrices = [
            jax.ShapeDtypeStruct((num_experts, *sizes), jnp.bfloat16)
            for sizes in ((256, 128), (256, 128), (128, 256))
        ]
        x = jax.ShapeDtypeStruct((1, NUM_TOKENS, 256), jnp.bfloat16)
        weights = jax.ShapeDtypeStruct((1, NUM_TOKENS, 2), jnp.bfloat16)
        chosen = jax.ShapeDtypeStruct((1, NUM_TOKENS, 2), jnp.int32)

        def total(x: Any, weights: Any, chosen: Any, *matrices: Any) -> Any:
            out = local_experts(x, weights, chosen, *matrices, kernel="tpu")
            return out.astype(jnp.float32).sum()

        grad = jax.grad(total, (0, 3, 4, 5))
        cost = compile_for("v5e:2x2", grad, x, weights, chosen, *matrices).cost_analysis()
        assert cost is not None
        return cost["flops"]

    # Each row is multiplied by 9 matrices of 256 x 128, forward and backward; at most two rows of
    # padding for one of a token.
    one_row = 2 * 256 * 128
    least = 2 * NUM_TOKENS * 9 * one_row
    for num_experts in (4, 16):
        assert least <= flops(num_experts) <= 1.1 * 2 * least


@pytest.mark.parametrize(("rank", "num_experts"), [(4, 16), (16, 4)])
def test_expert_adapters_do_not_multiply_rows_of_other_experts(rank: int, num_experts: int) -> None:
    def flops() -> float:
        def whole(*sizes: int) -> Any:
            return jax.ShapeDtypeStruct((num_experts, *sizes), jnp.bfloat16)

        x, weights = (jax.ShapeDtypeStruct((1, NUM_TOKENS, n), jnp.bfloat16) for n in (256, 2))
        chosen = jax.ShapeDtypeStruct((1, NUM_TOKENS, 2), jnp.int32)
        matrices = [
            Adapted(whole(D, F), whole(D, rank), whole(rank, F), 2.0)
            for D, F in ((256, 128), (256, 128), (128, 256))
        ]

        def total(factors: Any, x: Any, weights: Any, chosen: Any, matrices: Any) -> Any:
            gate, up, down = (
                Adapted(w.w, a, b, w.scale) for w, (a, b) in zip(matrices, factors, strict=True)
            )
            y = local_experts(x, weights, chosen, gate, up, down, kernel="tpu")
            return y.astype(jnp.float32).sum()

        factors = [(each.a, each.b) for each in matrices]
        grad = jax.grad(total, (0, 1))
        cost = compile_for("v5e:2x2", grad, factors, x, weights, chosen, matrices).cost_analysis()
        assert cost is not None
        return cost["flops"]

    # Frozen matrices are multiplied forward and backward, 6 times a row, factors 9 times; the sum
    # of the last product needs no product of its last factor.
    one_row = 2 * (6 * 256 * 128 + 9 * rank * (256 + 128) - rank * 256)
    assert 2 * NUM_TOKENS * one_row <= flops() <= 1.1 * 2 * 2 * NUM_TOKENS * one_row
