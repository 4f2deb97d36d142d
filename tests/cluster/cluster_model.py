"""A run on a cluster under simulated time, with real broadcast, engines, router and rolling update.

Trainer hosts and engines are models. Their messages cross a network that drops, delays, duplicates
and reorders them; engines die, hang and are replaced; objects of the store are lost. The loop
trains on batches as `areal_jax.loop` does, and evaluates while the weight broadcast is paused.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_jax.cluster import wire
from areal_jax.cluster.engines import Engines
from areal_jax.cluster.weight_broadcast import WeightBroadcast
from areal_jax.errors import WorkerDied
from areal_jax.records import NO_VERSION, Completion, Request, Sampling, Weights, empty_completion
from areal_jax.sim import clock
from areal_jax.weights.rolling import ENGINES_PER_TURN, RollingSource

MOST_SIMULATED_S = 3600.0
"""Simulated time after which a run counts as stalled; most take a few minutes."""

FAULTS_END_S = 90.0
"""Simulated time after which no faults happen."""

LENGTH = 6
"""Number of tokens of a completion."""

STEP_S = 0.5
"""Duration of one decode step of an engine."""

PROMPT = np.arange(3, dtype=np.int32)


@dataclass(frozen=True)
class Setup:
    """A run and the network below it."""

    seed: int = 0
    num_engines: int = 2
    num_slots: int = 4
    num_steps: int = 3
    batch: int = 3
    max_staleness: int = 1
    evaluate_every: int = 0
    loss: float = 0.0
    """Share of messages that are lost."""
    doubled: float = 0.0
    """Share of messages without a reply that arrive twice."""
    most_delay_s: float = 0.05
    most_pull_s: float = 1.0
    failed_pulls: float = 0.0
    """Share of pulls that fail although no object is lost."""
    most_swap_s: float = 0.5
    start_s: float = 3.0
    """Start time of a replacement engine."""


@dataclass(frozen=True)
class Fault:
    """A fault `after_s` seconds after the previous one."""

    after_s: float
    kind: str
    """One of FAULTS."""
    which: int = 0


FAULTS = ("kill", "kill", "leave", "kill all", "hang", "lose objects", "full store", "partition")


@dataclass
class Outcome:
    """Result of a run."""

    ended_s: float = math.inf
    answered: dict[str, list[Completion]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Violated invariants."""
    waits_for: str = ""


class Network:
    """Network between the controller and its workers."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self._setup, self._rng, self._loop = setup, rng, asyncio.get_running_loop()
        self.is_down = False

    def send(self, deliver: Callable[[], None], *, once: bool = False) -> None:
        if self.is_down or self._rng.random() < self._setup.loss:
            return
        for _ in range(1 if once or self._rng.random() >= self._setup.doubled else 2):
            self._loop.call_later(self._rng.random() * self._setup.most_delay_s, deliver)


class Objects:
    """The object store: which puts of which version still exist."""

    def __init__(self) -> None:
        self.lost: set[tuple[int, int, int]] = set()
        """Version, host, number of the put."""
        self.put: list[tuple[int, int, int]] = []
        self.full_until_s = 0.0


class HostModel:
    """Model of `trainer_host.TrainerHost` with its publisher."""

    def __init__(self, number: int, objects: Objects, rng: random.Random) -> None:
        self._number, self._objects, self._rng, self._loop = (
            number,
            objects,
            rng,
            asyncio.get_running_loop(),
        )
        self.version, self.is_stepping = 0, False
        self._puts = itertools.count()
        self._sent: int | None = None
        self._given: tuple[int, dict[str, Any]] | None = None
        self._failure = ""

    def publish(self, version: int, again: bool) -> None:
        if self.is_stepping or version != self.version:
            return
        if again and self._sent == version and self._given is not None:
            self._sent = self._given = None
        if self._sent is None or version > self._sent:
            self._sent, self._failure = version, ""
            self._loop.call_later(self._rng.random(), self._put, version)

    def _put(self, version: int) -> None:
        if self._loop.time() < self._objects.full_until_s:
            self._sent, self._failure = None, "the object store is full"
            return
        put = (version, self._number, next(self._puts))
        self._objects.put.append(put)
        if self._given is None or self._given[0] < version:
            self._given = version, {"version": version, "host": self._number, "put": put}

    async def contribution(self, after: int) -> Any:
        for _ in range(5):
            if self._given is not None and self._given[0] > after:
                return self._given[1]
            await asyncio.sleep(1.0)
        on_its_way = self._sent is not None and self._sent > after
        return None if on_its_way else self._failure or "nothing newer was published"


class TrainersModel:
    """Model of `cluster.trainers.Trainers` with two hosts."""

    num_hosts = 2

    def __init__(self, network: Network, objects: Objects, rng: random.Random) -> None:
        self._network, self._rng = network, rng
        self.hosts = [HostModel(number, objects, rng) for number in range(2)]
        self.version, self.is_stepping = 0, False

    async def step(self) -> None:
        self.is_stepping = True
        for host in self.hosts:
            host.is_stepping = True
        await asyncio.sleep(0.2 + 2 * self._rng.random())
        for host in self.hosts:
            host.is_stepping, host.version = False, host.version + 1
        self.is_stepping = False
        self.version += 1

    def publish(self, version: int, *, again: bool = False) -> None:
        for host in self.hosts:
            self._network.send(lambda host=host: host.publish(version, again))

    async def contribution(self, host: int, after: int) -> Any:
        return await self.hosts[host].contribution(after)

    def mark_dead(self, why: str) -> None:
        raise AssertionError(why)

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        return {}


class ReaderModel:
    """Model of `weights.object_store.ShardReader`."""

    def __init__(
        self, setup: Setup, objects: Objects, rng: random.Random, emit: Callable[[str, Any], None]
    ) -> None:
        self._setup, self._objects, self._rng, self._emit = setup, objects, rng, emit
        self._loop = asyncio.get_running_loop()
        self.newest_version = NO_VERSION
        self.pending_version: int | None = None

    def pull(self, version: int, contributions: Sequence[Any]) -> None:
        if version > max(
            self.newest_version,
            NO_VERSION if self.pending_version is None else self.pending_version,
        ):
            self.pending_version = version
            self._loop.call_later(
                self._rng.random() * self._setup.most_pull_s, self._pulled, version, contributions
            )

    def _pulled(self, version: int, contributions: Sequence[Any]) -> None:
        if self.pending_version == version:
            self.pending_version = None
        if (
            any(each["put"] in self._objects.lost for each in contributions)
            or self._rng.random() < self._setup.failed_pulls
        ):
            self._emit("update_failed", (version, "a chunk is lost"))
        elif version > self.newest_version:
            self.newest_version = version
            self._emit("weights", version)

    def newest(self, after: int) -> Weights | None:
        return Weights(self.newest_version, None) if self.newest_version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        raise AssertionError("nothing waits in a thread here")


@dataclass
class _Running:
    request: Request
    ticket: int
    sampled: list[Completion]
    reported: int


class EngineModel:
    """Model of `worker_roles.EngineHost` with its engine loop; also its own WorkerHandle."""

    def __init__(self, number: int, world: World) -> None:
        self.number, self.name, self.process_id, self.cpu_s = (
            number,
            f"engine {number}",
            number,
            0.0,
        )
        self._world, self._setup, self._rng = world, world.setup, world.rng
        self._loop = asyncio.get_running_loop()
        self._reader = ReaderModel(world.setup, world.objects, world.rng, self._emit)
        self._rolling_source = RollingSource(
            self._reader,
            request_turn=lambda ticket, _: self._emit("turn_requested", ticket),
            end_turn=lambda ticket: self._emit("turn_ended", ticket),
            clock=self._loop.time,
        )
        self.version = NO_VERSION
        self.is_swapping = False
        self.hangs_until_s = 0.0
        self._held: dict[str, _Running] = {}
        self._tickets = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._reported: Callable[[str, Any], None] = lambda _topic, _what: None
        self._on_death: Callable[[WorkerDied], None] = lambda _loss: None
        self.loss: WorkerDied | None = None
        self._tasks = [asyncio.create_task(work()) for work in (self._draw, self._report)]

    # The controller's side: a WorkerHandle.

    def subscribe(
        self, on_report: Callable[[str, Any], None], on_death: Callable[[WorkerDied], None]
    ) -> None:
        self._reported, self._on_death = on_report, on_death

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        if self.loss is not None:
            future.set_exception(self.loss)
            return future
        ticket = next(self._tickets)
        self._asked[ticket] = future
        future.add_done_callback(lambda _: self._cancel(ticket) if future.cancelled() else None)
        answer = {"submit": self._submit, "snapshot": self._snapshot}[method]
        self._world.network.send(lambda: answer(ticket, *arguments), once=True)
        return future

    def notify(self, method: str, *arguments: Any) -> None:
        if self.loss is None:
            self._world.network.send(lambda: self._drain_commands(method, *arguments))

    def mark_dead(self, why: str, *, report: bool = True) -> None:
        self.lose(f"died: it was killed: {why}")

    async def close(self, timeout_s: float = 0.0) -> None:
        self.lose("is closed", report=False)

    def lose(self, why: str, *, report: bool = True) -> None:
        """End the process and report its death."""
        if self.loss is not None:
            return
        self.die()
        self.loss = WorkerDied(f"{self.name} {why}")
        for future in self._asked.values():
            if not future.done():
                future.set_exception(self.loss)
        if report:
            self._on_death(self.loss)

    def die(self) -> None:
        """End the process without a report."""
        self.is_swapping = False
        for task in self._tasks:
            task.cancel()

    # The engine's side.

    @property
    def is_dead(self) -> bool:
        return any(task.cancelling() or task.done() for task in self._tasks)

    def _cancel(self, ticket: int) -> None:
        self._asked.pop(ticket, None)

        def cancel() -> None:
            for name, held in list(self._held.items()):
                if held.ticket == ticket:
                    del self._held[name]

        self._world.network.send(cancel)

    def _emit(self, topic: str, what: Any) -> None:
        def deliver() -> None:
            if self.loss is None:
                self._reported(topic, what)

        if not self.is_dead:
            self._world.network.send(deliver)

    def _submit(self, ticket: int, plain: Any) -> None:
        if self.is_dead:
            return
        request = wire.decode_request(plain)
        sampled = list(request.resume) or [empty_completion()] * request.num_samples
        self._held[request.id] = _Running(request, ticket, sampled, len(sampled[0].tokens))

    def _snapshot(self, ticket: int) -> None:
        if not self.is_dead:
            answer = {
                name: wire.encode_completions(each.sampled) for name, each in self._held.items()
            }
            self._world.network.send(lambda: self._answer(ticket, answer), once=True)

    def _drain_commands(self, verb: str, *arguments: Any) -> None:
        if not self.is_dead:
            match verb:
                case "update_weights":
                    self._reader.pull(*arguments)
                case "grant_turn":
                    self._rolling_source.grant_turn(*arguments)

    def _running(self) -> list[_Running]:
        able = [held for held in self._held.values() if held.request.min_version <= self.version]
        return able[: self._setup.num_slots]

    async def _draw(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            if self._loop.time() < self.hangs_until_s:
                continue
            if (weights := self._rolling_source.newest(self.version)) is not None:
                self._world.swap_begins(self, weights.version)
                await asyncio.sleep(self._rng.random() * self._setup.most_swap_s)
                self._world.swap_ends(self, weights.version)
                self._rolling_source.complete_swap()
            for held in self._running():
                self._draw_one(held)

    def _draw_one(self, held: _Running) -> None:
        (sampled,) = held.sampled
        start = len(sampled.tokens)
        if start < LENGTH:
            arrays = (
                np.array([start], np.int32),
                np.array([-0.5], np.float32),
                np.array([self.version], np.int32),
            )
            held.sampled = [sampled.concatenate(Completion(*arrays, "suspended"))]
        if len(held.sampled[0].tokens) >= LENGTH:
            done = held.sampled[0]
            answer = wire.encode_completions(
                [Completion(done.tokens, done.logp, done.versions, "length")]
            )
            if self._held.get(held.request.id) is held:
                del self._held[held.request.id]
            self._world.network.send(lambda: self._answer(held.ticket, answer), once=True)

    def _answer(self, ticket: int, answer: Any) -> None:
        future = self._asked.pop(ticket, None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self._loop.time() >= self.hangs_until_s:
                news = {}
                for name, held in self._held.items():
                    if len(held.sampled[0].tokens) > held.reported:
                        news[name] = {
                            0: (
                                held.reported,
                                wire.encode_completion(held.sampled[0].slice(held.reported)),
                            )
                        }
                        held.reported = len(held.sampled[0].tokens)
                if news:
                    self._emit("progress", news)
            self._emit(
                "state",
                {
                    "version": self._reader.newest_version,
                    "pulling": self._reader.pending_version,
                    "decoding": self.version,
                    "requests": list(self._held),
                    "running": [held.request.id for held in self._running()],
                },
            )


class World:
    """A run, its processes, and its faults."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.rng = setup, random.Random(setup.seed)
        self.loop = asyncio.get_running_loop()
        self.network = Network(setup, self.rng)
        self.objects = Objects()
        self.trainers = TrainersModel(self.network, self.objects, self.rng)
        self.engines = Engines(wait_s=900.0)
        self.broadcast = WeightBroadcast(self.trainers, self.engines, collect_timeout_s=60.0)
        self.living: dict[int, EngineModel] = {}
        self.outcome = Outcome()
        self._leaving = set[asyncio.Task[None]]()
        self._numbers = itertools.count()
        self._num_groups = itertools.count()

    # Processes.

    def start_engine(self) -> None:
        number = next(self._numbers)
        engine = self.living[number] = EngineModel(number, self)

        def on_death() -> None:
            self.living.pop(number, None)
            self.loop.call_later(self.setup.start_s, self.start_engine)

        self.engines.join(number, engine, self.setup.num_slots, on_death)

    def swap_begins(self, engine: EngineModel, version: int) -> None:
        if version <= engine.version:
            self.outcome.broken.append(
                f"{engine.name} swaps from version {engine.version} to {version}"
            )
        engine.is_swapping = True
        swapping = [each.name for each in self.living.values() if each.is_swapping]
        if len(swapping) > max(1, self.setup.num_engines // ENGINES_PER_TURN):
            self.outcome.broken.append(f"{', '.join(swapping)} swap at once")

    def swap_ends(self, engine: EngineModel, version: int) -> None:
        engine.is_swapping, engine.version = False, version

    async def happen(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            await asyncio.sleep(fault.after_s)
            if self.loop.time() > FAULTS_END_S:
                return
            alive = [engine for engine in self.living.values() if not engine.is_dead]
            victim = alive[fault.which % len(alive)] if alive else None
            match fault.kind:
                case "kill" if victim is not None:
                    self._kill(victim)
                case "leave" if victim is not None:
                    self._leave(victim)
                case "kill all":
                    for engine in alive:
                        self._kill(engine)
                case "hang" if victim is not None:
                    victim.hangs_until_s = self.loop.time() + 2.0 * (1 + fault.which)
                case "lose objects":
                    newest = max((put[0] for put in self.objects.put), default=0)
                    self.objects.lost |= {
                        put for put in self.objects.put if put[0] >= newest - fault.which % 2
                    }
                case "full store":
                    self.objects.full_until_s = self.loop.time() + 2.0 * fault.which
                case "partition":
                    self.network.is_down = True
                    self.loop.call_later(1.0 * fault.which, setattr, self.network, "is_down", False)

    def _kill(self, engine: EngineModel) -> None:
        engine.die()
        self.loop.call_later(self.rng.random() * 3, engine.lose, "died: killed")

    def _leave(self, engine: EngineModel) -> None:
        """End an engine in good order; another one joins later."""

        async def leave() -> None:
            await self.engines.leave(engine.number)
            if self.living.pop(engine.number, None) is not None:
                self.loop.call_later(self.setup.start_s, self.start_engine)

        self._leaving.add(asyncio.create_task(leave(), name=f"{engine.name} leaves"))

    # The loop.

    async def train(self, faults: Sequence[Fault]) -> None:
        setup = self.setup
        for _ in range(setup.num_engines):
            self.start_engine()
        self.broadcast.publish(0, None)
        happening = asyncio.create_task(self.happen(faults))
        groups: dict[int, asyncio.Task[None]] = {}
        evaluations: set[asyncio.Task[None]] = set()
        for version in range(setup.num_steps):
            for group in range((version + 1 + setup.max_staleness) * setup.batch):
                if group not in groups:
                    oldest = max(0, group // setup.batch - setup.max_staleness)
                    groups[group] = asyncio.create_task(self.submit(f"group {group}", oldest))
            self.outcome.waits_for = f"the batch of version {version}"
            await asyncio.gather(
                *(groups[version * setup.batch + place] for place in range(setup.batch))
            )
            self.outcome.waits_for = f"step {version}"
            await self.trainers.step()
            self.broadcast.publish(version + 1, None)
            if (
                setup.evaluate_every
                and (version + 1) % setup.evaluate_every == 0
                and not evaluations
            ):
                self.outcome.waits_for = f"weights of version {version + 1} everywhere"
                await self.engines.wait_for_version(version + 1, 1800.0)
                evaluation = asyncio.create_task(self.evaluate(version + 1))
                evaluations.add(evaluation)
                evaluation.add_done_callback(evaluations.discard)
        self.outcome.waits_for = "running evaluations and groups"
        await asyncio.gather(*evaluations, *groups.values())
        self.outcome.waits_for = f"version {setup.num_steps} at every engine"
        await happening
        while not self.living or any(
            engine.version < setup.num_steps for engine in self.living.values()
        ):
            await asyncio.sleep(1.0)
        self.outcome.ended_s = self.loop.time()

    async def submit(self, name: str, min_version: int) -> None:
        found = await self.engines.submit(
            Request(name, PROMPT, 1, Sampling(LENGTH), seed=1, min_version=min_version)
        )
        if name in self.outcome.answered:
            self.outcome.broken.append(f"{name} was answered twice")
        self.outcome.answered[name] = found
        (one,) = found
        if one.tokens.tolist() != list(range(LENGTH)) or one.stop_reason != "length":
            self.outcome.broken.append(f"{name} has tokens {one.tokens.tolist()}")
        if one.versions.min() < min_version:
            self.outcome.broken.append(
                f"{name} of version {min_version} has tokens of version {one.versions.min()}"
            )

    async def evaluate(self, version: int) -> None:
        with self.broadcast.paused():
            await asyncio.gather(
                *(self.submit(f"evaluation {version}.{each}", version) for each in range(3))
            )

    async def close(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if "training" in task.get_name():
                task.cancel()
        await self.broadcast.close()
        await self.engines.close()


def simulated(setup: Setup, faults: Sequence[Fault]) -> Outcome:
    """Run under simulated time, until the end or MOST_SIMULATED_S."""

    async def whole() -> Outcome:
        world = World(setup)
        training = asyncio.create_task(world.train(faults), name="training")
        await asyncio.wait([training], timeout=MOST_SIMULATED_S)
        outcome = world.outcome
        if not training.done():
            engines = ", ".join(
                f"{each.name} version {each.version}" for each in world.living.values()
            )
            outcome.broken.append(
                f"after {MOST_SIMULATED_S:g} s it waits for {outcome.waits_for}; {engines}"
            )
        elif (error := training.exception()) is not None:
            raise error
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await world.close()
        return outcome

    return clock.run(whole())
