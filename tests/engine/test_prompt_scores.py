"""Log-probs of given tokens under the engine's weights."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tiny_decode import (
    CONFIG,
    Shelf,
    answer,
    engine,
    request,
    same_samples,
    trainer_distribution,
    trainer_logp,
    with_engine_loop,
)

from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.errors import InvalidRequest
from areal_jax.records import Completion

TOKENS = np.random.default_rng(3).integers(0, 64, 31).astype(np.int32)


def sampled(tokens: np.ndarray) -> Completion:
    """The tokens after the first one, as if they had been sampled."""
    logp = np.zeros(len(tokens) - 1, np.float32)
    return Completion(tokens[1:], logp, logp.astype(np.int32), "length")


@pytest.mark.parametrize(("devices", "tensor"), [(1, 1), (4, 2)])
def test_scores_are_the_trainers_log_probs(devices: int, tensor: int):
    scoring = engine(CONFIG, devices, tensor)

    async def act(engine_loop: EngineLoop) -> list[Completion]:
        engine_loop.start()
        return [await engine_loop.score(TOKENS[:length], 5) for length in (1, 2, 30, 31)]

    scores = with_engine_loop(scoring, Shelf(scoring, (0, 7, 1)), act)
    for length, scored in zip((1, 2, 30, 31), scores, strict=True):
        tokens = TOKENS[:length]
        assert scored.tokens.tolist() == tokens.tolist()
        assert scored.versions.tolist() == [7] * length
        assert scored.logp[0] == 0.0
        if length == 1:
            continue
        expected = trainer_logp(tokens[:1], sampled(tokens), 1)
        np.testing.assert_allclose(scored.logp[1:], expected, atol=2e-5)
        every = trainer_distribution(tokens[:1].tolist(), sampled(tokens), 1)
        assert scored.top_logprobs is not None
        assert (scored.top_logprobs.tokens[1:] == np.argsort(-every, axis=1)[:, :5]).all()
        np.testing.assert_allclose(
            scored.top_logprobs.logp[1:], -np.sort(-every, axis=1)[:, :5], atol=2e-5
        )


def test_most_likely_token_has_the_largest_log_prob_to_the_bit():
    scoring = engine()
    [[completion]] = answer(
        scoring, Shelf(scoring, (0, 1, 1)), request(temperature=0.0, prompt=TOKENS[:8].tolist())
    )
    tokens = np.concatenate([TOKENS[:8], completion.tokens])

    async def act(engine_loop: EngineLoop) -> Completion:
        engine_loop.start()
        return await engine_loop.score(tokens, 1)

    scored = with_engine_loop(scoring, Shelf(scoring, (0, 1, 1)), act)
    assert scored.top_logprobs is not None
    assert (scored.logp[8:] == scored.top_logprobs.logp[8:, 0]).all()
    assert (scored.logp[1:] <= scored.top_logprobs.logp[1:, 0]).all()


def test_scores_between_dispatches_change_no_sample():
    scoring = engine()
    asked = [request(name, num_samples=3, seed=seed) for seed, name in enumerate("abc")]
    alone = answer(scoring, Shelf(scoring, (0, 1, 1)), *asked)

    async def act(engine_loop: EngineLoop) -> tuple[list[list[Completion]], list[Completion]]:
        futures = [engine_loop.submit(each) for each in asked]
        engine_loop.start()
        scores = await asyncio.gather(*(engine_loop.score(TOKENS, 1) for _ in range(5)))
        return await asyncio.gather(*futures), scores

    beside, scores = with_engine_loop(scoring, Shelf(scoring, (0, 1, 1)), act)
    for left, right in zip(alone, beside, strict=True):
        same_samples(left, right)
    assert all((each.logp == scores[0].logp).all() for each in scores)


def test_scores_follow_the_weights():
    scoring = engine()

    async def act(engine_loop: EngineLoop) -> list[Completion]:
        engine_loop.start()
        scores = [await engine_loop.score(TOKENS, 1)]
        while scores[-1].versions[0] < 2:
            scores.append(await engine_loop.score(TOKENS, 1))
        return scores

    scores = with_engine_loop(scoring, Shelf(scoring, (0, 1, 1), (3, 2, 2)), act)
    for scored in (scores[0], scores[-1]):
        expected = trainer_logp(TOKENS[:1], sampled(TOKENS), int(scored.versions[0]))
        np.testing.assert_allclose(scored.logp[1:], expected, atol=2e-5)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "expected 1 to .*=32 tokens to score, found 0"),
        ([1] * 33, "found 33"),
        ([1, 64], "expected tokens from 0 to 63, found 1 to 64"),
    ],
)
def test_tokens_that_cannot_be_scored_are_refused(tokens: list[int], words: str):
    scoring = engine()

    async def act(engine_loop: EngineLoop) -> None:
        engine_loop.start()
        with pytest.raises(InvalidRequest, match=words):
            await engine_loop.score(np.array(tokens, np.int32), 1)

    with_engine_loop(scoring, Shelf(scoring, (0, 1, 1)), act)
