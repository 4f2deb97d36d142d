"""Several Ray nodes on this machine, each with its own object store; nodes die without warning."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import chz
import jax
import numpy as np
import psutil
import pytest
import ray
from cluster_runs import family, find_faults, tiny_run
from jax.sharding import NamedSharding, PartitionSpec
from ray.cluster_utils import Cluster as NodesOfRay
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from areal_jax import loop
from areal_jax.cluster import placement as cluster
from areal_jax.cluster.config import Ray
from areal_jax.cluster.engines import Engines
from areal_jax.cluster.graders import Graders
from areal_jax.cluster.placement import Cluster, InsufficientResources, Kind, connect
from areal_jax.cluster.registry import WorkerHandle
from areal_jax.cluster.trainers import Trainers
from areal_jax.cluster.weight_broadcast import WeightBroadcast
from areal_jax.errors import ConfigError
from areal_jax.records import Group, StepResult
from areal_jax.run.build import Run
from areal_jax.run.cluster import train_on_cluster
from areal_jax.run.grading import TracedGrader
from areal_jax.run.make_plan import make_plan
from areal_jax.weights.object_store import Contribution, ShardPublisher, ShardReader

pytestmark = pytest.mark.slow

SIZES = {"a": (3, 2), "b": (3, 2), "c": (3, 1), "d": (3, 2)}
"""Declared CPUs and GPUs of each node; jax finds one CPU device in every process."""

TIMEOUT_S = 600.0
STORE_BYTES = 80 * 2**20


@contextmanager
def starting_processes() -> Iterator[None]:
    with warnings.catch_warnings():
        # Ray does not keep them in view.
        warnings.simplefilter("ignore", ResourceWarning)
        # What is forked here becomes another program at once.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        yield


class Nodes:
    """A cluster whose head node runs no worker."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the head.

        Args:
            environment: environment of all processes of the nodes.
        """
        self._environment = environment
        # Dead after a second without an answer; one that answers late gets ten.
        quick = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 300,
            "health_check_failure_threshold": 3,
        }
        self._cluster = NodesOfRay()
        self._nodes: dict[str, Any] = {}
        self._start("head", num_cpus=0, include_dashboard=False, _system_config=quick)
        self.address = str(self._cluster.address)

    def have(self, *names: str) -> None:
        """Start and stop nodes so that exactly these exist, besides the head."""
        for name in self._nodes.keys() - {*names, "head"}:
            self.lose(name)
        for name in names:
            if name not in self._nodes:
                self._start(name, num_cpus=SIZES[name][0], num_gpus=SIZES[name][1], wait=False)
        self._cluster.wait_for_nodes()

    def lose(self, name: str) -> None:
        """Kill all processes of a node at once."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def of(self, connection: WorkerHandle) -> str:
        """Return the node of a worker."""
        raylet = psutil.Process(connection.process_id).ppid()
        return next(
            name
            for name, node in self._nodes.items()
            if node.all_processes["raylet"][0].process.pid == raylet
        )

    def id(self, name: str) -> str:
        """Return the Ray id of a node."""
        return self._nodes[name].node_id

    def end(self) -> None:
        self._cluster.shutdown()

    def _start(self, name: str, **how: Any) -> None:
        with pytest.MonkeyPatch.context() as patch, starting_processes():
            for variable in os.environ.keys() - self._environment.keys():
                patch.delenv(variable)
            for variable, value in self._environment.items():
                patch.setenv(variable, value)
            self._nodes[name] = self._cluster.add_node(object_store_memory=STORE_BYTES, **how)


@pytest.fixture(scope="module")
def nodes(of_a_command: dict[str, str]) -> Iterator[Nodes]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
    ):
        # Ray notes there which cluster was started last on a machine: not where others look.
        patch.setenv("RAY_TMPDIR", folder)
        roles = os.pathsep.join(
            (of_a_command["PYTHONPATH"], str(Path(__file__).parents[1] / "cluster"))
        )
        found = Nodes(of_a_command | {"PYTHONPATH": roles, "RAY_TMPDIR": folder})
        patch.setenv("RAY_ADDRESS", found.address)
        yield found
        with starting_processes():
            found.end()
            gc.collect()


@pytest.mark.parametrize(
    ("config", "reported"),
    [
        (
            Ray(cpus_per_process=4, rollout_engines=1, accelerator="none"),
            r"for 1 trainer host, 1 engine, 1 reward worker: expected 12 CPU, found 6; lower",
        ),
        (
            Ray(cpus_per_process=2, rollout_engines=1, accelerator="none"),
            r"expected one node for each \(trainer host 2 CPU, engine 2 CPU, reward worker 2 "
            r"CPU\), found nodes of 3 CPU and 2 GPU \(2 times\) without resources for 1 of 1 "
            r"reward worker; "
            r"lower",
        ),
        (
            Ray(engine_devices=3, rollout_engines=1),
            r"engine 1 CPU and 3 GPU, .* without resources for 1 of 1 engine; lower",
        ),
    ],
)
def test_process_too_large_for_every_node_is_refused_with_numbers(
    nodes: Nodes, config: Ray, reported: str
) -> None:
    nodes.have("a", "b")
    with pytest.raises(ConfigError, match=reported), connect(config):
        pass


def test_large_and_small_processes_fit_with_disjoint_devices(
    nodes: Nodes,
) -> None:
    nodes.have("a", "b")

    async def scenario() -> dict[str, tuple[str, str]]:
        with connect(Ray(trainer_devices=2, start_timeout_s=60.0)) as found:
            connections: list[WorkerHandle] = []
            async with found.reserve():
                # The small ones are asked for first: on a node each, they would leave not enough
                # resources for two devices.
                kinds: list[Kind] = ["engine", "engine", "reward worker", "trainer host"]
                for number, kind in enumerate(kinds):
                    connections.append((await found.start(kind, number, "echoing_role:Echo"))[0])
            try:
                return {
                    each.name: (nodes.of(each), await each.call("variable", "CUDA_VISIBLE_DEVICES"))
                    for each in connections
                }
            finally:
                await asyncio.gather(*(each.close() for each in connections))

    devices = asyncio.run(scenario())
    (large, of_large), (first, of_first), (second, of_second) = (
        devices[name] for name in ("trainer host 3", "engine 0", "engine 1")
    )
    assert of_large == "0,1" and {of_first, of_second} == {"0", "1"}
    assert first == second != large
    assert devices["reward worker 2"][1] == ""


def test_weights_lost_with_their_node_are_skipped_until_the_next(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.have("a", "b")
    whole = NamedSharding(
        jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1]), PartitionSpec()
    )
    # 4 MiB: what is small would travel with the reference to it.
    rows = 2**20

    class Host:
        """A process that puts weights into the store of its node."""

        def put(self, arrays: list[np.ndarray]) -> list[ray.ObjectRef]:
            return [ray.put(arrays)]

    def given(publisher: ShardPublisher, number: int, node: str) -> Contribution:
        publisher.publish(
            number, {"scale": jax.device_put(np.full(rows, number, np.float32), whole)}
        )
        contribution = publisher.next_contribution(number - 1, TIMEOUT_S)
        assert contribution is not None
        there = NodeAffinitySchedulingStrategy(nodes.id(node), soft=False)
        hosts.append(ray.remote(num_cpus=0)(Host).options(scheduling_strategy=there).remote())
        (chunk,) = contribution["chunks"]
        (chunk["ref"],) = ray.get(hosts[-1].put.remote(ray.get(chunk["ref"])), timeout=TIMEOUT_S)
        return contribution

    hosts: list[Any] = []
    with (
        connect(Ray(accelerator="none")),
        closing(ShardPublisher(lambda params: params)) as publisher,
        closing(
            ShardReader({"scale": whole}, {"scale": jax.ShapeDtypeStruct((rows,), np.float32)})
        ) as reader,
    ):
        dead_chunk, kept = given(publisher, 1, "b"), given(publisher, 2, "a")
        nodes.lose("b")
        with caplog.at_level(logging.WARNING):
            # The loss is not detected yet: the engine pulls.
            reader.pull(1, [dead_chunk])
            with pytest.raises(TimeoutError):
                reader.wait(1, 0.1)
            reader.pull(2, [kept])
            assert reader.wait(1, TIMEOUT_S).version == 2
        assert (
            "weight update skipped: version=1, a chunk of host 0 could not be pulled: "
            "OwnerDiedError" in caplog.text
        )
        measured = reader.metrics()
        assert (measured["skipped"], measured["delivered"]) == ((1.0, 1.0), (1.0, 1.0))


def test_missing_resources_are_reported_and_freed_ones_reused(
    nodes: Nodes,
) -> None:
    nodes.have("a")
    config = Ray(rollout_engines=1, accelerator="none", start_timeout_s=60.0)

    async def scenario() -> list[str]:
        with connect(config) as found:

            async def started(*numbers: int) -> list[WorkerHandle]:
                parts = await asyncio.gather(
                    *(found.start("engine", number, "echoing_role:Echo") for number in numbers)
                )
                return [connection for connection, _ in parts]

            given_up, closed, other = await started(0, 1, 2)
            with pytest.raises(InsufficientResources) as caught:
                await Cluster(chz.replace(config, start_timeout_s=1.0), "none").start(
                    "engine", 3, "echoing_role:Echo"
                )
            given_up.mark_dead("it is of no use")
            await closed.close()
            others = await started(4, 5)
            await asyncio.gather(*(each.close() for each in (other, *others)))
            return [str(caught.value), *(each.name for each in others)]

    reported, *names = asyncio.run(scenario())
    assert reported == (
        "expected a node with 1 CPU free for engine 3 within launch.start_timeout_s=1; nodes have "
        "3 CPU and 2 GPU in total"
    )
    assert names == ["engine 4", "engine 5"]


STEPS = 10


@pytest.mark.timeout(1500)
@pytest.mark.ray_run
def test_run_on_three_nodes_survives_the_death_of_two(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.have("a", "b", "c")
    # 5 devices for 4 workers with one each: those of c fit on the remaining nodes, those of a do
    # not.
    settings = ("launch.accelerator=GPU", "launch.reward_workers=1")
    experiment = tiny_run(tmp_path, f"num_steps={STEPS}", *settings)
    monkeypatch.setattr(cluster, "NOTICE_S", 0.5)
    dead: dict[str, list[str]] = {}
    processes: list[psutil.Process] = []
    others: list[asyncio.Task[None]] = []
    # The first life's trainer waits before these steps: it is faster than a process starts.
    waits_at = {4: threading.Event(), 7: threading.Event()}

    def waiting(run: Run[Trainers]) -> Callable[[Sequence[Group]], StepResult]:
        step = run.trainer.step

        def waited(groups: Sequence[Group]) -> StepResult:
            if (event := waits_at.get(run.trainer.version)) is not None:
                assert event.wait(TIMEOUT_S)
            return step(groups)

        return waited

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    async def losing(run: Run[Trainers]) -> None:
        """Before the first restart, kill a node without a trainer host, and then one with.

        Each of them has an engine.
        """
        assert (
            isinstance(run.engine, Engines)
            and isinstance(run.grader, TracedGrader)
            and isinstance(run.weight_channel, WeightBroadcast)
        )
        graders, engines, broadcast = run.grader.counted, run.engine, run.weight_channel
        assert isinstance(graders, Graders)

        def parts() -> dict[str, list[str]]:
            """Return the workers by node."""
            found: dict[str, list[str]] = {}
            for connection in (
                *run.trainer.connections,
                *engines.connections,
                *graders.connections,
            ):
                found.setdefault(nodes.of(connection), []).append(connection.name)
            return found

        def lose(name: str) -> None:
            dead[name] = parts()[name]
            nodes.lose(name)

        where = parts()
        assert {
            name for name, found in where.items() if any("trainer host" in part for part in found)
        } == {"a", "b"}
        assert any("engine" in part for part in where["c"])
        await until(lambda: run.trainer.version >= 1)
        await asyncio.to_thread(broadcast.wait_all_engines, 1, TIMEOUT_S)
        lose("c")
        await until(lambda: run.trainer.version == 4)
        await until(
            lambda: (
                engines.num_deaths == 1
                and len(engines.connections) == 2
                and len(graders.connections) == 1
            )
        )
        await asyncio.to_thread(broadcast.wait_all_engines, 4, TIMEOUT_S)
        waits_at[4].set()
        await until(lambda: run.trainer.version == 7)
        # No call of the trainer hosts is pending: the run must detect it.
        lose("a")

    async def adding() -> None:
        """Add nodes once the run waits for resources."""
        await until(lambda: "a" in dead)
        num_reported = len(caplog.messages)
        await until(
            lambda: any(
                "waiting for resources" in message for message in caplog.messages[num_reported:]
            )
        )
        nodes.have("b", "d")

    async def train(run: Run[Trainers]) -> None:
        processes.extend(
            process for connection in run.trainer.connections for process in family(connection)
        )
        if not dead:
            monkeypatch.setattr(run.trainer, "step", waiting(run))
            others.append(asyncio.create_task(losing(run)))
        else:
            waits_at[7].set()
        await loop.train(run, experiment)

    async def whole() -> None:
        others.append(asyncio.create_task(adding()))
        await train_on_cluster(make_plan(experiment), tmp_path, train, resume=False, source="aime")
        async with asyncio.timeout(1):
            await asyncio.gather(*others)

    with caplog.at_level(logging.WARNING):
        asyncio.run(whole())

    assert all(
        any(f"worker died: {part}" in message for message in caplog.messages) for part in dead["c"]
    ), caplog.messages
    # The one on a takes the other with it, which may be noticed first.
    assert any(
        re.match(r"trainer host . died.*resumes from its last checkpoint", message)
        for message in caplog.messages
    )
    assert find_faults(tmp_path, STEPS) == []
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
