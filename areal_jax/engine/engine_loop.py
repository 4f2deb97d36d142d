"""The engine loop: the thread that runs a decode engine and swaps weights between dispatches."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from areal_jax.data.grammars import Grammars
from areal_jax.engine.admission import check_request
from areal_jax.engine.background_compiler import BackgroundCompiler
from areal_jax.engine.batch import SamplingMode
from areal_jax.engine.commands import CommandQueue, CommandReply
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_core import EngineCore
from areal_jax.engine.engine_metrics import EngineMetrics, Event
from areal_jax.engine.request_tracker import PendingRequest, RequestTracker
from areal_jax.engine.scoring import Scores, scored_prompt
from areal_jax.engine.sequence import SequenceGroup
from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.protocols import WeightSource
from areal_jax.records import Completion, Request, Weights

# Waits of the idle thread: for weights, before it looks at its commands again; for commands, before
# it looks at deadlines again.
_WEIGHTS_WAIT_S, _COMMANDS_WAIT_S = 0.01, 1.0
_CLOSE_TIMEOUT_S = 60.0


class EngineStatus(NamedTuple):
    """Load of an engine."""

    version: int
    """Version of the weights that it decodes with."""
    running: tuple[str, ...]
    """Ids of the requests that have slots."""
    num_queued: int
    """Number of requests with samples that wait for slots or weights."""


class EngineLoop:
    """Serves requests with one thread that owns the engine's state: the local `protocols.Engine`.

    Between two dispatches the thread executes commands, swaps to newer weights, admits waiting
    sequences and prefills the next chunks; a dispatch decodes `engine.steps_per_dispatch` tokens in
    every slot. If none of this is to be done, the next dispatch is enqueued before the last one's
    output is read, so that the device never waits for the host. The class has more than 200 lines
    because one thread decides what comes next.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        weights: WeightSource,
        *,
        on_event: Event | None = None,
        grammars: Grammars | None = None,
    ):
        """
        Args:
            engine: Compiled programs.
            weights: Source of weight updates.
            on_event: Receives events for a trace.
            grammars: Those of the policy's tokenizer; None: requests have none.
        """
        self._engine, self._config, self._weights = engine, engine.config, weights
        self._has_grammars = grammars is not None
        self._metrics = EngineMetrics(lambda: engine.num_programs, on_event)
        self._core = EngineCore(engine, self._metrics, grammars)
        self._scheduler = self._core.scheduler
        # Put by the asyncio thread, executed by the engine thread.
        self._commands = CommandQueue()
        self._compiler = BackgroundCompiler(
            engine,
            lambda failed: self._commands.put(lambda: self._requests.finish_compilation(failed)),
        )
        self._requests = RequestTracker(
            self._config, self._scheduler, self._compiler, self._commands, self._metrics
        )
        self._arrived: Weights | None = None
        """Newer weights that kept a dispatch from being enqueued ahead."""
        self._closing = False
        # One program for scores is compiled at a time.
        self._scoring = asyncio.Lock()
        # Started by `start`. Ends after `close`, or with the first error, which then fails every
        # request. A daemon, so that an error elsewhere can end the process.
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    @property
    def num_slots(self) -> int:
        """Number of sequences decoded at the same time."""
        return self._config.num_slots

    @property
    def version(self) -> int:
        """Version of the weights that it decodes with."""
        return self._core.weights.version

    @property
    def num_tokens(self) -> int:
        """Number of tokens decoded so far."""
        return self._core.num_tokens

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after its dispatch, and free weights and KV cache.

        Unfinished requests fail with EngineStopped.
        """

        def close() -> None:
            self._closing = True

        self._compiler.stop()
        if self._thread.is_alive():
            self._commands.put(close)
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"the engine thread did not end within {_CLOSE_TIMEOUT_S} s of close()"
                )
        else:
            self._stop(EngineStopped("the decode engine is closed"))
        self._compiler.join(_CLOSE_TIMEOUT_S)
        self._arrived = None
        self._core.release()

    def compile_ahead(self, mode: SamplingMode) -> None:
        """Compile the programs of a sampling mode in the background."""
        self._commands.put(lambda: self._compiler.start(mode))

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Submit a request; call from the asyncio thread. Cancelling the future frees its slots.

        Returns:
            A future of one completion per sample, in order. It fails with TimeoutError after
            `engine.request_timeout_s`, and with EngineStopped if the engine ends before.

        Raises:
            InvalidRequest: the request exceeds a limit of the engine.
        """
        check_request(
            request,
            self._config,
            self._engine.policy.config.vocab_size,
            has_grammars=self._has_grammars,
        )
        deadline_s = time.perf_counter() + self._config.request_timeout_s
        if (images := self._core.images) is not None:
            prompt = images.admit(request)
            request = replace(request, prompt_tokens=prompt.tokens)
            group = SequenceGroup(
                request, deadline_s, images=prompt.images, rope_offset=prompt.rope_offset
            )
        elif request.images:
            raise InvalidRequest(
                f"request {request.id!r}: expected a prompt without images, which the policy "
                f"{self._engine.policy.config.architecture} does not read"
            )
        else:
            group = SequenceGroup(request, deadline_s)
        reply = CommandReply[list[Completion]]()

        def abort_if_cancelled(future: asyncio.Future[list[Completion]]) -> None:
            if future.cancelled():
                self._commands.put(lambda: self._requests.abort(group))

        reply.future.add_done_callback(abort_if_cancelled)
        self._commands.put(lambda: self._requests.add(PendingRequest(group, reply)), reply)
        return reply.future

    def snapshot(self) -> asyncio.Future[dict[str, tuple[Completion, ...]]]:
        """Return what every unfinished request has sampled, by id, between two dispatches.

        Requests finished before are resolved before.
        """
        reply = CommandReply[dict[str, tuple[Completion, ...]]]()

        def act() -> None:
            groups = self._requests.groups
            reply.set_result({group.id: tuple(group.completions()) for group in groups})

        self._commands.put(act, reply)
        return reply.future

    def status(self) -> asyncio.Future[EngineStatus]:
        """Return the load of the engine, between two dispatches."""
        reply = CommandReply[EngineStatus]()

        def act() -> None:
            running = tuple(group.id for group in self._requests.groups if group.is_running)
            reply.set_result(EngineStatus(self.version, running, len(self._scheduler.waiting)))

        self._commands.put(act, reply)
        return reply.future

    async def score(self, tokens: Int32[np.ndarray, "N"], num_top: int) -> Completion:
        """Return the log-probs of tokens given those before, at temperature 1, between two
        dispatches.

        The first token's is 0. The program is compiled before in a thread, while others run.

        Args:
            tokens: tokens of a prompt.
            num_top: number of most likely tokens at each place; at most `MAX_TOP_LOGPROBS`.

        Raises:
            InvalidRequest: there are too many tokens, or none.
        """
        engine, most = self._engine, self._config.max_tokens
        if not 0 < len(tokens) <= most:
            raise InvalidRequest(
                f"expected 1 to engine.max_prompt_tokens + engine.max_new_tokens={most} tokens to "
                f"score, found {len(tokens)}"
            )
        if tokens.min() < 0 or tokens.max() >= engine.policy.config.vocab_size:
            raise InvalidRequest(
                f"expected tokens from 0 to {engine.policy.config.vocab_size - 1}, found "
                f"{tokens.min()} to {tokens.max()}"
            )
        async with self._scoring:
            length = engine.score_tokens(len(tokens))
            await asyncio.to_thread(engine.programs.get, "score", length)
        reply = CommandReply[tuple[Scores, int]]()

        def act() -> None:
            self._update_weights()
            weights = self._core.weights
            if weights.params is None:
                reply.set_exception(TimeoutError("the engine has no weights yet; try again"))
            else:
                reply.set_result((engine.score(weights.params, tokens), weights.version))

        self._commands.put(act, reply)
        scores, version = await reply.future
        return scored_prompt(
            tokens, await asyncio.to_thread(jax.device_get, scores), version, num_top
        )

    def suspend(self, request_id: str) -> asyncio.Future[tuple[Completion, ...]]:
        """Remove a request from the engine, and resolve its future with what it has sampled.

        Returns:
            A future of the same, for the `resume` of a request here or on another engine. It fails
            with ValueError if no unfinished request has this id.
        """
        reply = CommandReply[tuple[Completion, ...]]()
        self._commands.put(lambda: self._requests.suspend(request_id, reply), reply)
        return reply.future

    def end_sample(self, request_id: str, sample: int) -> None:
        """Finish one sample of a request as if by a stop token; finished ones are left alone."""
        self._commands.put(lambda: self._requests.end_sample(request_id, sample))

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return sum and weight of every metric since the last call: `EngineMetrics.collect`."""
        return self._metrics.collect()

    # The engine thread.

    def _run(self) -> None:
        # Whatever ends the thread must reach those who wait for replies.
        try:
            self._core.start()
            while not self._closing:
                self._commands.drain()
                self._update_weights()
                self._requests.expire(self.version)
                self._admit()
                self._core.prefill()
                self._requests.fail(self._core.update_masks())
                if self._scheduler.has_active:
                    for finished in self._core.dispatch(self._may_run_ahead):
                        self._requests.deliver(finished)
                elif not (self._closing or self._scheduler.running):
                    self._idle()
            self._stop(EngineStopped("the decode engine was closed"))
        except Exception as error:  # of any class: it fails all requests, and is their cause
            stopped = EngineStopped(f"the engine thread ended with {type(error).__name__}: {error}")
            stopped.__cause__ = error
            self._stop(stopped)

    def _stop(self, reason: Exception) -> None:
        """Fail all unfinished requests and commands, and all that follow."""
        self._requests.fail_all(self._commands.stop(reason))

    def _update_weights(self) -> None:
        """Swap to the newest weights, if there are newer ones."""
        newest, self._arrived = self._arrived or self._weights.newest(self.version), None
        if newest is not None:
            self._core.update_weights(newest)

    def _admit(self) -> None:
        """Assign free slots to waiting sequences."""
        self._scheduler.admit(self.version)

    def _may_run_ahead(self) -> bool:
        """Return whether nothing but the next dispatch is to be done."""
        if self._closing or not self._commands.is_empty:
            return False
        scheduler = self._scheduler
        if self._requests.expired() is not None or not scheduler.can_run_ahead():
            return False
        self._arrived = self._weights.newest(self.version)
        return self._arrived is None and scheduler.reserve_ahead()

    def _await_others(self) -> None:
        """Wait for requests that arrive shortly after the first one."""
        wait_s = self._config.admission_wait_s
        end_s, num_waiting = time.perf_counter() + 8 * wait_s, 0
        while len(self._scheduler.waiting) > num_waiting and not self._closing:
            num_waiting = len(self._scheduler.waiting)
            if wait_s and time.perf_counter() < end_s:
                self._commands.drain(wait_s)

    def _idle(self) -> None:
        """Wait for a command, or for weights that a waiting request needs."""
        start_s = time.perf_counter()
        self._core.stop_gap_timer()
        if waiting := self._scheduler.waiting:
            at_least = min(group.request.min_version for group in waiting.values())
            # A short wait: the requests have deadlines of their own, which are checked between.
            with contextlib.suppress(TimeoutError):
                self._weights.wait(max(at_least, self.version + 1), _WEIGHTS_WAIT_S)
        else:
            self._commands.drain(_COMMANDS_WAIT_S)
            self._await_others()
        self._metrics.count("wait_s", time.perf_counter() - start_s)
