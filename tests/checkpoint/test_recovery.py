"""The rollout state is encoded bit-exactly, and values that cannot be are refused."""

import json
import math
import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.checkpoint.recovery import (
    COMPLETION_COLUMNS,
    SAMPLE_COLUMNS,
    Columns,
    decode,
    deserialize,
    encode,
    serialize,
)
from areal_jax.records import Completion, Group, Message, RolloutState, Sample, SuspendedGroup, Task

any_text = st.text(st.characters(), max_size=6)  # including surrogates and control characters
counts = st.dictionaries(any_text, st.integers(), max_size=3)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=5,
)
lengths = st.lists(st.integers(0, 4), max_size=3)


def any_bits(rng, columns, length):
    """Make arrays of random bits, including nan, infinity, -0.0 and denormals."""
    bits = {name: rng.integers(-(2**31), 2**31, length).astype(np.int32) for name in columns}
    return {
        name: bits[name] < 0 if dtype == np.bool_ else bits[name].view(dtype)
        for name, dtype in columns.items()
    }


def any_experts(rng, length):
    """Make recorded experts of a policy with two layers, or none."""
    return rng.integers(0, 256, (length, 2, 3)).astype(np.uint8) if rng.integers(2) else None


def plain(value):
    """Convert records to nested tuples with the bytes of arrays and floats, so that == is exact."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [plain(getattr(value, field.name)) for field in fields(value)]
    return value


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.lists(lengths, max_size=3),
    calls=st.lists(st.dictionaries(any_text, lengths, max_size=3), max_size=3),
    rewards=st.lists(st.floats(), min_size=1),
    text=any_text,
    counts=counts,
    notes=st.dictionaries(any_text, json_values, max_size=3),
)
def test_decode_inverts_encode_bit_exactly(seed, groups, calls, rewards, text, counts, notes):
    rng = np.random.default_rng(seed)
    task = Task(text, (Message("user", text), Message(text, "")), text, text, text)

    def sample(number, length):
        grade, stop_reason = ("correct", "stop") if number % 2 else ("timeout", "length")
        reward = rewards[number % len(rewards)]
        return Sample(
            **any_bits(rng, SAMPLE_COLUMNS, length),
            reward=reward,
            grade=grade,
            stop_reason=stop_reason,
            experts=any_experts(rng, length),
            token_rewards=any_bits(rng, {"it": np.float32}, length)["it"]
            if rng.integers(2)
            else None,
            components={"format": abs(reward), "": 0.1} if math.isfinite(reward) else {},
        )

    def completion(length):
        return Completion(
            **any_bits(rng, COMPLETION_COLUMNS, length),
            stop_reason="suspended" if length % 2 else "stop",
            # Of the prompt too.
            experts=any_experts(rng, length + 3),
        )

    state = RolloutState(
        tasks=counts,
        next_group_id=seed,
        rejected=counts,
        buffered=tuple(
            Group(seed + i, task, tuple(sample(k, length) for k, length in enumerate(lengths)))
            for i, lengths in enumerate(groups)
        ),
        suspended=tuple(
            SuspendedGroup(
                i, task, {call: tuple(map(completion, lengths)) for call, lengths in record.items()}
            )
            for i, record in enumerate(calls)
        ),
        staleness_limit=seed if counts else None,
    )
    decoded_state, decoded_notes = decode(deserialize(serialize(encode(state, notes))))
    assert plain(decoded_state) == plain(state)
    assert plain(decoded_notes) == plain(notes)


def a_sample(length=2, **changes):
    arrays = {name: np.ones(length, dtype) for name, dtype in SAMPLE_COLUMNS.items()}
    return Sample(**{**arrays, "reward": 1.0, "grade": "correct", "stop_reason": "stop", **changes})


def a_state(*samples):
    return RolloutState({}, 1, {}, (Group(0, Task("t", (), "1"), samples),), ())


def test_every_record_field_is_encoded():
    assert {field.name for field in fields(Sample)} == {
        *SAMPLE_COLUMNS,
        "reward",
        "grade",
        "stop_reason",
        "experts",
        "components",
        "token_rewards",
    }
    # Top logprobs are for API clients; training does not need them.
    assert {field.name for field in fields(Completion)} == {
        *COMPLETION_COLUMNS,
        "stop_reason",
        "top_logprobs",
        "experts",
    }
    assert {field.name for field in fields(Group)} == {"id", "task", "samples"}
    assert {field.name for field in fields(SuspendedGroup)} == {"id", "task", "calls"}


def test_unknown_record_fields_are_ignored():
    state = replace(a_state(a_sample()), suspended=(SuspendedGroup(1, Task("s", (), "1")),))
    columns = encode(state)
    for entry in (*columns.facts["buffered"], *columns.facts["suspended"]):
        entry["started_version"] = 3
    assert plain(decode(columns)[0]) == plain(state)


def test_restored_arrays_are_writable_and_separate():
    (group,) = decode(deserialize(serialize(encode(a_state(a_sample(), a_sample())))))[0].buffered
    first, second = (sample.tokens for sample in group.samples)
    first[:] = 7
    assert second.tolist() == [1, 1]
    assert first.base is None


@pytest.mark.parametrize(
    ("notes", "place"),
    [
        ({"a": (1, 2)}, r"rollout.notes.a: .* \(1, 2\)"),
        ({"a": [0, float("nan")]}, r"rollout.notes.a\[1\]: .* nan"),
        ({"a": {1: 2}}, r"rollout.notes.a: .* the key 1"),
        ({"a": np.float32(1)}, r"rollout.notes.a: expected .* found np.float32"),
    ],
)
def test_notes_that_json_would_change_are_refused(notes, place):
    with pytest.raises(ValueError, match=place):
        encode(a_state(), notes)


def test_mismatched_arrays_are_refused():
    mismatched = a_sample()
    object.__setattr__(mismatched, "behave_logp", np.ones(3, np.float32))
    with pytest.raises(
        ValueError, match=r"sample 1: expected behave_logp to be float32\[2\], found float32\[3\]"
    ):
        encode(a_state(a_sample(), mismatched))
    with pytest.raises(
        ValueError, match="column x: expected numbers or truth values, found object"
    ):
        serialize(Columns({}, {"x": np.array([{}])}))


def test_columns_of_other_formats_are_refused():
    facts, arrays = encode(a_state())
    with pytest.raises(
        ValueError, match=r"format 2, found format 1; resume with areal_jax 0\.1, which reads it$"
    ):
        decode(Columns(facts | {"format": 1}, arrays))
    with pytest.raises(ValueError, match=r"found format 3; resume with the release that wrote it$"):
        decode(Columns(facts | {"format": 3}, arrays))


def test_truncated_bytes_are_refused():
    packed = serialize(encode(a_state(a_sample())))
    with pytest.raises(
        ValueError, match=f"expected {packed.size} bytes of rollout state, found {packed.size + 1}"
    ):
        deserialize(np.append(packed, np.uint8(0)))
    with pytest.raises(ValueError, match="buffer is smaller"):
        deserialize(packed[:-1])


def test_header_is_plain_ascii_json():
    packed = serialize(encode(a_state(a_sample()))).tobytes()
    length = int.from_bytes(packed[:8], "little")
    assert json.loads(packed[8 : 8 + length].decode("ascii"))["facts"]["next_group_id"] == 1
