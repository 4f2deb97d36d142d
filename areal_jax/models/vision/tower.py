"""Vision towers: from the patches of images to the embeddings that replace their tokens.

Axes: B rows, P patches of a row, C numbers of a patch, D width, N heads, H head size, G tokens of
images of a row (P / merged patches), K features that are added to layers of the decoder, T tokens,
E width of the decoder.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from areal_jax.models.activations import gated
from areal_jax.models.vision.config import VisionConfig

MAX_DENSE_PATCHES = 1024
"""Queries of a row whose attention is computed at once; more are computed in blocks."""

_EPS = 1e-6
_THETA = 10000.0


class ImageInputs(NamedTuple):
    """Images of rows of tokens, as the tower reads them."""

    patches: Any
    """Float[Array, "B P C"], or the shape of one."""
    layout: Any
    """Int[Array, "B P 5"]. Of each patch: number of its image in the row, from 1 (0: padding); row
    and column of the patch in its image; height and width of the image."""
    slots: Any
    """Int[Array, "B T"]. Of each token of an image, 1 + its number in the row; 0 of text."""


class ImageFeatures(NamedTuple):
    """Embeddings of the images of rows of tokens."""

    slots: Any
    """As in `ImageInputs`."""
    features: Any
    """Float[Array, "B G K E"]. Embedding of each token of an image, then what is added to its
    hidden states after the first layers of the decoder."""

    def by_token(self) -> Float[Array, "B T K E"]:
        """Return the features of each token; 0 of text."""
        index = jnp.maximum(self.slots - 1, 0)[:, :, None, None]
        found = jnp.take_along_axis(self.features, index, axis=1)
        return jnp.where((self.slots > 0)[:, :, None, None], found, 0)


class VisionTower(nnx.Module):
    """Patch embedding, blocks, and mergers of squares of patches into tokens."""

    def __init__(self, config: VisionConfig, key: PRNGKeyArray):
        self.config = config
        embed_key, blocks_key, merger_key, deep_key, position_key = jax.random.split(key, 5)
        D, size = config.hidden_size, config.patch_size
        shape = (size, size, config.temporal_patch_size, config.in_channels, D)
        # The dimensions of a convolution in a file, reversed.
        self.patch_embed = nnx.Param(
            _normal(embed_key, shape, config.patch_width**-0.5),
            axes=("patch",) * 4 + ("embed",),
        )
        if config.kind == "qwen3_vl":
            self.patch_bias = nnx.Param(jnp.zeros(D), axes=("embed",))
            positions = (config.num_position_embeddings or 0, D)
            self.position_embed = nnx.Param(
                _normal(position_key, positions, 0.02), axes=("patch", "embed")
            )
        self.blocks = nnx.vmap(lambda block_key: Block(config, block_key))(
            jax.random.split(blocks_key, config.depth)
        )
        self.merger = Merger(config, merger_key, is_deep=False)
        if count := len(config.deepstack_visual_indexes):
            self.deep_mergers = nnx.vmap(lambda each: Merger(config, each, is_deep=True))(
                jax.random.split(deep_key, count)
            )

    def __call__(
        self, images: ImageInputs, *, compute_dtype: DTypeLike, is_rematerialized: bool = False
    ) -> ImageFeatures:
        """Compute the embeddings of images.

        Args:
            images: images.
            compute_dtype: dtype of activations and matrix products.
            is_rematerialized: whether the backward pass computes every block again.
        """
        config, whole = self.config, images.layout[..., 0]
        x, angles = self._embed(images, compute_dtype), _angles(config, images.layout)
        windows, is_whole = _windows(config, images.layout), np.ones(config.depth, bool)
        if config.kind == "qwen2_5_vl":
            is_whole = np.isin(np.arange(config.depth), config.fullatt_block_indexes)
        block, blocks = nnx.split(self.blocks)

        def run(x: Array, part: tuple[Any, Array]) -> tuple[Array, None]:
            weights, no_windows = part
            segments = jnp.where(no_windows, whole, windows)
            return nnx.merge(block, weights)(x, angles, segments), None

        if is_rematerialized:
            run = jax.checkpoint(run, prevent_cse=False)
        deep, start = [], 0
        for i, end in enumerate([*(j + 1 for j in config.deepstack_visual_indexes), config.depth]):
            # Not leaf[i:j], which a backward pass that accumulates gradients in place cannot
            # transpose.
            part = jax.tree.map(
                lambda leaf, i=start, n=end - start: jax.lax.dynamic_slice_in_dim(leaf, i, n),
                blocks,
            )
            x, _ = jax.lax.scan(run, x, (part, jnp.asarray(is_whole[start:end])))
            start = end
            if i < len(config.deepstack_visual_indexes):
                merger, weights = nnx.split(self.deep_mergers)
                weights = jax.tree.map(
                    lambda leaf, i=i: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False), weights
                )
                deep.append(nnx.merge(merger, weights)(x))
        return ImageFeatures(images.slots, jnp.stack([self.merger(x), *deep], axis=2))

    def _embed(self, images: ImageInputs, dtype: DTypeLike) -> Float[Array, "B P D"]:
        """Embed patches, with learned positions if there are some."""
        config, size = self.config, self.config.patch_size
        pixels = images.patches.astype(dtype).reshape(
            *images.patches.shape[:2], config.in_channels, config.temporal_patch_size, size, size
        )
        x = jnp.einsum("bpctyx,xytcd->bpd", pixels, self.patch_embed[...].astype(dtype))
        if config.kind == "qwen2_5_vl":
            return x
        x = x + self.patch_bias[...].astype(dtype)
        return x + _positions(self.position_embed[...], images.layout).astype(dtype)


class Block(nnx.Module):
    """Attention among the patches of an image or a window, then an MLP, both with norm and
    residual.
    """

    def __init__(self, config: VisionConfig, key: PRNGKeyArray):
        attn_key, mlp_key = jax.random.split(key)
        self.attn_norm, self.mlp_norm = (_Norm(config, config.hidden_size) for _ in range(2))
        self.attn = Attention(config, attn_key)
        self.mlp = MLP(config, mlp_key)

    def __call__(
        self,
        x: Float[Array, "B P D"],
        angles: Float[Array, "B P 1 h"],
        segments: Int[Array, "B P"],
    ) -> Float[Array, "B P D"]:
        x = x + self.attn(self.attn_norm(x), angles, segments)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nnx.Module):
    """Attention of every patch to all patches of its segment."""

    def __init__(self, config: VisionConfig, key: PRNGKeyArray):
        D, N = config.hidden_size, config.num_heads
        H, (qkv_key, proj_key) = D // N, jax.random.split(key)
        self.qkv = nnx.Param(
            _normal(qkv_key, (D, 3, N, H), D**-0.5), axes=("embed", "patch", "heads", "head_dim")
        )
        self.qkv_bias = nnx.Param(jnp.zeros((3, N, H)), axes=("patch", "heads", "head_dim"))
        self.proj = nnx.Param(
            _normal(proj_key, (N, H, D), D**-0.5), axes=("heads", "head_dim", "embed")
        )
        self.proj_bias = nnx.Param(jnp.zeros(D), axes=("embed",))

    def __call__(
        self,
        x: Float[Array, "B P D"],
        angles: Float[Array, "B P 1 h"],
        segments: Int[Array, "B P"],
    ) -> Float[Array, "B P D"]:
        qkv = jnp.einsum("bpd,dsnh->sbpnh", x, self.qkv[...].astype(x.dtype))
        q, k, v = qkv + self.qkv_bias[...].astype(x.dtype)[:, None, None]
        out = _segment_attention(_rotate(q, angles), _rotate(k, angles), v, segments)
        out = jnp.einsum("bpnh,nhd->bpd", out, self.proj[...].astype(x.dtype))
        return out + self.proj_bias[...].astype(x.dtype)


class MLP(nnx.Module):
    """Gated by silu in kind qwen2_5_vl, or with gelu (its approximation by tanh) in qwen3_vl."""

    def __init__(self, config: VisionConfig, key: PRNGKeyArray):
        D, F = config.hidden_size, config.intermediate_size
        self.is_gated = config.kind == "qwen2_5_vl"
        gate_key, up_key, down_key = jax.random.split(key, 3)
        if self.is_gated:
            self.gate = _Linear(gate_key, D, F, ("embed", "mlp"))
        self.up = _Linear(up_key, D, F, ("embed", "mlp"))
        self.down = _Linear(down_key, F, D, ("mlp", "embed"))

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        up = self.up(x)
        if not self.is_gated:
            return self.down(jax.nn.gelu(up, approximate=True))
        inner: Array = gated("silu", self.gate(x), up)
        return self.down(inner)


class Merger(nnx.Module):
    """Norm, and an MLP from a square of patches to the width of the decoder.

    Args:
        is_deep: whether the norm is over the square (of DeepStack) instead of each patch.
    """

    def __init__(self, config: VisionConfig, key: PRNGKeyArray, *, is_deep: bool):
        self.is_deep, self.square = is_deep, config.merged_patches
        width = config.hidden_size * config.merged_patches
        up_key, down_key = jax.random.split(key)
        self.norm = _Norm(config, width if is_deep else config.hidden_size)
        self.up = _Linear(up_key, width, width, ("embed", "mlp"))
        self.down = _Linear(down_key, width, config.out_hidden_size, ("mlp", "embed"))

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B G E"]:
        B, P, _ = x.shape
        square = (B, P // self.square, -1)
        x = self.norm(x.reshape(square)) if self.is_deep else self.norm(x).reshape(square)
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class _Linear(nnx.Module):
    def __init__(self, key: PRNGKeyArray, inputs: int, outputs: int, axes: tuple[str, str]):
        self.w = nnx.Param(_normal(key, (inputs, outputs), inputs**-0.5), axes=axes)
        self.bias = nnx.Param(jnp.zeros(outputs), axes=axes[1:])

    def __call__(self, x: Float[Array, "B P I"]) -> Float[Array, "B P O"]:
        return x @ self.w[...].astype(x.dtype) + self.bias[...].astype(x.dtype)


class _Norm(nnx.Module):
    """RMSNorm, or LayerNorm in kind qwen3_vl, in float32."""

    def __init__(self, config: VisionConfig, width: int):
        self.scale = nnx.Param(jnp.ones(width), axes=("embed",))
        self.is_centred = config.kind == "qwen3_vl"
        if self.is_centred:
            self.bias = nnx.Param(jnp.zeros(width), axes=("embed",))

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        wide = x.astype(jnp.float32)
        if self.is_centred:
            wide = wide - wide.mean(axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPS)
        wide = wide * self.scale[...].astype(jnp.float32)
        if self.is_centred:
            wide = wide + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)


def _normal(key: PRNGKeyArray, shape: tuple[int, ...], std: float) -> Float[Array, "..."]:
    return std * jax.random.normal(key, shape, jnp.float32)


def _angles(config: VisionConfig, layout: Int[Array, "B P 5"]) -> Float[Array, "B P 1 h"]:
    """Compute the angles of RoPE: of the patch's row for one half, of its column for the other."""
    half = config.hidden_size // config.num_heads // 2
    frequencies = (_THETA ** (-np.arange(0, half, 2) / half)).astype(np.float32)
    angles = layout[..., 1:3, None].astype(jnp.float32) * frequencies
    return angles.reshape(*layout.shape[:2], 1, -1)


def _rotate(x: Float[Array, "B P N H"], angles: Float[Array, "B P 1 h"]) -> Array:
    """Rotate dimensions i and i + half by angle i."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


def _windows(config: VisionConfig, layout: Int[Array, "B P 5"]) -> Int[Array, "B P"]:
    """Number the windows of attention in a row; 0 is padding."""
    if config.window_patches is None:
        return layout[..., 0]
    image, row, column = (layout[..., i] for i in range(3))
    # The longer side of the largest image has less than 1024 windows.
    return (image * 1024 + row // config.window_patches) * 1024 + column // config.window_patches


def _positions(table: Float[Array, "_ D"], layout: Int[Array, "B P 5"]) -> Float[Array, "B P D"]:
    """Interpolate the learned positions linearly; corners of the image are corners of the table."""
    side = round(table.shape[0] ** 0.5)
    found: Any = 0.0
    place = layout[..., 1:3] * (side - 1) / jnp.maximum(layout[..., 3:5] - 1, 1)
    low = jnp.floor(place).astype(jnp.int32)
    share = (place - low)[..., None, :]
    for down in (0, 1):
        for right in (0, 1):
            at = jnp.minimum(low + jnp.array([down, right]), side - 1)
            weight = (share if down else 1 - share)[..., 0] * (share if right else 1 - share)[
                ..., 1
            ]
            found = found + weight * table[at[..., 0] * side + at[..., 1]].astype(jnp.float32)
    return found


def _segment_attention(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P N H"],
    v: Float[Array, "B P N H"],
    segments: Int[Array, "B P"],
) -> Float[Array, "B P N H"]:
    """Compute attention within segments, for blocks of queries if there are many."""

    def attend(q: Array, own: Array) -> Array:
        scores = jnp.einsum("bqnh,bpnh->bnqp", q, k, preferred_element_type=jnp.float32)
        mask = own[:, None, :, None] == segments[:, None, None, :]
        scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, jnp.finfo(jnp.float32).min)
        return jnp.einsum("bnqp,bpnh->bqnh", jax.nn.softmax(scores).astype(v.dtype), v)

    B, P, N, H = q.shape
    if P <= MAX_DENSE_PATCHES or P % MAX_DENSE_PATCHES:
        return attend(q, segments)
    blocks = (B, P // MAX_DENSE_PATCHES, MAX_DENSE_PATCHES)
    out = jax.lax.map(
        lambda block: jax.checkpoint(attend)(*block),
        (q.reshape(*blocks, N, H).swapaxes(0, 1), segments.reshape(blocks).swapaxes(0, 1)),
    )
    return out.swapaxes(0, 1).reshape(B, P, N, H)
