"""Pool of rollout engines in separate processes; a request is continued when its engine dies.

The file has more than 400 lines because of its one class.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from areal_jax.cluster import wire
from areal_jax.cluster.registry import Registry, WorkerHandle
from areal_jax.engine.routing import Router, Sums, merge_engines, merge_periods
from areal_jax.errors import EngineStopped, WorkerDied
from areal_jax.records import NO_VERSION, Completion, Progress, Request, empty_completion
from areal_jax.weights.rolling import RollingUpdate

logger = logging.getLogger(__name__)

MAX_ENGINE_DEATHS = 10
"""Number of engine deaths after which a request fails: it may be their cause."""

TICK_S = 1.0
"""Interval of the checks of engines and requests, in seconds."""

ANNOUNCE_AGAIN_S = 2.0
"""Time after which a weight update that an engine neither has nor pulls is announced again, in
seconds."""

LAG_S = 5.0
"""Time after which an engine without the newest weights gets no requests that need them if another
engine has them, in seconds."""

MOVE_QUEUED_S, MOVE_RUNNING_S = 5.0, 60.0
"""Time without a new token after which a queued or running request moves to an engine that has the
weights and slots for it, in seconds. It doubles with every move, up to 2**MOST_DOUBLINGS."""

MOST_DOUBLINGS = 5

ABSENT_S = 5.0
"""Time after which an engine that does not report a request has lost it, in seconds."""

STRAGGLER_S = 30.0
"""Time that an evaluation waits for further engines after the first one has its weights, in
seconds."""

LEAVE_S = 10.0
"""Longest wait for the tokens of an engine that leaves, in seconds; then its last report counts."""

MAX_PULL_FAILURES = 6
"""Number of failed pulls of weights that another engine has after which an engine is replaced."""


@dataclass(slots=True, eq=False)
class _Job:
    """An unfinished request."""

    request: Request
    number: int | None = None
    """Engine of the request; None while it waits for one."""
    sampled: tuple[Completion, ...] = ()
    """Reported tokens by sample; empty before the first report."""
    num_reported: Counter[int] = field(default_factory=Counter)
    """Number of tokens of each sample that the progress callback has received."""
    task: asyncio.Task[list[Completion]] | None = None
    """Task that completes the request."""
    call: asyncio.Future[Any] | None = None
    """Pending call of its engine."""
    submitted_s: float = 0.0
    """Time of submission to its engine."""
    progress_s: float = 0.0
    """Time of submission to its engine or of the last new token."""
    is_acknowledged: bool = False
    """Whether its engine has reported the request."""
    num_deaths: int = 0
    """Number of engines that died with the request since its last new token."""
    num_absent: int = 0
    """Number of successive late reports of its engine without the request."""
    is_moved: bool = False
    """Whether only the call is cancelled, so that another engine continues the request."""
    num_moves: int = 0
    next_engine: int | None = None
    """Engine to move to; its load includes the request already."""


@dataclass(slots=True, eq=False)
class _Engine:
    """State of an engine as reported."""

    num_slots: int
    outdated_since_s: float
    """Time when it joined, or when weights that it lacks were announced."""
    version: int = NO_VERSION
    """Version of its newest complete weights."""
    announced: int = NO_VERSION
    """Newest version announced to it."""
    announced_s: float = -math.inf
    pulling: int | None = None
    """Version that it last reported to pull."""
    num_pull_failures: int = 0
    """Number of successive failed pulls."""
    running: frozenset[str] = frozenset()
    """Requests with slots by its last report."""
    is_leaving: bool = False
    """Whether it gets no more requests."""
    measures: Sums = field(default_factory=dict)
    """Metrics reported since the last call of `metrics`."""


class Engines:
    """Pool of engines as one `protocols.Engine`; use it from the asyncio thread.

    When an engine dies, its requests resume on other engines from their last reported tokens;
    when it leaves, from its last ones. Without an engine they wait for one, at most `wait_s`.
    Engines swap weights in turns.

    No progress depends on a single message: the newest weights are announced to an engine until it
    has them, a request that its engine lacks is submitted again, and a request without progress
    moves to an engine that can run it.

    The class has more than 200 lines because a report of an engine changes its weights, its
    requests and their engines in one step of the event loop, on shared state.
    """

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._router = Router()
        self._registry = Registry()
        self._clock = asyncio.get_running_loop().time
        self._rolling_update = RollingUpdate(lambda: len(self._registry), self._clock)
        self._engines: dict[int, _Engine] = {}
        self._newest: tuple[int, Any] | None = None
        """Weights that every engine should have: version and shard locations."""
        self._on_update_failure: Callable[[int], None] = lambda _version: None
        self._on_assignment: Callable[[str, int], None] = lambda _request, _engine: None
        # Owned by this object: started with the first engine, cancelled by `close`.
        self._upkeep: asyncio.Task[None] | None = None
        # By request id: `submit` adds, the request's task removes.
        self._jobs: dict[str, _Job] = {}
        self._ended: EngineStopped | None = None
        self._past_measures: list[Sums] = []
        """Metrics of engines that died or left since the last call of `metrics`."""
        self.num_tokens = 0.0
        """Tokens reported by all engines since the start."""
        self.num_answered = 0
        self.num_moved = 0
        """Requests that moved to another engine."""

    @property
    def connections(self) -> list[WorkerHandle]:
        """Connections of live engines."""
        return list(self._registry.values())

    @property
    def staying(self) -> list[int]:
        """Numbers of the live engines that are not leaving, from the least loaded one on."""
        staying = [number for number, engine in self._engines.items() if not engine.is_leaving]
        return sorted(staying, key=self._router.load)

    @property
    def num_deaths(self) -> int:
        """Number of engines that died."""
        return self._registry.num_deaths

    def join(
        self, number: int, connection: WorkerHandle, num_slots: int, on_death: Callable[[], None]
    ) -> None:
        """Add an engine to the pool.

        Args:
            number: Key of the engine.
            connection: Handle of its process.
            num_slots: Number of its slots.
            on_death: Callback after its death.
        """
        self._engines[number] = _Engine(num_slots, outdated_since_s=self._clock())
        self._router.add_engine(number, num_slots)
        self._registry.join(
            number,
            connection,
            on_report=lambda topic, payload: self._handle_report(number, topic, payload),
            on_removal=lambda death: self._remove(number, death),
            on_death=on_death,
        )
        self._announce(number)
        if self._upkeep is None:
            self._upkeep = asyncio.create_task(self._run_upkeep(), name="engine upkeep")
            self._upkeep.add_done_callback(self._handle_upkeep_end)

    async def leave(self, number: int) -> None:
        """Take an engine out of the pool and end it.

        Its requests continue on the other engines from its last token; from its last report where
        it does not answer within LEAVE_S.

        Args:
            number: Key of the engine; one that is not in the pool, or leaves already, is ignored.
        """
        engine = self._engines.get(number)
        if engine is None or engine.is_leaving:
            return
        engine.is_leaving = True
        connection = self._registry[number]
        try:
            async with asyncio.timeout(LEAVE_S):
                self._take_snapshot(number, await connection.call("snapshot"))
        except (TimeoutError, WorkerDied) as error:
            logger.warning("%s leaves without its newest tokens: %r", connection.name, error)
        if self._registry.pop(number, None) is None:
            return  # It died meanwhile.
        moving = [job for job in self._jobs.values() if job.number == number]
        for job in moving:
            self._move(job, f"{connection.name} leaves")
        self._forget(number)
        logger.info("engine left: %s; moved_requests=%d", connection.name, len(moving))
        await connection.close()

    def on_update_failure(self, callback: Callable[[int], None]) -> None:
        """Set the callback for a version that an engine repeatedly failed to pull."""
        self._on_update_failure = callback

    def on_assignment(self, callback: Callable[[str, int], None]) -> None:
        """Set the callback for the id of a request and the number of its engine: the first one,
        and every one that it moves to.
        """
        self._on_assignment = callback

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Submit a request to one of the engines; it moves to others if needed.

        Raises:
            ValueError: Another unfinished request has the same id.
        """
        if request.id in self._jobs:
            raise ValueError(f"request id {request.id!r} is in use by another unfinished request")
        job = self._jobs[request.id] = _Job(request, sampled=request.resume)
        job.task = asyncio.create_task(self._complete(job), name=f"request {request.id}")
        return job.task

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """Return the partial completions of all unfinished requests.

        Each engine takes its snapshot between two dispatches. For requests of a dead engine or
        without an engine, the last reported tokens are returned.
        """
        calls = {each: self._registry[each].call("snapshot") for each in self._registry}
        answers = await asyncio.gather(*calls.values(), return_exceptions=True)
        for number, answer in zip(calls, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerDied):
                raise answer
            if not isinstance(answer, BaseException):
                self._take_snapshot(number, answer)
        return {name: job.sampled for name, job in self._jobs.items() if job.sampled}

    def _take_snapshot(self, number: int, answer: Any) -> None:
        """Keep what an engine has sampled, but for what it has reported since."""
        for name, found in wire.decode_snapshot(answer).items():
            job = self._jobs.get(name)
            if job is not None and job.number == number:
                known = job.sampled or [empty_completion()] * len(found)
                job.sampled = tuple(
                    max(pair, key=lambda each: len(each.tokens))
                    for pair in zip(found, known, strict=True)
                )

    def end_sample(self, request_id: str, sample: int) -> None:
        """Stop one sample of a request early."""
        job = self._jobs.get(request_id)
        if job is not None and job.number is not None and job.number in self._registry:
            self._registry[job.number].notify("end_sample", request_id, sample)

    def update_weights(self, version: int, contributions: Any) -> None:
        """Announce a version to all engines, including those that join later.

        Args:
            version: An older version than the newest is ignored; the same one is announced again.
            contributions: Shard locations of all trainer hosts.
        """
        if self._newest is not None and version < self._newest[0]:
            return
        now_s = self._clock()
        for engine in self._engines.values():
            if self._newest is None or engine.version >= self._newest[0]:
                engine.outdated_since_s = now_s
        self._newest = version, contributions
        for number in self._engines:
            self._announce(number, at_once=True)

    def withdraw_weights(self) -> None:
        """Announce no weights until the next `update_weights`; engines keep what they have."""
        self._newest = None

    async def wait_for_version(self, version: int, timeout_s: float) -> None:
        """Wait until every engine has weights of at least `version`.

        The wait ends STRAGGLER_S after the first engine has them: requests for the version go to
        engines that have it.

        Raises:
            TimeoutError: No engine has them within `timeout_s`; the message lists all versions.
        """
        first_s: float | None = None

        def list_ready() -> list[bool]:
            return [engine.version >= version for engine in self._engines.values()]

        def is_enough() -> bool:
            nonlocal first_s
            if any(list_ready()) and first_s is None:
                first_s = self._clock()
            return bool(self._engines) and (
                all(list_ready())
                or (first_s is not None and self._clock() - first_s >= STRAGGLER_S)
            )

        try:
            await self._registry.wait_until(is_enough, timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f"waited {timeout_s:g} s for weights of version {version} to reach every engine; "
                f"{self._versions_text() or 'there is no engine'}"
            ) from None
        if not all(list_ready()):
            logger.warning(
                "weight update incomplete, continuing: version=%d, %s",
                version,
                self._versions_text(),
            )

    def metrics(self) -> Sums:
        """Return and reset the metrics of all engines by their last reports."""
        reported = [
            each
            for each in (
                *(engine.measures for engine in self._engines.values()),
                *self._past_measures,
            )
            if each
        ]
        self._past_measures = []
        for engine in self._engines.values():
            engine.measures = {}
        counts = {
            "engines": len(self._registry),
            "engines_lost": self.num_deaths,
            "requests_moved": self.num_moved,
        }
        return merge_engines(reported) | {
            name: (float(count), 1.0) for name, count in counts.items()
        }

    def progress(self) -> Hashable:
        """Return the counts of tokens and completed requests."""
        return self.num_tokens, self.num_answered

    @property
    def is_empty(self) -> bool:
        """Whether there is no engine, so that requests wait for one, at most `wait_s`."""
        return not self._registry

    def describe_wait(self) -> str:
        """Describe the weights and requests of each engine."""
        newest = NO_VERSION if self._newest is None else self._newest[0]
        descriptions = list[str]()
        for number, engine in self._engines.items():
            jobs = [job for job in self._jobs.values() if job.number == number]
            oldest = max((job.request.min_version for job in jobs), default=NO_VERSION)
            needs = f" for version {oldest}" if oldest > engine.version else ""
            descriptions.append(
                f"{self._registry[number].name} has version {engine.version} of {newest} "
                f"(announced {engine.announced}), "
                f"{len(engine.running)} of {len(jobs)} requests run, the others wait{needs}"
            )
        num_unassigned = sum(job.number is None for job in self._jobs.values())
        return "; ".join(descriptions or ["there is no engine"]) + (
            f"; {num_unassigned} requests wait for an engine" if num_unassigned else ""
        )

    def replace_stalled(self, why: str) -> str | None:
        """Kill the engine with the request that got no token for longest.

        Returns:
            Its name; None if no engine has a request.
        """
        jobs = [
            job
            for job in self._jobs.values()
            if job.number is not None and job.number in self._registry
        ]
        if not jobs:
            return None
        job = min(jobs, key=lambda job: (job.progress_s, job.submitted_s))
        assert job.number is not None
        connection = self._registry[job.number]
        connection.mark_dead(why)
        return connection.name

    @property
    def cpu_s(self) -> float:
        """Processor time of all engines by their last reports, in seconds."""
        return sum(connection.cpu_s for connection in self._registry.values())

    async def close(self) -> None:
        """End all engines; unfinished requests raise EngineStopped."""
        self._ended = EngineStopped("the decode engines are closed")
        if self._upkeep is not None:
            self._upkeep.cancel()
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._registry.close(), *tasks, return_exceptions=True)

    async def _complete(self, job: _Job) -> list[Completion]:
        request = job.request
        task = asyncio.current_task()
        assert task is not None
        try:
            while job.num_deaths < MAX_ENGINE_DEATHS:
                number = job.number = await self._assign_engine(job)
                self._on_assignment(request.id, number)
                connection = self._registry[number]
                job.submitted_s = job.progress_s = self._clock()
                job.num_absent, job.is_moved, job.is_acknowledged = 0, False, False
                job.call = connection.call(
                    "submit", wire.encode_request(replace(request, resume=job.sampled))
                )
                try:
                    answer = wire.decode_completions(await job.call)
                    self.num_answered += 1
                    return answer
                except WorkerDied:
                    job.num_deaths += job.is_acknowledged
                except EngineStopped as stopped:
                    connection.mark_dead(str(stopped))
                    job.num_deaths += 1
                except asyncio.CancelledError:
                    if task.cancelling() or not job.is_moved:
                        raise
                finally:
                    job.number = job.call = None
                    self._router.complete(number, request.num_samples)
                self.num_moved += 1
            raise EngineStopped(f"{MAX_ENGINE_DEATHS} engines died with request {request.id!r}")
        except asyncio.CancelledError:
            if self._ended is not None:
                raise self._ended from None
            raise
        finally:
            if job.next_engine is not None:
                self._router.complete(job.next_engine, request.num_samples)
            del self._jobs[request.id]

    async def _assign_engine(self, job: _Job) -> int:
        """Choose an engine for a request; wait for one if there is none."""
        request, number = job.request, job.next_engine
        job.next_engine = None
        if number is not None and number in self._engines:
            return number
        try:
            await self._registry.wait_until(
                lambda: bool(self._registry) or self._ended is not None, self._wait_s
            )
        except TimeoutError:
            raise EngineStopped(
                f"all engines died and no engine joined within {self._wait_s:g} s"
            ) from None
        if self._ended is not None:
            raise self._ended
        now_s = self._clock()

        def is_able(number: int) -> bool:
            engine = self._engines[number]
            is_current = engine.version >= request.min_version
            return not engine.is_leaving and (is_current or now_s - engine.outdated_since_s < LAG_S)

        return self._router.route(request.prompt_tokens, request.num_samples, is_able)

    def _remove(self, number: int, death: WorkerDied) -> None:
        moving = sum(job.number == number for job in self._jobs.values())
        logger.warning("worker died: %s; moved_requests=%d", death, moving)
        self._forget(number)

    def _forget(self, number: int) -> None:
        """Remove all state of an engine that died or left."""
        self._router.remove_engine(number)
        self._rolling_update.remove_engine(number)
        self._past_measures.append(self._engines.pop(number).measures)
        self._registry.wake_waiters()

    def _handle_report(self, number: int, topic: str, payload: Any) -> None:
        engine, connection = self._engines.get(number), self._registry.get(number)
        if engine is None or connection is None:
            return
        match topic:
            case "progress":
                for name, of_samples in payload.items():
                    if (job := self._jobs.get(name)) is not None and job.number == number:
                        self._update(job, of_samples)
            case "weights":
                self._set_version(number, payload)
            case "state":
                self._set_state(number, payload)
            case "update_failed":
                self._handle_pull_failure(number, *payload)
            case "turn_requested":
                self._rolling_update.request_turn(
                    number, payload, lambda ticket: connection.notify("grant_turn", ticket)
                )
            case "turn_ended":
                self._rolling_update.end_turn(number, payload)
            case "measures":
                self.num_tokens += payload.get("tokens", (0.0, 1.0))[0]
                engine.measures = merge_periods(engine.measures, payload)
            case _:
                raise ValueError(f"expected a known topic, found {topic!r} from {connection.name}")

    def _set_version(self, number: int, version: int) -> None:
        """Record that an engine has weights of a version."""
        engine = self._engines[number]
        if version > engine.version:
            engine.version, engine.num_pull_failures = version, 0
            self._registry.wake_waiters()

    def _set_state(self, number: int, state: Mapping[str, Any]) -> None:
        """Record an engine's report of its weights and requests."""
        engine = self._engines[number]
        self._set_version(number, state["version"])
        engine.pulling, engine.running = state["pulling"], frozenset(state["running"])
        known, now_s = set(state["requests"]), self._clock()
        for job in [job for job in self._jobs.values() if job.number == number]:
            if job.request.id in known:
                job.num_absent, job.is_acknowledged = 0, True
            elif now_s - job.submitted_s < ABSENT_S:
                job.num_absent = 0
            else:
                job.num_absent += 1
            if job.num_absent > 1:
                self._move(job, f"{self._registry[number].name} does not report it")

    def _handle_pull_failure(self, number: int, version: int, why: str) -> None:
        """Handle a failed pull: announce or publish the version again, or replace the engine."""
        engine, connection = self._engines[number], self._registry[number]
        if engine.version >= version or self._newest is None or version != self._newest[0]:
            return
        engine.num_pull_failures += 1
        engine.pulling = None
        elsewhere = any(other.version >= version for other in self._engines.values())
        if elsewhere and engine.num_pull_failures >= MAX_PULL_FAILURES:
            connection.mark_dead(
                f"it failed {engine.num_pull_failures} times to pull weights of version {version}, "
                f"which another engine has: {why}"
            )
        elif engine.num_pull_failures % 2 == 0:
            self._on_update_failure(version)

    def _announce(self, number: int, *, at_once: bool = False) -> None:
        """Announce the newest weights to an engine that neither has nor pulls them."""
        engine, now_s = self._engines[number], self._clock()
        if self._newest is None or engine.version >= self._newest[0]:
            return
        is_due = (
            now_s - engine.announced_s >= ANNOUNCE_AGAIN_S and engine.pulling != self._newest[0]
        )
        if at_once or engine.announced < self._newest[0] or is_due:
            engine.announced, engine.announced_s, engine.pulling = self._newest[0], now_s, None
            self._registry[number].notify("update_weights", *self._newest)

    async def _run_upkeep(self) -> None:
        """Periodically announce weights, grant turns and move requests without progress."""
        while True:
            await asyncio.sleep(TICK_S)
            self._rolling_update.grant_turns()
            for number in list(self._engines):
                self._announce(number)
            for job in list(self._jobs.values()):
                if job.call is not None and not job.call.done():
                    self._move_if_stalled(job)
            self._registry.wake_waiters()

    def _handle_upkeep_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("%s failed", task.get_name(), exc_info=error)
        self._ended = EngineStopped(f"{task.get_name()} failed: {error}")
        for job in self._jobs.values():
            if job.task is not None:
                job.task.cancel()

    def _move_if_stalled(self, job: _Job) -> None:
        """Move a request without progress to an engine that has the weights and slots for it."""
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
            is_able = engine.version >= request.min_version and not engine.is_leaving
            if other != number and is_able and has_room:
                job.num_moves += 1
                job.next_engine = self._router.assign(
                    other, request.prompt_tokens, request.num_samples
                )
                self._move(
                    job,
                    (
                        f"no progress on {self._registry[number].name}, "
                        f"{self._registry[other].name} has weights and slots for it"
                    ),
                )
                return

    def _move(self, job: _Job, why: str) -> None:
        """Cancel a request's call, so that it is submitted again."""
        if job.call is not None and not job.is_moved:
            logger.info("moving request: id=%s, %s", job.request.id, why)
            job.is_moved = True
            job.call.cancel()

    def _versions_text(self) -> str:
        return ", ".join(
            f"{self._registry[number].name} version {engine.version}"
            for number, engine in self._engines.items()
        )

    def _update(self, job: _Job, of_samples: Mapping[int, Any]) -> None:
        """Append newly reported tokens of a request and call its progress callback."""
        sampled = list(job.sampled) or [empty_completion()] * job.request.num_samples
        news = list[Progress]()
        job.progress_s, job.is_acknowledged = self._clock(), True
        for sample, (start, plain) in of_samples.items():
            more = wire.decode_completion(plain)
            if not start <= len(sampled[sample].tokens) <= start + len(more.tokens):
                continue  # An earlier report is missing, or this one is late.
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
