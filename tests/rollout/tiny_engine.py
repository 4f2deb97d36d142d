"""An engine without a model: implements `protocols.Engine` by hashing (seed, sample, position)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.records import Completion, Request, StopReason

STOP_TOKEN = 0


@dataclass
class RunningRequest:
    """A running request; lists by sample."""

    request: Request
    answer: asyncio.Future[list[Completion]]
    tokens: list[list[int]]
    versions: list[list[int]]
    stops: list[StopReason]


@dataclass
class TinyEngine:
    """Samples one token per tick for every unfinished sample of the first `num_slots` requests."""

    version: int = 0
    num_slots: int = 8
    max_prompt_tokens: int = 16
    num_sampled: int = 0
    """Number of sampled tokens."""
    submitted: list[str] = field(default_factory=list)
    _running: dict[str, RunningRequest] = field(default_factory=dict)
    _snapshot_waiters: list[asyncio.Future[dict[str, tuple[Completion, ...]]]] = field(
        default_factory=list
    )
    _stopped: BaseException | None = None

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        if self._stopped:
            raise EngineStopped("the tiny engine stopped") from self._stopped
        if len(request.prompt_tokens) > self.max_prompt_tokens:
            raise InvalidRequest(
                f"prompt of {len(request.prompt_tokens)} tokens, "
                f"engine.max_prompt_tokens={self.max_prompt_tokens}"
            )
        assert request.id not in self._running
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        resume = request.resume or (completion([], [], "suspended"),) * request.num_samples
        self.submitted.append(request.id)
        self._running[request.id] = RunningRequest(
            request,
            answer,
            [part.tokens.tolist() for part in resume],
            [part.versions.tolist() for part in resume],
            [part.stop_reason for part in resume],
        )
        return answer

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        waiter: asyncio.Future[dict[str, tuple[Completion, ...]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._snapshot_waiters.append(waiter)
        return await waiter

    def stop(self, error: BaseException) -> None:
        self._stopped = error
        for running in self._running.values():
            running.answer.set_exception(EngineStopped("the tiny engine stopped"))
        self._running.clear()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(0)
            self.tick()
            if self._snapshot_waiters:
                # The snapshot is as of now and returned two ticks later, as from another thread.
                moment = {number: partial(running) for number, running in self._running.items()}
                waiters, self._snapshot_waiters = self._snapshot_waiters, []
                for _ in range(2):
                    await asyncio.sleep(0)
                    self.tick()
                for waiter in waiters:
                    waiter.set_result(moment)

    def tick(self) -> None:
        for running in list(self._running.values())[: self.num_slots]:
            if running.answer.cancelled():
                del self._running[running.request.id]
            elif self.version >= running.request.min_version:
                self._sample(running)
                if "suspended" not in running.stops:
                    del self._running[running.request.id]
                    running.answer.set_result(list(partial(running)))

    def _sample(self, running: RunningRequest) -> None:
        request = running.request
        for i in range(request.num_samples):
            if running.stops[i] == "suspended":
                position = len(request.prompt_tokens) + len(running.tokens[i])
                token = (
                    blake2b(f"{request.seed}/{i}/{position}".encode(), digest_size=1).digest()[0]
                    % 5
                )
                running.tokens[i].append(token)
                running.versions[i].append(self.version)
                self.num_sampled += 1
                if token == STOP_TOKEN:
                    running.stops[i] = "stop"
                elif len(running.tokens[i]) == request.sampling.max_new_tokens:
                    running.stops[i] = "length"


def partial(running: RunningRequest) -> tuple[Completion, ...]:
    return tuple(
        completion(*parts)
        for parts in zip(running.tokens, running.versions, running.stops, strict=True)
    )


def completion(tokens: list[int], versions: list[int], stop: StopReason) -> Completion:
    sampled = np.array(tokens, np.int32)
    return Completion(sampled, -sampled.astype(np.float32), np.array(versions, np.int32), stop)
