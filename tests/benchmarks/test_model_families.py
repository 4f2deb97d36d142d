"""The table of families in README and docs, against the registered families and stored rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from model_families import HEADER, TEXT, settings, table

from areal_jax.models import lora
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.models.traits import TRAITS

ROOT = Path(__file__).parents[2]


def lines_of(page: str) -> list[str]:
    """Lines of the table in a page."""
    lines = (ROOT / page).read_text().splitlines()
    first = lines.index(HEADER[0])
    return [line for line in lines[first:][: lines[first:].index("")]]


def test_pages_have_the_table_of_all_families() -> None:
    found = lines_of("docs/models.md")
    assert found == table()
    assert [re.findall(r"`(\w+)`", line)[0] for line in found[2:]] == list(TRAITS)
    assert lines_of("README.md") == table(is_short=True)


@pytest.mark.slow
def test_adapters_are_of_the_matrices_that_the_table_names() -> None:
    cells = {line.split(" | ")[0].strip("|` "): line.split(" | ")[3] for line in table()[2:]}
    for name in TEXT:
        policy = Policy(ModelConfig.from_hf(settings()[name], name))
        found = lora.find_targets(policy)
        assert ("gate_proj" in found) == ("MLP" in cells[name])
        assert ("experts.gate_proj" in found) == ("experts" in cells[name])
