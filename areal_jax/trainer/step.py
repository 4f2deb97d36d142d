"""One optimizer update from micro-batches of one shape, compiled once. Axes: B rows, T tokens of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from areal_jax.models import lora
from areal_jax.models.attention import Kernel, choose_kernel, sharded_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.moe import Routing, balance_loss, router_metrics, sharded_experts
from areal_jax.parallel.sharding import TRAIN_RULES, batch_sharding, num_shards, put_batch, sharding
from areal_jax.records import PackedBatch
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.rl.losses import Meter, PolicyLoss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.optimizer import learning_rate, make_optimizer, num_updates_done
from areal_jax.trainer.state import StateShardings, frozen, frozen_shardings, state_shardings, trained

MOST_UNROLLED_LAYERS = 8
"""Up to here the layers are compiled one after the other: for 4 layers on a CPU that takes a quarter less time and memory than
a scan, which stacks what it keeps for the backward pass, and compiles as fast. Beyond, compile time grows too long."""

Metrics: TypeAlias = dict[str, tuple[float, float] | float]
"""By name, a sum and its weight (divide last), or a plain number."""


class DeviceBatch(NamedTuple):
    """A PackedBatch on the train mesh."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    loss_mask: Bool[Array, "B T"]
    behave_logp: Float[Array, "B T"]
    proximal_logp: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    age: Int[Array, "B T"]


Objective: TypeAlias = Callable[[Float[Array, "B T"], Float[Array, "B T"], DeviceBatch, Float[Array, ""]], PolicyLoss]
"""objective(logp, proximal_logp, batch, num_tokens): the loss of a micro-batch, divided by the tokens of its mini-batch."""


class Accumulated(NamedTuple):
    """What the micro-batches of a mini-batch add up to."""

    gradients: Params
    """float32."""
    metrics: dict[str, Meter]


def check_cut(policy: Policy, mesh: Mesh, row_tokens: int) -> None:
    """ValueError where rows of this length cannot be cut as the mesh's context axis asks, or heads not be dealt to it."""
    context, heads = mesh.shape["context"], policy.config.num_attention_heads
    if row_tokens % context:
        raise ValueError(
            f"rows of {row_tokens} tokens do not divide by placement.train_context={context}; "
            "set trainer.row_tokens to a multiple"
        )
    if context > 1 and heads % num_shards(mesh, "attending_heads", TRAIN_RULES):
        raise ValueError(
            f"{heads} attention heads do not divide by placement.train_context={context} times "
            f"placement.train_tensor={mesh.shape['tensor']}, to which attention deals them; lower either"
        )


class Learner:
    """Parameters and optimizer state on the train mesh, and the programs that read and change them.

    Every program is compiled for one shape of micro-batch, ahead of time, and counted."""

    def __init__(
        self,
        config: TrainerConfig,
        policy: Policy,
        params: Params,
        mesh: Mesh,
        compute_dtype: DTypeLike,
        num_updates: int,
        *,
        objective: Objective,
        temperature: float,
        row_tokens: int,
        base: Params | None = None,
    ):
        """Args: base: with an adapter in `params`, the parameters beside it: on the train mesh, in the dtypes of `frozen`."""
        self.config, self.policy, self.mesh, self.compute_dtype = config, policy, mesh, compute_dtype
        self.objective, self.temperature, self.num_updates = objective, temperature, num_updates
        self.row_tokens = row_tokens
        check_cut(policy, mesh, row_tokens)
        self.kernel: Kernel = choose_kernel(mesh.devices.flat[0].platform, row_tokens)
        self.rows = config.rows_per_micro_batch * num_shards(mesh, "batch", TRAIN_RULES)
        self.chunk_tokens = config.logp_chunk_tokens * num_shards(mesh, "batch", TRAIN_RULES) * mesh.shape["context"]
        self.trained = trained(policy)
        self.optimizer = make_optimizer(config.optimizer, self.trained.axes)
        self.shardings: StateShardings = state_shardings(policy, mesh, self.optimizer, offload=config.optimizer.offload)
        self.num_compilations = 0
        self._programs: dict[str, jax.stages.Compiled] = {}
        # A copy, because the first update gives the memory of what it is called with to its results.
        self.params: Params = jax.device_put(params, self.shardings.params, may_alias=False)
        self.base: Params = {} if base is None else base
        self.opt_state: optax.OptState = self._run("init", self.params)

    def warm_up(self, *, reads_logprobs: bool) -> None:
        """Compile all that training will run, so that no step has to. Changes nothing else."""
        for name in ("zeros", "accumulate", "apply", *(["logprobs"] if reads_logprobs else [])):
            self._program(name)

    def put(self, batch: PackedBatch) -> DeviceBatch:
        """Start moving a micro-batch to the train mesh."""
        return DeviceBatch(*put_batch(self.mesh, tuple(batch), TRAIN_RULES))

    def logprobs(self, batch: DeviceBatch) -> Float[Array, "B T"]:
        """Log-probability of every token under the parameters as they are now; on the device, not waited for."""
        return self._run("logprobs", self.params, self.base, batch)

    def update(self, batches: Sequence[DeviceBatch], num_tokens: int, *, proximal_is_current: bool) -> Metrics:
        """One optimizer update from the micro-batches of a mini-batch that trains on `num_tokens` tokens.

        Args:
            proximal_is_current: the parameters are still those of the proximal policy, so that its log-probabilities are read
                off the same forward pass and not from the batches.

        Raises FloatingPointError where loss or gradient is not finite; parameters and optimizer state are then as before.
        """
        accumulated = self._run("zeros")
        for batch in batches:
            accumulated = self._run(
                "accumulate", self.params, self.base, accumulated, batch, np.float32(num_tokens), np.bool_(proximal_is_current)
            )
        self.params, self.opt_state, report = self._run("apply", self.params, self.opt_state, accumulated)
        report = jax.device_get(report)
        metrics: Metrics = {name: (float(total), float(weight)) for name, (total, weight) in report.items()}
        for name in ("loss", "grad_norm"):
            if not math.isfinite(report[name][0]):
                raise FloatingPointError(f"{name} is {report[name][0]}")
        return metrics

    def restore(self, params: Params, opt_state: optax.OptState) -> None:
        """Go on from these instead; they may lie anywhere."""
        self.params = jax.device_put(params, self.shardings.params, may_alias=False)
        self.opt_state = jax.device_put(opt_state, self.shardings.opt_state, may_alias=False)

    # Programs. Each is a pure function of its arguments; `_program` compiles it for the shapes and shardings of this learner.

    def _init(self, params: Params) -> optax.OptState:
        return self.optimizer.init(params)

    def _zeros(self) -> Accumulated:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._abstract_accumulated)

    def _logprobs(self, params: Params, base: Params, batch: DeviceBatch) -> Float[Array, "B T"]:
        return self._logprobs_and_entropy(params, base, batch)[0]

    def _accumulate(
        self,
        params: Params,
        base: Params,
        accumulated: Accumulated,
        batch: DeviceBatch,
        num_tokens: Float[Array, ""],
        proximal_is_current: Bool[Array, ""],
    ) -> Accumulated:
        """Add one micro-batch. The backward pass adds each gradient to its sum in place: as a value of its own, to be added
        afterwards, it would be a second copy of all gradients."""
        sums = jax.tree.map(jax.new_ref, accumulated.gradients)
        pulled: tuple[Array, Any, dict[str, Meter]] = jax.vjp(
            lambda params: self._loss(params, base, batch, num_tokens, proximal_is_current), params, has_aux=True
        )
        loss, backward, metrics = pulled
        backward.with_refs(sums)(jnp.ones_like(loss))
        return Accumulated(jax.tree.map(jax.freeze, sums), jax.tree.map(jnp.add, accumulated.metrics, metrics))

    def _apply(
        self, params: Params, opt_state: optax.OptState, accumulated: Accumulated
    ) -> tuple[Params, optax.OptState, dict[str, Meter]]:
        """One update, or the arguments unchanged where loss or gradient is not finite."""
        gradients, metrics = accumulated
        # Nothing is computed in the host's memory; where the state lies on the devices, this does nothing.
        opt_state = jax.device_put(opt_state, jax.tree.map(_on_device, self.shardings.opt_state))
        norm = optax.tree.norm(gradients)
        rate = learning_rate(self.config.optimizer, num_updates_done(opt_state), self.num_updates)
        direction, new_opt_state = self.optimizer.update(gradients, opt_state, params)
        new_params = jax.tree.map(lambda leaf, toward: leaf - rate * toward, params, direction)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"][0])
        params, opt_state = jax.tree.map(partial(jnp.where, is_finite), (new_params, new_opt_state), (params, opt_state))
        one = jnp.ones(())
        return params, opt_state, metrics | {"grad_norm": (norm, one), "learning_rate": (rate, one)}

    def _loss(
        self,
        params: Params,
        base: Params,
        batch: DeviceBatch,
        num_tokens: Float[Array, ""],
        proximal_is_current: Bool[Array, ""],
    ) -> tuple[Float[Array, ""], dict[str, Meter]]:
        logp, entropy, routing = self._logprobs_and_entropy(params, base, batch)
        proximal_logp = jnp.where(proximal_is_current, jax.lax.stop_gradient(logp), batch.proximal_logp)
        loss, metrics = self.objective(logp, proximal_logp, batch, num_tokens)
        mask = batch.loss_mask
        num_masked = jnp.sum(mask, dtype=jnp.float32)
        entropy = jnp.sum(jnp.where(mask, entropy, 0.0))
        metrics = metrics | {"entropy": (jax.lax.stop_gradient(entropy), num_masked)}
        if self.config.entropy_coef:
            loss -= self.config.entropy_coef * entropy / jnp.maximum(num_tokens, 1.0)
        if routing is not None and self.policy.config.moe is not None:
            num_counted = jnp.sum(batch.segment_ids > 0, dtype=jnp.float32)
            balance, given = balance_loss(routing, num_counted), self.config.router_aux_loss_coef
            # A micro-batch is balanced on its own, and weighs as much as its share of the mini-batch's tokens.
            loss += (
                (self.policy.config.moe.router_aux_loss_coef if given is None else given) * balance * num_masked / num_tokens
            )
            metrics |= {name: (value * num_masked, num_masked) for name, value in router_metrics(routing).items()}
            metrics |= {"router_balance_loss": (balance * num_masked, num_masked)}
        return loss, metrics

    def _logprobs_and_entropy(
        self, params: Params, base: Params, batch: DeviceBatch
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Routing | None]:
        if self.policy.lora:
            params = lora.attach(self.policy, base, params)
        # Whole along the width before tokens are looked up in it: else what is found would have to be gathered over all rows.
        params = params | {"embed": self._constrain(params["embed"], ("vocab",))}
        hidden, _, routing = self.policy.hidden(
            params,
            batch.tokens,
            batch.positions,
            sharded_attention(batch.segment_ids, self.kernel, self.mesh, TRAIN_RULES),
            compute_dtype=self.compute_dtype,
            # Without a scan around it XLA on CPU merges what remat computes again with what was there before: nothing is saved.
            unroll=self.config.remat == "none" and self.policy.config.num_hidden_layers <= MOST_UNROLLED_LAYERS,
            remat=self.config.remat,
            experts=sharded_experts(self.mesh, TRAIN_RULES),
            counted=batch.segment_ids > 0,
        )
        logp, entropy = token_logprobs(
            self._constrain(hidden, ("batch", "tokens")),
            self.policy.head(params),
            batch.tokens,
            batch.segment_ids,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            learns_entropy=self.config.entropy_coef != 0.0,
        )
        return logp, entropy, routing

    def _constrain(self, x: Array, axes: tuple[str, ...]) -> Array:
        return jax.lax.with_sharding_constraint(x, sharding(self.mesh, axes, x.shape, TRAIN_RULES))

    def _run(self, name: str, *arguments: Any) -> Any:
        return self._program(name)(*arguments)

    def _program(self, name: str) -> jax.stages.Compiled:
        """The compiled program of that name; compiled now if this is its first use."""
        if name in self._programs:
            return self._programs[name]
        params = _abstract(self.trained.abstract, self.shardings.params)
        base = _abstract(frozen(self.policy, self.compute_dtype), frozen_shardings(self.policy, self.mesh))
        match name:
            case "init":
                program = jax.jit(self._init, out_shardings=self.shardings.opt_state).lower(params)
            case "zeros":
                program = jax.jit(self._zeros, out_shardings=_placed(self._abstract_accumulated)).lower()
            case "logprobs":
                placed = batch_sharding(self.mesh, (self.rows, self.row_tokens), TRAIN_RULES)
                program = jax.jit(self._logprobs, out_shardings=placed).lower(params, base, self._abstract_batch())
            case "accumulate":
                accumulated = self._abstract_accumulated
                jitted = jax.jit(self._accumulate, donate_argnums=2, out_shardings=_placed(accumulated))
                program = jitted.lower(params, base, accumulated, self._abstract_batch(), *_SCALARS)
            case "apply":
                opt_state = _abstract(jax.eval_shape(self._init, params), self.shardings.opt_state)
                jitted = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=(*self.shardings, self._everywhere()))
                program = jitted.lower(params, opt_state, self._abstract_accumulated)
            case _:
                raise KeyError(name)
        self._programs[name] = program.compile()
        self.num_compilations += 1
        return self._programs[name]

    def _abstract_batch(self) -> Any:
        shape = (self.rows, self.row_tokens)
        how = batch_sharding(self.mesh, shape, TRAIN_RULES)
        dtypes = (np.int32,) * 3 + (np.bool_,) + (np.float32,) * 3 + (np.int32,)
        structs: list[Any] = [jax.ShapeDtypeStruct(shape, dtype, sharding=how) for dtype in dtypes]
        return DeviceBatch(*structs)

    @cached_property
    def _abstract_accumulated(self) -> Accumulated:
        """With shardings. Cached, because the names of the metrics are found by tracing the whole model."""
        params, base = self.trained.abstract, frozen(self.policy, self.compute_dtype)
        _, metrics = jax.eval_shape(self._loss, params, base, self._abstract_batch(), *_SCALARS)
        placed = Accumulated(self.shardings.params, jax.tree.map(lambda _: self._everywhere(), metrics))
        return _abstract(Accumulated(params, metrics), placed)

    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


_SCALARS = (jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.bool_))
"""num_tokens and proximal_is_current: arguments, so that no value of theirs compiles anew."""


def _abstract(shapes: Any, placed: Any) -> Any:
    """ShapeDtypeStructs that know where their arrays will lie."""
    return jax.tree.map(lambda leaf, how: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=how), shapes, placed)


def _on_device(how: NamedSharding) -> NamedSharding:
    return how.with_memory_kind("device")


def _placed(abstract: Any) -> Any:
    """The shardings in a tree of ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)
