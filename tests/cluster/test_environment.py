"""The environment that a placement needs before jax is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from areal_jax.cluster.environment import environment, prepare
from areal_jax.errors import ConfigError
from areal_jax.parallel.config import PlacementConfig

ROOT = Path(__file__).parent.parent.parent


def test_simulated_devices_get_their_flag_and_twice_as_many_threads() -> None:
    found = environment(PlacementConfig(simulated_devices=4), {"HOME": "/home/a"})
    assert found["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4"
    assert found["NPROC"] == "8"
    assert found["JAX_PLATFORMS"] == "cpu"


def test_real_devices_get_no_flags() -> None:
    assert (
        environment(PlacementConfig(), {})
        .keys()
        .isdisjoint({"XLA_FLAGS", "NPROC", "JAX_PLATFORMS"})
    )


def test_other_flags_stay_and_the_device_count_is_replaced() -> None:
    current = {
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=2 --xla_b=2",
        "NPROC": "3",
    }
    found = environment(PlacementConfig(simulated_devices=8), current)
    assert found["XLA_FLAGS"] == "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=8"
    assert found["NPROC"] == "16"
    assert (
        environment(PlacementConfig(simulated_devices=8), current | {"NPROC": "32"})["NPROC"]
        == "32"
    )


def test_devices_that_the_environment_simulates_get_threads_too() -> None:
    found = environment(
        PlacementConfig(), {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    )
    assert found["NPROC"] == "8"
    assert "XLA_FLAGS" not in found


def test_compilation_cache_is_in_the_user_cache_by_default() -> None:
    found = environment(PlacementConfig(), {"XDG_CACHE_HOME": "/cache"})
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/cache/areal_jax/compiled"
    assert int(found["JAX_COMPILATION_CACHE_MAX_SIZE"]) == 2 * 2**30
    assert "JAX_COMPILATION_CACHE_DIR" not in environment(
        PlacementConfig(), {"JAX_COMPILATION_CACHE_DIR": "/mine"}
    )


def test_prepare_refuses_when_jax_was_imported_with_other_flags() -> None:
    assert jax.__name__ in sys.modules
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=r"jax is already imported.*XLA_FLAGS=.*device_count=3"):
        prepare(PlacementConfig(simulated_devices=3))
    prepare(PlacementConfig(simulated_devices=8))  # as conftest set it
    assert dict(os.environ) == before


def test_jax_sees_the_simulated_devices() -> None:
    code = (
        "from areal_jax.cluster.environment import prepare\nfrom areal_jax.parallel.config import "
        "PlacementConfig\nprepare(PlacementConfig(simulated_devices=3))\nimport jax\n"
        "print(len(jax.devices()))"
    )
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, env=env
    )
    assert done.stdout == "3\n", done.stderr


ALLOCATES = """
import ctypes, os, re, sys
from areal_jax.cluster.environment import use_huge_pages
use_huge_pages()
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
address = malloc(ctypes.c_size_t(2**26))
for mapping in re.split(r"(?m)^(?=[0-9a-f]+-)", open("/proc/self/smaps").read())[1:]:
    first, last = (int(each, 16) for each in mapping.split()[0].split("-"))
    if first <= address < last:
        flags = re.search("VmFlags:(.*)", mapping)[1].split()
print(os.environ.get("GLIBC_TUNABLES"), "hg" in flags, *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("tunables", "expected"),
    [
        ("", "glibc.malloc.hugetlb=1 True"),
        ("glibc.malloc.perturb=0", "glibc.malloc.perturb=0:glibc.malloc.hugetlb=1 True"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0 False"),
    ],
)
def test_large_allocations_of_a_command_are_in_huge_pages_on_request(
    tunables: str, expected: str
) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not (setting.exists() and "[madvise]" in setting.read_text()):
        expected = f"{tunables} False"
    assert allocated(tunables, "-c", ALLOCATES, "a b", "--c=d") == f"{expected} a b --c=d"


def test_a_program_from_a_pipe_runs_on_as_it_is() -> None:
    """Started again, it would find the pipe empty, and end well without a word."""
    unchanged = "glibc.malloc.perturb=0"
    assert allocated(unchanged, "-", "a b", program=ALLOCATES) == f"{unchanged} False a b"


def allocated(tunables: str, *arguments: str, program: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": tunables},
        input=program,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()
