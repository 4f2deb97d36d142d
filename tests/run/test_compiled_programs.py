"""What XLA's errors say of memory. The messages are those of libtpu and XLA:GPU of jax 0.10.2."""

from __future__ import annotations

import jax
import pytest

from areal_jax.run.compiled_programs import exceeded_memory


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (93.20G) "
            "exceeds available HBM (15.75G).",
            "93.20G of 15.75G by XLA",
        ),
        (
            "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 34.94G "
            "of 31.25G hbm. Exceeded hbm capacity by 3.70G. Memory usage report: \n  reserved",
            "34.94G of 31.25G by XLA",
        ),
        (
            "Out of memory while trying to allocate 193.00GiB.",
            "193.00GiB in one array",
        ),
        ("Out of memory allocating 4294967296 bytes.", "4294967296 bytes in one array"),
    ],
)
def test_exceeded_device_memory_is_named(message: str, sizes: str) -> None:
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
    assert exceeded_memory(error) == sizes


@pytest.mark.parametrize(
    "message",
    [
        "Allocation (size=268435456) would exceed memory (size=134217728) :: #allocation2 [shape = "
        "'u8[268435456]{0}', space=vmem, size = 0x10000000, scoped, tag = 'input window'] :: f.1",
        "Ran out of memory in memory space vmem while allocating on stack for %fusion.1 = f32[8]. "
        "Scoped allocation with size 20.00M and limit 16.00M exceeded scoped vmem limit by 4.00M.",
        "Shared memory size limit exceeded: requested 983040, available: 166912, context: []",
    ],
)
def test_a_kernels_own_memory_is_no_device_memory(message: str) -> None:
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
    assert exceeded_memory(error) is None
