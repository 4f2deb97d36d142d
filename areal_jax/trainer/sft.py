"""Supervised fine-tuning: the trainer's update with another loss."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from areal_jax.data.packing import TrainingSequence, pack
from areal_jax.data.sft import SupervisedExample
from areal_jax.models.decoder import Params, Policy
from areal_jax.rl.losses import PolicyLoss, sft_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.state import TrainState
from areal_jax.trainer.step import DeviceBatch, Learner, Metrics


class SupervisedTrainer:
    """Maximum likelihood on the train mesh: `step` makes one optimizer update from a batch of examples."""

    def __init__(
        self,
        config: TrainerConfig,
        policy: Policy,
        params: Params,
        mesh: Mesh,
        compute_dtype: DTypeLike,
        *,
        num_updates: int,
        row_tokens: int,
        base: Params | None = None,
    ):
        """As `Trainer`; of `config`, objective, advantages and mini-batches have no meaning here."""
        self.version = 0
        """Updates that the parameters have seen."""

        def objective(logp: Array, _: Array, batch: DeviceBatch, num_tokens: Float[Array, ""]) -> PolicyLoss:
            return sft_loss(logp, batch.loss_mask, num_tokens)

        self._learner = Learner(
            config,
            policy,
            params,
            mesh,
            compute_dtype,
            num_updates,
            objective=objective,
            temperature=1.0,
            row_tokens=row_tokens,
            base=base,
        )

    @property
    def params(self) -> Params:
        """What is trained, on the train mesh. The next step takes their memory: copy what must outlive it."""
        return self._learner.params

    @property
    def state(self) -> TrainState:
        """All that training goes on from; the next step takes its memory."""
        return TrainState(self._learner.params, self._learner.opt_state, np.asarray(self.version, np.int32))

    def restore(self, state: TrainState) -> None:
        """Go on from `state` instead, which may lie on another mesh or on the host."""
        self._learner.restore(state.params, state.opt_state)
        self.version = int(state.version)

    def warm_up(self) -> None:
        """Compile everything that a step runs."""
        self._learner.warm_up(reads_logprobs=False)

    def step(self, examples: Sequence[SupervisedExample]) -> Metrics:
        """One update; its loss is the mean over the examples' loss tokens.

        Raises FloatingPointError where loss or gradient is not finite; the update is then not applied."""
        started = time.perf_counter()
        sequences = [
            TrainingSequence(example.tokens, example.loss_mask, *[np.broadcast_to(np.float32(0), example.tokens.shape)] * 2)
            for example in examples
        ]
        batches, layout = pack(sequences, rows=self._learner.rows, row_tokens=self._learner.row_tokens)
        num_loss_tokens = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        try:
            metrics = self._learner.update(
                [self._learner.put(batch) for batch in batches], num_loss_tokens, proximal_is_current=True
            )
        except FloatingPointError as error:
            raise FloatingPointError(
                f"step {self.version}: {error}. The update was not applied; the last good version is {self.version}. Lower "
                "trainer.optimizer.learning_rate or trainer.optimizer.max_grad_norm"
            ) from None
        self.version += 1
        num_tokens, seconds = float(layout.lengths.sum()), time.perf_counter() - started
        return metrics | {
            "tokens_trained": float(num_loss_tokens),
            "packing_efficiency": (num_tokens, float(np.prod(layout.shape))),
            "tokens_per_second": (num_tokens, seconds),
            "seconds_step": seconds,
            "num_compilations": float(self._learner.num_compilations),
        }
