"""The engine loop: one thread that keeps the decode engine busy, and takes new weights between two
dispatches."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from areal_jax.engine.batch import (
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    DecodeOutput,
    SamplingMode,
    sampling_mode,
)
from areal_jax.engine.config import MAX_TOP_K
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.kv_cache.manager import KVCacheManager, PrefillJob
from areal_jax.engine.routing import TOTALS
from areal_jax.engine.slots import SlotTable
from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.protocols import WeightSource
from areal_jax.records import (
    NO_VERSION,
    Completion,
    Progress,
    Request,
    StopReason,
    Weights,
    empty_completion,
)

Event: TypeAlias = Callable[[str, float, float, Mapping[str, int | float]], None]
"""on_event(name, start_s, end_s, args), times of time.perf_counter; called in the engine loop's
thread."""

# How long the idle thread sleeps before it looks again at its queue (while it waits for weights),
# and at its deadlines.
_GLANCE_S, _NAP_S = 0.01, 1.0
_CLOSE_TIMEOUT_S = 60.0
# Numbers by which logits may be divided and multiplied, and what may be taken from them: float32
# holds what comes of it.
_LEAST, _MOST = 1e-6, 1e6

T = TypeVar("T")


class _Answer(Generic[T]):
    """A future of the asyncio thread that the engine loop's thread resolves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def give(self, result: T) -> None:
        self._resolve(lambda: self.future.set_result(result))

    def fail(self, error: Exception) -> None:
        self._resolve(lambda: self.future.set_exception(error))

    def meanwhile(self, tell: Callable[[], None]) -> None:
        """Call in the asyncio thread, unless the future is done by then."""
        self._resolve(tell)

    def _resolve(self, act: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else act())
        except RuntimeError:
            # A loop that has ended has nobody left to tell.
            if not self._loop.is_closed():
                raise


@dataclass(eq=False)
class _Job:
    """One request in the engine. Touched by the engine loop's thread only, once it is accepted."""

    request: Request
    answer: _Answer[list[Completion]]
    deadline_s: float
    sampled: list[Completion]
    """By sample: what was sampled before it came here, then its completion once it is finished."""
    waiting: deque[int] = field(default_factory=deque)
    """Samples without a slot."""
    slots_by_sample: dict[int, int] = field(default_factory=dict)
    """Slot of each sample that has one."""
    prompts: dict[int, PrefillJob] = field(default_factory=dict)
    """By data shard: the prompt's pages, while samples wait that will start from it."""
    num_reported: dict[int, int] = field(default_factory=dict)
    """Tokens of each sample that whoever asked has been told of."""


class EngineStatus(NamedTuple):
    """What an engine works on."""

    version: int
    """Of the weights that it decodes with."""
    running: tuple[str, ...]
    """Requests that have slots."""
    num_queued: int
    """Requests with samples that wait for slots or weights."""


class _UnderWay(NamedTuple):
    """A dispatch whose tokens are not read."""

    packed: jax.Array
    start_s: float


@dataclass(frozen=True)
class _Command:
    act: Callable[[], None]
    answer: _Answer[Any] | None = None
    """Fails where the engine loop ends before it gets here."""


class EngineLoop:
    """Answers requests with one thread that owns the engine's state: the local `records.Engine`.

    Between two dispatches the thread obeys commands, takes newer weights, seats waiting samples in
    free slots, computes the next part of their prompts, and then draws `steps_per_dispatch` tokens
    in every slot. Where none of these waits, the next dispatch is enqueued before the last one's
    tokens are read, so that the device never waits for the host.

    A sample is seated where there are pages for it. Where a slot needs one and none is left, the
    sample that was seated last makes room: it waits with what it has sampled, and goes on later as
    if nothing had been."""

    def __init__(
        self, engine: DecodeEngine, weights: WeightSource, *, on_event: Event | None = None
    ):
        config = engine.config
        self._engine, self._config, self._weights, self._on_event = (
            engine,
            config,
            weights,
            on_event,
        )
        self._table = SlotTable(config.num_slots, config.max_new_tokens, config.steps_per_dispatch)
        self._memory = KVCacheManager(engine)
        # Slot to job and sample, the one seated last at the end; those that wait for their prompt
        # are not yet in the table.
        self._occupants: dict[int, tuple[_Job, int]] = {}
        # Free slots of each data shard.
        self._free = [self._memory.table.slots(shard)[::-1] for shard in range(engine.num_shards)]
        self._num_ended = 0
        """Slots that ended with the last dispatch."""
        # Owned by the engine loop's thread, in order of arrival: all unfinished jobs, and those
        # with samples that wait for a slot.
        self._jobs: dict[str, _Job] = {}
        self._queue: dict[str, _Job] = {}
        # Those of whose progress someone wants to know.
        self._watched: dict[str, _Job] = {}
        # Those that wait for programs, in order of arrival. The engine loop's thread starts the one
        # that compiles, and takes its outcome as a command; `close` lets it end after the program
        # under way.
        self._uncompiled: list[_Job] = []
        self._compiling: threading.Thread | None = None
        self._compile_stop = threading.Event()
        self._current = Weights(NO_VERSION, None)
        self._arrived: Weights | None = None
        """Newer weights that kept a dispatch from being enqueued ahead."""
        # Commands: put by the asyncio thread, taken by the engine loop's thread. It ends with the
        # engine loop: from then on `_put` and `_end`, both under the lock, fail every command that
        # is not taken.
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._drained: _Command | None = None
        self._lock = threading.Lock()
        self._ended: Exception | None = None
        self._closing = False
        self.num_tokens = 0
        """Decoded so far."""
        self._sums: dict[str, list[float]] = {}
        self._measured_since = time.perf_counter()
        self._programs_before = engine.num_programs
        # Since when the device has had nothing to do but for the host's bookkeeping; None where it
        # is busy or waits for others.
        self._device_idle_since: float | None = None
        # Owned by this object, started by `start`. Ends when `close` says so, or with the first
        # error, which then fails every request. A daemon, so that an error elsewhere can end the
        # process.
        self._thread = threading.Thread(target=self._run, name="decode-driver", daemon=True)

    @property
    def num_slots(self) -> int:
        """Sequences that it decodes at the same time."""
        return self._config.num_slots

    @property
    def version(self) -> int:
        """Of the weights that it decodes with."""
        return self._current.version

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the dispatch under way; requests that are not finished fail with
        EngineStopped."""

        def close() -> None:
            self._closing = True

        self._compile_stop.set()
        if self._thread.is_alive():
            self._put(close)
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"the decode engine loop's thread did not end within {_CLOSE_TIMEOUT_S} "
                    "s of "
                    "close()"
                )
        else:
            self._end(EngineStopped("the decode engine is closed"))
        if self._compiling is not None:
            self._compiling.join(_CLOSE_TIMEOUT_S)

    def compile_ahead(self, mode: SamplingMode) -> None:
        """Compile what requests of this kind need, beside the engine loop's thread, before the
        first one asks for it."""
        self._put(lambda: self._compile(mode))

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Answer with one completion per sample, in order; call from the asyncio thread. Cancelling
        the future frees the slots.

        Raises InvalidRequest, naming limit and knob, for a request beyond the engine's limits. The
        future fails with TimeoutError naming the request after engine.request_timeout_s, and with
        EngineStopped where the engine ends before it."""
        self._check(request)
        answer = _Answer[list[Completion]]()
        sampled = list(request.resume) or [empty_completion()] * request.num_samples
        job = _Job(request, answer, time.perf_counter() + self._config.request_timeout_s, sampled)
        answer.future.add_done_callback(
            lambda future: self._put(lambda: self._forget(job)) if future.cancelled() else None
        )
        self._put(lambda: self._accept(job), answer)
        return answer.future

    def snapshot(self) -> asyncio.Future[dict[str, tuple[Completion, ...]]]:
        """What every unfinished request has sampled so far, by id, between two dispatches; after
        all earlier deliveries."""
        answer = _Answer[dict[str, tuple[Completion, ...]]]()
        self._put(
            lambda: answer.give({name: self._progress(job) for name, job in self._jobs.items()}),
            answer,
        )
        return answer.future

    def status(self) -> asyncio.Future[EngineStatus]:
        """What the engine works on, between two dispatches."""
        answer = _Answer[EngineStatus]()

        def act() -> None:
            running = tuple(name for name, job in self._jobs.items() if job.slots_by_sample)
            answer.give(EngineStatus(self._current.version, running, len(self._queue)))

        self._put(act, answer)
        return answer.future

    def suspend(self, request_id: str) -> asyncio.Future[tuple[Completion, ...]]:
        """Take a request out of the engine: what it has sampled, for the `resume` of a request here
        or on another engine.

        Whoever awaits the request's own future is given the same. ValueError where no unfinished
        request has this id."""
        answer = _Answer[tuple[Completion, ...]]()

        def act() -> None:
            job = self._jobs.get(request_id)
            if job is None:
                answer.fail(
                    ValueError(
                        f"cannot suspend request {request_id!r}: the engine has no such "
                        "unfinished request"
                    )
                )
                return
            progress = self._progress(job)
            self._forget(job)
            job.answer.give(list(progress))
            answer.give(progress)

        self._put(act, answer)
        return answer.future

    def end_sample(self, request_id: str, sample: int) -> None:
        """Let one sample of a request end with what it has sampled, as if by a stop token; one that
        is finished is left alone."""
        self._put(lambda: self._end_sample(request_id, sample))

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Sum and weight of each measure since the last call: their quotient is the mean, or the
        rate.

        tokens, dispatches, swaps, requests, prefill_tokens, recompute_tokens, preemptions,
        compilations: counts (weight 1).
        kv_used: share of the KV memory's pages in use, by dispatch.
        tokens_per_s: over the time since the last call. occupancy: share of slot-steps that drew a
            token.
        host_gap_us: host time between two dispatches, in which the device waits; 0 where the next
            one was enqueued before.
        swap_stall_s: by swap.
        wait_s: time without a request that could be worked on."""
        with self._lock:
            sums, self._sums = self._sums, {}
            now = time.perf_counter()
            elapsed_s, self._measured_since = now - self._measured_since, now
            programs = self._engine.num_programs
            compiled, self._programs_before = programs - self._programs_before, programs
        totals = {name: (total, weight) for name, (total, weight) in sums.items()}
        totals |= {name: (totals.get(name, (0.0, 0.0))[0], 1.0) for name in TOTALS}
        return totals | {
            "tokens_per_s": (totals["tokens"][0], elapsed_s),
            "compilations": (float(compiled), 1.0),
        }

    # The asyncio thread's side.

    def _check(self, request: Request) -> None:
        config, sampling, prompt = self._config, request.sampling, request.prompt_tokens
        name, vocab_size = f"request {request.id!r}", self._engine.policy.config.vocab_size
        if not 1 <= len(prompt) <= config.max_prompt_tokens:
            limit = f"engine.max_prompt_tokens={config.max_prompt_tokens}"
            raise InvalidRequest(
                f"{name}: its prompt has {len(prompt)} tokens, expected 1 to {limit}"
            )
        if not 1 <= sampling.max_new_tokens <= config.max_new_tokens:
            raise InvalidRequest(
                f"{name}: sampling.max_new_tokens={sampling.max_new_tokens}, "
                f"expected 1 to engine.max_new_tokens={config.max_new_tokens}"
            )
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise InvalidRequest(
                f"{name}: prompt tokens {prompt.min()} to {prompt.max()}, expected 0 to "
                f"{vocab_size - 1}"
            )
        if request.num_samples < 1 or len(request.resume) not in (0, request.num_samples):
            raise InvalidRequest(
                f"{name}: num_samples={request.num_samples} with {len(request.resume)} "
                "completions to resume; "
                "expected at least 1 sample, and one completion for each or none at all"
            )
        within = f"{_LEAST:g} to {_MOST:g}"
        for value, is_right, expected in (
            (
                "temperature",
                sampling.temperature == 0 or _LEAST <= sampling.temperature <= _MOST,
                f"0, or {within}",
            ),
            ("top_k", 0 <= sampling.top_k <= MAX_TOP_K, f"0 to {MAX_TOP_K}"),
            ("top_p", _LEAST <= sampling.top_p <= 1, f"{_LEAST:g} to 1"),
            ("min_p", 0 <= sampling.min_p <= 1, "0 to 1"),
            (
                "min_new_tokens",
                0 <= sampling.min_new_tokens <= sampling.max_new_tokens,
                "0 to max_new_tokens",
            ),
            (
                "presence_penalty",
                abs(sampling.presence_penalty) <= _MOST,
                f"-{_MOST:g} to {_MOST:g}",
            ),
            (
                "frequency_penalty",
                abs(sampling.frequency_penalty) <= _MOST,
                f"-{_MOST:g} to {_MOST:g}",
            ),
            ("repetition_penalty", _LEAST <= sampling.repetition_penalty <= _MOST, within),
            (
                "num_top_logprobs",
                0 <= sampling.num_top_logprobs <= MAX_TOP_LOGPROBS,
                f"0 to {MAX_TOP_LOGPROBS}",
            ),
        ):
            if not is_right:
                raise InvalidRequest(
                    f"{name}: sampling.{value}={getattr(sampling, value)}, expected {expected}"
                )
        if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(
                f"{name}: {len(sampling.stop_token_ids)} stop_token_ids, expected at most "
                f"{MAX_STOP_TOKENS}"
            )
        if not all(0 <= token < 2**31 for token in sampling.stop_token_ids):
            raise InvalidRequest(
                f"{name}: sampling.stop_token_ids={sampling.stop_token_ids}, expected 0 to "
                f"{2**31 - 1}"
            )

    def _put(self, act: Callable[[], None], answer: _Answer[Any] | None = None) -> None:
        with self._lock:
            if self._ended is None:
                self._commands.put(_Command(act, answer))
            elif answer is not None:
                answer.fail(self._ended)

    # The engine loop's thread.

    def _run(self) -> None:
        # The thread's outermost door: whatever ends it must reach those who wait for answers.
        try:
            self._state = self._engine.init_state()
            while not self._closing:
                self._drain_commands()
                self._take_newest_weights()
                self._expire()
                self._admit_waiting()
                self._fill()
                if self._table.active.any():
                    self._dispatch()
                elif not self._occupants:
                    self._idle()
            self._end(EngineStopped("the decode engine was closed"))
        except Exception as error:
            ended = EngineStopped(
                f"the decode engine loop ended with {type(error).__name__}: {error}"
            )
            ended.__cause__ = error
            self._end(ended)

    def _end(self, reason: Exception) -> None:
        with self._lock:
            self._ended = self._ended or reason
            answers = [job.answer for job in self._jobs.values()]
            commands = [] if self._drained is None else [self._drained]
            while not self._commands.empty():
                commands.append(self._commands.get_nowait())
        self._jobs.clear()
        self._queue.clear()
        self._watched.clear()
        for answer in [*answers, *(command.answer for command in commands)]:
            if answer is not None:
                answer.fail(self._ended)

    def _drain_commands(self, timeout_s: float = 0.0) -> None:
        """Act on all commands there are; wait for the first one."""
        while True:
            try:
                self._drained = (
                    self._commands.get(timeout=timeout_s)
                    if timeout_s
                    else self._commands.get_nowait()
                )
            except queue.Empty:
                return
            self._drained.act()
            self._drained, timeout_s = None, 0.0

    def _idle(self) -> None:
        """Sleep until there may be something to do: a command, or weights that a waiting request
        needs."""
        start = time.perf_counter()
        self._device_idle_since = None
        if self._queue:
            at_least = min(job.request.min_version for job in self._queue.values())
            # No more than a glance: the requests have deadlines of their own, which `_expire`
            # keeps.
            with contextlib.suppress(TimeoutError):
                self._weights.wait(max(at_least, self._current.version + 1), _GLANCE_S)
        else:
            self._drain_commands(_NAP_S)
        self._count("wait_s", time.perf_counter() - start)

    def _expired(self) -> _Job | None:
        """The oldest job, where its deadline has passed."""
        job = next(iter(self._jobs.values()), None)
        return job if job is not None and job.deadline_s <= time.perf_counter() else None

    def _expire(self) -> None:
        while (job := self._expired()) is not None:
            finished = sum(completion.stop_reason != "suspended" for completion in job.sampled)
            job.answer.fail(
                TimeoutError(
                    f"request {job.request.id!r} was not answered within engine.request_timeout_s="
                    f"{self._config.request_timeout_s}: {finished} of {job.request.num_samples} "
                    "samples are finished; "
                    f"it needs weights of version {job.request.min_version} or newer, "
                    f"the engine has version {self._current.version}"
                )
            )
            self._forget(job)

    def _accept(self, job: _Job) -> None:
        request = job.request
        if request.id in self._jobs:
            job.answer.fail(
                ValueError(f"request id {request.id!r} is in use by another unfinished request")
            )
            return
        self._count("requests", 1)
        for sample, sampled in enumerate(job.sampled):
            if sampled.stop_reason == "suspended":
                if len(sampled.tokens) < request.sampling.max_new_tokens:
                    job.waiting.append(sample)
                else:
                    job.sampled[sample] = Completion(
                        sampled.tokens, sampled.logp, sampled.versions, "length"
                    )
        self._jobs[request.id] = job
        if request.on_progress is not None:
            self._watched[request.id] = job
        if job.waiting:
            self._enqueue_job(job)
        self._deliver_if_finished(job)

    def _enqueue_job(self, job: _Job) -> None:
        """Let a job wait for slots, after the programs that it needs: compiling them here would
        hold up all others."""
        mode, warm = sampling_mode(job.request.sampling), self._engine.warm
        if warm is None or mode <= warm:
            self._queue[job.request.id] = job
        else:
            self._uncompiled.append(job)
            self._compile(mode)

    def _compile(self, mode: SamplingMode) -> None:
        """Compile in a thread of its own what is missing for a sampling mode."""
        engine = self._engine
        if (
            self._compiling is not None
            or engine.warm is None
            or mode <= engine.warm
            or self._compile_stop.is_set()
        ):
            return

        def compile() -> None:
            failed = None
            try:
                engine.warm_up_mode(mode, self._compile_stop.is_set)
            except Exception as error:  # whoever waits for it gets it
                failed = error
            self._put(lambda: self._compiled(failed))

        self._compiling = threading.Thread(target=compile, name="compile", daemon=True)
        self._compiling.start()

    def _compiled(self, failed: Exception | None) -> None:
        """Let those go on that waited for programs."""
        self._compiling = None
        jobs, self._uncompiled = self._uncompiled, []
        for job in (job for job in jobs if self._jobs.get(job.request.id) is job and job.waiting):
            if failed is None:
                self._enqueue_job(job)
            else:
                job.answer.fail(
                    RuntimeError(f"compiling for request {job.request.id!r} failed: {failed}")
                )
                self._forget(job)

    def _forget(self, job: _Job) -> None:
        """Remove a job with all its samples, if it is still here."""
        if self._jobs.get(job.request.id) is not job:
            return
        del self._jobs[job.request.id]
        self._queue.pop(job.request.id, None)
        self._watched.pop(job.request.id, None)
        for slot in job.slots_by_sample.values():
            self._free_slot(slot)
        self._memory.give_up(job.prompts)

    def _free_slot(self, slot: int) -> None:
        self._memory.release(slot, self._table.cached_tokens(slot) if slot in self._table else None)
        self._table.release(slot)
        del self._occupants[slot]
        self._free[self._memory.table.shard(slot)].append(slot)

    def _progress(self, job: _Job) -> tuple[Completion, ...]:
        live = {
            sample: self._table.completion(slot, "suspended")
            for sample, slot in job.slots_by_sample.items()
            if slot in self._table
        }
        return tuple(live.get(sample, sampled) for sample, sampled in enumerate(job.sampled))

    def _deliver_if_finished(self, job: _Job) -> None:
        if not job.slots_by_sample and not job.waiting:
            del self._jobs[job.request.id]
            self._watched.pop(job.request.id, None)
            job.answer.give(job.sampled)

    def _take_newest_weights(self) -> None:
        """Swap to the newest weights, if there are newer ones. What the old ones computed, no other
        sequence finds from now on; that of live ones is rebuilt, or kept."""
        newest = self._arrived or self._weights.newest(self._current.version)
        if newest is None:
            return
        start = time.perf_counter()
        old, self._current, self._arrived = self._current, newest, None
        recomputed = 0
        # Equal weights leave every page as it is, so that such a swap changes no output in any bit.
        if self._memory.holds_any and not self._engine.same_weights(old.params, newest.params):
            self._give_up_prompts()
            if self._config.on_update == "keep":
                self._memory.forget(kept=self._table.live())
            else:
                self._memory.forget()
                live = {slot: self._table.cached_tokens(slot) for slot in self._table.live()}
                self._state, recomputed = self._memory.rebuild(newest.params, self._state, live)
                jax.block_until_ready(self._state.pages)
        end = time.perf_counter()
        self._device_idle_since = None
        self._count("swaps", 1)
        self._count("swap_stall_s", end - start)
        self._count("recompute_tokens", recomputed)
        self._tell("swap", start, end, version=newest.version, recompute_tokens=recomputed)

    def _admit_waiting(self) -> None:
        """Give free slots to waiting samples, oldest request first, for as long as there are pages
        for them."""
        for job in list(self._queue.values()) if any(self._free) else []:
            if job.request.min_version <= self._current.version and not self._assign_slot(job):
                break

    def _assign_slot(self, job: _Job) -> bool:
        """Seat the samples of a job, of which those that start from the bare prompt share it; False
        where some must wait."""
        request, memory = job.request, self._memory
        while job.waiting:
            if not any(self._free):
                return False
            shard = max(
                (shard for shard, free in enumerate(self._free) if free),
                key=lambda d: memory.table.stores[d].num_free,
            )
            sample, slot = job.waiting[0], self._free[shard][-1]
            sampled = job.sampled[sample]
            tokens = np.concatenate([request.prompt_tokens, sampled.tokens])[:-1]
            num_new = min(
                request.sampling.max_new_tokens - len(sampled.tokens),
                self._config.steps_per_dispatch,
            )
            num_others = len(memory.table.slots(shard)) - len(self._free[shard])
            is_shared = not len(sampled.tokens) and (len(job.waiting) > 1 or shard in job.prompts)
            # A page for each of the others where there may be too few, or one just seated would
            # soon have to make room.
            spare_pages = num_others if self._config.kv_tokens else 0
            if not memory.start(
                slot, tokens, num_new, job.prompts if is_shared else None, spare_pages
            ):
                if num_others:
                    return False
                # Nothing but prompts that wait for slots can be in the way, this one's too.
                self._give_up_prompts()
                if not memory.start(slot, tokens, num_new):
                    raise RuntimeError(
                        f"{memory.table.num_used} pages are in use in an engine without a sequence"
                    )
            job.waiting.popleft()
            self._free[shard].pop()
            self._occupants[slot] = (job, sample)
            job.slots_by_sample[sample] = slot
        memory.give_up(job.prompts)
        del self._queue[request.id]
        return True

    def _give_up_prompts(self) -> None:
        for job in self._queue.values():
            self._memory.give_up(job.prompts)

    def _fill(self) -> None:
        """Compute the next part of what seated samples wait for, and let those go on that have all
        of it."""
        if not self._memory.fillings:
            return
        start = time.perf_counter()
        others_wait = bool(self._table.active.any())
        params, state = self._current.params, self._state
        state, complete, num_tokens = self._memory.advance(params, state, others_wait=others_wait)
        for slot in (slot for filling in complete for slot in filling.slots):
            job, sample = self._occupants[slot]
            self._table.assign_slot(slot, job.request, sample, job.sampled[sample])
        state = self._engine.fit(state, self._table.num_columns())
        self._state = self._memory.finish(state, complete)
        self._count("prefill_tokens", num_tokens)
        self._tell("prefill", start, time.perf_counter(), tokens=num_tokens)

    def _make_room(self) -> None:
        """See to it that every live slot has pages for the next dispatch."""
        while lacking := self._memory.reserve(self._table.ends()):
            if any(job.prompts for job in self._queue.values()):
                self._give_up_prompts()
            else:
                shard = self._memory.table.shard(lacking[0])
                youngest = [
                    slot for slot in self._occupants if self._memory.table.shard(slot) == shard
                ][-1]
                self._preempt(youngest)

    def _preempt(self, slot: int) -> None:
        """Let the sample in a slot wait, before all others, with what it has sampled."""
        job, sample = self._occupants[slot]
        if slot in self._table:
            job.sampled[sample] = self._table.completion(slot, "suspended")
        del job.slots_by_sample[sample]
        job.waiting.appendleft(sample)
        self._queue = {job.request.id: job} | self._queue
        self._free_slot(slot)
        self._count("preemptions", 1)

    def _dispatch(self) -> None:
        """Draw tokens in every live slot, and hand out what is finished, until something else is to
        be done."""
        self._make_room()
        under_way = self._enqueue(0)
        while self._may_run_ahead():
            # The device goes on with this one while the host reads and books the one before.
            following = self._enqueue(1)
            self._process_outputs(under_way, device_continues=True)
            under_way = following
        self._process_outputs(under_way, device_continues=False)

    def _may_run_ahead(self) -> bool:
        """Whether the next dispatch may be enqueued before the last one's tokens are known.

        Commands, deadlines and weights must not wait for it, nor a sample for a slot that may
        become free: so with samples waiting only where answers are long enough that no slot ended
        last and none will surely end."""
        if self._closing or not self._commands.empty() or self._expired() is not None:
            return False
        num_lasting = self._table.num_lasting()
        if self._table.mode() == SamplingMode.SHAPED:
            # Its program is given the tokens so far.
            return False
        if self._memory.fillings:
            return False
        if num_lasting == 0 or (
            self._queue and (self._num_ended or num_lasting < len(self._occupants))
        ):
            return False
        self._arrived = self._weights.newest(self._current.version)
        return self._arrived is None and not self._memory.reserve(self._table.ends(1))

    def _enqueue(self, num_ahead: int) -> _UnderWay:
        """Let the device draw the next tokens, of which the host has yet to see those of
        `num_ahead` dispatches before."""
        engine, table = self._engine, self._table
        start = time.perf_counter()
        self._state = self._memory.show(engine.fit(self._state, table.num_columns(num_ahead)))
        if table.changed:
            self._state, table.changed = engine.assign_slot(self._state, table.records()), False
        mode = table.mode()
        sequences = table.sequences(engine.max_tokens) if mode == SamplingMode.SHAPED else None
        self._state, packed = engine.generate(
            self._current.params, self._state, mode=mode, sequences=sequences
        )
        if self._device_idle_since is not None:
            self._count("host_gap_us", 1e6 * (time.perf_counter() - self._device_idle_since))
        return _UnderWay(packed, start)

    def _process_outputs(self, under_way: _UnderWay, *, device_continues: bool) -> None:
        """Wait for the tokens of a dispatch, book them, and hand out what is finished."""
        version = self._current.version
        sampled = self._engine.fetch(under_way.packed)
        end = time.perf_counter()
        if device_continues:
            self._count("host_gap_us", 0.0)
        self._device_idle_since = None if device_continues else end
        ended, num_tokens = self._table.collect_outputs(sampled, version), int(sampled.counts.sum())
        # Counted before anyone is told, so that whoever awaits a request finds its tokens in the
        # metrics.
        self._count("tokens", num_tokens)
        self.num_tokens += num_tokens
        self._count("dispatches", 1)
        self._count("kv_used", self._memory.table.num_used, self._memory.table.size)
        self._count("occupancy", num_tokens, sampled.tokens.size)
        self._tell("dispatch", under_way.start_s, end, version=version, tokens=num_tokens)
        self._num_ended = len(ended)
        for job in self._watched.values():
            self._report_progress(job, sampled)
        for slot in ended.tolist():
            self._finish(slot, _reason(sampled, slot))

    def _finish(self, slot: int, stop_reason: StopReason) -> None:
        job, sample = self._occupants[slot]
        sampled = (
            self._table.completion(slot, stop_reason)
            if slot in self._table
            else job.sampled[sample]
        )
        job.sampled[sample] = replace(sampled, stop_reason=stop_reason)
        del job.slots_by_sample[sample]
        self._free_slot(slot)
        self._deliver_if_finished(job)

    def _report_progress(self, job: _Job, sampled: DecodeOutput) -> None:
        """Tell who watches a job what its samples drew since the last time."""
        news, on_progress = list[Progress](), job.request.on_progress
        for sample, slot in job.slots_by_sample.items():
            if slot not in self._table:
                continue
            reason = "suspended" if sampled.active[slot] else _reason(sampled, slot)
            reported = job.num_reported.get(sample, 0)
            new = self._table.completion(slot, reason, reported)
            if len(new.tokens):
                news.append(Progress(sample, new))
                job.num_reported[sample] = reported + len(new.tokens)

        def tell() -> None:
            assert on_progress is not None
            for sample in on_progress(news):
                self.end_sample(job.request.id, sample)

        if news:
            job.answer.meanwhile(tell)

    def _end_sample(self, request_id: str, sample: int) -> None:
        if (job := self._jobs.get(request_id)) is None:
            return
        if sample in job.slots_by_sample:
            self._finish(job.slots_by_sample[sample], "stop")
        elif sample in job.waiting:
            job.waiting.remove(sample)
            job.sampled[sample] = replace(job.sampled[sample], stop_reason="stop")
            if not job.waiting:
                self._memory.give_up(job.prompts)
                self._queue.pop(request_id, None)
            self._deliver_if_finished(job)

    def _count(self, name: str, amount: int | float, weight: int = 1) -> None:
        with self._lock:
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += amount
            sums[1] += weight

    def _tell(self, name: str, start_s: float, end_s: float, **args: int | float) -> None:
        if self._on_event is not None:
            self._on_event(name, start_s, end_s, args)


def _reason(sampled: DecodeOutput, slot: int) -> StopReason:
    """Why a slot ended that did."""
    return "stop" if sampled.stopped[slot] else "length"
