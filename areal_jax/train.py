"""python -m areal_jax.train --exp=NAME [a.b=c ...]: train a policy, or say what training it would take."""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from areal_jax.config import (
    CONFIG_FILE,
    AnyExperiment,
    Experiment,
    experiment_names,
    find_experiment,
    load_experiment,
    read_config,
    write_config,
)
from areal_jax.launch.local import prepare
from areal_jax.rl.presets import PRESETS
from areal_jax.settings import ConfigError, Settings, groups, kind_name, settings

RUNS_FOLDER = Path("runs")

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
    """Run the command line. Returns 0 when done, 2 where the input cannot be and 1 where training diverges (one message on
    stderr each), 130 on a second Ctrl-C."""
    try:
        return _run(_parse(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"areal_jax: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"areal_jax: training diverged: {error}; --resume goes on from the newest checkpoint", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("areal_jax: interrupted; --resume goes on from the newest checkpoint", file=sys.stderr)
        return 130


def _run(command: argparse.Namespace) -> int:
    if command.help:
        _show(help_text(_experiment(command) if command.exp or command.config else Experiment))
        return 0
    run_folder = _resumed_folder(command) if command.resume is not None else None
    experiment = _experiment(command) if run_folder is None else read_config(run_folder / CONFIG_FILE, command.overrides)
    run_folder = run_folder or _new_folder(command, experiment.name)
    # jax reads its flags when it is first imported, so that everything that imports it comes after this.
    prepare(experiment.placement)
    from areal_jax.run_plan import make_plan

    plan = make_plan(experiment)
    if command.dry_run:
        print("\n".join(f"{setting.key}={setting.text()}" for setting in settings(experiment).values()))
        print(f"\n{plan.text()}\n\nrun folder: {run_folder} (not written: --dry-run)")
        return 0
    if shortage := plan.shortage():
        print(f"areal_jax: warning: {shortage}", file=sys.stderr)
    from areal_jax import loop

    run_folder.mkdir(parents=True, exist_ok=True)
    write_config(experiment, run_folder / CONFIG_FILE)
    loop.run(plan, run_folder, resume=command.resume is not None)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; settings are given without dashes, as a.b=c, and --help lists them")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--exp")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--run-folder", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("overrides", nargs="*")
    # A bare --resume must not take the override that follows it for its folder.
    command = parser.parse_intermixed_args(["--resume=" if arg == "--resume" else arg for arg in argv])
    if command.exp and command.config:
        raise ConfigError("--exp and --config both name an experiment; give one")
    if command.resume is not None and command.config:
        raise ConfigError("--resume takes the settings from the run's own config.json; leave out --config")
    if command.resume and command.run_folder:
        raise ConfigError("--resume=DIR and --run-folder both name the run's folder; give one")
    return command


def _experiment(command: argparse.Namespace) -> AnyExperiment:
    if command.config:
        return read_config(command.config, command.overrides)
    if not command.exp:
        raise ConfigError(f"which experiment? give --exp=NAME, one of {', '.join(experiment_names())}; --help says more")
    return load_experiment(command.exp, command.overrides)


def _new_folder(command: argparse.Namespace, name: str) -> Path:
    folder = command.run_folder or RUNS_FOLDER / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if (folder / CONFIG_FILE).exists():
        raise ConfigError(f"{folder} already holds a run; go on with it by --resume={folder}, or give another --run-folder")
    return folder


def _resumed_folder(command: argparse.Namespace) -> Path:
    """The run that --resume means: the one it names, the one of --run-folder, or the newest (of --exp)."""
    # Loaded even where the folder is named: config.json may name classes that the experiment's file defines.
    name = load_experiment(command.exp).name if command.exp else "*"
    named = Path(command.resume) if command.resume else command.run_folder
    runs = [named] if named else sorted(RUNS_FOLDER.glob(f"{name}-*"), key=lambda folder: folder.stat().st_mtime)
    runs = [folder for folder in runs if (folder / CONFIG_FILE).is_file()]
    if not runs:
        raise ConfigError(f"nothing to resume: no {named or RUNS_FOLDER / f'{name}-*'} holds a {CONFIG_FILE}")
    return runs[-1]


def _show(text: str) -> None:
    """Print to a reader who may stop early, as `less` and `head` do; that is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer must go somewhere when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def help_text(config: AnyExperiment | type[Experiment]) -> str:
    """Every setting with its value, type and meaning; for a choice among classes, the settings of each class."""
    width = min(shutil.get_terminal_size().columns, 128)
    values = "defaults" if isinstance(config, type) else f"values of {config.name}"
    lines = [_usage(), "experiments:"]
    lines += [f"  {name:<12}  {_first_line(name)}" for name in experiment_names()]
    lines += ["", f"settings, with the {values}:", *_described(settings(config), groups(config), width)]
    return "\n".join(lines)


def _usage() -> str:
    names = textwrap.fill(", ".join(PRESETS), 100, subsequent_indent=" " * 24)
    return USAGE.format(names=", ".join(experiment_names()), algorithms=names)


def _described(listed: Settings, headings: Mapping[str, str], width: int, indent: str = "  ") -> Iterator[str]:
    group = chosen = ""
    for setting in listed.values():
        if chosen and setting.key.startswith(chosen):
            continue
        parent = setting.key.rpartition(".")[0]
        if parent != group and parent in headings:
            yield f"\n{indent}{parent}: {headings[parent]}"
        group = parent
        yield f"{indent}{setting.key}={setting.text()}"
        yield textwrap.indent(
            textwrap.fill(f"{kind_name(setting.kind)}; {setting.doc}", width - len(indent) - 4), indent + "    "
        )
        chosen = f"{setting.key}." if setting.choices else ""
        for choice in setting.choices:
            yield f"{indent}  with {setting.key}={choice.__name__}: {(choice.__doc__ or '').partition(chr(10))[0]}"
            present = {key: inner for key, inner in listed.items() if key.startswith(chosen)}
            inside = present if choice is setting.value else settings(choice, chosen)
            yield from _described(inside, {}, width, indent + "    ")


def _first_line(name: str) -> str:
    docstring = ast.get_docstring(ast.parse(find_experiment(name).read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
