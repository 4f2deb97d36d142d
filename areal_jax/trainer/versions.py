"""What all trainers are, whatever they learn from: a learner whose parameters have a version."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from areal_jax.data.packing import Layout
from areal_jax.models.decoder import Params
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.state import CriticState, TrainState
from areal_jax.trainer.step import Learner, Metrics


class Versions:
    """Parameters that go from one version to the next. Call it from one thread at a time."""

    def __init__(
        self, learner: Learner, *, reads_logprobs: bool = False, measures: bool = False, critic: Learner | None = None
    ):
        """
        Args:
            reads_logprobs: a step also asks for log-probabilities.
            measures: `measure` will be called. Both so that `warm_up` compiles what they run.
            critic: trains beside the learner.
        """
        self._learner, self._reads_logprobs, self._measures, self._critic = learner, reads_logprobs, measures, critic
        self.version = 0
        """Trainer steps that the parameters have seen."""

    @property
    def params(self) -> Params:
        """The parameters of `version`, on the train mesh. The next step takes their memory: copy what must outlive it."""
        return self._learner.params

    @property
    def state(self) -> TrainState:
        """All that training goes on from; the next step takes its memory."""
        critic = None if self._critic is None else CriticState(self._critic.params, self._critic.opt_state)
        return TrainState(self._learner.params, self._learner.opt_state, np.asarray(self.version, np.int32), critic)

    def restore(self, state: TrainState) -> None:
        """Go on from `state` instead, which may lie on another mesh or on the host."""
        self._learner.restore(state.params, state.opt_state)
        if self._critic is not None:
            if state.critic is None:
                raise ValueError("the trainer has a critic and the state to go on from has none")
            self._critic.restore(*state.critic)
        self.version = int(state.version)

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far; stays as it is after `warm_up`."""
        return self._learner.num_compilations + (0 if self._critic is None else self._critic.num_compilations)

    def warm_up(self) -> None:
        """Compile everything that a step runs. Changes neither parameters nor version."""
        self._learner.warm_up(reads_logprobs=self._reads_logprobs, measures=self._measures)
        if self._critic is not None:
            self._critic.warm_up(reads_logprobs=True)

    def _one_update(
        self, batches: Sequence[DeviceBatch], count: int, layout: Layout, started_s: float, *, proximal_is_current: bool
    ) -> Metrics:
        """A step that is one update. FloatingPointError, which says what to change, where it cannot be applied.

        Args: count: tokens or pairs by which the objective divides. started_s: when the step began, by time.perf_counter."""
        try:
            metrics = self._learner.update(batches, count, proximal_is_current=proximal_is_current)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"step {self.version}: {error}. The update was not applied; the last good version is {self.version}. Lower "
                "trainer.optimizer.learning_rate or trainer.optimizer.max_grad_norm"
            ) from None
        self.version += 1
        num_tokens, seconds = float(layout.lengths.sum()), time.perf_counter() - started_s
        return metrics | {
            "packing_efficiency": (num_tokens, float(np.prod(layout.shape))),
            "tokens_per_second": (num_tokens, seconds),
            "seconds_step": seconds,
            "num_compilations": float(self.num_compilations),
        }
