"""What all trainers are, whatever they learn from: a learner whose parameters have a version."""

from __future__ import annotations

import numpy as np

from areal_jax.models.decoder import Params
from areal_jax.trainer.state import CriticState, TrainState
from areal_jax.trainer.step import Learner


class Versions:
    """Parameters that go from one version to the next. Call it from one thread at a time."""

    def __init__(self, learner: Learner, *, reads_logprobs: bool = False, critic: Learner | None = None):
        """
        Args:
            reads_logprobs: a step also asks for log-probabilities without updating.
            critic: trains beside the learner.
        """
        self._learner, self._reads_logprobs, self._critic = learner, reads_logprobs, critic
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
        self._learner.warm_up(reads_logprobs=self._reads_logprobs)
        if self._critic is not None:
            self._critic.warm_up(reads_logprobs=True)
