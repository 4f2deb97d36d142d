"""python -m areal_jax.train --exp=NAME [a.b=c ...]: train a policy, or say what training it would take."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.command import Parser, help_text, named_experiment, show
from areal_jax.config import CONFIG_FILE, Experiment, experiment_names, load_experiment, read_config
from areal_jax.launch.local import prepare
from areal_jax.metrics.config import METRICS
from areal_jax.records import AllRejected, NotLearning
from areal_jax.rl.presets import PRESETS
from areal_jax.settings import ConfigError, settings

RUNS_FOLDER = Path("runs")

TRIAL = "trial"
"""Name under which a run folder keeps the steps that told how to split the devices."""

USAGE = f"""\
usage: python -m areal_jax.train --exp=NAME [a.b=c ...] [options]

Train the policy of an experiment. What the run finds out goes to its run folder.

  --exp=NAME            an experiment ({{names}}), or the path of a .py file that defines `experiment`
  --config=FILE         instead of --exp: the {CONFIG_FILE} of an earlier run
  a.b=c                 change a setting, such as rollout.max_staleness=8; a choice among classes by name,
                        such as tasks=Files tasks.path=problems.jsonl
  algorithm=NAME        the switches of a published algorithm: {{algorithms}}
  --run-folder=DIR      where to write; {RUNS_FOLDER}/NAME-TIME where not given
  --resume[=DIR]        go on with the run in DIR, or with the newest run (of NAME, where --exp is given)
  --dry-run             print the resolved settings and the plan (devices, meshes, memory), and train nothing
  --help                this text, with every setting; with --exp or --config, their values
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 when done, 2 where the input cannot be and 1 where training diverges, learns
    nothing, or every group is rejected (one message on stderr each), 130 on a second Ctrl-C."""
    try:
        return _run(_parse(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"areal_jax: {error}", file=sys.stderr)
        return 2
    except (AllRejected, NotLearning) as error:
        print(f"areal_jax: {error}{_notes(error)}", file=sys.stderr)
        return 1
    except FloatingPointError as error:
        print(f"areal_jax: training diverged: {error}{_notes(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"areal_jax: interrupted{_notes(interrupt)}", file=sys.stderr)
        return 130


def _run(command: argparse.Namespace) -> int:
    if command.help:
        show(help_text(_usage(), named_experiment(command) if command.exp or command.config else Experiment))
        return 0
    run_folder = _resumed_folder(command) if command.resume is not None else None
    experiment = named_experiment(command) if run_folder is None else read_config(run_folder / CONFIG_FILE, command.overrides)
    run_folder = run_folder or _new_folder(command, experiment.name)
    # jax reads its flags when it is first imported, so that everything that imports it comes after this.
    os.environ.update(experiment.launch.variables(os.environ))
    prepare(experiment.launch.placement(experiment.placement))
    from areal_jax.run_plan import make_plan

    plan = make_plan(experiment)
    experiment = plan.experiment
    for warning in plan.warnings:
        print(f"areal_jax: warning: {warning}", file=sys.stderr)
    if command.dry_run:
        from areal_jax.assembly import try_judging

        asyncio.run(try_judging(plan))
        print("\n".join(f"{setting.key}={setting.text()}" for setting in settings(experiment).values()))
        print(f"\n{plan.text()}\n\nrun folder: {run_folder} (not written: --dry-run)")
        return 0
    if shortage := plan.shortage():
        print(f"areal_jax: warning: {shortage}", file=sys.stderr)
    from areal_jax import loop
    from areal_jax.assembly import what_is_left
    from areal_jax.balance import balanced

    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=run_folder).close()
    except OSError as error:
        raise ConfigError(f"--run-folder={run_folder}: cannot be written to ({error.strerror}); give another") from error
    if experiment.placement.rollout_share == "auto":
        plan = balanced(plan, run_folder / TRIAL)
    try:
        loop.run(plan, run_folder, resume=command.resume is not None, source=command.exp)
    except (FloatingPointError, KeyboardInterrupt, AllRejected, NotLearning) as error:
        error.add_note(what_is_left(run_folder))
        raise
    return 0


def _notes(error: BaseException) -> str:
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser()
    parser.add_argument("--run-folder", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--dry-run", action="store_true")
    # A bare --resume must not take the override that follows it for its folder.
    command = parser.parse_intermixed_args(["--resume=" if arg == "--resume" else arg for arg in argv])
    if command.resume is not None and command.config:
        raise ConfigError("--resume takes the settings from the run's own config.json; leave out --config")
    if command.resume and command.run_folder:
        raise ConfigError("--resume=DIR and --run-folder both name the run's folder; give one")
    return command


def _new_folder(command: argparse.Namespace, name: str) -> Path:
    folder = command.run_folder or RUNS_FOLDER / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if _has_begun(folder):
        raise ConfigError(f"{folder} already holds a run; go on with it by --resume={folder}, or give another --run-folder")
    return folder


def _resumed_folder(command: argparse.Namespace) -> Path:
    """The run that --resume means: the one it names, the one of --run-folder, or the newest (of --exp)."""
    # Loaded even where the folder is named: config.json may name classes that the experiment's file defines.
    name = load_experiment(command.exp).name if command.exp else "*"
    named = Path(command.resume) if command.resume else command.run_folder
    begun = filter(_has_begun, RUNS_FOLDER.glob(f"{name}-*"))
    runs = [named] if named else sorted(begun, key=lambda folder: folder.stat().st_mtime)
    runs = [folder for folder in runs if (folder / CONFIG_FILE).is_file()]
    if not runs:
        raise ConfigError(f"nothing to resume: no {named or RUNS_FOLDER / f'{name}-*'} holds a {CONFIG_FILE} of a run")
    return runs[-1]


def _has_begun(folder: Path) -> bool:
    """Whether anything was found out or trained in a folder: a start that failed leaves its settings at most."""
    metrics = folder / METRICS
    return (metrics.is_file() and metrics.stat().st_size > 0) or bool(saved_versions(folder / CHECKPOINTS))


def _usage() -> str:
    names = textwrap.fill(", ".join(PRESETS), 100, subsequent_indent=" " * 24)
    return USAGE.format(names=", ".join(experiment_names()), algorithms=names)


if __name__ == "__main__":
    sys.exit(main())
