"""Evaluation of a server: token and chat requests, refusals and retries."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from letters import Letters
from scripted_server import Response, serving

from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.evaluation import remote
from areal_jax.evaluation.answers import Answer
from areal_jax.evaluation.remote import (
    FROM_ALL_TOKENS,
    ChatServer,
    ModelServer,
    RequestSampling,
    TokenServer,
    probe_chat,
)
from areal_jax.records import Completion, Message, Request, RewardResult, Sampling, Task
from areal_jax.rewards.config import RewardConfig

TASK = Task("sum", (Message("user", "1+1?"),), "2")


def choice(index: int, text: str, **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "token_ids": [ord(letter) for letter in text],
        "finish_reason": "stop",
    } | more


def submitted(server: ModelServer, num_samples: int) -> list[Completion]:
    request = Request("r", np.array([7, 8], np.int32), num_samples, Sampling(5, 0.5), seed=11)
    return asyncio.run(
        TokenServer(server, "m", Letters(), {"top_p": 1.0, "top_k": 3}).submit(request)
    )


def test_request_is_sent_unchanged_and_samples_are_ordered() -> None:
    bodies = []

    def answer(path: str, body: dict[str, Any]) -> Response:
        bodies.append((path, body))
        return 200, {"choices": [choice(1, "no", finish_reason="length"), choice(0, "yes")]}

    with serving(answer) as server:
        first, second = submitted(server, 2)
    # No random number, and none of the sampling, is left out.
    asked_for = {
        "model": "m",
        "prompt": [7, 8],
        "n": 2,
        "max_tokens": 5,
        "temperature": 0.5,
        "seed": 11,
        "return_token_ids": True,
        "top_p": 1.0,
        "top_k": 3,
    }
    assert bodies == [("/v1/completions", asked_for)]
    assert (Letters().decode(first.tokens), first.stop_reason) == ("yes", "stop")
    assert (Letters().decode(second.tokens), second.stop_reason) == ("no", "length")
    # What it was sampled with is not known, and never trained on.
    assert np.isnan(first.logp).all() and first.versions.tolist() == [0, 0, 0]


@pytest.mark.parametrize("count", [1, 3])
def test_wrong_number_of_choices_is_refused(count: int) -> None:
    response = {"choices": [choice(i, "a") for i in range(count)]}
    with (
        serving(lambda *_: (200, response)) as server,
        pytest.raises(InvalidRequest, match=f"expected n=2 choices, found {count}"),
    ):
        submitted(server, 2)


@pytest.mark.parametrize(
    ("statuses", "error", "words"),
    [
        ((429, 503, 500, 200), None, ""),
        ((503, 503, 503, 503), RuntimeError, "503 .*, 4 times"),
        ((401,), EngineStopped, "set OPENAI_API_KEY"),
        ((403,), EngineStopped, "set OPENAI_API_KEY"),
        ((400,), InvalidRequest, "400 Bad Request: too long"),
        ((501,), InvalidRequest, "501"),
    ],
)
def test_busy_servers_are_retried_and_refusals_are_not(
    statuses: tuple[int, ...],
    error: type[Exception] | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "RETRIES_S", (0.0, 0.0, 0.0))
    left = list(statuses)

    def answer(path: str, body: dict[str, Any]) -> Response:
        status = left.pop(0)
        return status, {"choices": [choice(0, "a")]} if status == 200 else {
            "error": {"message": "too long"}
        }

    with serving(answer) as server:
        if error is None:
            assert len(submitted(server, 1)) == 1
        else:
            with pytest.raises(error, match=words):
                submitted(server, 1)
    assert not left


def test_unreachable_server_stops_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRIES_S", (0.0,))
    with serving(lambda *_: (200, {})) as server:
        pass
    with (
        closing(ModelServer(server.url, None, 5.0)) as again,
        pytest.raises(EngineStopped, match="is unreachable"),
    ):
        submitted(again, 1)


def test_closed_server_is_not_retried_and_does_not_block_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "RETRIES_S", (600.0,))
    was_asked = threading.Event()

    def busy(path: str, body: dict[str, Any]) -> Response:
        was_asked.set()
        return 503, {}

    async def given_up(server: ModelServer) -> list[threading.Thread]:
        before = set(threading.enumerate())
        request = asyncio.create_task(server.request("completions", {}))
        while not was_asked.is_set():
            await asyncio.sleep(0.01)
        request.cancel()
        return [
            thread
            for thread in threading.enumerate()
            if thread not in before and thread.name.startswith("server")
        ]

    with serving(busy) as server:
        (thread,) = asyncio.run(given_up(server))
        assert thread.daemon
        server.close()
        thread.join(20)
        assert not thread.is_alive()


PROMPT = [ord(letter) for letter in "1+1?"]


@pytest.mark.parametrize(
    ("response", "has_tokens"),
    [
        ((200, {"choices": [choice(0, "2")]}), True),
        ((200, {"choices": [choice(0, "2", prompt_token_ids=PROMPT)]}), True),
        ((200, {"choices": [choice(0, "2", prompt_token_ids=[1, *PROMPT])]}), False),
        ((200, {"choices": [choice(0, "2", token_ids=[ord("3")])]}), False),
        ((200, {"choices": [choice(0, "", token_ids=[])]}), False),
        ((200, {"choices": [{"index": 0, "text": "2", "finish_reason": "stop"}]}), False),
        ((400, {"error": {"message": "a prompt is a text"}}), False),
        ((500, {}), False),
        ((200, [1]), False),
    ],
)
def test_token_server_must_return_tokens_that_decode_to_its_text(
    response: Response, has_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RETRIES_S", (0.0,))
    with serving(lambda *_: response) as server:
        found = asyncio.run(TokenServer.probe(server, "m", Letters(), TASK.prompt))
    assert (found is not None) is has_tokens


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (
            (200, {"data": [{"id": "a"}, {"id": "b"}]}),
            "expected a server with one model, found a, b",
        ),
        ((200, {"data": []}), "found none"),
        ((200, {"models": []}), "expected an OpenAI-compatible server"),
        ((403, {}), "set OPENAI_API_KEY to its API key"),
        ((404, {}), "set checkpoint to a URL that ends in /v1"),
    ],
)
def test_server_must_have_one_model(response: Response, words: str) -> None:
    with serving(lambda *_: (200, {"data": [{"id": "only"}]})) as server:
        assert server.model() == "only"
    with serving(lambda *_: response) as server, pytest.raises(ValueError, match=words):
        server.model()


def format_skipped(server: ModelServer, grade: RewardResult | None = None) -> list[Answer]:
    async def grader(task: Task, answer: str) -> RewardResult:
        return grade or RewardResult("correct" if answer.endswith("{2}") else "wrong")

    sampling, rewards = Sampling(9, 0.7), RewardConfig()
    chat = ChatServer(
        server,
        "m",
        {"top_k": -1},
        grader,
        num_samples=3,
        sampling=sampling,
        seed=1,
        rewards=rewards,
    )
    return asyncio.run(chat.answers(4, TASK))


def test_chat_answers_have_their_own_seed_length_and_vote() -> None:
    bodies = list[dict[str, Any]]()

    def answer(path: str, body: dict[str, Any]) -> Response:
        assert path == "/v1/chat/completions"
        bodies.append(body)
        right = body["seed"] == min(known)
        text, stop = ("\\boxed{2}", "length") if right else ("\\boxed{03}", "stop")
        response = {"message": {"content": text}, "finish_reason": stop}
        return 200, {"choices": [response], "usage": {"completion_tokens": 6 if right else 5}}

    known = {remote.derive_seed(1, f"eval-4.{number}") for number in range(3)}
    with serving(answer) as server:
        answers = format_skipped(server)
    assert {body["seed"] for body in bodies} == known and len(known) == 3
    same = [{name: value for name, value in body.items() if name != "seed"} for body in bodies]
    messages = [{"role": "user", "content": "1+1?"}]
    assert (
        same
        == [{"model": "m", "messages": messages, "max_tokens": 9, "temperature": 0.7, "top_k": -1}]
        * 3
    )
    right = Answer("correct", "length", 6, "2", "\\boxed{2}", reward=5.0)
    wrong = Answer("wrong", "stop", 5, "3", "\\boxed{03}", reward=-5.0)
    assert sorted(answers, key=lambda found: found.num_tokens) == [wrong, wrong, right]


def test_failing_grader_fails_the_task() -> None:
    response = {
        "choices": [{"message": {"content": None}, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 0},
    }
    with serving(lambda *_: (200, response)) as server:
        assert [answer.text for answer in format_skipped(server)] == ["", "", ""]
        with pytest.raises(ExceptionGroup) as raised:
            format_skipped(server, RewardResult("infrastructure", "no process"))
    assert "grading failed: no process" in str(raised.value.exceptions[0])


@pytest.mark.parametrize(
    ("takes", "sampling_mode"),
    [
        ({"top_p", "top_k", "min_p", "repetition_penalty"}, FROM_ALL_TOKENS[1]),
        ({"top_p", "top_k", "min_p", "repetition_penalty", "-1"}, FROM_ALL_TOKENS[0]),
        ({"top_p"}, {"top_p": 1.0}),
    ],
    ids=["0 is all", "-1 is all", "OpenAI's own fields"],
)
def test_sampling_filters_are_disabled_in_the_servers_own_fields(
    takes: set[str], sampling_mode: RequestSampling
) -> None:
    def answer(path: str, body: dict[str, Any]) -> Response:
        of_all_servers = {
            "model",
            "prompt",
            "messages",
            "n",
            "max_tokens",
            "temperature",
            "seed",
            "return_token_ids",
        }
        expected = {"top_k": -1 if "-1" in takes else 0} if "top_k" in takes else {}
        if body.keys() - of_all_servers - takes or any(
            body.get(name) != value for name, value in expected.items()
        ):
            return 400, {"error": {"message": "no such field"}}
        return 200, {"choices": [choice(0, "2")]}

    with serving(answer) as server:
        in_tokens = asyncio.run(TokenServer.probe(server, "m", Letters(), TASK.prompt))
        assert in_tokens is not None and in_tokens.sampling_mode == sampling_mode
        assert asyncio.run(probe_chat(server, "m")) == sampling_mode
