"""Shapes: few programs, no silent compilation, nothing cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import CONFIG, POLICY, Shelf, engine, laid_out, request, with_engine_loop

from areal_jax.engine.batch import SLOT, PrefillChunk, empty_slots
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_shapes import doublings, next_power_of_two
from areal_jax.engine.decode_state import encode_slots, read_field
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.records import Completion


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
    assert doublings(32, most) == lengths


@pytest.mark.parametrize(("size", "power"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32)])
def test_next_power_of_two_is_at_least_the_smallest(size: int, power: int):
    assert next_power_of_two(size, 8) == power


def test_slot_records_are_packed_exactly():
    slots = empty_slots(3)
    slots[1] = (
        5,
        6,
        7,
        1,
        (2**32 - 1, 3),
        8,
        0.7,
        9,
        0.25,
        0.1,
        0.5,
        -0.5,
        1.5,
        10,
        -3,
        11,
        range(8),
        12,
    )
    integers = jnp.asarray(encode_slots(slots))
    assert integers.shape == (3, SLOT.itemsize // 4)
    for name in SLOT.names or ():
        np.testing.assert_array_equal(read_field(integers, name), slots[name])


def test_every_sequence_is_prefilled_once_in_a_row_long_enough(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    wide = DecodeEngine(
        POLICY,
        engine().mesh,
        EngineConfig(num_slots=8, max_prompt_tokens=40, max_new_tokens=60),
        jnp.float32,
    )
    lengths = [1, 32, 33, 64, 65, 99, *[20] * 11]
    fills = [
        PrefillChunk(rng.integers(0, 64, length).astype(np.int32), 16 * (i == 2), [i])
        for i, length in enumerate(lengths)
    ]
    seen: list[int] = []
    shapes: list[tuple[str, int, int]] = []

    def program(verb: str, rows: int, length: int) -> Callable[..., Any]:
        def run(
            params: Any,
            kept: Any,
            tokens: np.ndarray,
            table: np.ndarray,
            starts: np.ndarray,
            counts: np.ndarray,
            slots: np.ndarray,
        ) -> Any:
            assert tokens.shape == (rows, length)
            for row in np.flatnonzero(counts).tolist():
                i = int(table[row, 0])
                assert tokens[row, : counts[row]].tolist() == fills[i].tokens.tolist()
                assert starts[row] == fills[i].start
                seen.append(i)
            shapes.append((verb, rows, length))
            return kept, None

        return run

    state = wide.init_state()
    monkeypatch.setattr(wide.programs, "get", program)
    wide.prefill(laid_out(wide, 0), state, fills)
    assert sorted(seen) == list(range(17))
    # Lengths 32, 64, 128. 13 short ones go as 8 and 5; one as long as a prompt may be goes alone;
    # longer ones only by eights. What goes on behind other tokens goes by eights too, in 32 or 128.
    prefills = [("prefill", 8, 32), ("prefill", 8, 32), ("prefill", 1, 64), ("prefill", 8, 128)]
    assert shapes == [*prefills[:2], ("extend", 8, 128), *prefills[2:]]


def test_program_call_with_other_shapes_is_an_error():
    other = engine(
        CONFIG.__class__(num_slots=4, max_prompt_tokens=12, max_new_tokens=20, steps_per_dispatch=4)
    )
    with pytest.raises(TypeError, match="compiled"):
        engine().generate(laid_out(engine(), 0), other.init_state())


def test_view_grows_through_all_lengths():
    long = engine(
        CONFIG.__class__(num_slots=2, max_prompt_tokens=600, max_new_tokens=8, steps_per_dispatch=4)
    )
    # 607 columns at most: views of 128, 256 and 640.
    state, lengths = long.init_state(), list[int]()
    for num_columns in (600, 10, 200):
        state = long.fit(state, num_columns)
        lengths.append(state.view[0][0].shape[3] - 4)
    assert lengths == [640, 128, 256]
    assert {key[1:] for key in long.programs.compiled if key[0] == "resize"} == {
        (128, 256),
        (256, 640),
        (640, 256),
        (256, 128),
    }


@pytest.mark.slow
def test_layers_one_by_one_prefill_and_score_as_in_a_scan():
    scanned = engine()
    assert not scanned.shapes.is_unrolled
    unrolled = DecodeEngine(POLICY, scanned.mesh, CONFIG, jnp.float32)
    unrolled.shapes.is_unrolled = True

    async def act(engine_loop: EngineLoop) -> list[Completion]:
        engine_loop.start()
        (completion,) = await engine_loop.submit(request(prompt=range(3, 14)))
        return [completion, await engine_loop.score(np.arange(3, 14, dtype=np.int32), 3)]

    expected, found = (
        with_engine_loop(each, Shelf(each, (0, 0, 1)), act) for each in (scanned, unrolled)
    )
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
