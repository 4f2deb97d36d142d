"""Answers from a running server that speaks OpenAI's protocol, ours or another.

Where it takes a prompt as tokens and tells which it drew (`/completions` with `return_token_ids`,
as vLLM has it), it is an engine like the local one, and any workflow runs on it. Else it is asked
in words, by `/chat/completions`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.evaluation.answers import Answer, extract_vote
from areal_jax.protocols import Grader, Tokenizer
from areal_jax.records import (
    Completion,
    Message,
    Request,
    RewardResult,
    Sampling,
    StopReason,
    Task,
    derive_seed,
)
from areal_jax.rewards.config import RewardConfig
from areal_jax.threads import in_thread

T = TypeVar("T")

TOKEN_VARIABLE = "OPENAI_API_KEY"
"""Environment variable that holds the server's token."""

MAX_CONNECTIONS = 64
"""Requests under way at a server at the same time."""

RETRIES_S = (0.5, 2.0, 8.0)
"""Pauses before what a busy or restarting server did not answer is asked again."""

PROBE_TOKENS = 16

RequestSampling: TypeAlias = Mapping[str, int | float]
"""Fields of a request beside its temperature that decide how tokens are sampled."""

FROM_ALL_TOKENS: tuple[RequestSampling, ...] = (
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},  # vLLM and SGLang
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},  # our own server
    {"top_p": 1.0},  # OpenAI's own protocol has no more
)
"""How to say that tokens are sampled from all that there are, as a local evaluation does. A server
that is told nothing takes defaults of its own, such as those of the policy's
generation_config.json."""

_STOPS: dict[str, StopReason] = {"length": "length"}


class Server:
    """A server at a URL that ends in /v1. Its calls block threads of their own, so that many can be
    under way."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        """Args: timeout_s: for one call."""
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        # Each call has a thread until its answer is there. One that nobody waits for any more ends
        # with its attempt under way.
        self._places, self._closed = asyncio.Semaphore(MAX_CONNECTIONS), threading.Event()

    def model(self) -> str:
        """The model that the server serves. ValueError, with what to do, where it has several,
        refuses, or is not there."""
        try:
            names = [str(model["id"]) for model in self._call("models")["data"]]
        except urllib.error.HTTPError as error:
            reported = (
                f"set {TOKEN_VARIABLE} to its token"
                if error.code in (401, 403)
                else "expected a URL that ends in /v1"
            )
            raise ValueError(
                f"checkpoint={self.url}: the server refuses ({_said(error)}); {reported}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint={self.url}: no server that speaks OpenAI's protocol answers there "
                f"({error}); expected a URL such "
                "as http://127.0.0.1:8000/v1"
            ) from error
        if len(names) != 1:
            raise ValueError(
                f"checkpoint={self.url}: expected a server with one model, it has "
                f"{', '.join(names) or 'none'}"
            )
        return names[0]

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a request. InvalidRequest where the server calls it wrong, EngineStopped where it
        refuses or is gone; what it is too busy for is asked again a few times."""
        async with self._places:
            return await in_thread(partial(self._insist, path, body), "server")

    def close(self) -> None:
        """Ask nothing again."""
        self._closed.set()

    def _insist(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for pause_s in (*RETRIES_S, None):
            try:
                return self._call(path, body)
            except urllib.error.HTTPError as error:
                if error.code in (401, 403):
                    raise EngineStopped(
                        f"{self.url} refuses: {_said(error)}; set {TOKEN_VARIABLE}"
                    ) from error
                if error.code != 429 and (
                    error.code < 500 or error.code == 501
                ):  # 501: it has no such thing
                    raise InvalidRequest(f"{self.url}/{path}: {_said(error)}") from error
                if pause_s is None:
                    raise RuntimeError(
                        f"{self.url}/{path}: {_said(error)}, {len(RETRIES_S) + 1} times"
                    ) from error
            except TimeoutError as error:
                raise TimeoutError(
                    f"{self.url}/{path}: no answer within "
                    f"engine.request_timeout_s={self._timeout_s:g}"
                ) from error
            except OSError as error:
                if pause_s is None:
                    raise EngineStopped(f"{self.url} does not answer any more: {error}") from error
            if self._closed.wait(pause_s):
                raise EngineStopped(f"{self.url} is not asked again: this evaluation has ended")
        raise AssertionError("the last attempt returns or raises")

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, self._headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
            return json.load(response)


def _said(error: urllib.error.HTTPError) -> str:
    """Status and message of a refusal."""
    text = error.read().decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text.partition("\n")[0]
    return f"{error.code} {error.reason}: {text[:300]}"


async def first_served(ask: Callable[[RequestSampling], Awaitable[T]]) -> tuple[RequestSampling, T]:
    """The first way to draw from all tokens that is not called wrong, and what it was answered.
    InvalidRequest where all are."""
    for sampling_mode in FROM_ALL_TOKENS[:-1]:
        with suppress(InvalidRequest):
            return sampling_mode, await ask(sampling_mode)
    return FROM_ALL_TOKENS[-1], await ask(FROM_ALL_TOKENS[-1])


@dataclass(frozen=True)
class TokenServer:
    """An engine whose tokens a server draws."""

    server: Server
    model: str
    tokenizer: Tokenizer
    sampling_mode: RequestSampling

    async def submit(self, request: Request) -> list[Completion]:
        """Answer with one completion per sample, in order."""
        choices = await self._sample_tokens(request)
        return [self._completion(choice) for choice in choices]

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """Nothing: what a server has sampled of an unfinished request, only the server knows."""
        return {}

    @classmethod
    async def probed(
        cls, server: Server, model: str, tokenizer: Tokenizer, prompt: Sequence[Message]
    ) -> TokenServer | None:
        """Whoever asks this server in tokens; None where it does not take this prompt as tokens, or
        tells none that say what it says. EngineStopped where it refuses or is gone."""
        tokens = tokenizer.render(prompt)
        probe = Request("probe", tokens, 1, Sampling(PROBE_TOKENS), seed=0)
        try:
            sampling_mode, choices = await first_served(
                lambda sampling_mode: cls(server, model, tokenizer, sampling_mode)._sample_tokens(
                    probe
                )
            )
            sampled, given = (
                choices[0].get("token_ids"),
                choices[0].get("prompt_token_ids", tokens.tolist()),
            )
            speaks = sampled and given == tokens.tolist()
            speaks = (
                speaks
                and tokenizer.decode(np.array(sampled, np.int32)).strip()
                == choices[0]["text"].strip()
            )
        except EngineStopped:
            raise
        except (
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
        ):  # whatever else is answered to tokens, words may be answered
            return None
        return cls(server, model, tokenizer, sampling_mode) if speaks else None

    async def _sample_tokens(self, request: Request) -> list[dict[str, Any]]:
        body = {
            "model": self.model,
            "prompt": request.prompt_tokens.tolist(),
            "n": request.num_samples,
            "max_tokens": request.sampling.max_new_tokens,
            "temperature": request.sampling.temperature,
            "seed": request.seed,
            "return_token_ids": True,
            **self.sampling_mode,
        }
        answer = await self.server.ask("completions", body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != request.num_samples:
            raise InvalidRequest(
                f"{self.server.url}: asked for n={request.num_samples} answers, got {len(choices)}"
            )
        return choices

    def _completion(self, choice: dict[str, Any]) -> Completion:
        tokens = np.array(choice["token_ids"], np.int32)
        unknown = np.full(len(tokens), np.nan, np.float32)
        stop_reason = _STOPS.get(choice["finish_reason"], "stop")
        return Completion(tokens, unknown, np.zeros(len(tokens), np.int32), stop_reason)


async def sampling_of_chats(server: Server, model: str) -> RequestSampling:
    """How to ask this server in words. InvalidRequest where it answers none at all, EngineStopped where
    it refuses or is gone."""
    body = {"model": model, "messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 1}
    sampling_mode, _ = await first_served(
        lambda sampling_mode: server.ask("chat/completions", {**body, **sampling_mode})
    )
    return sampling_mode


@dataclass(frozen=True)
class ChatServer:
    """A server that is asked in words, and says how many tokens it drew."""

    server: Server
    model: str
    sampling_mode: RequestSampling
    grader: Grader
    num_samples: int
    sampling: Sampling
    seed: int
    rewards: RewardConfig

    async def answers(self, place: int, task: Task) -> list[Answer]:
        """Graded answers to a task: one request for each, so that the length of each is told."""
        async with asyncio.TaskGroup() as asking:
            asked = [
                asking.create_task(self._answer(place, task, number))
                for number in range(self.num_samples)
            ]
        return [answer.result() for answer in asked]

    async def _answer(self, place: int, task: Task, number: int) -> Answer:
        body = {
            "model": self.model,
            "messages": [
                {"role": message.role, "content": message.content} for message in task.prompt
            ],
            "max_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "seed": derive_seed(self.seed, f"eval-{place}.{number}"),
            **self.sampling_mode,
        }
        answer = await self.server.ask("chat/completions", body)
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
        grade: RewardResult = await self.grader(task, text)
        if grade.failed:
            raise RuntimeError(f"no grade: {grade.detail}")
        return Answer(
            grade.kind,
            _STOPS.get(choice["finish_reason"], "stop"),
            int(answer["usage"]["completion_tokens"]),
            extract_vote(text, self.rewards.accept_plain),
            text,
            grade.to_reward(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer),
        )
