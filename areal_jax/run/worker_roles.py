"""Role of an engine of a run on a cluster.

A role reads the settings as the run wrote them, builds the same components as a run in one process,
and reports facts that the run compares.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from areal_jax.cluster import wire
from areal_jax.cluster.config import Ray
from areal_jax.cluster.worker import Emit
from areal_jax.config.load import read_settings
from areal_jax.engine.engine_loop import EngineLoop, EngineStatus
from areal_jax.errors import ConfigError
from areal_jax.models import lora
from areal_jax.records import NO_VERSION, Completion
from areal_jax.run.models import decoding_mesh, find_decoding_policy
from areal_jax.run.reward_worker import Facts, releases
from areal_jax.trainer.state import trained
from areal_jax.weights.object_store import ShardReader
from areal_jax.weights.rolling import RollingSource

STATE_EVERY_S = 1.0
"""Shortest interval at which an engine reports its weights and its requests."""

_ALL = -1
"""Number of reported tokens of a finished sample."""


class EngineHost:
    """One engine on all devices of its process."""

    def __init__(self, emit: Emit, settings: str, source: str | None) -> None:
        """Find the policy, compile and start the engine loop. Arguments as of `TrainerHost`."""
        self._emit, self._experiment = emit, read_settings(settings, source)
        exp = self._experiment
        mesh = decoding_mesh(exp.placement, "placement.rollout_devices")
        found = find_decoding_policy(exp.policy, exp.engine, mesh, None, seed=exp.seed)
        launch, engine = exp.launch, found.engine
        assert isinstance(launch, Ray)
        if engine.mesh.size != launch.engine_devices:
            raise ConfigError(
                f"an engine has {engine.mesh.size} devices, expected "
                f"launch.engine_devices={launch.engine_devices}"
            )
        self._found, self._report_every_s = found, launch.report_every_s
        base = found.load_base()
        self._reader = ShardReader(
            engine.param_shardings,
            jax.eval_shape(engine.layout, trained(found.policy).abstract),
            complete=None
            if base is None
            else lambda arrived: lora.attach(found.policy, base, arrived),
            on_event=lambda name, _start_s, _end_s, args: emit(name, args["version"]),
            on_failure=lambda version, why: emit("update_failed", (version, why)),
        )
        self._rolling_source = RollingSource(
            self._reader,
            request_turn=lambda ticket, _: emit("turn_requested", ticket),
            end_turn=lambda ticket: emit("turn_ended", ticket),
        )
        self._engine_loop = EngineLoop(
            engine,
            self._rolling_source,
            on_event=self._start_engine_loop,
            grammars=found.grammars(),
        )
        engine.warm_up()
        self._engine_loop.start()
        # Number of reported tokens by request and sample.
        self._reported: dict[str, list[int]] = {}
        self._status = EngineStatus(NO_VERSION, (), 0)
        self._reporters: list[asyncio.Task[None]] = []

    async def begin(self) -> Facts:
        """Start reporting."""
        self._reporters = [
            asyncio.create_task(report(), name="reporter")
            for report in (self._report, self._report_state)
        ]
        engine = self._found.engine
        facts = {"num_slots": engine.config.num_slots, "policy": self._found.fingerprint()}
        return releases() | facts | {"devices": describe_devices(list(engine.mesh.devices.flat))}

    async def submit(self, plain: Any) -> Any:
        """Answer a request. A cancelled request frees its slots."""
        request = wire.decode_request(plain)
        reported = self._reported[request.id] = [
            len(sampled.tokens) for sampled in request.resume
        ] or [0] * request.num_samples
        try:
            return wire.encode_completions(await self._engine_loop.submit(request))
        finally:
            if self._reported.get(request.id) is reported:
                del self._reported[request.id]

    async def snapshot(self) -> dict[str, Any]:
        """Partial completions of all unfinished requests."""
        return {
            name: wire.encode_completions(sampled)
            for name, sampled in (await self._engine_loop.snapshot()).items()
        }

    def end_sample(self, request_id: str, sample: int) -> None:
        """As `EngineLoop.end_sample`."""
        self._engine_loop.end_sample(request_id, sample)

    def update_weights(self, version: int, contributions: Sequence[Any]) -> None:
        """Receive references to the weights of a version."""
        self._reader.pull(version, contributions)

    def grant_turn(self, ticket: float) -> None:
        """Allow the engine to switch to the newest weights that it has."""
        self._rolling_source.grant_turn(ticket)

    async def end(self) -> None:
        """Stop the engine loop."""
        for reporter in self._reporters:
            reporter.cancel()
        await asyncio.to_thread(self._engine_loop.close)
        await asyncio.to_thread(self._reader.close)

    def _start_engine_loop(
        self, name: str, start_s: float, end_s: float, args: Mapping[str, int | float]
    ) -> None:
        if name == "swap":
            self._rolling_source.complete_swap()

    async def _report(self) -> None:
        """Report sampled tokens and metrics at an interval."""
        while True:
            await asyncio.sleep(self._report_every_s)
            sampled = await self._engine_loop.snapshot()
            news = {
                name: found
                for name, completions in sampled.items()
                if (found := self._news(name, completions))
            }
            if news:
                self._emit("progress", news)
            self._emit("measures", self._engine_loop.metrics())
            self._status = await self._engine_loop.status()

    async def _report_state(self) -> None:
        """Report versions and requests at an interval, also while the engine loop is busy."""
        while True:
            self._emit(
                "state",
                {
                    "version": self._reader.newest_version,
                    "pulling": self._reader.pending_version,
                    "decoding": self._status.version,
                    "requests": list(self._reported),
                    "running": list(self._status.running),
                },
            )
            await asyncio.sleep(max(self._report_every_s, STATE_EVERY_S))

    def _news(self, name: str, completions: Sequence[Completion]) -> dict[int, Any]:
        """New tokens since the last report: by sample, the index of the first one, and the
        tokens.
        """
        reported, news = self._reported.get(name, []), dict[int, Any]()
        for sample, (start, sampled) in enumerate(zip(reported, completions, strict=False)):
            is_finished = sampled.stop_reason != "suspended"
            if start != _ALL and (is_finished or len(sampled.tokens) > start):
                part = replace(sampled.slice(start), experts=sampled.experts)
                news[sample] = start, wire.encode_completion(part)
                reported[sample] = _ALL if is_finished else len(sampled.tokens)
        return news


def describe_devices(devices: Sequence[jax.Device]) -> str:
    """Number, kind and host of devices."""
    return f"{len(devices)} {devices[0].device_kind} at {socket.gethostname()}"
