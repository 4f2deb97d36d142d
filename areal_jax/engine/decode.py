"""The decode engine: prefill, insert and generate (the JetStream verbs), with weights and state as
arguments.

Keys and values lie in pages, which samples of one prompt share; the host says in tables whose they
are (`engine/kv_cache`). A prefill fills the pages of all tokens of a sequence but the last, which
the first decode step feeds. So every token is sampled in `generate`, and rebuilding the pages of a
half-written answer with new weights is the same prefill.

Where a kernel attends to pages, `generate` writes and reads them. On CPUs it reads a view: a copy
of every live slot's keys and values laid end to end, which `insert` makes of its pages, and writes
what it drew to both. Measured on two busy CPU cores, 4 layers of 2 heads of 32, 64 slots: the
attention of a step takes 1.1 ms from a view of 128 columns, 2.5 ms of 256, 32 ms of 1024; laying
pages end to end before every dispatch would add 3.5, 7 and 80 ms to it.

Axes: B rows, T tokens, S slots, F fields of a slot, C columns of the view, D width, N query heads,
    K key-value heads, H head size, V vocabulary, L layers, M pages of a slot's table, n decode
    steps of one dispatch, A alternatives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from areal_jax.engine import sampling
from areal_jax.engine.batch import (
    MAX_TOP_LOGPROBS,
    SLOT,
    DecodeOutput,
    PrefillChunk,
    SamplingMode,
    empty_slots,
)
from areal_jax.engine.config import EngineConfig
from areal_jax.models import lora
from areal_jax.models.attention import choose_kernel, masked_attention, sharded_attention
from areal_jax.models.decoder import Attend, Params, Policy
from areal_jax.models.moe import ROUTER, sharded_experts
from areal_jax.models.paged_attention import (
    PAGE_AXES,
    PagedKernel,
    Pages,
    as_stored,
    choose_paged_kernel,
    paged_attention,
    read_pages,
    sharded_write,
)
from areal_jax.parallel.sharding import (
    ROLLOUT_RULES,
    bytes_per_device,
    on_shards,
    sharding,
    shardings,
)

EngineParams: TypeAlias = dict[str, Any]
"""What `DecodeEngine.layout` makes of parameters: `layers` is a tuple of L trees instead of one
stacked tree. With an adapter, matrices are `Adapted` and never merged: an update smaller than half
a step of bfloat16 would be lost."""

View: TypeAlias = tuple[tuple[Array, Array], ...]
"""Keys [S, K, H, n + C] and values [S, K, n + C, H] of each layer, as attention reads them: first n
columns for the tokens of the dispatch under way, then one column per position. Empty where
attention reads pages."""

Reader: TypeAlias = Literal["view"] | PagedKernel
"""What attention reads while tokens are sampled: a view of the pages, or the pages themselves
through a kernel."""

# The type of each field, and where it lies among those integers.
_PLACES: dict[str, tuple[np.dtype, slice]] = {
    name: (dtype, slice(offset // 4, (offset + dtype.itemsize) // 4))
    for name, (dtype, offset, *_) in (SLOT.fields or {}).items()
}

# How a dispatch leaves a slot; 0: inactive, or ended for want of budget.
_CONTINUES, _STOPPED = 1, 2
_SHORTEST_PREFILL, _SHORTEST_VIEW = 32, 128
# One prefill call holds up to 8 rows and this many tokens per device: enough to fill a device,
# little enough for its memory.
_PREFILL_ROWS, _PREFILL_TOKENS = 8, 8192


class DecodeState(NamedTuple):
    """All that a dispatch reads and writes; given to `generate`, which returns the next one in its
    place."""

    pages: tuple[Pages, ...]
    """Of each layer."""
    view: View
    slots: Int32[Any, "S F"]
    """`SLOT` records as integers; on the host where they were just seated, as is the table."""
    table: Int32[Any, "S M"]
    """Pages of each slot's sequence, numbered within its data shard."""


class _Step(NamedTuple):
    """What one decode step of a dispatch hands to the next."""

    cache: Any
    """The view, or the pages: what attention reads."""
    token: Int32[Array, "S"]
    active: Bool[Array, "S"]
    remaining: Int32[Array, "S"]
    stopped: Bool[Array, "S"]
    """Whether the last token is one of the slot's stop tokens."""
    tokens: Int32[Array, "n S"]
    logp: Float32[Array, "n S"]
    token_counts: Int32[Array, "S V"]
    """How often each slot's answer holds each token; without a column where nobody asks."""
    top_logprobs: tuple[Int32[Array, "n A S"], Float32[Array, "n A S"]]
    """Most likely tokens and their log-probs; none where nobody asks."""


class DecodeEngine:
    """Compiled programs for one policy on one mesh; holds no weights and no state.

    Slots and pages are cut over the mesh's data axis, heads over its tensor axis. A view is as long
    as the longest live sequence needs, in powers of two, so that short sequences stay cheap and few
    programs are compiled."""

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh,
        config: EngineConfig,
        compute_dtype: DTypeLike,
        reader: Reader | None = None,
    ):
        """Args: reader: None takes what is fastest on the mesh's devices.

        Raises ValueError naming the knob where the slots do not divide over the mesh, or no
        sequence fits in the KV memory."""
        if config.num_slots % mesh.shape["data"]:
            raise ValueError(
                f"engine.num_slots={config.num_slots} does not divide by the "
                f"{mesh.shape['data']} rollout devices that share "
                f"the slots; set engine.num_slots to a multiple of {mesh.shape['data']}"
            )
        if config.max_prompt_tokens < 1:
            raise ValueError(
                "expected engine.max_prompt_tokens of at least 1, came "
                f"{config.max_prompt_tokens}; set it"
            )
        self.policy, self.mesh, self.config = policy, mesh, config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.max_tokens = config.max_tokens
        self.kv_dtype = (
            self.compute_dtype if config.kv_dtype == "compute" else jnp.dtype(config.kv_dtype)
        )
        self.reader: Reader = reader or self._fastest_reader()
        # The last token is never fed, so it needs no column.
        most = self.max_tokens - 1
        self.num_shards = mesh.shape["data"]
        """Data shards; each has pages of its own."""
        self.pages_per_slot = math.ceil(most / config.page_tokens)
        # One more than the longest sequence: the page of its prompt that is not full, while others
        # wait to copy it.
        of_shard = config.kv_tokens // (self.num_shards * config.page_tokens)
        self.pages_per_shard = (
            of_shard
            if config.kv_tokens
            else config.num_slots // self.num_shards * self.pages_per_slot + 1
        )
        if self.pages_per_shard <= self.pages_per_slot:
            least = self.num_shards * (self.pages_per_slot + 1) * config.page_tokens
            raise ValueError(
                f"engine.kv_tokens={config.kv_tokens} holds no sequence of "
                "engine.max_prompt_tokens + engine.max_new_tokens = "
                f"{self.max_tokens}; set engine.kv_tokens to at least {least}, or to 0"
            )
        self._insert_lengths = _doublings(_SHORTEST_PREFILL, most)
        longer = [n for n in self._insert_lengths if n >= _SHORTEST_VIEW] or self._insert_lengths[
            -1:
        ]
        self._view_lengths = longer if self.reader == "view" else []
        self._lengths = _doublings(_SHORTEST_PREFILL, min(most, config.prefill_chunk_tokens))
        # Longer to compile and seldom long: every second length does.
        self._extend_lengths = self._lengths[::-2][::-1]
        whole = self._laid_out(policy.abstract(), policy.axes())
        arriving = (
            self._laid_out(lora.abstract(policy), lora.axes(policy)) if policy.lora else whole
        )
        self._params = lora.attach(policy, whole, arriving) if policy.lora else whole
        self.param_shardings = _placed(arriving)
        """Where each leaf of `layout(params)` lies (of an adapter's, where the policy has one):
        what a weight channel must deliver."""
        self.base_shardings = _placed(whole)
        """Where the parameters lie to which an adapter belongs."""
        self._programs: dict[tuple[str | int, ...], Callable[..., Any]] = {}
        self.warm: SamplingMode | None = None
        """The most that every program is compiled for; None where each is compiled when it is first
        needed."""
        self.compile_s = 0.0
        """Seconds spent on compiling so far."""

    def layout(self, params: Params) -> EngineParams:
        """`laid_out` for this engine."""
        return laid_out(self.policy, params, self.compute_dtype)

    @property
    def num_programs(self) -> int:
        """Programs compiled so far; stands still once warm."""
        return len(self._programs)

    def warm_up(self, most: SamplingMode = SamplingMode.PLAIN) -> float:
        """Compile every program that requests within the configured limits can need; returns the
        seconds it took.

        Without it each is compiled when it is first needed, as are sampling modes beyond `most` and
        the settings."""
        before = self.compile_s
        filters = self.config.top_k > 0 or self.config.top_p < 1
        modes = range(max(most, SamplingMode.FILTERED if filters else SamplingMode.PLAIN) + 1)
        for verb in ("init", "same_weights", "copy"):
            self._program(verb)
        for length, following in pairwise(self._view_lengths):
            self._program("resize", length, following)
            self._program("resize", following, length)
        for length in self._view_lengths:
            for tokens in self._insert_lengths:
                if tokens <= length:
                    self._program("insert", tokens, length)
        for length in self._view_lengths or [0]:
            for mode in modes:
                self._program("generate", length, mode)
        for tokens in self._lengths:
            for rows in self._row_counts(tokens):
                self._program("prefill", rows, tokens)
        for tokens in self._extend_lengths:
            self._program("extend", self._row_counts(tokens)[-1], tokens)
        self.warm = SamplingMode(modes[-1])
        return self.compile_s - before

    def warm_up_mode(self, mode: SamplingMode, is_stopped: Callable[[], bool]) -> None:
        """Compile what `mode` needs beyond `warm`, while another thread runs what is compiled.

        Args: is_stopped: asked before each program; the rest is left out once it is."""
        assert self.warm is not None
        for length, each in product(self._view_lengths or [0], range(self.warm + 1, mode + 1)):
            if is_stopped():
                return
            self._program("generate", length, each)
        self.warm = max(self.warm, mode)

    def init_state(self) -> DecodeState:
        """Empty slots and pages, and the shortest view."""
        table = np.zeros((self.config.num_slots, self.pages_per_slot), np.int32)
        pages, view = self._program("init")()
        return DecodeState(pages, view, _as_integers(empty_slots(self.config.num_slots)), table)

    def kv_bytes(self) -> int:
        """Bytes of keys and values on every device: the pages, and the longest view where attention
        reads one."""
        shapes = (
            self._page_shapes(),
            self._view_shapes(self._view_lengths[-1] if self._view_lengths else 0),
        )
        return bytes_per_device(shapes, _placed(shapes))

    def assign_slot(self, state: DecodeState, slots: Shaped[np.ndarray, "S"]) -> DecodeState:
        """Let the slots draw what these `SLOT` records say."""
        return state._replace(slots=_as_integers(slots))

    def point(self, state: DecodeState, table: Int32[np.ndarray, "S M"]) -> DecodeState:
        """Let the slots read and write the pages of this table."""
        # A copy: an array on a CPU device may share the memory of the host's.
        return state._replace(table=table.copy())

    def fit(self, state: DecodeState, num_columns: int) -> DecodeState:
        """Lengthen or shorten the view to the smallest length that holds `num_columns`
        positions."""
        if self.reader != "view":
            return state
        length, wanted = self._view_length(state), _at_least(self._view_lengths, num_columns)
        view, lengths = state.view, self._view_lengths
        while length != wanted:
            # From each length to the next, so that there are few programs.
            following = lengths[lengths.index(length) + (1 if length < wanted else -1)]
            view, length = self._program("resize", length, following)(view), following
        return state._replace(view=view)

    def prefill(
        self, params: EngineParams, state: DecodeState, chunks: Sequence[PrefillChunk]
    ) -> DecodeState:
        """Compute keys and values of the tokens of all chunks, which must not need one another;
        `state` is consumed."""
        waiting: dict[tuple[str, int], list[list[PrefillChunk]]] = {}
        for chunk in chunks:
            verb, lengths = (
                ("extend", self._extend_lengths) if chunk.start else ("prefill", self._lengths)
            )
            by_shard = waiting.setdefault(
                (verb, _at_least(lengths, len(chunk.tokens))), [[] for _ in range(self.num_shards)]
            )
            by_shard[chunk.shard].append(chunk)
        pages = state.pages
        for (verb, length), by_shard in waiting.items():
            while (most := max(map(len, by_shard))) > 0:
                counts = self._row_counts(length)
                # A few are cheaper one by one than in a batch that is mostly padding.
                rows = (
                    counts[0]
                    if verb == "prefill" and 2 * most * self.num_shards <= counts[-1]
                    else counts[-1]
                )
                each = rows // self.num_shards
                registry = {
                    row: by
                    for d, by in enumerate(by_shard)
                    for row, by in enumerate(by[:each], d * each)
                }
                tokens, table = (
                    np.zeros((rows, length), np.int32),
                    np.zeros((rows, self.pages_per_slot), np.int32),
                )
                spans = np.zeros((2, rows), np.int32)
                for row, chunk in registry.items():
                    tokens[row, : len(chunk.tokens)] = chunk.tokens
                    table[row, : len(chunk.pages)] = chunk.pages
                    spans[:, row] = chunk.start, len(chunk.tokens)
                pages = self._program(verb, rows, length)(
                    params, pages, tokens, table, spans[0], spans[1]
                )
                by_shard = [queue[each:] for queue in by_shard]
        return state._replace(pages=pages)

    def copy(self, state: DecodeState, pairs: Sequence[Sequence[tuple[int, int]]]) -> DecodeState:
        """Copy pages, given as (from, to) of every data shard; `state` is consumed."""
        table, counts = self._by_shard(pairs, 2)
        return (
            state._replace(pages=self._program("copy")(state.pages, table, counts))
            if counts.any()
            else state
        )

    def insert(self, state: DecodeState, columns: Mapping[int, int]) -> DecodeState:
        """Let slots resume from so many tokens in the pages that the table names: lay them out in
        the view."""
        if self.reader != "view":
            return state
        length, by_length = self._view_length(state), dict[int, list[int]]()
        for slot, count in columns.items():
            if count:
                by_length.setdefault(
                    min(_at_least(self._insert_lengths, count), length), []
                ).append(slot)
        view, per_shard = state.view, self.config.num_slots // self.num_shards
        for tokens, slots in by_length.items():
            lists = [
                [(slot % per_shard,) for slot in slots if slot // per_shard == d]
                for d in range(self.num_shards)
            ]
            view = self._program("insert", tokens, length)(
                view, state.pages, state.table, *self._by_shard(lists, 1)
            )
        return state._replace(view=view)

    def generate(
        self,
        params: EngineParams,
        state: DecodeState,
        *,
        mode: SamplingMode = SamplingMode.PLAIN,
        sequences: Int32[np.ndarray, "S T"] | None = None,
    ) -> tuple[DecodeState, Int32[Array, "m S"]]:
        """Draw up to `steps_per_dispatch` tokens in every active slot; `state` is consumed. Read
        the result with `fetch`.

        Args:
            mode: the most that some slot asks for.
            sequences: in mode SHAPED, the tokens so far of slots with penalties, up to
                `max_tokens`; -1 elsewhere."""
        shaping = () if sequences is None else (sequences,)
        return self._program("generate", self._view_length(state), mode)(params, state, *shaping)

    def fetch(self, packed: Int32[Array, "m S"]) -> DecodeOutput:
        """Wait for what a dispatch drew: one transfer from device to host."""
        host = np.asarray(packed)
        steps = self.config.steps_per_dispatch
        tokens, logp, (counts, status, last) = (
            host[:steps],
            host[steps : 2 * steps],
            host[2 * steps : 2 * steps + 3],
        )
        top_logprobs = None
        if len(host) > 2 * steps + 3:
            others, others_logp = host[2 * steps + 3 :].reshape(2, steps, MAX_TOP_LOGPROBS, -1)
            top_logprobs = others, others_logp.view(np.float32)
        return DecodeOutput(
            tokens,
            logp.view(np.float32),
            counts,
            status == _CONTINUES,
            status == _STOPPED,
            last,
            top_logprobs,
        )

    def same_weights(self, old: EngineParams, new: EngineParams) -> bool:
        """Whether two sets of weights are equal bit for bit, compared on the devices."""
        return bool(self._program("same_weights")(old, new))

    # Programs, compiled ahead of their first call and kept by verb and shapes: a call with other
    # shapes is an error and not a silent compilation.

    def _program(self, verb: str, *shape: int) -> Callable[..., Any]:
        key = (verb, *shape)
        if key not in self._programs:
            start = time.perf_counter()
            self._programs[key] = self._lowered(verb, *shape).compile()
            self.compile_s += time.perf_counter() - start
        return self._programs[key]

    def _lowered(self, verb: str, *shape: int) -> jax.stages.Lowered:
        num_slots, pages = self.config.num_slots, self._page_shapes()
        scalar = self._shape((), jnp.int32)
        match verb, *shape:
            case ("init",):
                shapes = (
                    self._page_shapes(),
                    self._view_shapes(self._view_lengths[0] if self._view_lengths else 0),
                )
                return _lower(
                    lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), (), shapes
                )
            case "generate", length, mode:
                table = self._shape((num_slots, self.pages_per_slot), jnp.int32, "slots")
                state = DecodeState(pages, self._view_shapes(length), self._slot_shapes(), table)
                packed = self._shape((1, num_slots), jnp.int32, None, "slots")
                is_shaped = mode == SamplingMode.SHAPED
                sequences = (
                    (self._shape((num_slots, self.max_tokens), jnp.int32, "slots"),)
                    if is_shaped
                    else ()
                )
                generate = partial(self._generate, SamplingMode(mode))
                return _lower(
                    generate, (self._params, state, *sequences), (state, packed), donate=1
                )
            case ("prefill" | "extend") as verb, rows, length:
                tokens = self._shape((rows, length), jnp.int32, "batch")
                table, span = (
                    self._shape((rows, self.pages_per_slot), jnp.int32, "batch"),
                    self._shape((rows,), jnp.int32, "batch"),
                )
                run = self._prefill if verb == "prefill" else self._extend
                return _lower(
                    run, (self._params, pages, tokens, table, span, span), pages, donate=1
                )
            case ("copy",):
                return self._lowered_on_shards(
                    _copy_pages, (pages, *self._lists(2)), pages, donate=0
                )
            case "insert", tokens, length:
                view, table = (
                    self._view_shapes(length),
                    self._shape((num_slots, self.pages_per_slot), jnp.int32, "slots"),
                )
                insert = partial(
                    _insert,
                    num_pages=math.ceil(tokens / self.config.page_tokens),
                    first=self.config.steps_per_dispatch,
                )
                return self._lowered_on_shards(
                    insert, (view, pages, table, *self._lists(1)), view, donate=0
                )
            case "resize", length, wanted:
                after = self._view_shapes(wanted)
                return _lower(
                    lambda view: jax.tree.map(_resize, view, after),
                    (self._view_shapes(length),),
                    after,
                )
            case ("same_weights",):
                return _lower(_equal_bits, (self._params, self._params), scalar)
            case _:
                raise ValueError(f"the engine has no program for {verb!r}")

    def _lowered_on_shards(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], result: Any, *, donate: int
    ) -> jax.stages.Lowered:
        """`_lower` of what each device does with its own part."""
        ins, out = (
            jax.tree.map(lambda leaf: leaf.sharding.spec, shapes) for shapes in (arguments, result)
        )
        return _lower(on_shards(function, self.mesh, ins, out), arguments, result, donate=donate)

    # What the programs compute.

    def _generate(
        self,
        mode: SamplingMode,
        params: EngineParams,
        state: DecodeState,
        sequences: Int32[Array, "S T"] | None = None,
    ) -> tuple[DecodeState, Int32[Array, "m S"]]:
        num_steps = self.config.steps_per_dispatch
        field = partial(_field, state.slots)
        position, temperature, stop_tokens = (
            field("position"),
            field("temperature"),
            field("stop_tokens"),
        )
        in_prompt, token_counts, num_top_logprobs = (
            None,
            jnp.zeros((len(position), 0), jnp.int32),
            0,
        )
        if sequences is not None:
            is_prompt = jnp.arange(sequences.shape[1]) < field("num_prompt_tokens")[:, None]
            size, num_top_logprobs = self.policy.config.vocab_size, MAX_TOP_LOGPROBS
            in_prompt = sampling.count_tokens(jnp.where(is_prompt, sequences, -1), size) > 0
            token_counts = sampling.count_tokens(jnp.where(is_prompt, -1, sequences), size)
        head = self.policy.head(params)
        steps = jnp.arange(num_steps, dtype=jnp.int32)
        columns = jnp.arange(self._view_length(state), dtype=jnp.int32)
        past = columns < position[:, None]
        # Where in its sequence the token of each column lies.
        places = jnp.concatenate(
            [position[:, None] + steps, jnp.broadcast_to(columns, past.shape)], axis=1
        )
        uniforms = sampling.uniforms(field("seed"), field("sample"), position[:, None] + 1 + steps)

        def step(i: Int32[Array, ""], carry: _Step) -> _Step:
            cache, token, active, remaining, _, tokens, logps, token_counts, top_logprobs = carry
            if self.reader == "view":
                fresh = jnp.broadcast_to(steps <= i, (past.shape[0], num_steps))
                attend = _attend_to_view(
                    i,
                    jnp.concatenate([fresh, past], axis=1),
                    (position + i)[:, None] - places,
                    self.kv_dtype,
                )
            else:
                # A slot that draws nothing writes nothing, and reads next to nothing.
                starts = jnp.where(active, position + i, 0)
                attend = paged_attention(
                    state.table,
                    starts,
                    active.astype(jnp.int32),
                    self.reader,
                    self.mesh,
                    ROLLOUT_RULES,
                )
            hidden, cache, _ = self.policy.hidden(
                params,
                token[:, None],
                (position + i)[:, None],
                attend,
                cache,
                compute_dtype=self.compute_dtype,
                unroll=True,
                experts=sharded_experts(self.mesh, ROLLOUT_RULES),
            )
            logits = jnp.matmul(hidden[:, 0], head, preferred_element_type=jnp.float32)
            # Each tensor shard computes its part of the vocabulary; the draw is made from the
            # whole, however the mesh cuts it.
            for axes in (("slots", "vocab"), ("slots", None)):
                how = sharding(self.mesh, axes, logits.shape, ROLLOUT_RULES)
                logits = jax.lax.with_sharding_constraint(logits, how)
            if in_prompt is not None:
                penalties = (
                    field(f"{name}_penalty") for name in ("presence", "frequency", "repetition")
                )
                logits = sampling.penalize(logits, in_prompt, token_counts, *penalties)
                logits = sampling.forbid(
                    logits, stop_tokens, position + 1 + i < field("stops_from")
                )
            if mode >= SamplingMode.FILTERED:
                logits = sampling.keep_most_likely(
                    logits, temperature, field("top_k"), field("top_p"), field("min_p")
                )
            sampled, logp = sampling.sample_tokens(logits, uniforms[:, i], temperature)
            if in_prompt is not None:
                token_counts = token_counts.at[jnp.arange(len(sampled)), sampled].add(active)
                likely, likely_logp = sampling.most_likely(logits, temperature, num_top_logprobs)
                top_logprobs = (
                    top_logprobs[0].at[i].set(likely.T),
                    top_logprobs[1].at[i].set(likely_logp.T),
                )
            # A slot that has ended goes on being fed its last token, and draws nothing.
            token = jnp.where(active, sampled, token)
            remaining = remaining - active
            stopped = (token[:, None] == stop_tokens).any(-1)
            continues = active & ~stopped & (remaining > 0)
            tokens = tokens.at[i].set(jnp.where(active, sampled, -1))
            logps = logps.at[i].set(jnp.where(active, logp, 0))
            return _Step(
                cache,
                token,
                continues,
                remaining,
                stopped,
                tokens,
                logps,
                token_counts,
                top_logprobs,
            )

        started, remaining = field("active") > 0, field("remaining")
        nothing = (
            jnp.full((num_steps, len(started)), -1, jnp.int32),
            jnp.zeros((num_steps, len(started)), jnp.float32),
        )
        shape = num_steps, num_top_logprobs, len(started)
        others = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
        read = state.view if self.reader == "view" else state.pages
        first = _Step(
            read,
            field("token"),
            started,
            remaining,
            jnp.zeros_like(started),
            *nothing,
            token_counts,
            others,
        )
        # No step without a slot that may draw in it: a dispatch in which all have ended costs next
        # to nothing.
        most = jnp.minimum(num_steps, jnp.max(remaining * started))
        cache, token, active, remaining, stopped, tokens, logp, _, others = jax.lax.fori_loop(
            0, most, step, first
        )
        status = jnp.where(active, _CONTINUES, jnp.where(started & stopped, _STOPPED, 0)).astype(
            jnp.int32
        )
        counts = (tokens >= 0).sum(0, dtype=jnp.int32)
        packed = [tokens, _bits(logp), jnp.stack([counts, status, token])]
        if sequences is not None:
            packed += [x.reshape(-1, len(started)) for x in (others[0], _bits(others[1]))]
        now = {
            "token": token,
            "position": position + counts,
            "remaining": remaining,
            "active": active.astype(jnp.int32),
        }
        slots = state.slots.at[:, [_PLACES[name][1].start for name in now]].set(
            jnp.stack([*now.values()], axis=1)
        )
        if self.reader != "view":
            return DecodeState(cache, state.view, slots, state.table), jnp.concatenate(packed)
        drew = [
            (keys[..., :num_steps].transpose(0, 3, 1, 2), values[:, :, :num_steps].swapaxes(1, 2))
            for keys, values in cache
        ]
        pages = self._write(state.pages, drew, state.table, position, counts)
        return DecodeState(
            pages, _settle(cache, position, num_steps), slots, state.table
        ), jnp.concatenate(packed)

    def _prefill(
        self,
        params: EngineParams,
        pages: tuple[Pages, ...],
        tokens: Int32[Array, "B T"],
        table: Int32[Array, "B M"],
        starts: Int32[Array, "B"],
        counts: Int32[Array, "B"],
    ) -> tuple[Pages, ...]:
        # Stacked again: a scan over layers compiles faster, and the copy is small beside a prefill.
        stacked = params | {
            "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
        }
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        # Whole rows: the padding at the end of a row is seen by nothing before it.
        rows, kernel = (
            jnp.ones_like(tokens),
            choose_kernel(self.mesh.devices.flat[0].platform, tokens.shape[1]),
        )
        attend = _attend_keeping(sharded_attention(rows, kernel, self.mesh, ROLLOUT_RULES))
        experts = sharded_experts(self.mesh, ROLLOUT_RULES)
        _, kept, _ = self.policy.hidden(
            stacked, tokens, positions, attend, compute_dtype=self.compute_dtype, experts=experts
        )
        return self._write(pages, zip(*kept, strict=True), table, starts, counts)

    def _extend(
        self,
        params: EngineParams,
        pages: tuple[Pages, ...],
        tokens: Int32[Array, "B T"],
        table: Int32[Array, "B M"],
        starts: Int32[Array, "B"],
        counts: Int32[Array, "B"],
    ) -> tuple[Pages, ...]:
        """Prefill behind tokens whose pages are filled."""
        positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        attend = paged_attention(table, starts, counts, "plain", self.mesh, ROLLOUT_RULES)
        experts = sharded_experts(self.mesh, ROLLOUT_RULES)
        _, pages, _ = self.policy.hidden(
            params,
            tokens,
            positions,
            attend,
            pages,
            compute_dtype=self.compute_dtype,
            unroll=True,
            experts=experts,
        )
        return pages

    def _write(
        self,
        pages: tuple[Pages, ...],
        drew: Iterable[tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]],
        table: Int32[Array, "B M"],
        starts: Int32[Array, "B"],
        counts: Int32[Array, "B"],
    ) -> tuple[Pages, ...]:
        """Put keys and values of every layer into its pages."""
        return tuple(
            sharded_write(layer, k, v, table, starts, counts, self.mesh, ROLLOUT_RULES)
            for layer, (k, v) in zip(pages, drew, strict=True)
        )

    # Shapes and where they lie.

    def _laid_out(self, params: Params, axes: Params) -> EngineParams:
        """What `layout` makes of parameters of these shapes and logical axes: their shapes and
        shardings."""
        shapes = jax.eval_shape(self.layout, params)
        layer = jax.tree.map(
            lambda names: names[1:], axes["layers"], is_leaf=lambda node: isinstance(node, tuple)
        )
        placed = shardings(
            self.mesh, {**axes, "layers": (layer,) * len(shapes["layers"])}, shapes, ROLLOUT_RULES
        )
        return jax.tree.map(
            lambda leaf, how: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=how),
            shapes,
            placed,
        )

    def _row_counts(self, length: int) -> list[int]:
        """Numbers of rows in which sequences of this length are prefilled, ascending."""
        shards = self.mesh.shape["data"]
        most = shards * min(max(_PREFILL_TOKENS // length, 1), max(_PREFILL_ROWS // shards, 1))
        # Prompts often come one by one; what is longer than any prompt is rebuilt, and that happens
        # to all slots at once.
        is_prompt = length <= _at_least(
            self._lengths, min(self.config.max_prompt_tokens - 1, self._lengths[-1])
        )
        return sorted({1, most}) if is_prompt and shards == 1 else [most]

    def _view_length(self, state: DecodeState) -> int:
        return state.view[0][0].shape[3] - self.config.steps_per_dispatch if state.view else 0

    def _page_shapes(self) -> Any:
        model = self.policy.config
        shape = (
            model.num_key_value_heads,
            self.num_shards * self.pages_per_shard,
            self.config.page_tokens,
            model.head_dim,
        )
        half = self._shape(shape, self.kv_dtype, *PAGE_AXES)
        scales = (
            None
            if self.kv_dtype == self.compute_dtype
            else self._shape(shape[:-1], jnp.float32, *PAGE_AXES)
        )
        return (Pages(half, half, scales, scales),) * model.num_hidden_layers

    def _fastest_reader(self) -> Reader:
        platform = self.mesh.devices.flat[0].platform
        if platform == "cpu":
            return "view"
        is_narrow = self.kv_dtype != self.compute_dtype
        return choose_paged_kernel(
            platform, self.policy.config.head_dim, self.config.page_tokens, is_narrow=is_narrow
        )

    def _view_shapes(self, length: int) -> Any:
        if self.reader != "view":
            return ()
        model, columns = self.policy.config, self.config.steps_per_dispatch + length
        shape = (self.config.num_slots, model.num_key_value_heads)
        keys = self._shape(
            (*shape, model.head_dim, columns), self.compute_dtype, "slots", "kv_heads"
        )
        values = self._shape(
            (*shape, columns, model.head_dim), self.compute_dtype, "slots", "kv_heads"
        )
        return ((keys, values),) * model.num_hidden_layers

    def _lists(self, width: int) -> tuple[Any, Any]:
        """Shapes of what `_by_shard` makes."""
        return self._shape((self.config.num_slots, width), jnp.int32, "slots"), self._shape(
            (self.num_shards,), jnp.int32, "slots"
        )

    def _by_shard(
        self, lists: Sequence[Sequence[tuple[int, ...]]], width: int
    ) -> tuple[Int32[np.ndarray, "S W"], Int32[np.ndarray, "_"]]:
        """A list of every data shard, of at most as many tuples as it has slots, as one array and
        their lengths."""
        array = np.zeros(
            (self.num_shards, self.config.num_slots // self.num_shards, width), np.int32
        )
        for rows, entries in zip(array, lists, strict=True):
            rows[: len(entries)] = entries or 0
        return array.reshape(-1, width), np.array([len(entries) for entries in lists], np.int32)

    def _slot_shapes(self) -> Any:
        return self._shape((self.config.num_slots, SLOT.itemsize // 4), jnp.int32, "slots")

    def _shape(self, shape: tuple[int, ...], dtype: DTypeLike, *axes: str | None) -> Any:
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=sharding(self.mesh, axes, shape, ROLLOUT_RULES)
        )


def laid_out(policy: Policy, params: Params, compute_dtype: DTypeLike) -> EngineParams:
    """The policy's parameters, or its adapter, as the decoder reads them: one tree per layer, in
    the compute dtype.

    Pure, so that a weight channel runs it on the train mesh. Norms and routers stay in float32, as
    they do in training."""

    def narrowed(path: tuple[Any, ...], leaf: Array) -> Array:
        is_wide = leaf.ndim == 1 or path[-1] == jax.tree_util.DictKey(ROUTER)
        return leaf if is_wide else leaf.astype(compute_dtype)

    return jax.tree.map_with_path(narrowed, policy.unstack(params))


def too_long(engine: DecodeEngine, setting: str) -> Iterator[str]:
    """An engine that decodes further than its policy was made for. Args: setting: which names the
    policy."""
    positions = engine.policy.config.max_position_embeddings
    if engine.max_tokens > positions:
        yield (
            f"engine.max_prompt_tokens + engine.max_new_tokens = {engine.max_tokens} is longer "
            f"than the {positions} positions that {setting} was made for; lower either"
        )


def _as_integers(slots: Shaped[np.ndarray, "S"]) -> Int32[np.ndarray, "S F"]:
    """A copy, which `generate` takes to the devices: an array on a CPU device may share the memory
    of the host's."""
    return slots.view(np.int32).reshape(len(slots), -1).copy()


def _field(slots: Int32[Array, "S F"], name: str) -> Shaped[Array, "S ..."]:
    """A field of every slot, in its own type."""
    dtype, columns = _PLACES[name]
    values = jax.lax.bitcast_convert_type(slots[:, columns], dtype.base)
    return values if dtype.shape else values[:, 0]


def _bits(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _attend_to_view(
    step: Int32[Array, ""], seen: Bool[Array, "S C"], ages: Int32[Array, "S C"], kv_dtype: DTypeLike
) -> Attend:
    """Attend from one new token per slot to the columns `seen`, the token's own among them: column
    `step` of every slot.

    All slots write the same column, so that the write is one slice; `_settle` copies it to its
    place after the dispatch. `ages` counts the tokens from each column to the new one. Layers with
    a window keep what they no longer see, and mask it."""

    def attend(
        q: Float[Array, "S 1 N H"],
        k: Float[Array, "S 1 K H"],
        v: Float[Array, "S 1 K H"],
        cache: tuple[Array, Array],
        window: int | None = None,
    ) -> tuple[Float[Array, "S 1 N H"], tuple[Array, Array]]:
        # The view holds what is read of the pages, also before it is written to them.
        k, v = as_stored(k, kv_dtype), as_stored(v, kv_dtype)
        keys = jax.lax.dynamic_update_slice_in_dim(cache[0], k.transpose(0, 2, 3, 1), step, 3)
        values = jax.lax.dynamic_update_slice_in_dim(cache[1], v.swapaxes(1, 2), step, 2)
        near = seen if window is None else seen & (ages < window)
        return masked_attention(q, keys, values, near[:, None]), (keys, values)

    return attend


def _settle(view: View, position: Int32[Array, "S"], num_steps: int) -> View:
    """Copy the tokens of a dispatch from the first columns to those of their positions.

    A slot that ended may have columns of others' tokens then: nobody reads them any more."""

    def one_slot(
        keys: Float[Array, "K H C"], values: Float[Array, "K C H"], position: Int32[Array, ""]
    ) -> tuple[Float[Array, "K H C"], Float[Array, "K C H"]]:
        return (
            jax.lax.dynamic_update_slice_in_dim(
                keys, keys[:, :, :num_steps], num_steps + position, 2
            ),
            jax.lax.dynamic_update_slice_in_dim(
                values, values[:, :num_steps], num_steps + position, 1
            ),
        )

    return tuple(jax.vmap(one_slot)(keys, values, position) for keys, values in view)


def _insert(
    view: View,
    pages: tuple[Pages, ...],
    table: Int32[Array, "S M"],
    slots: Int32[Array, "S 1"],
    count: Int32[Array, "1"],
    *,
    num_pages: int,
    first: int,
) -> View:
    """Lay the first pages of some slots end to end in their rows of the view, from column `first`
    on."""

    def one_slot(i: Array, view: View) -> View:
        slot = slots[i, 0]
        ids = jax.lax.dynamic_slice_in_dim(table, slot, 1)[:, :num_pages]

        def put(keys: Array, values: Array, layer: Pages) -> tuple[Array, Array]:
            k, v = (
                x.swapaxes(0, 1)[:, :, : values.shape[2] - first]
                for x in read_pages(layer, ids, keys.dtype)
            )
            return (
                jax.lax.dynamic_update_slice(keys, k.swapaxes(2, 3), (slot, 0, 0, first)),
                jax.lax.dynamic_update_slice(values, v, (slot, 0, first, 0)),
            )

        return tuple(put(*layer_view, layer) for layer_view, layer in zip(view, pages, strict=True))

    return jax.lax.fori_loop(0, count[0], one_slot, view)


def _copy_pages(
    pages: tuple[Pages, ...], pairs: Int32[Array, "S 2"], count: Int32[Array, "1"]
) -> tuple[Pages, ...]:
    def one_pair(i: Array, pages: tuple[Pages, ...]) -> tuple[Pages, ...]:
        def put(x: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(x, pairs[i, 0], 1, 1)
            return jax.lax.dynamic_update_slice_in_dim(x, page, pairs[i, 1], 1)

        return jax.tree.map(put, pages)

    return jax.lax.fori_loop(0, count[0], one_pair, pages)


def _attend_keeping(attend: Attend) -> Attend:
    """`attend`, which also returns the keys and values."""

    def attend_and_keep(
        q: Array, k: Array, v: Array, cache: None, window: int | None = None
    ) -> tuple[Array, tuple[Array, Array]]:
        return attend(q, k, v, cache, window)[0], (k, v)

    return attend_and_keep


def _resize(x: Array, wanted: jax.ShapeDtypeStruct) -> Array:
    kept = x[tuple(slice(size) for size in wanted.shape)]
    return jnp.pad(
        kept, [(0, new - old) for new, old in zip(wanted.shape, kept.shape, strict=True)]
    )


def _equal_bits(old: EngineParams, new: EngineParams) -> Bool[Array, ""]:
    def equal(a: Array, b: Array) -> Array:
        # As integers: nan equals itself, and -0 is not 0.
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        return (
            jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits)
        ).all()

    return jnp.stack(jax.tree.leaves(jax.tree.map(equal, old, new))).all()


def _lower(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    result: Any,
    *,
    donate: int | None = None,
) -> jax.stages.Lowered:
    """Lower a function of these shapes; its result lies as `result` does."""
    donated = () if donate is None else (donate,)
    return jax.jit(function, out_shardings=_placed(result), donate_argnums=donated).lower(
        *arguments
    )


def _placed(shapes: Any) -> Any:
    """The sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def _doublings(first: int, most: int) -> list[int]:
    """first, 2 · first, ... up to a last one that holds `most` with little to spare, and is well
    above the one before."""
    unit = max(first, 2 ** (most.bit_length() - 4))
    last = max(math.ceil(most / unit), 1) * unit
    return [*(first << i for i in range(last.bit_length()) if 3 * (first << i) < 2 * last), last]


def _at_least(lengths: Sequence[int], wanted: int) -> int:
    return next(length for length in lengths if length >= wanted)
