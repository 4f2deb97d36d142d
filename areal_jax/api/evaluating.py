"""Evaluation from Python; the command line uses the same functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal_jax.api.background import call_beside_loop
from areal_jax.cluster.environment import prepare
from areal_jax.config.experiment import AnyExperiment
from areal_jax.config.load import CONFIG_FILE, read_config
from areal_jax.config.overrides import settings
from areal_jax.config.policy_names import NamedPolicy, RunCheckpoint, named_policy
from areal_jax.data.benchmarks import find_benchmark
from areal_jax.errors import ConfigError
from areal_jax.run.callbacks import RunControl

if TYPE_CHECKING:
    from areal_jax.evaluation.results import Results


class NamedInputs(NamedTuple):
    """Policy and data of an evaluation, by name."""

    overrides: list[str]
    """Settings that they imply."""
    checkpoint: RunCheckpoint | None
    """Of a run, instead of the experiment's policy."""
    server: str | None
    """URL of a server, instead of either."""


@dataclass(frozen=True)
class Evaluated:
    """A finished evaluation."""

    folder: Path
    """Folder with the answers and the report."""
    results: Results

    @property
    def score(self) -> float | None:
        """pass@1; with raw rewards, the mean reward."""
        results = self.results
        return results.pass_at[1].value if results.pass_at else results.mean_reward


def evaluate(
    experiment: AnyExperiment | None = None,
    *,
    checkpoint: str | Path | None = None,
    data: str | None = None,
    folder: str | Path | None = None,
) -> Evaluated:
    """Sample answers of a policy to problems and grade them, as `python -m areal_jax.evaluate`
    does.

    The same call resumes an evaluation that was interrupted.

    Args:
        experiment: settings; None: those of the run that `checkpoint` names.
        checkpoint: run folder, RUN/checkpoints/VERSION, Hugging Face folder or hub name, PEFT
            folder, or URL of an OpenAI-compatible server; None: the experiment's policy.
        data: a benchmark, file or folder; None: the experiment's eval_tasks.
        folder: folder to write; None: one named after the settings.

    Raises:
        ConfigError: an input is missing or does not fit.
        RuntimeError: tasks failed that may succeed when they are tried again.
        KeyboardInterrupt: Ctrl-C; the answers so far are kept.
    """
    control = RunControl()

    def work() -> Evaluated:
        inputs = named_inputs("" if checkpoint is None else str(checkpoint), data or "")
        found = experiment
        if found is None:
            if inputs.checkpoint is None:
                raise ConfigError("expected an experiment, or checkpoint= of a run; found neither")
            found = read_config(inputs.checkpoint.folder / CONFIG_FILE)
        return run_evaluation(
            found.replace(*inputs.overrides),
            inputs,
            None if folder is None else Path(folder),
            control,
        )

    return call_beside_loop(work, control.request_stop, "evaluate")


def named_inputs(checkpoint: str, data: str) -> NamedInputs:
    """Find the policy and the data that an evaluation names.

    Args:
        checkpoint: as in `evaluate`; empty: the experiment's policy.
        data: as in `evaluate`; empty: the experiment's eval_tasks.

    Raises:
        ConfigError: there is none of that name.
    """
    server = checkpoint if checkpoint.startswith(("http://", "https://")) else None
    named = NamedPolicy({})
    if checkpoint and server is None:
        named = named_policy(checkpoint, "checkpoint")
    overrides = [f"policy.{key}={text}" for key, text in named.settings.items()]
    if data:
        overrides += _tasks_of(data)
    return NamedInputs(overrides, named.checkpoint, server)


def run_evaluation(
    experiment: AnyExperiment,
    inputs: NamedInputs,
    folder: Path | None,
    control: RunControl | None = None,
) -> Evaluated:
    """Evaluate an experiment that has the settings of its inputs.

    Raises:
        ConfigError: an input is missing or does not fit.
        Unanswered: tasks failed that may succeed when they are tried again.
    """
    # jax reads its flags when it is first imported: imports of jax come after this.
    prepare(experiment.placement)
    from areal_jax.run import evaluation

    return Evaluated(
        *evaluation.run(
            experiment,
            checkpoint=inputs.checkpoint,
            server=inputs.server,
            folder=folder,
            control=control or RunControl(),
        )
    )


def _tasks_of(data: str) -> list[str]:
    """Overrides that select all tasks that `data=` names."""
    try:
        source = find_benchmark(data)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    listed = settings(source, "eval_tasks.").values()
    return [
        f"eval_tasks={type(source).__name__}",
        *(f"{setting.key}={setting.text()}" for setting in listed),
        "evaluation.num_tasks=none",
    ]
