"""Preference training from pairs of answers, for a policy (DPO, IPO) or a reward model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Bool, Float

from areal_jax.data.packing import TrainingSequence
from areal_jax.data.preferences import PreferencePair
from areal_jax.data.sft import SupervisedExample
from areal_jax.parallel.compilation import Program
from areal_jax.rl.config import Preference
from areal_jax.rl.preference import preference_loss
from areal_jax.rl.token_losses import PolicyLoss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.frozen import FrozenPolicy
from areal_jax.trainer.programs import Objective
from areal_jax.trainer.step import Learner, TrainableModel
from areal_jax.trainer.versions import FromExamples, Packed


class PreferenceTrainer(FromExamples[PreferencePair]):
    """Trains a policy relative to a reference, or a reward model, on the train mesh."""

    def __init__(
        self,
        loss: Preference,
        config: TrainerConfig,
        model: TrainableModel,
        *,
        num_updates: int,
        measures: bool = False,
        reference: FrozenPolicy | None = None,
    ):
        """
        Args:
            loss: The objective of a pair.
            config: As for `SupervisedTrainer`.
            model: A policy, or a reward model with a scalar head for BradleyTerry.
            num_updates: Length of the learning-rate schedule, in updates.
            measures: `measure` will be called, so that `warm_up` compiles it.
            reference: The frozen policy that log-probs are relative to; None for a reward model.
        """

        def pair_loss(
            values: Array, batch: DeviceBatch, num_pairs: Float[Array, ""], _: Array
        ) -> PolicyLoss:
            reference_logp = batch.proximal_logp
            return preference_loss(
                loss,
                values,
                reference_logp,
                batch.loss_mask,
                batch.segment_ids,
                num_pairs=num_pairs,
            )

        super().__init__(
            Learner(config, model, Objective(pair_loss), num_updates), measures=measures
        )
        self._reference = reference

    @property
    def num_compilations(self) -> int:
        return super().num_compilations + (
            self._reference.num_compilations if self._reference else 0
        )

    def list_programs(self) -> list[Program]:
        programs = super().list_programs()
        if self._reference:
            programs.append(("reference logprobs", self._reference.compile))
        return programs

    def pack(self, examples: Sequence[PreferencePair]) -> Packed:
        """Pack pairs, with the reference's log-probs in the column of the proximal policy's."""
        sequences = [
            TrainingSequence(
                side.tokens,
                self._loss_mask(side),
                images=self._learner.read_images((), side.tokens),
            )
            for pair in examples
            for side in (pair.chosen, pair.rejected)
        ]
        packed, layout = self._learner.pack(sequences, num_together=2)
        batches = [self._learner.put(batch) for batch in packed]
        if self._reference is not None:
            reference_logp = self._reference.logprobs(batches)
            batches = [
                batch._replace(proximal_logp=logp)
                for batch, logp in zip(batches, reference_logp, strict=True)
            ]
        return Packed(
            batches,
            layout,
            sum(int(sequence.loss_mask.sum()) for sequence in sequences),
            len(examples),
        )

    def _loss_mask(self, side: SupervisedExample) -> Bool[np.ndarray, "T"]:
        """Return the tokens whose log-probs add up, or the last one, which has the score."""
        if self._reference is None:
            return np.arange(len(side.tokens)) == len(side.tokens) - 1
        return side.loss_mask
