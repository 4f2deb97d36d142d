"""Compiled programs of trained models: outputs and gradients of micro-batches, and Adam's step.

Models with adapters of one shape share them, and all share the frozen policy. Axes: B rows,
T tokens of a row, N tokens of a datum or a prompt, K most likely tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped

from areal_jax.data.packing import Layout, lay_out
from areal_jax.models import lora
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import TRAIN_RULES, put, put_batch, put_copy
from areal_jax.tinker.config import TinkerConfig
from areal_jax.tinker.messages import Datum
from areal_jax.tinker.objective import SummedLoss, summed_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import Forward, ModelInputs
from areal_jax.trainer.optimizer import make_traced_optimizer
from areal_jax.trainer.state import state_shardings, trained

SHORTEST_ROW = 64
"""Tokens of the shortest row; others are powers of two."""


class AdamParams(NamedTuple):
    """Settings of one optimizer step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    """inf: gradients are not clipped."""


class ModelState(NamedTuple):
    """What training changes."""

    params: Params
    opt_state: optax.OptState


class Outputs(NamedTuple):
    """Outputs of a batch."""

    logprobs: list[Float32[np.ndarray, "_"]]
    """Log-prob of every target, by datum."""
    loss: float
    """Sum over the batch."""


class PromptLogprobs(NamedTuple):
    """What a policy predicts of a prompt. The first token has the log-prob 0."""

    logp: Float32[np.ndarray, "N"]
    ids: Shaped[np.ndarray, "N K"]
    """-1 at the first token."""
    top_logp: Float32[np.ndarray, "N K"]


class _Batch(NamedTuple):
    """A micro-batch on the train mesh."""

    inputs: ModelInputs
    targets: Shaped[Array, "B T"]
    columns: Mapping[str, Float[Array, "B T"]]


class TrainingPrograms:
    """The programs of one policy: the frozen one with an adapter, or one that is trained whole.

    It has more than 200 lines because they share shapes and shardings.
    """

    def __init__(
        self, policy: Policy, mesh: Mesh, compute_dtype: DTypeLike, config: TinkerConfig
    ) -> None:
        self.policy, self._mesh = policy, mesh
        self._dtype, self._config = compute_dtype, config
        self._trained = trained(policy)
        plain = make_traced_optimizer(jnp.zeros(5), self._trained.axes)
        self.shardings = state_shardings(policy, mesh, plain)
        self._init_opt_state = jax.jit(plain.init, out_shardings=self.shardings.opt_state)
        everywhere = NamedSharding(mesh, PartitionSpec())
        out = (*self.shardings, everywhere, everywhere)
        self._step = jax.jit(self._apply, donate_argnums=(0, 1), out_shardings=out)
        self._forwards: dict[int, Forward] = {}
        # By loss function, row length and whether gradients are computed; the oldest are dropped.
        self._by_loss: OrderedDict[tuple[SummedLoss, int, bool], Callable[..., Any]] = OrderedDict()

    def init(self, seed: int) -> ModelState:
        """Return a fresh adapter, whose update is 0."""
        init = jax.jit(partial(lora.init, self.policy), out_shardings=self.shardings.params)
        return self.with_fresh_optimizer(init(jax.random.key(seed)))

    def copied(self, params: Params) -> ModelState:
        """Return a copy of parameters, which the first step consumes, with an empty optimizer."""
        return self.with_fresh_optimizer(put_copy(params, self.shardings.params))

    def with_fresh_optimizer(self, params: Params) -> ModelState:
        """Return parameters with an empty optimizer state."""
        return ModelState(params, self._init_opt_state(params))

    def on_devices(self, state: ModelState) -> ModelState:
        """Move a state from the host to the train mesh."""
        return ModelState(*put(tuple(state), tuple(self.shardings)))

    def forward(
        self, params: Params, base: Params, loss: SummedLoss, datums: Sequence[Datum]
    ) -> Outputs:
        """Compute the outputs of a batch."""
        return self._run(params, base, loss, datums, with_gradients=False)[0]

    def forward_backward(
        self, params: Params, base: Params, loss: SummedLoss, datums: Sequence[Datum]
    ) -> tuple[Outputs, Params]:
        """Compute the outputs of a batch, and the gradients of its summed loss."""
        return self._run(params, base, loss, datums, with_gradients=True)

    def add(self, gradients: Params | None, more: Params) -> Params:
        """Add gradients, in the order of requests."""
        return more if gradients is None else self._add(gradients, more)

    def step(
        self, state: ModelState, gradients: Params, adam: AdamParams
    ) -> tuple[ModelState, float]:
        """Make one step of AdamW; the state is consumed.

        Returns:
            The new state, and the norm of the gradients.

        Raises:
            FloatingPointError: the gradients are not finite; the state in `error.args[1]` is as
                before.
        """
        rate, *others = adam
        numbers = np.array(others, np.float32)
        params, opt_state, norm, is_finite = self._step(
            *state, gradients, np.float32(rate), numbers
        )
        new = ModelState(params, opt_state)
        if not is_finite:
            raise FloatingPointError(f"the norm of the gradients is {float(norm)}", new)
        return new, float(norm)

    def zero_gradients(self, params: Params) -> Params:
        """Return gradients of no batch."""
        return put(
            jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), params),
            self.shardings.params,
        )

    def prompt_logprobs(
        self, params: Params, base: Params, tokens: Shaped[np.ndarray, "N"], num_top: int
    ) -> PromptLogprobs:
        """Compute the log-prob of every token of a prompt, and the most likely tokens."""
        forward = self._forward_of(len(tokens))
        layout = lay_out([len(tokens)], rows=forward.rows, row_tokens=forward.row_tokens)
        (batch,) = self._put(layout, [tokens], [tokens], {})
        found = forward.top_predictions(params, base, batch.inputs, max(1, num_top))
        return PromptLogprobs(*(layout.gather(np.asarray(each)[None])[0] for each in found))

    def _run(
        self,
        params: Params,
        base: Params,
        loss: SummedLoss,
        datums: Sequence[Datum],
        *,
        with_gradients: bool,
    ) -> tuple[Outputs, Any]:
        # One more token than the datum, at whose place the last target's log-prob is.
        lengths = [len(datum.tokens) + 1 for datum in datums]
        forward = self._forward_of(max(lengths))
        layout = lay_out(lengths, rows=forward.rows, row_tokens=forward.row_tokens)
        batches = self._put(
            layout,
            [np.append(datum.tokens, 0) for datum in datums],
            [np.insert(datum.targets, 0, 0) for datum in datums],
            {name: [np.insert(d.columns[name], 0, 0.0) for d in datums] for name in loss.columns},
        )
        program = self._program(loss, forward.row_tokens, with_gradients)
        gradients: Params | None = None
        logps, losses = list[Any](), list[Any]()
        for batch in batches:
            arguments = (self.zero_gradients(params),) if gradients is None else (gradients,)
            gradients, logp, total = program(
                params, base, batch, *(arguments if with_gradients else (None,))
            )
            logps.append(logp)
            losses.append(total)
        found = layout.gather(np.stack(jax.device_get(logps)))
        total = float(np.sum(jax.device_get(losses), dtype=np.float64))
        return Outputs([each[1:] for each in found], total), gradients

    def _put(
        self,
        layout: Layout,
        tokens: Sequence[Shaped[np.ndarray, "_"]],
        targets: Sequence[Shaped[np.ndarray, "_"]],
        columns: Mapping[str, Sequence[Shaped[np.ndarray, "_"]]],
    ) -> list[_Batch]:
        packed = (
            layout.scatter(tokens, np.int32),
            layout.scatter((int(each) for each in layout.segments), np.int32),
            layout.scatter((np.arange(length) for length in layout.lengths), np.int32),
            layout.scatter(targets, np.int32),
            {name: layout.scatter(values, np.float32) for name, values in columns.items()},
        )
        batches = []
        for i in range(layout.shape[0]):
            read, segments, positions, wanted, values = put_batch(
                self._mesh, jax.tree.map(lambda column, i=i: column[i], packed), TRAIN_RULES
            )
            batches.append(_Batch(ModelInputs(read, segments, positions), wanted, values))
        return batches

    def _forward_of(self, num_tokens: int) -> Forward:
        """Return the forward pass of the shortest rows that hold this many tokens."""
        row_tokens = max(SHORTEST_ROW, 1 << (num_tokens - 1).bit_length())
        if row_tokens not in self._forwards:
            config = self._config
            self._forwards[row_tokens] = Forward(
                TrainerConfig(
                    rows_per_micro_batch=max(1, config.micro_batch_tokens // row_tokens),
                    logp_chunk_tokens=config.logp_chunk_tokens,
                    remat=config.remat,
                ),
                self.policy,
                self._mesh,
                self._dtype,
                temperature=1.0,
                row_tokens=row_tokens,
            )
        return self._forwards[row_tokens]

    def _program(
        self, loss: SummedLoss, row_tokens: int, with_gradients: bool
    ) -> Callable[..., Any]:
        key = loss, row_tokens, with_gradients
        if key not in self._by_loss:
            forward = self._forwards[row_tokens]

            def evaluate(params: Params, base: Params, batch: _Batch) -> tuple[Array, Array]:
                logp = forward.predictions(params, base, batch.inputs, batch.targets).logp
                # The first token of each sequence is nobody's target.
                segments = batch.inputs.segment_ids
                mask = (segments > 0) & (batch.inputs.positions > 0)
                return summed_loss(loss, logp, batch.columns, mask, segments), logp

            def accumulate(params: Params, base: Params, batch: _Batch, gradients: Params) -> Any:
                (total, logp), found = jax.value_and_grad(evaluate, has_aux=True)(
                    params, base, batch
                )
                return jax.tree.map(jnp.add, gradients, found), logp, total

            def compute(params: Params, base: Params, batch: _Batch, gradients: None) -> Any:
                total, logp = evaluate(params, base, batch)
                return gradients, logp, total

            everywhere = NamedSharding(self._mesh, PartitionSpec())
            out = (self.shardings.params if with_gradients else None, forward.placed, everywhere)
            self._by_loss[key] = jax.jit(
                accumulate if with_gradients else compute,
                donate_argnums=(3,) if with_gradients else (),
                out_shardings=out,
            )
            while len({each[0] for each in self._by_loss}) > self._config.limits.max_losses:
                self._by_loss.popitem(last=False)
        self._by_loss.move_to_end(key)
        return self._by_loss[key]

    @cached_property
    def _add(self) -> Callable[[Params, Params], Params]:
        return jax.jit(
            lambda a, b: jax.tree.map(jnp.add, a, b),
            donate_argnums=0,
            out_shardings=self.shardings.params,
        )

    def _apply(
        self,
        params: Params,
        opt_state: optax.OptState,
        gradients: Params,
        rate: Float[Array, ""],
        numbers: Float[Array, "5"],
    ) -> Any:
        """Update once, or return the state unchanged if the gradients are not finite."""
        optimizer = make_traced_optimizer(numbers, self._trained.axes)
        norm = optax.tree.norm(gradients)
        direction, new_opt_state = optimizer.update(gradients, opt_state, params)
        new_params = jax.tree.map(lambda leaf, toward: leaf - rate * toward, params, direction)
        is_finite = jnp.isfinite(norm)
        params, opt_state = jax.tree.map(
            partial(jnp.where, is_finite), (new_params, new_opt_state), (params, opt_state)
        )
        return params, opt_state, norm, is_finite
