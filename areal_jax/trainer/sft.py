"""Supervised fine-tuning: the trainer's update with another loss."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from areal_jax.data.packing import TrainingSequence, pack
from areal_jax.data.sft import SupervisedExample
from areal_jax.models.decoder import Params, Policy
from areal_jax.rl.losses import PolicyLoss, sft_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.step import Learner
from areal_jax.trainer.versions import FromExamples, Packed


class SupervisedTrainer(FromExamples[SupervisedExample]):
    """Maximum likelihood on the train mesh: the exponential of a mean loss is the perplexity,
    exp(-1/N sum_t logp_t)."""

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

        def objective(
            logp: Array, batch: DeviceBatch, num_tokens: Float[Array, ""], _: Array
        ) -> PolicyLoss:
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

    def pack(self, examples: Sequence[SupervisedExample]) -> Packed:
        sequences = [TrainingSequence(example.tokens, example.loss_mask) for example in examples]
        batches, layout = pack(
            sequences, rows=self._learner.rows, row_tokens=self._learner.row_tokens
        )
        num_loss_tokens = sum(int(example.loss_mask.sum()) for example in examples)
        return Packed(
            [self._learner.put(batch) for batch in batches],
            layout,
            num_loss_tokens,
            num_loss_tokens,
        )
