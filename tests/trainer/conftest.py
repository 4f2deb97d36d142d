"""Compiling takes longer than all else that these tests do."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Leave out most of XLA's optimizations, which change speed and memory and no result."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
