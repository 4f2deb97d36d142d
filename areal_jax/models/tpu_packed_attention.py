"""Packed attention with jax's kernel for TPUs; memory is linear in the row length.

Axes: B rows, T tokens, N query heads, K key-value heads, H head size.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from areal_jax.models.blocked_attention import ATTENDED

TILE = 128
"""Rows are padded to a multiple of this, the smallest efficient block."""

LANES = 128
"""Head sizes of splash attention are multiples of this."""


def tpu_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Compute causal attention within segments with splash attention.

    Args:
        q: queries.
        k: keys.
        v: values.
        segment_ids: segment of each token.
        window: number of keys that a query sees, including its own; None for all.
        interpret: run the kernel in interpret mode, without a TPU.
    """
    T, N, H = q.shape[1:]
    q, k, v, segment_ids = (
        _padded(x) for x in (q * jnp.asarray(H**-0.5, q.dtype), k, v, segment_ids)
    )
    # Zero padding of heads does not change scores, and is removed from the result.
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -H % LANES))).swapaxes(1, 2) for x in (q, k, v)
    )
    shape = (q.shape[2], q.shape[2])
    causal = (
        masks.CausalMask(shape)
        if window is None
        else masks.LocalMask(shape, (window - 1, 0), offset=0)
    )
    block = next(size for size in (512, 256, TILE) if shape[0] % size == 0)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([causal] * N),
        block_sizes=splash.BlockSizes(
            **dict.fromkeys(
                ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"),
                block,
            )
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
    run = jax.vmap(lambda q, k, v, ids: cast(Array, kernel(q, k, v, splash.SegmentIds(ids, ids))))
    out = run(q, k, v, segment_ids)
    return out.swapaxes(1, 2)[:, :T, :, :H]


def _padded(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), *((0, 0),) * (x.ndim - 2)))
