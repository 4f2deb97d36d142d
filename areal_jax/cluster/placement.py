"""Ray: found or started, and asked for processes."""

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
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

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
from areal_jax.cluster.signals import keep_handlers
from areal_jax.errors import ConfigError

logger = logging.getLogger(__name__)

REACH_TIMEOUT_S = 30.0

NOTICE_S = 10.0
"""So long room is waited for without a word."""

LOOK_S = 0.2

LEAST = 1e-4
"""Of anything, that Ray counts."""

Kind = Literal["trainer host", "engine", "reward worker"]

Amounts = Mapping[str, float]
"""By what Ray counts: CPU, GPU, TPU."""


class InsufficientResources(ConfigError):
    """A process was not started: no node had room for it in time."""


class Cluster:
    """A Ray cluster. Every process has a place in it, which is room on one node that Ray keeps for
    it."""

    def __init__(self, config: Ray, accelerator: str) -> None:
        """Args: accelerator: GPU, TPU, or none."""
        self.config, self.accelerator = config, accelerator
        # For the first process of each kind: put by `reserved`, taken by `start`.
        self._places: dict[Kind, list[PlacementGroup]] = {}

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[None]:
        """Room for all processes of the run, until they are started. Raises InsufficientResources.

        The larger come first: those that fit everywhere would take the last node that has room for
        a whole large one."""
        counts = counts_of(self.config)
        try:
            for kind in sorted(counts, key=lambda kind: -devices_of(self.config, kind)):
                self._places[kind] = [self._place(kind) for _ in range(counts[kind])]
                for number, place in enumerate(self._places[kind]):
                    await self._room(f"{kind} {number}", kind, place)
            yield
        finally:
            for place in (place for places in self._places.values() for place in places):
                remove_placement_group(place)
            self._places.clear()

    async def start(
        self, kind: Kind, number: int, role: str, *arguments: Any
    ) -> tuple[Connection, Any]:
        """As Connection.opened: the connection, and what the role says in `begin`. Raises
        InsufficientResources too."""
        name, places = f"{kind} {number}", self._places.get(kind)
        place = places.pop() if places else self._place(kind)
        needs = needs_of(self.config, self.accelerator, kind)
        options: dict[str, Any] = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0),
            "resources": {"TPU": needs["TPU"]} if "TPU" in needs else None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(place),
        }
        num_devices = devices_of(self.config, kind)
        try:
            await self._room(name, kind, place)
            return await Connection.opened(
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
        except BaseException:
            remove_placement_group(place)
            raise

    def _place(self, kind: Kind) -> PlacementGroup:
        return placement_group([dict(needs_of(self.config, self.accelerator, kind))])

    async def _room(self, name: str, kind: Kind, place: PlacementGroup) -> None:
        """Wait for the place of a process."""
        needs = text_of(needs_of(self.config, self.accelerator, kind))

        def lacks() -> str:
            return (
                f"it needs {needs} on one node, and nodes have {nodes_text(nodes())}, for all "
                "that runs there"
            )

        start_s, notice_s = time.monotonic(), NOTICE_S
        while placement_group_table(place)["state"] != "CREATED":
            waited_s = time.monotonic() - start_s
            if waited_s > self.config.start_timeout_s:
                raise InsufficientResources(
                    f"{name} found not enough resources within "
                    f"launch.start_timeout_s={self.config.start_timeout_s:g}: {lacks()}"
                )
            if waited_s > notice_s:
                logger.warning("%s waits for room: %s", name, lacks())
                notice_s = float("inf")
            await asyncio.sleep(LOOK_S)


@contextmanager
def connected(config: Ray) -> Iterator[Cluster]:
    """The cluster that the settings or RAY_ADDRESS name, or one on this machine, which ends with
    the block.

    Raises ConfigError, with the numbers, where it has less than is asked for, or cannot be
    reached."""
    address = config.address or os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {}
    if address is None:
        # CPUs are places here, not cores: whoever starts all on a small machine wants all of it to
        # run.
        num_cpus = config.cpus_per_process * sum(counts_of(config).values())
        own = {
            "num_cpus": max(int(num_cpus + 0.999), os.cpu_count() or 1),
            "include_dashboard": False,
        }
    else:
        require_reachable(address)
    restore_handlers = (
        keep_handlers() if threading.current_thread() is threading.main_thread() else None
    )
    try:
        with warnings.catch_warnings():
            # What is forked here becomes another program at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address=address or "local", configure_logging=False, **own)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"launch.address={address}: no Ray cluster answers there ({error})"
        ) from error
    finally:
        if (
            restore_handlers is not None
        ):  # Ray's own would end the process with a status of its choice
            restore_handlers()
    try:
        has, accelerator = nodes(), config.accelerator
        if accelerator == "auto":
            accelerator = next(
                (kind for kind in ("GPU", "TPU") if any(node.get(kind) for node in has)), "none"
            )
        require_fit(config, accelerator, has)
        yield Cluster(config, accelerator)
    finally:
        ray.shutdown()


def require_fit(config: Ray, accelerator: str, has: Sequence[Amounts]) -> None:
    """ConfigError, with the numbers, where the nodes cannot hold all processes, each of which has
    to lie on one of them."""
    counts = counts_of(config)
    needs = {kind: needs_of(config, accelerator, kind) for kind in counts}
    total = Counter[str]()
    for kind, count in counts.items():
        total.update({name: count * amount for name, amount in needs[kind].items()})
    there_are = {name: sum(node.get(name, 0.0) for node in has) for name in total}
    lacking = [
        f"{need:g} {name} where there are {there_are[name]:g}"
        for name, need in total.items()
        if need - there_are[name] > LEAST
    ]
    if lacking:
        lacks = f"they need {' and '.join(lacking)}"
    elif homeless := unplaced({kind: (count, needs[kind]) for kind, count in counts.items()}, has):
        kinds = " and ".join(
            f"{count} of {plural(counts[kind], kind)}" for kind, count in homeless.items()
        )
        each = ", ".join(f"{kind} {text_of(needs[kind])}" for kind in counts)
        lacks = (
            f"each has to lie on one node ({each}), and nodes of {nodes_text(has)} have not "
            f"enough resources for {kinds}"
        )
    else:
        return
    raise ConfigError(
        "the Ray cluster is too small for "
        f"{', '.join(plural(count, kind) for kind, count in counts.items())}: {lacks}; lower "
        "launch.trainer_hosts, launch.trainer_devices, launch.rollout_engines, "
        "launch.engine_devices, launch.reward_workers or "
        "launch.cpus_per_process"
    )


def unplaced(wanted: Mapping[Kind, tuple[int, Amounts]], has: Sequence[Amounts]) -> Counter[Kind]:
    """How many processes of each kind find not enough resources on any node, where the larger
    choose first.

    Args: wanted: how many, and what each needs. Where each size divides the next, no other order
        finds room for more."""
    free, homeless = [Counter(node) for node in has], Counter[Kind]()
    for kind, (count, needs) in sorted(wanted.items(), key=lambda item: -sum(item[1][1].values())):
        for _ in range(count):
            room = [
                node
                for node in free
                if all(amount - node[name] < LEAST for name, amount in needs.items())
            ]
            if room:
                # Where least is left: what needs no device goes where there are none, and large
                # rooms stay whole.
                min(room, key=lambda node: (node["GPU"] + node["TPU"], node["CPU"])).subtract(needs)
            else:
                homeless[kind] += 1
    return homeless


def nodes() -> list[dict[str, float]]:
    """What each node that lives has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def nodes_text(has: Sequence[Amounts]) -> str:
    texts = Counter(text for node in has if (text := text_of(node)))
    return (
        ", ".join(f"{text} ({count} times)" if count > 1 else text for text, count in texts.items())
        or "nothing"
    )


def text_of(amounts: Amounts) -> str:
    return " and ".join(
        f"{amounts[name]:g} {name}" for name in ("CPU", "GPU", "TPU") if amounts.get(name)
    )


def plural(count: int, kind: Kind) -> str:
    return f"{count} {kind}{'s' * (count != 1)}"


def counts_of(config: Ray) -> dict[Kind, int]:
    """How many processes of each kind the run has."""
    return {
        "trainer host": config.trainer_hosts,
        "engine": config.rollout_engines,
        "reward worker": config.reward_workers,
    }


def needs_of(config: Ray, accelerator: str, kind: Kind) -> dict[str, float]:
    """What a process of a kind takes of its node."""
    num_devices = devices_of(config, kind)
    devices = {accelerator: float(num_devices)} if accelerator != "none" and num_devices else {}
    return {"CPU": float(config.cpus_per_process)} | devices


def require_reachable(address: str) -> None:
    """ConfigError where nobody listens at HOST:PORT: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # such as auto
    try:
        socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"launch.address={address}: no Ray cluster answers there ({error}); leave it out, "
            "and RAY_ADDRESS unset, to start "
            "one on this machine"
        ) from error


def devices_of(config: Ray, kind: Kind) -> int:
    """That a process of this kind has."""
    return {"trainer host": config.trainer_devices, "engine": config.engine_devices}.get(kind, 0)
