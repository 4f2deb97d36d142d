"""Shapes: few programs, no silent compilation, nothing cut off."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import CONFIG, POLICY, engine, laid_out

from areal_jax.engine import decode
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import SLOT, DecodeEngine, empty_slots


@pytest.mark.parametrize(
    ("most", "lengths"),
    [
        (1, [32]),
        (32, [32]),
        # 64 would save a third of 96 at most: not worth the compiling.
        (79, [32, 96]),
        (159, [32, 64, 160]),
        (2047, [32, 64, 128, 256, 512, 1024, 2048]),
        # To the next 2048: a sixteenth of what is next.
        (29_023, [32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 30_720]),
    ],
)
def test_lengths_double_up_to_the_longest_sequence(most: int, lengths: list[int]):
    assert decode._doublings(32, most) == lengths


def test_slot_records_survive_the_way_to_the_device_as_integers():
    slots = empty_slots(3)
    slots[1] = (5, 6, 7, 1, (2**32 - 1, 3), 8, 0.7, 9, 0.25, range(8))
    integers = jnp.asarray(decode._as_integers(slots))
    assert integers.shape == (3, SLOT.itemsize // 4)
    for name in SLOT.names or ():
        np.testing.assert_array_equal(decode._field(integers, name), slots[name])


def test_prefixes_hold_every_sequence_once_in_rows_long_enough():
    rng = np.random.default_rng(0)
    wide = DecodeEngine(POLICY, engine().mesh, EngineConfig(num_slots=8, max_prompt_tokens=40, max_new_tokens=60), jnp.float32)
    sequences = [rng.integers(0, 64, length).astype(np.int32) for length in (1, 32, 33, 64, 65, 99, *[20] * 11)]
    seen: list[int] = []
    shapes: list[tuple[int, int]] = []
    for prefix, members in wide.prefill(laid_out(wide, 0), sequences):
        _, rows, _, _, length = prefix.keys.shape
        assert len(members) <= rows
        assert all(len(sequences[i]) <= length for i in members)
        seen += members
        shapes.append((rows, length))
    assert sorted(seen) == list(range(17))
    # Lengths 32, 64, 128. 13 short ones go as 8 and 5; two as long as a prompt may be one by one; longer ones only by eights.
    assert shapes == [(8, 32), (8, 32), (1, 64), (1, 64), (8, 128)]


def test_a_program_for_other_shapes_is_an_error_and_not_a_compilation():
    other = engine(CONFIG.__class__(num_slots=4, max_prompt_tokens=12, max_new_tokens=20, steps_per_dispatch=4))
    with pytest.raises(TypeError, match="compiled"):
        engine().generate(laid_out(engine(), 0), other.init_state())
