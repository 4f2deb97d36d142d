"""What JetStream's `engine_api` came to declare after 0.2.2, of its repository's last state: names,
signatures, and results."""

from __future__ import annotations

import abc
import uuid
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import struct
from jetstream.engine import engine_api  # pyright: ignore[reportMissingImports]

Prefix = Any
DecodeState = Any


@struct.dataclass
class ExistingPrefix:
    cache: Any
    common_prefix_tokens: jax.Array


@struct.dataclass
class SlotData(engine_api.SlotData):
    log_prob: Any = None


@struct.dataclass
class ResultTokens(engine_api.ResultTokens):
    log_prob: Any = None

    def convert_to_numpy(self) -> ResultTokens:
        indices = self.tokens_idx, self.valid_idx, self.length_idx
        return ResultTokens(
            np.array(self.data), *indices, self.samples_per_slot, np.array(self.log_prob)
        )

    def get_result_at_slots(self, slots: tuple[int, ...]) -> SlotData:
        tokens, valid, lengths = (
            self.data[slots, slice(*each)]
            for each in (self.tokens_idx, self.valid_idx, self.length_idx)
        )
        return SlotData(tokens, valid, lengths[:, 0], self.log_prob[slots, :])


class Engine(engine_api.Engine):
    @abc.abstractmethod
    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: ExistingPrefix | None = None,
        padded_tokens: jax.Array,
        true_length: int,
        sampler: Callable[[Any], Any] | None = None,
        request_id: uuid.UUID | None = None,
    ) -> tuple[Prefix, ResultTokens]: ...

    @abc.abstractmethod
    def prefill_multisampling(
        self,
        *,
        params: Any,
        existing_prefix: jax.Array | None = None,
        padded_tokens: jax.Array,
        true_length: int,
        sampler: Callable[[Any], Any] | None = None,
        rng: Any = None,
        num_samples: int = 1,
    ) -> tuple[Prefix, ResultTokens]: ...

    @abc.abstractmethod
    def generate(
        self, params: Any, decode_state: DecodeState, sampler: Callable[[Any], Any] | None = None
    ) -> tuple[DecodeState, ResultTokens]: ...

    @abc.abstractmethod
    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        request_id: uuid.UUID | None = None,
    ) -> DecodeState: ...

    @abc.abstractmethod
    def bulk_insert(
        self, prefix: Prefix, decode_state: DecodeState, slots: list[int]
    ) -> DecodeState: ...

    def free_resource(self, slot: int) -> Any:
        return None

    @property
    @abc.abstractmethod
    def use_chunked_prefill(self) -> bool: ...

    @property
    @abc.abstractmethod
    def prefill_chunk_size(self) -> int: ...
