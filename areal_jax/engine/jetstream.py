"""The decode engine as a `jetstream.engine.engine_api.Engine`, for JetStream's own orchestrator to decode with.

    pip install "areal_jax[jetstream]"

JetStream 0.2.2 is the last release, and drags in TensorFlow; nothing else imports this module. Its orchestrator asks JAX for
`jax.tree_map`, which went with JAX 0.4.26: set `jax.tree_map = jax.tree.map` before importing `jetstream.core.orchestrator`. It
reads the weights once, so that nothing here is interrupted, and knows no settings of single requests: all are drawn alike.

Axes: S slots, F fields of a slot, n decode steps of one dispatch, P tokens of a prompt.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2  # pyright: ignore[reportMissingImports]

from areal_jax.engine.decode import SLOT, DecodeEngine, DecodeState, Drawing, EngineParams, Fill
from areal_jax.engine.slots import SlotTable
from areal_jax.records import Request, Sampling, Tokenizer, derive_seed, nothing_drawn

NO_TOKEN = -1
"""What stands for the token that begins a text where the policy has none; `prefill` takes it out again."""

SHORTEST_PREFILL = 16
"""JetStream pads prompts to this many tokens, or twice, four times, ... as many."""


# Where each field lies among the integers of a slot.
_PLACES = {name: offset // 4 for name, (_, offset, *_) in (SLOT.fields or {}).items()}


class Prompt(NamedTuple):
    """A prompt on its way to a slot, in whose pages its keys and values are computed."""

    tokens: Int32[Array, "P"]


class JetStreamEngine(engine_api.Engine):
    """JetStream's verbs over the engine's: slots keep their pages, and a prompt is prefilled where it is inserted."""

    def __init__(self, engine: DecodeEngine, params: EngineParams, tokenizer: Tokenizer, sampling: Sampling, *, seed: int = 0):
        """
        Args:
            engine: of one step per dispatch, and with memory for every slot at its longest.
            params: in the engine's layout, on its mesh.
            sampling: of every request. JetStream may end an answer earlier.
            seed: the n-th prompt inserted, from 0, is drawn with `derive_seed(seed, str(n))`.

        ValueError names the setting that does not fit."""
        config = engine.config
        if config.steps_per_dispatch != 1:
            raise ValueError(f"expected engine.steps_per_dispatch=1, came {config.steps_per_dispatch}: JetStream counts steps")
        if config.kv_tokens:
            raise ValueError(f"expected engine.kv_tokens=0, came {config.kv_tokens}: JetStream preempts nothing")
        if config.max_prompt_tokens < SHORTEST_PREFILL:
            raise ValueError(
                f"expected engine.max_prompt_tokens of at least {SHORTEST_PREFILL}, came {config.max_prompt_tokens}: JetStream "
                "pads every prompt to so many"
            )
        self._engine, self._params, self._tokenizer, self._sampling, self._seed = engine, params, tokenizer, sampling, seed
        self._places, self._result = count(), jax.jit(_result)
        # Makes the records of slots out of requests.
        self._table = SlotTable(config.num_slots, config.max_new_tokens, config.steps_per_dispatch)
        per_shard = config.num_slots // engine.num_shards
        first = np.arange(config.num_slots) % per_shard * engine.pages_per_slot
        self._pages = (first[:, None] + np.arange(engine.pages_per_slot)).astype(np.int32)

    def load_params(self, *_: Any, **__: Any) -> EngineParams:
        """The weights that it was made with."""
        return self._params

    def init_decode_state(self, *_: Any, **__: Any) -> DecodeState:
        """Empty slots, as long as they may become, each with pages of its own."""
        engine = self._engine
        return engine.fit(engine.point(engine.init_state(), self._pages), engine.max_tokens - 1)

    def prefill(
        self,
        *,
        params: EngineParams,
        existing_prefix: Prompt | None = None,
        padded_tokens: Int32[Array | np.ndarray, "_"],
        true_length: int,
    ) -> Prompt:
        """The prompt, behind one that there is already; `insert` computes its keys and values."""
        tokens = np.asarray(padded_tokens, np.int32)[:true_length]
        before = [] if existing_prefix is None else [np.asarray(existing_prefix.tokens)]
        return Prompt(jnp.asarray(np.concatenate([*before, tokens[tokens != NO_TOKEN]])))

    def insert(self, prefix: Prompt, decode_state: DecodeState, slot: int) -> DecodeState:
        """Let a slot answer a prompt; `decode_state` is consumed."""
        engine, tokens = self._engine, np.asarray(prefix.tokens)
        number = next(self._places)
        self._table.seat(
            slot,
            Request(str(number), tokens, 1, self._sampling, derive_seed(self._seed, str(number))),
            0,
            nothing_drawn(),
        )
        records = np.array(decode_state.slots).view(SLOT)[:, 0]
        records[slot] = self._table.records()[slot]
        self._table.release(slot)
        # The last token is fed by the first step.
        cached, chunk = len(tokens) - 1, engine.config.prefill_chunk_tokens
        shard = slot * engine.num_shards // engine.config.num_slots
        for start in range(0, cached, chunk):
            fill = Fill(tokens[start : min(start + chunk, cached)], start, self._pages[slot].tolist(), shard)
            decode_state = engine.prefill(self._params, decode_state, [fill])
        return engine.seat(engine.insert(decode_state, {slot: cached}), records)

    def generate(self, params: EngineParams, decode_state: DecodeState) -> tuple[DecodeState, engine_api.ResultTokens]:
        """One token for every slot that has not ended; `decode_state` is consumed."""
        sampling = self._sampling
        is_filtered = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)
        drawing = Drawing.FILTERED if is_filtered else Drawing.PLAIN
        decode_state, packed = self._engine.generate(params, decode_state, drawing=drawing)
        return decode_state, engine_api.ResultTokens(
            data=self._result(packed, decode_state.slots),
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=self.samples_per_slot,
        )

    def get_prefix_destination_sharding(self) -> jax.sharding.Sharding:
        """Everywhere: a prompt is a few tokens."""
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Nothing that another program could make a tokenizer of: `build_tokenizer` has it."""
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> Vocabulary:
        """The policy's own."""
        return Vocabulary(self._tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self._engine.config.num_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The longest of JetStream's lengths that the engine takes."""
        return 1 << (self._engine.config.max_prompt_tokens.bit_length() - 1)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._engine.mesh

    @property
    def colocated_cpus(self) -> None:
        return None


class Vocabulary(tokenizer_api.Tokenizer):
    """The policy's tokenizer with the names that JetStream calls it by."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, s: str, **settings: Any) -> tuple[Array | np.ndarray, int]:
        """Padded tokens of a text, and how many there are."""
        settings |= {"is_bos": False}
        return token_utils.pad_tokens(self._tokenizer.encode(s), self.bos_id, self.pad_id, **settings)

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return self._tokenizer.decode(np.asarray(token_ids, np.int32))

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def bos_id(self) -> int:
        return NO_TOKEN

    @property
    def eos_id(self) -> int:
        return self._tokenizer.stop_token_ids[0]

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._tokenizer.stop_token_ids)


def _result(packed: Int32[Array, "m S"], slots: Int32[Array, "S F"]) -> Int32[Array, "S 3"]:
    """By slot: the token that it drew, whether it drew one, and how many it has drawn so far."""
    position, num_prompt_tokens = (slots[:, _PLACES[name]] for name in ("position", "num_prompt_tokens"))
    drew = packed[0] >= 0
    return jnp.stack([jnp.where(drew, packed[0], 0), drew.astype(jnp.int32), position + 1 - num_prompt_tokens], axis=1)
