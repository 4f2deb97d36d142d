"""Outputs and gradients of batches of several models in one program.

A model's sequences fill rows of their own, and a micro-batch has rows of any models, each with its
own adapter. The gradients of a row depend on the row alone, and are added to its model's row by
row, so that a model gets the same bits in whatever company, and alone.

Axes: A models, B rows, T tokens of a row, N tokens of a datum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Shaped

from areal_jax.data.packing import lay_out
from areal_jax.engine.decode_shapes import next_power_of_two
from areal_jax.models import lora
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import TRAIN_RULES, is_axes, put_batch, shardings, shardings_of
from areal_jax.tinker.config import TinkerConfig
from areal_jax.tinker.messages import Datum
from areal_jax.tinker.objective import SummedLoss, summed_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import Forward, ModelInputs

SHORTEST_ROW = 64
"""Tokens of the shortest row; others are powers of two."""


class Work(NamedTuple):
    """A request of one model."""

    params: Params
    """Its adapter, or all parameters, on the train mesh."""
    shape: LoRA | None
    """Settings of its adapter; None: all parameters are trained."""
    datums: Sequence[Datum]


class Outputs(NamedTuple):
    """Outputs of a request."""

    logprobs: list[Float32[np.ndarray, "_"]]
    """Log-prob of every target, by datum."""
    loss: float
    """Sum over the request."""
    gradients: Params | None
    """Of its sum; None where none were asked for."""


class _Batch(NamedTuple):
    """A micro-batch on the train mesh."""

    inputs: ModelInputs
    targets: Shaped[Array, "B T"]
    columns: Mapping[str, Float[Array, "B T"]]
    models: Int[Array, "B"]
    """Model of each row."""


class _Row(NamedTuple):
    """A row on the host, or several in a stack."""

    tokens: Shaped[np.ndarray, "*b T"]
    segments: Shaped[np.ndarray, "*b T"]
    positions: Shaped[np.ndarray, "*b T"]
    targets: Shaped[np.ndarray, "*b T"]
    columns: Mapping[str, Shaped[np.ndarray, "*b T"]]


def row_tokens_of(datums: Sequence[Datum]) -> int:
    """Return the length of the shortest rows that hold all datums."""
    # One more token than the datum, at whose place the last target's log-prob is.
    return shortest_row(max(len(datum.tokens) for datum in datums) + 1)


def shortest_row(num_tokens: int) -> int:
    """Return the length of the shortest rows that hold this many tokens."""
    return next_power_of_two(num_tokens, SHORTEST_ROW)


def make_forward(
    policy: Policy, mesh: Mesh, dtype: DTypeLike, config: TinkerConfig, row_tokens: int
) -> Forward:
    """Return the forward pass over rows of this length."""
    trainer = TrainerConfig(
        rows_per_micro_batch=max(1, config.micro_batch_tokens // row_tokens),
        logp_chunk_tokens=config.logp_chunk_tokens,
        remat=config.remat,
    )
    return Forward(trainer, policy, mesh, dtype, temperature=1.0, row_tokens=row_tokens)


class BatchPrograms:
    """The programs of the adapters of a bucket, or of one policy that is trained whole."""

    def __init__(
        self,
        policy: Policy,
        base: Params,
        mesh: Mesh,
        compute_dtype: DTypeLike,
        config: TinkerConfig,
    ) -> None:
        """
        Args:
            policy: with the bucket's shape, to which adapters are padded.
            base: frozen parameters; empty where all are trained.
            mesh: the train mesh.
            compute_dtype: of activations and products.
            config: settings of the server.
        """
        self._policy, self._base, self._mesh, self._dtype = policy, base, mesh, compute_dtype
        self._config = config
        self.num_models = config.limits.max_batched_models if policy.lora else 1
        self._forwards: dict[int, Forward] = {}
        self._takes: dict[LoRA, Callable[[Params, int], Params]] = {}
        # By loss function, row length and whether gradients are computed; the oldest are dropped.
        self._by_loss: OrderedDict[tuple[SummedLoss, int, bool], Callable[..., Any]] = OrderedDict()

    def run(self, loss: SummedLoss, works: Sequence[Work], *, learns: bool) -> list[Outputs]:
        """Compute the outputs of requests.

        Args:
            loss: loss function of all requests.
            works: requests of at most `num_models` models, whose longest datums need rows of the
                same length.
            learns: compute gradients too.
        """
        row_tokens = row_tokens_of(works[0].datums)
        if row_tokens not in self._forwards:
            self._forwards[row_tokens] = make_forward(
                self._policy, self._mesh, self._dtype, self._config, row_tokens
            )
        forward = self._forwards[row_tokens]
        layouts = [
            lay_out([len(d.tokens) + 1 for d in work.datums], rows=1, row_tokens=row_tokens)
            for work in works
        ]
        rows = [
            _rows(layout, work.datums, loss.columns)
            for layout, work in zip(layouts, works, strict=True)
        ]
        models = np.repeat(np.arange(len(works)), [len(each.tokens) for each in rows])
        params, scales = self._stack(works)
        program, gradients = self._program(loss, row_tokens, learns), None
        if learns:
            gradients = self._zeros()
        logps, losses = list[Any](), list[Any]()
        for batch in self._batches(rows, models, forward.rows):
            gradients, logp, total = program(params, scales, self._base, batch, gradients)
            logps.append(logp)
            losses.append(total)
        logp, total = (
            np.concatenate(jax.device_get(each))[: len(models)] for each in (logps, losses)
        )
        outputs = list[Outputs]()
        for number, (work, layout) in enumerate(zip(works, layouts, strict=True)):
            own = models == number
            found = layout.gather(logp[own][:, None])
            own_gradients = None
            if gradients is not None:
                own_gradients = self._take(gradients, number, work)
            value = float(np.sum(total[own], dtype=np.float64))
            outputs.append(Outputs([each[1:] for each in found], value, own_gradients))
        return outputs

    def _batches(
        self, rows: Sequence[_Row], models: Int[np.ndarray, "_"], num_rows: int
    ) -> list[_Batch]:
        """Return the micro-batches of all rows; empty rows at the end are the first model's."""
        missing = -len(models) % num_rows

        def join(*parts: np.ndarray) -> np.ndarray:
            padding = np.zeros((missing, *parts[0].shape[1:]), parts[0].dtype)
            return np.concatenate([*parts, padding])

        joined: Any = (jax.tree.map(join, *rows), join(models.astype(np.int32)))
        batches = list[_Batch]()
        for start in range(0, len(models), num_rows):
            part = jax.tree.map(lambda x, i=start: x[i : i + num_rows], joined)
            row, own = put_batch(self._mesh, part, TRAIN_RULES)
            inputs = ModelInputs(row.tokens, row.segments, row.positions)
            batches.append(_Batch(inputs, row.targets, row.columns, own))
        return batches

    def _program(self, loss: SummedLoss, row_tokens: int, learns: bool) -> Callable[..., Any]:
        key = loss, row_tokens, learns
        if key not in self._by_loss:
            forward = self._forwards[row_tokens]
            everywhere = NamedSharding(self._mesh, PartitionSpec())
            gradients = self._placed if learns else None
            self._by_loss[key] = jax.jit(
                _accumulating(loss, forward, self._policy, learns=learns),
                donate_argnums=(4,) if learns else (),
                out_shardings=(gradients, forward.placed, everywhere),
            )
            while len({each[0] for each in self._by_loss}) > self._config.limits.max_losses:
                self._by_loss.popitem(last=False)
        self._by_loss.move_to_end(key)
        return self._by_loss[key]

    # The models' parameters side by side, [A, ...]; of a policy that is trained whole, themselves.

    def _stack(self, works: Sequence[Work]) -> tuple[Params, Float32[np.ndarray, "_"]]:
        scales = np.zeros(self.num_models, np.float32)
        if not self._policy.lora:
            return works[0].params, scales
        stack = self._zeros()
        for number, work in enumerate(works):
            stack = self._place(stack, number, work.params)
            scales[number] = work.shape.scale if work.shape else 0.0
        return stack, scales

    def _take(self, gradients: Params, number: int, work: Work) -> Params:
        if work.shape is None:
            return gradients
        if work.shape not in self._takes:
            shapes = lora.abstract(Policy(self._policy.config, work.shape))
            self._takes[work.shape] = jax.jit(
                lambda stack, i: lora.cut(jax.tree.map(lambda leaf: leaf[i], stack), shapes),
                out_shardings=shardings_of(work.params),
            )
        return self._takes[work.shape](gradients, number)

    @cached_property
    def _shapes(self) -> Params:
        if not self._policy.lora:
            return self._policy.abstract()
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self.num_models, *leaf.shape), leaf.dtype),
            lora.abstract(self._policy),
        )

    @cached_property
    def _placed(self) -> Any:
        if not self._policy.lora:
            axes = self._policy.axes()
        else:
            axes = jax.tree.map(
                lambda names: (None, *names),
                lora.axes(self._policy),
                is_leaf=is_axes,
            )
        return shardings(self._mesh, axes, self._shapes, TRAIN_RULES)

    @cached_property
    def _zeros(self) -> Callable[[], Params]:
        shapes = self._shapes
        return jax.jit(
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
            out_shardings=self._placed,
        )

    @cached_property
    def _place(self) -> Callable[[Params, int, Params], Params]:
        def place(stack: Params, number: Int[Array, ""], adapter: Params) -> Params:
            padded = lora.pad(adapter, jax.tree.map(lambda leaf: leaf[0], stack))
            return jax.tree.map(lambda all, own: all.at[number].set(own), stack, padded)

        return jax.jit(place, donate_argnums=0, out_shardings=self._placed)


def _accumulating(
    loss: SummedLoss, forward: Forward, policy: Policy, *, learns: bool
) -> Callable[..., Any]:
    """Return the function of a micro-batch: it adds gradients, and returns log-probs and the sum of
    every row.
    """

    def evaluate(params: Params, base: Params, batch: _Batch) -> tuple[Array, tuple[Array, Array]]:
        logp = forward.predictions(params, base, batch.inputs, batch.targets).logp
        segments = batch.inputs.segment_ids
        # The first token of each sequence is nobody's target.
        mask = (segments > 0) & (batch.inputs.positions > 0)

        def of_row(*row: Any) -> Array:
            return summed_loss(loss, *jax.tree.map(lambda x: x[None], row))

        sums = jax.vmap(of_row)(logp, batch.columns, mask, segments)
        return sums.sum(), (logp, sums)

    def evaluate_rows(
        adapters: Params, scales: Array, base: Params, batch: _Batch
    ) -> tuple[Array, tuple[Array, Array]]:
        whole = lora.attach_rows(base, adapters, scales[batch.models])
        return evaluate(whole, {}, batch)

    def accumulate(
        params: Params, scales: Array, base: Params, batch: _Batch, gradients: Params | None
    ) -> tuple[Params | None, Array, Array]:
        if not policy.lora:
            if not learns:
                return (None, *evaluate(params, base, batch)[1])
            (_, outputs), found = jax.value_and_grad(evaluate, has_aux=True)(params, base, batch)
            return jax.tree.map(jnp.add, gradients, found), *outputs
        adapters = jax.tree.map(lambda leaf: leaf[batch.models], params)
        if not learns:
            return (None, *evaluate_rows(adapters, scales, base, batch)[1])
        (_, outputs), found = jax.value_and_grad(evaluate_rows, has_aux=True)(
            adapters, scales, base, batch
        )

        def add_row(row: Array, gradients: Params) -> Params:
            model = batch.models[row]
            return jax.tree.map(lambda all, own: all.at[model].add(own[row]), gradients, found)

        # Row by row: which rows are in a micro-batch must not change the order of a model's sums.
        return jax.lax.fori_loop(0, len(batch.models), add_row, gradients), *outputs

    return accumulate


def _rows(layout: Any, datums: Sequence[Datum], names: Sequence[str]) -> _Row:
    """Return the rows of a request."""
    stacked = _Row(
        layout.scatter([np.append(datum.tokens, 0) for datum in datums], np.int32),
        layout.scatter((int(each) for each in layout.segments), np.int32),
        layout.scatter((np.arange(length) for length in layout.lengths), np.int32),
        layout.scatter([np.insert(datum.targets, 0, 0) for datum in datums], np.int32),
        {
            name: layout.scatter([np.insert(d.columns[name], 0, 0.0) for d in datums], np.float32)
            for name in names
        },
    )
    return jax.tree.map(lambda column: column[:, 0], stacked)
