"""Protocols by which rooms of one floor call each other.

Per-token arrays are aligned with `tokens`: entry t belongs to token t. Axes: B rows, T tokens of a
row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from areal_jax.records import (
    Completion,
    Message,
    OnProgress,
    Request,
    RewardResult,
    Sample,
    Task,
    ToolResult,
    Weights,
)


@runtime_checkable
class Engine(Protocol):
    """Generates completions: the local engine loop, remote engines, or the simulator."""

    def submit(self, request: Request) -> Awaitable[list[Completion]]:
        """Return one completion per sample, in order. Call it from the asyncio thread.

        Raises:
            InvalidRequest: no retry can satisfy the request.
            EngineStopped: the engine answers no more requests.
        """
        ...

    def snapshot(self) -> Awaitable[dict[str, tuple[Completion, ...]]]:
        """Return the tokens of every unfinished request so far, by request id.

        All are as of one moment between two dispatches. Requests that finished before that moment
        return before this call does.
        """
        ...


@runtime_checkable
class Generate(Protocol):
    """A workflow's view of the engine; the controller adds ids, seeds, versions and journals."""

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        """Return `num_samples` completions of a prompt.

        Args:
            prompt_tokens: the rendered prompt.
            num_samples: number of completions.
            max_new_tokens: token budget of this call, below the run's; None: the run's.
            on_progress: as in `Request`.
        """
        ...


@runtime_checkable
class Session(Protocol):
    """One agent's access to the policy, and a record of its calls."""

    base_url: str
    """Base URL of the OpenAI-compatible server."""
    api_key: str

    def calls(self) -> tuple[tuple[Int32[np.ndarray, "_"], Completion], ...]:
        """Return prompt and completion of every finished call, in order of completion."""
        ...


@runtime_checkable
class Sessions(Protocol):
    """Serves the policy to agents over HTTP."""

    def open(self, generate: Generate) -> AbstractAsyncContextManager[Session]:
        """Open a session whose calls run `generate`; once closed it refuses further calls."""
        ...


@runtime_checkable
class Grader(Protocol):
    """Grades one answer to a task."""

    async def __call__(self, task: Task, answer: str) -> RewardResult: ...


@runtime_checkable
class Tools(Protocol):
    """Runs the tools that a policy calls."""

    async def __call__(self, tool: str, argument: str) -> ToolResult: ...


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer interface of rooms above `data`."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...
    def render(self, messages: Sequence[Message]) -> Int32[np.ndarray, "T"]:
        """Return the tokens of a conversation in the chat template, with the generation prompt."""
        ...

    def render_answer(self, prompt: Sequence[Message], answer: str) -> Int32[np.ndarray, "T"]:
        """Return the tokens of this answer to `render(prompt)`, including the end of the turn."""
        ...

    def render_next(self, messages: Sequence[Message]) -> Int32[np.ndarray, "T"]:
        """Return the tokens between the end of an answer and the next generation.

        They are these messages in the chat template, with its separators and the generation prompt,
        and do not depend on earlier turns.
        """
        ...

    def encode(self, text: str) -> Int32[np.ndarray, "T"]: ...
    def decode(self, tokens: Int32[np.ndarray, "T"]) -> str:
        """Return the text of the tokens without special tokens."""
        ...


@runtime_checkable
class Workflow(Protocol):
    """Turns one task into samples.

    It is deterministic given the results of `generate` and `grader`, so that it can be replayed
    after a crash.
    """

    async def __call__(
        self, task: Task, generate: Generate, grader: Grader
    ) -> tuple[Sample, ...]: ...


@runtime_checkable
class WeightSource(Protocol):
    """Source of weight updates for an engine."""

    def newest(self, after: int) -> Weights | None:
        """Return the newest complete version above `after`, or None, without waiting."""
        ...

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Wait for a version of at least `at_least`.

        Raises:
            TimeoutError: no such version arrived in time; the message names it.
        """
        ...
