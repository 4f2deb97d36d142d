"""Every test sees eight simulated CPU devices, and a thread pool large enough that two meshes of them run at once."""

import os
from collections.abc import Iterator

import pytest

# Set before jax loads: simulated devices deadlock in XLA's collectives when the pool has fewer threads than they need.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["NPROC"] = "16"


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Leave out most of XLA's optimizations, which change speed and memory and no result: for tests that compile more than
    they compute."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
