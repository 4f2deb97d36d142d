"""Laws of the pipeline that a trainer step is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import (
    POLICY,
    ROW_TOKENS,
    batch,
    critic_params,
    make_trainer,
    params,
    train_mesh,
)

from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.records import Sample
from areal_jax.rl.config import GAE, KLInReward, Reference, Teacher
from areal_jax.trainer.batch_metrics import describe_batch
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.frozen import FrozenPolicy
from areal_jax.trainer.pipeline import (
    PackedRollouts,
    SampleLimits,
    StageOutput,
    estimate_advantages,
    pack_rollouts,
    select_tokens,
)
from areal_jax.trainer.ppo import Trainer

CONFIG = TrainerConfig(
    advantages=GAE(gamma=0.9, lam=0.8, normalize=False),
    reference=Reference(kl=KLInReward(coefficient=0.5)),
    teacher=Teacher(path="", weight=0.1),
    num_mini_batches=2,
    rows_per_micro_batch=4,
    remat="none",
)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """With all stages that read a model of their own."""
    mesh = train_mesh()
    placed = shardings(mesh, POLICY.axes(), POLICY.abstract(), TRAIN_RULES)

    def frozen(seed: int) -> FrozenPolicy:
        forward = Forward(CONFIG, POLICY, mesh, jnp.float32, temperature=1.0, row_tokens=ROW_TOKENS)
        return FrozenPolicy(forward, jax.device_put(params(seed), placed))

    return make_trainer(
        CONFIG, mesh, critic=critic_params(), reference=frozen(5), teacher=frozen(6)
    )


def pack(trainer: Trainer, version: int = 0) -> PackedRollouts:
    chosen = select_tokens(batch(num_groups=5), version, trainer.limits)
    return pack_rollouts(chosen, trainer.config, trainer.limits, trainer._learner)


@pytest.mark.slow
def test_stages_may_run_in_any_order(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    first, stages = jax.device_get(trainer.state), trainer._stages
    result = trainer.step(batch())
    once = jax.device_get(trainer.state)

    def reverse() -> Iterator[Any]:
        return reversed(list(stages()))

    trainer.restore(first)
    monkeypatch.setattr(trainer, "_stages", reverse)
    again = trainer.step(batch())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), once)
    jax.tree.map(np.testing.assert_array_equal, again.advantages, result.advantages)
    assert [phase for phase, _ in stages()] == ["frozen", "frozen", "values", "proximal"]
    trainer.restore(first)


def test_a_stage_leaves_the_packed_rollouts_unchanged(trainer: Trainer) -> None:
    packed = pack(trainer)
    before = jax.device_get([each.micro_batches for each in packed.mini_batches])
    for _, stage in trainer._stages():
        stage(packed)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get([each.micro_batches for each in packed.mini_batches]),
        before,
    )


def test_token_rewards_of_stages_add_up() -> None:
    limits, config = SampleLimits(max_staleness=None, max_new_tokens=20), TrainerConfig()
    chosen = select_tokens(batch(), 0, limits)

    def paying(amount: float) -> StageOutput:
        def rewards(sample: Sample) -> np.ndarray:
            return np.where(sample.loss_mask, amount, 0.0)

        return StageOutput(token_rewards=chosen.map_samples(rewards))

    estimate = partial(estimate_advantages, chosen, config, limits)
    plain, both = estimate([]).advantages, estimate([paying(0.25), paying(0.5)]).advantages
    for group, values_G, more_G in zip(chosen.groups, plain, both, strict=True):
        for sample, values, more in zip(group.samples, values_G, more_G, strict=True):
            # The reward to go: 0.75 for every sampled token from this one on.
            to_go = 0.75 * np.cumsum(sample.loss_mask[::-1])[::-1]
            np.testing.assert_allclose(more, values + to_go, rtol=1e-5)


def test_staleness_counts_steps_of_the_policy_only() -> None:
    # The critic learns alone in 3 steps: versions 0 to 3 are one policy.
    limits = SampleLimits(max_staleness=2, max_new_tokens=20, num_frozen_steps=3)
    versions = np.arange(6, dtype=np.int32)
    assert limits.staleness(2, versions[:3]).tolist() == [0, 0, 0]
    assert limits.staleness(5, versions).tolist() == [2, 2, 2, 2, 1, 0]
    groups = batch(version=0)
    for version, is_trained in ((3, True), (5, True), (6, False)):
        chosen = select_tokens(groups, version, limits)
        assert all(mask.any() == is_trained for masks in chosen.trained for mask in masks)
        described = describe_batch(chosen, chosen.map_samples(lambda s: s.behave_logp), limits)
        assert described["staleness_max"] == (version - 3 if is_trained else 0)


def test_mini_batches_share_groups_evenly_and_skip_stale_samples(trainer: Trainer) -> None:
    packed = pack(trainer)
    places = [place for each in packed.mini_batches for place in each.places]
    assert sorted(places) == [(i, j) for i in range(5) for j in range(3)]
    assert sorted(len({i for i, _ in each.places}) for each in packed.mini_batches) == [2, 3]
    # Version 3 is one more than max_staleness=2 allows for tokens of version 0.
    stale = pack(trainer, version=3)
    assert [each.num_loss_tokens for each in stale.mini_batches] == [0, 0]
    assert all(not each.micro_batches for each in stale.mini_batches)


def test_a_contributed_value_reaches_the_estimator(trainer: Trainer) -> None:
    groups = [replace(each, samples=each.samples[:1]) for each in batch(num_groups=2)]
    chosen = select_tokens(groups, 0, trainer.limits)
    packed = pack_rollouts(chosen, trainer.config, trainer.limits, trainer._learner)
    contributions = [stage(packed) for _, stage in trainer._stages()]
    estimate = estimate_advantages(chosen, trainer.config, trainer.limits, contributions)
    (values,) = [each.values for each in contributions if each.values is not None]
    for i, (trajectory,) in enumerate(estimate.trajectories):
        following = values.by_place[i, 0]
        assert trajectory.values is not None
        np.testing.assert_array_equal(trajectory.values[1:], following[:-1])
