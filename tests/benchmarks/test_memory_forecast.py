"""The peak of a program that does not fit is read from the compiler's message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import memory_forecast
import pytest


def learner_whose_compiler_says(message: str) -> Any:
    def compiled(name: str) -> None:
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

    return SimpleNamespace(programs=SimpleNamespace(compiled=compiled))


@pytest.mark.parametrize(
    "message",
    [
        # With jax 0.10.2 and 0.12.0. "Temporaries" count arguments: 8 GiB of these and 32 GiB of
        # temporary arrays at a time made 40 GiB, on v5e:2x2 with both.
        "Ran out of memory on HBM, the total memory required for HLO temporaries (40.50G) exceeds "
        "available HBM (15.75G).",
        "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (40.50G) exceeds available HBM (15.75G). HLO module: jit_f.",
        "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 40.50G of "
        "15.75G hbm. Exceeded hbm capacity by 24.75G.",
    ],
)
def test_peak_is_read_from_out_of_memory_messages(message: str) -> None:
    learner = learner_whose_compiler_says(message)
    assert memory_forecast.peak_of(learner, "accumulate") == 81 * 2**29  # 40.5 GiB


def test_other_errors_are_raised() -> None:
    message = "Allocation (size=268435456) would exceed memory (size=134217728), space=vmem"
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        memory_forecast.peak_of(learner_whose_compiler_says(message), "accumulate")
