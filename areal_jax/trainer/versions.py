"""The base of all trainers: a learner whose parameters have a version."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from areal_jax.data.packing import Layout
from areal_jax.metrics.meters import Mean
from areal_jax.models.decoder import Params
from areal_jax.parallel.compilation import OnProgram, Program, compile_programs
from areal_jax.parallel.sharding import Moved
from areal_jax.records import StepResult
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.state import CriticState, TrainState
from areal_jax.trainer.step import Learner

T = TypeVar("T")


class HostState(NamedTuple):
    """State of a trainer beside its `TrainState`, of any size."""

    facts: dict[str, Any]
    """JSON values."""
    arrays: dict[str, np.ndarray]


class Versions:
    """Parameters that each step takes to the next version. Not thread-safe."""

    def __init__(
        self,
        learner: Learner,
        *,
        reads_logprobs: bool = False,
        reads_gradient_norms: bool = False,
        measures: bool = False,
        critic: Learner | None = None,
    ):
        """
        Args:
            learner: Parameters and optimizer state.
            reads_logprobs: Steps call `Learner.logprobs`, so that `warm_up` compiles it.
            reads_gradient_norms: The same of `Learner.gradient_norms`.
            measures: `measure` will be called, so that `warm_up` compiles it.
            critic: A second learner, with a state of its own.
        """
        self._learner, self._critic = learner, critic
        self._called = {
            "reads_logprobs": reads_logprobs,
            "reads_gradient_norms": reads_gradient_norms,
            "measures": measures,
        }
        self.version = 0
        """Number of trainer steps that made the parameters."""

    @property
    def params(self) -> Params:
        """The parameters of `version`, on the train mesh. The next step donates them."""
        return self._learner.params

    @property
    def state(self) -> TrainState:
        """The state that training resumes from. The next step donates it."""
        critic = None
        if self._critic is not None:
            critic = CriticState(self._critic.params, self._critic.opt_state)
        version = np.asarray(self.version, np.int32)
        return TrainState(self._learner.params, self._learner.opt_state, version, critic)

    def restore(self, state: TrainState) -> None:
        """Resume from a state, which may lie on another mesh or on the host.

        Arrays with the trainer's own shardings are taken over: the next step donates them.

        Raises:
            ValueError: The trainer has a critic and the state has none.
        """
        self._learner.restore(state.params, state.opt_state)
        if self._critic is not None:
            if state.critic is None:
                raise ValueError("the trainer has a critic and the state to resume from has none")
            self._critic.restore(*state.critic)
        self.version = int(state.version)

    @property
    def host_state(self) -> HostState | None:
        """What training resumes from besides `state`; None if there is nothing."""
        return None

    def restore_host_state(self, state: HostState) -> None:
        """Resume from a `host_state`."""
        raise NotImplementedError(f"{type(self).__name__} has no host state")

    def let_go(self) -> TrainState:
        """Free the memory of `state` until `restore`, and return its shapes and shardings."""
        for learner in filter(None, (self._learner, self._critic)):
            learner.let_go()
        return self.state

    def exchange_meshes(self, other: Versions) -> None:
        """Move to the mesh of a trainer that holds shapes alone, which gets this one's mesh.

        Its programs are then those of this trainer, so that what it has compiled is not compiled
        again. Call it between two steps.

        Args:
            other: Trainer of the same settings, made from shapes.
        """
        self._exchange(other, {})

    def _exchange(self, other: Versions, moved: Moved) -> None:
        other._learner.take_over(self._learner, moved)
        self._learner, other._learner = other._learner, self._learner
        if self._critic is not None and other._critic is not None:
            other._critic.take_over(self._critic, moved)
            self._critic, other._critic = other._critic, self._critic

    @property
    def base(self) -> Params:
        """Frozen weights of an adapter, on the train mesh; empty without an adapter."""
        return self._learner.base

    @property
    def num_compilations(self) -> int:
        """Number of programs compiled so far. Constant after `warm_up`."""
        return self._learner.num_compilations + (
            0 if self._critic is None else self._critic.num_compilations
        )

    def warm_up(self, on_program: OnProgram | None = None) -> None:
        """Compile everything that a step executes. Changes neither parameters nor version."""
        compile_programs(self.list_programs(), on_program)

    def list_programs(self) -> list[Program]:
        """Return all programs that a step executes."""
        programs = self._learner.list_programs(**self._called)
        if self._critic is not None:
            of_critic = self._critic.list_programs(reads_logprobs=True)
            programs += [(f"critic {name}", compile_it) for name, compile_it in of_critic]
        return programs


class Packed(NamedTuple):
    """Examples of one update as micro-batches."""

    batches: list[DeviceBatch]
    layout: Layout
    num_loss_tokens: int
    num_counted: int
    """Loss tokens or pairs, of which the loss is the mean."""


class FromExamples(Versions, ABC, Generic[T]):
    """A trainer that learns from a fixed set of examples. Subclasses define how they are packed."""

    @abstractmethod
    def pack(self, examples: Sequence[T]) -> Packed:
        """Return micro-batches of examples, on the train mesh."""

    def step(self, examples: Sequence[T]) -> StepResult:
        """Make one optimizer update. Its loss is the mean over the loss tokens, or over pairs.

        Raises:
            FloatingPointError: Loss or gradient is not finite. The update is not applied.
        """
        started_s = time.perf_counter()
        packed = self.pack(examples)
        try:
            learned = self._learner.update(
                packed.batches, packed.num_counted, proximal_is_current=False
            )
        except FloatingPointError as error:
            raise FloatingPointError(
                f"step {self.version}: {error}. The update was not applied; the last good version "
                f"is {self.version}. Lower trainer.optimizer.learning_rate or "
                "trainer.optimizer.max_grad_norm"
            ) from None
        self.version += 1
        filled, seconds = packed.layout.filled, time.perf_counter() - started_s
        metrics: dict[str, float | Mean] = {
            **learned.measured.metrics,
            "params_digest": float(learned.digest),
            "tokens_trained": float(packed.num_loss_tokens),
            "packing_efficiency": Mean(*filled),
            "tokens_per_second": Mean(filled[0], seconds),
            "seconds_step": seconds,
            "num_compilations": float(self.num_compilations),
        }
        return StepResult(metrics)

    def measure(self, examples: Sequence[T]) -> dict[str, Mean]:
        """Return the objective's metrics of examples under the current parameters."""
        return self._learner.measure(self.pack(examples).batches)
