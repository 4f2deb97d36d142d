"""What a policy says of micro-batches of one shape, compiled once; and policies that are asked but
not trained.

Axes: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models import lora
from areal_jax.models.attention import Kernel, choose_kernel, sharded_attention
from areal_jax.models.config import Remat
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.moe import Routing, sharded_experts
from areal_jax.parallel.sharding import TRAIN_RULES, batch_sharding, num_shards, sharding
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.state import in_host_memory

MOST_UNROLLED_LAYERS = 8
"""Up to here the layers are compiled one after the other: for 4 layers on a CPU that takes a
quarter less time and memory than a scan, which stacks what it keeps for the backward pass, and
compiles as fast. Beyond, compile time grows too long."""


class Read(NamedTuple):
    """Of a micro-batch, what a forward pass reads."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]


class DeviceBatch(NamedTuple):
    """A PackedBatch on the train mesh, with what is found out about it there."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    behave_logp: Float[Array, "B T"]
    age: Int[Array, "B T"]
    proximal_logp: Float[Array, "B T"]
    """Zeros until it is replaced."""
    advantages: Float[Array, "B T"]
    """Zeros until it is replaced."""
    reference_logp: Float[Array, "B T"] | None = None
    """Where the objective reads a reference."""
    weights: Float[Array, "B T"] | None = None
    """What each token counts in the mean that the loss is, where that is not the mean over tokens
    and the objective asks."""

    @property
    def read(self) -> Read:
        return Read(self.tokens, self.segment_ids, self.positions)


def check_cut(policy: Policy, mesh: Mesh, row_tokens: int) -> None:
    """ValueError where rows of this length cannot be cut as the mesh's context axis asks, or heads
    not be dealt to it."""
    context, heads = mesh.shape["context"], policy.config.num_attention_heads
    if row_tokens % context:
        raise ValueError(
            f"rows of {row_tokens} tokens do not divide by placement.train_context={context}; "
            "set trainer.row_tokens to a multiple"
        )
    if context > 1 and heads % num_shards(mesh, "attending_heads", TRAIN_RULES):
        raise ValueError(
            f"{heads} attention heads do not divide by placement.train_context={context} times "
            f"placement.train_tensor={mesh.shape['tensor']}, to which attention deals them; "
            "lower either"
        )


class Forward:
    """The forward pass of a policy over micro-batches of one shape on the train mesh, under
    whatever parameters are given.

    `hidden` and `predictions` are pure, to be traced into other programs; `logprobs` is a compiled
    program of its own."""

    def __init__(
        self,
        config: TrainerConfig,
        policy: Policy,
        mesh: Mesh,
        compute_dtype: DTypeLike,
        *,
        temperature: float,
        row_tokens: int,
    ):
        check_cut(policy, mesh, row_tokens)
        self.policy, self.mesh, self.compute_dtype = policy, mesh, compute_dtype
        self.temperature, self.row_tokens = temperature, row_tokens
        self.remat: Remat = config.remat
        self.learns_entropy = config.entropy_coef != 0.0
        self.kernel: Kernel = choose_kernel(mesh.devices.flat[0].platform, row_tokens)
        self.rows = config.rows_per_micro_batch * num_shards(mesh, "batch", TRAIN_RULES)
        self.chunk_tokens = (
            config.logp_chunk_tokens
            * num_shards(mesh, "batch", TRAIN_RULES)
            * mesh.shape["context"]
        )
        self._program: jax.stages.Compiled | None = None

    @property
    def placed(self) -> NamedSharding:
        """How a column of a micro-batch lies on the mesh."""
        return batch_sharding(self.mesh, (self.rows, self.row_tokens), TRAIN_RULES)

    def column(self, dtype: DTypeLike) -> Any:
        """A column of a micro-batch, without its values."""
        return jax.ShapeDtypeStruct((self.rows, self.row_tokens), dtype, sharding=self.placed)

    @property
    def num_compilations(self) -> int:
        return int(self._program is not None)

    def logprobs(self, params: Params, base: Params, batch: DeviceBatch) -> Float[Array, "B T"]:
        """Log-probability of every token, or with a scalar head the value of what follows it; on
        the device, not waited for."""
        return self.compiled(params, base)(params, base, batch.read)

    def compiled(self, params: Params, base: Params) -> jax.stages.Compiled:
        """The program behind `logprobs`; compiled now if this is its first use."""
        if self._program is None:
            read = Read(*[self.column(np.int32)] * 3)
            jitted = jax.jit(
                lambda *arguments: self.predictions(*arguments)[0], out_shardings=self.placed
            )
            self._program = jitted.lower(params, base, read).compile()
        return self._program

    def predictions(
        self, params: Params, base: Params, read: Read
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"] | None, Routing | None]:
        """Log-probability of every token and the entropy of what it was sampled from, or with a
        scalar head the value of what follows it and None; and where tokens went among experts."""
        whole = self.whole(params, base)
        hidden, routing = self.hidden(whole, read)
        if self.policy.config.is_scalar:
            return self.policy.values(whole, hidden), None, routing
        logp, entropy = token_logprobs(
            hidden,
            self.policy.head(whole),
            read.tokens,
            read.segment_ids,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            learns_entropy=self.learns_entropy,
        )
        return logp, entropy, routing

    def whole(self, params: Params, base: Params) -> Params:
        """Parameters as the decoder reads them: an adapter put to the `base` beside it."""
        return lora.attach(self.policy, base, params) if self.policy.lora else params

    def hidden(self, whole: Params, read: Read) -> tuple[Float[Array, "B T D"], Routing | None]:
        """Hidden states behind the last layer, under parameters made by `whole`."""
        # Whole along the width before tokens are looked up in it: else what is found would have to
        # be gathered over all rows.
        whole = whole | {"embed": self._constrain(whole["embed"], ("vocab",))}
        hidden, _, routing = self.policy.hidden(
            whole,
            read.tokens,
            read.positions,
            sharded_attention(read.segment_ids, self.kernel, self.mesh, TRAIN_RULES),
            compute_dtype=self.compute_dtype,
            # Without a scan around it XLA on CPU merges what remat computes again with what was
            # there before: nothing is saved.
            unroll=self.remat == "none"
            and self.policy.config.num_hidden_layers <= MOST_UNROLLED_LAYERS,
            remat=self.remat,
            experts=sharded_experts(self.mesh, TRAIN_RULES),
            counted=read.segment_ids > 0,
        )
        return self._constrain(hidden, ("batch", "tokens")), routing

    def _constrain(self, x: Array, axes: tuple[str, ...]) -> Array:
        return jax.lax.with_sharding_constraint(x, sharding(self.mesh, axes, x.shape, TRAIN_RULES))


class FrozenPolicy:
    """A policy that is asked and never trained, such as a reference or a teacher, on the train
    mesh."""

    def __init__(
        self, forward: Forward, params: Params, base: Params | None = None, *, offload: bool = False
    ):
        """
        Args:
            params: on the train mesh, laid out by TRAIN_RULES in the dtype of computation; not
            copied, so what they share with
                others lies there once.
            base: with an adapter in `params`, the parameters beside it.
            offload: `params` rest in the memory of the host, which the devices must be able to
                reach, and come to them for as
                long as they are asked.
        """
        self._forward, self._base = forward, {} if base is None else base
        self._placed = jax.tree.map(lambda leaf: leaf.sharding, params)
        self._params: Params = params
        if offload:
            self._params = jax.device_put(params, in_host_memory(self._placed))

    def logprobs(self, batches: Sequence[DeviceBatch]) -> list[Float[Array, "B T"]]:
        """Log-probability of every token of micro-batches; on the device, not waited for."""
        # Where they lie there already, this does nothing. All micro-batches at once, so that they
        # come once.
        params = jax.device_put(self._params, self._placed)
        return [self._forward.logprobs(params, self._base, batch) for batch in batches]

    @property
    def num_compilations(self) -> int:
        return self._forward.num_compilations

    def compile(self) -> None:
        """Compile what `logprobs` runs."""
        abstract = jax.tree.map(
            lambda leaf, how: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=how),
            self._params,
            self._placed,
        )
        self._forward.compiled(abstract, self._base)
