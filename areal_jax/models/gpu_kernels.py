"""What the kernels for GPUs share: how Triton compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

MIN_TILE = 16
"""Fewest rows, inputs or outputs of a product in tensor cores."""


def call_kernel(
    kernel: Callable[..., None], *, num_warps: int, num_stages: int, interpret: bool, **spec: Any
) -> Callable[..., Any]:
    """Make a call of a kernel that may have a gradient; `spec` is that of `pallas_call`."""
    # jax drops an unused call of `jit`, as that of rematerialization is, but none of `pallas_call`.
    return jax.jit(
        pl.pallas_call(
            kernel,
            compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
            interpret=interpret,
            **spec,
        )
    )
