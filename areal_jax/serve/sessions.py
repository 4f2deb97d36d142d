"""Sessions of agents: the same protocol over a workflow's `generate`, with a record of all sampled
tokens.

An agent sends the whole conversation with every call, as text. Earlier answers of the policy are
found by their text, and enter the next prompt as the sampled tokens: they are not tokenized or
rendered again.

Tokens are sampled with the run's own sampling parameters; an agent's temperature, top_p, penalties
and seed have no effect. An answer in a given format is sampled among the tokens that its grammar
allows, and recorded with log-probs among all tokens, as a trainer computes them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from areal_jax.data.grammars import Grammars
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.protocols import Generate
from areal_jax.records import Completion, OnProgress, with_stop_token
from areal_jax.serve.app import App, listening, message_of
from areal_jax.serve.bodies import Chat, GenerationParams, require_key
from areal_jax.serve.config import LimitsConfig
from areal_jax.serve.responses import Part
from areal_jax.serve.validation import APIError

logger = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the trained policy for agents."""

HOST = "127.0.0.1"

# Refused, because the run's own sampling settings apply to everything that is trained on.
_REFUSED = {"num_top_logprobs": "top_logprobs", "min_new_tokens": "min_tokens"}


class FinishedCall(NamedTuple):
    """A finished call: the conversation up to its answer, and the tokens of both."""

    turns: tuple[Any, ...]
    tools: tuple[dict[str, Any], ...]
    """First messages of the conversation."""
    prompt: Int32[np.ndarray, "P"]
    completion: Completion


@dataclass(slots=True, eq=False)
class Session:
    """One agent's calls of the policy: the `Backend` of its requests, and their record."""

    base_url: str
    api_key: str
    tokenizer: HFTokenizer
    _generate: Generate
    _max_new_tokens: int
    grammars: Grammars
    _finished: list[FinishedCall] = field(default_factory=list)
    _calls: list[tuple[Int32[np.ndarray, "_"], Completion]] = field(default_factory=list)
    # Requests in progress, which `close` cancels.
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def model(self) -> str:
        return MODEL

    def calls(self) -> tuple[tuple[Int32[np.ndarray, "_"], Completion], ...]:
        """Return prompt and completion of every finished call, in order of completion, with exactly
        the sampled tokens.
        """
        return tuple(self._calls)

    @property
    def unmasked_logprobs(self) -> bool:
        return True

    def serves(self, model: str) -> bool:
        return True  # agents were written for other policies

    @contextmanager
    def busy(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def prompt_of(self, chat: Chat) -> Int32[np.ndarray, "P"]:
        if chat.generation_params.images:
            raise APIError(400, "images are not supported in training", param="messages")
        call, variables = self._before(chat), chat.template_variables(self.tokenizer)
        if call is None:
            return self.tokenizer.render(chat.turns, chat.tools, variables=variables)
        answer = with_stop_token(call.completion.tokens, self.tokenizer.stop_token_ids)
        more = self.tokenizer.render_next(chat.turns[len(call.turns) :], call.tools, variables)
        return np.concatenate([call.prompt, answer, more])

    def _before(self, chat: Chat) -> FinishedCall | None:
        """Return the longest finished call that a conversation continues; None if it starts one."""
        turns = tuple(_normal(turn) for turn in chat.turns)
        before = [
            call
            for call in tuple(self._finished)
            if turns[: len(call.turns)] == call.turns and len(call.turns) < len(turns)
        ]
        return max(before, key=lambda call: len(call.turns), default=None)

    def prompt_of_text(self, text: str) -> Int32[np.ndarray, "P"]:
        return self.tokenizer.encode_prompt(text)

    async def generate(
        self,
        prompt: Int32[np.ndarray, "P"],
        generation_params: GenerationParams,
        on_progress: OnProgress | None,
    ) -> list[Completion]:
        refused = [
            name for field, name in _REFUSED.items() if generation_params.sampling.get(field)
        ]
        # The run's answers end at the tokenizer's stop tokens in any case.
        others = set(generation_params.stop_tokens) - set(self.tokenizer.stop_token_ids)
        refused += ["stop_token_ids"] * bool(others)
        if refused:
            raise APIError(400, f"{refused[0]} is not supported in training", param=refused[0])
        budget = min(generation_params.max_new_tokens or self._max_new_tokens, self._max_new_tokens)
        return await self._generate(
            prompt,
            generation_params.num_samples,
            max_new_tokens=budget,
            grammar=generation_params.sampling.get("grammar", ""),
            on_progress=on_progress,
        )

    async def score(self, prompt: Int32[np.ndarray, "P"], num_top: int) -> Completion:
        raise APIError(400, "echo with logprobs is not supported in training", param="echo")

    def reported(
        self, prompt: Int32[np.ndarray, "P"], chat: Chat | None, parts: Sequence[Part]
    ) -> None:
        self._calls += [(prompt, part.sampled) for part in parts]
        if chat is None:
            return
        before = self._before(chat)
        tools = chat.tools if before is None else before.tools
        for part in parts:
            turns = (*chat.turns, message_of(part.text, part.calls))
            self._finished.append(
                FinishedCall(tuple(_normal(turn) for turn in turns), tools, prompt, part.sampled)
            )

    def close(self) -> None:
        """Cancel the requests in progress."""
        for task in self._tasks:
            task.cancel()


def _normal(turn: Mapping[str, Any]) -> tuple[Any, ...]:
    """Normalize a turn for comparison: clients trim text, and send null for an empty one."""
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    return (
        turn["role"],
        turn["content"].strip(),
        [(call["name"], call["arguments"]) for call in calls],
    )


class AgentServer:
    """The sessions of a run: one for every running agent, each with its own URL and token."""

    def __init__(self, tokenizer: HFTokenizer, max_new_tokens: int, timeout_s: float) -> None:
        """
        Args:
            timeout_s: Time limit of an agent, and of each of its calls.
        """
        self._tokenizer, self._max_new_tokens = tokenizer, max_new_tokens
        self._timeout_s = timeout_s
        # Formats are checked here, before an engine is asked.
        self._grammars = Grammars.of(tokenizer, tokenizer.vocab_size)
        self._sessions = dict[str, Session]()
        self._port = 0

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[AgentServer]:
        """Serve agents on this machine while the body runs."""
        limits = LimitsConfig(
            max_connections=1 << 16, max_requests=1 << 16, request_timeout_s=self._timeout_s
        )
        async with listening(App(self, limits), HOST, 0, limits.shutdown_timeout_s) as self._port:
            yield self

    @asynccontextmanager
    async def open(self, generate: Generate) -> AsyncIterator[Session]:
        """Yield a session whose calls `generate` samples; afterwards it refuses calls."""
        name = secrets.token_hex(8)
        base_url = f"http://{HOST}:{self._port}/sessions/{name}/v1"
        session = Session(
            base_url,
            secrets.token_urlsafe(32),
            self._tokenizer,
            generate,
            self._max_new_tokens,
            self._grammars,
        )
        self._sessions[name] = session
        try:
            yield session
        finally:
            del self._sessions[name]
            session.close()

    def enter(self, session: str, key: str) -> Session:
        found = self._sessions.get(session)
        if found is None:
            raise APIError(404, "there is no such session, or it has ended")
        require_key(key, found.api_key, "the session's")
        return found
