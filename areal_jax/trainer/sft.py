"""Supervised fine-tuning: the trainer's update with another loss."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from areal_jax.data.packing import TrainingSequence
from areal_jax.data.sft import SupervisedExample
from areal_jax.rl.token_losses import PolicyLoss, sft_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.programs import Objective
from areal_jax.trainer.step import Learner, TrainableModel
from areal_jax.trainer.versions import FromExamples, Packed


class SupervisedTrainer(FromExamples[SupervisedExample]):
    """Maximum likelihood on the train mesh.

    The exponential of a mean loss is the perplexity, exp(-1/N sum_t logp_t).
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: TrainableModel,
        *,
        num_updates: int,
        measures: bool = False,
    ):
        """
        Args:
            config: Optimizer and micro-batches. Objective, advantages and mini-batches are ignored.
            model: Policy and initial parameters.
            num_updates: Length of the learning-rate schedule, in updates.
            measures: `measure` will be called, so that `warm_up` compiles it.
        """

        def loss(
            logp: Array, batch: DeviceBatch, num_tokens: Float[Array, ""], _: Array
        ) -> PolicyLoss:
            return sft_loss(logp, batch.loss_mask, num_tokens)

        super().__init__(Learner(config, model, Objective(loss), num_updates), measures=measures)

    def pack(self, examples: Sequence[SupervisedExample]) -> Packed:
        sequences = [
            TrainingSequence(
                example.tokens,
                example.loss_mask,
                images=self._learner.read_images(example.images, example.tokens),
            )
            for example in examples
        ]
        batches, layout = self._learner.pack(sequences)
        num_loss_tokens = sum(int(example.loss_mask.sum()) for example in examples)
        return Packed(
            [self._learner.put(batch) for batch in batches],
            layout,
            num_loss_tokens,
            num_loss_tokens,
        )
