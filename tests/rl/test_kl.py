"""KL to a reference and to a teacher: identities, hand-computed numbers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.rl.config import Estimator, KLInLoss, KLInReward, Teacher
from areal_jax.rl.kl import distilled_advantages, kl_estimate, kl_loss, kl_penalty

ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")

# A policy over five tokens, and another.
LOGITS, OTHER = (
    np.array([0.3, -1.0, 0.8, 0.0, -0.4], np.float32),
    np.array([-0.5, 0.2, 0.1, 0.9, -1.2], np.float32),
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))


def exact_kl(p_logits: jax.Array | np.ndarray, q_logits: jax.Array | np.ndarray) -> jax.Array:
    """Exact KL of two categorical policies from their logits."""
    p, q = jax.nn.log_softmax(jnp.asarray(p_logits)), jax.nn.log_softmax(jnp.asarray(q_logits))
    return jnp.sum(jnp.exp(p) * (p - q))


def test_kl_estimators_equal_hand_computed_numbers() -> None:
    # x = ln 2: ln 2; (ln 2)² / 2 = .240227; 1/2 - 1 + ln 2 = .193147. x = -1: -1; 1/2; e - 2 =
    # .718282.
    x = np.array([np.log(2.0), -1.0, 0.0])
    expected = {
        "k1": [0.693147, -1.0, 0.0],
        "k2": [0.240227, 0.5, 0.0],
        "k3": [0.193147, 0.718282, 0.0],
    }
    for estimator in ESTIMATORS:
        for values in (x, jnp.asarray(x)):
            found = kl_estimate(estimator, values)
            assert type(found) is type(values)
            np.testing.assert_allclose(found, expected[estimator], atol=1e-6)


def test_k1_and_k3_are_unbiased_and_k2_and_k3_are_never_negative() -> None:
    log_p, log_q = log_softmax(LOGITS), log_softmax(OTHER)
    for estimator in ESTIMATORS:
        values = np.asarray(kl_estimate(estimator, log_p - log_q))
        mean = np.exp(log_p) @ values
        if estimator != "k2":
            assert mean == pytest.approx(float(exact_kl(LOGITS, OTHER)), abs=1e-6)
        if estimator != "k1":
            assert (values >= 0).all() and (values > 0).any()
    # k2 is off by the third power of how far they are apart: half the distance, an eighth of the
    # error or less.
    near, nearer = (
        float(np.exp(log_p) @ (log_p - to) ** 2 / 2 - exact_kl(LOGITS, to))
        for to in (log_softmax(LOGITS + scale * OTHER) for scale in (0.2, 0.1))
    )
    assert abs(nearer) < abs(near) / 6


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k2", lambda logits: exact_kl(logits, OTHER)),
        ("k3", lambda logits: exact_kl(OTHER, logits)),
    ],
)
def test_k2_gradient_is_reverse_kl_and_k3_gradient_is_forward_kl(
    estimator: Literal["k2", "k3"], expected: Callable[[jax.Array], jax.Array]
) -> None:
    # The expectation over every token, each sampled with its probability by a policy that the
    # gradient does not see.
    chance, reference = np.exp(log_softmax(LOGITS)), jnp.asarray(log_softmax(OTHER))

    def mean(logits: jax.Array) -> jax.Array:
        log_ratio = jax.nn.log_softmax(logits) - reference
        return jnp.sum(chance * jnp.asarray(kl_estimate(estimator, log_ratio)))

    np.testing.assert_allclose(
        jax.grad(mean)(jnp.asarray(LOGITS)), jax.grad(expected)(jnp.asarray(LOGITS)), atol=1e-6
    )


def test_k1_gradient_is_zero_in_expectation() -> None:
    chance = np.exp(log_softmax(LOGITS))
    gradient = jax.grad(
        lambda logits: jnp.sum(chance * (jax.nn.log_softmax(logits) - log_softmax(OTHER)))
    )(jnp.asarray(LOGITS))
    np.testing.assert_allclose(gradient, np.zeros(5), atol=1e-7)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.slow
def test_kl_loss_equals_float64_and_finite_differences(
    estimator: Literal["k2", "k3"], is_weighted: bool
) -> None:
    rng = np.random.default_rng(0)
    config = KLInLoss(coefficient=0.3, estimator=estimator)
    logp, reference = rng.normal(-2.0, 1.0, (1000, 7)), rng.normal(-2.0, 1.0, (1000, 7))
    mask = rng.random((1000, 7)) < 0.6
    weights = rng.uniform(0.5, 2.0, (1000, 7)) if is_weighted else None

    def plain(logp: np.ndarray) -> float:
        x = logp - reference
        k = x**2 / 2 if estimator == "k2" else np.exp(-x) - 1 + x
        return float((0.3 * k * mask * (1.0 if weights is None else weights)).sum() / mask.sum())

    # What is not trained on may be anything.
    corrupted = np.where(mask, logp, np.nan).astype(np.float32)
    arguments = (
        np.where(mask, reference, np.inf).astype(np.float32),
        mask,
        None if weights is None else weights.astype(np.float32),
    )
    found, gradient = jax.value_and_grad(lambda logp: kl_loss(config, logp, *arguments).loss)(
        corrupted
    )
    assert float(found) == pytest.approx(plain(logp), rel=1e-6)
    assert not np.asarray(gradient)[~mask].any()
    for place in zip(*np.nonzero(mask), strict=True):
        if place[0] >= 5:
            break
        step = np.zeros_like(logp)
        step[place] = 1e-6
        slope = (plain(logp + step) - plain(logp - step)) / 2e-6
        assert np.asarray(gradient)[place] == pytest.approx(slope, rel=1e-3, abs=1e-9)
    metrics = kl_loss(config, corrupted, *arguments).metrics
    x = (logp - reference)[mask]
    assert float(metrics["kl_reference"][0] / metrics["kl_reference"][1]) == pytest.approx(
        (np.exp(-x) - 1 + x).mean(), rel=1e-5
    )


def test_kl_loss_is_independent_of_micro_batching() -> None:
    rng = np.random.default_rng(1)
    logp, reference = rng.normal(-2.0, 1.0, (2, 8, 7)).astype(np.float32)
    mask = rng.random((8, 7)) < 0.6
    whole = kl_loss(KLInLoss(), logp, reference, mask)
    parts = [
        kl_loss(
            KLInLoss(),
            logp[i : i + 2],
            reference[i : i + 2],
            mask[i : i + 2],
            num_tokens=float(mask.sum()),
        )
        for i in range(0, 8, 2)
    ]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), rel=1e-6)


def test_kl_penalty_applies_to_sampled_tokens_only() -> None:
    behave, reference = (
        np.log(np.array([0.5, 0.5, 0.25], np.float32)),
        np.log(np.array([0.1, 0.25, 0.5], np.float32)),
    )
    action_mask = np.array([False, True, True])
    # log ratios ln 2 and -ln 2: k1 ±.693147; k3 .193147 and 2 - 1 - .693147 = .306853.
    penalty = kl_penalty(
        KLInReward(coefficient=0.1, estimator="k1"), behave, reference, action_mask
    )
    np.testing.assert_allclose(penalty, [0.0, -0.0693147, 0.0693147], atol=1e-7)
    penalty = kl_penalty(
        KLInReward(coefficient=0.1, estimator="k3"), behave, reference, action_mask
    )
    np.testing.assert_allclose(penalty, [0.0, -0.0193147, -0.0306853], atol=1e-7)
    assert not kl_penalty(KLInReward(), behave, behave, action_mask).any()


def test_distillation_gradient_descends_the_reverse_kl() -> None:
    # For every token that could be sampled: its chance times its advantage times the gradient of
    # its log-probability.
    log_p, log_q = log_softmax(LOGITS), log_softmax(OTHER)
    nothing, everywhere = np.zeros(5, np.float32), np.ones(5, bool)
    advantages = distilled_advantages(
        Teacher(path="", weight=1.0, reward_weight=0.0), nothing, log_p, log_q, everywhere
    )
    scores = jax.jacobian(jax.nn.log_softmax)(jnp.asarray(LOGITS))
    expected_gradient = (np.exp(log_p) * advantages) @ np.asarray(scores)
    np.testing.assert_allclose(
        expected_gradient,
        -np.asarray(jax.grad(lambda logits: exact_kl(logits, OTHER))(jnp.asarray(LOGITS))),
        atol=1e-6,
    )


def test_equal_teacher_adds_nothing_and_reward_weight_scales_advantages() -> None:
    behave, advantages = log_softmax(LOGITS), np.array([1.0, -1.0, 2.0, 0.0, 3.0], np.float32)
    action_mask = np.array([False, True, True, True, True])
    agreeing = distilled_advantages(
        Teacher(path="", reward_weight=0.0), advantages, behave, behave, action_mask
    )
    assert not agreeing.any()
    # Twice ln(1/2) plus half of the reward advantage; the prompt gets nothing from the teacher.
    both = distilled_advantages(
        Teacher(path="", weight=2.0, reward_weight=0.5),
        advantages,
        behave,
        behave + np.log(0.5, dtype=np.float32),
        action_mask,
    )
    np.testing.assert_allclose(
        both, advantages / 2 + np.where(action_mask, 2 * np.log(0.5), 0.0), atol=1e-6
    )


def test_kl_reference_gets_no_gradient() -> None:
    logp, reference = jnp.array([-1.0, -0.5]), jnp.array([-0.7, -2.0])
    for config in (
        KLInLoss(coefficient=1.0, estimator="k2"),
        KLInLoss(coefficient=1.0, estimator="k3"),
    ):
        slopes = jax.grad(
            lambda a, b, c=config: kl_loss(c, a, b, np.ones(2, bool)).loss, argnums=(0, 1)
        )(logp, reference)
        assert slopes[0].all() and not slopes[1].any()
