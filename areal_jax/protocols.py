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
    """Whoever answers requests: the local engine loop, a remote engine, the simulator."""

    def submit(self, request: Request) -> Awaitable[list[Completion]]:
        """Answer with one completion per sample, in order; call from the asyncio thread.

        Raises Unservable where the request can never be answered, EngineStopped where none can be
        any more."""
        ...

    def snapshot(self) -> Awaitable[dict[str, tuple[Completion, ...]]]:
        """What every unfinished request has sampled so far, by request id, as of one moment between
        two dispatches. Completions delivered before that moment are delivered before this
        answer."""
        ...


@runtime_checkable
class Generate(Protocol):
    """A workflow's view of the engine; ids, seeds, versions and journals are the controller's
    business."""

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        """Args: max_new_tokens: fewer than the run's, for this call. on_progress: as that of a
        `Request`."""
        ...


@runtime_checkable
class Session(Protocol):
    """One agent's access to the policy, and what came of it."""

    base_url: str
    """Where the policy answers in OpenAI's protocol."""
    api_key: str

    def calls(self) -> tuple[tuple[Int32[np.ndarray, "_"], Completion], ...]:
        """Prompt and answer of every call that was answered, in the order of their ends; exactly
        the tokens sampled."""
        ...


@runtime_checkable
class Sessions(Protocol):
    """Whoever answers agents over HTTP."""

    def open(self, generate: Generate) -> AbstractAsyncContextManager[Session]:
        """A session whose calls are sampled by `generate`; at the end it answers nothing more."""
        ...


@runtime_checkable
class Grader(Protocol):
    async def __call__(self, task: Task, answer: str) -> RewardResult: ...


@runtime_checkable
class Tools(Protocol):
    """Whoever does what a policy calls tools for."""

    async def __call__(self, tool: str, argument: str) -> ToolResult: ...


@runtime_checkable
class Tokenizer(Protocol):
    """What rooms above `data` need of a tokenizer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...
    def render(self, messages: Sequence[Message]) -> Int32[np.ndarray, "T"]:
        """Tokens of a conversation through the chat template, ready for the assistant's next
        words."""
        ...

    def render_answer(self, prompt: Sequence[Message], answer: str) -> Int32[np.ndarray, "T"]:
        """Tokens that a policy asked `render(prompt)` says to give this answer, up to the one that
        ends its turn."""
        ...

    def render_next(self, messages: Sequence[Message]) -> Int32[np.ndarray, "T"]:
        """Tokens that follow an answer and the token that ended it, up to the assistant's next
        words: these messages, with all that the chat template puts around them. They depend on
        nothing that was said before."""
        ...

    def encode(self, text: str) -> Int32[np.ndarray, "T"]: ...
    def decode(self, tokens: Int32[np.ndarray, "T"]) -> str:
        """Text of the tokens without special tokens."""
        ...


@runtime_checkable
class Workflow(Protocol):
    """How one task becomes samples. Deterministic given what generate and grader answer, so that a
    crash can replay it."""

    async def __call__(
        self, task: Task, generate: Generate, grader: Grader
    ) -> tuple[Sample, ...]: ...


@runtime_checkable
class WeightSource(Protocol):
    """Where an engine finds newer weights."""

    def newest(self, after: int) -> Weights | None:
        """The newest complete version above `after`, or None; never waits."""
        ...

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Wait for a version of at least `at_least`. TimeoutError names the version waited for."""
        ...
