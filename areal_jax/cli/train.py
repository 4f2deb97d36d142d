"""`areal-train --exp=NAME [a.b=c ...]`: train a policy, or plan its training."""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from areal_jax import __version__
from areal_jax.api.run_folders import (
    RUNS_FOLDER,
    claimed_folder,
    folder_to_resume,
    new_folder,
    resume_advice,
)
from areal_jax.api.training import plan_run, train_plan
from areal_jax.checkpoint.folders import newest_whole
from areal_jax.cli.arguments import (
    answer,
    experiment_parser,
    fail,
    fail_on_disk,
    has_experiment,
    named_experiment,
    show,
)
from areal_jax.cli.compile_table import compile_for
from areal_jax.cli.preflight import preflight
from areal_jax.cli.settings_help import wrap_names
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
from areal_jax.rl.presets import PRESETS
from areal_jax.storage import fetch_objects, local_only, local_path, shown

if TYPE_CHECKING:
    from areal_jax.run.plan import Plan

USAGE = f"""\
usage: areal-train --exp=NAME [a.b=c ...] [options]

Train the policy of an experiment. Metrics, samples and checkpoints are written to the run folder.

  --exp=NAME            an experiment, or the path of a .py file that defines `experiment`:
                        {{names}}
  --config=FILE         instead of --exp: the {CONFIG_FILE} of an earlier run
  a.b=c                 change a setting, such as rollout.max_staleness=8; a choice among classes
                        by name, such as tasks=Files tasks.path=problems.jsonl
  algorithm=NAME        the settings of a published algorithm, such as grpo; algorithm=list: names
  --run-folder=DIR      folder to write, also gs:// or s3://; default: {RUNS_FOLDER}/NAME-TIME
  --resume[=DIR]        resume the run in DIR, or the newest run (of NAME, if --exp is given)
  --dry-run             print settings, devices, meshes and memory, and train nothing
  --compile-for=SLICE   compile for absent TPU slices or GPU nodes, as 2xv5p:4x4x4 or 2xh200:8;
                        --compile-all: all programs; --save-executables=DIR: keep programs
  --replay=RUN          train again on the recorded rollouts of a run; --until=N: to version N
  --preflight           try right, wrong and cheating answers, from prompt to one update
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status, with one message on stderr where it is not 0: 2 for invalid input or a folder
        that another process has claimed; 1 where training diverges or learns nothing, every group
        is rejected, a preflight has findings, the run stalls, a process of a cluster dies, another
        process takes over the run folder, or the disk is full; 130 and 143 where SIGINT or SIGTERM
        ended the run early.
    """
    # Imports and tracing create some 300 000 objects that stay: to look for cycles among them again
    # and again took 8 % of a start.
    gc.set_threshold(100_000, 20, 100)
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
    if command.replay is not None:
        return _replay(command)
    run_folder = _resumed_folder(command) if command.resume is not None else None
    experiment = (
        named_experiment(command)
        if run_folder is None
        else read_config(run_folder / CONFIG_FILE, command.overrides)
    )
    if run_folder is not None:
        interruption.advice = partial(resume_advice, run_folder)
    if command.compile_for:
        return compile_for(
            experiment,
            command.compile_for,
            compiles_all=command.compile_all,
            executables=command.save_executables,
        )
    if command.preflight:
        return preflight(experiment, command.exp)
    run_folder = run_folder or new_folder(command.run_folder, experiment.name)
    if not command.dry_run:
        show(f"areal_jax {__version__}: loading data and tokenizer of {experiment.name}")
    plan = plan_run(experiment, command.save_executables)
    if command.dry_run:
        _show_plan(plan, run_folder)
        return 0

    def advise(folder: Path) -> None:
        interruption.advice = partial(resume_advice, folder)

    train_plan(
        plan,
        run_folder,
        is_named=command.run_folder is not None,
        resume=command.resume is not None,
        source=command.exp,
        on_claim=advise,
    )
    return 0


def _replay(command: argparse.Namespace) -> int:
    """Replay a run; exit status 1 if its settings are unchanged and a version differs."""
    source = fetch_objects(shown(command.replay), newest_whole)
    experiment = read_config(source / CONFIG_FILE, command.overrides)
    folder = new_folder(command.run_folder, f"{experiment.name}-replay")
    plan = plan_run(experiment)
    from areal_jax.run.replay import replay

    with claimed_folder(folder, is_named=command.run_folder is not None, resume=False) as (held, _):
        result = replay(plan, source, held, command.until)
    if not result.different or command.overrides:
        return 0
    return fail(f"the settings are those of the run, but {result.describe()}", 1)


def _show_plan(plan: Plan, run_folder: Path) -> None:
    """Try grading, and print settings and plan."""
    from areal_jax.run.grading import try_grading
    from areal_jax.run.plan_report import plan_text

    asyncio.run(try_grading(plan))
    listed = settings(plan.experiment).values()
    show("\n".join(f"{setting.key}={setting.text()}" for setting in listed))
    show(f"\n{plan_text(plan)}\n\nrun folder: {shown(run_folder)} (not written: --dry-run)")


def _resumed_folder(command: argparse.Namespace) -> Path:
    """The run folder that --resume or --run-folder names, or the newest (of --exp)."""
    # Loaded also where the folder is named: config.json may name classes that the experiment's file
    # defines.
    name = load_experiment(command.exp).name if command.exp else "*"
    return folder_to_resume(
        local_path(command.resume) if command.resume else command.run_folder, name
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = experiment_parser({"algorithm": list(PRESETS)})
    parser.add_argument("--run-folder", type=local_path)
    parser.add_argument("--resume")
    parser.add_argument("--replay", type=local_path)
    parser.add_argument("--until", type=int)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--preflight", action="store_true")
    parser.add_argument("--compile-for", metavar="SLICE")
    parser.add_argument("--compile-all", action="store_true")
    parser.add_argument("--save-executables", type=local_only, metavar="DIR")
    # A bare --resume must not take the override that follows it for its folder.
    command = parser.parse(argv, optional=["--resume"])
    if command.resume is not None and command.config:
        raise ConfigError(
            "--resume takes the settings from the run's own config.json; leave out --config"
        )
    if command.resume and command.run_folder:
        raise ConfigError("--resume=DIR and --run-folder both name the run's folder; give one")
    return command


def _usage() -> str:
    return USAGE.format(names=wrap_names(experiment_names()))
