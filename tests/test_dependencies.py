"""Requirements of the package, as pyproject.toml states them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize(
    "requirement",
    [
        *PROJECT["dependencies"],
        *(
            each
            for name in (
                *("ray", "gcs", "s3", "wandb", "trackio", "mlflow", "reasoning-gym", "textarena"),
                *("skyrl-gym", "openenv", "verifiers", "tinker", "docs", "repositories"),
            )
            for each in EXTRAS[name]
        ),
    ],
)
def test_every_dependency_has_a_floor_and_a_ceiling(requirement: str) -> None:
    name, versions = re.fullmatch(r"([\w.-]+)([^;]*)(;.*)?", requirement).groups()[:2]  # pyright: ignore[reportOptionalMemberAccess]
    assert "==" in versions or (">=" in versions and "<" in versions.replace("<=", "<")), (
        f"{name} is not bounded: {versions}"
    )


def test_flax_can_be_imported_with_jax_on_each_python() -> None:
    flax = [
        requirement for requirement in PROJECT["dependencies"] if requirement.startswith("flax")
    ]
    markers = [each[each.index("python_version") :] for each in flax]
    assert markers == ["python_version < '3.12'", "python_version >= '3.12'"]
    assert "flax>=0.12.12," in flax[1]


def test_each_accelerator_has_an_extra() -> None:
    assert {name: EXTRAS[name] for name in ("gpu", "cuda12", "tpu")} == {
        "gpu": ["jax[cuda13]"],
        "cuda12": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
    }
