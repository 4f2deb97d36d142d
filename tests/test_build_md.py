"""The documents agree with the code: BUILD.md's floors and steps, and the length of BUILD.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_layers import FLOORS

ROOT = Path(__file__).parents[1]
BUILD = (ROOT / "BUILD.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^\| (\d+) [^|]*\|[^|]*\| `(areal_jax/[\w/]+\.py)` \| `(\w+)` \|$", BUILD, re.M)


def test_build_md_shows_the_floors() -> None:
    lines = [f"{floor:>5} {' | '.join(rooms)}" for floor, rooms in enumerate(FLOORS)]
    assert "\n".join(reversed(lines)) in BUILD


def test_build_md_has_at_most_200_lines() -> None:
    assert len(BUILD.splitlines()) <= 200


def test_the_life_of_a_task_is_numbered_without_gaps() -> None:
    assert [int(number) for number, _, _ in STEPS] == list(range(1, 11))


@pytest.mark.parametrize(("file", "name"), [(file, name) for _, file, name in STEPS])
def test_each_step_of_a_task_names_an_existing_function(file: str, name: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^\s*(async )?(def|class) {name}\b", source, re.M)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", BUILD))))
def test_files_named_in_build_md_exist(path: str) -> None:
    assert (ROOT / path).is_file() or (ROOT / "areal_jax" / path).is_file()
