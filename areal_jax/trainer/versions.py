"""What all trainers are, whatever they learn from: a learner whose parameters have a version."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from areal_jax.data.packing import Layout
from areal_jax.metrics.meters import Mean
from areal_jax.models.decoder import Params
from areal_jax.records import StepResult
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.state import CriticState, TrainState
from areal_jax.trainer.step import Learner

T = TypeVar("T")


class Versions:
    """Parameters that go from one version to the next. Call it from one thread at a time."""

    def __init__(
        self,
        learner: Learner,
        *,
        reads_logprobs: bool = False,
        measures: bool = False,
        critic: Learner | None = None,
    ):
        """
        Args:
            reads_logprobs: a step also asks for log-probabilities.
            measures: `measure` will be called. Both so that `warm_up` compiles what they run.
            critic: trains beside the learner.
        """
        self._learner, self._reads_logprobs, self._measures, self._critic = (
            learner,
            reads_logprobs,
            measures,
            critic,
        )
        self.version = 0
        """Trainer steps that the parameters have seen."""

    @property
    def params(self) -> Params:
        """The parameters of `version`, on the train mesh. The next step takes their memory: copy
        what must outlive it."""
        return self._learner.params

    @property
    def state(self) -> TrainState:
        """All that training resumes from; the next step takes its memory."""
        critic = (
            None
            if self._critic is None
            else CriticState(self._critic.params, self._critic.opt_state)
        )
        return TrainState(
            self._learner.params,
            self._learner.opt_state,
            np.asarray(self.version, np.int32),
            critic,
        )

    def restore(self, state: TrainState) -> None:
        """Go on from `state` instead, which may lie on another mesh or on the host. Arrays that lie
        as the trainer's own are taken over: the next step takes their memory."""
        self._learner.restore(state.params, state.opt_state)
        if self._critic is not None:
            if state.critic is None:
                raise ValueError("the trainer has a critic and the state to resume from has none")
            self._critic.restore(*state.critic)
        self.version = int(state.version)

    def let_go(self) -> TrainState:
        """Free the memory of `state`, until `restore`; what it was, as shapes that say where each
        leaf shall lie."""
        for learner in filter(None, (self._learner, self._critic)):
            learner.let_go()
        return self.state

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far; stays as it is after `warm_up`."""
        return self._learner.num_compilations + (
            0 if self._critic is None else self._critic.num_compilations
        )

    def warm_up(self) -> None:
        """Compile everything that a step runs. Changes neither parameters nor version."""
        self._learner.warm_up(reads_logprobs=self._reads_logprobs, measures=self._measures)
        if self._critic is not None:
            self._critic.warm_up(reads_logprobs=True)


class Packed(NamedTuple):
    """Examples of one update as micro-batches."""

    batches: list[DeviceBatch]
    layout: Layout
    num_loss_tokens: int
    num_counted: int
    """Loss tokens, or pairs: what the loss is the mean of."""


class FromExamples(Versions, ABC, Generic[T]):
    """A trainer that learns from examples which are there before the run begins. Below it: how they
    are packed."""

    @abstractmethod
    def pack(self, examples: Sequence[T]) -> Packed:
        """Micro-batches of examples, on the train mesh."""

    def step(self, examples: Sequence[T]) -> StepResult:
        """One optimizer update; its loss is the mean over the examples' loss tokens, or over pairs.

        Raises FloatingPointError, which says what to change, where loss or gradient is not finite;
        the update is then not applied."""
        started_s = time.perf_counter()
        packed = self.pack(examples)
        try:
            learned = self._learner.update(
                packed.batches, packed.num_counted, proximal_is_current=False
            )
        except FloatingPointError as error:
            raise FloatingPointError(
                f"step {self.version}: {error}. The update was not applied; the last good "
                f"version is {self.version}. Lower "
                "trainer.optimizer.learning_rate or trainer.optimizer.max_grad_norm"
            ) from None
        self.version += 1
        filled, seconds = packed.layout.filled, time.perf_counter() - started_s
        metrics: dict[str, float | Mean] = {
            **learned,
            "tokens_trained": float(packed.num_loss_tokens),
            "packing_efficiency": Mean(*filled),
            "tokens_per_second": Mean(filled[0], seconds),
            "seconds_step": seconds,
            "num_compilations": float(self.num_compilations),
        }
        return StepResult(metrics)

    def measure(self, examples: Sequence[T]) -> dict[str, Mean]:
        """What a step would say of the examples, each as a sum and its weight, with the parameters
        as they are; nothing is learnt."""
        return self._learner.measure(self.pack(examples).batches)
