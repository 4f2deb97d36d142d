"""An engine without a model: keeps every promise of `records.Engine`, draws tokens by hashing
(seed, sample, position)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.records import Completion, Request, StopReason

STOP_TOKEN = 0


@dataclass
class Live:
    """A request under way; lists by sample."""

    request: Request
    answer: asyncio.Future[list[Completion]]
    tokens: list[list[int]]
    versions: list[list[int]]
    stops: list[StopReason]


@dataclass
class TinyEngine:
    """Each tick of the event loop draws one token for every unfinished sample of the first
    `num_slots` requests."""

    version: int = 0
    num_slots: int = 8
    max_prompt_tokens: int = 16
    num_sampled: int = 0
    """Tokens sampled by this engine: what resuming saves."""
    submitted: list[str] = field(default_factory=list)
    _live: dict[str, Live] = field(default_factory=dict)
    _asking: list[asyncio.Future[dict[str, tuple[Completion, ...]]]] = field(default_factory=list)
    _stopped: BaseException | None = None

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        if self._stopped:
            raise EngineStopped("the tiny engine stopped") from self._stopped
        if len(request.prompt_tokens) > self.max_prompt_tokens:
            raise InvalidRequest(
                f"prompt of {len(request.prompt_tokens)} tokens, "
                f"engine.max_prompt_tokens={self.max_prompt_tokens}"
            )
        assert request.id not in self._live
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        resume = request.resume or (completion([], [], "suspended"),) * request.num_samples
        self.submitted.append(request.id)
        self._live[request.id] = Live(
            request,
            answer,
            [part.tokens.tolist() for part in resume],
            [part.versions.tolist() for part in resume],
            [part.stop_reason for part in resume],
        )
        return answer

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        asked: asyncio.Future[dict[str, tuple[Completion, ...]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._asking.append(asked)
        return await asked

    def stop(self, error: BaseException) -> None:
        self._stopped = error
        for live in self._live.values():
            live.answer.set_exception(EngineStopped("the tiny engine stopped"))
        self._live.clear()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(0)
            self.tick()
            if self._asking:
                # The answer is of this moment, and comes two ticks late, as one from another thread
                # may.
                moment = {id: partial(live) for id, live in self._live.items()}
                asking, self._asking = self._asking, []
                for _ in range(2):
                    await asyncio.sleep(0)
                    self.tick()
                for asked in asking:
                    asked.set_result(moment)

    def tick(self) -> None:
        for live in list(self._live.values())[: self.num_slots]:
            if live.answer.cancelled():
                del self._live[live.request.id]
            elif self.version >= live.request.min_version:
                self._draw(live)
                if "suspended" not in live.stops:
                    del self._live[live.request.id]
                    live.answer.set_result(list(partial(live)))

    def _draw(self, live: Live) -> None:
        request = live.request
        for i in range(request.num_samples):
            if live.stops[i] == "suspended":
                position = len(request.prompt_tokens) + len(live.tokens[i])
                token = (
                    blake2b(f"{request.seed}/{i}/{position}".encode(), digest_size=1).digest()[0]
                    % 5
                )
                live.tokens[i].append(token)
                live.versions[i].append(self.version)
                self.num_sampled += 1
                if token == STOP_TOKEN:
                    live.stops[i] = "stop"
                elif len(live.tokens[i]) == request.sampling.max_new_tokens:
                    live.stops[i] = "length"


def partial(live: Live) -> tuple[Completion, ...]:
    return tuple(
        completion(*parts) for parts in zip(live.tokens, live.versions, live.stops, strict=True)
    )


def completion(tokens: list[int], versions: list[int], stop: StopReason) -> Completion:
    sampled = np.array(tokens, np.int32)
    return Completion(sampled, -sampled.astype(np.float32), np.array(versions, np.int32), stop)
