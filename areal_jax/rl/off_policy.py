"""Distance between the policy that sampled a batch and the policy that trains on it.

A compiled program adds up counts (`off_policy_counts`), so that percentiles of all tokens of a step
cost no transfer of tokens to the host; `describe_off_policy` turns the sums into metrics.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

AGES = (
    (0, "age_0"),
    (1, "age_1"),
    (2, "age_2"),
    (4, "age_3_to_4"),
    (8, "age_5_to_8"),
    (16, "age_9_to_16"),
)
"""Upper bounds of token ages, in versions, and their names in metrics."""

OLDEST = "age_above_16"

PERCENTILES = {
    "behave_weight_p5": 0.05,
    "behave_weight_p50": 0.5,
    "behave_weight_p95": 0.95,
    "behave_weight_p99": 0.99,
}
"""Percentiles of proximal/behave by their metric."""

MAX_LOG_WEIGHT = 20.0
"""Log-weights are clipped to this range: a sequence's weight is a product over its tokens."""

_SCALE = 1e-3
_HALF = 127
_STEP = math.asinh(MAX_LOG_WEIGHT / _SCALE) / _HALF
_NUM_BINS = 2 * _HALF + 1
"""Bins of log-weights are equally wide in asinh(x / _SCALE): 8 % of x, or 8e-5 near 0."""


class OffPolicyCounts(NamedTuple):
    """Sums over tokens and sequences, which add up over micro-batches."""

    tokens: Any
    """Number of loss tokens by age (`AGES`, then older) and bin of log-weight; the last column is
    the sum of squared log-weights."""
    sequences: Any
    """Number of sequences, sum of their weights W, sum of W²."""


def off_policy_counts(
    log_weight: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    age: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> OffPolicyCounts:
    """Count importance weights by age, and the weights of whole sequences.

    Args:
        log_weight: log(proximal/behave) of every token.
        mask: true where the token counts.
        age: versions between the policy that sampled the token and the one before this step.
        segment_ids: sequence of each token in its row.
    """
    log_weight = jax.lax.stop_gradient(jnp.where(mask, log_weight.astype(jnp.float32), 0.0))
    bounds = jnp.array([bound for bound, _ in AGES])
    age_index = jnp.searchsorted(bounds, jnp.maximum(age, 0)).reshape(-1)
    bins = jnp.clip(jnp.round(jnp.arcsinh(log_weight / _SCALE) / _STEP), -_HALF, _HALF)
    place = age_index * _NUM_BINS + bins.astype(jnp.int32).reshape(-1) + _HALF
    num_ages = len(AGES) + 1
    counted = mask.astype(jnp.float32)
    counts = jax.ops.segment_sum(counted.reshape(-1), place, num_ages * _NUM_BINS)
    squares = jax.ops.segment_sum((log_weight**2).reshape(-1), age_index, num_ages)
    tokens = jnp.concatenate([counts.reshape(num_ages, _NUM_BINS), squares[:, None]], axis=1)

    def sum_row(values: Float[Array, "T"], segments: Int[Array, "T"]) -> Float[Array, "_"]:
        return jax.ops.segment_sum(values, segments, len(values) + 1)

    is_sequence = jax.vmap(sum_row)(counted, segment_ids) > 0.0
    log_product = jax.vmap(sum_row)(log_weight, segment_ids)
    product = jnp.exp(jnp.clip(log_product, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)) * is_sequence
    sequences = jnp.stack([is_sequence.sum(dtype=jnp.float32), product.sum(), (product**2).sum()])
    return OffPolicyCounts(tokens, sequences)


def sequence_ess(counts: OffPolicyCounts) -> Float[Array, ""]:
    """Return the effective sample size of the sequences' weights W as a share of their number n,
    (ΣW)² / (n ΣW²) (Kong, 1992); 1 without sequences.
    """
    num_sequences, total, total_of_squares = counts.sequences
    share = total**2 / jnp.where(num_sequences > 0, num_sequences * total_of_squares, 1.0)
    return jnp.where(num_sequences > 0, share, 1.0)


def describe_off_policy(counts: OffPolicyCounts) -> dict[str, float]:
    """Return metrics of the counts of a whole step; none where no token was counted.

    `log_ratio_rms` is the root mean square of log(proximal/behave), and `behave_weight_pN` the
    percentile N of proximal/behave; the first and the percentile 99 also by age. `sequence_ess` is
    the effective sample size of the sequences' weights W as a share of their number n, (ΣW)² / (n
    ΣW²) (Kong, 1992).
    """
    tokens = np.asarray(counts.tokens, np.float64)
    num_sequences, total, total_of_squares = np.asarray(counts.sequences, np.float64).tolist()
    if not num_sequences:
        return {}
    metrics = {name: _percentile(tokens.sum(axis=0), share) for name, share in PERCENTILES.items()}
    metrics["log_ratio_rms"] = _rms(tokens.sum(axis=0))
    metrics["sequence_ess"] = total**2 / (num_sequences * total_of_squares)
    for row, age in zip(tokens, [*(name for _, name in AGES), OLDEST], strict=True):
        if row[:-1].any():
            metrics[f"log_ratio_rms/{age}"] = _rms(row)
            metrics[f"behave_weight_p99/{age}"] = _percentile(row, 0.99)
    return metrics


def _rms(row: Float[np.ndarray, "_"]) -> float:
    """Return the root mean square of the log-weights in a row of `OffPolicyCounts.tokens`."""
    return math.sqrt(row[-1] / row[:-1].sum())


def _percentile(row: Float[np.ndarray, "_"], share: float) -> float:
    """Return the weight that this share of a row's tokens does not exceed."""
    cumulative = np.cumsum(row[:-1])
    found = int(np.searchsorted(cumulative, share * cumulative[-1] - 1e-6))
    return math.exp(_SCALE * math.sinh((found - _HALF) * _STEP))
