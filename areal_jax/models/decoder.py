"""The decoder of all model families: flax.nnx modules, run as a pure function of the parameters.

Axes: B rows, T tokens, D width, N query heads, K key-value heads, H head size, F MLP width,
V vocabulary, L layers.

The file has more than 400 lines because the modules of all families are read together: their
parameters, axes and forward pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray, Shaped

from areal_jax.models import rope
from areal_jax.models.activations import gated
from areal_jax.models.adapted import AnyAdapted, add_update
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.blocked_attention import ATTENDED
from areal_jax.models.config import LoRA, Remat
from areal_jax.models.delta_rule import Filters, Mixed, Recur, RecurrentState, local_recurrence
from areal_jax.models.moe import ROUTER, Experts, MoE, Routing, local_experts
from areal_jax.models.quantized import Quantized, rescale
from areal_jax.models.traits import Activation, Traits
from areal_jax.models.vision.tower import ImageFeatures, ImageInputs, VisionTower
from areal_jax.parallel.fsdp import ShardedMatrix, sharded_lookup, sharded_product
from areal_jax.parallel.sharding import is_axes

Params: TypeAlias = dict[str, Any]
"""Nested dict of arrays: embed, layers.attn.q, ..., norm, head (or value). Leaves of `layers` are
stacked: [L, ...]."""

LayerCache: TypeAlias = Any
"""State of the attention of one layer between calls: any pytree, or None; private to `attend`."""


@runtime_checkable
class Attend(Protocol):
    """Attention: (q [B T N H], k [B T K H], v [B T K H], cache, window, sinks [N]) ->
    (out [B T N H], cache). Without v, keys are also the values (latent attention).

    RoPE is already applied to q and k; q is unscaled, so attend divides the scores by sqrt(H). A
    query sees itself and the tokens less than `window` before it. The sink of a head is the score
    of one more key with the value 0. Layers without sinks, or without window and sinks, omit the
    arguments. If parameters are sharded over the same devices as rows (fsdp), attend must constrain
    q, k, v and out to be sharded by rows (and heads): otherwise the compiler may shard activations
    like parameters, so that every device has all rows.
    """

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        cache: LayerCache,
        window: int | None = None,
        sinks: Array | None = None,
        /,
    ) -> tuple[Array, LayerCache]: ...


class Policy:
    """A decoder without its parameters; hashable, so that it can be a static argument of jit.

    It has more than 200 lines because of `hidden`, the one forward pass of all families.
    """

    def __init__(self, config: ModelConfig, lora: LoRA | None = None):
        """Check that the parts fit each other.

        Args:
            config: architecture.
            lora: adapter to train on frozen parameters; None to train the parameters.

        Raises:
            ValueError: an adapter for a scalar head, which an adapter cannot train, or a reward
                model that reads images.
        """
        if lora is not None and config.is_scalar:
            raise ValueError(
                f"expected no adapter for {config.architecture} with a scalar head "
                f"({config.readout}), which an adapter cannot train; leave out policy.lora and "
                "policy.adapter"
            )
        if config.vision is not None and config.readout == "SequenceClassification":
            raise ValueError(
                f"expected a reward model that reads text alone, found {config.architecture}"
            )
        self.config, self.lora = config, lora

    @cached_property
    def _declared(self) -> _Declaration:
        declaration, _ = _declare(self.config, id(self.config.traits))
        return declaration

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Policy) and (self.config, self.lora) == (other.config, other.lora)

    def __hash__(self) -> int:
        return hash((self.config, self.lora))

    def __repr__(self) -> str:
        return f"Policy({self.config})"

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T ..."],
        attend: Attend,
        cache: Any = None,
        *,
        compute_dtype: DTypeLike,
        unroll: bool = False,
        remat: Remat = "none",
        experts: Experts = local_experts,
        recur: Recur = local_recurrence,
        num_tokens: Int[Array, "B"] | None = None,
        counted: Bool[Array, "B T"] | None = None,
        replay: Shaped[Array, "B T L k"] | None = None,
        records_experts: bool = False,
        images: ImageFeatures | None = None,
        absorbs: bool = False,
    ) -> tuple[Float[Array, "B T D"], Any, Routing | None]:
        """Compute the final hidden states, after the last norm.

        The function has more than 60 lines because it scans layers of each kind of cache.

        Args:
            params: parameters with stacked layers, or with `unroll` also as returned by `unstack`;
                a matrix of a layer may have the update of an adapter (`models/adapted.py`) or be
                quantized (`models/quantized.py`).
            tokens: token ids.
            positions: position of each token in its own sequence, for RoPE; of images [B, T, 3]
                with time, row and column.
            attend: attention.
            cache: state of `attend`: None, stacked [L, ...], or with `unroll` a tuple of L caches,
                of which those of layers with linear attention are a `RecurrentState`.
            compute_dtype: dtype of activations and matrix products; norms, RoPE and softmax are
                computed in float32.
            unroll: loop over layers in Python instead of a scan: slower to compile, but no slices
                or copies of the cache.
            remat: activations of each layer that are saved for the backward pass.
            experts: computation of experts; on several devices `sharded_experts`.
            recur: recurrence of linear attention, whose state is empty at position 0; on several
                devices `sharded_recurrence`.
            num_tokens: number of tokens of each row that change a `RecurrentState`; None: all.
            counted: mask of the tokens whose routing is summed; None for no sums.
            replay: recorded experts of each token in each layer with experts; see `MoE`.
            records_experts: whether the routing contains the experts of every token.
            images: result of `encode_images`, which replaces the embeddings of tokens.
            absorbs: whether latent attention calls `attend` with latents, see `LatentAttention`;
                without effect on other attention.

        Returns:
            Hidden states, the cache returned by `attend`, and the routing by layer with experts
            (None without experts, or without `counted` and `records_experts`).
        """
        config = self.config
        angles = _angles(config, positions)
        # Not read without linear attention.
        starts = positions == 0
        local_angles = _local_angles(config, positions)

        def run_layer(
            x: Array,
            layer_and_cache: tuple[Params, LayerCache, Array | None, Array | None],
            window: int | None = None,
        ) -> tuple[Array, tuple[LayerCache, Routing | None]]:
            layer, layer_cache, layer_replay, added = layer_and_cache
            x, layer_cache, routing = nnx.merge(self._graph(layer), layer)(
                x,
                angles if window is None or local_angles is None else local_angles,
                attend,
                layer_cache,
                window,
                experts,
                counted,
                layer_replay,
                records_experts,
                absorbs,
                partial(recur, starts=starts, counts=num_tokens),
            )
            return x if added is None else x + added, (layer_cache, routing)

        if remat != "none":
            # Inside a scan, common subexpressions cannot be merged across iterations, so barriers
            # against it are only a cost.
            run_layer = jax.checkpoint(
                run_layer, prevent_cse=unroll, policy=_SAVED[remat], static_argnums=2
            )
        if unroll:
            # Traced and lowered once for all layers of a kind; the compiler inlines the calls.
            run_layer = jax.jit(run_layer, static_argnums=2)
        windows = config.sliding_windows or (None,) * config.num_hidden_layers
        x = _embed(params["embed"], tokens, compute_dtype)
        if config.traits.scales_embedding:
            # Rounded to the compute dtype, as transformers does.
            x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
        added = jnp.zeros((0,))
        if images is not None:
            features = jnp.moveaxis(images.by_token().astype(x.dtype), 2, 0)
            x, added = jnp.where(images.slots[:, :, None] > 0, features[0], x), features[1:]
        by_layer = None if replay is None else jnp.moveaxis(replay, 2, 0)
        moe_layers = config.moe_layers
        if unroll:
            outputs = []
            for i, layer in enumerate(self.unstack(params)["layers"]):
                layer_cache = None if cache is None else cache[i]
                experts_of_layer = None
                if by_layer is not None and i in moe_layers:
                    experts_of_layer = by_layer[moe_layers.index(i)]
                own = added[i] if i < len(added) else None
                x, output = run_layer(x, (layer, layer_cache, experts_of_layer, own), windows[i])
                outputs.append(output)
            cache, routings = zip(*outputs, strict=True)
            routings = [each for each in routings if each is not None]
            stack = partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
            routing = stack(*routings) if routings else None
        else:
            # One scan for each run of layers with the same window, which is static in kernels, one
            # for those to which features of images are added, one for those without experts, and
            # one for those with linear attention.
            kinds = [
                (window, i < len(added), i not in moe_layers, i in config.linear_layers)
                for i, window in enumerate(windows)
            ]
            runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
            parts, routings, start = [], [], 0
            for (window, is_added, is_dense, _), length in runs:
                layers, own_cache, own_replay = params["layers"], cache, by_layer
                if len(runs) > 1:
                    layers = self._select(layers, start, length)
                    first, end = start, start + length
                    own_cache = jax.tree.map(lambda x, i=first, j=end: x[i:j], cache)
                    if by_layer is not None and not is_dense:
                        place = moe_layers.index(first)
                        own_replay = by_layer[place : place + length]
                if is_dense:
                    own_replay = None
                own = added[start : start + length] if is_added else None
                x, (part, routing) = jax.lax.scan(
                    lambda x, xs, window=window: run_layer(x, xs, window),
                    x,
                    (layers, own_cache, own_replay, own),
                )
                parts.append(part)
                routings += [] if routing is None else [routing]
                start += length
            cache, routing = (_concatenate(each) for each in (parts, routings))
        x = _rms_norm(x, params["norm"], config.rms_norm_eps, config.traits.norm_offset)
        return x, cache, routing

    def encode_images(
        self,
        params: Params,
        images: ImageInputs,
        *,
        compute_dtype: DTypeLike,
        remat: Remat = "none",
    ) -> ImageFeatures:
        """Compute the embeddings of images, for `hidden`.

        Args:
            params: parameters.
            images: images of the rows.
            compute_dtype: as in `hidden`.
            remat: as in `hidden`; anything but none recomputes every block of the tower.
        """
        tower = nnx.merge(self._declared.tower, params["vision"])
        return tower(images, compute_dtype=compute_dtype, is_rematerialized=remat != "none")

    def unstack(self, params: Params) -> Params:
        """Return the parameters with `layers` as a tuple of L dicts, for `hidden` with `unroll`.

        Call it before a loop over tokens: inside the loop, every step would copy every layer.
        """
        layers = params["layers"]
        if isinstance(layers, tuple):
            return params

        def layer(i: int) -> Params:
            # Not leaf[i], which a backward pass that accumulates gradients in place cannot
            # transpose.
            return self._map_layers(
                lambda leaf, place: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False),
                layers,
                i,
            )

        return params | {"layers": tuple(layer(i) for i in range(self.config.num_hidden_layers))}

    def stack(self, params: Params) -> Params:
        """Return the parameters with stacked layers; the inverse of `unstack`."""
        by_path: dict[tuple[str, ...], list[Any]] = {}
        for layer in params["layers"]:
            for path, leaf in traverse_util.flatten_dict(layer).items():
                by_path.setdefault(path, []).append(leaf)
        stacked = {
            path: jax.tree.map(lambda *leaves: jnp.stack(leaves), *leaves)
            for path, leaves in by_path.items()
        }
        return params | {"layers": traverse_util.unflatten_dict(stacked)}

    def unstack_axes(self, axes: Params) -> Params:
        """Logical axis names of `unstack`, given those of parameters with stacked layers."""
        drop = lambda names, _: names[1:]  # noqa: E731 (an argument below)
        layers = (
            self._map_layers(drop, axes["layers"], i) for i in range(self.config.num_hidden_layers)
        )
        return axes | {"layers": tuple(layers)}

    def _select(self, layers: Params, start: int, length: int) -> Params:
        """Return the parameters of some layers of one kind, still stacked."""
        # Not leaf[i:j], as in `unstack`.
        return self._map_layers(
            lambda leaf, place: jax.lax.dynamic_slice_in_dim(leaf, place, length),
            layers,
            start,
        )

    def _map_layers(self, function: Callable[[Any, int], Any], layers: Params, i: int) -> Params:
        """Apply a function to every leaf that layer i has, and the layer's place in it."""
        mapped = {}
        for path, leaf in traverse_util.flatten_dict(layers).items():
            has = self.config.layers_with(path)
            if i in has:
                place = has.index(i)
                mapped[path] = jax.tree.map(
                    lambda x, place=place: function(x, place),
                    leaf,
                    is_leaf=lambda x: isinstance(x, tuple),
                )
        return traverse_util.unflatten_dict(mapped)

    def _graph(self, layer: Params) -> Any:
        """Return the modules of a layer with these parameters."""
        return self._declared.graphs[_kind("linear" in layer, "router" in layer["mlp"])]

    def head(self, params: Params) -> Float[Array, "D V"]:
        """Matrix from hidden states to logits; if tied, the transpose of the embedding leaf."""
        return params["embed"].T if self.config.tie_word_embeddings else params["head"]

    def values(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Apply the scalar head in float32; entry t is the value after token t."""
        return (hidden.astype(jnp.float32) @ params["value"])[..., 0] + params.get(
            "value_bias", 0.0
        )

    def init(self, key: PRNGKeyArray) -> Params:
        """Sample random float32 parameters; jit it with out_shardings to make them in place."""
        return _joined(self.config, nnx.to_pure_dict(nnx.state(Decoder(self.config, key))))

    def abstract(self, dtype: DTypeLike = jnp.float32) -> Params:
        """ShapeDtypeStruct of every parameter.

        Args:
            dtype: dtype of matrices; norm scales, routers and a scalar head are float32.
        """

        def struct(
            path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, names: tuple[str, ...]
        ) -> jax.ShapeDtypeStruct:
            is_wide = len(set(names) - {"layers"}) <= 1 or path[-1] == jax.tree_util.DictKey(ROUTER)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if is_wide else dtype)

        return jax.tree_util.tree_map_with_path(
            struct, self._declared.abstract, self._declared.axes
        )

    def axes(self) -> Params:
        """Logical axis names of every parameter, as a tuple per leaf."""
        return jax.tree.map(lambda leaf: leaf, self._declared.axes, is_leaf=is_axes)


class _Declaration(NamedTuple):
    """The parameters of an architecture, as its modules declare them."""

    graphs: dict[str, Any]
    """The modules of each kind of layer."""
    tower: Any
    """The modules that read images, or None."""
    abstract: Params
    axes: Params


@lru_cache(maxsize=64)
def _declare(config: ModelConfig, _traits_id: int) -> tuple[_Declaration, Traits]:
    """Trace the modules, once for all policies of an architecture.

    A family can be registered again with other traits, so that they are known by their id, which
    is theirs as long as the result holds them.
    """
    decoder = nnx.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    axes = {
        path: variable.get_metadata("axes")
        for path, variable in nnx.to_flat_state(nnx.state(decoder))
    }
    # Layers of all kinds have the same axes, where they have the same parameters.
    named = {
        ("layers", *path[1:]) if path[0] in _stacks(config) else path: names
        for path, names in axes.items()
    }
    of_leaves = {
        path: ("layers", *names) if is_stacked(path) else names for path, names in named.items()
    }
    declaration = _Declaration(
        graphs={name: nnx.graphdef(getattr(decoder, name)) for name in _stacks(config)},
        tower=nnx.graphdef(decoder.vision) if config.vision else None,
        abstract=jax.eval_shape(partial(_joined, config), nnx.to_pure_dict(nnx.state(decoder))),
        axes=traverse_util.unflatten_dict(of_leaves),
    )
    return declaration, config.traits


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this path has a leading dimension for the layers."""
    return path[0] == "layers" or path[:2] in (("vision", "blocks"), ("vision", "deep_mergers"))


_ATTENTION = jax.checkpoint_policies.save_only_these_names(ATTENDED)

_SAVED = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _ATTENTION
    ),
    "attention": _ATTENTION,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Decoder(nnx.Module):
    """Parameters: embedding, stacked layers, last norm, and an untied head.

    A scalar head is initialized with zeros, so that its first values are 0.
    """

    def __init__(self, config: ModelConfig, key: PRNGKeyArray):
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        table = (config.vocab_size, config.hidden_size)
        self.embed = nnx.Param(_normal(embed_key, table, 0.02), axes=("vocab", "embed"))
        keys = jax.random.split(layers_key, config.num_hidden_layers)
        for name, numbers in _stacks(config).items():
            first = numbers[0]
            own = config if first in config.moe_layers else replace(config, moe=None)
            make = nnx.vmap(partial(Layer, own, is_linear=first in config.linear_layers))
            setattr(self, name, make(keys[np.array(numbers)]))
        self.norm = _norm(config.hidden_size, "embed", config.traits)
        if config.is_scalar:
            self.value = nnx.Param(jnp.zeros((config.hidden_size, 1)), axes=("embed",))
            if config.readout == "TokenClassification":
                self.value_bias = nnx.Param(jnp.zeros(1), axes=())
        elif not config.tie_word_embeddings:
            self.head = nnx.Param(_normal(head_key, table[::-1], 0.02), axes=("embed", "vocab"))
        if config.vision is not None:
            self.vision = VisionTower(config.vision, jax.random.fold_in(key, 0))


def _stacks(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Numbers of the layers of each kind, by the name of their parameters in `Decoder`."""
    stacks: dict[str, tuple[int, ...]] = {}
    for i in range(config.num_hidden_layers):
        kind = _kind(i in config.linear_layers, i in config.moe_layers)
        stacks[kind] = (*stacks.get(kind, ()), i)
    return stacks


def _kind(is_linear: bool, has_experts: bool) -> str:
    """Name in `Decoder` of the layers of one kind."""
    return f"{'linear' if is_linear else 'attention'}_{'moe' if has_experts else 'mlp'}"


def _joined(config: ModelConfig, params: Params) -> Params:
    """Join the leaves of layers of all kinds, in the order of the layers."""
    stacks = _stacks(config)
    found: dict[tuple[str, ...], tuple[list[Any], list[int]]] = {}
    for name, numbers in stacks.items():
        for path, leaf in traverse_util.flatten_dict(params[name]).items():
            leaves, layers = found.setdefault(path, ([], []))
            leaves.append(leaf)
            layers += numbers
    joined = {
        path: leaves[0] if len(leaves) == 1 else _concatenate(leaves)[np.argsort(layers)]
        for path, (leaves, layers) in found.items()
    }
    rest = {name: tree for name, tree in params.items() if name not in stacks}
    return rest | {"layers": traverse_util.unflatten_dict(joined)}


def _concatenate(parts: list[Any]) -> Any:
    """Concatenate trees along their layers; None if there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


class Layer(nnx.Module):
    """Attention, then a gated MLP or a mixture of experts, both with norms and residual."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray, *, is_linear: bool = False):
        attn_key, mlp_key = jax.random.split(key)
        traits, width = config.traits, config.hidden_size
        self.eps, self.offset = config.rms_norm_eps, traits.norm_offset
        if is_linear:
            self.linear = GatedDeltaNet(config, attn_key)
        else:
            self.attn = (LatentAttention if config.latent else Attention)(config, attn_key)
        if traits.norms != "after":
            self.attn_norm, self.mlp_norm = (_norm(width, "embed", traits) for _ in range(2))
        if traits.norms != "before":
            self.attn_post_norm, self.mlp_post_norm = (
                _norm(width, "embed", traits) for _ in range(2)
            )
        if config.moe is None:
            self.mlp = MLP(config, mlp_key, config.intermediate_size)
        else:
            shared_key = jax.random.fold_in(mlp_key, 0)
            shared_width = config.moe.shared_expert_intermediate_size
            shared = MLP(config, shared_key, shared_width) if shared_width else None
            self.mlp = MoE(config, config.moe, mlp_key, shared)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: tuple[Array, Array],
        attend: Attend,
        cache: LayerCache,
        window: int | None,
        experts: Experts,
        counted: Bool[Array, "B T"] | None,
        replay: Shaped[Array, "B T k"] | None,
        records_experts: bool,
        absorbs: bool,
        recur: Callable[..., tuple[Array, RecurrentState | None]],
    ) -> tuple[Float[Array, "B T D"], LayerCache, Routing | None]:
        normed = self._norm(x, "attn_norm")
        if hasattr(self, "linear"):
            attention, cache = self.linear(normed, recur, cache)
        elif isinstance(self.attn, LatentAttention):
            attention, cache = self.attn(normed, angles, attend, cache, absorbs)
        else:
            attention, cache = self.attn(normed, angles, attend, cache, window)
        x = x + self._norm(attention, "attn_post_norm")
        normed = self._norm(x, "mlp_norm")
        mlp, routing = (
            self.mlp(normed, experts, counted, replay, records=records_experts)
            if isinstance(self.mlp, MoE)
            else (self.mlp(normed), None)
        )
        return x + self._norm(mlp, "mlp_post_norm"), cache, routing

    def _norm(self, x: Float[Array, "B T D"], name: str) -> Float[Array, "B T D"]:
        """Apply the norm of this name, if the family has it."""
        scale = getattr(self, name, None)
        return x if scale is None else _rms_norm(x, scale[...], self.eps, self.offset)


class Attention(nnx.Module):
    """Projections, head norms and RoPE around `attend`."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray):
        D, H = config.hidden_size, config.head_dim
        self.eps = config.rms_norm_eps
        self.bias, self.qk_norm, self.output_bias = (
            config.attention_bias,
            config.qk_norm,
            config.output_bias,
        )
        self.traits, scalar = config.traits, config.query_pre_attn_scalar
        self.q_scale = None if scalar is None else (H / scalar) ** 0.5
        heads = {
            "q": ("heads", config.num_attention_heads),
            "k": ("kv_heads", config.num_key_value_heads),
        }
        heads["v"] = heads["k"]
        *keys, o_key = jax.random.split(key, 4)
        for (name, (axis, n)), name_key in zip(heads.items(), keys, strict=True):
            size = 2 * H if name == "q" and self.traits.gates_attention else H
            weight = _normal(name_key, (D, n, size), D**-0.5)
            setattr(self, name, nnx.Param(weight, axes=("embed", axis, "head_dim")))
            if self.bias:
                bias = nnx.Param(jnp.zeros((n, size)), axes=(axis, "head_dim"))
                setattr(self, f"{name}_bias", bias)
        N = config.num_attention_heads
        self.o = nnx.Param(
            _normal(o_key, (N, H, D), (N * H) ** -0.5), axes=("heads", "head_dim", "embed")
        )
        if self.output_bias:
            self.o_bias = nnx.Param(jnp.zeros(D), axes=("embed",))
        if self.traits.has_sinks:
            self.sinks = nnx.Param(jnp.zeros(N), axes=("heads",))
        if self.qk_norm:
            sizes, axes = (H, H), ("head_dim", "head_dim")
            if self.traits.qk_norm_over == "heads":
                sizes, axes = (N * H, config.num_key_value_heads * H), ("heads", "kv_heads")
            self.q_norm, self.k_norm = (
                _norm(size, axis, self.traits) for size, axis in zip(sizes, axes, strict=True)
            )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: tuple[Array, Array],
        attend: Attend,
        cache: LayerCache,
        window: int | None,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        q, k, v = (self._project(x, name) for name in ("q", "k", "v"))
        gate = None
        if self.traits.gates_attention:
            q, gate = jnp.split(q, 2, axis=-1)
        if self.qk_norm:
            q, k = self._normed(q, self.q_norm[...]), self._normed(k, self.k_norm[...])
        q, k = (_rotate(each, angles, self.traits.rope_interleaved) for each in (q, k))
        if self.q_scale is not None:
            q = q * jnp.asarray(self.q_scale, q.dtype)
        if self.traits.has_sinks:
            out, cache = attend(q, k, v, cache, window, self.sinks[...])
        elif window is not None:
            out, cache = attend(q, k, v, cache, window)
        else:
            out, cache = attend(q, k, v, cache)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        B, T, N, H = out.shape
        out = _product(out.reshape(B, T, N * H), self.o.get_value(), num_inputs=2)
        return _add_bias(out, self.o_bias[...]) if self.output_bias else out, cache

    def _normed(self, x: Float[Array, "B T N H"], scale: Array) -> Float[Array, "B T N H"]:
        """Normalize each head, or all heads together."""
        flat = x.reshape(*x.shape[:2], -1) if self.traits.qk_norm_over == "heads" else x
        return _rms_norm(flat, scale, self.eps, self.traits.norm_offset).reshape(x.shape)

    def _project(self, x: Float[Array, "B T D"], name: str) -> Float[Array, "B T N H"]:
        y = _product(x, getattr(self, name).get_value())
        return _add_bias(y, getattr(self, f"{name}_bias")[...]) if self.bias else y


class LatentAttention(nnx.Module):
    """Multi-head latent attention (MLA, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are products with one latent c of a token: k = [c · K; r] and
    v = c · V, with one rotated key r for all heads. `attend` gets them as such, the values padded
    to the size of keys. Or it absorbs both matrices: q · k = (q · Kᵀ) · c + q' · r, so that
    `attend` gets q · Kᵀ and q' as query and [c; r] as the key and value of the only head (None as
    value), and the result, a mean of latents, is multiplied by V. A cache then has c and r alone.
    """

    def __init__(self, config: ModelConfig, key: PRNGKeyArray):
        assert config.latent is not None
        self.config: Any = config.latent
        latent, N, D = config.latent, config.num_attention_heads, config.hidden_size
        rank, size = latent.q_lora_rank, config.head_dim
        q_key, qa_key, kva_key, kvb_key, o_key = jax.random.split(key, 5)
        self.scale = 1.0
        if config.rope_scaling is not None and latent.mscale_all_dim:
            assert isinstance(config.rope_scaling, rope.Yarn)
            self.scale = rope.yarn_scale(config.rope_scaling.factor, latent.mscale_all_dim) ** 2

        def matrix(key: PRNGKeyArray, axes: tuple[str, ...], *shape: int) -> nnx.Param[Array]:
            return nnx.Param(_normal(key, shape, shape[0] ** -0.5), axes=axes)

        if rank is None:
            self.q = matrix(q_key, ("embed", "heads", "head_dim"), D, N, size)
        else:
            self.q_a = matrix(qa_key, ("embed", "rank"), D, rank)
            self.q_a_norm = nnx.Param(jnp.ones(rank), axes=("rank",))
            self.q_b = matrix(q_key, ("rank", "heads", "head_dim"), rank, N, size)
        self.kv_a = matrix(kva_key, ("embed", "rank"), D, latent.width)
        self.kv_a_norm = nnx.Param(jnp.ones(latent.kv_lora_rank), axes=("rank",))
        inner = latent.qk_nope_head_dim + latent.v_head_dim
        self.kv_b = matrix(kvb_key, ("rank", "heads", "head_dim"), latent.kv_lora_rank, N, inner)
        shape = (N, latent.v_head_dim, D)
        self.o = nnx.Param(
            _normal(o_key, shape, math.prod(shape[:2]) ** -0.5), axes=("heads", "head_dim", "embed")
        )
        self.output_bias = config.output_bias
        if self.output_bias:
            self.kv_a_bias = nnx.Param(jnp.zeros(latent.width), axes=("rank",))
            self.o_bias = nnx.Param(jnp.zeros(D), axes=("embed",))
            if rank is not None:
                self.q_a_bias = nnx.Param(jnp.zeros(rank), axes=("rank",))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: tuple[Array, Array],
        attend: Attend,
        cache: LayerCache,
        absorbs: bool,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        config, interleaved = self.config, self.config.rope_interleave
        q = self._query(x)
        q, q_rotated = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        latent, rotated = jnp.split(
            self._project(x, "kv_a")[:, :, None], [config.kv_lora_rank], axis=-1
        )
        latent = _rms_norm(latent, self.kv_a_norm[...], _LATENT_EPS, 0.0)
        q_rotated, rotated = (_rotate(each, angles, interleaved) for each in (q_rotated, rotated))
        # `attend` divides by the root of the size that it gets.
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
        given = config.width if absorbs else size
        scale, w = self.scale * (given / size) ** 0.5, self.kv_b.get_value()
        if absorbs:
            q = _with_matrix(q, w, slice(config.qk_nope_head_dim), is_transposed=True)
            q = jnp.concatenate([q, q_rotated], axis=-1) * jnp.asarray(scale, x.dtype)
            out, cache = attend(q, jnp.concatenate([latent, rotated], axis=-1), None, cache)
            values = slice(config.qk_nope_head_dim, None)
            out = _with_matrix(out[..., : config.kv_lora_rank], w, values, is_transposed=False)
        else:
            kv = _product(latent[:, :, 0], w)
            k, v = jnp.split(kv, [config.qk_nope_head_dim], axis=-1)
            rotated = jnp.broadcast_to(rotated, (*k.shape[:3], config.qk_rope_head_dim))
            k = jnp.concatenate([k, rotated], axis=-1)
            v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, size - config.v_head_dim)))
            q = jnp.concatenate([q, q_rotated], axis=-1)
            q = q if scale == 1 else q * jnp.asarray(scale, x.dtype)
            out, cache = attend(q, k, v, cache)
            out = out[..., : config.v_head_dim]
        B, T, N, H = out.shape
        y = _product(out.reshape(B, T, N * H), self.o.get_value(), num_inputs=2)
        return _add_bias(y, self.o_bias[...]) if self.output_bias else y, cache

    def _query(self, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
        if self.config.q_lora_rank is None:
            return _product(x, self.q.get_value())
        narrow = _rms_norm(self._project(x, "q_a"), self.q_a_norm[...], _LATENT_EPS, 0.0)
        return _product(narrow, self.q_b.get_value())

    def _project(self, x: Float[Array, "B T D"], name: str) -> Float[Array, "B T R"]:
        y = _product(x, getattr(self, name).get_value())
        return _add_bias(y, getattr(self, f"{name}_bias")[...]) if self.output_bias else y


_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps is, as in transformers."""


def _with_matrix(
    x: Float[Array, "B T N _"], w: Array | AnyAdapted, outputs: slice, *, is_transposed: bool
) -> Float[Array, "B T N _"]:
    """Multiply each head by its own part w[:, head, outputs], or by the transpose of it."""
    if isinstance(w, AnyAdapted):

        def update(x: Array, a: Array, b: Array, scale: Any) -> Array:
            a, b = a.astype(x.dtype), b[..., outputs].astype(x.dtype)
            if is_transposed:
                product = jnp.einsum("btnk,rk->btnr", jnp.einsum("btnh,knh->btnk", x, b), a)
            else:
                product = jnp.einsum("btnk,knh->btnh", jnp.einsum("btnr,rk->btnk", x, a), b)
            return scale * product

        base = _with_matrix(x, w.w, outputs, is_transposed=is_transposed)
        return add_update(base, x, w, update)
    part = w[..., outputs].astype(x.dtype)
    return jnp.einsum("btnh,rnh->btnr" if is_transposed else "btnr,rnh->btnh", x, part)


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule (arXiv:2412.06464, as in Qwen3-Next).

    The decay of a value head is exp(-exp(a_log) · softplus(a(x) + dt_bias)), its rate is
    sigmoid(b(x)). Each head of the result is normalized, and multiplied by silu(z(x)).
    """

    def __init__(self, config: ModelConfig, key: PRNGKeyArray):
        assert config.linear is not None
        linear, D, self.eps = config.linear, config.hidden_size, config.rms_norm_eps
        H, E, W = (
            linear.linear_key_head_dim,
            linear.linear_value_head_dim,
            linear.linear_conv_kernel_dim,
        )
        K, V = linear.linear_num_key_heads, linear.linear_num_value_heads
        shapes = {"q": (K, H), "k": (K, H), "v": (V, E), "z": (V, E), "b": (V,), "a": (V,)}
        *keys, conv_key, a_key, o_key = jax.random.split(key, 9)
        axes = ("kv_heads", "head_dim")
        for (name, shape), name_key in zip(shapes.items(), keys, strict=True):
            weight = _normal(name_key, (D, *shape), D**-0.5)
            setattr(self, name, nnx.Param(weight, axes=("embed", *axes[: len(shape)])))
        for i, name in enumerate(("q", "k", "v")):
            taps = _normal(jax.random.fold_in(conv_key, i), (*shapes[name], W), W**-0.5)
            setattr(self, f"conv_{name}", nnx.Param(taps, axes=axes))
        self.a_log = nnx.Param(
            jnp.log(jax.random.uniform(a_key, (V,), minval=0.01, maxval=16.0)), axes=("kv_heads",)
        )
        self.dt_bias = nnx.Param(jnp.ones(V), axes=("kv_heads",))
        self.norm = nnx.Param(jnp.ones(E), axes=("head_dim",))
        self.o = nnx.Param(_normal(o_key, (V, E, D), (V * E) ** -0.5), axes=(*axes, "embed"))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        recur: Callable[..., tuple[Array, RecurrentState | None]],
        state: RecurrentState | None,
    ) -> tuple[Float[Array, "B T D"], RecurrentState | None]:
        q, k, v, z, b, a = (
            _product(x, getattr(self, name).get_value()) for name in ("q", "k", "v", "z", "b", "a")
        )
        wide = a.astype(jnp.float32) + self.dt_bias[...]
        log_decay = -jnp.exp(self.a_log[...]) * jax.nn.softplus(wide)
        inputs = Mixed(q, k, v, log_decay, jax.nn.sigmoid(b.astype(jnp.float32)))
        filters = Filters(*(getattr(self, f"conv_{name}")[...] for name in ("q", "k", "v")))
        out, state = recur(inputs, filters, state=state)
        out = _rms_norm(out, self.norm[...], self.eps, 0.0)
        out = (out * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
        B, T, V, E = out.shape
        return _product(out.reshape(B, T, V * E), self.o.get_value(), num_inputs=2), state


class MLP(nnx.Module):
    """Gated MLP: down(activation(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, key: PRNGKeyArray, width: int):
        D, F = config.hidden_size, width
        self.activation: Activation = config.traits.activation
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = nnx.Param(_normal(gate_key, (D, F), D**-0.5), axes=("embed", "mlp"))
        self.up = nnx.Param(_normal(up_key, (D, F), D**-0.5), axes=("embed", "mlp"))
        self.down = nnx.Param(_normal(down_key, (F, D), F**-0.5), axes=("mlp", "embed"))
        self.bias = config.mlp_bias
        if self.bias:
            self.gate_bias = nnx.Param(jnp.zeros(F), axes=("mlp",))
            self.up_bias = nnx.Param(jnp.zeros(F), axes=("mlp",))
            self.down_bias = nnx.Param(jnp.zeros(D), axes=("embed",))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        inner: Array = gated(self.activation, self._project(x, "gate"), self._project(x, "up"))
        return self._project(inner, "down")

    def _project(self, x: Float[Array, "B T I"], name: str) -> Float[Array, "B T O"]:
        y = _product(x, getattr(self, name).get_value())
        return _add_bias(y, getattr(self, f"{name}_bias")[...]) if self.bias else y


def _normal(key: PRNGKeyArray, shape: tuple[int, ...], std: float) -> Float[Array, "..."]:
    return std * jax.random.normal(key, shape, jnp.float32)


def _norm(size: int, axis: str, traits: Traits) -> nnx.Param[Array]:
    return nnx.Param(jnp.full(size, 1 - traits.norm_offset, jnp.float32), axes=(axis,))


def _embed(
    w: Array | ShardedMatrix, tokens: Int[Array, "B T"], dtype: DTypeLike
) -> Float[Array, "B T D"]:
    if isinstance(w, ShardedMatrix):
        looked_up: Array = sharded_lookup(w.w, tokens, jnp.dtype(dtype), w.shards)
        return looked_up
    return w[tokens].astype(dtype)


def _product(
    x: Float[Array, "B T I"],
    w: Array | AnyAdapted | Quantized | ShardedMatrix,
    num_inputs: int = 1,
) -> Float[Array, "B T ..."]:
    """Compute x · w over the first `num_inputs` dimensions of w, which are flattened in x."""
    if isinstance(w, AnyAdapted):

        def update(x: Array, a: Array, b: Array, scale: Any) -> Array:
            # The scale is applied to the low-rank product, which is small.
            return _product(scale * _product(x, a, num_inputs), b)

        return add_update(_product(x, w.w, num_inputs), x, w, update)
    if isinstance(w, Quantized):
        outputs = w.shape[num_inputs:]
        return rescale(_product(x, w.values, num_inputs), w.scale.reshape(outputs))
    if isinstance(w, ShardedMatrix):
        flat = w.w.reshape(math.prod(w.w.shape[:num_inputs]), -1)
        product: Array = sharded_product(x, flat, w.shards)
        # An output that is the width may have tiles in the matrix, and has one dimension.
        outputs = w.w.shape[num_inputs:] if w.shards.dim == 0 else product.shape[2:]
        return product.reshape(*x.shape[:2], *outputs)
    flat = w.reshape(math.prod(w.shape[:num_inputs]), -1)
    return _flat_product(x, flat).reshape(*x.shape[:2], *w.shape[num_inputs:])


@jax.custom_vjp
def _flat_product(x: Float[Array, "B T I"], w: Num[Array, "I O"]) -> Float[Array, "B T O"]:
    """Compute x · w in the dtype of x; the gradient of w is summed over tokens in float32."""
    return x @ w.astype(x.dtype)


def _flat_product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    # Not _flat_product itself, inside which a rematerialization policy would not find the product.
    return x @ w.astype(x.dtype), (x, w)


def _flat_product_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    dx = jnp.einsum("bto,io->bti", dy, w.astype(dy.dtype))
    # x first: with dy first, as in jax's rule, XLA on CPU transposes dy in a slow strided loop.
    dw = jnp.einsum("bti,bto->io", x, dy, preferred_element_type=jnp.float32)
    return dx, dw.astype(w.dtype)


_flat_product.defvjp(_flat_product_forward, _flat_product_backward)


@jax.custom_vjp
def _add_bias(y: Float[Array, "B T *O"], bias: Float[Array, "*O"]) -> Float[Array, "B T *O"]:
    """Add a bias in the dtype of y; its gradient is summed over tokens in float32.

    By jax's rule it is summed in the dtype of y, for which XLA on CPU has a slow loop.
    """
    return y + bias.astype(y.dtype)


def _add_bias_forward(y: Array, bias: Array) -> tuple[Array, Array]:
    return _add_bias(y, bias), bias


def _add_bias_backward(bias: Array, dy: Array) -> tuple[Array, Array]:
    return dy, jnp.sum(dy, axis=(0, 1), dtype=jnp.float32).astype(bias.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, "D"], eps: float, offset: float
) -> Float[Array, "*B D"]:
    """Compute x / sqrt(mean(x²) + eps) · (scale + offset) in float32 (RMSNorm,
    arXiv:1910.07467).
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32)
    return (wide * (scale + offset if offset else scale)).astype(x.dtype)


def _angles(
    config: ModelConfig, positions: Int[Array, "B T ..."]
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
    """Compute cos and sin of position · frequency, times the attention factor of YaRN."""
    size = config.rotary_dim or config.head_dim
    frequencies = rope.frequencies(size, config.rope_theta, config.rope_scaling)
    # Angles stay in float32: bfloat16 rounds position 257 to 256.
    if positions.ndim == 2:
        positions = positions[:, :, None, None]
    else:
        # Each frequency rotates by one of the three positions.
        is_interleaved = config.traits.vision == "qwen3_vl"
        axes = rope.mrope_axes(config.mrope_section, len(frequencies), is_interleaved)
        positions = positions[:, :, None, axes]
    angles = positions.astype(jnp.float32) * frequencies.astype(np.float32)
    cos, sin, factor = jnp.cos(angles), jnp.sin(angles), rope.attention_factor(config.rope_scaling)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def _local_angles(
    config: ModelConfig, positions: Int[Array, "B T ..."]
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]] | None:
    """Compute cos and sin for layers with a window; None: as for other layers."""
    if config.local_rope_theta is None:
        return None
    return _angles(
        replace(config, rope_theta=config.local_rope_theta, rope_scaling=None), positions
    )


def _rotate(
    x: Float[Array, "B T N H"], angles: tuple[Array, Array], interleaved: bool
) -> Float[Array, "B T N H"]:
    """Rotate the first dimensions of every head: i and i + half of them by angle i, or
    interleaved 2i and 2i + 1.

    Interleaved, the result has the even dimensions before the odd ones, of which products of
    queries and keys are independent.
    """
    cos, sin = angles
    wide, size = x.astype(jnp.float32), 2 * cos.shape[-1]
    part, rest = wide[..., :size], wide[..., size:]
    low, high = (part[..., ::2], part[..., 1::2]) if interleaved else jnp.split(part, 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1).astype(
        x.dtype
    )
