"""Protobuf messages of Tinker's wire: decoding, and what strangers may send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.errors import InvalidRequest
from areal_jax.tinker.messages import (
    _CLASSES,
    SampledTokens,
    forward_backward_output,
    parse_forward_backward,
    read_datums,
    sample_response,
    sample_to_json,
)

FLOAT, INT64, INT32 = 1, 2, 3


def body(**tensors: dict[str, Any]) -> bytes:
    """A request with one datum of three tokens, and these tensors as its inputs."""
    message = _CLASSES["ForwardBackwardRequest"](model_id="m", seq_id=4, loss_fn="ppo")
    message.loss_fn_config["clip_low_threshold"] = 0.7
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.75
    datum = message.data.add()
    for tokens in ([5, 6], [7]):
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    targets = {"dense": np.array([6, 7, 8]).tobytes(), "dtype": INT64, "shape": [3]}
    for name, fields in ({"target_tokens": targets} | tensors).items():
        datum.loss_fn_inputs[name].CopyFrom(_CLASSES["Tensor"](**fields))
    return message.SerializeToString()


def sparse(values: Any, crow: list[int], columns: list[int], shape: list[int]) -> dict[str, Any]:
    csr = _CLASSES["SparseCsr"](
        values=np.array(values, np.float32).tobytes(),
        crow_indices=np.array(crow, np.int64).tobytes(),
        col_indices=np.array(columns, np.int64).tobytes(),
    )
    return {"sparse_csr": csr, "dtype": FLOAT, "shape": shape}


def dense(values: Any, dtype: int = FLOAT, shape: tuple[int, ...] = (3,)) -> dict[str, Any]:
    kind = {FLOAT: np.float32, INT64: np.int64, INT32: np.int32}.get(dtype, np.float32)
    return {"dense": np.array(values, kind).tobytes(), "dtype": dtype, "shape": list(shape)}


def test_a_request_is_decoded() -> None:
    request = parse_forward_backward(
        body(advantages=dense([0.5, 1, 2]), logprobs=dense([0, 0, -1]))
    )
    (datum,) = read_datums(request, ("logprobs", "advantages"))
    # The newer form of the settings counts.
    assert request[:5] == ("m", 4, "ppo", {"clip_low_threshold": 0.75}, False)
    assert datum.tokens.tolist() == [5, 6, 7]
    assert datum.targets.tolist() == [6, 7, 8]
    assert datum.columns["advantages"].tolist() == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (sparse([2.0, 3.0], [0, 0, 1, 2], [0, 0], [3, 1]), [0.0, 2.0, 3.0]),
        (sparse([2.0, 3.0], [0, 2], [0, 2], [1, 3]), [2.0, 0.0, 3.0]),
        (dense([1, 2, 3], INT32, (3, 1)), [1.0, 2.0, 3.0]),
    ],
)
def test_sparse_and_column_tensors_are_decoded(
    tensor: dict[str, Any], expected: list[float]
) -> None:
    (datum,) = read_datums(parse_forward_backward(body(weights=tensor)), ("weights",))
    assert datum.columns["weights"].tolist() == expected


def test_weights_are_one_by_default() -> None:
    (datum,) = read_datums(parse_forward_backward(body()), ("weights",))
    assert datum.columns["weights"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "tensors",
    [
        {"weights": dense([1, 2])},
        {"weights": dense([1, 2, 3], dtype=4)},
        {"weights": {"dense": b"abc", "dtype": FLOAT, "shape": [3]}},
        {"weights": sparse([2.0], [0, 0, 0, 9], [0], [3, 1])},
        {"weights": sparse([2.0], [0, 1, 0, 1], [0], [3, 1])},
        {"weights": sparse([2.0], [0, 0, 1, 1], [5], [3, 1])},
        {"weights": sparse([2.0], [0, 1], [1 << 40], [1, 3])},
        {"weights": sparse([2.0], [0, 1], [1], [1, 1 << 40])},
        {"target_tokens": dense([1, 2, -3], INT64)},
        {"target_tokens": dense([1.0, 2.0, 3.0], FLOAT)},
        {"target_tokens": dense([1] * 6, INT64, (3, 2))},
    ],
)
def test_malformed_tensors_are_refused(tensors: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest):
        read_datums(parse_forward_backward(body(**tensors)), ("weights",))


VALID = body(weights=dense([1, 2, 3]))


@given(st.binary(max_size=80), st.integers(0, len(VALID)), st.integers(0, len(VALID)))
def test_other_bytes_are_decoded_or_refused(junk: bytes, start: int, end: int) -> None:
    for data in (junk, VALID[:start] + junk + VALID[max(start, end) :]):
        try:
            read_datums(parse_forward_backward(data), ("weights",))
        except InvalidRequest:
            continue


def test_outputs_are_cut_by_offsets_in_bytes() -> None:
    data = forward_backward_output(
        [np.array([-1, -2], np.float32), np.array([-3], np.float32)], {"loss:sum": 6.0}
    )
    message = _CLASSES["ForwardBackwardOutput"].FromString(data)
    (record,) = message.loss_fn_outputs
    tensor = record.fields["logprobs"]
    assert (record.num_datums, message.metrics["loss:sum"]) == (2, 6.0)
    assert np.frombuffer(tensor.offsets, np.int64).tolist() == [0, 8, 12]
    assert np.frombuffer(tensor.data, np.float32).tolist() == [-1.0, -2.0, -3.0]


def test_samples_carry_the_version_of_each_token() -> None:
    sequence = SampledTokens(
        "length",
        np.array([4, 5], np.int32),
        np.array([-0.5, -1], np.float32),
        np.array([2, 3], np.int32),
    )
    found = sample_to_json(sample_response([sequence], np.array([np.nan, -2], np.float32)))
    assert found["prompt_logprobs"] == [None, -2.0]
    assert found["sequences"] == [
        {"stop_reason": "length", "tokens": [4, 5], "logprobs": [-0.5, -1.0], "versions": [2, 3]}
    ]
