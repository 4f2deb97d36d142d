"""Attention under a mask, and over sequences packed into rows: one formula, and for each platform
what computes it best.

Axes: B rows, T query tokens, S key tokens, N query heads, K key-value heads, G = N / K, H head
    size.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.blocked_attention import ATTENDED, blocked_attention
from areal_jax.models.decoder import Attend
from areal_jax.models.kernel_attention import TILE, gpu_attention, tpu_attention
from areal_jax.parallel.sharding import Rules, num_shards, sharding

Kernel: TypeAlias = Literal["dense", "blocked", "gpu", "tpu"]
"""dense: scores of a whole row at once. blocked: of two blocks at a time, in plain XLA. gpu, tpu:
as blocked, by a kernel."""

LONGEST_DENSE_ROW = 512
"""Tokens. Measured on two CPU cores, values and gradients of 2 rows of 4 heads of 32: at 160 tokens
dense takes 1.3 ms where blocked takes 4; at 512 they meet; at 1024 with segments of 128 tokens
dense takes 31 ms where blocked takes 9."""


def choose_kernel(platform: str, row_tokens: int) -> Kernel:
    """What computes packed attention fastest on devices of `platform`, as jax names it, in rows of
    this length."""
    if row_tokens <= (LONGEST_DENSE_ROW if platform == "cpu" else TILE):
        return "dense"
    match platform:
        case "gpu" | "cuda":
            return "gpu"
        case "tpu":
            return "tpu"
        case _:
            return "blocked"


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K H S"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T N H"]:
    """softmax(q·k / sqrt(H)) · v over the keys where the mask is true; query head n reads key-value
    head n // G.

    Keys and values come as both products read them, so that a cache kept in these layouts is never
    transposed. The softmax is taken in float32. A query that may see no key gets the mean of all
    values, never nan."""
    B, T, N, H = q.shape
    K, S = k.shape[1], k.shape[3]
    G = N // K
    q = (
        (q * jnp.asarray(H**-0.5, q.dtype))
        .reshape(B, T, K, G, H)
        .transpose(0, 2, 3, 1, 4)
        .reshape(B, K, G * T, H)
    )
    scores = jnp.matmul(q, k, preferred_element_type=jnp.float32).reshape(B, K, G, T, S)
    # The lowest finite number instead of -inf: a row without any key would become nan, also in its
    # gradient.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    # A shift changes no softmax, so no gradient flows through it.
    exp = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))).reshape(
        B, K, G * T, S
    )
    # Divided after the product: [.., H] numbers instead of [.., S], half the time of a training
    # step's attention on a CPU.
    out = jnp.matmul(exp.astype(v.dtype), v, preferred_element_type=jnp.float32) / exp.sum(
        axis=-1, keepdims=True
    )
    return out.astype(q.dtype).reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def packed_attention(segment_ids: Int[Array, "B T"], kernel: Kernel = "dense") -> Attend:
    """Attend causally within each segment of a row; segments never see each other. Takes and
    returns no cache.

    Segment 0 is padding: what comes out of it is finite and means nothing. A query sees as many
    keys as its layer's window says, itself the last of them; where there is no window, all."""

    def attend(
        q: Array, k: Array, v: Array, cache: None, window: int | None = None
    ) -> tuple[Array, None]:
        match kernel:
            case "dense":
                out = checkpoint_name(_dense_attention(q, k, v, segment_ids, window), ATTENDED)
            case "tpu":
                out = tpu_attention(q, k, v, segment_ids, window=window)
            case "gpu" if window is None:
                out = gpu_attention(q, k, v, segment_ids)
            case _:  # the GPU's kernel knows no window
                out = blocked_attention(q, k, v, segment_ids, window)
        return out, None

    return attend


def sharded_attention(
    segment_ids: Int[Array, "B T"], kernel: Kernel, mesh: Mesh, rules: Rules
) -> Attend:
    """`packed_attention` on a mesh, where every device attends with rows and heads of its own.

    Where `rules` cut the tokens of a row, they are exchanged for heads before, and back after
    (DeepSpeed-Ulysses, arXiv:2309.14509): any kernel then sees whole rows, and causality leaves
    every device as much to do. Fewer key-value heads than devices are repeated. Activations are
    held to their cut on both sides: else the compiler may gather them over all shards and leave the
    weights, which are cut over the same devices, where they are."""
    if mesh.size == 1:
        return packed_attention(segment_ids, kernel)

    def cut(x: Array, *axes: str | None) -> Array:
        return jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape, rules))

    def attend(
        q: Array, k: Array, v: Array, cache: None, window: int | None = None
    ) -> tuple[Array, None]:
        q = cut(q, "batch", "tokens", "heads")
        k, v = (cut(x, "batch", "tokens", "kv_heads") for x in (k, v))
        by_rows = sharding(mesh, ("batch", None), segment_ids.shape, rules).spec
        by_heads = sharding(mesh, ("batch", None, "attending_heads"), q.shape, rules).spec
        if by_heads[2] is not None:
            K, shards = k.shape[2], num_shards(mesh, "attending_heads", rules)
            k, v = (jnp.repeat(x, math.lcm(K, shards) // K, axis=2) for x in (k, v))
        run = jax.shard_map(
            lambda q, k, v, ids: packed_attention(ids, kernel)(q, k, v, None, window)[0],
            mesh=mesh,
            in_specs=(by_heads, by_heads, by_heads, by_rows),
            out_specs=by_heads,
            check_vma=False,  # kernels do not say over which axes their results vary
        )
        return cut(run(q, k, v, segment_ids), "batch", "tokens", "heads"), None

    return attend


def _dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    window: int | None,
) -> Float[Array, "B T N H"]:
    T = q.shape[1]
    sees = jnp.tril(jnp.ones((T, T), bool))
    if window is not None:
        sees &= ~jnp.tri(T, T, -window, dtype=bool)
    mask = sees & (segment_ids[:, :, None] == segment_ids[:, None, :])
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    # Queries in blocks, each against the keys up to its own end: nearly half of the products are
    # masked otherwise.
    spans = [(start, min(start + 128, T)) for start in range(0, T, 128)]
    outs = [
        masked_attention(q[:, i:j], k[..., :j], v[:, :, :j], mask[:, i:j, :j]) for i, j in spans
    ]
    return jnp.concatenate(outs, axis=1)
