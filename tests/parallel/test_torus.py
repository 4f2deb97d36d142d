"""Assignment of mesh axes to torus axes. Real topologies are tested in tests/compile_only."""

from __future__ import annotations

import math
import random

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.parallel.torus import arrange, assign_axes, divisors, order_devices


@given(st.integers(0, 2**32 - 1))
def test_every_mesh_of_a_torus_size_is_assigned(seed: int) -> None:
    rng = random.Random(seed)
    torus = [rng.choice((1, 2, 3, 4, 6, 8, 16)) for _ in range(3)]
    left, shape = math.prod(torus), list[int]()
    for _ in range(4):
        shape.append(rng.choice(divisors(left)))
        left //= shape[-1]
    shape.append(left)
    factors = assign_axes(shape, torus)
    assert [math.prod(of_mesh) for of_mesh in factors] == shape
    assert [math.prod(of_torus) for of_torus in zip(*factors, strict=True)] == torus


@pytest.mark.parametrize(
    ("shape", "torus", "expected"),
    [
        # Tensor takes a whole ring, and fsdp the others.
        ((1, 16, 4), (4, 4, 4), [(1, 1, 1), (4, 4, 1), (1, 1, 4)]),
        # No axis of the torus has 4 devices: tensor takes a square, not half a line.
        ((16, 4), (8, 8, 1), [(4, 4, 1), (2, 2, 1)]),
        # The case that jax.make_mesh refuses: an expert axis of 8 on 4x4x4.
        ((8, 8, 1), (4, 4, 4), [(4, 2, 1), (1, 2, 4), (1, 1, 1)]),
    ],
)
def test_last_axis_takes_the_nearest_links(
    shape: tuple[int, ...], torus: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    assert assign_axes(shape, torus) == expected


def test_devices_without_a_torus_keep_the_order_of_their_nodes() -> None:
    devices = jax.devices()
    assert order_devices(devices[::-1]) == devices
    assert arrange((2, 4), devices).tolist() == [devices[:4], devices[4:]]
