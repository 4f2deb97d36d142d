"""Metrics of a batch of rollouts and its advantages. numpy only."""

from __future__ import annotations

from itertools import chain

import numpy as np

from areal_jax.metrics.meters import Mean
from areal_jax.records import Sample
from areal_jax.trainer.pipeline import RolloutBatch, SampleLimits, TokenValues


def describe_batch(
    batch: RolloutBatch, advantages: TokenValues, limits: SampleLimits
) -> dict[str, float | Mean]:
    """Return metrics of rewards, advantages, answers and staleness."""
    samples = [sample for group in batch.groups for sample in group.samples]
    masks = list(chain(*batch.trained))
    num_trained = np.array([mask.sum() for mask in masks])
    num_sampled = np.array([sample.loss_mask.sum() for sample in samples])
    ages = limits.staleness(
        batch.version,
        np.concatenate(
            [sample.versions[mask] for sample, mask in zip(samples, masks, strict=True)]
        ),
    )
    per_token = np.concatenate(
        [values[mask] for values, mask in zip(chain(*advantages), masks, strict=True)],
        dtype=np.float64,
    )
    tokens, count = float(num_trained.sum()), float(len(samples))
    without_signal = sum(not any(values.any() for values in of_group) for of_group in advantages)
    rewards = np.array([sample.reward for sample in samples])
    by_component = dict[str, list[float]]()
    for sample in samples:
        for name, value in sample.components.items():
            by_component.setdefault(name, []).append(value)
    components = {
        f"reward/{name}": Mean(sum(values), float(len(values)))
        for name, values in by_component.items()
    }
    return {
        **components,
        "reward": Mean(float(rewards.sum()), count),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "reward_std": float(rewards.std()),
        "advantage": Mean(float(per_token.sum()), tokens),
        "advantage_squared": Mean(float((per_token**2).sum()), tokens),
        "groups_without_signal": Mean(float(without_signal), float(len(batch.groups))),
        "correct_fraction": Mean(
            float(sum(sample.grade == "correct" for sample in samples)), count
        ),
        "no_answer_fraction": Mean(
            float(sum(sample.grade == "no_answer" for sample in samples)), count
        ),
        "turns": Mean(float(sum(_num_turns(sample) for sample in samples)), count),
        "truncated_fraction": Mean(
            float(sum(sample.stop_reason == "length" for sample in samples)), count
        ),
        "answer_tokens": Mean(float(num_sampled.sum()), count),
        "staleness": Mean(float(ages.sum()), tokens),
        "staleness_max": float(ages.max(initial=0)),
        "tokens_stale": float((num_sampled - num_trained).sum()),
        "tokens_trained": tokens,
    }


def _num_turns(sample: Sample) -> int:
    """Count the turns of a conversation: stretches of sampled tokens between others."""
    return int(np.count_nonzero(np.diff(sample.loss_mask, prepend=False) & sample.loss_mask))
