"""`areal-train --exp=NAME [a.b=c ...]`: train a policy, or plan its training."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from areal_jax import __version__
from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.cli.arguments import (
    answer,
    experiment_parser,
    fail,
    fail_on_disk,
    has_experiment,
    named_experiment,
)
from areal_jax.cli.settings_help import wrap_names
from areal_jax.cluster.environment import prepare
from areal_jax.cluster.signals import Interruption, Stopped, exit_status, interruptible
from areal_jax.cluster.watchdog import Stalled
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import CONFIG_FILE, experiment_names, load_experiment, read_config
from areal_jax.config.overrides import settings
from areal_jax.errors import (
    AllRejected,
    ClaimLost,
    ConfigError,
    NotLearning,
    NotSaved,
    WorkerDied,
)
from areal_jax.metrics.config import METRICS
from areal_jax.rl.presets import PRESETS
from areal_jax.run.claim import Claim, claimed, writable
from areal_jax.run.summary import shell_command

RUNS_FOLDER = Path("runs")

TRIAL = "trial"
"""Folder of the trial steps of placement.rollout_share=auto, inside a run folder."""

USAGE = f"""\
usage: areal-train --exp=NAME [a.b=c ...] [options]

Train the policy of an experiment. Metrics, samples and checkpoints are written to the run folder.

  --exp=NAME            an experiment, or the path of a .py file that defines `experiment`:
                        {{names}}
  --config=FILE         instead of --exp: the {CONFIG_FILE} of an earlier run
  a.b=c                 change a setting, such as rollout.max_staleness=8; a choice among classes
                        by name, such as tasks=Files tasks.path=problems.jsonl
  algorithm=NAME        the settings of a published algorithm:
                        {{algorithms}}
  --run-folder=DIR      folder to write; default: {RUNS_FOLDER}/NAME-TIME
  --resume[=DIR]        resume the run in DIR, or the newest run (of NAME, if --exp is given)
  --dry-run             print settings, devices, meshes and memory, and train nothing
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status, with one message on stderr where it is not 0: 2 for invalid input or a folder
        that another process has claimed; 1 where training diverges or learns nothing, every group
        is rejected, the run stalls, a process of a cluster dies, another process takes over the run
        folder, or the disk is full; 130 and 143 where SIGINT or SIGTERM ended the run early.
    """
    with interruptible() as interruption:
        interruption.advice = lambda: "nothing was trained"
        try:
            return _run(_parse(argv), interruption)
        except ConfigError as error:
            return fail(f"{error}", 2)
        except ClaimLost as error:
            # Without advice to resume: the run folder belongs to the other process.
            return fail(f"{error}", 1)
        except (AllRejected, NotLearning, NotSaved, WorkerDied, Stalled) as error:
            return fail(f"{error}; {interruption.advice()}", 1)
        except FloatingPointError as error:
            return fail(f"training diverged: {error}; {interruption.advice()}", 1)
        except Stopped as stopped:
            return fail(f"{stopped}; {interruption.advice()}", exit_status(stopped.number))
        except KeyboardInterrupt as interrupt:
            return interruption.refused(interrupt)
        except OSError as error:
            return fail_on_disk(error, interruption.advice())


def _run(command: argparse.Namespace, interruption: Interruption) -> int:
    if answer(
        command, _usage(), named_experiment(command) if has_experiment(command) else Experiment
    ):
        return 0
    run_folder = _resumed_folder(command) if command.resume is not None else None
    experiment = (
        named_experiment(command)
        if run_folder is None
        else read_config(run_folder / CONFIG_FILE, command.overrides)
    )
    if run_folder is not None:
        interruption.advice = partial(resume_advice, run_folder)
    run_folder = run_folder or _new_folder(command, experiment.name)
    # jax reads its flags when it is first imported: imports of jax come after this.
    os.environ.update(experiment.launch.environment_variables(os.environ))
    prepare(experiment.launch.resolve_placement(experiment.placement))
    if not command.dry_run:
        print(
            f"areal_jax {__version__}: loading data and tokenizer of {experiment.name}", flush=True
        )
    from areal_jax.run.make_plan import make_plan
    from areal_jax.run.memory_checks import find_shortage

    plan = make_plan(experiment)
    experiment = plan.experiment
    for warning in plan.warnings:
        print(f"areal_jax: warning: {warning}", file=sys.stderr)
    if command.dry_run:
        from areal_jax.run.grading import try_grading
        from areal_jax.run.plan_report import plan_text

        asyncio.run(try_grading(plan))
        print(
            "\n".join(
                f"{setting.key}={setting.text()}" for setting in settings(experiment).values()
            )
        )
        print(f"\n{plan_text(plan)}\n\nrun folder: {run_folder} (not written: --dry-run)")
        return 0
    if shortage := find_shortage(plan):
        print(f"areal_jax: warning: {shortage}", file=sys.stderr)
    from areal_jax.run.auto_split import balanced
    from areal_jax.run.start import start

    with _claimed(command, run_folder) as (run_folder, claim):
        interruption.advice = partial(resume_advice, run_folder)
        if experiment.placement.rollout_share == "auto":
            plan = balanced(plan, run_folder / TRIAL)
        start(plan, run_folder, resume=command.resume is not None, source=command.exp, claim=claim)
    return 0


@contextmanager
def _claimed(command: argparse.Namespace, run_folder: Path) -> Iterator[tuple[Path, Claim]]:
    """Make and claim the run folder; without a given name, it gets a unique one."""
    with ExitStack() as stack:
        with writable(run_folder, "--run-folder"):
            if command.resume is None and command.run_folder is None:
                run_folder = make_unique(run_folder)
            claim = stack.enter_context(claimed(run_folder))
        if command.resume is None:
            _require_unused(run_folder)  # another run may have ended there since
        yield run_folder, claim


def make_unique(folder: Path) -> Path:
    """Make a new folder: `folder`, or the first of `folder-2`, `folder-3`, ... that does not
    exist."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        found = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        with suppress(FileExistsError):
            found.mkdir()
            return found
    raise AssertionError("counted to the end")


def resume_advice(run_folder: Path) -> str:
    """The command that resumes a run which ended early, and the version that it resumes from."""
    if not (versions := saved_versions(run_folder / CHECKPOINTS)):
        return "no checkpoint was saved, so there is nothing to resume"
    resume = shell_command("train", f"--resume={run_folder}")
    return f"{resume} resumes from the checkpoint of version {versions[-1]}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = experiment_parser({"algorithm": list(PRESETS)})
    parser.add_argument("--run-folder", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--dry-run", action="store_true")
    # A bare --resume must not take the override that follows it for its folder.
    command = parser.parse(argv, optional=["--resume"])
    if command.resume is not None and command.config:
        raise ConfigError(
            "--resume takes the settings from the run's own config.json; leave out --config"
        )
    if command.resume and command.run_folder:
        raise ConfigError("--resume=DIR and --run-folder both name the run's folder; give one")
    return command


def _new_folder(command: argparse.Namespace, name: str) -> Path:
    folder = command.run_folder or RUNS_FOLDER / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if _has_begun(folder):
        with (
            suppress(OSError),
            claimed(folder),
        ):  # FolderInUse names a process that still runs there
            pass
    _require_unused(folder)
    return folder


def _require_unused(folder: Path) -> None:
    if _has_begun(folder):
        raise ConfigError(
            f"{folder} already holds a run; resume it with --resume={folder}, or give another "
            "--run-folder"
        )


def _resumed_folder(command: argparse.Namespace) -> Path:
    """The run folder that --resume or --run-folder names, or the newest (of --exp)."""
    # Loaded also where the folder is named: config.json may name classes that the experiment's file
    # defines.
    name = load_experiment(command.exp).name if command.exp else "*"
    named = Path(command.resume) if command.resume else command.run_folder
    begun = filter(_has_begun, RUNS_FOLDER.glob(f"{name}-*"))
    runs = [named] if named else sorted(begun, key=lambda folder: folder.stat().st_mtime)
    runs = [folder for folder in runs if (folder / CONFIG_FILE).is_file()]
    if not runs:
        raise ConfigError(
            f"nothing to resume: expected the {CONFIG_FILE} of a run in "
            f"{named or RUNS_FOLDER / f'{name}-*'}, found none; give --resume=DIR"
        )
    return runs[-1]


def _has_begun(folder: Path) -> bool:
    """Whether a folder has metrics or checkpoints; a failed start leaves its settings at most."""
    metrics = folder / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(
        saved_versions(folder / CHECKPOINTS)
    )


def _usage() -> str:
    return USAGE.format(names=wrap_names(experiment_names()), algorithms=wrap_names(PRESETS))
