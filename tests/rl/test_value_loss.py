"""The critic's objective."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from areal_jax.rl.token_losses import value_loss

VALUES = np.array([1.0, 2.0, 0.2, 3.0])
OLD = np.array([1.2, 1.0, 0.0, 2.9])
RETURNS = np.array([2.0, 3.0, -1.0, 0.0])
MASK = np.array([True, True, True, False])


def value_loss_of(
    values: Any, old: Any, returns: Any, mask: Any, clip_eps: float | None = 0.5
) -> jax.Array:
    return value_loss(values, old, returns, mask, clip_eps=clip_eps).loss


def textbook(
    values: np.ndarray,
    old: np.ndarray,
    returns: np.ndarray,
    mask: np.ndarray,
    clip_eps: float | None,
) -> float:
    """The formula token by token, in float64."""
    total = 0.0
    for v, o, r in zip(
        values[mask].astype(float),
        old[mask].astype(float),
        returns[mask].astype(float),
        strict=True,
    ):
        loss = (v - r) ** 2
        if clip_eps is not None:
            loss = max(loss, (min(max(v, o - clip_eps), o + clip_eps) - r) ** 2)
        total += 0.5 * loss
    return total / max(mask.sum(), 1)


def test_value_loss_equals_hand_computed_number() -> None:
    # 1 -> 2: within .5 of the old value, 1. 2 -> 3: held at 1.5, 1.5² = 2.25. .2 -> -1: 1.44. (1 +
    # 2.25 + 1.44) / 2 / 3.
    loss, metrics = value_loss(VALUES, OLD, RETURNS, MASK, clip_eps=0.5)
    assert float(loss) == pytest.approx(4.69 / 6)
    assert [float(x) for x in metrics["loss"]] == pytest.approx([4.69 / 2, 3.0])
    assert [float(x) for x in metrics["clip_fraction"]] == [1.0, 3.0]
    # Without a clip 2 -> 3 is 1.
    assert float(value_loss(VALUES, OLD, RETURNS, MASK, clip_eps=None).loss) == pytest.approx(
        3.44 / 6
    )
    # A micro-batch divides by its mini-batch's tokens.
    assert float(value_loss(VALUES, OLD, RETURNS, MASK, num_tokens=10.0).loss) == pytest.approx(
        4.69 / 20
    )


def test_value_beyond_the_clip_range_gets_no_gradient() -> None:
    gradient = jax.grad(value_loss_of)(VALUES, OLD, RETURNS, MASK)
    np.testing.assert_allclose(gradient, [-1 / 3, 0.0, 1.2 / 3, 0.0], atol=1e-6)
    # On the other side of the old value it does: 2 -> 0 from 1, (2 - 0) / 3.
    gradient = jax.grad(value_loss_of)(VALUES, OLD, np.zeros(4), MASK)
    assert float(gradient[1]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("clip_eps", [0.5, 0.1, None])
def test_value_loss_equals_float64_and_finite_differences(
    clip_eps: float | None,
) -> None:
    rng = np.random.default_rng(0)
    of = jax.jit(jax.value_and_grad(partial(value_loss_of, clip_eps=clip_eps)))
    for i in range(1000):
        values, old, returns = rng.normal(size=(3, 12)).astype(np.float32)
        mask = rng.random(12) < 0.7
        loss, gradient = of(values, old, returns, mask)
        assert float(loss) == pytest.approx(
            textbook(values, old, returns, mask, clip_eps), rel=1e-6, abs=1e-6
        )
        if i < 20:
            step = 1e-5
            nudged = [
                values.astype(float) + step * np.eye(12)[t] * sign
                for t in range(12)
                for sign in (1, -1)
            ]
            ends = np.array([textbook(at, old, returns, mask, clip_eps) for at in nudged]).reshape(
                12, 2
            )
            np.testing.assert_allclose(gradient, (ends[:, 0] - ends[:, 1]) / (2 * step), atol=2e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_values_outside_the_mask_change_nothing(poison: float) -> None:
    inputs = [np.where(MASK, x, poison) for x in (VALUES, OLD, RETURNS)]
    loss, gradient = jax.value_and_grad(partial(value_loss_of, mask=MASK))(*inputs)
    assert float(loss) == pytest.approx(4.69 / 6)
    assert float(gradient[3]) == 0.0 and np.isfinite(gradient).all()


def test_only_new_values_get_a_gradient() -> None:
    _, old, returns = jax.grad(partial(value_loss_of, mask=MASK), argnums=(0, 1, 2))(
        VALUES, OLD, RETURNS
    )
    assert not old.any() and not returns.any()
