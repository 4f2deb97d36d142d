"""Encoding of the rollout state for checkpoints, bit-exact: no task is skipped or repeated.

Per-token arrays are concatenated into one column per field; everything else is JSON. There is no
pickle: reading a checkpoint runs no code.

Axes: N records, T tokens of all records, S bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from areal_jax.records import (
    Completion,
    Group,
    RolloutState,
    Sample,
    SuspendedGroup,
    task_from_json,
    task_to_json,
)

FORMAT = 2
"""Version of the encoding; increased with every incompatible change."""

SAMPLE_COLUMNS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "behave_logp": np.float32,
    "versions": np.int32,
}
COMPLETION_COLUMNS = {"tokens": np.int32, "logp": np.float32, "versions": np.int32}

Json = Any
"""None, bool, int, a finite float, str, or a list or dict of these."""


class Columns(NamedTuple):
    """Content of a checkpoint besides the train state."""

    facts: dict[str, Json]
    """Everything but arrays."""
    arrays: dict[str, np.ndarray]
    """Arrays by column name."""


def encode(state: RolloutState, notes: Mapping[str, Json] | None = None) -> Columns:
    """Encode a snapshot of the rollouts.

    Args:
        state: state of the rollout controller.
        notes: additional JSON values of the caller.

    Raises:
        ValueError: `decode` would return other values: an array has another dtype or length than
            its record requires, or JSON would change a note (a tuple, a nan, a key that is not a
            string).
    """
    samples = [sample for group in state.buffered for sample in group.samples]
    completions = [
        completion
        for record in state.suspended
        for call in record.calls.values()
        for completion in call
    ]
    facts: dict[str, Json] = {
        "format": FORMAT,
        "tasks": dict(state.tasks),
        "next_group_id": state.next_group_id,
        "rejected": dict(state.rejected),
        "buffered": [
            {
                "id": group.id,
                "task": task_to_json(group.task),
                "grades": [sample.grade for sample in group.samples],
                "stop_reasons": [sample.stop_reason for sample in group.samples],
                "components": [dict(sample.components) for sample in group.samples],
            }
            for group in state.buffered
        ],
        "suspended": [
            {
                "id": record.id,
                "task": task_to_json(record.task),
                "calls": {
                    name: [completion.stop_reason for completion in call]
                    for name, call in record.calls.items()
                },
            }
            for record in state.suspended
        ],
        "staleness_limit": state.staleness_limit,
        "notes": dict(notes or {}),
    }
    _require_json(facts, "rollout")
    arrays = {
        **_join("sample", samples, SAMPLE_COLUMNS),
        "sample.reward": np.array([sample.reward for sample in samples], np.float64),
        **_join("completion", completions, COMPLETION_COLUMNS),
        **_join_optional("sample", "experts", samples),
        **_join_optional("sample", "token_rewards", samples),
        **_join_optional("completion", "experts", completions),
    }
    return Columns(facts, arrays)


def decode(columns: Columns) -> tuple[RolloutState, dict[str, Json]]:
    """Decode rollout state and notes; the inverse of `encode`.

    Raises:
        ValueError: the columns have another format.
    """
    facts, arrays = columns
    if (found := facts.get("format")) != FORMAT:
        release = "areal_jax 0.1, which reads it" if found == 1 else "the release that wrote it"
        raise ValueError(
            f"expected rollout state of format {FORMAT}, found format {found!r}; resume with "
            f"{release}"
        )
    state = RolloutState(
        facts["tasks"],
        facts["next_group_id"],
        facts["rejected"],
        _decode_buffered(facts["buffered"], arrays),
        _decode_suspended(facts["suspended"], arrays),
        facts.get("staleness_limit"),
    )
    return state, facts["notes"]


def _decode_buffered(
    entries: Sequence[Json], arrays: Mapping[str, np.ndarray]
) -> tuple[Group, ...]:
    samples = _split("sample", arrays, SAMPLE_COLUMNS)
    rewards = iter(arrays["sample.reward"].tolist())
    experts = _split_optional("sample.experts", arrays)
    token_rewards = _split_optional("sample.token_rewards", arrays)
    return tuple(
        Group(
            id=entry["id"],
            task=task_from_json(entry["task"]),
            samples=tuple(
                Sample(
                    **next(samples),
                    reward=next(rewards),
                    grade=grade,
                    stop_reason=stop_reason,
                    experts=next(experts),
                    components=components,
                    token_rewards=next(token_rewards),
                )
                for grade, stop_reason, components in zip(
                    entry["grades"],
                    entry["stop_reasons"],
                    entry.get("components", [{}] * len(entry["grades"])),
                    strict=True,
                )
            ),
        )
        for entry in entries
    )


def _decode_suspended(
    entries: Sequence[Json], arrays: Mapping[str, np.ndarray]
) -> tuple[SuspendedGroup, ...]:
    completions = _split("completion", arrays, COMPLETION_COLUMNS)
    experts = _split_optional("completion.experts", arrays)
    return tuple(
        SuspendedGroup(
            id=entry["id"],
            task=task_from_json(entry["task"]),
            calls={
                call: tuple(
                    Completion(
                        **next(completions),
                        stop_reason=reason,
                        top_logprobs=None,
                        experts=next(experts),
                    )
                    for reason in stop_reasons
                )
                for call, stop_reasons in entry["calls"].items()
            },
        )
        for entry in entries
    )


def serialize(columns: Columns) -> UInt8[np.ndarray, "S"]:
    """Serialize columns: length of the header, header (JSON in ASCII), concatenated arrays."""
    for name, array in columns.arrays.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"column {name}: expected numbers or truth values, found {array.dtype}"
            )
    _require_json(columns.facts, "rollout")
    layout = [[name, array.dtype.str, list(array.shape)] for name, array in columns.arrays.items()]
    header = json.dumps({"facts": columns.facts, "layout": layout}, allow_nan=False).encode("ascii")
    body = [np.ascontiguousarray(array).tobytes() for array in columns.arrays.values()]
    return np.frombuffer(b"".join([struct.pack("<Q", len(header)), header, *body]), np.uint8)


def deserialize(packed: UInt8[np.ndarray, "S"]) -> Columns:
    """Deserialize columns; the inverse of `serialize`.

    Raises:
        ValueError: bytes are missing or left over.
    """
    data = packed.tobytes()
    (header_bytes,) = struct.unpack_from("<Q", data)
    offset = struct.calcsize("<Q") + header_bytes
    header = json.loads(data[offset - header_bytes : offset])
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape in header["layout"]:
        count = math.prod(shape)
        arrays[name] = np.frombuffer(data, dtype, count, offset).reshape(shape).copy()
        offset += arrays[name].nbytes
    if offset != len(data):
        raise ValueError(f"expected {offset} bytes of rollout state, found {len(data)}")
    return Columns(header["facts"], arrays)


def _join(
    name: str, records: Sequence[Sample] | Sequence[Completion], dtypes: Mapping[str, type]
) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {
        f"{name}.length": np.array([len(record.tokens) for record in records], np.int64)
    }
    for field, dtype in dtypes.items():
        arrays: list[np.ndarray] = [getattr(record, field) for record in records]
        for number, (array, record) in enumerate(zip(arrays, records, strict=True)):
            if array.dtype != dtype or array.shape != record.tokens.shape:
                expected = f"{np.dtype(dtype)}[{len(record.tokens)}]"
                raise ValueError(
                    f"{name} {number}: expected {field} to be {expected}, found "
                    f"{array.dtype}{list(array.shape)}"
                )
        columns[f"{name}.{field}"] = np.concatenate([np.empty(0, dtype), *arrays])
    return columns


def _split(name: str, arrays: Mapping[str, np.ndarray], dtypes: Mapping[str, type]):
    """Iterate over the fields of the records; the inverse of `_join`."""
    ends = np.cumsum(arrays[f"{name}.length"])[:-1]
    # Copies, so that one group does not keep the tokens of all groups in memory.
    pieces = {
        field: [piece.copy() for piece in np.split(arrays[f"{name}.{field}"], ends)]
        for field in dtypes
    }
    return (
        {field: pieces[field][i] for field in dtypes} for i in range(len(arrays[f"{name}.length"]))
    )


def _join_optional(
    name: str, field: str, records: Sequence[Sample] | Sequence[Completion]
) -> dict[str, np.ndarray]:
    """Encode a field, if any record has it; -1 is the length of none."""
    arrays: list[np.ndarray | None] = [getattr(record, field) for record in records]
    present = [array for array in arrays if array is not None]
    if not present:
        return {}
    lengths = [-1 if array is None else len(array) for array in arrays]
    return {
        f"{name}.{field}_length": np.array(lengths, np.int64),
        f"{name}.{field}": np.concatenate(present),
    }


def _split_optional(name: str, arrays: Mapping[str, np.ndarray]) -> Iterator[np.ndarray | None]:
    """Yield the field of every record; the inverse of `_join_optional`."""
    if name not in arrays:
        yield from itertools.repeat(None)
        return
    start, joined = 0, arrays[name]
    for length in arrays[f"{name}_length"].tolist():
        yield None if length < 0 else joined[start : start + length].copy()
        start += max(length, 0)


def _require_json(value: Json, path: str) -> None:
    """Raise ValueError if JSON would change the value; `path` names it in the error."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{path}: expected keys to be strings, found the key {key!r}")
            _require_json(item, f"{path}.{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _require_json(item, f"{path}[{number}]")
    elif type(value) not in (str, int, float, bool, type(None)) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise ValueError(
            f"{path}: expected None, bool, int, finite float, str, list or dict, found {value!r}"
        )
