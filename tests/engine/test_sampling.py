"""Draws: one uniform number, inverse cumulative sum, the log-prob of what was really sampled
from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.engine import sampling

jitted_sample = jax.jit(sampling.sample_tokens)
keep_most_likely = jax.jit(sampling.keep_most_likely)
uniforms = jax.jit(sampling.uniforms)
NONE = np.zeros(1, np.float32)


def log(*probabilities: float) -> np.ndarray:
    return np.log(np.array([probabilities], np.float32))


def sample_tokens(
    logits: jax.typing.ArrayLike, uniform: float | np.ndarray, temperature: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Draws with every one of the uniform numbers from the same logits."""
    uniform = np.atleast_1d(np.asarray(uniform, np.float32))
    repeated = np.broadcast_to(np.asarray(logits), (len(uniform), np.shape(logits)[1]))
    token, logp = jitted_sample(repeated, uniform, np.full(len(uniform), temperature, np.float32))
    return np.asarray(token), np.asarray(logp)


def numbers(count: int, seed: int = 0) -> np.ndarray:
    """The uniform numbers of one request's positions."""
    return np.asarray(
        uniforms(
            np.array([[0, seed]], np.uint32),
            np.array([0], np.int32),
            np.arange(count, dtype=np.int32)[None],
        )
    )[0]


def test_sampling_inverts_the_cumulative_distribution():
    # Cumulative: 0.1, 0.3, 0.6, 1.0.
    token, logp = sample_tokens(
        log(0.1, 0.2, 0.3, 0.4), np.array([0.0, 0.05, 0.15, 0.29, 0.31, 0.59, 0.61, 0.9999999])
    )
    assert token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_allclose(logp, np.log([0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4]), rtol=1e-5)


def test_temperature_changes_the_distribution_and_its_logp():
    # Temperature 1/2 squares: 0.01, 0.04, 0.09, 0.16 of 0.30; cumulative 0.033, 0.167, 0.467, 1.
    token, logp = sample_tokens(
        log(0.1, 0.2, 0.3, 0.4), np.array([0.03, 0.16, 0.17, 0.47]), temperature=0.5
    )
    assert token.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(logp, np.log(np.array([0.01, 0.04, 0.09, 0.16]) / 0.3), rtol=1e-5)


def test_temperature_zero_is_argmax_with_logp_at_temperature_one():
    token, logp = sample_tokens(log(0.2, 0.3, 0.2, 0.3), np.array([0.0, 0.9]), temperature=0.0)
    assert token.tolist() == [1, 1]
    np.testing.assert_allclose(logp, np.log([0.3, 0.3]), rtol=1e-5)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = np.full((1, 100), -np.inf, np.float32)
    logits[0, [40, 90]] = 0
    token, logp = sample_tokens(logits, np.array([0.0, 0.49, 0.51, 1 - 2**-24]))
    assert token.tolist() == [40, 40, 90, 90]
    np.testing.assert_allclose(logp, np.log(0.5), rtol=1e-6)


def test_a_vocabulary_of_150k_is_drawn_from_exactly():
    size = 151_936
    logits = np.random.default_rng(0).normal(scale=3, size=(1, size)).astype(np.float32)
    uniform = numbers(64)
    token, logp = sample_tokens(logits, uniform)
    probabilities = np.exp(logits[0].astype(np.float64))
    probabilities /= probabilities.sum()
    ends = probabilities.cumsum()
    # Within 2e-7, two roundings of float32, of the stretch that belongs to the token.
    assert (ends[token] > uniform - 2e-7).all()
    assert (ends[token] - probabilities[token] < uniform + 2e-7).all()
    np.testing.assert_allclose(logp, np.log(probabilities[token]), atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, 0, 1.0, [0, 1, 2, 3]),
        (1.0, 2, 1.0, [1, 2]),
        # Most likely first: 0.4, then 0.7 crosses 0.5.
        (1.0, 0, 0.5, [1, 2]),
        (1.0, 0, 0.4, [1]),
        # Of the three that top-k leaves, 0.4 / 0.9 = 0.44 and 0.7 / 0.9 = 0.78: 0.75 is crossed by
        # the second.
        (1.0, 3, 0.75, [1, 2]),
        # Without top-k 0.75 is crossed by the third, at 0.9.
        (1.0, 0, 0.75, [1, 2, 3]),
        # Temperature 1/2: 0.01, 0.16, 0.09, 0.04 of 0.30; 0.16 / 0.3 = 0.53 alone crosses 0.5.
        (0.5, 0, 0.5, [1]),
        # The most likely token needs no filter.
        (0.0, 1, 0.1, [0, 1, 2, 3]),
    ],
)
def test_top_k_then_top_p_keep(temperature: float, top_k: int, top_p: float, kept: list[int]):
    filtered = keep_most_likely(
        log(0.1, 0.4, 0.3, 0.2),
        *(
            np.array([value])
            for value in (np.float32(temperature), np.int32(top_k), np.float32(top_p))
        ),
        NONE,
    )
    assert np.flatnonzero(np.isfinite(filtered[0])).tolist() == kept


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "kept"),
    [
        # A share of 0.4, the most likely: 0.3 / 0.4 = 0.75, 0.2 / 0.4 = 0.5, 0.1 / 0.4 = 0.25.
        (1.0, 0, 1.0, 0.26, [1, 2, 3]),
        (1.0, 0, 1.0, 0.6, [1, 2]),
        (1.0, 0, 1.0, 1.0, [1]),
        # Temperature 1/2 squares the shares: 0.56, 0.25, 0.06.
        (0.5, 0, 1.0, 0.5, [1, 2]),
        # Of 0.4 and 0.3, which min-p leaves, the first holds 0.57.
        (1.0, 0, 0.55, 0.6, [1]),
        (1.0, 3, 1.0, 0.26, [1, 2, 3]),
        (0.0, 0, 1.0, 0.6, [0, 1, 2, 3]),
    ],
)
def test_min_p_keeps_what_has_a_share_of_the_most_likely(
    temperature: float, top_k: int, top_p: float, min_p: float, kept: list[int]
):
    filtered = keep_most_likely(
        log(0.1, 0.4, 0.3, 0.2),
        *(
            np.array([value])
            for value in (
                np.float32(temperature),
                np.int32(top_k),
                np.float32(top_p),
                np.float32(min_p),
            )
        ),
    )
    assert np.flatnonzero(np.isfinite(filtered[0])).tolist() == kept


def test_tokens_are_counted_in_each_sequence():
    counts = jax.jit(sampling.count_tokens, static_argnums=1)(
        np.array([[2, 0, 2, -1], [-1, -1, -1, 3]], np.int32), 4
    )
    assert counts.tolist() == [[1, 0, 2, 0], [0, 0, 0, 1]]


def test_penalties_match_their_formulas():
    # Tokens 1 and 2 were sampled once and three times, token 3 is in the prompt alone.
    logits = np.array([[2.0, 2.0, -1.0, 4.0, -3.0]], np.float32)
    in_prompt, sampled = (
        np.array([[False, False, False, True, False]]),
        np.array([[0, 1, 3, 0, 0]], np.int32),
    )
    presence, frequency, repetition = (np.array([x], np.float32) for x in (0.5, 0.25, 2.0))
    found = jax.jit(sampling.penalize)(logits, in_prompt, sampled, presence, frequency, repetition)
    # 2/2 - 0.5 - 0.25 = 0.25; -1*2 - 0.5 - 0.75 = -3.25; 4/2 = 2.
    np.testing.assert_allclose(found, [[2.0, 0.25, -3.25, 2.0, -3.0]])
    assert (
        np.asarray(jax.jit(sampling.penalize)(logits, in_prompt, sampled, NONE, NONE, NONE + 1))
        == logits
    ).all()


def test_forbidden_tokens_are_not_sampled():
    found = jax.jit(sampling.forbid)(
        np.zeros((2, 4), np.float32), np.array([[1, -1], [1, 3]], np.int32), np.array([True, False])
    )
    assert found.tolist() == [[0, -np.inf, 0, 0], [0, 0, 0, 0]]


def test_the_most_likely_tokens_come_with_their_logp():
    most_likely = jax.jit(sampling.most_likely, static_argnums=2)
    tokens, logp = most_likely(log(0.1, 0.4, 0.3, 0.2), np.array([0.5], np.float32), 2)
    assert tokens.tolist() == [[1, 2]]
    # Temperature 1/2 squares: 0.16 and 0.09 of 0.30.
    np.testing.assert_allclose(logp, np.log([[0.16 / 0.3, 0.09 / 0.3]]), rtol=1e-5)
    greedy = most_likely(log(0.1, 0.4, 0.3, 0.2), NONE, 1)[1]
    np.testing.assert_allclose(greedy, np.log([[0.4]]), rtol=1e-5)


def test_equal_logits_keep_the_lower_token_ids():
    filtered = keep_most_likely(
        np.zeros((1, 6), np.float32),
        np.ones(1, np.float32),
        np.array([2], np.int32),
        np.ones(1, np.float32),
        NONE,
    )
    assert np.flatnonzero(np.isfinite(filtered[0])).tolist() == [0, 1]


def test_filters_of_one_request_leave_logits_of_others_unchanged():
    logits = np.random.default_rng(1).normal(size=(2, 300)).astype(np.float32)
    ones = np.ones(2, np.float32)
    filtered = np.asarray(
        keep_most_likely(logits, ones, np.array([0, 5], np.int32), ones, np.zeros(2, np.float32))
    )
    assert (filtered[0] == logits[0]).all()
    assert int(np.isfinite(filtered[1]).sum()) == 5


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.3, 0, 0.8)]
)
def test_frequencies_follow_the_probabilities(temperature: float, top_k: int, top_p: float):
    count = 20_000
    logits = np.random.default_rng(2).normal(size=(1, 12)).astype(np.float32)
    filtered = keep_most_likely(
        logits,
        np.array([temperature], np.float32),
        np.array([top_k], np.int32),
        np.array([top_p], np.float32),
        NONE,
    )
    token, logp = sample_tokens(filtered, numbers(count), temperature)
    expected = np.exp(np.asarray(filtered[0], np.float64) / temperature)
    expected *= count / expected.sum()
    observed = np.bincount(token, minlength=12)
    kept = expected > 0
    assert (observed[~kept] == 0).all()
    # 31.3: chi-square of 11 degrees of freedom is above it once in a thousand; fewer degrees stay
    # further below.
    assert ((observed - expected)[kept] ** 2 / expected[kept]).sum() < 31.3
    np.testing.assert_allclose(np.exp(logp), expected[token] / count, rtol=1e-5)


def test_a_uniform_number_depends_on_seed_sample_and_position_alone():
    seeds = np.array([[0, 1], [0, 1], [0, 2], [1, 1], [0, 1]], np.uint32)
    samples = np.array([0, 1, 0, 0, 0], np.int32)
    positions = np.broadcast_to(np.arange(5, dtype=np.int32), (5, 5))
    table = np.asarray(uniforms(seeds, samples, positions))
    assert len(np.unique(table[:4])) == 20
    assert (table[4] == table[0]).all()
    alone = uniforms(seeds[2:3], samples[2:3], np.array([[3]], np.int32))
    assert float(alone[0, 0]) == table[2, 3]


def test_a_small_vocabulary_is_reported_completely():
    tokens, logp = sampling.most_likely(jnp.asarray(log(0.2, 0.5, 0.3)), jnp.ones(1), 5)
    assert tokens[0, :3].tolist() == [1, 2, 0]
    np.testing.assert_allclose(np.exp(logp[0]), [0.5, 0.3, 0.2, 0, 0], rtol=1e-6)
