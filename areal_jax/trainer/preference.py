"""Preference training: the trainer's update from pairs of answers, for a policy (DPO, IPO) or a
reward model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from areal_jax.data.packing import TrainingSequence, pack
from areal_jax.data.preferences import PreferencePair
from areal_jax.data.sft import SupervisedExample
from areal_jax.models.decoder import Params, Policy
from areal_jax.rl.config import Preference
from areal_jax.rl.losses import PolicyLoss
from areal_jax.rl.preference import preference_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch, FrozenPolicy
from areal_jax.trainer.step import Learner
from areal_jax.trainer.versions import FromExamples, Packed


class PreferenceTrainer(FromExamples[PreferencePair]):
    """Learning from pairs on the train mesh: of a policy, by comparison with one that stays as it
    is, or of a reward model."""

    def __init__(
        self,
        loss: Preference,
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
        reference: FrozenPolicy | None = None,
    ):
        """As `SupervisedTrainer`.

        Args:
            policy: with a scalar head for BradleyTerry.
            reference: what it is compared with; None for a reward model alone."""

        def objective(
            values: Array, batch: DeviceBatch, num_pairs: Float[Array, ""], _: Array
        ) -> PolicyLoss:
            of_reference = batch.proximal_logp
            return preference_loss(
                loss, values, of_reference, batch.loss_mask, batch.segment_ids, num_pairs=num_pairs
            )

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
        self._reference = reference

    @property
    def num_compilations(self) -> int:
        return super().num_compilations + (
            self._reference.num_compilations if self._reference else 0
        )

    def warm_up(self) -> None:
        super().warm_up()
        if self._reference:
            self._reference.warm_up()

    def pack(self, examples: Sequence[PreferencePair]) -> Packed:
        """With the reference's log-probabilities in the place of the proximal policy's."""
        sequences = [
            TrainingSequence(side.tokens, self._read(side))
            for pair in examples
            for side in (pair.chosen, pair.rejected)
        ]
        packed, layout = pack(
            sequences, rows=self._learner.rows, row_tokens=self._learner.row_tokens, num_together=2
        )
        batches = [self._learner.put(batch) for batch in packed]
        if self._reference is not None:
            of_reference = self._reference.logprobs(batches)
            batches = [
                batch._replace(proximal_logp=logp)
                for batch, logp in zip(batches, of_reference, strict=True)
            ]
        return Packed(
            batches,
            layout,
            sum(int(sequence.loss_mask.sum()) for sequence in sequences),
            len(examples),
        )

    def _read(self, side: SupervisedExample) -> Bool[np.ndarray, "T"]:
        """The tokens whose log-probabilities add up, or the last one, at which the score of the
        whole stands."""
        if self._reference is None:
            return np.arange(len(side.tokens)) == len(side.tokens) - 1
        return side.loss_mask
