"""Supervised fine-tuning: the trainer's update with another loss."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from areal_jax.data.packing import Layout, TrainingSequence, pack
from areal_jax.data.sft import SupervisedExample
from areal_jax.models.decoder import Params, Policy
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
        measures: bool = False,
        base: Params | None = None,
    ):
        """As `Trainer`; of `config`, objective, advantages and mini-batches have no meaning here.

        Args: measures: `measure` will be called, so that `warm_up` compiles it."""

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
        super().__init__(learner, measures=measures)

    def step(self, examples: Sequence[SupervisedExample]) -> Metrics:
        """One update; its loss is the mean over the examples' loss tokens.

        Raises FloatingPointError where loss or gradient is not finite; the update is then not applied."""
        started_s = time.perf_counter()
        batches, layout = self._pack(examples)
        num_loss_tokens = sum(int(example.loss_mask.sum()) for example in examples)
        metrics = self._one_update(batches, num_loss_tokens, layout, started_s, proximal_is_current=True)
        return metrics | {"tokens_trained": float(num_loss_tokens)}

    def measure(self, examples: Sequence[SupervisedExample]) -> dict[str, tuple[float, float]]:
        """The negative log-likelihood `loss` of all the examples' loss tokens together, with how many they are, and their
        entropy; nothing is learnt. The exponential of the mean loss is the perplexity: exp(-1/N sum_t logp_t)."""
        return self._learner.measure(self._pack(examples)[0])

    def _pack(self, examples: Sequence[SupervisedExample]) -> tuple[list[DeviceBatch], Layout]:
        sequences = [TrainingSequence(example.tokens, example.loss_mask) for example in examples]
        batches, layout = pack(sequences, rows=self._learner.rows, row_tokens=self._learner.row_tokens)
        return [self._learner.put(batch) for batch in batches], layout
