"""One process on this machine: what must stand in the environment before jax is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from areal_jax.parallel.config import PlacementConfig

COMPILED_BYTES = 2 * 2**30
"""Compiled programs kept between runs; the least recently used go first."""

_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def prepare(placement: PlacementConfig) -> None:
    """Set the process's environment for the placement; call it before anything imports jax.

    Raises RuntimeError where jax is already imported and was not started with the flags that this
    placement needs."""
    if "jax" in sys.modules:
        if missing := {
            name: value
            for name, value in _flags(placement, os.environ).items()
            if os.environ.get(name) != value
        }:
            wanted = " ".join(f"{name}={value!r}" for name, value in missing.items())
            raise RuntimeError(
                "jax is already imported, and "
                f"placement.simulated_devices={placement.simulated_devices} needs {wanted} "
                "before that; start the process with it, or prepare before importing jax"
            )
        return
    os.environ.update(environment(placement, os.environ))


def clear_simulated_devices() -> None:
    """Undo what `prepare` set for simulated devices where this process was started, which has
    others of its own."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT not in flags:
        return
    os.environ["XLA_FLAGS"] = " ".join(re.sub(rf"{_DEVICE_COUNT}=\d+", "", flags).split())
    for name in ("NPROC", "JAX_PLATFORMS"):
        os.environ.pop(name, None)


def environment(placement: PlacementConfig, current: Mapping[str, str]) -> dict[str, str]:
    """Variables to set, given the current ones. What is already chosen there stays, but for the
    number of threads that simulated devices cannot do without."""
    cache_folder = (
        Path(current.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal_jax" / "compiled"
    )
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(cache_folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(COMPILED_BYTES),
        # jax keeps only what took a second; the programs of a small policy take less, and are many.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        # Silences XLA's start-up notes; errors still show.
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # The tokenizer's own threads warn, and stop working, once this process starts another.
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {name: value for name, value in defaults.items() if name not in current} | _flags(
        placement, current
    )


def _flags(placement: PlacementConfig, current: Mapping[str, str]) -> dict[str, str]:
    """What simulated devices need, whether the placement asks for them or the environment already
    has them."""
    xla_flags = current.get("XLA_FLAGS", "")
    found = re.search(rf"{_DEVICE_COUNT}=(\d+)", xla_flags)
    num_devices = placement.simulated_devices or (int(found[1]) if found else None)
    if num_devices is None:
        return {}
    # XLA's collectives wait for each other: two programs at once on simulated devices deadlock when
    # the thread pool, which has NPROC threads, is smaller than both together.
    flags = {"NPROC": str(max(2 * num_devices, int(current.get("NPROC", 0))))}
    if placement.simulated_devices:
        flags["JAX_PLATFORMS"] = "cpu"
    if num_devices != (int(found[1]) if found else None):
        others = re.sub(rf"{_DEVICE_COUNT}=\d+", "", xla_flags).split()
        flags["XLA_FLAGS"] = " ".join([*others, f"{_DEVICE_COUNT}={num_devices}"])
    return flags
