"""The table of metrics: complete, and without names that no code writes.

Every run of the test suite is held against it too (`run_metrics_are_documented` in
tests/conftest.py).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import areal_jax
from areal_jax.metrics import health, names, table
from areal_jax.metrics.table import TABLE, Entry, find_undocumented

PREFIXES = (
    "rollout",
    "trainer",
    "weights",
    "engine",
    "rewards",
    "evaluation",
    "trackers",
    "health",
)
PACKAGE = Path(areal_jax.__file__).parent


def literals() -> set[str]:
    """Texts and keywords in the package's code without the table; f-strings end in `*`."""
    found = set[str]()
    for path in PACKAGE.rglob("*.py"):
        if path == Path(table.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    found.add(text)
                case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
                    found.add(f"{text}*")
                case ast.keyword(arg=str(name)):
                    found.add(name)
    return found


@pytest.fixture(scope="module")
def written() -> set[str]:
    return literals()


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.name)
def test_documented_metric_is_written_by_the_code(entry: Entry, written: set[str]) -> None:
    room, _, name = entry.name.partition("/")
    if "*" in name:
        name = name.partition("*")[0] + "*"
    candidates = {name, f"{room}/{name}"}
    if room == "trainer":  # the trainer adds the prefix to the critic's metrics
        candidates.add(name.removeprefix("value_"))
    if name.startswith("seconds_"):  # one metric per phase of the step
        phase = name.removeprefix("seconds_")
        candidates.add("seconds_*" if phase in written else name)
    assert candidates & written or room == "health"


def test_names_have_a_prefix_and_are_snake_case() -> None:
    for entry in TABLE:
        room, _, name = entry.name.partition("/")
        assert room in PREFIXES
        assert re.fullmatch(r"[a-z0-9_@]+(/\*)*", name), entry.name
        assert entry.meaning


def test_names_are_unique() -> None:
    assert len({entry.name for entry in TABLE}) == len(TABLE)


def test_health_checks_read_documented_metrics_only() -> None:
    assert not find_undocumented(name for check in health.CHECKS for name in check.reads)


def test_named_metrics_are_documented() -> None:
    named = {value for name, value in vars(names).items() if name.isupper()}
    assert len(named) > 10
    assert not find_undocumented(named)


def test_undocumented_names_are_found() -> None:
    known = {"trainer/loss", "rollout/rejected/key_error", "evaluation/family/gcd"}
    unknown = {"trainer/", "trainer/loss2", "loss", "rollout/rejected/a/b"}
    assert find_undocumented(known | unknown) == unknown
