"""Mixture of experts: each token goes to its top-k experts, and no token is dropped.

Axes: B rows, T tokens, M tokens of all rows, R = M · k assignments of tokens to experts, D width,
E experts, F width of an expert, L layers. The file has more than 400 lines because router, products
and their gradients share these layouts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num, PRNGKeyArray, Shaped

from areal_jax.models.activations import gated
from areal_jax.models.adapted import Adapted
from areal_jax.models.architecture import ExpertGroups, ModelConfig, MoEConfig
from areal_jax.models.gpu_grouped_products import (
    MAX_BLOCK,
    find_groups,
    gpu_grouped_gradient,
    gpu_grouped_product,
)
from areal_jax.models.gpu_kernels import MIN_TILE
from areal_jax.models.quantized import Quantized, rescale
from areal_jax.models.traits import Activation
from areal_jax.parallel.sharding import Rules, sharding
from areal_jax.records import native_expert

logger = logging.getLogger(__name__)

ROUTER = "router"
"""Name of the router's parameter, which is float32 in every compute dtype."""

GroupedKernel: TypeAlias = Literal["blocks", "gpu", "tpu"]
"""Products of experts. blocks: a matrix is copied for each block of rows, in plain XLA. gpu, tpu:
in a kernel."""

ExpertMatrix: TypeAlias = Array | Quantized | Adapted
"""A matrix of every expert."""


class Routing(NamedTuple):
    """Routing of a layer, or of all layers stacked: sums over the counted tokens."""

    chosen: Float[Array, "*L E"]
    """Number of tokens with the expert among their top k."""
    probability: Float[Array, "*L E"]
    """Sum of the router's probabilities of the expert."""
    ids: Shaped[Array, "*L B T k"] | None = None
    """Experts of every token, if they are recorded."""


def ids_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    """Return the type of recorded expert ids; `native_expert` of it is none."""
    return np.uint8 if num_experts < 256 else np.uint16


@runtime_checkable
class Experts(Protocol):
    """Weighted sum of the outputs of each token's experts.

    (x [B T D], weights [B T k], chosen [B T k], gate [E D F], up [E D F], down [E F D], and either
    no biases or those of gate [E F], up [E F] and down [E D]) -> [B T D].
    """

    def __call__(
        self,
        x: Array,
        weights: Array,
        chosen: Array,
        gate: ExpertMatrix,
        up: ExpertMatrix,
        down: ExpertMatrix,
        /,
        *biases: Array,
        activation: Activation = "silu",
    ) -> Array: ...


class MoE(nnx.Module):
    """Sum over a token's k experts of weight · down(activation(gate(x), up(x))).

    As in Qwen3-MoE (arXiv:2505.09388); where there is a shared expert, plus
    sigmoid(x · shared_gate) · shared(x) (Qwen2-MoE, arXiv:2407.10671), or shared(x) alone
    (DeepSeek-V3, whose choice of experts is `_choose_in_groups`).

    The router's weights, product and softmax are float32 in engine and trainer, in every compute
    dtype, and of equal probabilities the expert with the lower number wins. So both choose the same
    experts for the same x, up to the rounding of a float32 sum. The remaining difference is the
    rounding of x, which importance weighting corrects as for dense policies: the engine reports the
    log-probability with which it sampled a token.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        key: PRNGKeyArray,
        shared: Callable[[Array], Array] | None = None,
    ):
        """
        Args:
            config: architecture.
            moe: its experts.
            key: random key of the parameters.
            shared: module of the shared expert; None: there is none.
        """
        self.moe = moe
        self.activation: Activation = config.traits.activation
        self.has_biases = config.traits.has_expert_biases
        D, E, F = config.hidden_size, moe.num_experts, moe.moe_intermediate_size
        self.shared = shared
        if shared is not None and config.traits.has_shared_gate:
            self.shared_gate = nnx.Param(jnp.zeros(D), axes=("embed",))
        router_key, gate_key, up_key, down_key = jax.random.split(key, 4)
        self.router = _sampled(router_key, (D, E), ("embed", "experts"))
        self.expert_gate = _sampled(gate_key, (E, D, F), ("expert_matrices", "embed", "mlp"))
        self.expert_up = _sampled(up_key, (E, D, F), ("expert_matrices", "embed", "mlp"))
        self.expert_down = _sampled(down_key, (E, F, D), ("expert_matrices", "mlp", "embed"))
        if moe.groups is not None:
            self.selection_bias = nnx.Param(jnp.zeros(E), axes=("experts",))
        if self.has_biases:
            self.router_bias = nnx.Param(jnp.zeros(E), axes=("experts",))
            self.expert_gate_bias, self.expert_up_bias = (
                nnx.Param(jnp.zeros((E, F)), axes=("experts", "mlp")) for _ in range(2)
            )
            self.expert_down_bias = nnx.Param(jnp.zeros((E, D)), axes=("experts", "embed"))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        experts: Experts,
        counted: Bool[Array, "B T"] | None,
        replay: Shaped[Array, "B T k"] | None = None,
        *,
        records: bool = False,
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Apply the experts.

        Args:
            x: hidden states.
            experts: computation of the experts.
            counted: mask of the tokens whose routing is summed; None for no sums.
            replay: recorded experts (R3, arXiv:2510.11370), which replace the choice of the router
                except where they are `native_expert`; their weights are the router's. The sums are
                those of the router's own choice.
            records: whether to return the experts of every token.
        """
        logits = jnp.matmul(
            x.astype(jnp.float32), self.router[...], precision=jax.lax.Precision.HIGHEST
        )
        biases = ()
        if self.has_biases:
            logits = logits + self.router_bias[...]
            biases = self.expert_gate_bias, self.expert_up_bias, self.expert_down_bias
        groups, k = self.moe.groups, self.moe.num_experts_per_tok
        if groups is None:
            scores = probabilities = jax.nn.softmax(logits)
            weights, native = jax.lax.top_k(scores, k)
        else:
            scores = jax.nn.sigmoid(logits)
            probabilities = scores / scores.sum(axis=-1, keepdims=True)
            native = _choose_in_groups(scores + self.selection_bias[...], groups, k)
            weights = jnp.take_along_axis(scores, native, axis=-1)
        chosen = native
        if replay is not None:
            is_native = replay == native_expert(replay.dtype)
            chosen = jnp.where(is_native, native, replay.astype(native.dtype))
            weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.moe.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        if groups is not None:
            weights = weights * groups.routed_scaling_factor
        weights = weights.astype(x.dtype)
        matrices = self.expert_gate, self.expert_up, self.expert_down
        y = experts(
            x,
            weights,
            chosen,
            *(each.get_value() for each in (*matrices, *biases)),
            activation=self.activation,
        )
        if self.shared is not None:
            y = y + self._shared(x, self.shared)
        if counted is None and not records:
            return y, None
        ids = chosen.astype(ids_dtype(self.moe.num_experts)) if records else None
        if counted is None:
            zeros = jnp.zeros(self.moe.num_experts)
            return y, Routing(zeros, zeros, ids)
        mask = counted[..., None].astype(jnp.float32)
        hits = jax.nn.one_hot(native, self.moe.num_experts).sum(axis=2) * mask
        return y, Routing(hits.sum(axis=(0, 1)), (probabilities * mask).sum(axis=(0, 1)), ids)

    def _shared(
        self, x: Float[Array, "B T D"], shared: Callable[[Array], Array]
    ) -> Float[Array, "B T D"]:
        """Compute the shared expert, multiplied by its gate if there is one."""
        if not hasattr(self, "shared_gate"):
            return shared(x)
        wide = jnp.einsum("btd,d->bt", x.astype(jnp.float32), self.shared_gate[...])
        return jax.nn.sigmoid(wide)[..., None].astype(x.dtype) * shared(x)


def _choose_in_groups(
    scores: Float[Array, "B T E"], groups: ExpertGroups, num_experts_per_tok: int
) -> Int[Array, "B T k"]:
    """Choose the highest scores in the groups whose two highest have the largest sum.

    DeepSeek-V3 (arXiv:2412.19437), equation 16 and section 2.1.2: the scores include the bias that
    balances the load, which has no gradient and is no part of the weights.
    """
    scores = jax.lax.stop_gradient(scores)
    grouped = scores.reshape(*scores.shape[:2], groups.n_group, -1)
    best = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
    kept = jax.lax.top_k(best, groups.topk_group)[1]
    is_kept = jax.nn.one_hot(kept, groups.n_group, dtype=bool).any(axis=2)
    inside = jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(inside, num_experts_per_tok)[1]


def balance_loss(routing: Routing, num_tokens: Float[Array, ""]) -> Float[Array, ""]:
    """Compute the load-balance loss: E · Σ_e (mean choices of e) · (mean probability of e).

    Switch Transformer, arXiv:2101.03961, equations 4 to 6, with means over tokens and all layers as
    in `load_balancing_loss_func` of transformers. A balanced load has loss k.

    Args:
        routing: routing of all layers.
        num_tokens: number of counted tokens; if 0, the loss is 0.
    """
    L, E = routing.chosen.shape
    rows = jnp.maximum(num_tokens, 1) * L
    return E * jnp.sum(routing.chosen.sum(axis=0) / rows * (routing.probability.sum(axis=0) / rows))


def router_metrics(routing: Routing) -> dict[str, Float[Array, ""]]:
    """Compute metrics of the load balance, as means over layers.

    `router_busiest_expert`: load of the busiest expert over the mean load, at best 1.
    `router_idle_experts`: share of experts without a token, at best 0.
    """
    busiest = routing.chosen.max(axis=1) / jnp.maximum(routing.chosen.mean(axis=1), 1e-9)
    return {
        "router_busiest_expert": busiest.mean(),
        "router_idle_experts": (routing.chosen == 0).mean(),
    }


def choose_grouped_kernel(platform: str, num_experts: int, width: int, inner: int) -> GroupedKernel:
    """Choose the kernel of the products of experts.

    Args:
        platform: platform of the devices, as named by jax.
        num_experts: local experts.
        width: inputs of an expert.
        inner: width of an expert on one device.
    """
    match platform:
        case "tpu":
            return "tpu"
        # The kernel's indices have 32 bits.
        case "gpu" | "cuda" if num_experts * width * inner < 2**31:
            return "gpu"
        case _:
            return "blocks"


def row_layout(
    num_assignments: int, num_experts: int, kernel: GroupedKernel = "blocks"
) -> tuple[int, int]:
    """Return the size of a block of rows, and the number of rows of all local experts.

    The rows of an expert start at a multiple of a block, whose size is about the mean number of
    assignments per expert, on accelerators at most 128: padding at most doubles the rows, however
    uneven the load, and the product by blocks reads each matrix only a few times.

    Args:
        num_assignments: assignments of tokens to experts, local and remote.
        num_experts: local experts.
        kernel: kernel of the products.
    """
    block = 1 << (max(num_assignments // num_experts, 1).bit_length() - 1)
    if kernel != "blocks":
        block = min(block, MAX_BLOCK)
    if kernel == "gpu":
        block = max(block, MIN_TILE)
    num_padded = min(num_experts, num_assignments) if block > 1 else 0
    return block, block * (num_assignments // block + num_padded)


def local_experts(
    x: Float[Array, "B T D"],
    weights: Float[Array, "B T k"],
    chosen: Int[Array, "B T k"],
    gate: Float[Array, "E D F"] | Quantized | Adapted,
    up: Float[Array, "E D F"] | Quantized | Adapted,
    down: Float[Array, "E F D"] | Quantized | Adapted,
    *biases: Float[Array, "E _"],
    activation: Activation = "silu",
    first: int | Int[Array, ""] = 0,
    kernel: GroupedKernel = "blocks",
) -> Float[Array, "B T D"]:
    """Compute the local experts; the terms of other experts are left out.

    Args:
        x: hidden states.
        weights: weights of each token's experts.
        chosen: numbers of each token's experts.
        gate: gate matrices of the local experts.
        up: up matrices.
        down: down matrices.
        biases: biases of gate, up and down; or none.
        activation: activation of the experts.
        first: number of the first local expert.
        kernel: see `choose_grouped_kernel`.
    """
    E, (B, T, k) = gate.shape[0], chosen.shape
    num_assignments = B * T * k
    block, num_rows = row_layout(num_assignments, E, kernel)
    number = chosen.reshape(-1) - first
    is_local = (number >= 0) & (number < E)
    number = jnp.where(is_local, number, E)
    sizes = jnp.bincount(number, length=E)
    padded = -(-sizes // block) * block
    order = jnp.argsort(number, stable=True)
    before, row_before = (
        jnp.append(jnp.cumsum(counts) - counts, num_rows) for counts in (sizes, padded)
    )
    rank = (
        jnp.zeros_like(order).at[order].set(jnp.arange(num_assignments), unique_indices=True)
        - before[number]
    )
    # Assignments to remote experts get distinct rows beyond the end.
    row = jnp.where(is_local, row_before[number] + rank, num_rows + jnp.arange(num_assignments))
    token = (
        jnp.full(num_rows, B * T)
        .at[row]
        .set(jnp.arange(num_assignments) // k, mode="drop", unique_indices=True)
    )
    rows = x.reshape(B * T, -1).at[token].get(mode="fill", fill_value=0)

    def product(x: Array, w: ExpertMatrix, *bias: Array) -> Array:
        if isinstance(w, Adapted):
            return product(x, w.w, *bias) + product(w.scale * product(x, w.a), w.b)
        y = _product(x, w.values if isinstance(w, Quantized) else w, padded, block, kernel)
        if not bias and not isinstance(w, Quantized):
            return y
        groups = jnp.repeat(find_groups(padded, block, num_rows // block), block)
        if isinstance(w, Quantized):
            y = rescale(y, w.scale[:, 0][groups])
        return y + bias[0][groups].astype(y.dtype) if bias else y

    gate_bias, up_bias, down_bias = ((each,) for each in biases) if biases else ((), (), ())
    inner: Array = gated(activation, product(rows, gate, *gate_bias), product(rows, up, *up_bias))
    out = product(inner, down, *down_bias)
    # Back to the order of tokens by a gather; the sums of a scatter-add would depend on its order.
    out = out.at[row].get(mode="fill", fill_value=0).reshape(B, T, k, -1)
    return jnp.einsum("btkd,btk->btd", out, weights, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


def sharded_experts(mesh: Mesh, rules: Rules, copies: tuple[str, ...] = ()) -> Experts:
    """Make the computation of experts on a mesh (expert parallelism).

    `rules` shard experts like their parameters and tokens like rows. Devices that differ in rows
    and experts all-gather tokens, compute their own experts, and reduce-scatter the sums. With
    several experts per token nearly every token goes to nearly every device, so an all-to-all would
    save little; and shapes are static without a capacity beyond which tokens are dropped.

    Args:
        mesh: mesh of the policy.
        rules: logical axes to mesh axes.
        copies: axes of copies that have tiles in the matrices (`parallel.fsdp.Copies`).
    """

    def experts(
        x: Array,
        weights: Array,
        chosen: Array,
        gate: ExpertMatrix,
        up: ExpertMatrix,
        down: ExpertMatrix,
        *biases: Array,
        activation: Activation = "silu",
    ) -> Array:
        tokens = sharding(mesh, ("batch", "tokens", None), x.shape, rules).spec
        wide = sharding(mesh, ("experts", None, "mlp"), gate.shape, rules).spec
        expert_axes = (*_names(wide[0]), *_names(wide[2]))
        shared = tuple(name for name in _names(tokens[0]) if name in expert_axes)

        inner = PartitionSpec(wide[0], wide[2])
        into = PartitionSpec(wide[0], copies, wide[2])
        out = PartitionSpec(wide[0], wide[2], copies)
        in_specs = (*(tokens,) * 3, _specs(gate, into), _specs(up, into), _specs(down, out))
        if biases:
            in_specs = (*in_specs, inner, inner, PartitionSpec(wide[0]))

        # check_vma=False, because the custom gradient does not declare over which axes its result
        # is summed; shard_map sums it.
        @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=tokens, check_vma=False)
        def on_shard(
            x: Array,
            weights: Array,
            chosen: Array,
            gate: ExpertMatrix,
            up: ExpertMatrix,
            down: ExpertMatrix,
            *biases: Array,
        ) -> Array:
            if biases and _names(wide[2]):
                # The bias of down is in one of the parts that are summed.
                is_first = jax.lax.axis_index(_names(wide[2])) == 0
                biases = *biases[:2], jnp.where(is_first, biases[2], 0)
            if shared:
                x, weights, chosen = (
                    jax.lax.all_gather(array, shared, tiled=True) for array in (x, weights, chosen)
                )
            first = jax.lax.axis_index(_names(wide[0])) * gate.shape[0] if _names(wide[0]) else 0
            y = local_experts(
                *(x, weights, chosen, gate, up, down, *biases),
                activation=activation,
                first=first,
                kernel=_find_kernel(mesh.devices.flat[0].platform, gate.shape),
            )
            y = jax.lax.psum(y, tuple(name for name in expert_axes if name not in shared))
            return jax.lax.psum_scatter(y, shared, tiled=True) if shared else y

        # The product with 1, which the compiler removes, keeps gradients that are accumulated in
        # place out of the unchecked shard_map: since jax 0.12 it refuses to add to them.
        matrices = jax.tree.map(lambda array: array * 1, (gate, up, down, *biases))
        return on_shard(x, weights, chosen, *matrices)

    return experts


@cache
def _find_kernel(platform: str, shape: tuple[int, int, int]) -> GroupedKernel:
    """Choose the kernel, and log once where that is a slow path."""
    kernel = choose_grouped_kernel(platform, *shape)
    if kernel == "blocks" and platform != "cpu":
        logger.warning(
            "slow path part=experts kernel=blocks platform=%s shape=%s: the kernel takes less than "
            "2**31 numbers in the matrices of a layer on one device; set placement.train_expert or "
            "placement.rollout_tensor higher",
            platform,
            shape,
        )
    return kernel


def _specs(w: ExpertMatrix, whole: PartitionSpec) -> Any:
    """Return the spec of a matrix; the scales of a quantized one have size 1 in its inputs, and
    the rank of an adapter is whole on every device.
    """
    if isinstance(w, Adapted):
        experts, inputs, outputs = whole
        a, b = PartitionSpec(experts, inputs), PartitionSpec(experts, None, outputs)
        return Adapted(_specs(w.w, whole), a, b, w.scale)
    if not isinstance(w, Quantized):
        return whole
    parts = (part if size > 1 else None for part, size in zip(whole, w.scale.shape, strict=False))
    return Quantized(whole, PartitionSpec(*parts))


def _sampled(key: PRNGKeyArray, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param[Array]:
    return nnx.Param(shape[-2] ** -0.5 * jax.random.normal(key, shape, jnp.float32), axes=axes)


def _names(spec: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (spec,) if isinstance(spec, str) else spec or ()


def _grouped(
    x: Float[Array, "R I"],
    w: Num[Array, "E I O"],
    sizes: Int[Array, "E"],
    block: int,
    kernel: GroupedKernel,
) -> Float[Array, "R O"]:
    """Compute x · w[e] in the dtype of x, with e the group of the row.

    The first sizes[0] rows are group 0, and so on; each size is a multiple of `block`. Rows after
    all groups are meaningless. The gradient of w is summed in float32.
    """
    match kernel:
        case "gpu":
            # Its kernel converts matrices of 8 bits.
            w = w if w.dtype.itemsize == 1 else w.astype(x.dtype)
            return gpu_grouped_product(x, w, sizes, block)
        case "tpu":
            return jax.lax.ragged_dot(x, w.astype(x.dtype), sizes)
        case "blocks":
            # XLA would multiply every row by the matrix of every group and mask: on a CPU, 512
            # tokens with 8 of 32 experts took 13 times the time of blocks, and 7 times the memory.
            return _by_blocks(x, w.astype(x.dtype), sizes, block=block)


_product = jax.custom_vjp(_grouped, nondiff_argnums=(3, 4))


def _product_forward(
    x: Array, w: Array, sizes: Array, block: int, kernel: GroupedKernel
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _product(x, w, sizes, block, kernel), (x, w, sizes)


def _product_backward(
    block: int, kernel: GroupedKernel, saved: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array, None]:
    x, w, sizes = saved
    if kernel == "gpu":
        dx = gpu_grouped_product(dy, w.astype(dy.dtype), sizes, block, is_transposed=True)
        return dx, gpu_grouped_gradient(x, dy, sizes, block, w.dtype), None
    dx = _product(dy, w.swapaxes(1, 2), sizes, block, kernel)
    is_tpu = kernel == "tpu"
    dw = tpu_gradient(x, dy, sizes) if is_tpu else _gradient_by_blocks(x, dy, sizes, block=block)
    return dx, dw.astype(w.dtype), None


_product.defvjp(_product_forward, _product_backward)


def _by_blocks(x: Array, w: Array, sizes: Array, *, block: int) -> Array:
    blocks = x.reshape(-1, block, x.shape[-1])
    return jnp.einsum("nbi,nio->nbo", blocks, w[find_groups(sizes, block, len(blocks))]).reshape(
        len(x), -1
    )


def _gradient_by_blocks(x: Array, dy: Array, sizes: Array, *, block: int) -> Array:
    x, dy = (array.reshape(-1, block, array.shape[-1]) for array in (x, dy))
    block_gradients = jnp.einsum("nbi,nbo->nio", x, dy, preferred_element_type=jnp.float32)
    return jax.ops.segment_sum(
        block_gradients, find_groups(sizes, block, len(x)), len(sizes), indices_are_sorted=True
    )


def tpu_gradient(
    x: Float[Array, "R I"],
    dy: Float[Array, "R O"],
    sizes: Int[Array, "E"],
    *,
    interpret: bool = False,
) -> Float[Array, "E I O"]:
    """Compute the gradient of `_grouped` in float32, with a kernel for TPUs (MegaBlocks,
    arXiv:2211.15841).

    XLA has a kernel for `ragged_dot`, but not for this product: it would multiply every row for
    every expert.

    Args:
        x: inputs.
        dy: gradient of the outputs.
        sizes: rows of each group.
        interpret: run the kernel in interpret mode, without a TPU.
    """
    missing = -len(x) % _LEAST_TILE
    x, dy = (jnp.pad(each, ((0, missing), (0, 0))) for each in (x, dy))
    # All that a tile of the sum needs fits a v5e's memory on the chip.
    inputs = 1024 * 2 // max(x.dtype.itemsize, 2)
    tiling = (
        math.gcd(len(x), 512),
        min(inputs, x.shape[1]),
        min(768, dy.shape[1]),
    )
    return tgmm(x.T, dy, sizes.astype(jnp.int32), jnp.float32, tiling, interpret=interpret)


_LEAST_TILE = 128
"""Rows are padded to a multiple of this."""
