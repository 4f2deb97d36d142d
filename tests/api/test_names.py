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


def test_all_public_names_resolve() -> None:
    assert {name for name in areal_jax.__all__ if getattr(areal_jax, name) is None} == set()
    assert set(areal_jax.__all__) <= set(dir(areal_jax))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        areal_jax.trian  # noqa: B018 # the access is what is tested
