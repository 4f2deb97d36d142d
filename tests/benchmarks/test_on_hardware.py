"""Checks of a new machine: kernels against the formula, and stages that fail."""

from __future__ import annotations

import jax.numpy as jnp
import kernel_parity
import numpy as np
import on_hardware
import pytest


@pytest.mark.slow
def test_kernels_of_this_machine_agree_with_the_formula() -> None:
    dtype = jnp.dtype(jnp.float32)
    cases = [
        *kernel_parity.packed("cpu", dtype, 640),
        *kernel_parity.paged("cpu", dtype),
        *kernel_parity.logprobs(dtype),
    ]
    assert len(cases) == 20
    assert max(case.error for case in cases) < 1e-5


def test_errors_are_relative_to_the_largest_number() -> None:
    expected = {"a": np.array([1.0, -4.0]), "b": np.array([0.5])}
    found = {"a": np.array([1.0, -3.9]), "b": np.array([0.52])}
    assert kernel_parity.compare("", "", lambda: found, expected).error == pytest.approx(0.04)


def test_what_a_kernel_raises_is_its_result() -> None:
    def fail() -> None:
        raise ValueError("no such block")

    case = kernel_parity.compare("", "", fail, {})
    assert np.isnan(case.error) and case.raised == "ValueError: no such block"


@pytest.mark.slow
def test_stages_that_fail_or_hang_are_reported() -> None:
    failed = on_hardware.run(["-c", "print('reason'); raise SystemExit(3)"], 60)
    assert (failed["status"], failed["output"]) == (3, "reason\n")
    hung = on_hardware.run(["-uc", "print('begun'); import time; time.sleep(60)"], 15)
    assert (hung["status"], hung["output"]) == (None, "begun\n") and hung["seconds"] < 50
