"""The forward pass of a policy over micro-batches of one shape, compiled once.

Axes: B rows, T tokens of a row. The file has more than 400 lines because of its one class, and the
records of its columns.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from areal_jax.models import lora
from areal_jax.models.attention import (
    Kernel,
    choose_kernel,
    find_slow_attention,
    sharded_attention,
)
from areal_jax.models.blocked_attention import Visibility
from areal_jax.models.config import Remat
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.delta_rule import sharded_recurrence
from areal_jax.models.moe import Routing, ids_dtype, sharded_experts
from areal_jax.models.vision.tower import MAX_DENSE_PATCHES, ImageInputs
from areal_jax.parallel.compilation import Compiler, compile_lowered
from areal_jax.parallel.fsdp import (
    COPIES,
    NOT_TILED,
    Copies,
    FullySharded,
    ShardedMatrix,
    fully_sharded,
    untile,
)
from areal_jax.parallel.sharding import (
    TRAIN_RULES,
    batch_sharding,
    is_axes,
    num_shards,
    sharding,
    shardings,
)
from areal_jax.rl.distillation import TeacherTargets
from areal_jax.rl.logprobs import token_logprobs, top_predictions
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.state import trained

logger = logging.getLogger(__name__)

MAX_UNROLLED_LAYERS = 8
"""Largest number of layers that are unrolled. 4 unrolled layers on a CPU take a quarter less time
and memory than a scan, which stacks what it saves for the backward pass, and compile as fast. With
more layers, compile time grows too long."""


class ModelInputs(NamedTuple):
    """Columns of a micro-batch that a forward pass reads."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T ..."]
    experts: Shaped[Array, "B T L k"] | None = None
    """Recorded experts, to which tokens go instead of the router's choice."""
    images: ImageInputs | None = None
    visible_until: Int[Array, "B T"] | None = None
    """Present if sequences share tokens, as in `PackedBatch`."""


class DeviceBatch(NamedTuple):
    """A `PackedBatch` on the train mesh, with columns that are computed there."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T ..."]
    loss_mask: Bool[Array, "B T"]
    behave_logp: Float[Array, "B T"]
    age: Int[Array, "B T"]
    proximal_logp: Float[Array, "B T"]
    """Zeros until it is replaced."""
    advantages: Float[Array, "B T"]
    """Zeros until it is replaced."""
    reference_logp: Float[Array, "B T"] | None = None
    """Present if the objective reads a reference."""
    positive_weights: Float[Array, "B T"] | None = None
    """Weight of each token in the negative log-likelihood of correct answers; present if the
    objective has it."""
    weights: Float[Array, "B T"] | None = None
    """Weight of each token in the mean that the loss is; present if that is not the mean over
    tokens and the objective reads it.
    """
    experts: Shaped[Array, "B T L k"] | None = None
    """Present if the policy replays recorded experts."""
    images: ImageInputs | None = None
    """Present if the policy reads images."""
    visible_until: Int[Array, "B T"] | None = None
    """Present if sequences share tokens, as in `PackedBatch`."""
    teacher_logp: Float[Array, "B T"] | None = None
    """Present if the objective reads a teacher's log-probs."""
    clip_bound: Float[Array, "B T"] | None = None
    """Bound on |log(theta/behave)|, present if the objective has one for each mini-batch."""
    teacher_targets: TeacherTargets | None = None
    """Present if the objective reads a teacher's distributions."""


class Predictions(NamedTuple):
    """What a policy predicts of a micro-batch, and from what."""

    logp: Float[Array, "B T"]
    """Log-prob of every token; with a scalar head, at token t the value of what follows token t."""
    entropy: Float[Array, "B T"] | None
    """Entropy of the distribution that the token was sampled from; None with a scalar head."""
    routing: Routing | None
    """Routing of a mixture of experts."""
    hidden: Float[Array, "B T D"]
    head: Float[Array, "D V"] | None
    """None with a scalar head."""


class TopPredictions(NamedTuple):
    """The log-prob of every token, and the most likely tokens at its place."""

    logp: Float[Array, "B T"]
    ids: Int[Array, "B T K"]
    """-1 where nothing is predicted."""
    top_logp: Float[Array, "B T K"]


def check_row_shards(policy: Policy, mesh: Mesh, row_tokens: int) -> None:
    """Check that the mesh's context axis divides rows of this length, and the attention heads.

    Raises:
        ValueError: It does not.
    """
    context, heads = mesh.shape["context"], policy.config.num_attention_heads
    if row_tokens % context:
        raise ValueError(
            f"rows of {row_tokens} tokens are not divisible by placement.train_context={context}; "
            f"set trainer.row_tokens to a multiple of {context}"
        )
    if context > 1 and heads % num_shards(mesh, "attending_heads", TRAIN_RULES):
        raise ValueError(
            f"{heads} attention heads are not divisible by placement.train_context={context} times "
            f"placement.train_tensor={mesh.shape['tensor']}, over which attention shards them; "
            "lower either"
        )


class Forward:
    """The forward pass of a policy over micro-batches of one shape on the train mesh.

    Parameters are arguments. `hidden` and `predictions` are pure, and traced into other programs;
    `logprobs` is a compiled program of its own. The class has more than 200 lines because it places
    every kind of column of a micro-batch.
    """

    def __init__(
        self,
        config: TrainerConfig,
        policy: Policy,
        mesh: Mesh,
        compute_dtype: DTypeLike,
        *,
        temperature: float,
        row_tokens: int,
        replays_router: bool = False,
        shares_prefixes: bool = False,
        compiler: Compiler = compile_lowered,
    ):
        """
        Args:
            config: Micro-batch shape, remat and entropy bonus.
            policy: The policy.
            mesh: The train mesh.
            compute_dtype: Data type of activations and matrices.
            temperature: Sampling temperature, by which logits are divided.
            row_tokens: Length of a row, in tokens.
            replays_router: Whether tokens go to the recorded experts of a batch (R3,
                arXiv:2510.11370); otherwise a batch's experts are not read.
            shares_prefixes: Whether tokens with which several sequences of a row begin are in the
                row once.
            compiler: Compiles this program and those that it is traced into.

        Raises:
            ValueError: The mesh's context axis does not divide rows or heads.
        """
        check_row_shards(policy, mesh, row_tokens)
        self.policy, self.mesh, self.compute_dtype = policy, mesh, compute_dtype
        self.temperature, self.row_tokens = temperature, row_tokens
        self.replays_router, self.compiler = replays_router, compiler
        self.remat: Remat = config.remat
        self.learns_entropy = config.entropy_coef != 0.0
        platform = mesh.devices.flat[0].platform
        self.kernel: Kernel = choose_kernel(platform, row_tokens)
        self.shares_prefixes = shares_prefixes
        slow = find_slow_attention(
            platform, self.kernel, policy.config, shares_prefixes=shares_prefixes
        )
        if slow:
            logger.warning("slow path part=training kernel=blocked platform=%s: %s", platform, slow)
        if shares_prefixes and self.kernel == "tpu":
            self.kernel = "blocked"  # the one for TPUs knows segments only
        self.rows = config.rows_per_micro_batch * num_shards(mesh, "batch", TRAIN_RULES)
        self.chunk_tokens = (
            config.logp_chunk_tokens
            * num_shards(mesh, "batch", TRAIN_RULES)
            * mesh.shape["context"]
        )
        self.freezes_vision = config.freeze_vision
        vision, self.row_patches = policy.config.vision, 0
        if vision is not None:
            self.row_patches = config.row_image_tokens * vision.merged_patches
            if self.row_patches > MAX_DENSE_PATCHES:
                # Whole blocks of attention.
                self.row_patches += -self.row_patches % MAX_DENSE_PATCHES
        # Adapters are small, and their gradients are summed at once.
        has_copies = not policy.lora and any(mesh.shape[axis] > 1 for axis in COPIES)
        self._tile_axes = COPIES if has_copies else ()
        self._table = policy.config.hidden_size, policy.config.vocab_size
        self._programs: dict[int, jax.stages.Compiled] = {}

    @property
    def copies(self) -> Copies:
        """Tiles of the trained parameters, with which gradients are summed over copies of them once
        for an update.
        """
        of_model = trained(self.policy)

        def tiled_dim(path: tuple[Any, ...], names: tuple[str, ...], leaf: Any) -> int:
            is_tiled = self._tile_axes and path[0].key in ("embed", "head", "layers")
            # Matrices of experts have three dimensions and that of the layers; others are vectors.
            if is_tiled and (
                (len(names) == 4 and names[1] == "expert_matrices")
                or self._shards(names, leaf.shape, self._tile_axes) is not None
            ):
                return names.index("embed")
            return NOT_TILED

        return Copies(
            shardings(self.mesh, of_model.axes, of_model.abstract, TRAIN_RULES),
            jax.tree_util.tree_map_with_path(
                tiled_dim,
                of_model.axes,
                of_model.abstract,
                is_leaf=is_axes,
            ),
        )

    @property
    def placed(self) -> NamedSharding:
        """Sharding of a column of a micro-batch."""
        return batch_sharding(self.mesh, (self.rows, self.row_tokens), TRAIN_RULES)

    def column(self, dtype: DTypeLike) -> Any:
        """Return the shape of a column of a micro-batch."""
        return jax.ShapeDtypeStruct((self.rows, self.row_tokens), dtype, sharding=self.placed)

    def experts_column(self) -> Any:
        """Return the shape of the recorded experts of a micro-batch; None without."""
        model, moe = self.policy.config, self.policy.config.moe
        if not self.replays_router or moe is None:
            return None
        return jax.ShapeDtypeStruct(
            (self.rows, self.row_tokens, model.num_moe_layers, moe.num_experts_per_tok),
            ids_dtype(moe.num_experts),
            sharding=self.placed,
        )

    def positions_column(self) -> Any:
        """Return the shape of the positions of a micro-batch."""
        shape = (self.rows, self.row_tokens, *([3] if self.row_patches else []))
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self.placed)

    def images_column(self) -> Any:
        """Return the shapes of the images of a micro-batch; None without."""
        vision = self.policy.config.vision
        if vision is None or not self.row_patches:
            return None

        def column(width: int, dtype: DTypeLike) -> Any:
            shape = self.rows, self.row_patches, width
            placed = batch_sharding(self.mesh, shape, TRAIN_RULES)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

        return ImageInputs(
            column(vision.patch_width, np.float32), column(5, np.int32), self.column(np.int32)
        )

    def visible_until_column(self) -> Any:
        """Return the shape of `visible_until` of a micro-batch; None without."""
        return self.column(np.int32) if self.shares_prefixes else None

    def targets_column(self, num_top: int) -> TeacherTargets | None:
        """Return the shapes of a teacher's most likely tokens at each token; None without."""
        if not num_top:
            return None
        shape = (self.rows, self.row_tokens, min(num_top, self.policy.config.vocab_size))
        top: list[Any] = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=self.placed)
            for dtype in (np.int32, np.float32)
        ]
        return TeacherTargets(top[0], top[1], self.column(np.int32), self.column(np.float32))

    def inputs(self, batch: DeviceBatch | ModelInputs) -> ModelInputs:
        """Return what this forward pass reads.

        Raises:
            ValueError: The batch has images, and the policy does not read them.
        """
        if batch.images is not None and not self.row_patches:
            raise ValueError(
                f"expected a policy that reads images, found {self.policy.config.architecture}; "
                "set reference, teacher and critic to vision-language policies too, or leave them "
                "out"
            )
        return ModelInputs(
            batch.tokens,
            batch.segment_ids,
            batch.positions,
            batch.experts if self.replays_router else None,
            batch.images,
            batch.visible_until,
        )

    @property
    def num_compilations(self) -> int:
        """Number of programs compiled so far."""
        return len(self._programs)

    def logprobs(
        self, params: Params, base: Params, batch: DeviceBatch | ModelInputs
    ) -> Float[Array, "B T"]:
        """Return the log-prob of every token, asynchronously.

        With a scalar head: at token t, the value of what follows token t.
        """
        return self.compiled(params, base)(params, base, self.inputs(batch))

    def top_predictions(
        self, params: Params, base: Params, batch: DeviceBatch | ModelInputs, num_top: int
    ) -> TopPredictions:
        """Return the log-prob of every token and the `num_top` most likely ones, asynchronously."""
        return self.compiled(params, base, num_top)(params, base, self.inputs(batch))

    def compiled(self, params: Params, base: Params, num_top: int = 0) -> jax.stages.Compiled:
        """Return the program behind `logprobs`, or behind `top_predictions` of `num_top` tokens;
        compile it first if this is its first use.
        """
        if num_top not in self._programs:
            inputs = ModelInputs(*[self.column(np.int32)] * 3)._replace(
                positions=self.positions_column(),
                experts=self.experts_column(),
                images=self.images_column(),
                visible_until=self.visible_until_column(),
            )
            function = partial(self._top_predictions, num_top) if num_top else self._logprobs
            jitted = jax.jit(function, out_shardings=self.placed)
            self._programs[num_top] = self.compiler(jitted.lower(params, base, inputs), self.mesh)
        return self._programs[num_top]

    def _logprobs(self, params: Params, base: Params, inputs: ModelInputs) -> Float[Array, "B T"]:
        return self.predictions(params, base, inputs).logp

    def _top_predictions(
        self, num_top: int, params: Params, base: Params, inputs: ModelInputs
    ) -> TopPredictions:
        found = self.predictions(params, base, inputs)
        assert found.head is not None
        ids, top_logp = top_predictions(
            found.hidden,
            found.head,
            inputs.segment_ids,
            num_top,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
        )
        return TopPredictions(found.logp, ids, top_logp)

    def predictions(
        self,
        params: Params,
        base: Params,
        inputs: ModelInputs,
        targets: Int[Array, "B T"] | None = None,
        *,
        is_tiled: bool = False,
    ) -> Predictions:
        """Return what the policy predicts of a micro-batch.

        Args:
            params: Trained parameters.
            base: Frozen parameters of an adapter.
            inputs: What it reads.
            targets: Tokens whose log-probs are returned, each at its place in the row; None: those
                that it reads.
            is_tiled: Whether `params` are tiles of `copies`.
        """
        whole = self.whole(params, base)
        copies = self._tile_axes if is_tiled else ()
        hidden, routing = self.hidden(whole, inputs, copies)
        if self.policy.config.is_scalar:
            return Predictions(self.policy.values(whole, hidden), None, routing, hidden, None)
        head = self.policy.head(whole)
        logp, entropy = token_logprobs(
            hidden,
            head,
            inputs.tokens if targets is None else targets,
            inputs.segment_ids,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            learns_entropy=self.learns_entropy,
            shards=self._shards(("embed", "vocab"), self._table, copies),
        )
        if copies:
            head = self._untiled_head(head)
        return Predictions(logp, entropy, routing, hidden, head)

    def whole(self, params: Params, base: Params) -> Params:
        """Return the parameters that the decoder reads: an adapter is attached to its `base`.

        Without `base`, `params` have adapters attached.
        """
        return lora.attach(self.policy, base, params) if self.policy.lora and base else params

    def hidden(
        self, whole: Params, inputs: ModelInputs, copies: tuple[str, ...] = ()
    ) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Return the hidden states after the last layer, and the routing.

        Args:
            whole: Result of `whole`.
            inputs: Tokens, segment ids and positions.
            copies: Axes of copies that have tiles in the parameters.
        """
        embed = whole["embed"]
        shards = self._shards(("vocab", "embed"), self._table[::-1], copies)
        whole = whole | {
            "embed": self._constrain(embed, ("vocab",))
            if shards is None
            else ShardedMatrix(embed, shards)
        }
        if not self.policy.lora:
            whole = whole | {"layers": self._sharded_layers(whole["layers"], copies)}
        images = None
        if inputs.images is not None:
            if self.freezes_vision:
                whole = whole | {"vision": jax.lax.stop_gradient(whole["vision"])}
            images = self.policy.encode_images(
                whole, inputs.images, compute_dtype=self.compute_dtype, remat=self.remat
            )
        shared = None
        if inputs.visible_until is not None:
            shared = Visibility.of_shared(
                inputs.segment_ids, inputs.visible_until, inputs.positions
            )
        hidden, _, routing = self.policy.hidden(
            whole,
            inputs.tokens,
            inputs.positions,
            sharded_attention(inputs.segment_ids, self.kernel, self.mesh, TRAIN_RULES, shared),
            compute_dtype=self.compute_dtype,
            # Without a scan, XLA on CPU merges what remat recomputes with the first computation, so
            # that remat saves nothing.
            unroll=self.remat == "none"
            and self.policy.config.num_hidden_layers <= MAX_UNROLLED_LAYERS,
            remat=self.remat,
            experts=sharded_experts(self.mesh, TRAIN_RULES, copies),
            recur=sharded_recurrence(self.mesh, TRAIN_RULES),
            counted=inputs.segment_ids > 0,
            replay=inputs.experts,
            images=images,
        )
        return self._constrain(hidden, ("batch", "tokens")), routing

    def _sharded_layers(self, layers: Params, copies: tuple[str, ...]) -> Params:
        """Return the layers with matrices that are gathered and whose gradients are scattered."""

        def sharded(names: tuple[str, ...], shape: Any, leaf: Array) -> Any:
            shards = self._shards(names, shape.shape, copies)
            return leaf if shards is None else ShardedMatrix(leaf, shards)

        return jax.tree.map(
            sharded,
            self.policy.axes()["layers"],
            self.policy.abstract()["layers"],
            layers,
            is_leaf=is_axes,
        )

    def _shards(
        self, names: tuple[str, ...], shape: tuple[int, ...], copies: tuple[str, ...] = ()
    ) -> FullySharded | None:
        """Return how a matrix is sharded, or a stack of them; None for other parameters.

        Args:
            names: Its logical axes.
            shape: Its shape without tiles.
            copies: Axes of copies that have tiles in it.
        """
        if names[0] == "layers":
            names, shape = names[1:], shape[1:]
        # Experts gather their own.
        if "embed" not in names or len(names) < 2 or {"experts", "expert_matrices"} & {*names}:
            return None
        # Heads and their sizes are one dimension of the flattened matrix.
        is_first = names[0] == "embed"
        axes = ("embed", names[1]) if is_first else (names[0], "embed")
        sizes = shape[0], shape[1 if is_first else -1]
        tokens = self.rows, self.row_tokens
        return fully_sharded(self.mesh, axes, sizes, tokens, TRAIN_RULES, copies)

    def _untiled_head(self, head: Float[Array, "_D V"]) -> Float[Array, "D V"]:
        """Return a tiled head without tiles."""
        width, vocabulary = self._table
        placed = sharding(self.mesh, ("embed", "vocab"), (width, vocabulary), TRAIN_RULES)
        # jax 0.12 does not accumulate gradients in place that come out of the unchecked shard_map,
        # hence the product with 1, which the compiler removes.
        return untile(head * 1, placed, 0)

    def _constrain(self, x: Array, axes: tuple[str, ...]) -> Array:
        return jax.lax.with_sharding_constraint(x, sharding(self.mesh, axes, x.shape, TRAIN_RULES))
