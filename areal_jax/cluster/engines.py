"""Engines in processes of their own, joining and leaving, that answer as one: a request outlives
the engine that draws it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from areal_jax.cluster import wire
from areal_jax.cluster.registry import Channel, Registry
from areal_jax.engine.routing import Router, Sums, in_turn, together
from areal_jax.errors import EngineStopped, WorkerDied
from areal_jax.records import NO_VERSION, Completion, Progress, Request, empty_completion
from areal_jax.weights.rolling import RollingUpdate

logger = logging.getLogger(__name__)

MAX_ENGINE_DEATHS = 10
"""A request that so many engines had when they were lost may be what they were lost by."""

TICK_S = 1.0
"""Interval at which engines and requests are compared with what they should have."""

OFFER_AGAIN_S = 2.0
"""An engine that neither has a weight update nor is pulling it is offered it again after so
long."""

LAG_S = 5.0
"""An engine that has not got the newest weights within so long is given no requests that need them,
where another has them."""

MOVE_QUEUED_S, MOVE_RUNNING_S = 5.0, 60.0
"""A request without a new token for so long, waiting in its engine or running there, moves to an
engine that has the weights and the slots for it. The time doubles with every move, up to
2**MOST_DOUBLINGS."""

MOST_DOUBLINGS = 5

ABSENT_S = 5.0
"""An engine that says so long after it was given a request that it does not have it has lost it."""

STRAGGLER_S = 30.0
"""An evaluation waits so long for engines that are later than the first to have its weights."""

MOST_SKIPS = 6
"""An engine that has failed so often to pull weights that another engine has is replaced."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request of ours, until it is answered."""

    request: Request
    number: int | None = None
    """Of the engine that has it; None while there is none."""
    sampled: tuple[Completion, ...] = ()
    """What is known to be sampled, by sample; nothing before the first report."""
    num_reported: Counter[int] = field(default_factory=Counter)
    """Tokens of each sample that whoever asked has been told of."""
    task: asyncio.Task[list[Completion]] | None = None
    """What answers it."""
    asked: asyncio.Future[Any] | None = None
    """What its engine answers."""
    given_s: float = 0.0
    """When its engine was given it."""
    progress_s: float = 0.0
    """When its engine was given it or last reported a new token of it."""
    is_held: bool = False
    """Whether its engine has said that it has it."""
    num_deaths: int = 0
    """Engines that were lost while they had it, since it last got a new token."""
    num_absent: int = 0
    """Successive reports of its engine, late enough to name it, that do not."""
    is_moved: bool = False
    """Whether what is cancelled is its engine's answer alone, for another engine to give."""
    num_moves: int = 0
    to: int | None = None
    """The engine that it moves to, whose load it is part of already."""


@dataclass(slots=True, eq=False)
class _Engine:
    """What is known of an engine."""

    num_slots: int
    lacks_since_s: float
    """When it joined, or when weights were offered that it has not got."""
    version: int = NO_VERSION
    """Of its weights, those that have arrived whole."""
    offered: int = NO_VERSION
    """The newest version that it was offered."""
    offered_s: float = -math.inf
    pulling: int | None = None
    """The version that it last said it was pulling."""
    num_skips: int = 0
    """How often in succession it could not take the version it was offered."""
    running: frozenset[str] = frozenset()
    """Requests that it last said have slots."""
    measures: Sums = field(default_factory=dict)
    """What it has reported since someone asked."""


class Engines:
    """A `records.Engine` made of any number of parts. Use it from the asyncio thread.

    When an engine is lost, its requests go on elsewhere, from what they were last reported to have
    sampled; where no engine is left they wait for one, `wait_s` at most. New weights they take in
    turns.

    Nothing depends on a message that is sent once: every engine is offered the newest weights until
    it has them, a request that its engine does not have is given again, and one that does not
    progress moves to an engine that can draw it."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._router = Router()
        self._registry = Registry()
        self._clock = asyncio.get_running_loop().time
        self._turns = RollingUpdate(lambda: len(self._registry), self._clock)
        self._engines: dict[int, _Engine] = {}
        self._newest: tuple[int, Any] | None = None
        """The weights that every engine shall have: version and where they are."""
        self._skipped: Callable[[int], None] = lambda _version: None
        # Owned by this object: begun with the first engine, cancelled by `close`.
        self._ticker: asyncio.Task[None] | None = None
        # By request id: put by `submit`, taken out by the task that answers it.
        self._jobs: dict[str, _Job] = {}
        self._ended: EngineStopped | None = None
        self._left: list[Sums] = []
        """Measures of engines that are lost, which nobody has asked for yet."""
        self.num_tokens = 0.0
        """Reported by all engines so far."""
        self.num_answered = 0
        self.num_moved = 0
        """Requests that went on at another engine."""

    @property
    def connections(self) -> list[Channel]:
        """To the engines that there are."""
        return list(self._registry.values())

    @property
    def num_deaths(self) -> int:
        return self._registry.num_deaths

    def join(
        self, number: int, connection: Channel, num_slots: int, on_loss: Callable[[], None]
    ) -> None:
        """Let an engine answer from now on."""
        self._engines[number] = _Engine(num_slots, lacks_since_s=self._clock())
        self._router.join(number, num_slots)
        self._registry.join(
            number,
            connection,
            reported=lambda topic, what: self._reported(number, topic, what),
            left=lambda loss: self._leave(number, loss),
            on_loss=on_loss,
        )
        self._bring(number)
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick(), name="engine upkeep")
            self._ticker.add_done_callback(self._tick_ended)

    def on_skip(self, skipped: Callable[[int], None]) -> None:
        """Whom to tell of a version that an engine was offered and repeatedly could not take."""
        self._skipped = skipped

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """As `EngineLoop.submit`, by one of the engines after another."""
        if request.id in self._jobs:
            raise ValueError(f"request id {request.id!r} is in use by another unfinished request")
        job = self._jobs[request.id] = _Job(request, sampled=request.resume)
        job.task = asyncio.create_task(self._answered(job), name=f"request {request.id}")
        return job.task

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """As `EngineLoop.snapshot`, of every engine between two dispatches of its own.

        Of one that is lost meanwhile, and of requests that wait for an engine, what is known of
        them."""
        asked = [connection.ask("snapshot") for connection in self._registry.values()]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerDied):
                raise answer
            if not isinstance(answer, BaseException):
                for name, sampled in wire.partials_from(answer).items():
                    if name in self._jobs:
                        self._jobs[name].sampled = sampled
        return {name: job.sampled for name, job in self._jobs.items() if job.sampled}

    def end_sample(self, request_id: str, sample: int) -> None:
        """As `EngineLoop.end_sample`."""
        job = self._jobs.get(request_id)
        if job is not None and job.number is not None and job.number in self._registry:
            self._registry[job.number].tell("end_sample", request_id, sample)

    def offer(self, version: int, contributions: Any) -> None:
        """From now on every engine shall have the weights of this version, also one that joins.
        Args: contributions: where they are. An older version is left alone; the same one may be
        given anew."""
        if self._newest is not None and version < self._newest[0]:
            return
        now_s = self._clock()
        for engine in self._engines.values():
            if self._newest is None or engine.version >= self._newest[0]:
                engine.lacks_since_s = now_s
        self._newest = version, contributions
        for number in self._engines:
            self._bring(number, at_once=True)

    async def arrived(self, version: int, timeout_s: float) -> None:
        """Wait until every engine has weights of at least `version`. TimeoutError names those that
        have not.

        Engines that are STRAGGLER_S later than the first are not waited for: requests for the
        version go to those that have it."""
        first_s: float | None = None

        def have() -> list[bool]:
            return [engine.version >= version for engine in self._engines.values()]

        def is_enough() -> bool:
            nonlocal first_s
            if any(have()) and first_s is None:
                first_s = self._clock()
            return bool(self._engines) and (
                all(have()) or (first_s is not None and self._clock() - first_s >= STRAGGLER_S)
            )

        try:
            await self._registry.until(is_enough, timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"waited {timeout_s:g} s for weights of version {version} to reach every engine; "
                f"{self._versions_text() or 'there is none'}"
            ) from None
        if not all(have()):
            logger.warning(
                "not every engine has weights of version %d, continuing: %s",
                version,
                self._versions_text(),
            )

    def metrics(self) -> Sums:
        """As `EngineLoop.metrics`, of all engines together, by their last reports."""
        reported = [
            each
            for each in (*(engine.measures for engine in self._engines.values()), *self._left)
            if each
        ]
        self._left = []
        for engine in self._engines.values():
            engine.measures = {}
        counts = {
            "engines": len(self._registry),
            "engines_lost": self.num_deaths,
            "requests_moved": self.num_moved,
        }
        return together(reported) | {name: (float(count), 1.0) for name, count in counts.items()}

    def progress(self) -> Hashable:
        """As `Waits.progress`: tokens and answers."""
        return self.num_tokens, self.num_answered

    @property
    def is_empty(self) -> bool:
        """Whether requests wait for an engine to join, `wait_s` at most."""
        return not self._registry

    def waits(self) -> str:
        """As `Waits.waits`: of each engine its weights and its requests."""
        newest = NO_VERSION if self._newest is None else self._newest[0]
        said = list[str]()
        for number, engine in self._engines.items():
            jobs = [job for job in self._jobs.values() if job.number == number]
            oldest = max((job.request.min_version for job in jobs), default=NO_VERSION)
            needs = f" for version {oldest}" if oldest > engine.version else ""
            said.append(
                f"{self._registry[number].name} has version {engine.version} of {newest} "
                f"(offered {engine.offered}), "
                f"{len(engine.running)} of {len(jobs)} requests run, the others wait{needs}"
            )
        nowhere = sum(job.number is None for job in self._jobs.values())
        return "; ".join(said or ["there is no engine"]) + (
            f"; {nowhere} requests wait for an engine" if nowhere else ""
        )

    def replace_stalled(self, why: str) -> str | None:
        """Give up the engine whose request got no token for longest; its name, or None where no
        engine has a request."""
        jobs = [
            job
            for job in self._jobs.values()
            if job.number is not None and job.number in self._registry
        ]
        if not jobs:
            return None
        job = min(jobs, key=lambda job: (job.progress_s, job.given_s))
        assert job.number is not None
        connection = self._registry[job.number]
        connection.give_up(why)
        return connection.name

    @property
    def cpu_s(self) -> float:
        """Processor time of all engines, as far as they have reported it."""
        return sum(connection.cpu_s for connection in self._registry.values())

    async def close(self) -> None:
        """End all engines; whoever waits for an answer gets EngineStopped."""
        self._ended = EngineStopped("the decode engines are closed")
        if self._ticker is not None:
            self._ticker.cancel()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._registry.close(), *tasks, return_exceptions=True)

    async def _answered(self, job: _Job) -> list[Completion]:
        request = job.request
        here = asyncio.current_task()
        assert here is not None
        try:
            while job.num_deaths < MAX_ENGINE_DEATHS:
                number = job.number = await self._given(job)
                connection = self._registry[number]
                job.given_s = job.progress_s = self._clock()
                job.num_absent, job.is_moved, job.is_held = 0, False, False
                job.asked = connection.ask(
                    "submit", wire.request_to(replace(request, resume=job.sampled))
                )
                try:
                    answer = wire.completions_from(await job.asked)
                    self.num_answered += 1
                    return answer
                except WorkerDied:
                    job.num_deaths += job.is_held
                except EngineStopped as stopped:
                    connection.give_up(str(stopped))
                    job.num_deaths += 1
                except asyncio.CancelledError:
                    if here.cancelling() or not job.is_moved:
                        raise
                finally:
                    job.number = job.asked = None
                    self._router.done(number, request.num_samples)
                self.num_moved += 1
            raise EngineStopped(
                f"request {request.id!r} was at {MAX_ENGINE_DEATHS} engines, and each of them "
                "was lost"
            )
        except asyncio.CancelledError:
            if self._ended is not None:
                raise self._ended from None
            raise
        finally:
            if job.to is not None:
                self._router.done(job.to, request.num_samples)
            del self._jobs[request.id]

    async def _given(self, job: _Job) -> int:
        """The engine that is to answer; waited for, where there is none."""
        request, to = job.request, job.to
        job.to = None
        if to is not None and to in self._engines:
            return to
        try:
            await self._registry.until(
                lambda: bool(self._registry) or self._ended is not None, self._wait_s
            )
        except TimeoutError:
            raise EngineStopped(
                f"all engines are lost, and none has joined within {self._wait_s:g} s"
            ) from None
        if self._ended is not None:
            raise self._ended
        now_s = self._clock()
        able = [
            number
            for number, engine in self._engines.items()
            if engine.version >= request.min_version or now_s - engine.lacks_since_s < LAG_S
        ]
        return self._router.give(request.prompt_tokens, request.num_samples, able)

    def _leave(self, number: int, loss: WorkerDied) -> None:
        self._router.leave(number)
        self._turns.leave(number)
        self._left.append(self._engines.pop(number).measures)
        moving = sum(job.number == number for job in self._jobs.values())
        logger.warning("%s; %d requests under way there go on elsewhere", loss, moving)
        self._registry.notify()

    def _reported(self, number: int, topic: str, what: Any) -> None:
        engine, connection = self._engines.get(number), self._registry.get(number)
        if engine is None or connection is None:
            return
        match topic:
            case "progress":
                for name, of_samples in what.items():
                    if (job := self._jobs.get(name)) is not None and job.number == number:
                        self._report(job, of_samples)
            case "weights":
                self._has(number, what)
            case "state":
                self._state(number, what)
            case "skipped":
                self._skip(number, *what)
            case "wants_turn":
                self._turns.ask(number, what, lambda ticket: connection.tell("turn", ticket))
            case "swapped":
                self._turns.over(number, what)
            case "measures":
                self.num_tokens += what.get("tokens", (0.0, 1.0))[0]
                engine.measures = in_turn(engine.measures, what)
            case _:
                raise ValueError(f"{connection.name} tells {topic!r}, which nobody here knows")

    def _has(self, number: int, version: int) -> None:
        """An engine has weights of a version."""
        engine = self._engines[number]
        if version > engine.version:
            engine.version, engine.num_skips = version, 0
            self._registry.notify()

    def _state(self, number: int, state: Mapping[str, Any]) -> None:
        """Take over what an engine says of itself: its weights, and its requests."""
        engine = self._engines[number]
        self._has(number, state["version"])
        engine.pulling, engine.running = state["pulling"], frozenset(state["running"])
        held, now_s = set(state["requests"]), self._clock()
        for job in [job for job in self._jobs.values() if job.number == number]:
            if job.request.id in held:
                job.num_absent, job.is_held = 0, True
            elif now_s - job.given_s < ABSENT_S:
                job.num_absent = 0
            else:
                job.num_absent += 1
            if job.num_absent > 1:
                self._move(job, f"{self._registry[number].name} does not have it")

    def _skip(self, number: int, version: int, why: str) -> None:
        """An engine could not take a version: it is offered again, or had anew, or the engine is
        replaced."""
        engine, connection = self._engines[number], self._registry[number]
        if engine.version >= version or self._newest is None or version != self._newest[0]:
            return
        engine.num_skips += 1
        engine.pulling = None
        elsewhere = any(other.version >= version for other in self._engines.values())
        if elsewhere and engine.num_skips >= MOST_SKIPS:
            connection.give_up(
                f"it failed {engine.num_skips} times to take weights of version {version}, "
                f"another did not: {why}"
            )
        elif engine.num_skips % 2 == 0:
            self._skipped(version)

    def _bring(self, number: int, *, at_once: bool = False) -> None:
        """Offer an engine the newest weights, if it has not got them and is not pulling them."""
        engine, now_s = self._engines[number], self._clock()
        if self._newest is None or engine.version >= self._newest[0]:
            return
        is_due = now_s - engine.offered_s >= OFFER_AGAIN_S and engine.pulling != self._newest[0]
        if at_once or engine.offered < self._newest[0] or is_due:
            engine.offered, engine.offered_s, engine.pulling = self._newest[0], now_s, None
            self._registry[number].tell("offer", *self._newest)

    async def _tick(self) -> None:
        """Compare, every so often, what engines and requests have with what they should have."""
        while True:
            await asyncio.sleep(TICK_S)
            self._turns.grant()
            for number in list(self._engines):
                self._bring(number)
            for job in list(self._jobs.values()):
                if job.asked is not None and not job.asked.done():
                    self._move_if_idle(job)
            self._registry.notify()

    def _tick_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("%s failed", task.get_name(), exc_info=error)
        self._ended = EngineStopped(f"{task.get_name()} failed: {error}")
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()

    def _move_if_idle(self, job: _Job) -> None:
        """Move a request that its engine does not work on to one that has the weights and the slots
        for it."""
        request, number = job.request, job.number
        assert number is not None
        patience_s = (
            MOVE_RUNNING_S if request.id in self._engines[number].running else MOVE_QUEUED_S
        )
        if self._clock() - job.progress_s < patience_s * 2 ** min(job.num_moves, MOST_DOUBLINGS):
            return
        for other, engine in self._engines.items():
            load = self._router.load(other)
            has_room = load == 0 or load + request.num_samples <= engine.num_slots
            if other != number and engine.version >= request.min_version and has_room:
                job.num_moves += 1
                job.to = self._router.give(request.prompt_tokens, request.num_samples, [other])
                self._move(
                    job,
                    (
                        f"{self._registry[number].name} does not work on it, "
                        f"{self._registry[other].name} can"
                    ),
                )
                return

    def _move(self, job: _Job, why: str) -> None:
        """Let another engine answer a request, or the same once more."""
        if job.asked is not None and not job.is_moved:
            logger.info("request %s moves: %s", job.request.id, why)
            job.is_moved = True
            job.asked.cancel()

    def _versions_text(self) -> str:
        return ", ".join(
            f"{self._registry[number].name} version {engine.version}"
            for number, engine in self._engines.items()
        )

    def _report(self, job: _Job, of_samples: Mapping[int, Any]) -> None:
        """Take over what samples have sampled since the last report, and tell whoever watches."""
        sampled = list(job.sampled) or [empty_completion()] * job.request.num_samples
        news = list[Progress]()
        job.progress_s, job.is_held = self._clock(), True
        for sample, (start, plain) in of_samples.items():
            more = wire.completion_from(plain)
            if not start <= len(sampled[sample].tokens) <= start + len(more.tokens):
                continue  # A report before this one is missing, or this one is late.
            job.num_deaths = 0
            sampled[sample] = sampled[sample].slice(0, start).concatenate(more)
            reported = job.num_reported[sample]
            if len(sampled[sample].tokens) > reported:
                news.append(Progress(sample, sampled[sample].slice(reported)))
                job.num_reported[sample] = len(sampled[sample].tokens)
        job.sampled = tuple(sampled)
        if job.request.on_progress is not None and news:
            for sample in job.request.on_progress(news):
                self.end_sample(job.request.id, sample)
