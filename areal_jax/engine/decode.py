"""The decode engine: prefill, insert and generate (the JetStream verbs), with weights and state as
arguments.

Keys and values lie in pages (paged attention), which the samples of a prompt share; page tables on
the host say which pages belong to which sequence (`engine/kv_cache`). A prefill fills the pages of
all tokens of a sequence but the last, which the first decode step feeds. So every token is sampled
in `generate`, and rebuilding the KV cache of a partial completion with new weights is the same
prefill.

Where a kernel attends to pages, `generate` reads and writes them. On CPUs it reads a view
(`decode_view.py`) and writes both.

Axes: S slots, T tokens, M pages of a slot's table.

The file has more than 400 lines because its one class prepares the arguments of every program.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Shaped

from areal_jax.engine.batch import (
    MAX_TOP_LOGPROBS,
    DecodeOutput,
    PrefillChunk,
    SamplingMode,
    TokenMasks,
    empty_slots,
)
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode_programs import DecodePrograms
from areal_jax.engine.decode_shapes import (
    DRAFT,
    RECORDED_ROWS,
    DecodeShapes,
    at_least,
    doublings,
    next_power_of_two,
)
from areal_jax.engine.decode_state import (
    CONTINUES,
    STOPPED,
    DecodeState,
    EngineParams,
    Reader,
    encode_slots,
    unpack_experts,
)
from areal_jax.engine.drafts import DraftPolicy
from areal_jax.engine.scoring import Scores
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.vision.image_processor import ImagePatches
from areal_jax.models.vision.image_reader import ImageReader
from areal_jax.models.vision.layout import patch_layout
from areal_jax.models.vision.tower import ImageFeatures
from areal_jax.parallel.compilation import (
    Compiler,
    OnProgram,
    Program,
    compile_lowered,
    compile_programs,
)
from areal_jax.parallel.sharding import bytes_per_device, shardings_of

logger = logging.getLogger(__name__)

SHORTEST_SCORE = 64
"""Tokens of the shortest program that scores tokens."""

SHORTEST_IMAGE = 64
"""Patches of the smallest program that computes the embeddings of an image; others are powers of
two, so that few are compiled."""


class DecodeEngine:
    """Compiled programs for one policy on one mesh; holds no weights and no state.

    A view is as long as the longest running sequence needs, in powers of two, so that short
    sequences stay cheap and few programs are compiled.

    It has more than 200 lines because it is the one interface of the programs: each method prepares
    the arguments of one.
    """

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh,
        config: EngineConfig,
        compute_dtype: DTypeLike,
        reader: Reader | None = None,
        image_reader: ImageReader | None = None,
        compiler: Compiler = compile_lowered,
        num_adapters: int = 0,
        draft: DraftPolicy | None = None,
    ):
        """Arguments and errors as of `DecodeShapes`; `compiler` compiles the programs."""
        self.shapes = shapes = DecodeShapes(
            policy, mesh, config, compute_dtype, reader, num_adapters, draft and draft.policy
        )
        self.draft = draft
        self.programs = DecodePrograms(shapes, compiler)
        self.policy, self.mesh, self.config = policy, mesh, config
        self.compute_dtype, self.kv_dtype = shapes.compute_dtype, shapes.kv_dtype
        self.max_tokens = config.max_tokens
        self.reader: Reader = shapes.reader
        platform = mesh.devices.flat[0].platform
        if self.reader == "plain" and platform != "cpu":
            logger.warning(
                "slow path part=decoding kernel=plain platform=%s head_dim=%d page_tokens=%d "
                "kv_dtype=%s: no kernel of paged attention supports these; that for GPUs needs "
                "a head size that is a multiple of 16 and engine.page_tokens that is a power of "
                "two from 16, that for TPUs multiples of 8 tokens",
                platform,
                policy.config.head_dim,
                config.page_tokens,
                self.kv_dtype.name,
            )
        if config.draft_tokens and platform == "cpu":
            logger.warning(
                "slow path part=drafts platform=cpu draft_tokens=%d: verifying drafts takes longer "
                "on CPUs than the steps that it saves; set engine.draft_tokens=0",
                config.draft_tokens,
            )
        self.image_reader = image_reader
        """Preprocesses images; None: prompts have none."""
        self.num_shards, self.pages_per_slot = shapes.num_shards, shapes.pages_per_slot
        self.pages_per_shard = shapes.pages_per_shard
        self.param_shardings, self.base_shardings = shapes.param_shardings, shapes.base_shardings
        self.warm: SamplingMode | None = None
        """Most expensive mode for which every program is compiled; None: each program is compiled
        at its first use."""
        self.warm_masked = False
        """Whether the programs for grammars are compiled for these modes, too."""

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Ends of the verbs of prefills."""
        return ("",) if self.image_reader is None else ("", "_images")

    @property
    def image_lengths(self) -> Sequence[int]:
        """Patches to which images are padded, up to what the longest prompt has room for."""
        if self.image_reader is None:
            return ()
        vision, processor = self.image_reader.vision, self.image_reader.processor
        most = min(
            self.max_tokens * vision.merged_patches, processor.max_pixels // vision.patch_size**2
        )
        return doublings(SHORTEST_IMAGE, next_power_of_two(most, SHORTEST_IMAGE))

    @property
    def num_programs(self) -> int:
        """Number of programs compiled so far; constant once warm."""
        return len(self.programs.compiled)

    @property
    def compile_s(self) -> float:
        """Time spent on compiling so far, in seconds."""
        return self.programs.compile_s

    def layout(self, params: Params) -> EngineParams:
        """Convert parameters to this engine's layout; see `lay_out_params`."""
        return self.shapes.layout(params)

    def kv_bytes(self) -> int:
        """Return the bytes of keys and values on each device."""
        return self.shapes.kv_bytes()

    def draft_bytes(self) -> int:
        """Return the bytes of the draft policy's weights on each device; 0 without one."""
        draft = self.shapes.draft
        return 0 if draft is None else bytes_per_device(draft.params, draft.param_shardings)

    def load_draft(self) -> EngineParams:
        """Load what programs read beside the policy's parameters: those of the draft policy, if
        there is one.
        """
        draft, shapes = self.draft, self.shapes.draft
        if draft is None or shapes is None:
            return {}
        loaded = draft.load(shardings_of(shapes.loaded()))
        return {DRAFT: self.programs.get("lay_out_draft")(loaded)}

    def warm_up(
        self, most: SamplingMode = SamplingMode.PLAIN, on_program: OnProgram | None = None
    ) -> float:
        """Compile every program that requests within the configured limits can need.

        Without it each program is compiled at its first use, as are sampling modes beyond `most`
        and the settings.

        Returns:
            Compile time, in seconds.
        """
        before_s = self.compile_s
        compile_programs(self.list_programs(most), on_program)
        self.warm = self._least_mode(most)
        return self.compile_s - before_s

    def list_programs(self, most: SamplingMode = SamplingMode.PLAIN) -> list[Program]:
        """Return all programs of `warm_up`, named by verb and shape; of each verb the largest is
        the last.
        """
        return [
            (" ".join(map(str, key)), partial(self.programs.get, *key))
            for key in self._keys(self._least_mode(most))
        ]

    def _least_mode(self, most: SamplingMode) -> SamplingMode:
        """Return the most expensive of `most` and the mode that the settings need."""
        filters = self.config.top_k > 0 or self.config.top_p < 1
        return SamplingMode(max(most, SamplingMode.FILTERED if filters else SamplingMode.PLAIN))

    def _keys(self, most: int) -> Iterator[tuple[str, *tuple[int, ...]]]:
        """Yield verb and shape of all programs of the sampling modes up to `most`."""
        shapes = self.shapes
        same = "same_adapters" if self.shapes.num_adapters else "same_weights"
        yield from (("init",), (same,), ("copy",))
        if self.policy.config.linear is not None:
            yield ("copy_states",)
        if self.config.draft_tokens:
            yield ("record",)
        if self.draft is not None:
            yield ("lay_out_draft",)
        for length, following in pairwise(shapes.view_lengths):
            yield "resize", length, following
            yield "resize", following, length
        for length, tokens in product(shapes.view_lengths, shapes.insert_lengths):
            if tokens <= length:
                yield "insert", tokens, length
        for length, mode in product(shapes.view_lengths or [0], range(most + 1)):
            yield "generate", length, mode
        for tokens in shapes.prefill_lengths:
            for rows in shapes.row_counts(tokens):
                yield from ((f"prefill{images}", rows, tokens) for images in self._kinds)
        for tokens in shapes.extend_lengths:
            rows = shapes.row_counts(tokens)[-1]
            yield from ((f"extend{images}", rows, tokens) for images in self._kinds)
        yield from (("encode", patches) for patches in self.image_lengths)
        if self.image_reader is not None:
            yield ("same_tower",)

    def is_warm(self, mode: SamplingMode, *, masked: bool) -> bool:
        """Return whether no program of a mode, and with `masked` for grammars, must be compiled
        before its first use.
        """
        if self.warm is None:
            return True
        return mode <= self.warm and (self.warm_masked or not masked)

    def warm_up_mode(
        self, mode: SamplingMode, is_stopped: Callable[[], bool], *, masked: bool = False
    ) -> None:
        """Compile what `mode` needs beyond `warm`, while another thread runs compiled programs.

        Args:
            mode: The mode.
            is_stopped: Asked before each program; if true, the rest is not compiled.
            masked: Whether to compile the programs for grammars. Once they are, those of later
                modes are compiled too: all slots decode in one program.
        """
        assert self.warm is not None
        lengths, mode = self.shapes.view_lengths or [0], max(self.warm, mode)
        masked = masked or self.warm_masked
        keys = [("generate", *each) for each in product(lengths, range(self.warm + 1, mode + 1))]
        if masked:
            first = self.warm + 1 if self.warm_masked else 0
            keys += [
                ("generate_masked", *each) for each in product(lengths, range(first, mode + 1))
            ]
        for key in keys:
            if is_stopped():
                return
            self.programs.get(*key)
        self.warm, self.warm_masked = mode, masked

    def init_state(self) -> DecodeState:
        """Allocate the pages that `kv_cache` hands out, empty slots and the shortest view."""
        table = np.zeros((self.config.num_slots, self.pages_per_slot), np.int32)
        pages, view, recurrent, drafts = self.programs.get("init")()
        slots = encode_slots(empty_slots(self.config.num_slots))
        return DecodeState(pages, view, slots, table, recurrent, drafts)

    def assign_slot(self, state: DecodeState, slots: Shaped[np.ndarray, "S"]) -> DecodeState:
        """Replace the `SLOT` records."""
        return state._replace(slots=encode_slots(slots))

    def point(self, state: DecodeState, table: Int32[np.ndarray, "S M"]) -> DecodeState:
        """Replace the page table."""
        # A copy, because an array on a CPU device may share memory with the host's.
        return state._replace(table=table.copy())

    def fit(self, state: DecodeState, num_columns: int) -> DecodeState:
        """Resize the view to the smallest length that holds `num_columns` positions."""
        if self.reader != "view":
            return state
        lengths = self.shapes.view_lengths
        length, wanted = self._view_length(state), at_least(lengths, num_columns)
        view = state.view
        while length != wanted:
            # From each length to the next one, so that there are few programs.
            following = lengths[lengths.index(length) + (1 if length < wanted else -1)]
            view, length = self.programs.get("resize", length, following)(view), following
        return state._replace(view=view)

    def prefill(
        self,
        params: EngineParams,
        state: DecodeState,
        chunks: Sequence[PrefillChunk],
        on_experts: Callable[[PrefillChunk, Shaped[np.ndarray, "T L k"]], None] | None = None,
    ) -> DecodeState:
        """Compute keys and values of the tokens of all chunks; `state` is consumed.

        Args:
            params: Weights.
            state: State.
            chunks: Chunks, none of which attends to another.
            on_experts: Called with the experts of each chunk's tokens, with
                `engine.router_replay`; it waits for the device.
        """
        shapes = self.shapes
        waiting: dict[tuple[str, int], list[list[PrefillChunk]]] = {}
        for chunk in chunks:
            verb, lengths = (
                ("extend", shapes.extend_lengths)
                if chunk.start
                else ("prefill", shapes.prefill_lengths)
            )
            if chunk.images is not None:
                verb += "_images"
            by_shard = waiting.setdefault(
                (verb, at_least(lengths, len(chunk.tokens))), [[] for _ in range(self.num_shards)]
            )
            by_shard[chunk.shard].append(chunk)
        kept = state.pages, state.recurrent
        for (verb, length), by_shard in waiting.items():
            while (most := max(map(len, by_shard))) > 0:
                counts = shapes.row_counts(length)
                if self.config.batch_invariant != "off":
                    rows = counts[0] if shapes.prefills_one_by_one(length) else counts[-1]
                else:
                    # A few are cheaper one by one than in a batch that is mostly padding.
                    is_few = 2 * most * self.num_shards <= counts[-1]
                    rows = counts[0] if is_few and verb.startswith("prefill") else counts[-1]
                each = rows // self.num_shards
                now = [shard[:each] for shard in by_shard]
                batch = self._prefill_batch(now, each, length)
                if verb.endswith("_images"):
                    batch += self._image_batch(now, each, length)
                kept, experts = self.programs.get(verb, rows, length)(params, kept, *batch)
                if on_experts is not None and experts is not None:
                    host = np.asarray(experts)
                    for shard, chunks in enumerate(now):
                        for row, chunk in enumerate(chunks, shard * each):
                            on_experts(chunk, host[row, : len(chunk.tokens)])
                by_shard = [shard[each:] for shard in by_shard]
        return state._replace(pages=kept[0], recurrent=kept[1])

    def score_tokens(self, num_tokens: int) -> int:
        """Return the length of the program that scores this many tokens."""
        return at_least(doublings(SHORTEST_SCORE, self.max_tokens), num_tokens)

    def score(self, params: EngineParams, tokens: Int32[np.ndarray, "N"]) -> Scores:
        """Compute the log-probs of tokens given those before; the scores are in the first row."""
        shape = self.num_shards, self.score_tokens(len(tokens))
        rows, counts = np.zeros(shape, np.int32), np.zeros(shape[:1], np.int32)
        rows[0, : len(tokens)], counts[0] = tokens, len(tokens)
        return self.programs.get("score", shape[1])(params, rows, counts)

    def copy(self, state: DecodeState, pairs: Sequence[Sequence[tuple[int, int]]]) -> DecodeState:
        """Copy pages; `state` is consumed.

        Args:
            state: State.
            pairs: (from, to), by data shard.
        """
        table, counts = self._by_shard(pairs, 2)
        if not counts.any():
            return state
        return state._replace(pages=self.programs.get("copy")(state.pages, table, counts))

    def copy_states(
        self, state: DecodeState, pairs: Sequence[Sequence[tuple[int, int]]]
    ) -> DecodeState:
        """Copy recurrent states; `state` is consumed.

        Args:
            state: State.
            pairs: (from, to), by data shard: slots, numbered within it.
        """
        table, counts = self._by_shard(pairs, 2)
        if not state.recurrent or not counts.any():
            return state
        copied = self.programs.get("copy_states")(state.recurrent, table, counts)
        return state._replace(recurrent=copied)

    def record(
        self, state: DecodeState, sequences: Mapping[int, tuple[Int32[np.ndarray, "_"], int]]
    ) -> DecodeState:
        """Record the sequences that start in slots, for their drafts; `state` is consumed.

        Args:
            state: State, of an engine with drafts.
            sequences: Tokens so far, and a checksum of the prompt, by slot.
        """
        drafts, items = state.drafts, list(sequences.items())
        for first in range(0, len(items), RECORDED_ROWS):
            slots, tokens, prompts = (np.zeros(x.shape, x.dtype) for x in self.shapes.recorded())
            slots[:] = self.config.num_slots
            for row, (slot, (sequence, prompt)) in enumerate(items[first : first + RECORDED_ROWS]):
                slots[row], prompts[row], tokens[row, : len(sequence)] = slot, prompt, sequence
            drafts = self.programs.get("record")(drafts, slots, tokens, prompts)
        return state._replace(drafts=drafts)

    def insert(self, state: DecodeState, columns: Mapping[int, int]) -> DecodeState:
        """Copy tokens from pages to the view, so that slots can continue after them.

        Args:
            state: State.
            columns: Number of tokens by slot.
        """
        if self.reader != "view":
            return state
        length, by_length = self._view_length(state), dict[int, list[int]]()
        for slot, count in columns.items():
            if count:
                tokens = min(at_least(self.shapes.insert_lengths, count), length)
                by_length.setdefault(tokens, []).append(slot)
        view, per_shard = state.view, self.config.num_slots // self.num_shards
        for tokens, slots in by_length.items():
            lists = [
                [(slot % per_shard,) for slot in slots if slot // per_shard == shard]
                for shard in range(self.num_shards)
            ]
            view = self.programs.get("insert", tokens, length)(
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
        masks: TokenMasks | None = None,
    ) -> tuple[DecodeState, Int32[Array, "m S"]]:
        """Sample up to `tokens_per_dispatch` tokens in every active slot; `state` is consumed.

        Args:
            params: Weights.
            state: State.
            mode: Most expensive mode that a slot needs.
            sequences: In mode SHAPED, the tokens so far of slots with penalties, up to
                `max_tokens`; -1 elsewhere.
            masks: Tokens that slots may sample; None: no slot has a grammar.

        Returns:
            The next state, and the output for `fetch`.
        """
        verb = "generate" if masks is None else "generate_masked"
        program = self.programs.get(verb, self._view_length(state), mode)
        return program(params, state, sequences, masks)

    def fetch(self, packed: Int32[Array, "m S"]) -> DecodeOutput:
        """Wait for the output of a dispatch: one transfer from device to host."""
        host, steps = np.asarray(packed), self.config.tokens_per_dispatch
        num_rows = 2 * steps + (5 if self.config.draft_tokens else 3)
        counts, status, last, *drafts = host[2 * steps : num_rows]
        top_logprobs, experts = None, None
        if self.config.router_replay:
            shape = self.shapes.experts(steps, host.shape[1])
            num_words = steps * -(
                -math.prod(shape[2:]) * np.dtype(self.shapes.experts_dtype).itemsize // 4
            )
            experts = unpack_experts(host[-num_words:], shape, self.shapes.experts_dtype)
            host = host[:-num_words]
        if len(host) > num_rows:
            others, others_logp = host[num_rows:].reshape(2, steps, MAX_TOP_LOGPROBS, -1)
            top_logprobs = others, others_logp.view(np.float32)
        return DecodeOutput(
            host[:steps],
            host[steps : 2 * steps].view(np.float32),
            counts,
            status == CONTINUES,
            status == STOPPED,
            last,
            top_logprobs,
            experts,
            (drafts[0], drafts[1]) if drafts else None,
        )

    def same_weights(self, old: EngineParams, new: EngineParams) -> bool:
        """Return whether two sets of weights are equal bit for bit, compared on the devices."""
        return bool(self.programs.get("same_weights")(old, new))

    def changed_adapters(self, old: EngineParams, new: EngineParams) -> list[int] | None:
        """Return the adapters that differ between two sets of weights; without adapters none if all
        weights are equal, else None.
        """
        if not self.shapes.num_adapters:
            return [] if self.same_weights(old, new) else None
        is_same = np.asarray(self.programs.get("same_adapters")(old, new))
        return np.flatnonzero(~is_same).tolist()

    def _view_length(self, state: DecodeState) -> int:
        return state.view[0][0].shape[3] - self.config.tokens_per_dispatch if state.view else 0

    def _prefill_batch(
        self, by_shard: Sequence[Sequence[PrefillChunk]], rows_per_shard: int, length: int
    ) -> tuple[np.ndarray, ...]:
        """Return tokens, page table, starts, counts and slots of a prefill call, and adapters if
        there are several.
        """
        rows = rows_per_shard * self.num_shards
        tokens = np.zeros((rows, length), np.int32)
        table = np.zeros((rows, self.pages_per_slot), np.int32)
        starts, counts = np.zeros((2, rows), np.int32)
        # Beyond the last slot of a shard where there is no chunk.
        per_shard = self.config.num_slots // self.num_shards
        slots = np.full(rows, per_shard, np.int32)
        adapters = np.zeros(rows, np.int32)
        for shard, chunks in enumerate(by_shard):
            for row, chunk in enumerate(chunks, shard * rows_per_shard):
                tokens[row, : len(chunk.tokens)] = np.maximum(chunk.tokens, 0)
                table[row, : len(chunk.pages)] = chunk.pages
                starts[row], counts[row] = chunk.start, len(chunk.tokens)
                slots[row] = per_shard if chunk.slot is None else chunk.slot % per_shard
                adapters[row] = chunk.adapter
        several = (adapters,) if self.shapes.num_adapters else ()
        return tokens, table, starts, counts, slots, *several

    def _image_batch(
        self, by_shard: Sequence[Sequence[PrefillChunk]], rows_per_shard: int, length: int
    ) -> tuple[np.ndarray, ImageFeatures]:
        """Return positions and images of a prefill call."""
        rows = rows_per_shard * self.num_shards
        shape = self.shapes.features(rows, length)
        features = np.zeros(shape.shape, shape.dtype)
        positions, slots = np.zeros((rows, length, 3), np.int32), np.zeros((rows, length), np.int32)
        for shard, chunks in enumerate(by_shard):
            for row, chunk in enumerate(chunks, shard * rows_per_shard):
                assert chunk.images is not None
                positions[row, : len(chunk.tokens)] = chunk.images.positions
                if chunk.images.features is not None:
                    is_image = chunk.tokens < 0
                    slots[row, : len(is_image)] = np.cumsum(is_image) * is_image
                    features[row, : int(is_image.sum())] = chunk.images.features
        return positions, ImageFeatures(slots, features)

    def encode(self, params: EngineParams, image: ImagePatches) -> Shaped[np.ndarray, "N K E"]:
        """Compute the embeddings of an image, and what is added after the first layers.

        Args:
            params: Weights.
            image: A preprocessed image.
        """
        vision = self.policy.config.vision
        assert vision is not None
        count = len(image.patches)
        length = next_power_of_two(count, SHORTEST_IMAGE)
        patches = np.zeros((1, length, vision.patch_width), np.float32)
        layout = np.zeros((1, length, 5), np.int32)
        patches[0, :count] = image.patches
        layout[0, :count] = patch_layout([image.grid], vision.spatial_merge_size)
        features = np.asarray(self.programs.get("encode", length)(params, patches, layout))
        return features[0, : count // vision.merged_patches]

    def same_tower(self, old: EngineParams, new: EngineParams) -> bool:
        """Return whether two sets of weights have the same vision tower, bit for bit."""
        return bool(self.programs.get("same_tower")(old["vision"], new["vision"]))

    def _by_shard(
        self, lists: Sequence[Sequence[tuple[int, ...]]], width: int
    ) -> tuple[Int32[np.ndarray, "S W"], Int32[np.ndarray, "_"]]:
        """Return a list per data shard, with at most as many tuples as it has slots, as one array,
        and their lengths.
        """
        array = np.zeros(
            (self.num_shards, self.config.num_slots // self.num_shards, width), np.int32
        )
        for rows, entries in zip(array, lists, strict=True):
            rows[: len(entries)] = entries or 0
        return array.reshape(-1, width), np.array([len(entries) for entries in lists], np.int32)


def find_too_long(engine: DecodeEngine, setting: str) -> Iterator[str]:
    """Yield a message if the engine decodes further than the position embeddings of the policy, or
    of its draft policy, reach.

    Args:
        engine: The engine.
        setting: Setting that names the policy, for the message.
    """
    named = [(engine.policy.config, setting)]
    if engine.draft is not None:
        draft = f"engine.draft_policy={engine.config.draft_policy}"
        named.append((engine.draft.policy.config, draft))
    for model, name in named:
        positions = model.max_positions
        hint = ", or set policy.long_rope=true" if positions < model.max_position_embeddings else ""
        if engine.max_tokens > positions:
            yield (
                f"engine.max_prompt_tokens + engine.max_new_tokens = {engine.max_tokens} is longer "
                f"than the {positions} positions of {name}; lower either{hint}"
            )
