"""Replay of a run: its trainer steps again, on the rollouts that the run recorded.

With unchanged settings, the parameters of every version are equal bit for bit. With changed ones,
such as another objective, the replay is a counterfactual on the same data, at the speed of the
trainer. The data is then off-policy, which the metrics measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import CONFIG_FILE, write_config
from areal_jax.errors import ConfigError
from areal_jax.metrics import jsonl
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.meters import Meters
from areal_jax.metrics.progress import ProgressDisplay
from areal_jax.metrics.sinks import Sinks
from areal_jax.records import Group, StepResult
from areal_jax.run.checkpointing import Checkpointer
from areal_jax.run.plan import TrainingPlan
from areal_jax.run.rollout_log import read_rollouts
from areal_jax.run.trainer import initial_weights, rl_trainer

DIGEST = "trainer/params_digest"


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    versions: Sequence[int]
    """Versions after each replayed step."""
    different: Sequence[int]
    """Those whose parameters differ from the run's."""

    def describe(self) -> str:
        """Return one sentence."""
        last = self.versions[-1]
        if not self.different:
            return f"parameters are equal to the run's at all versions 1 to {last}"
        return (
            f"parameters differ from the run's at {len(self.different)} of {last} versions, first "
            f"at version {self.different[0]}"
        )


def replay(plan: TrainingPlan, source: Path, folder: Path, until: int | None = None) -> Replay:
    """Train again on the rollouts of a run; write metrics and the last policy.

    Args:
        plan: plan of the run, or of the run with other settings.
        source: folder of the run.
        folder: folder to write, which is empty.
        until: version after the last replayed step; None: all steps.

    Raises:
        ConfigError: the run has no steps, or did not record its rollouts.
        FloatingPointError: training diverges.
    """
    experiment = plan.experiment
    if not isinstance(experiment, Experiment):
        raise ConfigError(
            f"{source}: expected a run of reinforcement learning, found "
            f"{type(experiment).__name__}, which has no rollouts"
        )
    digests = list(_recorded_digests(source, until))
    # The trainer has a copy of its own.
    trainer = rl_trainer(plan, *initial_weights(plan))
    different = list[int]()
    with ExitStack() as stack:
        sinks = Sinks(folder, experiment.metrics, decode=plan.tokenizer.decode)
        stack.callback(sinks.close)
        write_config(experiment, folder / CONFIG_FILE, "")
        store = CheckpointStore(folder / CHECKPOINTS, experiment.checkpoint.keep)
        stack.callback(store.close)
        progress = ProgressDisplay(
            f"replay of {source} to version {len(digests)}; folder: {folder}",
            len(digests),
            0,
            show_steps=experiment.metrics.progress,
        )
        stack.callback(progress.close)
        trainer.warm_up()
        for version, expected in enumerate(digests):
            row = _step(trainer.step, read_rollouts(source, version))
            sinks.write(version, row)
            progress.update(version + 1, row)
            if row[DIGEST] != expected:
                different.append(version + 1)
        checkpointer = Checkpointer(plan=plan, folder=folder, trainer=trainer, store=store)
        for line in checkpointer.write_results(trainer.version):
            progress.say(line)
        result = Replay(range(1, len(digests) + 1), different)
        progress.say(f"replay: {result.describe()}")
    return result


def _step(
    step: Callable[[Sequence[Group]], StepResult], groups: Sequence[Group]
) -> dict[str, float]:
    """Run one trainer step, and return its row of metrics."""
    meters = Meters()
    meters.update(step(groups).metrics, "trainer/")
    return meters.flatten()


def _recorded_digests(source: Path, until: int | None) -> Iterator[float]:
    """Yield the digest of each version of a run, from version 1.

    Raises:
        ConfigError: there are none, or fewer than `until`.
    """
    rows = jsonl.read(source / METRICS) if (source / METRICS).is_file() else ()
    by_version = {int(row["version"]): row[DIGEST] for row in rows if DIGEST in row}
    last = len(by_version) if until is None else until
    if not by_version or not 0 < last <= len(by_version):
        wanted = "recorded steps" if until is None else f"at least {until} recorded steps"
        raise ConfigError(
            f"--replay={source}: expected a run with {wanted}, found {len(by_version)}; lower "
            "--until, or give the folder of a run"
        )
    yield from (by_version[version] for version in range(last))
