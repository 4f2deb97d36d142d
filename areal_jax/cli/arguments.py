"""Shared by the commands: arguments, messages on stderr, and the settings in --help."""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.config.load import experiment_names, find_experiment, load_experiment, read_config
from areal_jax.config.overrides import Settings, groups, kind_name, settings
from areal_jax.errors import ConfigError
from areal_jax.metrics.files import describe_disk_error


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError for invalid arguments."""

    def __init__(self, advice: str) -> None:
        """
        Args:
            advice: what to do about invalid arguments.
        """
        super().__init__(add_help=False, allow_abbrev=False)
        self._advice = advice

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self._advice}")


def experiment_parser() -> Parser:
    """A parser of options with two dashes and of overrides without, in any order."""
    parser = Parser("settings are given without dashes, as a.b=c, and --help lists them")
    parser.add_argument("--exp")
    parser.add_argument("--config", type=Path)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("overrides", nargs="*")
    return parser


def named_experiment(command: argparse.Namespace) -> AnyExperiment:
    """Load the experiment that --exp or --config names, with the overrides.

    Raises:
        ConfigError: none is named, or both are.
    """
    if command.exp and command.config:
        raise ConfigError("--exp and --config both name an experiment; give one")
    if command.config:
        return read_config(command.config, command.overrides)
    if not command.exp:
        raise ConfigError(
            f"expected --exp=NAME, one of {', '.join(experiment_names())}, or --config=FILE; found "
            "neither; --help says more"
        )
    return load_experiment(command.exp, command.overrides)


def fail(message: str, status: int) -> int:
    """Print why the command ends to stderr; the exit status."""
    print(f"areal_jax: {message}", file=sys.stderr, flush=True)
    return status


def fail_on_disk(error: OSError, advice: str) -> int:
    """Print which file the disk could not write to stderr; the exit status. Raises any other
    error."""
    if (fault := describe_disk_error(error)) is None:
        raise error
    return fail(f"{fault}; make room there; {advice}", 1)


def show(text: str) -> None:
    """Print text. A reader that stops early, as `less` and `head` do, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes the buffer when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def help_text(usage: str, config: AnyExperiment | type[Experiment]) -> str:
    """The usage, and every setting with value, type and doc; for a choice among classes, the
    settings of each class."""
    values = "defaults" if isinstance(config, type) else f"values of {config.name}"
    lines = [usage, "experiments:"]
    lines += [f"  {name:<12}  {_first_line(name)}" for name in experiment_names()]
    return "\n".join([*lines, "", f"settings, with the {values}:", settings_text(config)])


def settings_text(config: object) -> str:
    """Every setting of a record, or of a class with its defaults, as --help lists them."""
    width = min(shutil.get_terminal_size().columns, 128)
    return "\n".join(_setting_lines(settings(config), groups(config), width))


def _setting_lines(
    listed: Settings, headings: Mapping[str, str], width: int, indent: str = "  "
) -> Iterator[str]:
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
            textwrap.fill(f"{kind_name(setting.kind)}; {setting.doc}", width - len(indent) - 4),
            indent + "    ",
        )
        chosen = f"{setting.key}." if setting.choices else ""
        for choice in setting.choices:
            yield (
                f"{indent}  with {setting.key}={choice.__name__}: "
                f"{(choice.__doc__ or '').partition(chr(10))[0]}"
            )
            present = {key: inner for key, inner in listed.items() if key.startswith(chosen)}
            inside = present if choice is setting.value else settings(choice, chosen)
            yield from _setting_lines(inside, {}, width, indent + "    ")


def _first_line(name: str) -> str:
    docstring = (
        ast.get_docstring(ast.parse(find_experiment(name).read_text(encoding="utf-8"))) or ""
    )
    return docstring.partition("\n")[0]
