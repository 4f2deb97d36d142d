"""What a run's watchdog looks at: the parts of the run, what is under way, and who can be
replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Any

from areal_jax.cluster.watchdog import Computes, Grows, Replaces, Stalled, Waits, Watchdog
from areal_jax.rollout.controller import Rollouts
from areal_jax.run.build import CHECKPOINT, Run, TracedGrader
from areal_jax.workflows.config import Agent


@asynccontextmanager
async def watched(run: Run[Any], rollouts: Rollouts | None = None) -> AsyncIterator[None]:
    """Watch the run while the body runs. Raises Stalled where it makes no progress and nothing of
    it can be replaced."""
    exp = run.experiment
    # These have deadlines of their own, which come first.
    longest_s = max(
        exp.rewards.timeout_s, exp.workflow.timeout_s if isinstance(exp.workflow, Agent) else 0.0
    )
    watchdog = Watchdog(
        warning_s=exp.launch.stall_warning_s,
        timeout_s=max(exp.launch.stall_timeout_s, longest_s + exp.launch.stall_warning_s),
        progress=lambda: progress_of(run, rollouts),
        cpu_s=lambda: cpu_s_of(run),
        waits=lambda: waits_of(run, rollouts),
        replace=lambda why: replace_stalled(run, why),
    )
    body = asyncio.current_task()
    assert body is not None
    failures = list[BaseException]()

    def ended(watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            if isinstance(error, Stalled):
                error.during = tuple(run.spans)
            failures.append(error)
            body.cancel()

    watching = asyncio.create_task(watchdog.watch(), name="watchdog")
    watching.add_done_callback(ended)
    try:
        yield
    except asyncio.CancelledError:
        if failures and body.uncancel() == 0:
            raise failures[0] from None
        raise
    finally:
        watching.cancel()


def parts_of(run: Run[Any]) -> list[Any]:
    """Parts that may tell of their progress, those that owe others something first."""
    grader = run.grader.counted if isinstance(run.grader, TracedGrader) else run.grader
    return [run.trainer, run.weight_channel, grader, run.engine]


def progress_of(run: Run[Any], rollouts: Rollouts | None) -> Hashable:
    """What is different whenever the run has progressed."""
    waits_for_worker = any(isinstance(part, Grows) and part.is_empty for part in parts_of(run))
    if waits_for_worker or any(lane == CHECKPOINT for lane, _ in run.spans):
        return object()  # That has a deadline of its own.
    parts = tuple(part.progress() for part in parts_of(run) if isinstance(part, Waits))
    return (
        run.trainer.version,
        run.num_spans,
        None if rollouts is None else rollouts.next_group_id,
        parts,
    )


def cpu_s_of(run: Run[Any]) -> float:
    """Processor time of whoever computes without a report: trainers in a step, else the engines."""
    computing: Any = run.trainer if run.spans else run.engine
    return computing.cpu_s if isinstance(computing, Computes) else time.process_time()


def waits_of(run: Run[Any], rollouts: Rollouts | None) -> str:
    """Who waits for whom, in one line."""
    said = list[str]()
    if run.spans:
        said.append("under way: " + ", ".join(f"{lane} ({name})" for lane, name in run.spans))
    elif rollouts is not None:
        waited = f"{len(rollouts.buffer)} of {rollouts.gate.groups_per_batch} groups are finished"
        said.append(
            f"the trainer waits for the batch of version {run.trainer.version}, of which {waited}"
        )
    if rollouts is not None:
        said.append(repr(rollouts.gate))
    return "; ".join(
        [
            *said,
            *(text for part in parts_of(run) if isinstance(part, Waits) and (text := part.waits())),
        ]
    )


def replace_stalled(run: Run[Any], why: str) -> str | None:
    """Replace the worker that does not progress; its name, or None where there is none."""
    for part in parts_of(run):
        if isinstance(part, Replaces) and (name := part.replace_stalled(why)) is not None:
            return name
    return None
