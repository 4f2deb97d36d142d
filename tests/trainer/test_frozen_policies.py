"""Laws of what is asked beside training: a reference not to stray from, a teacher to learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_training import (
    POLICY,
    PROMPT_TOKENS,
    ROW_TOKENS,
    batch,
    group,
    make_trainer,
    mean,
    params,
    sample,
    train_mesh,
)

from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.records import Group
from areal_jax.rl.config import (
    BatchNormalized,
    KLInLoss,
    KLInReward,
    Reference,
    Teacher,
)
from areal_jax.rl.kl import kl_estimate
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.forward import DeviceBatch, Forward
from areal_jax.trainer.frozen import FrozenPolicy
from areal_jax.trainer.ppo import Trainer

CONFIG = TrainerConfig(
    optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
    num_mini_batches=1,
    rows_per_micro_batch=4,
    remat="none",
)


def frozen(
    config: TrainerConfig, mesh: Mesh, given: Params, row_tokens: int, *, offload: bool = False
) -> FrozenPolicy:
    forward = Forward(config, POLICY, mesh, jnp.float32, temperature=1.0, row_tokens=row_tokens)
    placed = shardings(mesh, POLICY.axes(), POLICY.abstract(), TRAIN_RULES)
    return FrozenPolicy(forward, jax.device_put(given, placed), offload=offload)


def make(
    *,
    other: Params | None = None,
    offload: bool = False,
    mesh: dict[str, int] | None = None,
    row_tokens: int = ROW_TOKENS,
    **changes: Any,
) -> Trainer:
    """A trainer beside whom the frozen policies that its settings name all have the parameters
    `other`; None: its own first."""
    config, on = chz.replace(CONFIG, **changes), train_mesh(**mesh or {})
    given = params() if other is None else other
    beside: dict[str, Any] = {
        name: frozen(config, on, given, row_tokens, offload=offload)
        for name in ("reference", "teacher")
        if getattr(config, name) is not None
    }
    return make_trainer(config, on, row_tokens=row_tokens, max_new_tokens=ROW_TOKENS, **beside)


PLACED = shardings(train_mesh(), POLICY.axes(), POLICY.abstract(), TRAIN_RULES)


@cache
def plain_forward() -> Forward:
    return Forward(
        CONFIG, POLICY, train_mesh(), jnp.float32, temperature=1.0, row_tokens=ROW_TOKENS
    )


def said_by(given: Params, groups: list[Group]) -> list[list[np.ndarray]]:
    """By group and sample, log-probabilities under these parameters; each sample alone in its
    row."""
    forward, read = plain_forward(), []
    for sampled in (sampled for each in groups for sampled in each.samples):
        length, places = len(sampled.tokens), np.arange(ROW_TOKENS, dtype=np.int32)
        read.append(
            (
                np.pad(sampled.tokens, (0, ROW_TOKENS - length)),
                np.where(places < length, 1, 0),
                places,
            )
        )
    read += [read[-1]] * (-len(read) % forward.rows)
    rows = []
    for i in range(0, len(read), forward.rows):
        columns = [
            np.stack(column).astype(np.int32)
            for column in zip(*read[i : i + forward.rows], strict=True)
        ]
        on = [jax.device_put(column, forward.placed) for column in columns]
        nothing: Any = [jnp.zeros(columns[0].shape)] * 5
        rows += list(
            np.asarray(
                forward.logprobs(jax.device_put(given, PLACED), {}, DeviceBatch(*on, *nothing))
            )
        )
    found = iter(rows)
    return [[next(found)[: len(sampled.tokens)] for sampled in each.samples] for each in groups]


def sampled_by(given: Params, groups: list[Group]) -> list[Group]:
    """The groups as if the policy of these parameters had sampled them."""
    return [
        replace(
            each,
            samples=tuple(
                replace(
                    sample, behave_logp=np.where(sample.loss_mask, logp, 0.0).astype(np.float32)
                )
                for sample, logp in zip(each.samples, logps, strict=True)
            ),
        )
        for each, logps in zip(groups, said_by(given, groups), strict=True)
    ]


OTHER = params(seed=5)
CHANGES: dict[str, dict[str, Any]] = {
    "loss": {"reference": Reference(kl=KLInLoss(coefficient=0.5)), "loss_mean": "sequences"},
    "reward": {
        "reference": Reference(kl=KLInReward(coefficient=0.5)),
        "advantages": BatchNormalized(),
    },
    "teacher": {"teacher": Teacher(path="", reward_weight=0.0)},
}


@pytest.fixture(scope="module")
def shared() -> Callable[[str], Trainer]:
    """Trainers beside `OTHER`, by what they ask it for. Each is made once, and brought back to its
    first state."""
    made: dict[str, tuple[Trainer, Any]] = {}

    def get(name: str) -> Trainer:
        if name not in made:
            trainer = make(other=OTHER, **CHANGES[name])
            made[name] = trainer, jax.device_get(trainer.state)
        trainer, first = made[name]
        trainer.restore(first)
        return trainer

    return get


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.slow
def test_micro_batches_packing_shards_and_the_host_s_memory_change_nothing(
    name: str, shared: Callable[[str], Trainer]
) -> None:
    groups, whole = batch(seed=1), shared(name)
    expected = whole.step(groups)
    cut = make(
        other=OTHER,
        offload=True,
        rows_per_micro_batch=1,
        row_tokens=2 * ROW_TOKENS,
        mesh={"devices": 2, "fsdp": 2},
        **CHANGES[name],
    )
    result = cut.step(groups)
    for metric in (
        "loss",
        "grad_norm",
        "advantage",
        "kl_teacher" if name == "teacher" else "kl_reference",
    ):
        assert mean(result, metric) == pytest.approx(mean(expected, metric), abs=2e-5), metric
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), cut.params, whole.params)


def test_kl_in_the_loss_equals_the_plain_computation(shared: Callable[[str], Trainer]) -> None:
    # Everything on policy: the loss of a token is minus its advantage, whose mean by samples is 0.
    # What is left is GRPO's mean of the KL: of all samples, each the mean of its tokens.
    groups = sampled_by(params(), batch(seed=2))
    loss = mean(shared("loss").step(groups), "loss")
    of_samples = [
        np.asarray(kl_estimate("k3", (ours - theirs)[sampled.loss_mask])).mean()
        for each, ours_G, theirs_G in zip(
            groups, said_by(params(), groups), said_by(OTHER, groups), strict=True
        )
        for sampled, ours, theirs in zip(each.samples, ours_G, theirs_G, strict=True)
    ]
    assert loss == pytest.approx(0.5 * np.mean(of_samples), rel=1e-4)


@pytest.mark.slow
def test_kl_in_the_reward_equals_the_plain_computation(shared: Callable[[str], Trainer]) -> None:
    groups = batch(seed=3)
    result = shared("reward").step(groups)
    returns = []
    for each, theirs_G in zip(groups, said_by(OTHER, groups), strict=True):
        for sampled, theirs in zip(each.samples, theirs_G, strict=True):
            strayed = sampled.behave_logp - theirs
            returns += [
                sampled.reward - 0.5 * sum(strayed[t:]) for t in np.flatnonzero(sampled.loss_mask)
            ]
    expected = (np.array(returns) - np.mean(returns)) / (np.std(returns, ddof=1) + 1e-5)
    masks = [sampled.loss_mask for each in groups for sampled in each.samples]
    found = [of[mask] for of, mask in zip(chain(*result.advantages), masks, strict=True)]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


@pytest.mark.slow
def test_kl_starts_at_zero_and_nothing_compiles_after_warm_up() -> None:
    trainer = make(reference=Reference(), teacher=Teacher(path="", weight=0.1))
    trainer.warm_up()
    compiled = trainer.num_compilations
    path = [
        mean(
            trainer.step(sampled_by(jax.device_get(trainer.params), batch(seed=4, version=step))),
            "kl_reference",
        )
        for step in range(3)
    ]
    assert path[0] == pytest.approx(0.0, abs=1e-9) and min(path[1:]) > 1e-5
    assert trainer.num_compilations == compiled


PROMPTS = (
    np.random.default_rng(8)
    .integers(0, POLICY.config.vocab_size, (4, PROMPT_TOKENS))
    .astype(np.int32)
)


@jax.jit
def next_token_logp(given: Params) -> jax.Array:
    """[prompt, token]: what comes after each of the prompts."""
    ones = jnp.ones(PROMPTS.shape, jnp.int32)
    places = jnp.broadcast_to(jnp.arange(PROMPT_TOKENS), PROMPTS.shape)
    hidden, _, _ = POLICY.hidden(
        given, jnp.asarray(PROMPTS), places, packed_attention(ones), compute_dtype=jnp.float32
    )
    return jax.nn.log_softmax(hidden[:, -1] @ POLICY.head(given))


def answered(
    rng: np.random.Generator, given: Params, version: int, samples_per_group: int
) -> list[Group]:
    """Each prompt with answers of one token, as the policy of these parameters draws them."""
    groups = []
    for i, (prompt, logp) in enumerate(
        zip(PROMPTS, np.asarray(next_token_logp(given)), strict=True)
    ):
        sampled = rng.choice(len(logp), size=samples_per_group, p=np.exp(logp) / np.exp(logp).sum())
        samples = [
            replace(
                sample(rng, PROMPT_TOKENS + 1, version),
                tokens=np.append(prompt, np.int32(token)),
                behave_logp=np.append(np.zeros(PROMPT_TOKENS, np.float32), logp[token]),
            )
            for token in sampled
        ]
        groups.append(group(i, *samples))
    return groups


@pytest.mark.slow
def test_learning_from_a_teacher_alone_brings_the_student_nearer_to_it(
    shared: Callable[[str], Trainer],
) -> None:
    trainer = shared("teacher")
    rng, of_teacher = np.random.default_rng(7), np.asarray(next_token_logp(OTHER))

    def divergence() -> float:
        """KL(student || teacher), exact."""
        logp = np.asarray(next_token_logp(trainer.params))
        return float((np.exp(logp) * (logp - of_teacher)).sum(-1).mean())

    before, misses = divergence(), []
    for version in range(10):
        exact = divergence()
        result = trainer.step(answered(rng, trainer.params, version, samples_per_group=24))
        misses.append(mean(result, "kl_teacher") - exact)
    assert divergence() < 0.7 * before
    # What the step reports estimates that.
    assert abs(np.mean(misses)) < 0.25 * before


def test_frozen_policies_must_match_their_settings() -> None:
    config, mesh = chz.replace(CONFIG, reference=Reference()), train_mesh()
    with pytest.raises(
        ValueError, match=r"trainer\.reference: there is the setting and not a policy"
    ):
        make_trainer(config, mesh)
    given = frozen(CONFIG, mesh, params(), ROW_TOKENS)
    with pytest.raises(
        ValueError, match=r"trainer\.teacher: there is a policy and not the setting"
    ):
        make_trainer(CONFIG, mesh, teacher=given)


def test_frozen_parameters_are_not_copied() -> None:
    given = jax.device_put(params(), PLACED)
    assert FrozenPolicy(plain_forward(), given)._params["embed"] is given["embed"]
