"""What requests may ask of a draw beyond temperature, top-k and top-p, and how its progress is
followed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_decode import (
    Shelf,
    answer,
    engine,
    request,
    same_samples,
    trainer_distribution,
    with_engine_loop,
)

from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.token_log import TokenLog
from areal_jax.errors import InvalidRequest
from areal_jax.records import Completion, Progress, Request

PROMPT = (5, 9, 33, 2, 17)


def shaped(
    name: str = "a", num_samples: int = 1, prompt: Sequence[int] = PROMPT, **settings: Any
) -> Request:
    plain = request(name, prompt, num_samples, seed=settings.pop("seed", 0))
    return replace(plain, sampling=replace(plain.sampling, **settings))


def sampled(*requests: Request) -> list[list[Completion]]:
    return answer(engine(), Shelf(engine(), (0, 0, 0)), *requests)


def penalized(
    logp: np.ndarray, before: Sequence[int], presence: float, frequency: float
) -> np.ndarray:
    """Log-probs of the vocabulary once an answer holds the tokens `before`."""
    counts = np.bincount(before, minlength=64) if len(before) else np.zeros(64)
    logits = logp - presence * (counts > 0) - frequency * counts
    return logits - np.log(np.exp(logits).sum())


@pytest.mark.slow
def test_penalties_count_completion_tokens_and_shape_logp():
    [group] = sampled(shaped(num_samples=3, presence_penalty=1.5, frequency_penalty=0.7))
    for completion in group:
        plain = trainer_distribution(PROMPT, completion, 0)
        tokens = completion.tokens.tolist()
        expected = [
            penalized(plain[t], tokens[:t], 1.5, 0.7)[tokens[t]] for t in range(len(tokens))
        ]
        np.testing.assert_allclose(completion.logp, expected, atol=1e-4)


@pytest.mark.slow
def test_huge_penalties_forbid_repetition():
    [[once], [neither]] = sampled(
        shaped("once", presence_penalty=1e4, temperature=0.0),
        shaped("neither", repetition_penalty=1e6, temperature=0.0),
    )
    assert len(set(once.tokens.tolist())) == 20
    [[plain]] = sampled(request(temperature=0.0))
    assert len(set(plain.tokens.tolist())) < 20
    # Positive logits shrink to nothing and negative ones fall without bound, so a token that was
    # there is the last choice.
    assert len(set(neither.tokens.tolist()) | set(PROMPT)) == 25


@pytest.mark.slow
def test_min_new_tokens_prevents_stop_tokens():
    [[free]] = sampled(request(seed=3))
    stops = tuple(dict.fromkeys(free.tokens[:6].tolist()))[:4]
    early, late = sampled(
        shaped("early", 8, seed=3, stop_token_ids=stops),
        shaped("late", 8, seed=3, stop_token_ids=stops, min_new_tokens=7),
    )
    assert min(len(each.tokens) for each in early) < 7
    for each in late:
        assert not np.isin(each.tokens[:7], stops).any()
        assert len(each.tokens) >= 7
        # What was forbidden leaves its probability to the rest.
        logp = trainer_distribution(PROMPT, each, 0)[0]
        rest = np.log(np.exp(np.delete(logp, stops)).sum())
        np.testing.assert_allclose(each.logp[0], logp[each.tokens[0]] - rest, atol=1e-4)


def test_top_logprobs_are_the_most_likely_tokens():
    [[reported], [unreported]] = sampled(
        shaped("reported", num_top_logprobs=3), request("unreported", seed=1)
    )
    plain = trainer_distribution(PROMPT, reported, 0)
    assert reported.top_logprobs is not None and unreported.top_logprobs is None
    assert reported.top_logprobs.tokens.tolist() == np.argsort(-plain, axis=1)[:, :3].tolist()
    np.testing.assert_allclose(
        reported.top_logprobs.logp, -np.sort(-plain, axis=1)[:, :3], atol=1e-4
    )


def test_plain_request_is_unaffected_by_shaped_requests():
    generation_params = {
        "presence_penalty": 1.0,
        "min_p": 0.1,
        "num_top_logprobs": 5,
        "min_new_tokens": 3,
        "repetition_penalty": 1.3,
    }
    [alone] = sampled(request("plain", seed=5, num_samples=2))
    [beside, _] = sampled(
        request("plain", seed=5, num_samples=2), shaped("generation_params", 3, **generation_params)
    )
    same_samples(alone, beside)


def test_shaped_sampling_survives_resumption():
    generation_params = shaped(
        "generation_params",
        2,
        presence_penalty=1.0,
        frequency_penalty=0.3,
        min_p=0.05,
        num_top_logprobs=2,
        repetition_penalty=1.2,
    )
    [alone] = sampled(generation_params)
    crowded = sampled(
        *(request(f"r{i}", (i, 3), 2, max_new_tokens=5 + i, seed=i) for i in range(5)),
        generation_params,
    )[-1]
    same_samples(alone, crowded)
    cut = tuple(
        Completion(each.tokens[:n], each.logp[:n], each.versions[:n], "suspended")
        for n, each in zip((7, 11), alone, strict=True)
    )
    [resumed] = sampled(replace(generation_params, resume=cut))
    same_samples(alone, resumed)
    assert resumed[0].top_logprobs is not None and alone[0].top_logprobs is not None
    # Tokens sampled before a crash have no top log-probs.
    assert (resumed[0].top_logprobs.logp[:7] == -np.inf).all()
    np.testing.assert_allclose(
        resumed[0].top_logprobs.logp[7:], alone[0].top_logprobs.logp[7:], atol=1e-4
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5},
        {"min_new_tokens": 21},
        {"repetition_penalty": 0.0},
        {"num_top_logprobs": 21},
        {"presence_penalty": np.nan},
    ],
)
def test_out_of_range_parameter_is_refused_by_name(wrong: dict[str, Any]):
    [name] = wrong
    with pytest.raises(InvalidRequest, match=name):
        sampled(shaped("a", **wrong))


class Follower:
    """Receives progress, and decides when a sample ends."""

    def __init__(self, most: dict[int, int] | None = None):
        self.parts = dict[int, list[Completion]]()
        self.most = most or {}

    def __call__(self, news: Sequence[Progress]) -> list[int]:
        for sample, new in news:
            self.parts.setdefault(sample, []).append(new)
        return [
            sample for sample, _ in news if self.num_tokens(sample) >= self.most.get(sample, 1000)
        ]

    def num_tokens(self, sample: int) -> int:
        return sum(len(part.tokens) for part in self.parts[sample])


def test_progress_adds_up_to_the_answer_and_comes_before_it():
    follower = Follower()
    watched = replace(request("watched", num_samples=3), on_progress=follower)
    [group, _] = sampled(watched, request("unwatched", num_samples=9))
    for sample, completion in enumerate(group):
        parts = follower.parts[sample]
        assert len(parts) == 5
        assert [part.stop_reason for part in parts] == ["suspended"] * 4 + ["length"]
        assert (
            np.concatenate([part.tokens for part in parts]).tolist() == completion.tokens.tolist()
        )
        assert np.concatenate([part.logp for part in parts]).tolist() == completion.logp.tolist()
        assert (
            np.concatenate([part.versions for part in parts]).tolist()
            == completion.versions.tolist()
        )


def test_streaming_detokenizes_each_token_once_more(monkeypatch: pytest.MonkeyPatch):
    read, read_log = list[int](), TokenLog.read

    def counted(log: TokenLog, *asked: Any) -> Completion:
        found = read_log(log, *asked)
        read.append(len(found.tokens))
        return found

    monkeypatch.setattr(TokenLog, "read", counted)
    sampled(replace(request("watched", num_samples=3), on_progress=Follower()))
    # 4 dispatches of 4 tokens, and the whole of the 20 after the fifth.
    assert sorted(read) == [4] * 12 + [20] * 3


def test_ending_one_sample_leaves_the_others_running():
    follower, shelf = Follower({1: 6}), Shelf(engine(), (0, 0, 0))
    # Before the fourth dispatch, when 8 tokens were reported: a late reader is not
    # overtaken by the end.
    shelf.pause_at(3)

    def hear(news: Sequence[Progress]) -> list[int]:
        if ended := follower(news):
            asyncio.get_running_loop().call_soon(shelf.go_on)
        return ended

    [plain] = sampled(request("a", num_samples=3))
    [group] = answer(engine(), shelf, replace(request("a", num_samples=3), on_progress=hear))
    assert 6 <= len(group[1].tokens) < 20
    assert group[1].tokens.tolist() == plain[1].tokens[: len(group[1].tokens)].tolist()
    assert [each.stop_reason for each in group] == ["length", "stop", "length"]
    same_samples([plain[0], plain[2]], [group[0], group[2]])


def test_sample_can_be_ended_before_and_after_running():
    async def act(engine_loop: EngineLoop) -> list[list[Completion]]:
        futures = [
            engine_loop.submit(request("crowd", num_samples=8)),
            engine_loop.submit(request("b", num_samples=2)),
        ]
        engine_loop.end_sample("b", 0)
        engine_loop.end_sample("unknown", 0)
        engine_loop.start()
        answers = await asyncio.gather(*futures)
        engine_loop.end_sample("b", 1)
        return [*answers, await engine_loop.submit(request("after"))]

    _, group, after = with_engine_loop(engine(), Shelf(engine(), (0, 0, 0)), act)
    assert [(len(each.tokens), each.stop_reason) for each in group] == [(0, "stop"), (20, "length")]
    assert len(after[0].tokens) == 20
