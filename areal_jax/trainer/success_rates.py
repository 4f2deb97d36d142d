"""Tracked success rates of prompts, the baseline of SPO (arXiv:2509.13232)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

from areal_jax.data.packing import TrainingSequence
from areal_jax.metrics.meters import Mean
from areal_jax.parallel.sharding import fetch
from areal_jax.records import Group
from areal_jax.rl.config import SPO
from areal_jax.trainer.pipeline import PackedRollouts, StageOutput
from areal_jax.trainer.step import Learner
from areal_jax.trainer.versions import HostState

ARRAYS = {"tokens": np.int32, "loss_mask": np.bool_, "logp": np.float32}


class Answer(NamedTuple):
    """The last answer to a prompt, and its log-probs when it was sampled."""

    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    logp: Float32[np.ndarray, "T"]


@dataclass(frozen=True, eq=False)
class SuccessRate:
    """Discounted successes and failures of one prompt."""

    successes: float
    failures: float
    last: Answer | None = None

    @property
    def mean(self) -> float:
        """Estimate of the mean reward."""
        return self.successes / (self.successes + self.failures)

    def updated(self, decay: float, rewards: Sequence[float], last: Answer) -> SuccessRate:
        """Return the rate after more samples: the past counts `decay` of what it did."""
        total = sum(rewards)
        return SuccessRate(
            decay * self.successes + total, decay * self.failures + len(rewards) - total, last
        )


def decay_of(config: SPO, change: float) -> float:
    """Return the weight of the past: 2^(-change / half_change), bounded.

    Args:
        config: Settings.
        change: Mean absolute change of the log-probs of a prompt's last answer, in nats.
    """
    return float(np.clip(2.0 ** (-change / config.half_change), config.decay_min, config.decay_max))


@dataclass(eq=False)
class SuccessRates:
    """Success rates by task, which a trainer updates after each step. Not thread-safe."""

    config: SPO
    by_task: dict[str, SuccessRate] = field(default_factory=dict)

    def rate(self, task_id: str) -> SuccessRate:
        """Return the rate of a task; of a new one, the prior."""
        prior = SuccessRate(self.config.prior_successes, self.config.prior_failures)
        return self.by_task.get(task_id, prior)

    def stage(self, packed: PackedRollouts, learner: Learner) -> StageOutput:
        """Give the estimator of advantages the tracked success rate of every group."""
        rates = [self.rate(group.task.id).mean for group in packed.batch.groups]
        decays = self.decays(packed.batch.groups, learner)
        return StageOutput(
            baselines=rates,
            metrics={
                "success_rate_baseline": Mean(sum(rates), float(len(rates))),
                "success_rate_decay": Mean(sum(decays.values()), float(len(decays))),
            },
            on_trained=lambda: self._update(packed.batch.groups, decays),
        )

    def decays(self, groups: Sequence[Group], learner: Learner) -> dict[str, float]:
        """Return the weight of each task's past, given the current parameters of the learner."""
        tasks = {group.task.id: group.task for group in groups}
        seen = {task_id: last for task_id in tasks if (last := self.rate(task_id).last) is not None}
        changes = dict.fromkeys(tasks, 0.0)
        if seen:
            micro_batches, layout = learner.pack(
                [
                    TrainingSequence(
                        last.tokens,
                        last.loss_mask,
                        last.logp,
                        images=learner.read_images(tasks[task_id].images, last.tokens),
                        num_context=int(last.loss_mask.argmax()),
                    )
                    for task_id, last in seen.items()
                ]
            )
            columns = [learner.logprobs(learner.put(each)) for each in micro_batches]
            gathered = layout.gather(np.stack(fetch(columns)))
            for (task_id, last), logp in zip(seen.items(), gathered, strict=True):
                changes[task_id] = float(
                    np.abs(logp - last.logp)[last.loss_mask].mean(dtype=np.float64)
                )
        return {task_id: decay_of(self.config, change) for task_id, change in changes.items()}

    def _update(self, groups: Sequence[Group], decays: Mapping[str, float]) -> None:
        for group in groups:
            sample = next((each for each in group.samples if each.loss_mask.any()), None)
            if sample is None:
                continue
            end = len(sample.tokens) - int(sample.loss_mask[::-1].argmax())
            columns = sample.tokens, sample.loss_mask, sample.behave_logp
            self.by_task[group.task.id] = self.rate(group.task.id).updated(
                decays[group.task.id],
                [each.reward for each in group.samples],
                Answer(*(column[:end] for column in columns)),
            )

    def state(self) -> HostState:
        """Return what a checkpoint holds."""
        lasts = [each.last for each in self.by_task.values() if each.last is not None]
        facts = {task_id: [each.successes, each.failures] for task_id, each in self.by_task.items()}
        arrays: dict[str, np.ndarray] = {
            "length": np.array([len(last.tokens) for last in lasts], np.int64)
        }
        for name, dtype in ARRAYS.items():
            columns = [getattr(last, name) for last in lasts]
            arrays[name] = np.concatenate([np.empty(0, dtype), *columns])
        return HostState(facts, arrays)

    def restore(self, state: HostState) -> None:
        """Resume from `state`."""
        facts, arrays = state
        if not facts:
            return
        ends = np.cumsum(arrays["length"])[:-1]
        columns = [np.split(arrays[name], ends) for name in ARRAYS]
        self.by_task = {
            task_id: SuccessRate(successes, failures, Answer(*answer))
            for (task_id, (successes, failures)), *answer in zip(
                facts.items(), *columns, strict=True
            )
        }
