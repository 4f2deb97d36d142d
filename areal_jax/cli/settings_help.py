"""Text of --help: the usage with all groups of settings, one group, or the settings that match a
word.
"""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from areal_jax.config.aliases import ALIASES
from areal_jax.config.experiment import Setup
from areal_jax.config.load import experiment_names, find_experiment
from areal_jax.config.overrides import (
    Setting,
    Settings,
    groups,
    kind_name,
    reachable,
    settings,
    similar,
)
from areal_jax.errors import ConfigError

ALL, EXPERIMENTS = "all", "experiments"

VERSION_OPTION = "  --version             the release\n"
HELP_OPTIONS = """\
  --help                this text; --help=GROUP: the settings of a group, such as {group}
                        --help=WORD: search; --help=all: every setting{experiments}
"""

MAX_WIDTH = 100


def help_text(usage: str, config: object, topic: str = "") -> str:
    """The usage of a command, or the settings that a topic selects.

    Args:
        usage: of the command, without the options that all commands have.
        config: a record, or a class with its defaults.
        topic: empty, `all`, `experiments`, a group, a setting, or a word to search for.

    Raises:
        ConfigError: no setting matches the topic.
    """
    listed, headings = settings(config), groups(config)
    if not topic:
        return usage + _options(config, headings) + "\n" + "\n".join(_group_lines(listed, headings))
    experiments = [f"  {name:<16}  {_first_line(name)}" for name in experiment_names()]
    if topic == EXPERIMENTS and _has_experiments(config):
        return "\n".join(["experiments:", *experiments])
    origin = "defaults" if isinstance(config, type) else f"values of {getattr(config, 'name', '')}"
    lines = [f"settings, with the {origin}:"]
    if topic == ALL:
        if _has_experiments(config):
            lines = ["experiments:", *experiments, "", *lines]
        return "\n".join([usage, *lines, *_setting_lines(listed, headings, _width())])
    if topic in headings or (topic in listed and listed[topic].choices):
        prefix = f"{topic}."
        inside = {key: each for key, each in listed.items() if f"{key}.".startswith(prefix)}
        shown = {key: doc for key, doc in headings.items() if f"{key}.".startswith(prefix)}
        return "\n".join([*lines, *_setting_lines(inside, shown, _width())])
    return "\n".join(_found_lines(listed, topic))


def wrap_names(names: Iterable[str]) -> str:
    """Names as the description of an option of the usage."""
    indent = " " * 24
    return textwrap.fill(
        ", ".join(names), MAX_WIDTH, initial_indent=indent, subsequent_indent=indent
    ).lstrip()


def _options(config: object, headings: Mapping[str, str]) -> str:
    nested = [key for key in headings if "." in key]
    experiments = "; --help=experiments: names"
    return (
        HELP_OPTIONS.format(
            group=(nested or list(headings) or ["engine"])[0],
            experiments=experiments if _has_experiments(config) else "",
        )
        + VERSION_OPTION
    )


def _has_experiments(config: object) -> bool:
    return issubclass(config if isinstance(config, type) else type(config), Setup)


def _group_lines(listed: Settings, headings: Mapping[str, str]) -> Iterator[str]:
    """One line for the settings outside groups, and one for each outermost group."""
    top = ", ".join(key for key in listed if key.partition(".")[0] not in headings)
    outermost = {key: doc for key, doc in headings.items() if "." not in key}
    yield from textwrap.wrap(
        f"settings: {top}; groups:" if outermost else f"settings: {top}",
        MAX_WIDTH,
        subsequent_indent=" " * 10,
        break_on_hyphens=False,
    )
    for group, doc in outermost.items():
        number = sum(f"{key}.".startswith(f"{group}.") for key in listed)
        short = textwrap.shorten(doc, MAX_WIDTH - 18, placeholder="...")
        yield f"  {group:<11} {number:>3}  {short}"


def _found_lines(listed: Settings, word: str) -> Iterator[str]:
    """The settings that a word may mean: other trainers' names first, then keys, then docs.

    Raises:
        ConfigError: there are none.
    """
    every = list(reachable(listed))
    begins = re.compile(rf"(?<![a-z0-9]){re.escape(word.lower())}")
    exist = {setting.key for setting, _ in every}
    found = [key for key in ALIASES.get(word.lower(), ()) if key in exist]
    found += [setting.key for setting, _ in every if begins.search(setting.key)]
    found += [setting.key for setting, _ in every if begins.search(setting.doc.lower())]
    found = list(dict.fromkeys(found)) or similar(word, listed)
    if not found:
        raise ConfigError(
            f"--help={word}: expected a group, a setting or a word of one, found no match; --help "
            "lists the groups"
        )
    yield f"settings that match {word}:"
    for key in found:
        # Classes to choose among may have a setting in common.
        needs: dict[Setting, list[str]] = {}
        for setting, choices in every:
            if setting.key == key:
                needs.setdefault(setting, []).append(choices)
        for setting, choices in needs.items():
            yield from _lines_of(setting, _width(), "  ", " or ".join(filter(None, choices)))


def _lines_of(setting: Setting, width: int, indent: str, needs: str = "") -> Iterator[str]:
    yield f"{indent}{setting.key}={setting.text()}" + (f"   (with {needs})" if needs else "")
    yield textwrap.indent(
        textwrap.fill(f"{kind_name(setting.kind)}; {setting.doc}", width - len(indent) - 4),
        indent + "    ",
    )


def _setting_lines(
    listed: Settings, headings: Mapping[str, str], width: int, indent: str = "  "
) -> Iterator[str]:
    """Every setting with its doc under the heading of its group; for a choice among classes, the
    settings of each class.
    """
    group = chosen = ""
    for setting in listed.values():
        if chosen and setting.key.startswith(chosen):
            continue
        parent = setting.key.rpartition(".")[0]
        if parent != group and parent in headings:
            yield f"\n{indent}{parent}: {headings[parent]}"
        group = parent
        yield from _lines_of(setting, width, indent)
        chosen = f"{setting.key}." if setting.choices else ""
        for choice in setting.choices:
            yield (
                f"{indent}  with {setting.key}={choice.__name__}: "
                f"{(choice.__doc__ or '').partition(chr(10))[0]}"
            )
            present = {key: inner for key, inner in listed.items() if key.startswith(chosen)}
            inside = present if choice is setting.value else settings(choice, chosen)
            yield from _setting_lines(inside, {}, width, indent + "    ")


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 128)


def _first_line(name: str) -> str:
    source = find_experiment(name).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
