"""Evaluation of a running OpenAI-compatible server.

A server that accepts token prompts and returns token ids (`/completions` with `return_token_ids`,
as in vLLM) is an engine like the local one, and any workflow runs on it. Others get chat requests
(`/chat/completions`).
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
from areal_jax.threads import run_in_thread

T = TypeVar("T")

TOKEN_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the server's API key."""

MAX_CONNECTIONS = 64
"""Maximum number of concurrent requests."""

RETRIES_S = (0.5, 2.0, 8.0)
"""Waits before retries of a busy or restarting server."""

PROBE_TOKENS = 16

RequestSampling: TypeAlias = Mapping[str, int | float]
"""Sampling fields of a request, other than the temperature."""

FROM_ALL_TOKENS: tuple[RequestSampling, ...] = (
    {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},  # vLLM and SGLang
    {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},  # our own server
    {"top_p": 1.0},  # OpenAI's own API has no others
)
"""Fields that disable all sampling filters, as in a local evaluation, by server. Without them a
server uses its own defaults, such as those of the policy's generation_config.json."""

_STOPS: dict[str, StopReason] = {"length": "length"}


class ModelServer:
    """Client of a server at a URL that ends in /v1. Each call blocks its own thread, so that many
    run concurrently.
    """

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        """Create a client.

        Args:
            url: base URL, ending in /v1.
            token: API key; None: none.
            timeout_s: limit of one call, in seconds.
        """
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        # Each call has a thread until its response. The thread of a cancelled call ends after its
        # current attempt.
        self._slots, self._closed = asyncio.Semaphore(MAX_CONNECTIONS), threading.Event()

    def model(self) -> str:
        """Return the name of the server's model.

        Raises:
            ValueError: it has several models, refuses the request, or is unreachable.
        """
        try:
            names = [str(model["id"]) for model in self._call("models")["data"]]
        except urllib.error.HTTPError as error:
            remedy = (
                f"set {TOKEN_VARIABLE} to its API key"
                if error.code in (401, 403)
                else "set checkpoint to a URL that ends in /v1"
            )
            raise ValueError(
                f"checkpoint={self.url}: the server refused the request "
                f"({_format_refusal(error)}); {remedy}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoint={self.url}: expected an OpenAI-compatible server, found none "
                f"({error}); set checkpoint to a URL such as http://127.0.0.1:8000/v1"
            ) from error
        if len(names) != 1:
            raise ValueError(
                f"checkpoint={self.url}: expected a server with one model, found "
                f"{', '.join(names) or 'none'}"
            )
        return names[0]

    async def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a request, with retries while the server is busy.

        Raises:
            InvalidRequest: the server calls the request invalid.
            EngineStopped: the server refuses access or is unreachable.
            TimeoutError: no response within the limit.
        """
        async with self._slots:
            return await run_in_thread(partial(self._post, path, body), "server")

    def close(self) -> None:
        """Stop all retries."""
        self._closed.set()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for pause_s in (*RETRIES_S, None):
            try:
                return self._call(path, body)
            except urllib.error.HTTPError as error:
                if error.code in (401, 403):
                    raise EngineStopped(
                        f"{self.url} refused the request: {_format_refusal(error)}; set "
                        f"{TOKEN_VARIABLE}"
                    ) from error
                if error.code != 429 and (
                    error.code < 500 or error.code == 501
                ):  # 501: not supported
                    raise InvalidRequest(f"{self.url}/{path}: {_format_refusal(error)}") from error
                if pause_s is None:
                    raise RuntimeError(
                        f"{self.url}/{path}: {_format_refusal(error)}, {len(RETRIES_S) + 1} times"
                    ) from error
            except TimeoutError as error:
                raise TimeoutError(
                    f"{self.url}/{path}: no response within "
                    f"engine.request_timeout_s={self._timeout_s:g}"
                ) from error
            except OSError as error:
                if pause_s is None:
                    raise EngineStopped(f"{self.url} is unreachable: {error}") from error
            if self._closed.wait(pause_s):
                raise EngineStopped(f"{self.url}: no retry, as the evaluation has ended")
        raise AssertionError("the last attempt returns or raises")

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, self._headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
            return json.load(response)


def _format_refusal(error: urllib.error.HTTPError) -> str:
    """Return status and message of an HTTP error."""
    text = error.read().decode(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text.partition("\n")[0]
    return f"{error.code} {error.reason}: {text[:300]}"


async def find_sampling_mode(
    send: Callable[[RequestSampling], Awaitable[T]],
) -> tuple[RequestSampling, T]:
    """Find the first entry of FROM_ALL_TOKENS that a server accepts.

    Args:
        send: sends a request with these fields.

    Returns:
        The fields and the response.

    Raises:
        InvalidRequest: the server accepts none.
    """
    for sampling_mode in FROM_ALL_TOKENS[:-1]:
        with suppress(InvalidRequest):
            return sampling_mode, await send(sampling_mode)
    return FROM_ALL_TOKENS[-1], await send(FROM_ALL_TOKENS[-1])


@dataclass(frozen=True)
class TokenServer:
    """An engine whose tokens a server samples."""

    server: ModelServer
    model: str
    tokenizer: Tokenizer
    sampling_mode: RequestSampling

    async def submit(self, request: Request) -> list[Completion]:
        """Return one completion per sample, in order.

        Raises:
            InvalidRequest: the prompt has images.
        """
        if request.images:
            raise InvalidRequest(
                f"request {request.id!r}: expected a prompt without images, which are not sent to "
                "a server"
            )
        choices = await self._sample_tokens(request)
        return [self._completion(choice) for choice in choices]

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """Return nothing: a server does not report tokens of unfinished requests."""
        return {}

    @classmethod
    async def probe(
        cls, server: ModelServer, model: str, tokenizer: Tokenizer, prompt: Sequence[Message]
    ) -> TokenServer | None:
        """Probe whether a server accepts and returns tokens.

        Returns:
            The engine; None if the server does not accept this prompt as tokens, or returns no
            token ids that decode to its text.

        Raises:
            EngineStopped: the server refuses access or is unreachable.
        """
        tokens = tokenizer.render(prompt)
        probe = Request("probe", tokens, 1, Sampling(PROBE_TOKENS), seed=0)
        try:
            sampling_mode, choices = await find_sampling_mode(
                lambda sampling_mode: cls(server, model, tokenizer, sampling_mode)._sample_tokens(
                    probe
                )
            )
            sampled, prompt_tokens = (
                choices[0].get("token_ids"),
                choices[0].get("prompt_token_ids", tokens.tolist()),
            )
            is_token_server = (
                sampled
                and prompt_tokens == tokens.tolist()
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
        ):  # any other failure on tokens: the server may still accept chat requests
            return None
        return cls(server, model, tokenizer, sampling_mode) if is_token_server else None

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
        answer = await self.server.request("completions", body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != request.num_samples:
            raise InvalidRequest(
                f"{self.server.url}: expected n={request.num_samples} choices, found {len(choices)}"
            )
        return choices

    def _completion(self, choice: dict[str, Any]) -> Completion:
        tokens = np.array(choice["token_ids"], np.int32)
        unknown = np.full(len(tokens), np.nan, np.float32)
        stop_reason = _STOPS.get(choice["finish_reason"], "stop")
        return Completion(tokens, unknown, np.zeros(len(tokens), np.int32), stop_reason)


async def probe_chat(server: ModelServer, model: str) -> RequestSampling:
    """Return the sampling fields of chat requests that this server accepts.

    Raises:
        InvalidRequest: it accepts no chat requests.
        EngineStopped: it refuses access or is unreachable.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 1}
    sampling_mode, _ = await find_sampling_mode(
        lambda sampling_mode: server.request("chat/completions", {**body, **sampling_mode})
    )
    return sampling_mode


@dataclass(frozen=True)
class ChatServer:
    """Answers tasks by chat requests to a server."""

    server: ModelServer
    model: str
    sampling_mode: RequestSampling
    grader: Grader
    num_samples: int
    sampling: Sampling
    seed: int
    rewards: RewardConfig

    async def answers(self, place: int, task: Task) -> list[Answer]:
        """Return graded answers to a task, one request each, so that the usage of each is known."""
        async with asyncio.TaskGroup() as group:
            answers = [
                group.create_task(self._answer(place, task, number))
                for number in range(self.num_samples)
            ]
        return [answer.result() for answer in answers]

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
        answer = await self.server.request("chat/completions", body)
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
        grade: RewardResult = await self.grader(task, text)
        if grade.failed:
            raise RuntimeError(f"grading failed: {grade.detail}")
        return Answer(
            grade.kind,
            _STOPS.get(choice["finish_reason"], "stop"),
            int(answer["usage"]["completion_tokens"]),
            extract_vote(text, self.rewards.accept_plain),
            text,
            grade.to_reward(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer),
        )
