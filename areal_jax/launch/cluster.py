"""Ray: found or started, and asked for processes."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import ray

from areal_jax.launch.config import Ray
from areal_jax.launch.connection import Connection
from areal_jax.settings import ConfigError

REACH_TIMEOUT_S = 30.0

Kind = Literal["trainer host", "engine", "reward worker"]


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that has what the run asks for."""

    config: Ray
    accelerator: str
    """GPU, TPU, or none."""

    async def start(self, kind: Kind, number: int, role: str, *arguments: Any) -> tuple[Connection, Any]:
        """As Connection.opened: the connection, and what the role says in `begin`."""
        options: dict[str, Any] = {"num_cpus": self.config.cpus_per_process}
        num_devices = devices_of(self.config, kind)
        if self.accelerator == "GPU":
            options["num_gpus"] = num_devices
        elif self.accelerator == "TPU" and num_devices:
            options["resources"] = {"TPU": num_devices}
        return await Connection.opened(
            f"{kind} {number}",
            role,
            arguments,
            options=options,
            simulated_devices=num_devices if self.accelerator == "none" and num_devices else None,
            start_timeout_s=self.config.start_timeout_s,
            silence_timeout_s=self.config.silence_timeout_s,
        )


@contextmanager
def connected(config: Ray) -> Iterator[Cluster]:
    """The cluster that the settings or RAY_ADDRESS name, or one on this machine, which ends with the block.

    Raises ConfigError, with the numbers, where it has less than is asked for, or cannot be reached."""
    counts: dict[Kind, int] = {
        "trainer host": config.trainer_hosts,
        "engine": config.rollout_engines,
        "reward worker": config.reward_workers,
    }
    num_cpus = config.cpus_per_process * sum(counts.values())
    address = config.address or os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {}
    if address is None:
        # CPUs are places here, not cores: whoever starts all on a small machine wants all of it to run.
        own = {"num_cpus": max(int(num_cpus + 0.999), os.cpu_count() or 1), "include_dashboard": False}
    else:
        require_reachable(address)
    try:
        with warnings.catch_warnings():
            # What is forked here becomes another program at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            ray.init(address=address or "local", configure_logging=False, **own)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"launch.address={address}: no Ray cluster answers there ({error})") from error
    try:
        has = ray.cluster_resources()
        accelerator = config.accelerator
        if accelerator == "auto":
            accelerator = next((kind for kind in ("GPU", "TPU") if has.get(kind)), "none")
        needs = {"CPU": num_cpus}
        if accelerator != "none":
            needs[accelerator] = sum(count * devices_of(config, kind) for kind, count in counts.items())
        if lacking := [
            f"{need:g} {name} where there are {has.get(name, 0):g}" for name, need in needs.items() if need > has.get(name, 0)
        ]:
            processes = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts.items())
            raise ConfigError(
                f"the Ray cluster is too small for {processes}: they need {' and '.join(lacking)}; lower launch.trainer_hosts, "
                "launch.trainer_devices, launch.rollout_engines, launch.engine_devices, launch.reward_workers or "
                "launch.cpus_per_process"
            )
        yield Cluster(config, accelerator)
    finally:
        ray.shutdown()


def require_reachable(address: str) -> None:
    """ConfigError where nobody listens at HOST:PORT: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # such as auto
    try:
        socket.create_connection((host, int(port)), timeout=REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"launch.address={address}: no Ray cluster answers there ({error}); leave it out, and RAY_ADDRESS unset, to start "
            "one on this machine"
        ) from error


def devices_of(config: Ray, kind: Kind) -> int:
    """That a process of this kind has."""
    return {"trainer host": config.trainer_devices, "engine": config.engine_devices}.get(kind, 0)
