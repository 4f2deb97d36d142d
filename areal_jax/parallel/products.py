"""Products of narrow factors that are summed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def wide_einsum(
    subscripts: str,
    x: Float[Array, "..."],
    y: Float[Array, "..."],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "..."]:
    """Compute an einsum whose sums, and result, have a wider dtype than its factors.

    XLA on CPU has no such product of bfloat16 factors in every layout (`DotThunk`: BF16 x BF16 =
    F32), for instance not of the gradient of a tied head, which it transposes. There the factors
    are converted first, which is exact.

    Args:
        subscripts: as in `jnp.einsum`.
        x: first factor.
        y: second factor, of the same dtype.
        dtype: dtype of sums and result.
    """

    def default(x: Array, y: Array) -> Array:
        return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)

    def converted(x: Array, y: Array) -> Array:
        return default(x.astype(dtype), y.astype(dtype))

    if x.dtype == dtype:
        return default(x, y)
    return jax.lax.platform_dependent(x, y, cpu=converted, default=default)
