"""In which processes a run lives, and where."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Literal

import chz

from areal_jax.bounds import NOT_NEGATIVE, POSITIVE
from areal_jax.parallel.config import PlacementConfig


@chz.chz
class LaunchConfig:
    """One of Local and Ray."""

    stall_warning_s: float = chz.field(
        validator=POSITIVE,
        default=60.0,
        doc=(
            "seconds without a token, a graded answer or a step after which a line names who "
            "waits for whom"
        ),
    )
    stall_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=300.0,
        doc="seconds without progress after which the worker that makes none is replaced; the "
        "run ends with a checkpoint and a "
        "non-zero status where there is none to replace, as under launch=Local",
    )

    def placement(self, given: PlacementConfig) -> PlacementConfig:
        """The devices that this process plans for, where the experiment asks for `given`."""
        return given

    def variables(self, current: Mapping[str, str]) -> dict[str, str]:
        """Of the environment, to be set before anything else is imported, given the current
        ones."""
        return {}


@chz.chz
class Local(LaunchConfig):
    """Everything in this process, but for the grading of answers."""


@chz.chz
class Ray(LaunchConfig):
    """Trainer hosts, engines and reward workers in processes of their own, on this machine or any
    number, joined by Ray."""

    address: str | None = chz.field(
        default=None,
        doc=(
            "the cluster; none: that of the variable RAY_ADDRESS, or one that is started on this "
            "machine"
        ),
    )
    trainer_hosts: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="processes that train, together, on one mesh over all their devices",
    )
    trainer_devices: int = chz.field(
        validator=POSITIVE, default=1, doc="devices of each trainer host"
    )
    rollout_engines: int = chz.field(
        validator=POSITIVE,
        default=2,
        doc="processes that decode, each with a mesh and engine.num_slots slots of its own",
    )
    engine_devices: int = chz.field(validator=POSITIVE, default=1, doc="devices of each engine")
    reward_workers: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="processes that grader, each with rewards.num_workers workers",
    )
    accelerator: Literal["auto", "GPU", "TPU", "none"] = chz.field(
        default="auto",
        doc="of which kind devices are; auto: what the cluster has; none: simulated, on CPUs",
    )
    cpus_per_process: float = chz.field(
        validator=POSITIVE, default=1.0, doc="CPUs that Ray sets aside for each process"
    )
    attempts: int = chz.field(
        validator=NOT_NEGATIVE,
        default=3,
        doc=(
            "so often the run resumes from its last checkpoint after a trainer host was lost, "
            "without being asked to"
        ),
    )
    silence_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=120.0,
        doc="a process that says nothing for so long is taken for lost",
    )
    start_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=900.0,
        doc=(
            "so long a run that starts or goes on waits for room on nodes, and then for "
            "processes to be ready to work"
        ),
    )
    report_every_s: float = chz.field(
        validator=POSITIVE,
        default=1.0,
        doc=(
            "how often engines tell what they have sampled: what is known when one is lost is "
            "not sampled again"
        ),
    )

    def placement(self, given: PlacementConfig) -> PlacementConfig:
        """The train mesh over all trainer hosts beside one engine, all engines being alike; on
        devices that are only pretended: nothing is computed here, and what does not fit is found
        before anything is started."""
        num_train = self.trainer_hosts * self.trainer_devices
        return chz.replace(
            given,
            train_devices=num_train,
            rollout_devices=self.engine_devices,
            simulated_devices=num_train + self.engine_devices,
        )

    def variables(self, current: Mapping[str, str]) -> dict[str, str]:
        """Tells nobody, and lets in only who knows the token: whoever can reach a Ray can run code
        in it."""
        variables = {"RAY_USAGE_STATS_ENABLED": "0"}
        if self.address is None and "RAY_ADDRESS" not in current:
            variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        return {name: value for name, value in variables.items() if name not in current}
