"""Several decode engines of one process behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.routing import Router, Sums, merge_engines
from areal_jax.records import Completion, Progress, Request


@dataclass(slots=True, eq=False)
class _Job:
    """An unfinished request."""

    request: Request
    answer: asyncio.Future[list[Completion]]
    number: int = -1
    """Engine of the request."""
    num_reported: dict[int, int] = field(default_factory=dict)
    """Number of tokens of each sample that the progress callback has received."""


class Fleet:
    """The local `records.Engine`: one engine loop or several, on meshes of their own.

    The requests of an engine that leaves continue on the others from their last token. Use it from
    the asyncio thread.
    """

    def __init__(self, loops: Sequence[EngineLoop]):
        self._loops, self._router = dict[int, EngineLoop](), Router()
        self._on_assignment: Callable[[str, int], None] = lambda _request, _engine: None
        # `submit` adds, the completion of the request removes.
        self._jobs = set[_Job]()
        self._past_metrics: list[Sums] = []
        """Metrics of engines that left since the last call of `metrics`."""
        self.num_moved = 0
        """Requests that moved to another engine."""
        for number, loop in enumerate(loops):
            self.add_engine(number, loop)

    def start(self) -> None:
        """Start the threads."""
        for loop in self._loops.values():
            loop.start()

    def close(self) -> None:
        """Close all engine loops; unfinished requests fail with EngineStopped."""
        for loop in self._loops.values():
            loop.close()

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self._loops)

    def add_engine(self, number: int, loop: EngineLoop) -> None:
        """Route requests to one more engine loop."""
        self._loops[number] = loop
        self._router.add_engine(number, loop.num_slots)

    async def remove_engine(self, number: int) -> None:
        """Move an engine's requests to the others, and close its loop."""
        loop = self._loops.pop(number)
        self._router.remove_engine(number)
        moving = [job.request.id for job in self._jobs if job.number == number]
        # `_finish` submits them again; those that finish before are not suspended.
        await asyncio.gather(*map(loop.suspend, moving), return_exceptions=True)
        await asyncio.to_thread(loop.close)
        self._past_metrics.append(loop.metrics())

    def on_assignment(self, callback: Callable[[str, int], None]) -> None:
        """Set the callback for the id of every request and the number of its engine."""
        self._on_assignment = callback

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Submit a request to one of the engine loops, as `EngineLoop.submit`."""
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._send(job, request)
        self._jobs.add(job)
        return job.answer

    def _send(self, job: _Job, request: Request) -> None:
        num_samples = request.num_samples
        number = job.number = self._router.route(request.prompt_tokens, num_samples)
        try:
            call = self._loops[number].submit(self._unreported(job, request))
        except BaseException:
            self._router.complete(number, num_samples)
            raise
        self._on_assignment(request.id, number)
        call.add_done_callback(lambda call: self._finish(job, number, call))
        job.answer.add_done_callback(lambda answer: call.cancel() if answer.cancelled() else None)

    def _finish(self, job: _Job, number: int, call: asyncio.Future[list[Completion]]) -> None:
        """Pass the result of a call on, or submit the request again if its engine leaves."""
        self._router.complete(number, job.request.num_samples)
        error = None if call.cancelled() else call.exception()
        if not job.answer.done() and not call.cancelled():
            if error is not None:
                job.answer.set_exception(error)
            elif number in self._loops or all(
                completion.stop_reason != "suspended" for completion in call.result()
            ):
                job.answer.set_result(call.result())
            else:
                self.num_moved += 1
                self._send(job, replace(job.request, resume=tuple(call.result())))
                return
        self._jobs.discard(job)

    def _unreported(self, job: _Job, request: Request) -> Request:
        """Return a request that reports what its earlier engines have not reported."""
        if (on_progress := request.on_progress) is None:
            return request
        repeated = dict(job.num_reported)

        def report(news: Sequence[Progress]) -> Iterable[int]:
            fresh = [
                Progress(each.sample, each.sampled.slice(repeated.pop(each.sample, 0)))
                for each in news
            ]
            for sample, sampled in fresh:
                job.num_reported[sample] = job.num_reported.get(sample, 0) + len(sampled.tokens)
            return on_progress([each for each in fresh if len(each.sampled.tokens)])

        return replace(request, on_progress=report)

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """Return partial completions of all engines, each between two of its dispatches."""
        partials: dict[str, tuple[Completion, ...]] = {}
        loops = self._loops.values()
        for found in await asyncio.gather(*(loop.snapshot() for loop in loops)):
            partials |= found
        return partials

    def progress(self) -> Hashable:
        """Return a value that changes whenever an engine decodes a token or swaps weights."""
        return tuple((loop.num_tokens, loop.version) for loop in self._loops.values())

    def describe_wait(self) -> str:
        """Describe the load of each engine."""
        return "; ".join(
            f"engine {number} has version {loop.version}, {self._router.load(number)} samples to "
            "decode"
            for number, loop in self._loops.items()
        )

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Merge the metrics of all engines: counts and rates add up, means are averaged."""
        past, self._past_metrics = self._past_metrics, []
        return merge_engines([*past, *(loop.metrics() for loop in self._loops.values())])
