"""Parameters with their optimizer state, and one update of them. Axes: B rows, T tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped

from areal_jax.data.packing import Layout, TrainingSequence, pack
from areal_jax.metrics.meters import Mean
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.vision.image_reader import ImageReader
from areal_jax.models.vision.tower import ImageInputs
from areal_jax.parallel.compilation import Compiler, Program, compile_lowered
from areal_jax.parallel.sharding import (
    TRAIN_RULES,
    Moved,
    abstract,
    is_abstract,
    move,
    put,
    put_batch,
    put_copy,
    shardings_of,
)
from areal_jax.records import PackedBatch, SequenceImages
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch, Forward
from areal_jax.trainer.programs import (
    Accumulated,
    Applied,
    Measured,
    Objective,
    SampleGradients,
    UpdatePrograms,
)

MOST_PARAMS_OF_TWO_THREADS = 2**26
"""Parameters of the largest policy whose micro-batches two threads take on a CPU."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainableModel:
    """A policy with initial parameters on a train mesh: what a `Learner` starts from.

    Attributes:
        params: Trained parameters. The learner copies them. Shapes alone if the learner's programs
            are only to be compiled.
        base: If `params` is an adapter, the frozen parameters that it adapts: on the train mesh, in
            the dtypes of `state.frozen`.
        row_tokens: Length of a packed row, in tokens. No sequence may be longer.
        temperature: Sampling temperature, by which logits are divided.
        replays_router: Whether tokens go to the experts that the engine has recorded.
        shares_prefixes: Whether tokens with which several sequences begin are packed once.
        compiler: Compiles the programs.
        image_reader: Reads the images of samples, with trainer.row_image_tokens.
    """

    policy: Policy
    params: Params
    mesh: Mesh
    compute_dtype: DTypeLike
    row_tokens: int
    temperature: float = 1.0
    base: Params | None = None
    replays_router: bool = False
    shares_prefixes: bool = False
    compiler: Compiler = compile_lowered
    image_reader: ImageReader | None = None


class Learner:
    """Parameters and optimizer state on the train mesh, and the programs that use them.

    It has more than 200 lines because each method prepares the arguments of one program.
    """

    def __init__(
        self, config: TrainerConfig, model: TrainableModel, objective: Objective, num_updates: int
    ):
        """
        Args:
            config: Optimizer, micro-batch shape and auxiliary losses.
            model: Policy and initial parameters.
            objective: Loss of a micro-batch.
            num_updates: Length of the learning-rate schedule, in updates.
        """
        self.policy, self.mesh, self.compute_dtype = model.policy, model.mesh, model.compute_dtype
        self.columns, self.loss = objective.columns, config.loss
        self._image_reader = model.image_reader
        self.forward = Forward(
            config,
            model.policy,
            model.mesh,
            model.compute_dtype,
            temperature=model.temperature,
            row_tokens=model.row_tokens,
            replays_router=model.replays_router,
            shares_prefixes=model.shares_prefixes,
            compiler=model.compiler,
        )
        self.rows, self.row_tokens = self.forward.rows, self.forward.row_tokens
        self.programs = UpdatePrograms(config, self.forward, objective, num_updates)
        self.base: Params = {} if model.base is None else model.base
        self.params: Params
        self.opt_state: optax.OptState
        if is_abstract(model.params):
            self.params, self.opt_state = self.programs.abstract_state()
        else:
            # A copy, because the first update donates its arguments.
            self.params = put_copy(model.params, self.programs.shardings.params)
            self.opt_state = self.programs.run("init", self.params)

    @property
    def _uses_two_threads(self) -> bool:
        """Whether two threads take the micro-batches in turns, each with sums of its own.

        On one CPU device: jax runs a thread's programs one after the other, and the products of a
        small policy are too small for several cores. A large one has no memory for two sums.
        """
        is_small = self.policy.config.num_params <= MOST_PARAMS_OF_TWO_THREADS
        return is_small and self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "cpu"

    @cached_property
    def _zeros(self) -> Float[Array, "B T"]:
        """Shared by all micro-batches, for columns that are not filled yet."""
        return put(np.zeros((self.rows, self.row_tokens), np.float32), self.forward.placed)

    @property
    def num_compilations(self) -> int:
        """Number of programs compiled so far."""
        return self.programs.num_compilations + self.forward.num_compilations

    def list_programs(
        self,
        *,
        reads_logprobs: bool = False,
        reads_gradient_norms: bool = False,
        measures: bool = False,
    ) -> list[Program]:
        """Return all programs that training executes.

        Args:
            reads_logprobs: `logprobs` will be called.
            reads_gradient_norms: `gradient_norms` will be called.
            measures: `measure` will be called.
        """
        names = ["init", "zeros", "accumulate", "apply"]
        names += ["add"] if self._uses_two_threads else []
        names += ["gradient_norms"] if reads_gradient_norms else []
        names += ["measure"] if measures else []
        programs: list[Program] = [(name, partial(self.programs.compiled, name)) for name in names]
        if reads_logprobs:
            programs.append(("logprobs", lambda: self.forward.compiled(self.params, self.base)))
        return programs

    def pack(
        self, sequences: Sequence[TrainingSequence], num_together: int = 1
    ) -> tuple[list[PackedBatch], Layout]:
        """Pack sequences into micro-batches; errors and arguments as of `packing.pack`."""
        return pack(
            sequences,
            rows=self.rows,
            row_tokens=self.row_tokens,
            num_together=num_together,
            row_patches=self.forward.row_patches,
            share_prefixes=self.forward.shares_prefixes,
        )

    def read_images(
        self, files: Sequence[bytes], tokens: Int32[np.ndarray, "T"]
    ) -> SequenceImages | None:
        """Read the images of a sequence; None if the learner trains on text alone.

        Raises:
            ValueError: They cannot be read, or the settings have no room for images.
        """
        if self.forward.row_patches and self._image_reader is not None:
            return self._image_reader.read(files, tokens)
        if files:
            raise ValueError(
                f"expected samples without images, found {len(files)} in one; set "
                "trainer.row_image_tokens to the image tokens of a row, and policy.path to a "
                "vision-language policy"
            )
        return None

    def put(self, batch: PackedBatch) -> DeviceBatch:
        """Start the transfer of a micro-batch to the train mesh; its other columns are zeros.

        Raises:
            ValueError: The policy replays recorded experts, and there are none.
        """
        if not self.forward.replays_router:
            batch = batch._replace(experts=None)
        elif batch.experts is None:
            raise ValueError(
                "expected samples with recorded experts for engine.router_replay=true, found none; "
                "set it to false to train on samples that were made without it"
            )
        columns = batch._asdict()
        if batch.images is not None:
            columns["images"] = ImageInputs(*batch.images)
        return DeviceBatch(
            **put_batch(self.mesh, columns, TRAIN_RULES),
            proximal_logp=self._zeros,
            advantages=self._zeros,
        )

    def put_column(self, values: Shaped[np.ndarray, "M B T"]) -> list[Shaped[Array, "B T"]]:
        """Start the transfer of one value per token of all micro-batches: a column of each."""
        return put(list(values), [self.forward.placed] * len(values))

    def logprobs(self, batch: DeviceBatch) -> Float[Array, "B T"]:
        """Return log-probabilities of all tokens under the current parameters, asynchronously.

        With a scalar head: at token t, the value of what follows token t.
        """
        return self.forward.logprobs(self.params, self.base, batch)

    def gradient_norms(self, batch: DeviceBatch) -> SampleGradients:
        """Return the norm of the gradient of each sample's log-prob under the current parameters,
        asynchronously.
        """
        inputs = self.forward.inputs(batch)
        return self.programs.run("gradient_norms", self.params, self.base, inputs, batch.loss_mask)

    def update(
        self, batches: Sequence[DeviceBatch], num_tokens: int, *, proximal_is_current: bool
    ) -> Applied:
        """Make one optimizer update from the micro-batches of a mini-batch.

        Args:
            batches: All micro-batches.
            num_tokens: Loss tokens (or pairs) of the mini-batch, by which the objective divides.
            proximal_is_current: The parameters are those of the proximal policy, and the batches
                have no proximal log-probs: the objective takes them from its own forward pass.

        Returns:
            Metrics of the objective and of the optimizer, in one transfer to the host.

        Raises:
            FloatingPointError: Loss or gradient is not finite. Parameters and optimizer state are
                unchanged.
        """
        scalars = np.float32(num_tokens), np.bool_(proximal_is_current)
        if not self.forward.replays_router:
            # A critic reads the policy's micro-batches.
            batches = [batch._replace(experts=None) for batch in batches]
        if self._uses_two_threads and len(batches) > 1:
            with ThreadPoolExecutor(1, "micro-batches") as thread:
                others = thread.submit(self._accumulate, batches[1::2], scalars)
                accumulated = self._accumulate(batches[::2], scalars)
                accumulated = self.programs.run("add", accumulated, others.result())
        else:
            accumulated = self._accumulate(batches, scalars)
        self.params, self.opt_state, report = self.programs.run(
            "apply", self.params, self.opt_state, accumulated
        )
        (metrics, off_policy), digest = jax.device_get(report)
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics[name].total):
                raise FloatingPointError(f"{name} is {metrics[name].total}")
        on_host = {
            name: Mean(float(total), float(weight)) for name, (total, weight) in metrics.items()
        }
        return Applied(Measured(on_host, off_policy), int(digest))

    def _accumulate(
        self, batches: Sequence[DeviceBatch], scalars: tuple[np.float32, np.bool_]
    ) -> Accumulated:
        accumulated = self.programs.run("zeros")
        for batch in batches:
            accumulated = self.programs.run(
                "accumulate", self.params, self.base, accumulated, batch, *scalars
            )
        return accumulated

    def measure(self, batches: Sequence[DeviceBatch]) -> dict[str, Mean]:
        """Return the objective's metrics of micro-batches under the current parameters."""
        # All are enqueued before the first is waited for.
        scalars = np.float32(1), np.bool_(False)
        found = [
            self.programs.run("measure", self.params, self.base, batch, *scalars).metrics
            for batch in batches
        ]
        sums = jax.tree.map(lambda *of_batches: sum(map(float, of_batches)), *jax.device_get(found))
        return dict(sums)

    def restore(self, params: Params, opt_state: optax.OptState) -> None:
        """Replace parameters and optimizer state, wherever they lie.

        Arrays with the learner's own shardings are taken over without a copy.
        """
        shardings = self.programs.shardings
        self.params = jax.tree.map(_take, params, shardings.params)
        self.opt_state = jax.tree.map(_take, opt_state, shardings.opt_state)

    def take_over(self, other: Learner, moved: Moved) -> None:
        """Move the state of a learner on another mesh here; only its shapes remain there.

        Args:
            other: Learner of the same policy. Each of its arrays is freed once it is copied.
            moved: Frozen arrays that have been moved, which models share.
        """
        left, structure = jax.tree.flatten((other.params, other.opt_state))
        other.let_go()
        copies = list[jax.Array]()
        for like in jax.tree.leaves((self.params, self.opt_state)):
            # Shards that stay where they are may be shared with the copy, so that none is deleted.
            copies.append(jax.block_until_ready(put_copy(left.pop(0), like.sharding)))
        self.params, self.opt_state = jax.tree.unflatten(structure, copies)
        shapes = abstract(other.base, shardings_of(other.base))
        self.base, other.base = move(other.base, shardings_of(self.base), moved), shapes

    def let_go(self) -> None:
        """Free parameters and optimizer state until `restore`; only their shapes remain."""
        self.params, self.opt_state = self.programs.abstract_state()


def _take(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Return the array itself if it has this sharding, else a copy that has it."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    return put_copy(leaf, sharding)
