"""Laws of a teacher that reads samples in its own way: hints, other tokens, whole distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import POLICY, PROMPT_TOKENS, ROW_TOKENS, batch, make_trainer, mean, params
from tiny_training import train_mesh as mesh_of

from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.records import Group, Sample, Task
from areal_jax.rl.config import (
    CrossTokenizer,
    Distillation,
    JensenShannon,
    SampledTokens,
    Teacher,
    TeacherAdvantage,
)
from areal_jax.rl.distillation import TeacherVocabulary
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.distillation import TeacherInput, TeacherReading
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.frozen import FrozenPolicy
from areal_jax.trainer.ppo import Trainer

VOCAB = POLICY.config.vocab_size
CONFIG = TrainerConfig(
    optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
    num_mini_batches=1,
    rows_per_micro_batch=4,
    remat="none",
)
OTHER = params(seed=5)
HINT = np.array([7, 3, 9], np.int32)
SAME = TeacherVocabulary.from_ids(np.arange(VOCAB), VOCAB)
PERMUTED = np.random.default_rng(11).permutation(VOCAB).astype(np.int32)
"""The policy's id of each token of a teacher whose tokens are in another order."""


def hinted(task: Task, sample: Sample) -> TeacherReading:
    """The hint, without the prompt, before the sampled tokens."""
    del task
    stops = np.flatnonzero(sample.loss_mask) + 1
    its = stops - PROMPT_TOKENS + len(HINT)
    tokens = np.concatenate([HINT, sample.tokens[PROMPT_TOKENS:]])
    return TeacherReading(tokens, stops - 1, stops, its - 1, its)


def permuted(task: Task, sample: Sample) -> TeacherReading:
    del task
    stops = np.flatnonzero(sample.loss_mask) + 1
    tokens = np.argsort(PERMUTED)[sample.tokens].astype(np.int32)
    return TeacherReading(tokens, stops - 1, stops, stops - 1, stops)


def permuted_params() -> Params:
    return OTHER | {"embed": OTHER["embed"][PERMUTED], "head": OTHER["head"][:, PERMUTED]}


def make(
    teacher: Teacher,
    read_as: TeacherInput,
    *,
    given: Params = OTHER,
    row_tokens: int = ROW_TOKENS,
    mesh: dict[str, int] | None = None,
    **changes: Any,
) -> Trainer:
    config, on = chz.replace(CONFIG, teacher=teacher, **changes), mesh_of(**mesh or {})
    placed = shardings(on, POLICY.axes(), POLICY.abstract(), TRAIN_RULES)
    forward = Forward(config, POLICY, on, jnp.float32, temperature=1.0, row_tokens=row_tokens)
    return make_trainer(
        config,
        on,
        row_tokens=row_tokens,
        max_new_tokens=ROW_TOKENS,
        teacher=FrozenPolicy(forward, jax.device_put(given, placed)),
        teacher_input=read_as,
    )


@cache
def log_softmax_of() -> Callable[[Params, np.ndarray], np.ndarray]:
    """Of one sequence: [token, vocabulary], from the tokens before it."""

    @jax.jit
    def predict(given: Params, tokens: jax.Array) -> jax.Array:
        places = jnp.arange(ROW_TOKENS)[None]
        hidden, _, _ = POLICY.hidden(
            given,
            tokens[None],
            places,
            packed_attention(jnp.ones((1, ROW_TOKENS), int)),
            compute_dtype=jnp.float32,
        )
        return jnp.roll(jax.nn.log_softmax(hidden @ POLICY.head(given))[0], 1, axis=0)

    def of(given: Params, tokens: np.ndarray) -> np.ndarray:
        padded = np.pad(tokens, (0, ROW_TOKENS - len(tokens)))
        return np.asarray(predict(given, padded))[: len(tokens)]

    return of


def on_policy(groups: list[Group]) -> list[Group]:
    """The groups as if the policy before its first update had sampled them."""

    def resampled(sample: Sample) -> Sample:
        logp = log_softmax_of()(params(), sample.tokens)
        chosen = np.take_along_axis(logp, sample.tokens[:, None], axis=1)[:, 0]
        behave = np.where(sample.loss_mask, chosen, 0.0).astype(np.float32)
        return replace(sample, behave_logp=behave)

    return [replace(each, samples=tuple(map(resampled, each.samples))) for each in groups]


def places(groups: list[Group]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of every sampled token: log-probs of all tokens by the policy, and by the hinted teacher."""
    found = []
    for each in groups:
        for sample in each.samples:
            ours = log_softmax_of()(params(), sample.tokens)[PROMPT_TOKENS:]
            read = hinted(each.task, sample).tokens
            theirs = log_softmax_of()(OTHER, read)[len(HINT) :]
            found.append((ours, theirs))
    return found


def test_divergence_from_a_hinted_teacher_equals_the_plain_computation() -> None:
    groups = on_policy(batch(seed=1))
    whole = JensenShannon(alpha=1.0, num_tokens=VOCAB)
    trainer = make(
        Teacher(path="", distillation=whole, reward_weight=0.0, weight=0.5),
        TeacherInput(hinted, SAME),
    )
    result = trainer.step(groups)
    expected = np.concatenate(
        [np.sum(np.exp(p) * (p - q), axis=-1) for p, q in places(groups)]
    ).mean()
    assert mean(result, "teacher_divergence") == pytest.approx(expected, rel=1e-4)
    # Advantages are 0, so that the loss is the divergence alone.
    assert mean(result, "loss") == pytest.approx(0.5 * expected, rel=1e-4)
    assert mean(result, "teacher_read_fraction") == 1.0


@pytest.mark.slow
def test_sampled_distillation_with_a_hint_equals_the_plain_computation() -> None:
    groups = on_policy(batch(seed=1))
    trainer = make(
        Teacher(path="", distillation=SampledTokens(), reward_weight=0.0),
        TeacherInput(hinted),
    )
    result = trainer.step(groups)
    samples = [sample for each in groups for sample in each.samples]
    gains = [
        (q - p)[np.arange(len(p)), sample.tokens[PROMPT_TOKENS:]]
        for sample, (p, q) in zip(samples, places(groups), strict=True)
    ]
    assert mean(result, "loss") == pytest.approx(-np.concatenate(gains).mean(), rel=1e-3)
    assert mean(result, "kl_teacher") > 0


@pytest.mark.slow
def test_other_token_ids_change_nothing() -> None:
    # The same teacher with its tokens in another order, compared as text: nothing differs.
    groups = on_policy(batch(seed=2))
    results = []
    for read_as, given in (
        (TeacherInput(vocabulary=SAME), OTHER),
        (
            TeacherInput(permuted, TeacherVocabulary.from_ids(PERMUTED, VOCAB)),
            permuted_params(),
        ),
    ):
        how = CrossTokenizer(num_tokens=VOCAB)
        trainer = make(Teacher(path="", distillation=how, reward_weight=0.0), read_as, given=given)
        results.append((trainer.step(groups), jax.device_get(trainer.params)))
    (plain, first), (other, second) = results
    assert mean(plain, "teacher_divergence") > 0.01
    assert mean(other, "teacher_divergence") == pytest.approx(
        mean(plain, "teacher_divergence"), rel=1e-5
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), first, second)


@pytest.mark.slow
def test_micro_batches_packing_and_shards_do_not_change_distillation() -> None:
    groups, how = batch(seed=3), CrossTokenizer(num_tokens=20, shared_weight=0.5)
    half = np.where(np.arange(VOCAB) % 2, np.arange(VOCAB), -1)
    read_as = TeacherInput(hinted, TeacherVocabulary.from_ids(half, VOCAB))
    teacher = Teacher(path="", distillation=how)
    whole = make(teacher, read_as)
    cut = make(
        teacher,
        read_as,
        rows_per_micro_batch=1,
        logp_chunk_tokens=8,
        row_tokens=2 * ROW_TOKENS,
        mesh={"devices": 4, "fsdp": 2},
    )
    expected, result = whole.step(groups), cut.step(groups)
    for name in ("loss", "teacher_divergence", "grad_norm"):
        assert mean(result, name) == pytest.approx(mean(expected, name), rel=1e-4), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), cut.params, whole.params)


@pytest.mark.slow
def test_steps_reduce_the_divergence_and_compile_nothing_after_warm_up() -> None:
    how = JensenShannon(alpha=0.0, num_tokens=8)
    teacher = Teacher(path="", distillation=how, reward_weight=0.0)
    trainer = make(teacher, TeacherInput(hinted, SAME))
    trainer.warm_up()
    compiled = trainer.num_compilations
    batches = (on_policy(batch(seed=4, version=step)) for step in range(8))
    path = [mean(trainer.step(groups), "teacher_divergence") for groups in batches]
    old = trainer.step(batch(seed=4))
    assert old.metrics["tokens_trained"] == 0
    assert path[-1] < 0.8 * path[0]
    assert trainer.num_compilations == compiled


@pytest.mark.slow
@pytest.mark.parametrize("how", [SampledTokens(drift_coef=0.0), TeacherAdvantage()])
def test_what_does_not_fit_into_the_teacher_s_rows_is_not_distilled(how: Distillation) -> None:
    groups = on_policy(batch(seed=5))
    config = Teacher(path="", distillation=how, reward_weight=0.0)
    on = mesh_of()
    placed = shardings(on, POLICY.axes(), POLICY.abstract(), TRAIN_RULES)
    forward = Forward(CONFIG, POLICY, on, jnp.float32, temperature=1.0, row_tokens=8)
    trainer = make_trainer(
        chz.replace(CONFIG, teacher=config),
        on,
        teacher=FrozenPolicy(forward, jax.device_put(OTHER, placed)),
        teacher_input=TeacherInput(hinted),
    )
    result = trainer.step(groups)
    lengths = [len(sample.tokens) - PROMPT_TOKENS for each in groups for sample in each.samples]
    # Of 8 tokens the hint takes 3.
    expected = sum(min(length, 8 - len(HINT)) for length in lengths) / sum(lengths)
    assert mean(result, "teacher_read_fraction") == pytest.approx(expected)
    assert np.isfinite([mean(result, name) for name in ("loss", "kl_teacher", "advantage")]).all()
    if isinstance(how, SampledTokens):
        assert mean(result, "distillation_kept_fraction") == pytest.approx(expected)
    else:
        moved = sum(int(np.count_nonzero(each)) for group in result.advantages for each in group)
        assert moved == round(expected * sum(lengths))
