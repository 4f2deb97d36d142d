"""Off-policy metrics against float64 numpy, and their sums over micro-batches."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from areal_jax.rl.off_policy import (
    OffPolicyCounts,
    describe_off_policy,
    off_policy_counts,
    sequence_ess,
)

compiled_counts = jax.jit(off_policy_counts)
compiled_ess = jax.jit(sequence_ess)


def drawn(seed: int, rows: int, spread: float) -> tuple[np.ndarray, ...]:
    """Log-weights, mask, age and segment ids of rows with three sequences and padding."""
    rng = np.random.default_rng(seed)
    segments = np.repeat([[1, 2, 3, 0]], [20, 30, 10, 4], axis=1).repeat(rows, axis=0)
    mask = (rng.random(segments.shape) < 0.7) & (segments > 0)
    age = rng.integers(0, 40, segments.shape)
    log_weight = rng.normal(0.0, spread, segments.shape)
    log_weight[~mask] = np.nan
    return log_weight, mask, age, segments


def counts(*columns: np.ndarray) -> OffPolicyCounts:
    log_weight, mask, age, segments = columns
    return compiled_counts(
        log_weight.astype(np.float32), mask, age.astype(np.int32), segments.astype(np.int32)
    )


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0])
def test_metrics_equal_numpy_over_all_tokens(spread: float) -> None:
    log_weight, mask, age, segments = drawn(0, 8, spread)
    metrics = describe_off_policy(counts(log_weight, mask, age, segments))
    tokens = log_weight[mask]
    assert metrics["log_ratio_rms"] == pytest.approx(np.sqrt((tokens**2).mean()), rel=1e-5)
    for percentile in (5, 50, 95, 99):
        exact = np.log(np.percentile(np.exp(tokens), percentile, method="inverted_cdf"))
        # Half a bin, asinh(20 / 1e-3) / 127 / 2, of |x| (or of 1e-3 near 0).
        found = np.log(metrics[f"behave_weight_p{percentile}"])
        assert found == pytest.approx(exact, rel=0.043, abs=4.3e-5)
    products = np.array(
        [
            np.exp(np.where(mask, log_weight, 0.0)[row][segments[row] == segment].sum())
            for row in range(8)
            for segment in (1, 2, 3)
            if mask[row][segments[row] == segment].any()
        ]
    )
    exact = products.sum() ** 2 / (len(products) * (products**2).sum())
    assert metrics["sequence_ess"] == pytest.approx(exact, rel=1e-4)


def test_ages_are_measured_apart() -> None:
    log_weight, mask, age, segments = drawn(1, 8, 0.1)
    log_weight = np.where(age > 16, log_weight * 10, log_weight)
    metrics = describe_off_policy(counts(log_weight, mask, age, segments))
    for name, low, high in (
        ("0", 0, 0),
        ("3_to_4", 3, 4),
        ("9_to_16", 9, 16),
        ("above_16", 17, 99),
    ):
        tokens = log_weight[mask & (age >= low) & (age <= high)]
        rms = np.sqrt((tokens**2).mean())
        assert metrics[f"log_ratio_rms/age_{name}"] == pytest.approx(rms, rel=1e-5)
    assert metrics["behave_weight_p99/age_above_16"] > 2 * metrics["behave_weight_p99/age_0"]


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    columns = drawn(2, 8, 0.3)
    parts = [
        jax.device_get(counts(*(column[start : start + 4] for column in columns)))
        for start in (0, 4)
    ]
    together = describe_off_policy(jax.tree.map(lambda *each: sum(each), *parts))
    assert together == pytest.approx(describe_off_policy(counts(*columns)), rel=1e-6)


def test_equal_policies_have_weight_one_and_full_ess() -> None:
    log_weight, mask, age, segments = drawn(3, 2, 0.0)
    metrics = describe_off_policy(counts(log_weight, mask, age, segments))
    assert metrics["sequence_ess"] == 1.0
    assert metrics["behave_weight_p5"] == metrics["behave_weight_p99"] == 1.0
    assert metrics["log_ratio_rms"] == 0.0


def test_one_sequence_that_outweighs_all_others_leaves_an_ess_of_one() -> None:
    log_weight, mask, age, segments = drawn(4, 4, 0.0)
    mask[0, 0], log_weight[0, 0] = True, 10.0
    metrics = describe_off_policy(counts(log_weight, mask, age, segments))
    # W = e^10 once and 1 eleven times: (ΣW)² / (12 ΣW²) = 1/12 up to 22 e^-10.
    assert metrics["sequence_ess"] == pytest.approx(1 / 12, rel=2e-3)


def test_sequence_ess_and_step_size_equal_vcpos_numbers() -> None:
    log_weight = np.log([[1.0], [2.0], [0.5], [0.1]])
    ones = np.ones_like(log_weight, np.int32)
    share = float(compiled_ess(counts(log_weight, ones > 0, ones, ones)))
    assert (share, share**0.5) == pytest.approx((0.61597, 0.784837), rel=1e-5)


def test_a_batch_without_loss_tokens_has_no_metrics() -> None:
    log_weight, mask, age, segments = drawn(5, 2, 0.1)
    assert float(compiled_ess(counts(log_weight, np.zeros_like(mask), age, segments))) == 1.0
    assert describe_off_policy(counts(log_weight, np.zeros_like(mask), age, segments)) == {}
