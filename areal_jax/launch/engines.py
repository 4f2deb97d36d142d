"""Engines in processes of their own, joining and leaving, that answer as one: a request outlives the engine that draws it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from areal_jax.engine.routing import Router, Sums, in_turn, together
from areal_jax.launch import wire
from areal_jax.launch.connection import Connection, PartLost
from areal_jax.launch.members import Members
from areal_jax.records import NO_VERSION, Completion, EngineStopped, Progress, Request, nothing_drawn
from areal_jax.weights.rolling import Turns

logger = logging.getLogger(__name__)

MOST_ENGINES_LOST = 10
"""A request by which so many engines were lost may be what they were lost by."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request of ours, until it is answered."""

    request: Request
    number: int | None = None
    """Of the engine that has it; None while there is none."""
    drawn: tuple[Completion, ...] = ()
    """What is known to be drawn, by sample; nothing before the first report."""
    num_told: Counter[int] = field(default_factory=Counter)
    """Tokens of each sample that whoever asked has been told of."""
    task: asyncio.Task[list[Completion]] | None = None
    """What answers it."""


class Engines:
    """A `records.Engine` made of any number of parts. Use it from the asyncio thread.

    When an engine is lost, its requests go on elsewhere, from what they were last reported to have drawn; where no engine is
    left they wait for one, `wait_s` at most. New weights they take in turns."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._router = Router()
        self._members = Members()
        self._turns = Turns(lambda: len(self._members))
        # Of each: the version of its weights, those that have arrived whole; and what it has reported since someone asked.
        self._versions: dict[int, int] = {}
        self._measures: dict[int, Sums] = {}
        # By request id: put by `submit`, taken out by the task that answers it.
        self._jobs: dict[str, _Job] = {}
        self._ended: EngineStopped | None = None
        self._left: list[Sums] = []
        """Measures of engines that are lost, which nobody has asked for yet."""
        self.num_moved = 0
        """Requests that went on at another engine."""

    @property
    def connections(self) -> list[Connection]:
        """To the engines that there are."""
        return list(self._members.values())

    @property
    def num_lost(self) -> int:
        return self._members.num_lost

    def join(self, number: int, connection: Connection, num_slots: int, on_loss: Callable[[], None]) -> None:
        """Let an engine answer from now on."""
        self._versions[number], self._measures[number] = NO_VERSION, {}
        self._router.join(number, num_slots)
        self._members.join(
            number,
            connection,
            told=lambda topic, what: self._told(number, topic, what),
            left=lambda loss: self._leave(number, loss),
            on_loss=on_loss,
        )

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """As `Driver.submit`, by one of the engines after another."""
        if request.id in self._jobs:
            raise ValueError(f"request id {request.id!r} is in use by another unfinished request")
        job = self._jobs[request.id] = _Job(request, drawn=request.resume)
        job.task = asyncio.create_task(self._answered(job), name=f"request {request.id}")
        return job.task

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """As `Driver.snapshot`, of every engine between two dispatches of its own.

        Of one that is lost meanwhile, and of requests that wait for an engine, what is known of them."""
        asked = [connection.ask("snapshot") for connection in self._members.values()]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, PartLost):
                raise answer
            if not isinstance(answer, BaseException):
                for name, drawn in wire.partials_from(answer).items():
                    if name in self._jobs:
                        self._jobs[name].drawn = drawn
        return {name: job.drawn for name, job in self._jobs.items() if job.drawn}

    def end_sample(self, request_id: str, sample: int) -> None:
        """As `Driver.end_sample`."""
        job = self._jobs.get(request_id)
        if job is not None and job.number is not None and job.number in self._members:
            self._members[job.number].tell("end_sample", request_id, sample)

    def offer(self, version: int, contributions: Any) -> None:
        """Tell every engine where the weights of a version are."""
        for connection in self._members.values():
            connection.tell("offer", version, contributions)

    async def arrived(self, version: int, timeout_s: float) -> None:
        """Wait until every engine has weights of at least `version`. TimeoutError names those that have not."""
        try:
            await self._members.until(lambda: all(has >= version for has in self._versions.values()), timeout_s)
        except TimeoutError:
            have = ", ".join(f"{self._members[number].name} version {has}" for number, has in self._versions.items())
            raise TimeoutError(
                f"waited {timeout_s:g} s for weights of version {version} to reach every engine; {have or 'there is none'}"
            ) from None

    def metrics(self) -> Sums:
        """As `Driver.metrics`, of all engines together, by their last reports."""
        reported = [each for each in (*self._measures.values(), *self._left) if each]
        self._measures, self._left = {number: {} for number in self._measures}, []
        counts = {"engines": len(self._members), "engines_lost": self.num_lost, "requests_moved": self.num_moved}
        return together(reported) | {name: (float(count), 1.0) for name, count in counts.items()}

    async def close(self) -> None:
        """End all engines; whoever waits for an answer gets EngineStopped."""
        self._ended = EngineStopped("the decode engines are closed")
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._members.close(), *tasks, return_exceptions=True)

    async def _answered(self, job: _Job) -> list[Completion]:
        request = job.request
        try:
            for _ in range(MOST_ENGINES_LOST):
                number = job.number = await self._given(request)
                connection = self._members[number]
                try:
                    answer = await connection.ask("submit", wire.request_to(replace(request, resume=job.drawn)))
                    return wire.completions_from(answer)
                except PartLost:
                    self.num_moved += 1
                except EngineStopped as stopped:
                    connection.give_up(str(stopped))
                    self.num_moved += 1
                finally:
                    job.number = None
                    self._router.done(number, request.num_samples)
            raise EngineStopped(f"request {request.id!r} was given to {MOST_ENGINES_LOST} engines, and each of them was lost")
        except asyncio.CancelledError:
            if self._ended is not None:
                raise self._ended from None
            raise
        finally:
            del self._jobs[request.id]

    async def _given(self, request: Request) -> int:
        """The engine that is to answer; waited for, where there is none."""
        try:
            await self._members.until(lambda: bool(self._members) or self._ended is not None, self._wait_s)
        except TimeoutError:
            raise EngineStopped(f"all engines are lost, and none has joined within {self._wait_s:g} s") from None
        if self._ended is not None:
            raise self._ended
        return self._router.give(request.prompt_tokens, request.num_samples)

    def _leave(self, number: int, loss: PartLost) -> None:
        self._router.leave(number)
        self._turns.over(number)
        del self._versions[number]
        self._left.append(self._measures.pop(number))
        moving = sum(job.number == number for job in self._jobs.values())
        logger.warning("%s; %d requests under way there go on elsewhere", loss, moving)

    def _told(self, number: int, topic: str, what: Any) -> None:
        match topic:
            case "progress":
                for name, of_samples in what.items():
                    if (job := self._jobs.get(name)) is not None and job.number == number:
                        self._report(job, of_samples)
            case "weights":
                self._versions[number] = what
                self._members.notify()
            case "wants_turn":
                if (connection := self._members.get(number)) is not None:
                    self._turns.ask(number, lambda: connection.tell("turn"))
            case "swapped":
                self._turns.over(number)
            case "measures":
                self._measures[number] = in_turn(self._measures[number], what)
            case _:
                raise ValueError(f"{self._members[number].name} tells {topic!r}, which nobody here knows")

    def _report(self, job: _Job, of_samples: Mapping[int, Any]) -> None:
        """Take over what samples have drawn since the last report, and tell whoever watches."""
        drawn = list(job.drawn) or [nothing_drawn()] * job.request.num_samples
        news = list[Progress]()
        for sample, (start, plain) in of_samples.items():
            more = wire.completion_from(plain)
            drawn[sample] = drawn[sample].between(0, start).followed_by(more)
            told = job.num_told[sample]
            if len(drawn[sample].tokens) > told:
                news.append(Progress(sample, drawn[sample].between(told)))
                job.num_told[sample] = len(drawn[sample].tokens)
        job.drawn = tuple(drawn)
        if job.request.on_progress is not None and news:
            for sample in job.request.on_progress(news):
                self.end_sample(job.request.id, sample)
