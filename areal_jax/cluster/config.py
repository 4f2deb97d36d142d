"""Configuration of the processes of a run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Literal

import chz

from areal_jax.bounds import NOT_NEGATIVE, POSITIVE
from areal_jax.parallel.config import PlacementConfig


@chz.chz
class LaunchConfig:
    """Process layout: `Local` or `Ray`."""

    stall_warning_s: float = chz.field(
        validator=POSITIVE,
        default=60.0,
        doc=(
            "time without a token, graded answer or step after which a warning describes what "
            "each component waits for, in seconds"
        ),
    )
    stall_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=300.0,
        doc="time without progress after which the stalled worker is replaced, in seconds; without "
        "a worker to replace, as under launch=Local, the run saves a checkpoint and ends with a "
        "non-zero status",
    )

    def resolve_placement(self, requested: PlacementConfig) -> PlacementConfig:
        """Return the placement to plan for, given the experiment's placement."""
        return requested

    def environment_variables(self, current: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables to set before jax and Ray are imported."""
        return {}


@chz.chz
class Local(LaunchConfig):
    """One process; only grading runs in processes of its own."""


@chz.chz
class Ray(LaunchConfig):
    """Trainer hosts, engines and reward workers as Ray actors on one or more machines."""

    address: str | None = chz.field(
        default=None,
        doc=(
            "address of the Ray cluster; none: RAY_ADDRESS if set, else a cluster started on this "
            "machine"
        ),
    )
    trainer_hosts: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="number of trainer processes, which share one mesh over all their devices",
    )
    trainer_devices: int = chz.field(
        validator=POSITIVE, default=1, doc="number of devices of each trainer host"
    )
    rollout_engines: int = chz.field(
        validator=POSITIVE,
        default=2,
        doc="number of rollout engine processes, each with its own mesh and engine.num_slots slots",
    )
    max_engines: int = chz.field(
        validator=NOT_NEGATIVE,
        default=0,
        doc=(
            "most engines: further ones than launch.rollout_engines join the run as nodes get room "
            "for them; 0: as many as launch.rollout_engines; with placement.adaptive, most engines "
            "after a move; 0: no limit"
        ),
    )
    engine_devices: int = chz.field(
        validator=POSITIVE, default=1, doc="number of devices of each engine"
    )
    reward_workers: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="number of reward worker processes, each with rewards.num_workers grading processes",
    )
    accelerator: Literal["auto", "GPU", "TPU", "none"] = chz.field(
        default="auto",
        doc="Ray resource of the devices; auto: detected; none: simulated devices on CPUs",
    )
    cpus_per_process: float = chz.field(
        validator=POSITIVE, default=1.0, doc="number of CPUs that Ray reserves for each process"
    )
    attempts: int = chz.field(
        validator=NOT_NEGATIVE,
        default=3,
        doc=(
            "maximum number of automatic restarts from the last checkpoint after the death of a "
            "trainer host"
        ),
    )
    silence_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=120.0,
        doc="time without a heartbeat after which a worker counts as dead, in seconds",
    )
    start_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=900.0,
        doc=(
            "maximum wait for free resources on nodes, and then for workers to be ready, in seconds"
        ),
    )
    report_every_s: float = chz.field(
        validator=POSITIVE,
        default=1.0,
        doc=(
            "interval at which engines report sampled tokens, in seconds; reported tokens are not "
            "sampled again after an engine died"
        ),
    )

    @property
    def most_engines(self) -> int:
        """Most engines that the run may have at a time."""
        return max(self.rollout_engines, self.max_engines)

    @property
    def num_devices(self) -> int:
        """Number of devices of all trainer hosts and engines."""
        return (
            self.trainer_hosts * self.trainer_devices + self.rollout_engines * self.engine_devices
        )

    def possible_splits(self) -> range:
        """Return the numbers of rollout devices that placement.adaptive chooses from.

        A move makes one or several trainer hosts into launch.trainer_devices /
        launch.engine_devices engines each, or the reverse. A trainer host and an engine stay.
        """
        per_host = self.trainer_devices // self.engine_devices
        fewest = (self.rollout_engines - 1) % per_host + 1
        most = self.rollout_engines + (self.trainer_hosts - 1) * per_host
        if self.max_engines:
            most = min(most, self.max_engines)
        size = self.engine_devices
        return range(fewest * size, most * size + 1, self.trainer_devices)

    def at_split(self, rollout: int) -> Ray:
        """Return the settings with `rollout` devices in engines and the others in trainer hosts."""
        return chz.replace(
            self,
            trainer_hosts=(self.num_devices - rollout) // self.trainer_devices,
            rollout_engines=rollout // self.engine_devices,
        )

    def resolve_placement(self, requested: PlacementConfig) -> PlacementConfig:
        """Return a placement of the train mesh and one engine on simulated devices.

        All engines are equal. This process computes nothing; the plan finds configurations that
        do not fit before any worker starts.
        """
        num_train = self.trainer_hosts * self.trainer_devices
        return chz.replace(
            requested,
            train_devices=num_train,
            rollout_devices=self.engine_devices,
            # The train meshes of all splits are checked here.
            simulated_devices=self.num_devices
            if requested.adaptive
            else num_train + self.engine_devices,
        )

    def environment_variables(self, current: Mapping[str, str]) -> dict[str, str]:
        """Disable Ray's usage statistics and require a token for a cluster that is started here.

        Without a token, anyone who can reach the cluster can run code in it.
        """
        variables = {"RAY_USAGE_STATS_ENABLED": "0"}
        if self.address is None and "RAY_ADDRESS" not in current:
            variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return {name: value for name, value in variables.items() if name not in current}
