"""What a run writes and shows: metrics, samples, trace, progress and report."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from areal_jax.checkpoint.recovery import Columns
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import CONFIG_FILE, read_plainly, write_config
from areal_jax.config.overrides import to_json
from areal_jax.metrics.description import write_description
from areal_jax.metrics.health import HealthMonitor
from areal_jax.metrics.meters import Meters
from areal_jax.metrics.progress import ProgressDisplay
from areal_jax.metrics.samples import TrainedSample
from areal_jax.metrics.sinks import Sinks
from areal_jax.metrics.trace import Trace
from areal_jax.metrics.trackers import TrackedRun, start_trackers
from areal_jax.records import Group
from areal_jax.reports.report import ReportWriter
from areal_jax.run.callbacks import RunControl
from areal_jax.run.checks import require_consistency
from areal_jax.run.plan import Plan
from areal_jax.run.plan_report import headline
from areal_jax.run.rollout_log import RolloutLog
from areal_jax.run.summary import summary_lines
from areal_jax.storage import shown

TRACE = "trace.json"

TRAINER, CHECKPOINT = "trainer", "checkpoint"
"""Lanes of the trace in which the trainer works."""


@dataclass(kw_only=True)
class Recording:
    """Files and terminal output of a run."""

    folder: Path
    sinks: Sinks
    trace: Trace
    progress: ProgressDisplay
    health: HealthMonitor
    report_writer: ReportWriter
    rollout_log: RolloutLog | None = None
    """Record of all batches, if metrics.rollouts asks for it."""
    active_spans: list[tuple[str, str]] = field(default_factory=list)
    """Lane and name of every trainer step or checkpoint that is running."""
    num_spans: int = 0
    """Spans started so far, on any lane."""
    control: RunControl = field(default_factory=RunControl)
    """The caller's callbacks."""

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Record the block as one span on a lane of the trace."""
        start_s, span = time.perf_counter(), (lane, name)
        self.num_spans += 1
        is_trainer = lane in (TRAINER, CHECKPOINT)
        if is_trainer:
            self.active_spans.append(span)
        try:
            yield
        finally:
            if is_trainer:
                self.active_spans.remove(span)
            self.trace.span(lane, name, start_s, time.perf_counter())

    def record_step(self, version: int, meters: Meters) -> None:
        """Write and show the metrics of the step that trained `version`, with health checks."""
        meters.gauge("trainer/resident_gib", psutil.Process().memory_info().rss / 2**30)
        row = meters.flatten()
        before = self.health.active
        row |= self.health.update(version, row)
        self.sinks.write(version, row)
        self.report_writer.notify()
        self.progress.update(version + 1, row)
        for line in self.health.changes(before, version):
            self.say(line)
        self.control.step({"version": version, **row})

    def record_evaluation(self, version: int, metrics: Mapping[str, float], line: str) -> None:
        """Write and show the metrics of an evaluation of `version`."""
        self.sinks.write(version, metrics)
        self.report_writer.notify()
        self.progress.evaluated(version, metrics)
        self.say(line)
        self.control.evaluation({"version": version, **metrics})

    def record_samples(
        self, version: int, groups: Sequence[Group], stale: Sequence[Sequence[Any]]
    ) -> None:
        """Write the samples that `version` was trained on.

        Args:
            stale: by group and sample, the tokens left out of the loss because they are too old.
        """
        if self.rollout_log is not None:
            self.rollout_log.write(version, groups)
        self.sinks.write_samples(
            version,
            [
                TrainedSample(
                    task=group.task.id,
                    group=group.id,
                    number=number,
                    tokens=sample.tokens,
                    loss_mask=sample.loss_mask,
                    behave_logp=sample.behave_logp,
                    versions=sample.versions,
                    stale=stale_tokens,
                    reward=sample.reward,
                    components=sample.components,
                    grade=sample.grade,
                    stop_reason=sample.stop_reason,
                    expected=group.task.answer,
                    images=() if number else group.task.images,
                )
                for group, stale_of_group in zip(groups, stale, strict=True)
                for number, (sample, stale_tokens) in enumerate(
                    zip(group.samples, stale_of_group, strict=True)
                )
            ],
        )

    def say(self, line: str) -> None:
        """Show a line."""
        self.progress.say(line)

    def summarize(self, num_steps: int) -> None:
        """Show the outcome of the run, after the last live line.

        Args:
            num_steps: steps that the run should make.
        """
        self.progress.close()
        for line in summary_lines(
            self.folder,
            num_steps,
            elapsed_s=self.progress.elapsed_s,
            stage_s=self.progress.stage_s,
            findings=self.health.active,
        ):
            self.say(line)

    def flush(self) -> None:
        """Write buffered rows to disk."""
        self.sinks.flush()
        if self.rollout_log is not None:
            self.rollout_log.wait()

    def report(self) -> None:
        """Write the report of a run that ends, and show where it is."""
        self.flush()
        self.say(f"report: {self.report_writer.finish('stopped')}")


def start_progress(
    stack: AsyncExitStack, plan: Plan, folder: Path, saved_version: int | None
) -> ProgressDisplay:
    """Show the headline and the progress of a run until the stack ends.

    Args:
        saved_version: of the checkpoint from which the run resumes.
    """
    experiment = plan.experiment
    progress = ProgressDisplay(
        f"{headline(plan)}; run folder: {shown(folder)}",
        experiment.num_steps,
        saved_version or 0,
        show_steps=experiment.metrics.progress,
    )
    stack.callback(progress.close)
    if saved_version is not None:
        progress.say(f"resuming from the checkpoint of version {saved_version}")
    return progress


def start_recording(
    stack: AsyncExitStack,
    plan: Plan,
    folder: Path,
    progress: ProgressDisplay,
    *,
    version: int | None,
    restored: Columns | None,
) -> Recording:
    """Open the files of a run until the stack ends.

    Args:
        version: from which the run resumes; None: from the start.
        restored: what the checkpoint of that version holds beside the trainer's state.

    Raises:
        ConfigError: files in the folder disagree with the checkpoint.
    """
    experiment = plan.experiment
    gaps = None if version is None else require_consistency(plan, folder, version, restored)
    saved_id = None if version is None else read_plainly(folder / CONFIG_FILE)[0]
    run_id = saved_id or secrets.token_hex(8)
    written = to_json(experiment)
    tracked = TrackedRun(folder.absolute(), run_id, experiment.metrics.project, written)
    trackers = start_trackers(experiment.metrics.trackers, tracked)
    if trackers is not None:
        stack.callback(trackers.close)
    sinks = Sinks(folder, experiment.metrics, version, plan.tokenizer.decode, trackers)
    # Written after the state was restored: settings that cannot restore it must not replace the
    # run's own.
    write_config(experiment, folder / CONFIG_FILE, run_id)
    stack.callback(sinks.close)
    trace = Trace(folder / TRACE if experiment.metrics.trace else None)
    stack.callback(trace.close)
    write_description(folder, headline(plan), written, plan.devices, gaps)
    report_writer = ReportWriter(folder)
    stack.callback(report_writer.close)
    rollout_log = None
    if experiment.metrics.rollouts and isinstance(experiment, Experiment):
        rollout_log = RolloutLog(folder)
        stack.callback(rollout_log.close)
    workflow = type(experiment.workflow).__name__
    return Recording(
        folder=folder,
        sinks=sinks,
        trace=trace,
        progress=progress,
        health=HealthMonitor(experiment.health, workflow, experiment.num_steps),
        report_writer=report_writer,
        rollout_log=rollout_log,
    )
