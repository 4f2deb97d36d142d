"""Losses and divergences of distillation against published numbers and plain computations."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.rl.config import CrossTokenizer, JensenShannon, SampledTokens
from areal_jax.rl.distillation import (
    TeacherTargets,
    TeacherVocabulary,
    common_ends,
    earlier_logprobs,
    generalized_jsd,
    merged_logprobs,
    sampled_distillation_loss,
    sorted_distance,
    span_divergence,
)
from areal_jax.rl.logprobs import token_divergences, top_predictions

compiled_loss = jax.jit(sampled_distillation_loss, static_argnums=0)
THETA = np.array([-1.0, -0.5, -2.0, -1.2], np.float32)
BEHAVE = np.array([-1.3, -0.9, -0.6, -3.2])
TEACHER = np.array([-0.8, -0.7, -1.9, -1.0])
EVERYWHERE = np.ones(4, bool)


def test_sampled_distillation_equals_the_reference_number() -> None:
    # prime-rl's SDFT on these numbers. The third token lost 0.41 of its probability.
    loss, metrics = compiled_loss(SampledTokens(), THETA, TEACHER, BEHAVE, EVERYWHERE)
    assert float(loss) == pytest.approx(-0.360802, abs=1e-6)
    assert float(metrics["distillation_kept_fraction"].total) == 3


def test_sampled_distillation_ascends_towards_the_teacher() -> None:
    # d/d theta of -g exp(theta - behave) with constant g is -g r; of 1e-3 x² it is 2e-3 x.
    gradient = jax.jit(
        jax.grad(lambda logp: compiled_loss(SampledTokens(), logp, TEACHER, BEHAVE, EVERYWHERE)[0])
    )(THETA)
    x = np.asarray(THETA) - BEHAVE
    gain = np.array([0.2, -0.2, 0.0, 0.2]) * np.exp(x)
    np.testing.assert_allclose(gradient, (2e-3 * x - gain) / 4, atol=1e-6)


def test_tokens_that_the_teacher_has_not_read_only_drift() -> None:
    unread = np.where(EVERYWHERE, np.nan, TEACHER)
    config = SampledTokens(drift_coef=0.0)
    loss, _ = compiled_loss(config, THETA, unread, BEHAVE, EVERYWHERE)
    assert float(loss) == 0.0


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 0.092033), (0.5, 0.021901), (1.0, 0.085123)])
def test_jensen_shannon_equals_the_reference_numbers(alpha: float, expected: float) -> None:
    policy, teacher = np.log(np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]], np.float32))
    found = jax.jit(generalized_jsd, static_argnums=2)(policy, teacher, alpha)
    assert float(found) == pytest.approx(expected, abs=1e-6)


def test_jensen_shannon_over_two_tokens_normalizes_both() -> None:
    # [.7, .2] and [.5, .3] as [7/9, 2/9] and [5/8, 3/8].
    targets = TeacherTargets(
        np.array([[[0, 1]]], np.int32),
        np.log(np.array([[[0.5, 0.3]]], np.float32)),
        np.ones((1, 1), np.int32),
        np.ones((1, 1), np.float32),
    )
    how, vocabulary = JensenShannon(num_tokens=2), TeacherVocabulary.from_ids(np.arange(3), 3)
    found = jax.jit(partial(span_divergence, how, vocabulary))(
        np.log(np.array([[[0.7, 0.2, 0.1]]], np.float32)), targets, np.zeros((1, 1), np.float32)
    )
    assert float(found[0, 0]) == pytest.approx(0.014048, abs=1e-6)


def test_sorted_distance_equals_the_reference_number() -> None:
    assert float(
        sorted_distance(jnp.array([0.6, 0.3, 0.1]), jnp.array([0.25, 0.5, 0.25]))
    ) == pytest.approx(0.3, abs=1e-6)
    # The shorter one is padded: |.7 - .5| + |.3 - .3| + .2.
    assert float(
        sorted_distance(jnp.array([0.3, 0.7]), jnp.array([0.2, 0.5, 0.3]))
    ) == pytest.approx(0.4, abs=1e-6)


def test_merge_of_a_span_equals_the_reference_number() -> None:
    logp = np.log(np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]], np.float32))
    sampled = np.array([logp[0, 0], logp[1, 1]])
    merged = merged_logprobs(logp, sampled, np.array([0]), np.array([2]))
    np.testing.assert_allclose(np.exp(merged), [[0.12, 0.3, 0.18]], atol=1e-6)
    remaining = np.array([[2, 1]], np.int32)
    scale = earlier_logprobs(jnp.asarray(sampled[None]), remaining)
    np.testing.assert_allclose(np.exp(scale)[0, 1], 0.6, atol=1e-6)


def test_common_ends_join_tokens_until_both_end() -> None:
    # "ab|c|de" and "a|b|cd|e": both end after ab and after abcde.
    own, other = common_ends(np.array([2, 3, 5]), np.array([1, 2, 4, 5]), 5)
    assert (own.tolist(), other.tolist()) == ([1, 3], [2, 4])


def test_common_ends_keep_the_bytes_of_a_character_together() -> None:
    # "a" and a character of two byte tokens, against the same text in one token each.
    own, other = common_ends(np.array([1, 1, 2]), np.array([1, 2]), 2)
    assert (own.tolist(), other.tolist()) == ([1, 3], [1, 2])
    assert [each.tolist() for each in common_ends(np.array([1, 2]), np.array([1, 2]), 1)] == [
        [1],
        [1],
    ]


def cross_tokenizer_loss(
    log_softmax: np.ndarray, teacher: np.ndarray, own_ids: np.ndarray, alpha: float
) -> float:
    """GOLD's hybrid loss of one place, by its definition, over whole vocabularies."""
    p, q = np.exp(log_softmax.astype(np.float64)), teacher.astype(np.float64)
    matched = own_ids >= 0
    ours = np.zeros(len(p), bool)
    ours[own_ids[matched]] = True
    # Matched tokens that only the policy's shared part has cannot exist: the map is one to one.
    s, t = p[own_ids[matched]], q[matched]
    m = alpha * t + (1 - alpha) * s
    jsd = alpha * np.sum(t * np.log(t / m)) + (1 - alpha) * np.sum(s * np.log(s / m))
    a, b = np.sort(p[~ours])[::-1], np.sort(q[~matched])[::-1]
    n = max(len(a), len(b))
    distance = np.abs(np.pad(a, (0, n - len(a))) - np.pad(b, (0, n - len(b)))).sum()
    weight = matched.mean()
    return weight * jsd + (1 - weight) * distance


def test_cross_tokenizer_divergence_equals_its_definition() -> None:
    rng = np.random.default_rng(0)
    own_ids = np.array([3, -1, 0, -1, 1, -1, -1], np.int32)
    teacher = rng.dirichlet(np.ones(7)).astype(np.float32)
    log_softmax = np.log(rng.dirichlet(np.ones(6)).astype(np.float32))
    order = np.argsort(-teacher)

    def divergence(num: int) -> float:
        targets = TeacherTargets(
            own_ids[order[:num]][None, None],
            np.log(teacher[order[:num]])[None, None],
            np.ones((1, 1), np.int32),
            np.ones((1, 1), np.float32),
        )
        how = CrossTokenizer(num_tokens=num, alpha=0.3)
        vocabulary = TeacherVocabulary.from_ids(own_ids, 6)
        found = jax.jit(partial(span_divergence, how, vocabulary))(
            log_softmax[None, None], targets, np.zeros((1, 1), np.float32)
        )
        return float(found[0, 0])

    expected = cross_tokenizer_loss(log_softmax, teacher, own_ids, alpha=0.3)
    assert divergence(7) == pytest.approx(expected, abs=1e-6)
    # Fewer tokens are nearer and nearer.
    assert abs(divergence(6) - expected) < 2 * teacher.min() + 0.05


@pytest.mark.slow
def test_divergences_do_not_depend_on_chunks() -> None:
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(2, 11, 4)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(4, 9)), jnp.float32)
    segments = jnp.asarray([[1] * 6 + [2] * 5, [1] * 9 + [0] * 2])
    ids, logp = top_predictions(hidden[:, ::-1], head, segments, 9, chunk_tokens=22)
    again, _ = top_predictions(hidden[:, ::-1], head, segments, 9, chunk_tokens=4)
    np.testing.assert_array_equal(ids, again)
    assert (np.asarray(ids)[:, 0] == -1).all() and (np.asarray(ids)[1, 9:] == -1).all()
    targets = TeacherTargets(
        ids, logp, (np.asarray(ids)[..., 0] >= 0).astype(np.int32), np.ones((2, 11), np.float32)
    )

    def total(hidden: jax.Array, chunk_tokens: int) -> jax.Array:
        return token_divergences(
            hidden,
            head,
            targets,
            jnp.zeros((2, 11)),
            lambda *each: span_divergence(
                JensenShannon(num_tokens=9), TeacherVocabulary.from_ids(np.arange(9), 9), *each
            ),
            chunk_tokens=chunk_tokens,
        ).sum()

    whole, gradient = jax.value_and_grad(total)(hidden, 22)
    cut, of_cut = jax.value_and_grad(total)(hidden, 4)
    assert float(whole) == pytest.approx(float(cut), abs=1e-5) and float(whole) > 0.1
    np.testing.assert_allclose(gradient, of_cut, atol=1e-5)
    # Entry t is of hidden[t-1]: the last column predicts nothing.
    assert float(jnp.abs(gradient[:, -1]).sum()) == 0.0
