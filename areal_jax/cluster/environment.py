"""Environment variables that a process needs before jax is imported."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from areal_jax.errors import ConfigError
from areal_jax.parallel.config import GPU_MEMORY_SHARE, PlacementConfig

COMPILED_BYTES = 2 * 2**30
"""Maximum size of the cache of compiled programs, in bytes; eviction is LRU."""

NO_COMPILATION_CACHE = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
"""For a process that saves executables: XLA on CPU saves none that run from programs that it has
read from jax's own cache."""

COMPILE_ONLY = {
    "JAX_PLATFORMS": "cpu",
    # Else libtpu asks the metadata server of a TPU machine for its topology.
    "TPU_SKIP_MDS_QUERY": "1",
    # Several processes may compile at the same time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Compiled programs of devices that are not there cannot be read from it.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # Its notes on what a real machine has.
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Variables with which programs are compiled for devices that are not there."""

_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"

_NO_AUTOTUNING = "--xla_gpu_autotune_level=0"
"""Variants of products are timed on a GPU, which is not there."""

_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def use_huge_pages() -> None:
    """Run this command again in the same process, with memory in huge pages, where Linux gives them
    on request only.

    XLA on CPU allocates the temporary memory of a program whenever it runs: with pages of 4 KiB,
    page faults take up to a fifth of the time of a trainer step. glibc requests huge pages if a
    variable says so when a process starts. Call this first. A program that cannot be read again,
    from a pipe or a terminal, runs on as it is.
    """
    current = os.environ.get(_TUNABLES, "")
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    is_on_request = setting.exists() and "[madvise]" in setting.read_text()
    can_be_read_again = sys.argv[0] == "-c" or Path(sys.argv[0]).is_file()
    if is_on_request and can_be_read_again and "glibc.malloc.hugetlb" not in current:
        os.environ[_TUNABLES] = ":".join(filter(None, (current, _HUGE_PAGES)))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare(placement: PlacementConfig) -> None:
    """Set the environment of the process for a placement; call it before any import of jax.

    Raises:
        ConfigError: jax is imported already, without the flags that the placement needs.
    """
    is_imported = "jax" in sys.modules
    set_variables((_flags if is_imported else environment)(placement, os.environ), "jax")


def set_variables(variables: Mapping[str, str], library: str) -> None:
    """Set environment variables that a library reads when it is imported.

    Raises:
        ConfigError: the library is imported already, and they have other values.
    """
    missing = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    if missing and library in sys.modules:
        wanted = " ".join(f"{name}={value!r}" for name, value in missing.items())
        raise ConfigError(
            f"{library} is already imported, and the experiment needs {wanted} before that; start "
            f"the process with these environment variables, or import {library} later"
        )
    os.environ.update(missing)


def prepare_compile_only(topology: str) -> None:
    """Set the environment in which programs are compiled for devices that are not there.

    Raises:
        ConfigError: jax is imported already, without these variables.
    """
    variables, flags = dict(COMPILE_ONLY), os.environ.get("XLA_FLAGS", "").split()
    # libtpu refuses flags of GPUs.
    if not re.match(r"(\d+x)?v\d", topology) and _NO_AUTOTUNING not in flags:
        variables["XLA_FLAGS"] = " ".join([*flags, _NO_AUTOTUNING])
    set_variables(variables, "jax")


def clear_simulated_devices() -> None:
    """Remove flags for simulated devices that this process inherited from its parent."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT not in flags:
        return
    os.environ["XLA_FLAGS"] = " ".join(re.sub(rf"{_DEVICE_COUNT}=\d+", "", flags).split())
    for name in ("NPROC", "JAX_PLATFORMS"):
        os.environ.pop(name, None)


def environment(placement: PlacementConfig, current: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set, given the current ones.

    Existing values stay, except the number of threads that simulated devices need.
    """
    cache_folder = (
        Path(current.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal_jax" / "compiled"
    )
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(cache_folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(COMPILED_BYTES),
        # jax's default is 1 s; the many programs of a small policy compile faster.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        # Silences XLA's start-up notes; errors still show.
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_MEMORY_SHARE),
        # The tokenizer's threads warn and stop after this process forks.
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {name: value for name, value in defaults.items() if name not in current} | _flags(
        placement, current
    )


def _flags(placement: PlacementConfig, current: Mapping[str, str]) -> dict[str, str]:
    """Return the flags for simulated devices of the placement or of the environment."""
    xla_flags = current.get("XLA_FLAGS", "")
    found = re.search(rf"{_DEVICE_COUNT}=(\d+)", xla_flags)
    num_devices = placement.simulated_devices or (int(found[1]) if found else None)
    if num_devices is None:
        return {}
    # XLA's collectives wait for each other: two concurrent programs on simulated devices
    # deadlock if the thread pool has fewer threads (NPROC) than both together.
    flags = {"NPROC": str(max(2 * num_devices, int(current.get("NPROC", 0))))}
    if placement.simulated_devices:
        flags["JAX_PLATFORMS"] = "cpu"
    if num_devices != (int(found[1]) if found else None):
        others = re.sub(rf"{_DEVICE_COUNT}=\d+", "", xla_flags).split()
        flags["XLA_FLAGS"] = " ".join([*others, f"{_DEVICE_COUNT}={num_devices}"])
    return flags
