"""Commands, programs and links of the README and of the pages in docs/."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from areal_jax.cli import evaluate, plan, report, serve, tinker, train
from areal_jax.config.experiment import Experiment, PreferenceExperiment, SFTExperiment
from areal_jax.config.overrides import groups, reachable, settings
from areal_jax.rl.presets import PRESETS
from areal_jax.serve.config import ServeConfig
from areal_jax.tinker.config import TinkerConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train.main,
    "evaluate": evaluate.main,
    "serve": serve.main,
    "plan": plan.main,
    "report": report.main,
    "tinker": tinker.main,
}
RUN = ("python", "bash")
NEEDS = {"a GPU", "a TPU", "a cluster", "the network", "an installation", "a checkout", "a server"}
"""What a block that is not run may need, as the comment `<!-- needs: ... -->` before it says."""
FAST = {"algorithms.md", "configuration.md"}
NOT_COMMANDS = {
    "README.md": ["tasks (grain) ->"],
    "agents.md": ["async def agent("],
    "distributed.md": ["pip install", "no progress for 60 s"],
    "rewards.md": ["def reward("],
    "serving.md": ["curl ", "from openai import", "schema = {"],
}
"""Beginnings of indented blocks that are excerpts: of a diagram, of a program with parts left out,
of a log, or of requests to a server that tests/serve sends in full."""


class Block(NamedTuple):
    """A block of code of a page; an indented one has no language."""

    language: str
    title: str
    needs: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def blocks(page: Path) -> list[Block]:
    """Every fenced and indented block of a page."""
    text = page.read_text()
    fence = re.compile(
        r'(?:^<!-- needs: ([^>]*) -->\n\n?)?^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```',
        re.M | re.S,
    )
    fenced = [
        Block(language, title, needs, code) for needs, language, title, code in fence.findall(text)
    ]
    indented = re.findall(r"(?<=\n\n)((?: {4}.*\n(?:\n(?= {4}))?)+)", fence.sub("", text))
    return fenced + [Block("", "", "", code) for code in indented]


def commands(text: str) -> list[list[str]]:
    """Every command of the package in a text, with its arguments; a backslash continues a line."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = re.findall(rf"^\s*areal-({'|'.join(COMMANDS)})\b(.*)", joined, re.M)
    return [[name, *shlex.split(line, comments=True)] for name, line in found]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_documented_commands_are_accepted(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page):
        # The files of a page that is run are written as it runs.
        if block.language in RUN:
            continue
        for command, *arguments in commands(block.text):
            status = COMMANDS[command]([*arguments, "--help"])
            assert status == 0, capsys.readouterr().err
    for overrides in re.findall(r'TRAIN_ARGS="(.*)"', page.read_text()):
        assert train.main(["--exp=aime", *overrides.split(), "--help"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_checked_or_says_what_it_needs(page: Path) -> None:
    for block in blocks(page):
        if block.language in RUN or block.language in ("text", "json"):
            assert not block.needs
        elif block.language:
            assert block.language == "console" and block.needs in NEEDS, block
        elif not block.text.lstrip().startswith(tuple(NOT_COMMANDS.get(name_of(page), ()))):
            joined = re.sub(r"\\\n\s*", "", block.text)
            for line in filter(None, map(str.strip, joined.splitlines())):
                known = r"(areal-|make |python -m pip install|eval )"
                assert re.match(known, line), (page.name, line)


def test_documentation_has_programs_and_commands() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    assert sum(block.language in RUN for block in every) >= 25
    assert sum(len(commands(block.text)) for block in every) >= 50


def test_pages_link_to_existing_files_and_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 200
    generated = {"settings.md", "cli.md", "api.md", "metrics.md", "first_run.md"}
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        text = re.sub(
            r"https://(github.com/areal-jax/areal_jax/blob|raw.githubusercontent.com/areal-jax/areal_jax)"
            "/main/",
            f"{ROOT}/",
            text,
        )
        for target in re.findall(r"\]\(([^)#]+)", text):
            exists = (page.parent / target).exists() or Path(target).name in generated
            assert "://" in target or exists, (page.name, target)


def of_runnable_pages() -> list[object]:
    return [
        pytest.param(
            page, id=name_of(page), marks=[] if name_of(page) in FAST else pytest.mark.slow
        )
        for page in PAGES
        if any(block.language in RUN for block in blocks(page))
    ]


@pytest.fixture(scope="module")
def console_scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the commands, run by this interpreter."""
    folder = tmp_path_factory.mktemp("bin")
    for name in COMMANDS:
        script = folder / f"areal-{name}"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m areal_jax.{name} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", of_runnable_pages())
def test_page_runs_from_top_to_bottom(
    page: Path, console_scripts: Path, of_a_command: dict[str, str], tmp_path: Path
) -> None:
    env = of_a_command | {"PATH": f"{console_scripts}:{of_a_command['PATH']}"}
    programs = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}
    for block in blocks(page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.language in RUN:
            done = subprocess.run(
                [*programs[block.language], block.text],
                env=env,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            assert done.returncode == 0, block.text + done.stdout[-2000:] + done.stderr[-4000:]


def test_settings_of_pages_exist() -> None:
    kinds = (Experiment, SFTExperiment, PreferenceExperiment, ServeConfig, TinkerConfig)
    known = {setting.key for kind in kinds for setting, _ in reachable(settings(kind))}
    known |= {key for kind in kinds for key in groups(kind)}
    first = {key.partition(".")[0] for key in known if "." in key}
    found = 0
    for page in PAGES:
        # The columns of other trainers have names of theirs.
        text = re.sub(r"^\|([^|\n]*)\|.*", r"\1", page.read_text(), flags=re.M)
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`", text):
            is_file = key.endswith((".py", ".md", ".json", ".jsonl", ".html"))
            if key.partition(".")[0] in first and not is_file:
                assert key in known, f"{name_of(page)}: {key}"
                found += 1
    assert found >= 60


def test_every_preset_is_documented() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    assert {name for name in PRESETS if f"`{name}`" not in text} == set()
