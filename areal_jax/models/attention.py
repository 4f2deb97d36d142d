"""Attention with a mask, and packed attention with the best kernel for each platform.

Axes: B rows, T query tokens, S key tokens, N query heads, K key-value heads, G = N / K, H head
size.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.blocked_attention import ATTENDED, Visibility, blocked_attention
from areal_jax.models.decoder import Attend
from areal_jax.models.gpu_packed_attention import gpu_attention
from areal_jax.models.tpu_packed_attention import TILE, tpu_attention
from areal_jax.parallel.sharding import Rules, num_shards, sharding

Kernel: TypeAlias = Literal["dense", "blocked", "gpu", "tpu"]
"""dense: all scores of a row at once. blocked: scores of one pair of blocks at a time, in plain
XLA. gpu, tpu: like blocked, in a kernel.
"""

MAX_DENSE_ROW_TOKENS = 512
"""Longest row with dense attention on CPUs. Measured on two cores, values and gradients of 2 rows
of 4 heads of 32: at 160 tokens dense takes 1.3 ms and blocked 4; at 512 both take the same time; at
1024 with segments of 128 tokens dense takes 31 ms and blocked 9."""


def choose_kernel(platform: str, row_tokens: int) -> Kernel:
    """Choose the fastest kernel of packed attention.

    Args:
        platform: platform of the devices, as named by jax.
        row_tokens: length of a row.
    """
    if row_tokens <= (MAX_DENSE_ROW_TOKENS if platform == "cpu" else TILE):
        return "dense"
    match platform:
        case "gpu" | "cuda":
            return "gpu"
        case "tpu":
            return "tpu"
        case _:
            return "blocked"


def find_slow_attention(
    platform: str, kernel: Kernel, config: ModelConfig, *, shares_prefixes: bool = False
) -> str:
    """Return why packed attention of some layers runs without a kernel on an accelerator; empty
    where all run in one.

    Args:
        platform: platform of the devices, as named by jax.
        kernel: see `choose_kernel`.
        config: architecture.
        shares_prefixes: whether sequences of a row share tokens.
    """
    if platform == "cpu" or kernel in ("dense", "gpu"):
        return ""
    if shares_prefixes:
        return "the kernel tpu knows no shared prefixes; set trainer.share_prefixes=never to use it"
    if config.traits.has_sinks:
        return f"the kernel {kernel} supports no attention sinks"
    return ""


def masked_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K H S"],
    v: Float[Array, "B K S H"],
    mask: Bool[Array, "B T S"],
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Compute softmax(q·k / sqrt(H)) · v over the keys where the mask is true.

    The sink of a head is the score of one more key, whose value is 0 (arXiv:2309.17453, with a
    learned score as in GPT-OSS).

    Query head n uses key-value head n // G. The layouts of keys and values are those of the
    products, so that a cache in these layouts is never transposed. The softmax is computed in
    float32. The result of a query without keys is the mean of all values, never nan.
    """
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
    # The lowest finite number instead of -inf: a query without keys would give nan, also in the
    # gradient.
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    # A shift does not change the softmax, so it needs no gradient.
    highest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(K, G, 1, 1)
        highest = jnp.maximum(highest, jax.lax.stop_gradient(sinks))
    exp = jnp.exp(scores - highest).reshape(B, K, G * T, S)
    total = exp.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - highest).reshape(B, K, G * T, 1)
    # Division after the product affects [.., H] numbers instead of [.., S], which halves the time
    # of attention in a training step on a CPU.
    out = jnp.matmul(exp.astype(v.dtype), v, preferred_element_type=jnp.float32) / total
    return out.astype(q.dtype).reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def packed_attention(
    segment_ids: Int[Array, "B T"], kernel: Kernel = "dense", shared: Visibility | None = None
) -> Attend:
    """Make causal attention within each segment of a row; it has no cache.

    The outputs of segment 0, which is padding, are finite but meaningless. With a window, a query
    sees that many keys, including its own.

    Args:
        segment_ids: segment of each token.
        kernel: see `choose_kernel`.
        shared: keys that each query sees, if sequences share tokens, which the kernel "tpu" does
            not support; None: those of its segment.
    """
    assert shared is None or kernel != "tpu"
    # Once for all layers.
    visibility = Visibility.of_segments(segment_ids) if shared is None else shared

    def attend(
        q: Array,
        k: Array,
        v: Array | None,
        cache: None,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, None]:
        v = k if v is None else v
        match kernel:
            case "dense":
                out = _dense_attention(q, k, v, visibility, window, sinks)
                out = checkpoint_name(out, ATTENDED)
            case "tpu" if sinks is None:
                out = tpu_attention(q, k, v, segment_ids, window=window)
            case "gpu":
                out = gpu_attention(q, k, v, visibility, window, sinks)
            case _:  # jax's kernel for TPUs does not support sinks
                out = blocked_attention(q, k, v, visibility, window, sinks=sinks)
        return out, None

    return attend


def sharded_attention(
    segment_ids: Int[Array, "B T"],
    kernel: Kernel,
    mesh: Mesh,
    rules: Rules,
    shared: Visibility | None = None,
) -> Attend:
    """Make `packed_attention` on a mesh; each device computes its own rows and heads.

    If `rules` shard the tokens of a row, an all-to-all exchanges them for heads before attention
    and back after it (DeepSpeed-Ulysses, arXiv:2309.14509): any kernel then gets complete rows, and
    the causal work is balanced over devices. Key-value heads are repeated if there are fewer than
    devices. Inputs and outputs are constrained to their sharding: otherwise the compiler may gather
    activations over all shards instead of the weights, which are sharded over the same devices.

    Args:
        segment_ids: segment of each token.
        kernel: see `choose_kernel`.
        mesh: train mesh.
        rules: logical axes to mesh axes.
        shared: see `packed_attention`.
    """
    if mesh.size == 1:
        return packed_attention(segment_ids, kernel, shared)

    def constrain(x: Array, *axes: str | None) -> Array:
        return jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape, rules))

    def attend(
        q: Array,
        k: Array,
        v: Array | None,
        cache: None,
        window: int | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, None]:
        v = k if v is None else v
        q = constrain(q, "batch", "tokens", "heads")
        k, v = (constrain(x, "batch", "tokens", "kv_heads") for x in (k, v))
        by_rows = sharding(mesh, ("batch", None), segment_ids.shape, rules).spec
        by_heads = sharding(mesh, ("batch", None, "attending_heads"), q.shape, rules).spec
        if by_heads[2] is not None:
            K, shards = k.shape[2], num_shards(mesh, "attending_heads", rules)
            k, v = (jnp.repeat(x, math.lcm(K, shards) // K, axis=2) for x in (k, v))
        run = jax.shard_map(
            lambda q, k, v, ids, sinks, shared: packed_attention(ids, kernel, shared)(
                q, k, v, None, window, sinks
            )[0],
            mesh=mesh,
            in_specs=(by_heads, by_heads, by_heads, by_rows, PartitionSpec(by_heads[2]), by_rows),
            out_specs=by_heads,
            check_vma=False,  # kernels do not declare over which axes their results vary
        )
        return constrain(run(q, k, v, segment_ids, sinks, shared), "batch", "tokens", "heads"), None

    return attend


def _dense_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    visibility: Visibility,
    window: int | None,
    sinks: Float[Array, "N"] | None,
) -> Float[Array, "B T N H"]:
    T = q.shape[1]
    places = jnp.arange(T)[:, None]
    mask = jnp.tril(jnp.ones((T, T), bool)) & (places < visibility.until[:, None, :])
    if window is not None:
        mask &= visibility.positions[:, :, None] - visibility.positions[:, None, :] < window
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    # Blocks of queries, each with the keys up to its end; otherwise nearly half of the products are
    # masked.
    spans = [(start, min(start + 128, T)) for start in range(0, T, 128)]
    outs = [
        masked_attention(q[:, i:j], k[..., :j], v[:, :, :j], mask[:, i:j, :j], sinks)
        for i, j in spans
    ]
    return jnp.concatenate(outs, axis=1)
