"""One optimizer update from micro-batches of one shape, compiled once. Axes: B rows, T tokens of a
row."""

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
from jaxtyping import Array, Bool, Float, Shaped

from areal_jax.metrics.meters import Mean
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.moe import balance_loss, router_metrics
from areal_jax.parallel.sharding import TRAIN_RULES, put, put_batch, put_copy
from areal_jax.records import PackedBatch
from areal_jax.rl.losses import PolicyLoss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch, Forward
from areal_jax.trainer.optimizer import learning_rate, make_optimizer, num_updates_done
from areal_jax.trainer.state import (
    StateShardings,
    frozen,
    frozen_shardings,
    state_shardings,
    trained,
)

Objective: TypeAlias = Callable[
    [Float[Array, "B T"], DeviceBatch, Float[Array, ""], Bool[Array, ""]], PolicyLoss
]
"""objective(logp, batch, num_tokens, proximal_is_current): the loss of a micro-batch, divided by
the tokens of its mini-batch (or the pairs, or whatever its metric `loss` is the mean of).

For a policy with a scalar head logp and batch.proximal_logp are values: of what follows token t, in
place t."""


class Accumulated(NamedTuple):
    """What the micro-batches of a mini-batch add up to."""

    gradients: Params
    """float32."""
    metrics: dict[str, Mean]


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
        columns: Sequence[str] = (),
    ):
        """
        Args:
            base: with an adapter in `params`, the parameters beside it: on the train mesh, in the
            dtypes of `frozen`.
            columns: those of a DeviceBatch's that may be None and that the objective reads.
        """
        self.config, self.policy, self.mesh, self.compute_dtype = (
            config,
            policy,
            mesh,
            compute_dtype,
        )
        self.objective, self.num_updates, self.columns = objective, num_updates, columns
        self.forward = Forward(
            config, policy, mesh, compute_dtype, temperature=temperature, row_tokens=row_tokens
        )
        self.rows, self.row_tokens = self.forward.rows, self.forward.row_tokens
        self.trained = trained(policy)
        self.optimizer = make_optimizer(config.optimizer, self.trained.axes)
        self.shardings: StateShardings = state_shardings(
            policy, mesh, self.optimizer, offload=config.optimizer.offload
        )
        self._programs: dict[str, jax.stages.Compiled] = {}
        # A copy, because the first update gives the memory of what it is called with to its
        # results.
        self.params: Params = put_copy(params, self.shardings.params)
        self.base: Params = {} if base is None else base
        self.opt_state: optax.OptState = self._run("init", self.params)
        # What no micro-batch has yet, and all share.
        self._nothing: Float[Array, "B T"] = put(
            np.zeros((self.rows, self.row_tokens), np.float32), self.forward.placed
        )

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._programs) + self.forward.num_compilations

    def warm_up(self, *, reads_logprobs: bool = False, measures: bool = False) -> None:
        """Compile all that training will run, so that no step has to. Changes nothing else."""
        for name in ("zeros", "accumulate", "apply", *(["measure"] if measures else [])):
            self._program(name)
        if reads_logprobs:
            self.forward.compiled(self.params, self.base)

    def put(self, batch: PackedBatch) -> DeviceBatch:
        """Start moving a micro-batch to the train mesh. What is found out about it there starts as
        zeros."""
        return DeviceBatch(
            *put_batch(self.mesh, tuple(batch), TRAIN_RULES),
            proximal_logp=self._nothing,
            advantages=self._nothing,
        )

    def put_column(self, values: Shaped[np.ndarray, "M B T"]) -> list[Shaped[Array, "B T"]]:
        """Start moving one value per token of all micro-batches to the train mesh, to be a column
        of each."""
        return put(list(values), [self.forward.placed] * len(values))

    def logprobs(self, batch: DeviceBatch) -> Float[Array, "B T"]:
        """What the parameters as they are now make of every token: its log-probability, or with a
        scalar head the value of what follows it. On the device, not waited for."""
        return self.forward.logprobs(self.params, self.base, batch)

    def update(
        self, batches: Sequence[DeviceBatch], num_tokens: int, *, proximal_is_current: bool
    ) -> dict[str, Mean]:
        """One optimizer update from the micro-batches of a mini-batch.

        Args:
            num_tokens: tokens that the mini-batch trains on, by which the objective divides, or
                pairs.
            proximal_is_current: the parameters are still those of the proximal policy and its
                log-probabilities are not in the
                batches: the objective reads them off the same forward pass.

        Raises FloatingPointError where loss or gradient is not finite; parameters and optimizer
        state are then as before.
        """
        accumulated = self._run("zeros")
        for batch in batches:
            accumulated = self._run(
                "accumulate",
                self.params,
                self.base,
                accumulated,
                batch,
                np.float32(num_tokens),
                np.bool_(proximal_is_current),
            )
        self.params, self.opt_state, report = self._run(
            "apply", self.params, self.opt_state, accumulated
        )
        report = jax.device_get(report)
        metrics = {
            name: Mean(float(total), float(weight)) for name, (total, weight) in report.items()
        }
        for name in ("loss", "grad_norm"):
            if not math.isfinite(report[name][0]):
                raise FloatingPointError(f"{name} is {report[name][0]}")
        return metrics

    def measure(self, batches: Sequence[DeviceBatch]) -> dict[str, Mean]:
        """The objective's metrics of micro-batches, under the parameters as they are now; nothing
        is learnt."""
        # All are under way before the first is waited for.
        found = [
            self._run("measure", self.params, self.base, batch, np.float32(1), np.bool_(False))
            for batch in batches
        ]
        sums = jax.tree.map(lambda *of_batches: sum(map(float, of_batches)), *jax.device_get(found))
        return dict(sums)

    def restore(self, params: Params, opt_state: optax.OptState) -> None:
        """Go on from these instead; they may lie anywhere. Arrays that lie as the learner's own do
        are taken over."""
        self.params = jax.tree.map(_taken, params, self.shardings.params)
        self.opt_state = jax.tree.map(_taken, opt_state, self.shardings.opt_state)

    def let_go(self) -> None:
        """Free the memory of parameters and optimizer state, of which only the shapes are left,
        until `restore`."""
        self.params, self.opt_state = (
            _abstract(tree, placed)
            for tree, placed in zip((self.params, self.opt_state), self.shardings, strict=True)
        )

    # Programs. Each is a pure function of its arguments; `_program` compiles it for the shapes and
    # shardings of this learner.

    def _init(self, params: Params) -> optax.OptState:
        return self.optimizer.init(params)

    def _zeros(self) -> Accumulated:
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._abstract_accumulated
        )

    def _accumulate(
        self,
        params: Params,
        base: Params,
        accumulated: Accumulated,
        batch: DeviceBatch,
        num_tokens: Float[Array, ""],
        proximal_is_current: Bool[Array, ""],
    ) -> Accumulated:
        """Add one micro-batch. The backward pass adds each gradient to its sum in place: as a value
        of its own, to be added afterwards, it would be a second copy of all gradients."""
        sums = jax.tree.map(jax.new_ref, accumulated.gradients)
        pulled: tuple[Array, Any, dict[str, Mean]] = jax.vjp(
            lambda params: self._loss(params, base, batch, num_tokens, proximal_is_current),
            params,
            has_aux=True,
        )
        loss, backward, metrics = pulled
        backward.with_refs(sums)(jnp.ones_like(loss))
        return Accumulated(
            jax.tree.map(jax.freeze, sums), jax.tree.map(jnp.add, accumulated.metrics, metrics)
        )

    def _measure(self, *arguments: Any) -> dict[str, Mean]:
        return self._loss(*arguments)[1]

    def _apply(
        self, params: Params, opt_state: optax.OptState, accumulated: Accumulated
    ) -> tuple[Params, optax.OptState, dict[str, Mean]]:
        """One update, or the arguments unchanged where loss or gradient is not finite."""
        gradients, metrics = accumulated
        # Nothing is computed in the host's memory; where the state lies on the devices, this does
        # nothing.
        opt_state = jax.device_put(opt_state, jax.tree.map(_on_device, self.shardings.opt_state))
        norm = optax.tree.norm(gradients)
        rate = learning_rate(self.config.optimizer, num_updates_done(opt_state), self.num_updates)
        direction, new_opt_state = self.optimizer.update(gradients, opt_state, params)
        new_params = jax.tree.map(lambda leaf, toward: leaf - rate * toward, params, direction)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"][0])
        params, opt_state = jax.tree.map(
            partial(jnp.where, is_finite), (new_params, new_opt_state), (params, opt_state)
        )
        one = jnp.ones(())
        return (
            params,
            opt_state,
            metrics | {"grad_norm": Mean(norm, one), "learning_rate": Mean(rate, one)},
        )

    def _loss(
        self,
        params: Params,
        base: Params,
        batch: DeviceBatch,
        num_tokens: Float[Array, ""],
        proximal_is_current: Bool[Array, ""],
    ) -> tuple[Float[Array, ""], dict[str, Mean]]:
        logp, entropy, routing = self.forward.predictions(params, base, batch.read)
        loss, metrics = self.objective(logp, batch, num_tokens, proximal_is_current)
        if entropy is not None:
            entropy = jnp.sum(jnp.where(batch.loss_mask, entropy, 0.0))
            num_masked = jnp.sum(batch.loss_mask, dtype=jnp.float32)
            metrics = metrics | {"entropy": Mean(jax.lax.stop_gradient(entropy), num_masked)}
            if self.config.entropy_coef:
                loss -= self.config.entropy_coef * entropy / jnp.maximum(num_tokens, 1.0)
        if routing is not None and self.policy.config.moe is not None:
            num_read = jnp.sum(batch.segment_ids > 0, dtype=jnp.float32)
            balance, given = balance_loss(routing, num_read), self.config.router_aux_loss_coef
            # A micro-batch is balanced on its own, and weighs as much as its share of what the loss
            # is the mean of.
            counted = metrics["loss"][1]
            loss += (
                (self.policy.config.moe.router_aux_loss_coef if given is None else given)
                * balance
                * counted
                / num_tokens
            )
            metrics |= {
                name: Mean(value * counted, counted)
                for name, value in router_metrics(routing).items()
            }
            metrics |= {"router_balance_loss": Mean(balance * counted, counted)}
        return loss, metrics

    def _run(self, name: str, *arguments: Any) -> Any:
        return self._program(name)(*arguments)

    def _program(self, name: str) -> jax.stages.Compiled:
        """The compiled program of that name; compiled now if this is its first use."""
        if name in self._programs:
            return self._programs[name]
        params = _abstract(self.trained.abstract, self.shardings.params)
        base = _abstract(
            frozen(self.policy, self.compute_dtype), frozen_shardings(self.policy, self.mesh)
        )
        match name:
            case "init":
                program = jax.jit(self._init, out_shardings=self.shardings.opt_state).lower(params)
            case "zeros":
                program = jax.jit(
                    self._zeros, out_shardings=_placed(self._abstract_accumulated)
                ).lower()
            case "accumulate":
                accumulated = self._abstract_accumulated
                jitted = jax.jit(
                    self._accumulate, donate_argnums=2, out_shardings=_placed(accumulated)
                )
                program = jitted.lower(params, base, accumulated, self._abstract_batch(), *_SCALARS)
            case "measure":
                jitted = jax.jit(self._measure, out_shardings=self._everywhere())
                program = jitted.lower(params, base, self._abstract_batch(), *_SCALARS)
            case "apply":
                opt_state = _abstract(jax.eval_shape(self._init, params), self.shardings.opt_state)
                jitted = jax.jit(
                    self._apply,
                    donate_argnums=(0, 1),
                    out_shardings=(*self.shardings, self._everywhere()),
                )
                program = jitted.lower(params, opt_state, self._abstract_accumulated)
            case _:
                raise KeyError(name)
        self._programs[name] = program.compile()
        return self._programs[name]

    def _abstract_batch(self) -> DeviceBatch:
        dtypes = (np.int32,) * 3 + (np.bool_, np.float32, np.int32) + (np.float32,) * 2
        return DeviceBatch(
            *map(self.forward.column, dtypes),
            **{name: self.forward.column(np.float32) for name in self.columns},
        )

    @cached_property
    def _abstract_accumulated(self) -> Accumulated:
        """With shardings. Cached, because the names of the metrics are found by tracing the whole
        model."""
        params, base = self.trained.abstract, frozen(self.policy, self.compute_dtype)
        _, metrics = jax.eval_shape(self._loss, params, base, self._abstract_batch(), *_SCALARS)
        placed = Accumulated(
            self.shardings.params, jax.tree.map(lambda _: self._everywhere(), metrics)
        )
        return _abstract(Accumulated(params, metrics), placed)

    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())


_SCALARS = (jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.bool_))
"""num_tokens and proximal_is_current: arguments, so that no value of theirs compiles anew."""


def _abstract(shapes: Any, placed: Any) -> Any:
    """ShapeDtypeStructs that know where their arrays will lie."""
    return jax.tree.map(
        lambda leaf, how: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=how), shapes, placed
    )


def _taken(leaf: Any, how: NamedSharding) -> jax.Array:
    """The array itself where it lies like that, or a copy that does."""
    if isinstance(leaf, jax.Array) and leaf.sharding == how:
        return leaf
    return put_copy(leaf, how)


def _on_device(how: NamedSharding) -> NamedSharding:
    return how.with_memory_kind("device")


def _placed(abstract: Any) -> Any:
    """The shardings in a tree of ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)
