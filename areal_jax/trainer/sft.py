"""Supervised fine-tuning: the trainer's update with another loss."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from areal_jax.data.packing import Layout, TrainingSequence, pack
from areal_jax.data.sft import SupervisedExample
from areal_jax.models.decoder import Params, Policy
from areal_jax.records import PackedBatch
from areal_jax.rl.losses import PolicyLoss, sft_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.step import Learner, Metrics
from areal_jax.trainer.versions import Versions


class SupervisedTrainer(Versions):
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
        measures_loss: bool = False,
        base: Params | None = None,
    ):
        """As `Trainer`; of `config`, objective, advantages and mini-batches have no meaning here.

        Args: measures_loss: `loss` will be asked for, so that `warm_up` compiles it."""

        def objective(logp: Array, _: Array, batch: DeviceBatch, num_tokens: Float[Array, ""]) -> PolicyLoss:
            return sft_loss(logp, batch.loss_mask, num_tokens)

        learner = Learner(
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
        super().__init__(learner, reads_logprobs=measures_loss)

    def step(self, examples: Sequence[SupervisedExample]) -> Metrics:
        """One update; its loss is the mean over the examples' loss tokens.

        Raises FloatingPointError where loss or gradient is not finite; the update is then not applied."""
        started = time.perf_counter()
        batches, layout = self._pack(examples)
        num_loss_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
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
            "num_compilations": float(self.num_compilations),
        }

    def loss(self, examples: Sequence[SupervisedExample]) -> tuple[float, float]:
        """Negative log-likelihood of all the examples' loss tokens together, and how many they are; nothing is learnt.

        The exponential of the quotient is the perplexity: exp(-1/N sum_t logp_t)."""
        batches, _ = self._pack(examples)
        # All are under way before the first is waited for.
        logps = [self._learner.logprobs(self._learner.put(batch)) for batch in batches]
        total = sum(
            float(np.sum(np.asarray(logp)[batch.loss_mask], dtype=np.float64))
            for logp, batch in zip(logps, batches, strict=True)
        )
        return -total, float(sum(batch.loss_mask.sum() for batch in batches))

    def _pack(self, examples: Sequence[SupervisedExample]) -> tuple[list[PackedBatch], Layout]:
        sequences = [TrainingSequence(example.tokens, example.loss_mask) for example in examples]
        return pack(sequences, rows=self._learner.rows, row_tokens=self._learner.row_tokens)
