"""The stage of a trainer step in which a teacher reads the samples.

Axes: T tokens of a sample, S tokens that the teacher reads, G spans of text, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32

from areal_jax.data.packing import TrainingSequence, pack
from areal_jax.metrics.meters import Mean
from areal_jax.parallel.sharding import TRAIN_RULES, fetch, put_batch
from areal_jax.records import Sample, Task
from areal_jax.rl.config import SampledTokens, Teacher
from areal_jax.rl.distillation import TeacherTargets, TeacherVocabulary, merged_logprobs
from areal_jax.rl.kl import distilled_advantages
from areal_jax.trainer.forward import ModelInputs
from areal_jax.trainer.frozen import ReadOnlyPolicy
from areal_jax.trainer.objective import num_top_tokens
from areal_jax.trainer.pipeline import MiniBatch, PackedRollouts, Place, StageOutput, TokenValues
from areal_jax.trainer.stages import frozen_logprobs, kl_from_behave
from areal_jax.trainer.step import Learner


class TeacherReading(NamedTuple):
    """What a teacher reads of a sample: a prompt, and the answer, in its own tokens.

    Spans are stretches of the answer that end at a token of both tokenizers, in order.
    """

    tokens: Int32[np.ndarray, "S"]
    own_starts: Int[np.ndarray, "G"]
    """First token of each span in the sample."""
    own_stops: Int[np.ndarray, "G"]
    """Token after each span in the sample."""
    starts: Int[np.ndarray, "G"]
    """First token of each span in `tokens`."""
    stops: Int[np.ndarray, "G"]
    """Token after each span in `tokens`."""


Read: TypeAlias = Callable[[Task, Sample], TeacherReading]


@dataclass(frozen=True, eq=False)
class TeacherInput:
    """How a teacher reads samples.

    Attributes:
        read: What it reads of a sample; None: the sample's own tokens.
        vocabulary: Which of its tokens are tokens of the policy; not read by distillation of
            sampled tokens alone.
    """

    read: Read | None = None
    vocabulary: TeacherVocabulary | None = None


class Prediction(NamedTuple):
    """What a teacher predicts for the spans of one sample that are in the loss."""

    own_starts: Int[np.ndarray, "G"]
    own_stops: Int[np.ndarray, "G"]
    logp: Float[np.ndarray, "G"]
    """Of the whole span."""
    ids: Int[np.ndarray, "G K"]
    top_logp: Float[np.ndarray, "G K"]


Predictions: TypeAlias = Mapping[Place, Prediction]


def distillation(
    packed: PackedRollouts,
    teacher: ReadOnlyPolicy,
    config: Teacher,
    read_as: TeacherInput,
    learner: Learner,
) -> StageOutput:
    """Give advantages or the loss what a teacher predicts for the sampled tokens.

    Args:
        packed: The rollouts.
        teacher: The policy that `config` names.
        config: What becomes of its predictions.
        read_as: How it reads samples.
        learner: The trained policy, whose micro-batches get the columns.
    """
    num_top, batch = num_top_tokens(config), packed.batch
    if num_top:
        found = _predictions(packed, teacher, read_as, num_top)
        targets = [
            _put_targets(packed, mini_batch, found, learner) for mini_batch in packed.mini_batches
        ]
        return StageOutput(
            transform_advantages=partial(_scaled, config.reward_weight),
            columns={"teacher_targets": targets},
            metrics={"teacher_read_fraction": _read_fraction(packed, found)},
        )
    metrics = dict[str, Mean]()
    if read_as.read is None and teacher.forward.row_tokens == learner.row_tokens:
        logp = frozen_logprobs(packed, teacher)
    else:
        found = _predictions(packed, teacher, read_as, num_top)
        logp = _sample_logprobs(packed, found)
        metrics["teacher_read_fraction"] = _read_fraction(packed, found)
    # What the teacher has not read counts as if it agreed.
    known = batch.map_samples(
        lambda sample, found: np.where(np.isnan(found), sample.behave_logp, found), logp
    )
    metrics["kl_teacher"] = kl_from_behave(batch, known)
    if isinstance(config.distillation, SampledTokens):
        columns = [
            mini_batch.put(learner, (logp[i][j][:n] for (i, j), n in _sequences(mini_batch)))
            for mini_batch in packed.mini_batches
        ]
        return StageOutput(
            transform_advantages=partial(_scaled, config.reward_weight),
            columns={"teacher_logp": columns},
            metrics=metrics,
        )

    def distilled(
        sample: Sample, advantages: Float[np.ndarray, "T"], teacher_logp: Float[np.ndarray, "T"]
    ) -> Float[np.ndarray, "T"]:
        return distilled_advantages(
            config, advantages, sample.behave_logp, teacher_logp, sample.loss_mask
        )

    return StageOutput(
        transform_advantages=lambda advantages: batch.map_samples(distilled, advantages, known),
        metrics=metrics,
    )


def _scaled(factor: float, advantages: TokenValues) -> TokenValues:
    return [[each * np.float32(factor) for each in of_group] for of_group in advantages]


def _sequences(mini_batch: MiniBatch) -> Iterator[tuple[Place, int]]:
    return zip(mini_batch.places, mini_batch.layout.lengths.tolist(), strict=True)


def _predictions(
    packed: PackedRollouts, teacher: ReadOnlyPolicy, read_as: TeacherInput, num_top: int
) -> Predictions:
    """Let the teacher read all packed samples; of each, what fits into its rows."""
    forward, groups = teacher.forward, packed.batch.groups
    read = read_as.read or _read_own_tokens
    places = [place for mini_batch in packed.mini_batches for place in mini_batch.places]
    readings = [
        _in_loss(
            read(groups[i].task, groups[i].samples[j]),
            packed.batch.trained[i][j],
            forward.row_tokens,
        )
        for i, j in places
    ]
    if not places:
        return {}
    sequences = [
        TrainingSequence(
            reading.tokens,
            np.zeros(len(reading.tokens), bool),
            num_context=int(reading.starts.min(initial=len(reading.tokens))),
        )
        for reading in readings
    ]
    batches, layout = pack(
        sequences,
        rows=forward.rows,
        row_tokens=forward.row_tokens,
        share_prefixes=forward.shares_prefixes,
    )
    columns = [
        (each.tokens, each.segment_ids, each.positions, None, None, each.visible_until)
        for each in batches
    ]
    on_mesh = [ModelInputs(*each) for each in put_batch(forward.mesh, columns, TRAIN_RULES)]
    if num_top:
        on_host = fetch(teacher.top_predictions(on_mesh, num_top))
    else:
        on_host = [
            (logp, np.zeros((*logp.shape, 0), np.int32), np.zeros((*logp.shape, 0), np.float32))
            for logp in fetch(teacher.logprobs(on_mesh))
        ]
    gathered = (layout.gather(np.stack(column)) for column in zip(*on_host, strict=True))
    by_sequence = zip(places, readings, *gathered, strict=True)
    return {
        place: _prediction(reading, read_as, *predicted)
        for place, reading, *predicted in by_sequence
    }


def _read_own_tokens(task: Task, sample: Sample) -> TeacherReading:
    del task
    stops = np.flatnonzero(sample.loss_mask) + 1
    return TeacherReading(sample.tokens, stops - 1, stops, stops - 1, stops)


def _in_loss(
    reading: TeacherReading, trained: Bool[np.ndarray, "T"], row_tokens: int
) -> TeacherReading:
    """Return the part of a reading that is in the loss and fits into a row."""
    left_out = np.concatenate([[0], np.cumsum(~trained)])
    kept = left_out[reading.own_stops] == left_out[reading.own_starts]
    kept &= reading.stops <= row_tokens
    return TeacherReading(
        reading.tokens[:row_tokens],
        reading.own_starts[kept],
        reading.own_stops[kept],
        reading.starts[kept],
        reading.stops[kept],
    )


def _prediction(
    reading: TeacherReading,
    read_as: TeacherInput,
    logp: Float32[np.ndarray, "S"],
    ids: Int[np.ndarray, "S K"],
    top_logp: Float[np.ndarray, "S K"],
) -> Prediction:
    spans = reading.starts, reading.stops
    ids = ids[reading.stops - 1]
    if read_as.vocabulary is not None:
        ids = read_as.vocabulary.own_ids[ids]
    return Prediction(
        reading.own_starts,
        reading.own_stops,
        merged_logprobs(logp[:, None], logp, *spans)[:, 0],
        ids,
        merged_logprobs(top_logp, logp, *spans),
    )


def _sample_logprobs(packed: PackedRollouts, found: Predictions) -> TokenValues:
    """Return the teacher's log-probs of the samples' tokens; nan where it has read nothing."""
    logp = packed.batch.map_samples(lambda sample: np.full(len(sample.tokens), np.nan, np.float32))
    for (i, j), prediction in found.items():
        logp[i][j][prediction.own_starts] = prediction.logp
    return logp


def _read_fraction(packed: PackedRollouts, found: Predictions) -> Mean:
    """Return the fraction of the loss tokens that the teacher has read."""
    read = sum(int((each.own_stops - each.own_starts).sum()) for each in found.values())
    return Mean(float(read), float(sum(each.num_loss_tokens for each in packed.mini_batches)))


def _put_targets(
    packed: PackedRollouts,
    mini_batch: MiniBatch,
    found: Predictions,
    learner: Learner,
) -> list[TeacherTargets]:
    """Start the transfer of what the teacher predicts for a mini-batch."""
    layout, places = mini_batch.layout, mini_batch.places
    if not places:
        return []
    by_sequence = [
        _targets(found[place], length, weight * packed.batch.trained[place[0]][place[1]].sum())
        for (place, length), weight in zip(
            _sequences(mini_batch), mini_batch.weights.tolist(), strict=True
        )
    ]
    shape = found[places[0]].ids.shape[1:]
    ids, logp, remaining, weights = zip(*by_sequence, strict=True)
    columns = (
        layout.scatter(ids, np.int32, shape=shape, padding=-1),
        layout.scatter(logp, np.float32, shape=shape),
        layout.scatter(remaining, np.int32),
        layout.scatter(weights, np.float32),
    )
    return [
        put_batch(learner.mesh, TeacherTargets(*of_batch), TRAIN_RULES)
        for of_batch in zip(*columns, strict=True)
    ]


def _targets(prediction: Prediction, length: int, weight: float) -> TeacherTargets:
    """Return the targets of one sequence, with `weight` divided among its spans."""
    starts, stops = prediction.own_starts, prediction.own_stops
    num_top = prediction.ids.shape[1]
    targets = TeacherTargets(
        np.full((length, num_top), -1, np.int32),
        np.zeros((length, num_top), np.float32),
        np.zeros(length, np.int32),
        np.zeros(length, np.float32),
    )
    lengths = stops - starts
    ends = np.repeat(stops, lengths)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    tokens = np.repeat(starts, lengths) + np.arange(len(first)) - first
    targets.remaining[tokens] = ends - tokens
    targets.ids[stops - 1], targets.logp[stops - 1] = prediction.ids, prediction.top_logp
    targets.weight[stops - 1] = weight / max(1, len(stops))
    return targets
