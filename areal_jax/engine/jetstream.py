"""The decode engine as a `jetstream.engine.engine_api.Engine`, for JetStream's own orchestrator to
decode with.

    pip install "areal_jax[jetstream]"

JetStream 0.2.2 is the last release and depends on TensorFlow; nothing else imports this module. Its
orchestrator uses `jax.tree_map`, which JAX 0.4.26 removed: set `jax.tree_map = jax.tree.map` before
importing `jetstream.core.orchestrator`. It reads the weights once, so that decoding is never
interrupted, and has no sampling parameters of single requests: all are sampled alike.

Later JetStream, which was never released, samples the first token of an answer in `prefill`,
returns log-probs, and inserts one prompt into several slots. What the installed package declares
decides which of the two is spoken.

Axes: S slots, F fields of a slot, n decode steps of one dispatch, P tokens of a prompt, N answers
    to it.

The file has more than 400 lines because JetStream has two interfaces.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple, get_type_hints

import chz
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32
from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2  # pyright: ignore[reportMissingImports]

from areal_jax.engine import sequence
from areal_jax.engine.batch import SLOT, PrefillChunk, SamplingMode, empty_slots, sampling_mode
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import DecodeState, EngineParams
from areal_jax.engine.slots import SlotTable
from areal_jax.models.paged_attention import Pages
from areal_jax.parallel.sharding import shardings_of
from areal_jax.protocols import Tokenizer
from areal_jax.records import Completion, Request, Sampling, derive_seed, empty_completion

NO_TOKEN = -1
"""What stands for the token that begins a text where the policy has none; `prefill` takes it out
again."""

SHORTEST_PREFILL = 16
"""JetStream pads prompts to this many tokens, or twice, four times, ... as many."""

SAMPLES_IN_PREFILL = get_type_hints(engine_api.Engine.prefill)["return"] is not Any
"""Whether JetStream expects a first token of `prefill`. In 0.2.2 it returns a prefix alone, which
may be anything."""

RESULT_FIELDS = {each.name for each in dataclasses.fields(engine_api.ResultTokens)}
"""What JetStream's results hold; log-probs in its later interface only."""

# Where each field lies among the integers of a slot.
_PLACES = {name: offset // 4 for name, (_, offset, *_) in (SLOT.fields or {}).items()}


class Prompt(NamedTuple):
    """A prompt on its way to slots. The first fields have the names of JetStream's
    `ExistingPrefix`, as which it is read.
    """

    cache: tuple[Pages, ...]
    """Keys and values of its tokens, of every layer."""
    common_prefix_tokens: Int32[Array | np.ndarray, "P"]
    number: int | Int32[Array, ""]
    """Prompts that were prefilled before it."""
    first: Int32[Array | np.ndarray, "N"]
    """The first token of each answer; none where they are sampled in slots."""
    first_logp: Float32[Array | np.ndarray, "N"]


class JetStreamEngine(engine_api.Engine):
    """JetStream's verbs over the engine's. Prompts are prefilled in pages of their own, and copied
    to those of their slots.

    It has more than 200 lines because JetStream's interface has two forms, with one state.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        params: EngineParams,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        seed: int = 0,
    ):
        """
        Args:
            engine: of one step per dispatch, and with memory for every slot at its longest.
            params: in the engine's layout, on its mesh.
            sampling: of every request. JetStream may end an answer earlier.
            seed: answers to the n-th prompt, from 0, are sampled with `derive_seed(seed, str(n))`.

        ValueError names the setting that does not fit.
        """
        _check(engine, sampling)
        config = engine.config
        self._mode = sampling_mode(sampling)
        self._engine, self._params, self._tokenizer, self._sampling, self._seed = (
            engine,
            params,
            tokenizer,
            sampling,
            seed,
        )
        self._numbers, self._result = count(), jax.jit(_result)
        # Makes the record of a slot out of a request.
        self._table = SlotTable(1, config.max_new_tokens, 1)
        slots, per_shard = np.arange(config.num_slots), config.num_slots // engine.num_shards
        first = slots % per_shard * engine.pages_per_slot
        # Of every slot, numbered within its shard, and among those of all shards.
        self._pages = (first[:, None] + np.arange(engine.pages_per_slot)).astype(np.int32)
        self._all_pages = self._pages + (slots // per_shard * engine.pages_per_shard)[
            :, None
        ].astype(np.int32)
        # Prefills, in the first slot of the first shard.
        small = chz.replace(config, num_slots=engine.num_shards, max_new_tokens=1)
        self._prefiller = DecodeEngine(
            engine.policy, engine.mesh, small, engine.compute_dtype, engine.reader
        )
        self._own_pages = np.arange(self._prefiller.pages_per_slot, dtype=np.int32)
        table = np.tile(self._own_pages, (engine.num_shards, 1))
        self._prefilling = self._prefiller.point(self._prefiller.init_state(), table)
        self._take = jax.jit(_take)
        placed = shardings_of(self._prefilling.pages)
        self._put = jax.jit(_put, out_shardings=placed, donate_argnums=0)
        # JetStream prefills in one thread and decodes in another: whoever holds this hands work to
        # the devices, which must all be given it in the same order.
        self._lock = threading.Lock()

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
        existing_prefix: Any = None,
        padded_tokens: Int32[Array | np.ndarray, "_"],
        true_length: int,
        sampler: Callable[..., Any] | None = None,
        request_id: Any = None,
    ) -> Any:
        """Return a `Prompt`, with the first token of its answer where JetStream expects it.

        Args:
            existing_prefix: tokens before it: a prompt, or an `ExistingPrefix` of a prompt's cache
                and tokens.
        """
        prompt, first = self.prefill_multisampling(
            params=params,
            existing_prefix=existing_prefix,
            padded_tokens=padded_tokens,
            true_length=true_length,
            sampler=sampler,
            num_samples=int(SAMPLES_IN_PREFILL),
        )
        return (prompt, first) if SAMPLES_IN_PREFILL else prompt

    def prefill_multisampling(
        self,
        *,
        params: EngineParams,
        existing_prefix: Any = None,
        padded_tokens: Int32[Array | np.ndarray, "_"],
        true_length: int,
        sampler: Callable[..., Any] | None = None,
        rng: Any = None,
        num_samples: int = 1,
    ) -> tuple[Prompt, engine_api.ResultTokens]:
        """As `prefill`, with first tokens of several answers, for `bulk_insert`. The engine's seed
        draws them, not `rng`.
        """
        _refuse(sampler)
        engine, chunk = self._prefiller, self._prefiller.config.prefill_chunk_tokens
        tokens = np.asarray(padded_tokens, np.int32)[:true_length]
        tokens, start = tokens[tokens != NO_TOKEN], 0
        with self._lock:
            state = self._prefilling
            if existing_prefix is not None:
                before = np.asarray(existing_prefix.common_prefix_tokens, np.int32)
                tokens, start = np.concatenate([before, tokens]), len(before)
                state = state._replace(
                    pages=self._put(state.pages, existing_prefix.cache, self._own_pages)
                )
            for begin in range(start, len(tokens), chunk):
                fill = PrefillChunk(tokens[begin : begin + chunk], begin, self._own_pages.tolist())
                state = engine.prefill(params, state, [fill])
            cache, number = self._take(state.pages, self._own_pages), next(self._numbers)
            prompt = Prompt(
                cache,
                tokens,
                number,
                np.zeros(num_samples, np.int32),
                np.zeros(num_samples, np.float32),
            )
            state = engine.fit(state, len(tokens))
            for sample in range(num_samples):
                slots = empty_slots(engine.config.num_slots)
                slots[0] = self._record(prompt, sample, empty_completion())
                # The last token is fed again.
                state = engine.assign_slot(engine.insert(state, {0: len(tokens) - 1}), slots)
                state, packed = engine.generate(params, state, mode=self._mode)
                sampled = engine.fetch(packed)
                prompt.first[sample], prompt.first_logp[sample] = (
                    sampled.tokens[0, 0],
                    sampled.logp[0, 0],
                )
            self._prefilling = state
        ones = np.ones_like(prompt.first)
        return prompt, _results(
            np.stack([prompt.first, ones, ones], 1), prompt.first_logp[:, None], max(num_samples, 1)
        )

    def insert(
        self, prefix: Prompt, decode_state: DecodeState, slot: int, request_id: Any = None
    ) -> DecodeState:
        """Let a slot answer a prompt; `decode_state` is consumed."""
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(
        self, prefix: Prompt, decode_state: DecodeState, slots: Sequence[int]
    ) -> DecodeState:
        """Let slots go on, each with one of a prompt's answers; `decode_state` is consumed."""
        engine, first = self._engine, np.asarray(prefix.first)
        if len(slots) != max(len(first), 1):
            raise ValueError(
                f"expected a slot for each of {max(len(first), 1)} answers, found {len(slots)}"
            )
        # The last token is fed by the first step.
        cached = len(prefix.common_prefix_tokens) + (len(first) > 0) - 1
        with self._lock:
            records, pages = np.array(decode_state.slots).view(SLOT)[:, 0], decode_state.pages
            for sample, slot in enumerate(slots):
                token, logp = (
                    np.asarray(x)[sample : sample + 1] for x in (first, prefix.first_logp)
                )
                sampled = Completion(token, logp, np.zeros_like(token), "suspended")
                records[slot] = self._record(prefix, sample, sampled)
                pages = self._put(
                    pages, prefix.cache, self._all_pages[slot, : len(self._own_pages)]
                )
            decode_state = engine.insert(
                decode_state._replace(pages=pages), dict.fromkeys(slots, cached)
            )
        return engine.assign_slot(decode_state, records)

    def generate(
        self,
        params: EngineParams,
        decode_state: DecodeState,
        sampler: Callable[..., Any] | None = None,
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """One token for every slot that has not ended; `decode_state` is consumed."""
        _refuse(sampler)
        with self._lock:
            decode_state, packed = self._engine.generate(params, decode_state, mode=self._mode)
            data, logp = self._result(packed, decode_state.slots)
        return decode_state, _results(data, logp, self.samples_per_slot)

    def _record(self, prompt: Prompt, sample: int, sampled: Completion) -> np.void:
        """The `SLOT` record that lets a slot go on with an answer."""
        number, sampling = str(int(prompt.number)), self._sampling
        tokens = np.asarray(prompt.common_prefix_tokens)
        request = Request(number, tokens, 1, sampling, derive_seed(self._seed, number))
        self._table.assign_slot(sequence.Sequence(request, sample, sampled, slot=0))
        record = self._table.records()[0]
        self._table.free_slot(0)
        has_ended = (
            bool(np.isin(sampled.tokens, sampling.stop_token_ids).any()) or record["remaining"] == 0
        )
        record["active"] = not has_ended
        return record

    def get_prefix_destination_sharding(self) -> jax.sharding.Sharding:
        """Everywhere, so that any data shard may read it."""
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
    def use_chunked_prefill(self) -> bool:
        """Whether JetStream must cut long prompts: the engine does."""
        return False

    @property
    def prefill_chunk_size(self) -> int:
        """Tokens that the engine prefills at a time."""
        return self._engine.config.prefill_chunk_tokens

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
        return token_utils.pad_tokens(
            self._tokenizer.encode(s), self.bos_id, self.pad_id, **settings
        )

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


def _check(engine: DecodeEngine, sampling: Sampling) -> None:
    """Raise ValueError if JetStream cannot decode with these settings."""
    config = engine.config
    if engine.policy.config.linear is not None:
        raise ValueError(
            f"expected a policy without linear attention, found "
            f"{engine.policy.config.architecture}: its recurrent states are not part of "
            "JetStream's prefix"
        )
    if config.steps_per_dispatch != 1:
        raise ValueError(
            f"expected engine.steps_per_dispatch=1, found {config.steps_per_dispatch}: "
            "JetStream counts steps"
        )
    if config.draft_tokens:
        raise ValueError(
            f"expected engine.draft_tokens=0, found {config.draft_tokens}: JetStream counts tokens"
        )
    if config.kv_tokens:
        raise ValueError(
            f"expected engine.kv_tokens=0, found {config.kv_tokens}: JetStream preempts nothing"
        )
    if config.max_prompt_tokens < SHORTEST_PREFILL:
        raise ValueError(
            f"expected engine.max_prompt_tokens of at least {SHORTEST_PREFILL}, found "
            f"{config.max_prompt_tokens}: JetStream pads every prompt to so many"
        )
    if sampling_mode(sampling) == SamplingMode.SHAPED:
        raise ValueError(
            "expected a sampling without penalties, min_new_tokens and num_top_logprobs, which "
            f"look at the tokens sampled before; JetStream's state holds none. Found {sampling}"
        )


def _refuse(sampler: object) -> None:
    if sampler is not None:
        raise ValueError(
            "expected sampler=None: every request is sampled as the engine's `sampling` says"
        )


def _take(pages: tuple[Pages, ...], ids: Int32[Array, "_"]) -> tuple[Pages, ...]:
    return jax.tree.map(lambda leaf: leaf[:, ids], pages)


def _put(
    pages: tuple[Pages, ...], prefix: tuple[Pages, ...], ids: Int32[Array, "_"]
) -> tuple[Pages, ...]:
    return jax.tree.map(lambda into, leaf: into.at[:, ids].set(leaf), pages, prefix)


def _results(data: Any, logp: Any, samples_per_slot: int) -> engine_api.ResultTokens:
    """What JetStream's results hold of columns of tokens, validity and lengths, and of
    log-probs.
    """
    known = {
        "tokens_idx": (0, 1),
        "valid_idx": (1, 2),
        "length_idx": (2, 3),
        "samples_per_slot": samples_per_slot,
    }
    known |= {"data": data, "log_prob": logp}
    return engine_api.ResultTokens(
        **{name: value for name, value in known.items() if name in RESULT_FIELDS}
    )


def _result(
    packed: Int32[Array, "m S"], slots: Int32[Array, "S F"]
) -> tuple[Int32[Array, "S 3"], Float32[Array, "S 1"]]:
    """By slot: the token that it drew, whether it drew one, and how many it has sampled so far; and
    the token's log-prob.
    """
    position, num_prompt_tokens = (
        slots[:, _PLACES[name]] for name in ("position", "num_prompt_tokens")
    )
    drew, logp = packed[0] >= 0, jax.lax.bitcast_convert_type(packed[1], jnp.float32)
    data = jnp.stack(
        [jnp.where(drew, packed[0], 0), drew.astype(jnp.int32), position + 1 - num_prompt_tokens],
        axis=1,
    )
    return data, logp[:, None]
