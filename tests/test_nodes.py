"""Several nodes of Ray on this machine, each with an object store of its own; some are lost without warning."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import ray
from cluster_runs import GROUPS, SAMPLES, STALENESS, STEPS, family, small_run
from ray.cluster_utils import Cluster as NodesOfRay
from run_laws import each_task_was_trained_on_once

from areal_jax import loop
from areal_jax.assembly import Run
from areal_jax.clustered import train_on_cluster
from areal_jax.launch import cluster
from areal_jax.launch.cluster import connected
from areal_jax.launch.config import Ray
from areal_jax.launch.connection import Connection
from areal_jax.launch.engines import Engines
from areal_jax.launch.judges import Judges
from areal_jax.launch.trainers import Trainers
from areal_jax.metrics import jsonl
from areal_jax.run_plan import make_plan
from areal_jax.settings import ConfigError

pytestmark = pytest.mark.slow

SIZES = {"a": (3, 2), "b": (3, 2), "c": (3, 1), "d": (3, 2)}
"""CPUs and GPUs of each node. Ray takes them on trust: jax finds one CPU in every process, which does for one GPU."""

STORE_BYTES = 80 * 2**20


class Nodes:
    """A cluster whose head carries none of the parts."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Args: environment: of all that nodes start."""
        self._environment = environment
        # Dead after a second without an answer; one that answers late gets ten.
        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
        self._cluster = NodesOfRay()
        self._nodes: dict[str, Any] = {}
        self._start("head", num_cpus=0, include_dashboard=False, _system_config=quick)
        self.address: str = self._cluster.address

    def have(self, *names: str) -> None:
        """Just these, and the head."""
        for name in self._nodes.keys() - {*names, "head"}:
            self.lose(name)
        for name in names:
            if name not in self._nodes:
                self._start(name, num_cpus=SIZES[name][0], num_gpus=SIZES[name][1], wait=False)
        self._cluster.wait_for_nodes()

    def lose(self, name: str) -> None:
        """Kill all that runs there, at once."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def of(self, connection: Connection) -> str:
        """Where a part runs."""
        raylet = psutil.Process(connection.process_id).ppid()
        return next(name for name, node in self._nodes.items() if node.all_processes["raylet"][0].process.pid == raylet)

    def end(self) -> None:
        self._cluster.shutdown()

    def _start(self, name: str, **how: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for variable in os.environ.keys() - self._environment.keys():
                patch.delenv(variable)
            for variable, value in self._environment.items():
                patch.setenv(variable, value)
            self._nodes[name] = self._cluster.add_node(object_store_memory=STORE_BYTES, **how)


@pytest.fixture(scope="module")
def nodes(of_a_command: dict[str, str]) -> Iterator[Nodes]:
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
    ):
        # It starts processes that it does not keep in view.
        warnings.simplefilter("ignore", ResourceWarning)
        # What is forked here becomes another program at once.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        # Ray notes there which cluster was started last on a machine: not where others look.
        patch.setenv("RAY_TMPDIR", folder)
        roles = os.pathsep.join((of_a_command["PYTHONPATH"], str(Path(__file__).parent / "launch")))
        found = Nodes(of_a_command | {"PYTHONPATH": roles, "RAY_TMPDIR": folder})
        patch.setenv("RAY_ADDRESS", found.address)
        yield found
        found.end()
        gc.collect()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            Ray(cpus_per_process=4, rollout_engines=1, accelerator="none"),
            r"too small for 1 trainer host, 1 engine, 1 reward worker: they need 12 CPU where there are 6; lower",
        ),
        (
            Ray(cpus_per_process=2, rollout_engines=1, accelerator="none"),
            r"each has to lie on one node \(trainer host 2 CPU, engine 2 CPU, reward worker 2 CPU\), and nodes of 3 CPU and 2 GPU "
            r"\(2 times\) have no room for 1 of 1 reward worker; lower",
        ),
        (Ray(engine_devices=3, rollout_engines=1), r"engine 1 CPU and 3 GPU, .* have no room for 1 of 1 engine; lower"),
    ],
)
def test_what_no_node_has_room_for_is_refused_with_the_numbers(nodes: Nodes, config: Ray, told: str) -> None:
    nodes.have("a", "b")
    with pytest.raises(ConfigError, match=told), connected(config):
        pass


def test_large_processes_find_room_beside_small_ones_and_all_have_devices_of_their_own(nodes: Nodes) -> None:
    nodes.have("a", "b")

    async def talk() -> dict[str, tuple[str, str]]:
        with connected(Ray(trainer_devices=2, start_timeout_s=60.0)) as found:
            connections: list[Connection] = []
            async with found.reserved():
                # The small ones are asked for first: on a node each, they would leave no room for two devices.
                for kind, number in (("engine", 0), ("engine", 1), ("reward worker", 0), ("trainer host", 0)):
                    connections.append((await found.start(kind, number, "echoing_role:Echo"))[0])
            try:
                return {each.name: (nodes.of(each), await each.ask("variable", "CUDA_VISIBLE_DEVICES")) for each in connections}
            finally:
                await asyncio.gather(*(each.close() for each in connections))

    devices = asyncio.run(talk())
    (large, of_large), (first, of_first), (second, of_second) = (
        devices[name] for name in ("trainer host 0", "engine 0", "engine 1")
    )
    assert of_large == "0,1" and {of_first, of_second} == {"0", "1"}
    assert first == second != large
    assert devices["reward worker 0"][1] == ""
