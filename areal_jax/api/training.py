"""Training from Python; the command line uses the same functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_jax.api.background import call_beside, call_beside_loop
from areal_jax.api.results import Result
from areal_jax.api.run_folders import (
    claimed_folder,
    folder_to_resume,
    new_folder,
    resume_advice,
)
from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.cluster.config import Local
from areal_jax.cluster.environment import NO_COMPILATION_CACHE, prepare, set_variables
from areal_jax.cluster.signals import Interrupted, Stopped
from areal_jax.config.experiment import AnyExperiment
from areal_jax.config.load import CONFIG_FILE, read_config, source_of
from areal_jax.errors import ConfigError
from areal_jax.run.callbacks import Callback, RunControl
from areal_jax.storage import local_path

if TYPE_CHECKING:
    from areal_jax.run.plan import Plan

TRIAL = "trial"
"""Folder of the trial steps of placement.rollout_share=auto, inside a run folder."""


def train(
    experiment: AnyExperiment | None = None,
    run_folder: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train the policy of an experiment, as `python -m areal_jax.train` does.

    Where this thread has a running event loop, as in a notebook, training runs in a thread of its
    own. Ctrl-C ends the run after its current step with a checkpoint, and then raises
    KeyboardInterrupt. Threads, processes and device memory are given back at the end.

    Args:
        experiment: settings of the run; None, with `resume`: those of the run folder.
        run_folder: folder to write, also gs:// or s3://; None: runs/NAME-TIME.
        resume: whether to resume the run in `run_folder`, or the newest run of the experiment.
        callbacks: called after steps, evaluations and checkpoints.

    Returns:
        The result, also where a callback has stopped the run.

    Raises:
        ConfigError: a setting is invalid, or the folder is in use.
        KeyboardInterrupt: Ctrl-C or SIGTERM ended the run; its state is saved.
        FloatingPointError: training diverges.
        NotLearning: no step changed the policy, or health checks ended the run.
        Exception: the error of a callback; the run's state is saved.
    """
    control = RunControl(callbacks)
    return call_beside_loop(
        lambda: _train(experiment, _path(run_folder), resume, control),
        control.request_stop,
        "train",
    )


async def train_async(
    experiment: AnyExperiment | None = None,
    run_folder: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """As `train`, in a thread of its own, awaited. Cancelling it ends the run after its current
    step, with a checkpoint.
    """
    control = RunControl(callbacks)
    return await call_beside(
        lambda: _train(experiment, _path(run_folder), resume, control),
        control.request_stop,
        "train",
    )


def _train(
    experiment: AnyExperiment | None, run_folder: Path | None, resume: bool, control: RunControl
) -> Result:
    is_named = run_folder is not None
    if resume:
        run_folder = folder_to_resume(run_folder, experiment.name if experiment else "*")
    if experiment is None:
        if run_folder is None or not resume:
            raise ConfigError("expected an experiment, found none; only resume=True needs none")
        experiment = read_config(run_folder / CONFIG_FILE)
    run_folder = run_folder if resume else new_folder(run_folder, experiment.name)
    assert run_folder is not None
    found, ended = run_folder, "nothing was trained"

    def know(folder: Path) -> None:
        nonlocal found
        found = folder

    try:
        plan = plan_run(experiment)
        train_plan(
            plan,
            run_folder,
            is_named=is_named,
            resume=resume,
            source=source_of(experiment),
            control=control,
            on_claim=know,
        )
        version = _last_version(found)
        if control.stopped_by:
            ended = f"stopped by {control.stopped_by}"
        else:
            ended = "completed" if version >= plan.experiment.num_steps else "out of tasks"
    except Stopped as stopped:
        ended = str(stopped)
        raise Interrupted(stopped.number, f"{stopped}; {resume_advice(found)}") from None
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
        raise
    finally:
        result = Result(found, _last_version(found), ended)
        control.end(result)
    return result


def plan_run(experiment: AnyExperiment, executables: Path | None = None) -> Plan:
    """Prepare this process for an experiment, and make the plan of its run.

    Args:
        executables: folder of compiled programs to load, and to save others in.

    Raises:
        ConfigError: an input is missing or does not fit, or jax is already imported with settings
            that do not fit.
    """
    if executables is not None and not isinstance(experiment.launch, Local):
        raise ConfigError(
            f"--save-executables={executables} is for runs in one process, found launch=ray; set "
            "launch=Local, or leave it out"
        )
    # Ray and jax read these when they are first imported: imports of jax come after this.
    if executables is not None:
        set_variables(NO_COMPILATION_CACHE, "jax")
    set_variables(experiment.launch.environment_variables(os.environ), "ray")
    prepare(experiment.launch.resolve_placement(experiment.placement))
    from areal_jax.run.make_plan import make_plan

    if executables is None:
        plan = make_plan(experiment)
    else:
        from areal_jax.parallel.executables import ExecutableFolder

        plan = make_plan(experiment, compiler=ExecutableFolder(executables))
    for warning in plan.warnings:
        warn(warning)
    return plan


def train_plan(
    plan: Plan,
    run_folder: Path,
    *,
    is_named: bool,
    resume: bool,
    source: str | None,
    control: RunControl | None = None,
    on_claim: Callable[[Path], object] = lambda _: None,
) -> None:
    """Claim the run folder, and train a plan in it.

    Args:
        is_named: False: a new folder gets a unique name.
        source: name or file of the experiment, for processes on other hosts.
        control: the caller's callbacks and stop requests.
        on_claim: called with the folder once it is claimed.
    """
    from areal_jax.run.auto_split import balanced
    from areal_jax.run.memory_checks import find_shortage
    from areal_jax.run.start import start

    if shortage := find_shortage(plan):
        warn(shortage)
    with claimed_folder(run_folder, is_named=is_named, resume=resume) as (folder, claim):
        on_claim(folder)
        if plan.experiment.placement.rollout_share == "auto":
            plan = balanced(plan, folder / TRIAL)
        start(plan, folder, resume=resume, source=source, claim=claim, control=control)


def warn(text: str) -> None:
    """Print a warning."""
    print(f"areal_jax: warning: {text}", file=sys.stderr)


def _path(folder: str | Path | None) -> Path | None:
    return None if folder is None else local_path(str(folder))


def _last_version(run_folder: Path) -> int:
    return max(saved_versions(run_folder / CHECKPOINTS), default=0)
