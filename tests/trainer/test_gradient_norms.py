"""Norms of the gradients of single samples, and the step that reads them (VCPO)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import POLICY, ROW_TOKENS, batch, mean, params, train_mesh

from areal_jax.models.attention import packed_attention
from areal_jax.records import NO_VERSION, Group, Sample
from areal_jax.rl.config import VCPO, OffPolicyReinforce, Truncated
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.step import TrainableModel

CONFIG = TrainerConfig(
    loss=OffPolicyReinforce(importance_weighting=Truncated(cap=8.0, level="sequence")),
    advantages=VCPO(divide_by="nothing"),
    loss_mean="sequences",
    # Its column is in the batches of the update, and not in those that the norms are read of.
    positive_nll_coef=0.1,
    optimizer=OptimizerConfig(learning_rate=1e-2, ess_exponent=0.5),
    num_mini_batches=2,
    remat="none",
)


def make_trainer(devices: int = 1, *, shares_prefixes: bool = False) -> Trainer:
    model = TrainableModel(
        policy=POLICY,
        params=params(),
        mesh=train_mesh(devices),
        compute_dtype=np.float32,
        row_tokens=2 * ROW_TOKENS,
        shares_prefixes=shares_prefixes,
    )
    return Trainer(
        config=CONFIG,
        limits=SampleLimits(max_staleness=2, max_new_tokens=ROW_TOKENS),
        policy=policy_learner(CONFIG, model, 100),
    )


@jax.jit
@jax.value_and_grad
def logprob(given: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the log-prob of a sample by itself, padded behind, from its logits."""
    attend = packed_attention(jnp.ones((1, ROW_TOKENS), jnp.int32))
    positions = jnp.arange(ROW_TOKENS)[None]
    hidden, *_ = POLICY.hidden(given, tokens[None], positions, attend, compute_dtype=jnp.float32)
    logp = jax.nn.log_softmax(hidden[0, :-1] @ POLICY.head(given))
    return jnp.sum(jnp.take_along_axis(logp, tokens[1:, None], axis=-1)[:, 0] * mask[1:])


def alone(sample: Sample) -> tuple[float, float]:
    """Return log(theta/behave) of a sample, and the gradient norm of its log-prob."""
    pad = (0, ROW_TOKENS - len(sample.tokens))
    logp, gradient = logprob(params(), np.pad(sample.tokens, pad), np.pad(sample.loss_mask, pad))
    behave_logp = sample.behave_logp[sample.loss_mask].sum(dtype=np.float64)
    squares = [np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(gradient)]
    return float(logp) - float(behave_logp), float(np.sqrt(np.sum(squares)))


def above_baseline(samples: tuple[Sample, ...]) -> list[float]:
    log_weight, norm = np.array([alone(sample) for sample in samples]).T
    scores = np.exp(2.0 * log_weight) * norm**2
    rewards = np.array([sample.reward for sample in samples])
    return (rewards - (scores * rewards).sum() / scores.sum()).tolist()


def mixed_groups(seed: int) -> list[Group]:
    """Groups with one prompt each, and with right and wrong answers."""

    def of_group(group: Group) -> Group:
        prompt = group.samples[0].tokens[:4]
        samples = [
            replace(each, tokens=np.concatenate([prompt, each.tokens[4:]]), reward=float(i == 0))
            for i, each in enumerate(group.samples)
        ]
        return replace(group, samples=tuple(samples))

    return [of_group(group) for group in batch(seed)]


@pytest.mark.parametrize(
    ("devices", "shares_prefixes"),
    [
        (1, True),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
def test_advantages_equal_those_of_samples_by_themselves(
    devices: int, shares_prefixes: bool
) -> None:
    trainer, groups = make_trainer(devices, shares_prefixes=shares_prefixes), mixed_groups(3)
    trainer.warm_up()
    num_compilations = trainer.num_compilations
    result = trainer.step(groups)
    assert trainer.num_compilations == num_compilations
    norms = [alone(sample)[1] for group in groups for sample in group.samples]
    assert mean(result, "sample_gradient_norm") == pytest.approx(np.mean(norms), rel=1e-4)
    for group, found in zip(groups, result.advantages, strict=True):
        expected = above_baseline(group.samples)
        assert [float(each[-1]) for each in found] == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
def test_a_stale_sample_does_not_move_the_baseline() -> None:
    trainer = make_trainer(shares_prefixes=True)
    trainer.version = 9

    def with_version(sample: Sample, version: int) -> Sample:
        return replace(
            sample, versions=np.where(sample.loss_mask, version, NO_VERSION).astype(np.int32)
        )

    groups = [
        replace(
            group,
            samples=tuple(
                with_version(each, 0 if i == 1 else 9) for i, each in enumerate(group.samples)
            ),
        )
        for group in mixed_groups(4)
    ]
    result = trainer.step(groups)
    for group, found in zip(groups, result.advantages, strict=True):
        first, _, last = group.samples
        expected = above_baseline((first, last))
        assert [float(found[i][-1]) for i in (0, 2)] == pytest.approx(expected, abs=2e-4)
