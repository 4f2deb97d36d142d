"""Connection to a Ray cluster and placement of processes on its nodes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Literal

import chz
import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_jax.cluster.config import Ray
from areal_jax.cluster.connection import Connection
from areal_jax.cluster.signals import save_handlers
from areal_jax.errors import ConfigError

logger = logging.getLogger(__name__)

REACH_TIMEOUT_S = 30.0

NOTICE_S = 10.0
"""Time to wait for resources before a warning, in seconds."""

POLL_S = 0.2

RESOURCE_UNIT = 1e-4
"""Smallest amount of a resource that Ray distinguishes."""

Kind = Literal["trainer host", "engine", "reward worker"]

Amounts = Mapping[str, float]
"""Amount of each Ray resource: CPU, GPU, TPU."""

TPU_CHIPS = (1, 2, 4, 8)
"""Numbers of TPU chips that Ray gives to a process."""


class InsufficientResources(ConfigError):
    """No node had the resources for a process in time."""


class Cluster:
    """A Ray cluster. Every process has a placement group of one bundle on one node."""

    def __init__(self, config: Ray, accelerator: str) -> None:
        """Wrap a connected cluster.

        Args:
            config: Number and size of the processes; the numbers change when devices move between
                training and decoding.
            accelerator: GPU, TPU or none.
        """
        self.config, self.accelerator = config, accelerator
        # Placement groups of the first processes of each kind: `reserve` puts, `start` takes.
        self._places: dict[Kind, list[PlacementGroup]] = {}

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        """Reserve resources for all processes of the run until they start.

        Larger processes come first: smaller ones fit elsewhere too and could take the last node
        with enough devices.

        Raises:
            InsufficientResources: They are not free within launch.start_timeout_s.
        """
        counts = process_counts(self.config)
        try:
            for kind in sorted(counts, key=lambda kind: -devices_per_process(self.config, kind)):
                self._places[kind] = [self._place(kind) for _ in range(counts[kind])]
                for number, place in enumerate(self._places[kind]):
                    await self._wait_for_resources(f"{kind} {number}", kind, place)
            yield
        finally:
            for place in (place for places in self._places.values() for place in places):
                remove_placement_group(place)
            self._places.clear()

    async def start(
        self, kind: Kind, number: int, role: str, *arguments: Any
    ) -> tuple[Connection, Any]:
        """Start a process and wait until it is ready.

        Returns:
            The connection and the return value of the role's `begin`.

        Raises:
            InsufficientResources: No node has the resources within launch.start_timeout_s.
            WorkerDied: As `Connection.open`.
        """
        name, places = f"{kind} {number}", self._places.get(kind)
        place = places.pop() if places else self._place(kind)
        needs = required_resources(self.config, self.accelerator, kind)
        options: dict[str, Any] = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0),
            "resources": {"TPU": needs["TPU"]} if "TPU" in needs else None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place),
        }
        num_devices = devices_per_process(self.config, kind)
        with ExitStack() as on_failure:
            on_failure.callback(remove_placement_group, place)
            await self._wait_for_resources(name, kind, place)
            node = placement_group_table(place)["bundles_to_node_id"][0]
            opened = await Connection.open(
                name,
                role,
                arguments,
                options=options,
                simulated_devices=num_devices
                if self.accelerator == "none" and num_devices
                else None,
                start_timeout_s=self.config.start_timeout_s,
                silence_timeout_s=self.config.silence_timeout_s,
                on_end=lambda: remove_placement_group(place),
            )
            opened[0].node = node
            on_failure.pop_all()
        return opened

    def _place(self, kind: Kind) -> PlacementGroup:
        return placement_group([dict(required_resources(self.config, self.accelerator, kind))])

    async def _wait_for_resources(self, name: str, kind: Kind, place: PlacementGroup) -> None:
        """Wait until Ray has created a placement group."""
        needs = format_resources(required_resources(self.config, self.accelerator, kind))

        start_s, notice_s = time.monotonic(), NOTICE_S
        while placement_group_table(place)["state"] != "CREATED":
            waited_s = time.monotonic() - start_s
            if waited_s > self.config.start_timeout_s:
                raise InsufficientResources(
                    f"expected a node with {needs} free for {name} within "
                    f"launch.start_timeout_s={self.config.start_timeout_s:g}; "
                    f"nodes have {format_nodes(list_nodes())} in total"
                )
            if waited_s > notice_s:
                logger.warning(
                    "waiting for resources: %s needs a node with %s free, nodes have %s in total",
                    name,
                    needs,
                    format_nodes(list_nodes()),
                )
                notice_s = float("inf")
            await asyncio.sleep(POLL_S)


@contextmanager
def connect(config: Ray, later: Sequence[Ray] = ()) -> Iterator[Cluster]:
    """Connect to the cluster of the settings or of RAY_ADDRESS, or start one on this machine.

    A cluster that was started here ends with the block.

    Args:
        config: Number and size of the processes.
        later: Other numbers of processes that the run may have.

    Raises:
        ConfigError: The cluster has too few resources or is not reachable.
    """
    address = config.address or os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {}
    if address is None:
        # CPUs count processes here, not cores: all of them must run, also on a small machine.
        most = chz.replace(config, rollout_engines=config.most_engines)
        num_processes = max(sum(process_counts(each).values()) for each in (most, *later))
        num_cpus = config.cpus_per_process * num_processes
        own = {
            "num_cpus": max(int(num_cpus + 0.999), os.cpu_count() or 1),
            "include_dashboard": False,
        }
    else:
        require_reachable(address)
    restore_handlers = (
        save_handlers() if threading.current_thread() is threading.main_thread() else None
    )
    try:
        with warnings.catch_warnings():
            # Forked processes call exec at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address=address or "local", configure_logging=False, **own)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"launch.address={address}: no Ray cluster answers there ({error})"
        ) from error
    finally:
        # Ray's signal handlers would end the process with a status of their own.
        if restore_handlers is not None:
            restore_handlers()
    try:
        node_resources, accelerator = list_nodes(), config.accelerator
        if accelerator == "auto":
            accelerator = next(
                (kind for kind in ("GPU", "TPU") if any(node.get(kind) for node in node_resources)),
                "none",
            )
        for each in (config, *later):
            require_fit(each, accelerator, node_resources)
        yield Cluster(config, accelerator)
    finally:
        ray.shutdown()


def require_fit(config: Ray, accelerator: str, has: Sequence[Amounts]) -> None:
    """Check that all processes fit on the nodes, each on one node.

    Raises:
        ConfigError: They do not; the message has the amounts.
    """
    counts = process_counts(config)
    needs = {kind: required_resources(config, accelerator, kind) for kind in counts}
    if {need.get("TPU", 1.0) for need in needs.values()} - {*TPU_CHIPS}:
        raise ConfigError(
            f"expected {', '.join(map(str, TPU_CHIPS))} TPU chips for each process, which is what "
            f"Ray gives, found launch.trainer_devices={config.trainer_devices} and "
            f"launch.engine_devices={config.engine_devices}; change them, with more processes"
        )
    total = Counter[str]()
    for kind, count in counts.items():
        total.update({name: count * amount for name, amount in needs[kind].items()})
    available = {name: sum(node.get(name, 0.0) for node in has) for name in total}
    lacking = [
        f"{need:g} {name}, found {available[name]:g}"
        for name, need in total.items()
        if need - available[name] > RESOURCE_UNIT
    ]
    if lacking:
        shortage = f"expected {' and '.join(lacking)}"
    elif num_unplaced := count_unplaced(
        {kind: (count, needs[kind]) for kind, count in counts.items()}, has
    ):
        kinds = " and ".join(
            f"{count} of {pluralize(counts[kind], kind)}" for kind, count in num_unplaced.items()
        )
        each = ", ".join(f"{kind} {format_resources(needs[kind])}" for kind in counts)
        shortage = (
            f"expected one node for each ({each}), found nodes of {format_nodes(has)} without "
            f"resources for {kinds}"
        )
    else:
        return
    raise ConfigError(
        "the Ray cluster is too small for "
        f"{', '.join(pluralize(count, kind) for kind, count in counts.items())}: {shortage}; lower "
        "launch.trainer_hosts, launch.trainer_devices, launch.rollout_engines, "
        "launch.engine_devices, launch.reward_workers or launch.cpus_per_process"
    )


def count_unplaced(
    wanted: Mapping[Kind, tuple[int, Amounts]], has: Sequence[Amounts]
) -> Counter[Kind]:
    """Count the processes of each kind that fit on no node; larger ones are placed first.

    If each size divides the next larger one, no other order places more processes.

    Args:
        wanted: Number of processes of each kind and the resources of one.
        has: Resources of each node.
    """
    free, num_unplaced = [Counter(node) for node in has], Counter[Kind]()
    for kind, (count, needs) in sorted(wanted.items(), key=lambda item: -sum(item[1][1].values())):
        for _ in range(count):
            room = [
                node
                for node in free
                if all(amount - node[name] < RESOURCE_UNIT for name, amount in needs.items())
            ]
            if room:
                # Best fit: processes without devices go to nodes without devices.
                min(room, key=lambda node: (node["GPU"] + node["TPU"], node["CPU"])).subtract(needs)
            else:
                num_unplaced[kind] += 1
    return num_unplaced


def list_nodes() -> list[dict[str, float]]:
    """Return the resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def format_nodes(has: Sequence[Amounts]) -> str:
    texts = Counter(text for node in has if (text := format_resources(node)))
    return (
        ", ".join(f"{text} ({count} times)" if count > 1 else text for text, count in texts.items())
        or "nothing"
    )


def format_resources(amounts: Amounts) -> str:
    return " and ".join(
        f"{amounts[name]:g} {name}" for name in ("CPU", "GPU", "TPU") if amounts.get(name)
    )


def pluralize(count: int, kind: Kind) -> str:
    return f"{count} {kind}{'s' * (count != 1)}"


def process_counts(config: Ray) -> dict[Kind, int]:
    """Return the number of processes of each kind."""
    return {
        "trainer host": config.trainer_hosts,
        "engine": config.rollout_engines,
        "reward worker": config.reward_workers,
    }


def required_resources(config: Ray, accelerator: str, kind: Kind) -> dict[str, float]:
    """Return the resources of one process of a kind."""
    num_devices = devices_per_process(config, kind)
    devices = {accelerator: float(num_devices)} if accelerator != "none" and num_devices else {}
    return {"CPU": float(config.cpus_per_process)} | devices


def require_reachable(address: str) -> None:
    """Check that a server listens at HOST:PORT; Ray itself retries for many minutes.

    Raises:
        ConfigError: No connection is possible.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # for example "auto"
    try:
        socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"launch.address={address}: no Ray cluster answers there ({error}); omit it and unset "
            "RAY_ADDRESS to start a cluster on this machine"
        ) from error


def devices_per_process(config: Ray, kind: Kind) -> int:
    """Return the number of devices of a process of this kind."""
    return {"trainer host": config.trainer_devices, "engine": config.engine_devices}.get(kind, 0)
