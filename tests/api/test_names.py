"""The public names: without jax, and functions that share their names with submodules."""

from __future__ import annotations

import subprocess
import sys

import pytest

import areal_jax

ORDERS = [
    "import areal_jax",
    "import areal_jax.train",
    "from areal_jax.train import main",
    "import areal_jax; areal_jax.train; import areal_jax.train",
    "import areal_jax.cli.train",
    "from areal_jax import train",
]


@pytest.mark.parametrize("order", ORDERS)
def test_train_is_callable_after_imports_in_any_order(order: str) -> None:
    code = f"""
{order}
import sys, inspect, areal_jax
from areal_jax.errors import ConfigError
assert list(inspect.signature(areal_jax.train).parameters) == [
    "experiment", "run_folder", "resume", "callbacks"
]
assert callable(areal_jax.train.main)  # the module, too
try:
    areal_jax.train()
except ConfigError as error:
    assert "expected an experiment" in str(error)
else:
    raise AssertionError
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("import areal_jax.serve", "model"),
        ("import areal_jax.serve.app", "model"),
        ("import areal_jax.serve.__main__", "model"),
        ("import areal_jax.evaluate", "experiment"),
        ("import areal_jax.cli.evaluate", "experiment"),
    ],
)
def test_functions_that_share_names_with_modules_are_callable(order: str, first: str) -> None:
    name = "serve" if "serve" in order else "evaluate"
    code = f"""
{order}
import inspect, areal_jax
assert next(iter(inspect.signature(areal_jax.{name}).parameters)) == "{first}"
from areal_jax import {name}
assert {name} is areal_jax.{name} and callable({name})
import areal_jax.serve.app
assert areal_jax.serve.app.App
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_all_public_names_resolve() -> None:
    assert {name for name in areal_jax.__all__ if getattr(areal_jax, name) is None} == set()
    assert set(areal_jax.__all__) <= set(dir(areal_jax))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        areal_jax.trian  # noqa: B018 # the access is what is tested
