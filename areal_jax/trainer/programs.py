"""The compiled programs of an optimizer update. Axes: B rows, T tokens of a row.

The file has more than 400 lines because the class is one (see there).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from areal_jax.metrics.meters import Mean
from areal_jax.models.decoder import Params
from areal_jax.models.moe import balance_loss, router_metrics
from areal_jax.parallel.sharding import abstract, shardings_of
from areal_jax.rl.off_policy import OffPolicyCounts, sequence_ess
from areal_jax.rl.token_losses import PolicyLoss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch, Forward, ModelInputs, Predictions
from areal_jax.trainer.optimizer import learning_rate, make_optimizer, num_updates_done
from areal_jax.trainer.state import (
    StateShardings,
    frozen,
    frozen_shardings,
    state_shardings,
    trained,
)


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss of a micro-batch.

    Attributes:
        loss: Function of (logp, batch, num_tokens, proximal_is_current). Its loss is divided by
            `num_tokens`, the loss tokens of the whole mini-batch (or its pairs: whatever its metric
            `loss` is the mean of). For a policy with a scalar head, `logp` and
            `batch.proximal_logp` are values: at token t, of what follows token t.
        columns: The optional columns of `DeviceBatch` that it reads.
        off_policy: Function of (logp, batch, proximal_is_current): the distance of the batch from
            the policy; None: it is not measured.
        distillation: Function of (predictions, batch, forward, num_tokens): a loss that is added.
        num_teacher_tokens: Most likely tokens of a teacher in `DeviceBatch.teacher_targets`; 0: the
            batch has none.
    """

    loss: Callable[
        [Float[Array, "B T"], DeviceBatch, Float[Array, ""], Bool[Array, ""]], PolicyLoss
    ]
    columns: tuple[str, ...] = ()
    off_policy: (
        Callable[[Float[Array, "B T"], DeviceBatch, Bool[Array, ""]], OffPolicyCounts] | None
    ) = None
    distillation: (
        Callable[[Predictions, DeviceBatch, Forward, Float[Array, ""]], PolicyLoss] | None
    ) = None
    num_teacher_tokens: int = 0


class Measured(NamedTuple):
    """What a program reports beside its loss: sums that add up over micro-batches."""

    metrics: dict[str, Mean]
    off_policy: OffPolicyCounts | None


class Applied(NamedTuple):
    """What an update reports."""

    measured: Measured
    digest: Any
    """`params_digest` after the update."""


class SampleGradients(NamedTuple):
    """Log-probs of a micro-batch, and how strongly each sample would change the parameters."""

    logp: Float[Array, "B T"]
    norm: Float[Array, "B T"]
    """On each loss token, the norm of the gradient of the sum of its sample's log-probs; else 0."""


class Accumulated(NamedTuple):
    """Sums over the micro-batches of a mini-batch."""

    gradients: Params
    """float32. Tiled: copies of the parameters have gradients of their own (`Copies`)."""
    measured: Measured


class UpdatePrograms:
    """The programs that initialize, accumulate, apply and measure updates and gradients.

    Each is a pure function of its arguments, compiled once, ahead of time, for the micro-batch
    shape and the shardings of one learner. The class has more than 200 lines because they share
    these.
    """

    def __init__(
        self, config: TrainerConfig, forward: Forward, objective: Objective, num_updates: int
    ):
        """
        Args:
            config: Optimizer and auxiliary losses.
            forward: The forward pass of the policy.
            objective: Loss of a micro-batch.
            num_updates: Length of the learning-rate schedule, in updates.
        """
        self._config, self._forward, self._objective = config, forward, objective
        self._num_updates = num_updates
        policy, mesh = forward.policy, forward.mesh
        self._trained = trained(policy)
        self._optimizer = make_optimizer(
            config.optimizer, self._trained.axes, freezes_vision=config.freeze_vision
        )
        self.shardings: StateShardings = state_shardings(
            policy, mesh, self._optimizer, offload=config.optimizer.offload
        )
        self._copies = forward.copies
        self._compiled: dict[str, jax.stages.Compiled] = {}

    @property
    def num_compilations(self) -> int:
        """Number of programs compiled so far."""
        return len(self._compiled)

    def run(self, name: str, *arguments: Any) -> Any:
        """Execute a program; compile it first if this is its first use."""
        return self.compiled(name)(*arguments)

    def compiled(self, name: str) -> jax.stages.Compiled:
        """Return the program `init`, `zeros`, `accumulate`, `add`, `measure`, `gradient_norms` or
        `apply`, compiled.
        """
        if name not in self._compiled:
            self._compiled[name] = self._forward.compiler(self._lower(name), self._forward.mesh)
        return self._compiled[name]

    def abstract_state(self) -> tuple[Params, optax.OptState]:
        """Return the shapes and shardings of parameters and optimizer state."""
        params = self._trained.abstract
        return (
            abstract(params, self.shardings.params),
            abstract(jax.eval_shape(self._init, params), self.shardings.opt_state),
        )

    def _lower(self, name: str) -> jax.stages.Lowered:
        forward = self._forward
        params, opt_state = self.abstract_state()
        base = abstract(
            frozen(forward.policy, forward.compute_dtype),
            frozen_shardings(forward.policy, forward.mesh),
        )
        match name:
            case "init":
                return jax.jit(self._init, out_shardings=self.shardings.opt_state).lower(params)
            case "zeros":
                return jax.jit(
                    self._zeros, out_shardings=shardings_of(self._abstract_accumulated)
                ).lower()
            case "accumulate":
                accumulated = self._abstract_accumulated
                jitted = jax.jit(
                    self._accumulate, donate_argnums=2, out_shardings=shardings_of(accumulated)
                )
                return jitted.lower(params, base, accumulated, self._abstract_batch(), *_SCALARS)
            case "add":
                sums = self._abstract_accumulated
                add = partial(jax.tree.map, jnp.add)
                jitted = jax.jit(add, donate_argnums=0, out_shardings=shardings_of(sums))
                return jitted.lower(sums, sums)
            case "measure":
                jitted = jax.jit(self._measure, out_shardings=self._replicated())
                return jitted.lower(params, base, self._abstract_batch(), *_SCALARS)
            case "gradient_norms":
                jitted = jax.jit(self._gradient_norms, out_shardings=self._replicated())
                inputs = forward.inputs(self._abstract_batch())
                return jitted.lower(params, base, inputs, forward.column(np.bool_))
            case "apply":
                out = (*self.shardings, self._replicated())
                jitted = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=out)
                return jitted.lower(params, opt_state, self._abstract_accumulated)
        raise KeyError(name)

    def _init(self, params: Params) -> optax.OptState:
        return self._optimizer.init(params)

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
        """Add one micro-batch.

        The backward pass adds each gradient to its sum in place. As a value of its own, added
        afterwards, it would be a second copy of all gradients.
        """
        sums = jax.tree.map(jax.new_ref, accumulated.gradients)
        pulled: tuple[Array, Any, Measured] = jax.vjp(
            lambda tiles: self._loss(
                tiles, base, batch, num_tokens, proximal_is_current, is_tiled=True
            ),
            self._copies.tile(params),
            has_aux=True,
        )
        loss, backward, measured = pulled
        backward.with_refs(sums)(jnp.ones_like(loss))
        return Accumulated(
            jax.tree.map(jax.freeze, sums), jax.tree.map(jnp.add, accumulated.measured, measured)
        )

    def _gradient_norms(
        self, params: Params, base: Params, inputs: ModelInputs, loss_mask: Bool[Array, "B T"]
    ) -> SampleGradients:
        """One forward pass, and one backward pass per sample; places without a sample cost none.

        Of each shard of the batch, one row at a time: a backward pass computes whole rows.
        """
        num_turns = self._config.rows_per_micro_batch

        def of_turn(turn: Int[Array, ""]) -> SampleGradients:
            def rows_of(leaf: Shaped[Array, "B ..."]) -> Shaped[Array, "N ..."]:
                return leaf.reshape(-1, num_turns, *leaf.shape[1:])[:, turn]

            read = jax.tree.map(rows_of, (inputs, loss_mask))
            return self._gradient_norms_of_rows(params, base, *read)

        def whole(leaf: Float[Array, "P N T"]) -> Float[Array, "B T"]:
            return leaf.swapaxes(0, 1).reshape(loss_mask.shape)

        return jax.tree.map(whole, jax.lax.map(of_turn, jnp.arange(num_turns)))

    def _gradient_norms_of_rows(
        self,
        params: Params,
        base: Params,
        inputs: ModelInputs,
        loss_mask: Bool[Array, "N T"],
    ) -> SampleGradients:
        logp, pullback = jax.vjp(
            lambda params: self._forward.predictions(params, base, inputs).logp, params
        )
        num_rows, most = len(logp), jnp.max(inputs.segment_ids)
        rows = jnp.arange(num_rows)[:, None]

        def of_sample(place: Int[Array, ""], norms: Float[Array, "N T"]) -> Float[Array, "N T"]:
            row, segment = place // most, place % most + 1
            chosen = loss_mask & (inputs.segment_ids == segment) & (rows == row)

            def measured() -> Float[Array, "N T"]:
                (gradient,) = pullback(chosen.astype(logp.dtype))
                return jnp.where(chosen, optax.tree.norm(gradient), norms)

            return jax.lax.cond(jnp.any(chosen), measured, lambda: norms)

        norms = jax.lax.fori_loop(0, num_rows * most, of_sample, jnp.zeros(logp.shape, jnp.float32))
        return SampleGradients(logp, norms)

    def _measure(self, *arguments: Any) -> Measured:
        return self._loss(*arguments)[1]

    def _apply(
        self, params: Params, opt_state: optax.OptState, accumulated: Accumulated
    ) -> tuple[Params, optax.OptState, Applied]:
        """Update once, or return the arguments unchanged if loss or gradient is not finite."""
        gradients, (metrics, off_policy) = accumulated
        gradients = self._copies.sum(gradients)
        # Nothing is computed in host memory; if the state lies on the devices, this does nothing.
        opt_state = jax.device_put(opt_state, jax.tree.map(_on_device, self.shardings.opt_state))
        norm = optax.tree.norm(gradients)
        rate = learning_rate(self._config.optimizer, num_updates_done(opt_state), self._num_updates)
        if (exponent := self._config.optimizer.ess_exponent) and off_policy is not None:
            # VCPO, arXiv:2602.17616: steps on data far from the policy are smaller.
            rate *= jnp.minimum(sequence_ess(off_policy), 1.0) ** exponent
        direction, new_opt_state = self._optimizer.update(gradients, opt_state, params)
        new_params = jax.tree.map(lambda leaf, toward: leaf - rate * toward, params, direction)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"].total)
        params, opt_state = jax.tree.map(
            partial(jnp.where, is_finite), (new_params, new_opt_state), (params, opt_state)
        )
        one = jnp.ones(())
        metrics |= {"grad_norm": Mean(norm, one), "learning_rate": Mean(rate, one)}
        # Fused with the sum, XLA for GPUs would not update in place, and copy most of the state.
        digest = params_digest(jax.lax.optimization_barrier(params))
        return params, opt_state, Applied(Measured(metrics, off_policy), digest)

    def _loss(
        self,
        params: Params,
        base: Params,
        batch: DeviceBatch,
        num_tokens: Float[Array, ""],
        proximal_is_current: Bool[Array, ""],
        *,
        is_tiled: bool = False,
    ) -> tuple[Float[Array, ""], Measured]:
        """Return the objective with the entropy bonus and the load-balance loss of experts."""
        config, moe = self._config, self._forward.policy.config.moe
        inputs = self._forward.inputs(batch)
        predictions = self._forward.predictions(params, base, inputs, is_tiled=is_tiled)
        logp, entropy, routing, *_ = predictions
        result = self._objective.loss(logp, batch, num_tokens, proximal_is_current)
        if self._objective.distillation is not None:
            result = result.plus(
                self._objective.distillation(predictions, batch, self._forward, num_tokens)
            )
        loss, metrics = result
        off_policy = None
        if self._objective.off_policy is not None:
            off_policy = self._objective.off_policy(logp, batch, proximal_is_current)
        if entropy is not None:
            entropy = jnp.sum(jnp.where(batch.loss_mask, entropy, 0.0))
            num_masked = jnp.sum(batch.loss_mask, dtype=jnp.float32)
            metrics = metrics | {"entropy": Mean(jax.lax.stop_gradient(entropy), num_masked)}
            if config.entropy_coef:
                loss -= config.entropy_coef * entropy / jnp.maximum(num_tokens, 1.0)
        if routing is not None and moe is not None:
            num_read = jnp.sum(batch.segment_ids > 0, dtype=jnp.float32)
            balance, given = balance_loss(routing, num_read), config.router_aux_loss_coef
            # A micro-batch is balanced on its own. Its weight is its share of what the loss is the
            # mean of.
            counted = metrics["loss"].weight
            loss += (
                (moe.router_aux_loss_coef if given is None else given)
                * balance
                * counted
                / num_tokens
            )
            metrics |= {
                name: Mean(value * counted, counted)
                for name, value in router_metrics(routing).items()
            }
            metrics |= {"router_balance_loss": Mean(balance * counted, counted)}
        return loss, Measured(metrics, off_policy)

    def _abstract_batch(self) -> DeviceBatch:
        column = self._forward.column
        dtypes = (np.int32,) * 3 + (np.bool_, np.float32, np.int32) + (np.float32,) * 2
        return DeviceBatch(
            **dict(zip(DeviceBatch._fields, map(column, dtypes), strict=False))
            | {"positions": self._forward.positions_column()},
            images=self._forward.images_column(),
            visible_until=self._forward.visible_until_column(),
            **{name: column(np.float32) for name in self._objective.columns},
            experts=self._forward.experts_column(),
            teacher_targets=self._forward.targets_column(self._objective.num_teacher_tokens),
        )

    @cached_property
    def _abstract_accumulated(self) -> Accumulated:
        """Shapes and shardings. Cached, because finding the metric names traces the model."""
        forward = self._forward
        params, base = self._trained.abstract, frozen(forward.policy, forward.compute_dtype)
        _, measured = jax.eval_shape(self._loss, params, base, self._abstract_batch(), *_SCALARS)
        everywhere = jax.tree.map(lambda _: self._replicated(), measured)
        return Accumulated(self._copies.abstract(params), abstract(measured, everywhere))

    def _replicated(self) -> NamedSharding:
        return NamedSharding(self._forward.mesh, PartitionSpec())


_SCALARS = (jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((), np.bool_))
"""num_tokens and proximal_is_current: arguments, so that no new value compiles a new program."""


def params_digest(params: Params) -> UInt32[Array, ""]:
    """Return a checksum of all bits of the parameters, which depends on their positions.

    It is a sum modulo 2³², so that neither shards nor their order change it. Places are counted
    along the axes: to flatten a sharded leaf would gather it.
    """
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(params):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
        places, stride = jnp.zeros(leaf.shape, jnp.uint32), 1
        for axis in reversed(range(leaf.ndim)):
            along = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
            places += along * jnp.uint32(stride % 2**32)
            stride *= leaf.shape[axis]
        # 2654435761 is odd, so that every bit of a leaf changes its sum.
        mixed = bits.astype(jnp.uint32) * (places * jnp.uint32(2654435761) | 1)
        total = total * jnp.uint32(31) + jnp.sum(mixed)
    return total


def _on_device(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind("device")
