"""Engines in processes of their own, joining and leaving, that answer as one: a request outlives the engine that draws it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from areal_jax.engine.routing import Router, in_turn, together
from areal_jax.launch import wire
from areal_jax.launch.connection import Connection, PartLost
from areal_jax.records import Completion, EngineStopped, Progress, Request, nothing_drawn

logger = logging.getLogger(__name__)

MOST_ENGINES_LOST = 10
"""A request by which so many engines were lost may be what they were lost by."""

Sums = dict[str, tuple[float, float]]


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


@dataclass(eq=False)
class _Member:
    connection: Connection
    version: int
    """Of its weights, those that have arrived whole."""
    measures: Sums = field(default_factory=dict)
    """What it has reported since the last time that someone asked."""


class Engines:
    """A `records.Engine` made of any number of parts. Use it from the asyncio thread.

    When an engine is lost, its requests go on elsewhere, from what they were last reported to have drawn; where no engine is
    left they wait for one, `wait_s` at most."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._router = Router()
        self._members: dict[int, _Member] = {}
        # Engines join, and arrive at versions.
        self._changed = asyncio.Condition()
        # By request id: put by `submit`, taken out by the task that answers it.
        self._jobs: dict[str, _Job] = {}
        self._ended: EngineStopped | None = None
        self._left: Sums = {}
        """Measures of engines that are lost, which nobody has asked for yet."""
        self.num_lost = 0
        self.num_moved = 0
        """Requests that went on at another engine."""

    @property
    def connections(self) -> list[Connection]:
        """To the engines that there are."""
        return [member.connection for member in self._members.values()]

    async def join(self, number: int, connection: Connection, num_slots: int, on_loss: Callable[[int, PartLost], None]) -> None:
        """Let an engine answer from now on."""
        member = self._members[number] = _Member(connection, version=-1)
        self._router.join(number, num_slots)

        def lost(loss: PartLost) -> None:
            self._leave(number, loss)
            on_loss(number, loss)

        connection.listen(lambda topic, what: self._told(number, member, topic, what), lost)
        await self._notify()

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
        members = list(self._members.values())
        found = await asyncio.gather(*(member.connection.ask("snapshot") for member in members), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, PartLost):
                raise answer
            if not isinstance(answer, BaseException):
                for name, drawn in wire.partials_from(answer).items():
                    if name in self._jobs:
                        self._jobs[name].drawn = drawn
        return {name: job.drawn for name, job in self._jobs.items() if job.drawn}

    def cancel(self, request_id: str) -> None:
        """As `Driver.cancel`."""
        job = self._jobs.get(request_id)
        if job is not None and job.task is not None:
            job.task.cancel()

    def end_sample(self, request_id: str, sample: int) -> None:
        """As `Driver.end_sample`."""
        job = self._jobs.get(request_id)
        if job is not None and job.number in self._members:
            self._members[job.number].connection.tell("end_sample", request_id, sample)

    def offer(self, version: int, contributions: Any) -> None:
        """Tell every engine where the weights of a version are."""
        for member in self._members.values():
            member.connection.tell("offer", version, contributions)

    async def arrived(self, version: int, timeout_s: float) -> None:
        """Wait until every engine has weights of at least `version`. TimeoutError names those that have not."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: all(member.version >= version for member in self._members.values()))
        except TimeoutError:
            have = ", ".join(f"{member.connection.name} version {member.version}" for member in self._members.values())
            raise TimeoutError(
                f"waited {timeout_s:g} s for weights of version {version} to reach every engine; {have or 'there is none'}"
            ) from None

    def metrics(self) -> Sums:
        """As `Driver.metrics`, of all engines together, by their last reports."""
        measures = [member.measures for member in self._members.values()] + ([self._left] if self._left else [])
        for member in self._members.values():
            member.measures = {}
        self._left = {}
        counts = {"engines": len(self._members), "engines_lost": self.num_lost, "requests_moved": self.num_moved}
        return together([each for each in measures if each]) | {name: (float(count), 1.0) for name, count in counts.items()}

    def end(self, reason: EngineStopped) -> None:
        """Answer nothing more; whoever waits gets the reason."""
        self._ended = self._ended or reason
        for request_id in list(self._jobs):
            self.cancel(request_id)

    async def close(self) -> None:
        """End all engines."""
        self.end(EngineStopped("the decode engines are closed"))
        members, self._members = list(self._members.values()), {}
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        await asyncio.gather(*(member.connection.close() for member in members), *tasks, return_exceptions=True)

    async def _answered(self, job: _Job) -> list[Completion]:
        request = job.request
        try:
            for _ in range(MOST_ENGINES_LOST):
                number = job.number = await self._given(request)
                connection = self._members[number].connection
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
        if not self._members:
            try:
                async with asyncio.timeout(self._wait_s), self._changed:
                    await self._changed.wait_for(lambda: bool(self._members) or self._ended is not None)
            except TimeoutError:
                raise EngineStopped(f"all engines are lost, and none has joined within {self._wait_s:g} s") from None
        if self._ended is not None:
            raise self._ended
        return self._router.give(request.prompt_tokens, request.num_samples)

    def _leave(self, number: int, loss: PartLost) -> None:
        member = self._members.pop(number, None)
        if member is None:
            return
        self._router.leave(number)
        self._left = together([each for each in (self._left, member.measures) if each])
        self.num_lost += 1
        moving = sum(job.number == number for job in self._jobs.values())
        logger.warning("%s; %d requests under way there go on elsewhere", loss, moving)

    def _told(self, number: int, member: _Member, topic: str, what: Any) -> None:
        match topic:
            case "progress":
                for name, of_samples in what.items():
                    if (job := self._jobs.get(name)) is not None and job.number == number:
                        self._report(job, of_samples)
            case "weights":
                member.version = what
                self._notifying = asyncio.ensure_future(self._notify())
            case "measures":
                member.measures = in_turn(member.measures, what)
            case _:
                raise ValueError(f"{member.connection.name} tells {topic!r}, which nobody here knows")

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

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
