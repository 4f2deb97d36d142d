"""What a run's watchdog observes: workers, running spans, and which worker can be replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from areal_jax.cluster.watchdog import (
    CpuTimeSource,
    ProgressSource,
    Stalled,
    Watchdog,
    WorkerGroup,
    WorkerReplacer,
)
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.protocols import RunningRollouts, VersionedTrainer
from areal_jax.run.recording import CHECKPOINT, Recording
from areal_jax.workflows.config import Agent


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """The components of a run that show whether it makes progress."""

    experiment: AnyExperiment
    trainer: VersionedTrainer
    engine: Any
    components: tuple[Any, ...]
    """Components that may report progress, the ones that others wait for first."""
    recording: Recording
    rollouts: RunningRollouts | None

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Watch the run while the block runs.

        Raises:
            Stalled: the run makes no progress, and no worker of it can be replaced.
        """
        exp = self.experiment
        # Rewards and agents have timeouts of their own, which come first.
        agent_s = exp.workflow.timeout_s if isinstance(exp.workflow, Agent) else 0.0
        longest_s = max(exp.rewards.timeout_s, agent_s)
        watchdog = Watchdog(
            warning_s=exp.launch.stall_warning_s,
            timeout_s=max(exp.launch.stall_timeout_s, longest_s + exp.launch.stall_warning_s),
            progress=self.progress,
            cpu_s=self.cpu_s,
            describe_wait=self.waits,
            replace=self.replace_stalled,
        )
        body = asyncio.current_task()
        assert body is not None
        failures = list[BaseException]()

        def cancel_body(watching: asyncio.Task[None]) -> None:
            if not watching.cancelled() and (error := watching.exception()) is not None:
                if isinstance(error, Stalled):
                    error.during = tuple(self.recording.active_spans)
                failures.append(error)
                body.cancel()

        watching = asyncio.create_task(watchdog.watch(), name="watchdog")
        watching.add_done_callback(cancel_body)
        try:
            yield
        except asyncio.CancelledError:
            if failures and body.uncancel() == 0:
                raise failures[0] from None
            raise
        finally:
            watching.cancel()

    def progress(self) -> Hashable:
        """A value that changes whenever the run makes progress."""
        waits_for_worker = any(
            isinstance(each, WorkerGroup) and each.is_empty for each in self.components
        )
        if waits_for_worker or any(lane == CHECKPOINT for lane, _ in self.recording.active_spans):
            return object()  # these have timeouts of their own
        return (
            self.trainer.version,
            self.recording.num_spans,
            None if self.rollouts is None else self.rollouts.next_group_id,
            tuple(each.progress() for each in self.components if isinstance(each, ProgressSource)),
        )

    def cpu_s(self) -> float:
        """Processor time of the component that computes without reporting: the trainer in a step,
        else the engines.
        """
        computing: Any = self.trainer if self.recording.active_spans else self.engine
        return computing.cpu_s if isinstance(computing, CpuTimeSource) else time.process_time()

    def waits(self) -> str:
        """One line: which component waits for which."""
        lines, rollouts = list[str](), self.rollouts
        if spans := self.recording.active_spans:
            lines.append("under way: " + ", ".join(f"{lane} ({name})" for lane, name in spans))
        elif rollouts is not None and isinstance(self.experiment, Experiment):
            size = self.experiment.rollout.groups_per_batch
            lines.append(
                f"the trainer waits for the batch of version {self.trainer.version}, of which "
                f"{len(rollouts.buffer)} of {size} groups are finished"
            )
        if rollouts is not None:
            lines.append(repr(rollouts.gate))
        reports = (
            each.describe_wait() for each in self.components if isinstance(each, ProgressSource)
        )
        return "; ".join([*lines, *filter(None, reports)])

    def replace_stalled(self, why: str) -> str | None:
        """Replace the worker that makes no progress; its name, or None where there is none."""
        for each in self.components:
            if isinstance(each, WorkerReplacer) and (name := each.replace_stalled(why)) is not None:
                return name
        return None
