"""Unfinished requests of one engine, and the replies that they wait for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from areal_jax.engine.background_compiler import BackgroundCompiler
from areal_jax.engine.batch import sampling_mode
from areal_jax.engine.commands import CommandQueue, CommandReply
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.engine_metrics import EngineMetrics
from areal_jax.engine.scheduler import Scheduler
from areal_jax.engine.sequence import Sequence, SequenceGroup, SequenceState
from areal_jax.records import Completion, Progress


class PendingRequest(NamedTuple):
    """A submitted request: its sequences, and the reply with their completions."""

    group: SequenceGroup
    reply: CommandReply[list[Completion]]


class RequestTracker:
    """Passes requests to the scheduler, and their progress and completions to those who wait.

    Used by the engine thread only.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        compiler: BackgroundCompiler,
        commands: CommandQueue,
        metrics: EngineMetrics,
    ):
        self._config, self._scheduler, self._compiler = config, scheduler, compiler
        self._commands, self._metrics = commands, metrics
        # Unfinished requests by id, in order of arrival, and those with `on_progress`.
        self._pending: dict[str, PendingRequest] = {}
        self._watched: dict[str, PendingRequest] = {}
        # Groups that wait for programs, in order of arrival.
        self._uncompiled: list[SequenceGroup] = []

    @property
    def groups(self) -> list[SequenceGroup]:
        """Unfinished groups, in order of arrival."""
        return [pending.group for pending in self._pending.values()]

    def add(self, pending: PendingRequest) -> None:
        """Add a request, or fail it if its id is in use."""
        group, reply = pending
        if group.id in self._pending:
            error = f"request id {group.id!r} is in use by another unfinished request"
            reply.set_exception(ValueError(error))
            return
        self._metrics.count("requests", 1)
        self._pending[group.id] = pending
        if group.request.on_progress is not None:
            self._watched[group.id] = pending
        if group.waiting:
            self._enqueue(group)
        self._resolve_if_finished(pending)

    def _enqueue(self, group: SequenceGroup) -> None:
        """Add a group to the scheduler once its programs are compiled, without delaying others."""
        sampling = group.request.sampling
        mode, masked = sampling_mode(sampling), bool(sampling.grammar)
        if self._compiler.has(mode, masked=masked):
            self._scheduler.add(group)
        else:
            self._uncompiled.append(group)
            self._compiler.start(mode, masked=masked)

    def finish_compilation(self, failed: Exception | None) -> None:
        """Enqueue the groups that waited for programs, or fail them."""
        self._compiler.finish()
        groups, self._uncompiled = self._uncompiled, []
        for group in (group for group in groups if self._has(group) and group.waiting):
            if failed is None:
                self._enqueue(group)
            else:
                self._fail(
                    group, RuntimeError(f"compiling for request {group.id!r} failed: {failed}")
                )

    def expired(self) -> SequenceGroup | None:
        """Return the oldest group if its deadline has passed."""
        pending = next(iter(self._pending.values()), None)
        is_late = pending is not None and pending.group.deadline_s <= time.perf_counter()
        return pending.group if pending is not None and is_late else None

    def expire(self, version: int) -> None:
        """Fail the requests whose deadline has passed.

        Args:
            version: of the engine's weights, for the message.
        """
        while (group := self.expired()) is not None:
            request = group.request
            num_finished = sum(each.state is SequenceState.FINISHED for each in group.sequences)
            error = TimeoutError(
                f"request {request.id!r} was not answered within "
                f"engine.request_timeout_s={self._config.request_timeout_s}: {num_finished} of "
                f"{request.num_samples} samples are finished; it needs weights of version "
                f"{request.min_version} or newer, the engine has version {version}"
            )
            self._fail(group, error)

    def abort(self, group: SequenceGroup) -> None:
        """Remove a request without a reply, if it is here and unfinished."""
        if self._has(group):
            self._scheduler.abort(group)
            self._remove(group)

    def suspend(self, request_id: str, reply: CommandReply[tuple[Completion, ...]]) -> None:
        """Remove a request, and reply to it and to `reply` with what it has sampled."""
        pending = self._pending.get(request_id)
        if pending is None:
            error = (
                f"cannot suspend request {request_id!r}: the engine has no such unfinished request"
            )
            reply.set_exception(ValueError(error))
            return
        completions = pending.group.completions()
        self.abort(pending.group)
        pending.reply.set_result(completions)
        reply.set_result(tuple(completions))

    def end_sample(self, request_id: str, sample: int) -> None:
        """Finish one sample of a request as if by a stop token, unless it is finished."""
        pending = self._pending.get(request_id)
        if pending is None or not 0 <= sample < pending.group.request.num_samples:
            return
        sequence = pending.group.sequences[sample]
        if sequence.state is not SequenceState.FINISHED:
            self._scheduler.finish(sequence, "stop")
            self._resolve_if_finished(pending)

    def deliver(self, finished: list[Sequence]) -> None:
        """Report the progress of a dispatch, and resolve the requests that are finished.

        Args:
            finished: sequences that finished in the dispatch.
        """
        # Others, of which there may be many, have sampled nothing.
        sampled = (each.group.id for each in (*self._scheduler.running.values(), *finished))
        for name in dict.fromkeys(sampled):
            if name in self._watched:
                self._report_progress(self._watched[name], finished)
        for sequence in finished:
            # Sequences of one group may finish together.
            if (pending := self._pending.get(sequence.request.id)) is not None:
                self._resolve_if_finished(pending)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests."""
        replies = [pending.reply for pending in self._pending.values()]
        self._pending.clear()
        self._watched.clear()
        for reply in replies:
            reply.set_exception(error)

    def fail(self, failed: Mapping[str, Exception]) -> None:
        """Fail requests, by id."""
        for name, error in failed.items():
            self._fail(self._pending[name].group, error)

    def _has(self, group: SequenceGroup) -> bool:
        pending = self._pending.get(group.id)
        return pending is not None and pending.group is group

    def _fail(self, group: SequenceGroup, error: Exception) -> None:
        self._pending[group.id].reply.set_exception(error)
        self.abort(group)

    def _remove(self, group: SequenceGroup) -> None:
        del self._pending[group.id]
        self._watched.pop(group.id, None)

    def _resolve_if_finished(self, pending: PendingRequest) -> None:
        if pending.group.is_finished:
            self._remove(pending.group)
            pending.reply.set_result(pending.group.completions())

    def _report_progress(self, pending: PendingRequest, finished: list[Sequence]) -> None:
        """Report what a group has sampled since the last report to its `on_progress`."""
        (group, reply), news = pending, list[Progress]()
        on_progress = group.request.on_progress
        for sequence in group.sequences:
            # Only dispatches sample: what was resumed is reported with the first of them.
            if sequence.state is SequenceState.RUNNING or sequence in finished:
                new = sequence.completion(sequence.num_reported)
                if len(new.tokens):
                    news.append(Progress(sequence.sample, new))
                    sequence.num_reported += len(new.tokens)

        def report() -> None:
            assert on_progress is not None
            for sample in on_progress(news):
                self._commands.put(partial(self.end_sample, group.id, sample))

        if news:
            reply.call(report)
