"""Products of groups of rows in kernels for GPUs, in interpret mode, against loops over rows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.models import moe
from areal_jax.models.gpu_grouped_products import gpu_grouped_gradient, gpu_grouped_product
from areal_jax.models.moe import choose_grouped_kernel, local_experts, row_layout

INPUTS = 48
BLOCKS_OF_GROUPS = (2, 0, 3, 1)


def draw(*shape: int, seed: int) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@pytest.mark.parametrize(("block", "outputs"), [(16, 96), (64, 5), (128, 96)])
def test_products_and_gradients_match_loops_over_rows(block: int, outputs: int):
    sizes = np.array(BLOCKS_OF_GROUPS, np.int32) * np.int32(block)
    # Two blocks of rows after all groups.
    num_rows = (sum(BLOCKS_OF_GROUPS) + 2) * block
    groups = np.repeat(np.arange(len(sizes)), sizes)
    x, dy = draw(num_rows, INPUTS, seed=0), draw(num_rows, outputs, seed=1)
    w = draw(len(sizes), INPUTS, outputs, seed=2)
    y, dx, dw = (np.zeros(each.shape) for each in (dy, x, w))
    exact_x, exact_dy, exact_w = map(np.asarray, (x, dy, w))
    for row, group in enumerate(groups):
        y[row] = exact_x[row] @ exact_w[group]
        dx[row] = exact_w[group] @ exact_dy[row]
        dw[group] += np.outer(exact_x[row], exact_dy[row])

    @jax.jit
    def run(x: jax.Array, dy: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        product = partial(gpu_grouped_product, interpret=True)
        return (
            product(x, w, sizes, block),
            product(dy, w, sizes, block, is_transposed=True),
            gpu_grouped_gradient(x, dy, sizes, block, jnp.float32, interpret=True),
        )

    for each, expected in zip(run(x, dy, w, sizes), (y, dx, dw), strict=True):
        np.testing.assert_allclose(each, expected, atol=1e-4)


def test_matrices_of_8_bits_are_converted_exactly():
    sizes = jax.device_put(np.array([16, 32], np.int32))
    x = np.asarray(draw(48, INPUTS, seed=0)).astype(jnp.bfloat16)
    rng = np.random.default_rng(3)
    w = rng.integers(-127, 128, (2, INPUTS, 96), dtype=np.int8)
    product = jax.jit(lambda x, w: gpu_grouped_product(x, w, sizes, 16, interpret=True))
    found, expected = product(x, w), product(x, w.astype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("num_tokens", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_experts_with_the_gpu_kernel_match_blocks(num_tokens: int, monkeypatch: pytest.MonkeyPatch):
    for name in ("gpu_grouped_product", "gpu_grouped_gradient"):
        monkeypatch.setattr(moe, name, partial(getattr(moe, name), interpret=True))
    gate, up = (np.asarray(draw(6, 32, 16, seed=seed)) / 6 for seed in (1, 2))
    down, x = np.asarray(draw(6, 16, 32, seed=3)) / 4, draw(1, num_tokens, 32, seed=4)
    weights = np.random.default_rng(5).random((1, num_tokens, 2)).astype(np.float32)
    # Experts 1 to 4 of six are local, and expert 4 has no tokens.
    chosen = np.random.default_rng(6).permuted(np.tile([0, 1, 2, 3, 5], (num_tokens, 1)), axis=1)

    def gradients(kernel: moe.GroupedKernel) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def loss(x: jax.Array, *matrices: jax.Array) -> jax.Array:
            local, ids = (each[1:5] for each in matrices), jnp.asarray(chosen[None, :, :2])
            out = local_experts(x, jnp.asarray(weights), ids, *local, first=1, kernel=kernel)
            return (out * jnp.cos(jnp.arange(32))).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=range(4)))(x, gate, up, down)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        gradients("gpu"),
        gradients("blocks"),
    )


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=9),
    st.sampled_from(["blocks", "gpu", "tpu"]),
)
def test_rows_of_all_experts_fit_the_layout(counts: list[int], kernel: moe.GroupedKernel):
    total = sum(counts)
    block, num_rows = row_layout(max(total, 1), len(counts), kernel)
    assert sum(-(-each // block) * block for each in counts) <= num_rows
    assert block & (block - 1) == 0
    if kernel == "gpu":
        assert 16 <= block <= 128


def test_kernel_of_experts_is_chosen_by_platform_and_sizes():
    assert choose_grouped_kernel("cpu", 128, 2048, 768) == "blocks"
    assert choose_grouped_kernel("tpu", 128, 2048, 768) == "tpu"
    assert choose_grouped_kernel("gpu", 128, 2048, 768) == "gpu"
    assert choose_grouped_kernel("cuda", 32, 2880, 2880) == "gpu"
    # More numbers than 32 bits count.
    assert choose_grouped_kernel("gpu", 256, 7168, 2048) == "blocks"
