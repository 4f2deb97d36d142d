"""Packed attention by the kernels that jax brings for GPUs and TPUs; memory grows linearly with the
row.

Axes: B rows, T tokens, N query heads, K key-value heads, H head size.
"""

from __future__ import annotations

import warnings
from typing import cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from areal_jax.models.blocked_attention import ATTENDED

TILE = 128
"""Rows are padded to a multiple of this: the smallest block of either kernel that fills the
hardware."""

LANES = 128
"""Splash attention takes heads of a multiple of this."""


def gpu_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    *,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """The Pallas kernel for GPUs, causal within segments. jax's documented door to cuDNN knows no
    segments but by a mask of [T, T]. The kernel knows no grouped heads, so that keys and values are
    repeated for the heads that share them."""
    with warnings.catch_warnings():
        # Since 0.12 jax names another package as the place for it, but brings it still. Only who
        # has a GPU needs it.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as gpu
    T, N, H = q.shape[1:]
    k, v = (jnp.repeat(x, N // k.shape[2], axis=2) for x in (k, v))
    q, k, v, segment_ids = (_padded(x) for x in (q, k, v, segment_ids))
    out = cast(
        Array, gpu.mha(q, k, v, segment_ids, sm_scale=H**-0.5, causal=True, interpret=interpret)
    )
    return out[:, :T]


def tpu_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Splash attention, causal within segments; a query sees `window` keys, itself the last of
    them, or all."""
    T, N, H = q.shape[1:]
    q, k, v, segment_ids = (
        _padded(x) for x in (q * jnp.asarray(H**-0.5, q.dtype), k, v, segment_ids)
    )
    # Zeros beyond the head's size add nothing to a score, and are cut off the result.
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
