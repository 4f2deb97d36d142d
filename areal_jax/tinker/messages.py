"""Protobuf messages of Tinker's wire, and their conversion to arrays and back.

The messages are declared here, in a descriptor pool of their own, so that the server needs the
protobuf library alone. Fields that the server does not read are left out; the library skips them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from jaxtyping import Float32, Int32, Shaped

from areal_jax.errors import InvalidRequest

_SCALARS = {
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}

_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "SparseCsr": {
        "values": (1, "bytes"),
        "crow_indices": (2, "bytes"),
        "col_indices": (3, "bytes"),
    },
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "SparseCsr"),
        "dtype": (3, "int32"),
        "shape": (4, "repeated int64"),
    },
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "OtherChunk": {},
    "Chunk": {
        "encoded_text": (1, "EncodedTextChunk"),
        "image": (2, "OtherChunk"),
        "dmel": (3, "OtherChunk"),
    },
    "Datum": {"model_input": (1, "repeated Chunk"), "loss_fn_inputs": (2, "map Tensor")},
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "repeated Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "BatchedTensor": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32")},
    "ArrayRecord": {
        "type_tag": (1, "string"),
        "fields": (2, "map BatchedTensor"),
        "num_datums": (3, "int64"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "repeated ArrayRecord"),
        "metrics": (3, "map double"),
    },
    # `versions` is an extension of this server, which the client skips.
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
        "versions": (1000, "bytes"),
    },
    "TopkLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "int32"),
        "length": (4, "int32"),
    },
    "SampleResponse": {
        "sequences": (1, "repeated SampledSequence"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
    },
}
"""Number and type of every field. Enumerations are declared as int32, which has the same wire."""

_DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
"""Types of tensors by number: float32, int64, int32."""

STOP_REASONS = ("stop", "length")
"""Stop reasons by number."""


def _declare() -> dict[str, type[Any]]:
    file = descriptor_pb2.FileDescriptorProto(
        name="areal_jax_tinker.proto", package="tinker_public", syntax="proto3"
    )
    one, many = (
        descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
    )

    def add(message: Any, name: str, number: int, kind: str, label: Any) -> None:
        field = message.field.add(name=name, number=number, label=label)
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
            field.type_name = f".tinker_public.{kind}"

    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            form, _, inner = kind.rpartition(" ")
            if form == "map":
                entry_name = f"{field_name.title().replace('_', '')}Entry"
                entry = message.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                add(entry, "key", 1, "string", one)
                add(entry, "value", 2, inner, one)
                inner = f"{name}.{entry_name}"
            add(message, field_name, number, inner, many if form else one)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tinker_public.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _declare()


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One sequence of a batch: N input tokens, and what the loss reads of each of N targets."""

    tokens: Int32[np.ndarray, "N"]
    targets: Int32[np.ndarray, "N"]
    columns: Mapping[str, Float32[np.ndarray, "N"]] = field(default_factory=dict)


class ForwardBackward(NamedTuple):
    """A request for outputs and gradients."""

    model_id: str
    seq_id: int
    loss: str
    loss_config: Mapping[str, float | str]
    forward_only: bool
    message: Any
    """Holds the datums, which `read_datums` decodes."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all datums."""
        chunks = (chunk for datum in self.message.data for chunk in datum.model_input)
        return sum(len(chunk.encoded_text.tokens) for chunk in chunks) // 4


class SampledTokens(NamedTuple):
    """One sampled sequence."""

    stop_reason: str
    tokens: Int32[np.ndarray, "T"]
    logp: Float32[np.ndarray, "T"]
    versions: Int32[np.ndarray, "T"]
    """Optimizer steps that made the weights of each token."""
    top: tuple[Int32[np.ndarray, "T K"], Float32[np.ndarray, "T K"]] | None = None


def parse_forward_backward(body: bytes) -> ForwardBackward:
    """Parse the body of forward_backward.

    Raises:
        InvalidRequest: it is no such message.
    """
    message = _CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest(
            f"expected a protobuf message ForwardBackwardRequest, found other bytes ({error})"
        ) from None
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text or value.number
    return ForwardBackward(
        message.model_id,
        message.seq_id,
        message.loss_fn,
        config,
        message.forward_only,
        message,
    )


def read_datums(request: ForwardBackward, names: Sequence[str]) -> list[Datum]:
    """Decode the datums of a request.

    Args:
        request: the request.
        names: columns that the loss requires beside target_tokens; `weights` may be absent.

    Raises:
        InvalidRequest: a tensor is missing, or has another shape or type.
    """
    return [_read_datum(i, datum, names) for i, datum in enumerate(request.message.data)]


def _read_datum(number: int, datum: Any, names: Sequence[str]) -> Datum:
    where, chunks = f"datum {number}", []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise InvalidRequest(f"{where}: expected chunks of encoded text, found another kind")
        chunks.append(_array(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}: tokens"))
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    if not len(tokens):
        raise InvalidRequest(f"{where}: expected at least one token, found none")
    inputs = datum.loss_fn_inputs
    if "target_tokens" not in inputs:
        raise InvalidRequest(f"{where}: expected loss_fn_inputs with target_tokens, found none")
    targets = _read_tensor(inputs["target_tokens"], f"{where}: target_tokens", len(tokens))
    columns = {}
    for name in names:
        if name in inputs:
            column = _read_tensor(inputs[name], f"{where}: {name}", len(tokens))
            columns[name] = column.astype(np.float32)
        elif name == "weights":
            columns[name] = np.ones(len(tokens), np.float32)
        else:
            raise InvalidRequest(f"{where}: expected loss_fn_inputs with {name}, found none")
    if not np.issubdtype(targets.dtype, np.integer):
        raise InvalidRequest(f"{where}: target_tokens: expected integers, found {targets.dtype}")
    if targets.size and not 0 <= targets.min() <= targets.max() < 1 << 31:
        raise InvalidRequest(f"{where}: target_tokens: expected token ids, found other numbers")
    return Datum(tokens.astype(np.int32), targets.astype(np.int32), columns)


def _read_tensor(tensor: Any, where: str, length: int) -> Shaped[np.ndarray, "N"]:
    """Decode a tensor [N] or [N, 1], dense or sparse.

    Raises:
        InvalidRequest: it is malformed, or has another shape.
    """
    dtype, shape = _DTYPES.get(tensor.dtype), list(tensor.shape)
    if dtype is None:
        raise InvalidRequest(
            f"{where}: expected float32, int64 or int32, found dtype {tensor.dtype}"
        )
    if tensor.HasField("sparse_csr"):
        if shape not in ([length], [length, 1], [1, length]):
            raise InvalidRequest(f"{where}: expected shape [{length}], found {shape}")
        return _read_sparse(tensor.sparse_csr, dtype, where, length, is_row=shape[0] == 1)
    values = _array(tensor.dense, dtype, where)
    if values.shape != (length,) or shape not in ([], [length], [length, 1]):
        raise InvalidRequest(
            f"{where}: expected {length} values, one for each token of model_input, found "
            f"{len(values)} of shape {shape}"
        )
    return values


def _read_sparse(
    sparse: Any, dtype: np.dtype[Any], where: str, length: int, *, is_row: bool
) -> Shaped[np.ndarray, "N"]:
    values = _array(sparse.values, dtype, where)
    ends = _array(sparse.crow_indices, np.dtype("<i8"), where)
    columns = _array(sparse.col_indices, np.dtype("<i8"), where)
    num_rows, num_columns = (1, length) if is_row else (length, 1)
    counts = np.diff(ends)
    if (
        len(ends) != num_rows + 1
        or ends[0] != 0
        or ends[-1] != len(values)
        or len(columns) != len(values)
        or (counts < 0).any()
        or (columns.size and not 0 <= columns.min() <= columns.max() < num_columns)
    ):
        raise InvalidRequest(
            f"{where}: expected a tensor in CSR layout, found inconsistent indices"
        )
    dense = np.zeros(length, dtype)
    dense[columns if is_row else np.repeat(np.arange(length), counts)] = values
    return dense


def _array(data: bytes, dtype: np.dtype[Any], where: str) -> Shaped[np.ndarray, "_"]:
    if len(data) % dtype.itemsize:
        raise InvalidRequest(
            f"{where}: expected a multiple of {dtype.itemsize} bytes, found {len(data)}"
        )
    return np.frombuffer(data, dtype)


def forward_backward_output(
    logprobs: Sequence[Float32[np.ndarray, "_"]], metrics: Mapping[str, float]
) -> bytes:
    """Encode the outputs of forward_backward: log-probs by datum, and metrics."""
    message = _CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    tensor = record.fields["logprobs"]
    tensor.dtype = 1
    tensor.data = b"".join(each.astype("<f4").tobytes() for each in logprobs)
    # Offsets in bytes.
    tensor.offsets = np.cumsum([0, *(4 * len(each) for each in logprobs)]).astype("<i8").tobytes()
    return message.SerializeToString()


def sample_response(
    sequences: Sequence[SampledTokens],
    prompt_logp: Float32[np.ndarray, "P"] | None = None,
    prompt_top: tuple[Int32[np.ndarray, "P K"], Float32[np.ndarray, "P K"]] | None = None,
) -> bytes:
    """Encode the result of a sampling request.

    Args:
        sequences: the samples.
        prompt_logp: log-prob of each token of the prompt, nan where there is none.
        prompt_top: most likely tokens at each place of the prompt, and their log-probs.
    """
    message = _CLASSES["SampleResponse"]()
    for sequence in sequences:
        each = message.sequences.add(
            stop_reason=STOP_REASONS.index(sequence.stop_reason),
            tokens=sequence.tokens.astype("<i4").tobytes(),
            logprobs=sequence.logp.astype("<f4").tobytes(),
            versions=sequence.versions.astype("<i4").tobytes(),
        )
        if sequence.top is not None:
            _write_top(each.topk_sampled_logprobs, *sequence.top)
    if prompt_logp is not None:
        message.prompt_logprobs = prompt_logp.astype("<f4").tobytes()
    if prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, *prompt_top)
    return message.SerializeToString()


def _write_top(
    message: Any, ids: Shaped[np.ndarray, "T K"], logp: Shaped[np.ndarray, "T K"]
) -> None:
    message.token_ids, message.logprobs = ids.astype("<i4").tobytes(), logp.astype("<f4").tobytes()
    message.length, message.k = ids.shape


def sample_to_json(data: bytes) -> dict[str, Any]:
    """Convert the result of a sampling request to JSON values, with the version of each token."""
    message = _CLASSES["SampleResponse"]()
    message.ParseFromString(data)

    def numbers(data: bytes, form: str) -> list[Any]:
        return [value for (value,) in struct.iter_unpack(f"<{form}", data)]

    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": STOP_REASONS[each.stop_reason],
                "tokens": numbers(each.tokens, "i"),
                "logprobs": numbers(each.logprobs, "f"),
                "versions": numbers(each.versions, "i"),
            }
            for each in message.sequences
        ],
        "prompt_logprobs": [
            None if value != value else value for value in numbers(message.prompt_logprobs, "f")
        ],
    }
