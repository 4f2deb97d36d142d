"""Shapes and shardings of the decode programs of one policy on one mesh.

Axes: B rows, T tokens, S slots, F fields of a slot, V vocabulary, M pages of a slot's table.

The file has more than 400 lines because its one class lists every argument and result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from areal_jax.engine.batch import SLOT, TokenMasks
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode_state import DecodeState, EngineParams, Reader, lay_out_params
from areal_jax.engine.drafts import DraftState
from areal_jax.models import lora
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.delta_rule import RecurrentState, state_shapes
from areal_jax.models.moe import ids_dtype
from areal_jax.models.paged_attention import (
    PAGE_AXES,
    Pages,
    choose_paged_kernel,
    stored_head_dim,
)
from areal_jax.models.vision.tower import ImageFeatures
from areal_jax.parallel.sharding import (
    ROLLOUT_RULES,
    abstract,
    bytes_per_device,
    sharding,
    shardings,
    shardings_of,
)

PADDED_TOKENS = 512
"""Most tokens of a prefill call on CPUs that may be mostly padding."""

SHORTEST_PREFILL, SHORTEST_VIEW = 32, 128
"""Smallest lengths for which programs are compiled, in tokens."""

PREFILL_ROWS, PREFILL_TOKENS = 8, 8192
"""Limits of one prefill call per device: enough to fill a device, and little enough for its
memory."""


RECORDED_ROWS = 8
"""Sequences of one call that records their tokens."""

DRAFT = "draft"
"""Name of the draft policy's parameters among those that the programs read."""


class DecodeShapes:
    """Shapes of state, arguments and results, and the lengths for which programs are compiled.

    Slots and pages are sharded over the mesh's data axis, heads over its tensor axis. The class has
    more than 200 lines because it lists the shape of every argument and result.

    Attributes:
        num_shards: Data shards, each with its own pages.
        pages_per_slot: Pages of the longest sequence.
        pages_per_shard: Pages of a data shard.
        view_lengths: Lengths of the view, in positions; empty if attention reads pages.
        insert_lengths: Lengths for which pages are copied into the view, in tokens.
        prefill_lengths: Lengths of prefill chunks at the start of a sequence, in tokens.
        extend_lengths: Lengths of later prefill chunks, in tokens.
        is_unrolled: Whether prefill and scoring run layer by layer, not in a scan.
        params: Shapes and shardings of the parameters that the programs read.
        param_shardings: Shardings of `lay_out_params` (of the adapter, if the policy has one): what
            a weight channel delivers.
        base_shardings: Shardings of the frozen parameters of an adapter.
        adapters: Shapes and shardings of the factors of several adapters, [A, ...]; None without.
        scales: Shape of their scales, [A].
        draft: Shapes of the draft policy, whose pages and view have the same numbers of pages and
            columns; None without one.
    """

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh,
        config: EngineConfig,
        compute_dtype: DTypeLike,
        reader: Reader | None = None,
        num_adapters: int = 0,
        draft: Policy | None = None,
    ):
        """
        Args:
            policy: The policy.
            mesh: Rollout mesh of this engine.
            config: Slots, lengths and KV cache.
            compute_dtype: Data type of activations and matrices.
            reader: Source of keys and values; None: the fastest one for the mesh's devices.
            num_adapters: Adapters of the policy's shape that sequences choose from; 0: the
                parameters have no `AdapterStack`.
            draft: The draft policy of `engine.draft_policy`.

        Raises:
            ValueError: Slots are not divisible by the data shards, no sequence fits into the KV
                cache, or the draft policy cannot propose drafts. The message names the setting.
        """
        _check(policy, draft, config, mesh)
        self.policy, self.mesh, self.config = policy, mesh, config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.kv_dtype = (
            self.compute_dtype if config.kv_dtype == "compute" else jnp.dtype(config.kv_dtype)
        )
        self.reader: Reader = reader or self._fastest_reader()
        # A scan over stacked layers compiles faster, but copies all weights in every prefill: a
        # sixth of its time for 8 x 2048 tokens on an H200. Layers of two kinds are not stacked.
        self.is_unrolled = (
            policy.config.linear is not None or mesh.devices.flat[0].platform != "cpu"
        )
        # The last token is never fed, so it needs no column.
        most = config.max_tokens - 1
        self.num_shards = mesh.shape["data"]
        self.pages_per_slot = math.ceil(most / config.page_tokens)
        self.pages_per_shard = self._pages_per_shard()
        # The drafts of a dispatch may reach beyond the longest sequence.
        beyond = config.tokens_per_dispatch if config.draft_tokens else 0
        self.insert_lengths = doublings(SHORTEST_PREFILL, most + beyond)
        longer = [length for length in self.insert_lengths if length >= SHORTEST_VIEW]
        self.view_lengths = (longer or self.insert_lengths[-1:]) if self.reader == "view" else []
        if config.batch_invariant == "full":
            # XLA has another kernel for products over a longer view, with other bits.
            self.view_lengths = self.view_lengths[-1:]
        self.prefill_lengths = doublings(SHORTEST_PREFILL, min(most, config.prefill_chunk_tokens))
        # They take longer to compile and are rarely long: every second length is enough.
        self.extend_lengths = self.prefill_lengths[::-2][::-1]
        whole = self._engine_params(policy.abstract(), policy.axes())
        trained = (
            self._engine_params(lora.abstract(policy), lora.axes(policy)) if policy.lora else whole
        )
        self.num_adapters = num_adapters
        self.adapters, self.scales = None, self.array((num_adapters,), jnp.float32)
        self.params = lora.attach(policy, whole, trained) if policy.lora else whole
        if num_adapters:
            self.adapters = jax.tree.map(self._stacked, trained)
            self.params = lora.attach_stack(whole, self.adapters, self.scales)
        self.param_shardings = shardings_of(trained)
        self.base_shardings = shardings_of(whole)
        self.draft: DecodeShapes | None = None
        if draft is not None:
            alone = chz.replace(config, draft_policy="", router_replay=False)
            self.draft = DecodeShapes(draft, mesh, alone, compute_dtype, reader)
            self.params = self.params | {DRAFT: self.draft.params}

    def _stacked(self, leaf: Any) -> Any:
        how = NamedSharding(self.mesh, PartitionSpec(None, *leaf.sharding.spec))
        return jax.ShapeDtypeStruct((self.num_adapters, *leaf.shape), leaf.dtype, sharding=how)

    def array(self, shape: tuple[int, ...], dtype: DTypeLike, *axes: str | None) -> Any:
        """Return the shape of an array that is sharded along logical axes."""
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=sharding(self.mesh, axes, shape, ROLLOUT_RULES)
        )

    def pages(self) -> tuple[Pages, ...]:
        """Return the shapes of the KV-cache pages, by layer; last those of the draft policy."""
        model, (num_heads, head_dim) = self.policy.config, self._cached_heads()
        shape = (
            num_heads,
            self.num_shards * self.pages_per_shard,
            self.config.page_tokens,
            stored_head_dim(self.reader, head_dim),
        )
        half = self.array(shape, self.kv_dtype, *PAGE_AXES)
        scales = (
            None
            if self.kv_dtype == self.compute_dtype
            else self.array(shape[:-1], jnp.float32, *PAGE_AXES)
        )
        values = (half, scales) if model.latent is None else (None, None)
        pages = (Pages(half, values[0], scales, values[1]),) * len(model.attention_layers)
        return pages + (() if self.draft is None else self.draft.pages())

    def view(self, length: int) -> Any:
        """Return the shapes of a view of this length, by layer as of `pages`; of an empty one if
        attention reads pages.
        """
        if self.reader != "view":
            return ()
        model, (num_heads, head_dim) = self.policy.config, self._cached_heads()
        columns = self.config.tokens_per_dispatch + length
        shape, axes = (self.config.num_slots, num_heads), ("slots", "kv_heads")
        keys = self.array((*shape, head_dim, columns), self.compute_dtype, *axes)
        values = self.array((*shape, columns, head_dim), self.compute_dtype, *axes)
        view = ((keys, values if model.latent is None else None),) * len(model.attention_layers)
        return view + (() if self.draft is None else self.draft.view(length))

    def split_layers(self, layers: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split pages or a view into those of the policy and those of the draft policy."""
        count = len(self.policy.config.attention_layers)
        return layers[:count], layers[count:]

    def recurrent(self) -> tuple[RecurrentState, ...]:
        """Return the shapes of the states of all slots, by layer with linear attention."""
        linear = self.policy.config.linear
        if linear is None:
            return ()
        shapes = state_shapes(linear, self.config.num_slots, self.compute_dtype)
        # Value heads are on the devices of their key heads.
        axes = ("slots", None, "kv_heads")
        rows, _, heads = sharding(self.mesh, axes, shapes.q.shape, ROLLOUT_RULES).spec
        windows = NamedSharding(self.mesh, PartitionSpec(rows, None, heads))
        memories = NamedSharding(self.mesh, PartitionSpec(rows, heads))
        how = jax.tree.map(lambda leaf: memories if leaf is shapes.memory else windows, shapes)
        return (abstract(shapes, how),) * len(linear.layers)

    def _cached_heads(self) -> tuple[int, int]:
        """Return the number and size of the heads in the KV cache."""
        model = self.policy.config
        if model.latent is not None:
            return 1, model.latent.width
        return model.num_key_value_heads, model.head_dim

    def state(self, view_length: int) -> DecodeState:
        """Return the shapes of a whole state."""
        slots = self.array((self.config.num_slots, SLOT.itemsize // 4), jnp.int32, "slots")
        view, table = self.view(view_length), self.table()
        return DecodeState(self.pages(), view, slots, table, self.recurrent(), self.drafts())

    def drafts(self) -> DraftState | None:
        """Return the shapes of the tokens from which drafts are taken; None without drafts."""
        config = self.config
        if not config.draft_tokens:
            return None
        # With room for the drafts after the last token of the longest sequence.
        shape = config.num_slots, config.max_tokens + 1 + config.draft_tokens
        per_slot = self.array(shape[:1], jnp.int32, "slots")
        unread = None if self.draft is None else per_slot
        return DraftState(self.array(shape, jnp.int32, "slots"), per_slot, unread)

    def recorded(self) -> tuple[Any, Any, Any]:
        """Return the shapes of slots, tokens and prompts of recorded sequences."""
        drafts = self.drafts()
        assert drafts is not None
        rows = self.array((RECORDED_ROWS,), jnp.int32)
        return rows, self.array((RECORDED_ROWS, drafts.history.shape[1]), jnp.int32), rows

    def table(self) -> Any:
        """Return the shape of the page table of all slots."""
        return self.array((self.config.num_slots, self.pages_per_slot), jnp.int32, "slots")

    def shard_lists(self, width: int) -> tuple[Any, Any]:
        """Return the shapes of one list of tuples per data shard, and of their lengths."""
        rows = self.array((self.config.num_slots, width), jnp.int32, "slots")
        return rows, self.array((self.num_shards,), jnp.int32, "slots")

    def masks(self) -> TokenMasks:
        """Return the shapes of the tokens that slots may sample."""
        num_slots, vocab_size = self.config.num_slots, self.policy.config.vocab_size
        bits = self.array((num_slots, -(-vocab_size // 32)), jnp.int32, "slots")
        per_slot = (self.array((num_slots,), each, "slots") for each in (jnp.int32, jnp.bool_))
        return TokenMasks(bits, *per_slot)

    def features(self, rows: int, tokens: int, *axes: str) -> Any:
        """Return the shape of the embeddings of images, and of what is added after layers."""
        vision = self.policy.config.vision
        assert vision is not None
        shape = rows, tokens, 1 + len(vision.deepstack_visual_indexes), vision.out_hidden_size
        return self.array(shape, self.compute_dtype, *axes)

    def images(self, rows: int, tokens: int) -> tuple[Any, ImageFeatures]:
        """Return the shapes of positions and images of a prefill with images."""
        positions = self.array((rows, tokens, 3), jnp.int32, "batch")
        slots = self.array((rows, tokens), jnp.int32, "batch")
        return positions, ImageFeatures(slots, self.features(rows, tokens, "batch"))

    def row_counts(self, length: int) -> list[int]:
        """Return the numbers of rows for which prefill of this length is compiled, ascending."""
        shards = self.mesh.shape["data"]
        most = shards * min(max(PREFILL_TOKENS // length, 1), max(PREFILL_ROWS // shards, 1))
        # Prompts often arrive one by one. What is longer than any prompt is a rebuilt cache, and
        # caches of all slots are rebuilt at once.
        longest = min(self.config.max_prompt_tokens - 1, self.prefill_lengths[-1])
        is_prompt = length <= at_least(self.prefill_lengths, longest)
        return sorted({1, most}) if is_prompt and shards == 1 else [most]

    def prefills_one_by_one(self, length: int) -> bool:
        """Return whether a batch-invariant engine computes chunks of this length in programs of one
        row: padding of short ones costs less than a call does, and accelerators have room for all.
        """
        platform = self.mesh.devices.flat[0].platform
        return platform == "cpu" and self.row_counts(length)[-1] * length > PADDED_TOKENS

    def experts(self, *leading: int) -> tuple[int, ...]:
        """Return the shape of recorded experts, [.., L, k]."""
        moe = self.policy.config.moe
        assert moe is not None
        return (*leading, self.policy.config.num_moe_layers, moe.num_experts_per_tok)

    @property
    def experts_dtype(self) -> type[np.uint8] | type[np.uint16]:
        """Type of recorded experts."""
        moe = self.policy.config.moe
        assert moe is not None
        return ids_dtype(moe.num_experts)

    def kv_bytes(self) -> int:
        """Return the bytes of keys and values on each device: pages, and the longest view; and of
        recurrent states.
        """
        view = self.view(self.view_lengths[-1] if self.view_lengths else 0)
        shapes = self.pages(), view, self.recurrent()
        return bytes_per_device(shapes, shardings_of(shapes))

    def _pages_per_shard(self) -> int:
        config = self.config
        if not config.kv_tokens:
            # One more than the sequences need: the last page of a shared prompt, before others have
            # copied it.
            return config.num_slots // self.num_shards * self.pages_per_slot + 1
        pages = config.kv_tokens // (self.num_shards * config.page_tokens)
        if pages <= self.pages_per_slot:
            least = self.num_shards * (self.pages_per_slot + 1) * config.page_tokens
            raise ValueError(
                f"engine.kv_tokens={config.kv_tokens} holds no sequence of "
                "engine.max_prompt_tokens + engine.max_new_tokens = "
                f"{config.max_tokens}; set engine.kv_tokens to at least {least}, or to 0"
            )
        return pages

    def _fastest_reader(self) -> Reader:
        platform = self.mesh.devices.flat[0].platform
        if platform == "cpu":
            return "view"
        is_latent = self.policy.config.latent is not None
        return choose_paged_kernel(
            platform, self._cached_heads()[1], self.config.page_tokens, is_latent=is_latent
        )

    def layout(self, params: Params) -> EngineParams:
        """Convert parameters to this engine's layout; see `lay_out_params`."""
        return lay_out_params(self.policy, params, self.compute_dtype, self.config.weights_dtype)

    def loaded(self) -> Params:
        """Return the shapes of the policy's parameters as they are loaded, before `layout`."""
        params = self.policy.abstract(self.compute_dtype)
        placed = shardings(self.mesh, self.policy.axes(), params, ROLLOUT_RULES)
        return abstract(params, placed)

    def _engine_params(self, params: Params, axes: Params) -> EngineParams:
        """Return shapes and shardings of `layout`, given shapes and logical axes."""
        shapes = jax.eval_shape(self.layout, params)
        placed = shardings(self.mesh, self.policy.unstack_axes(axes), shapes, ROLLOUT_RULES)
        return abstract(shapes, placed)


def doublings(first: int, most: int) -> list[int]:
    """Return first, 2 · first, ... up to a last one that holds `most` with little to spare and is
    well above the one before.
    """
    unit = max(first, 2 ** (most.bit_length() - 4))
    last = max(math.ceil(most / unit), 1) * unit
    return [*(first << i for i in range(last.bit_length()) if 3 * (first << i) < 2 * last), last]


def next_power_of_two(size: int, least: int) -> int:
    """Return the smallest power of two that is at least `size` and `least`, a power of two."""
    return max(least, 1 << (size - 1).bit_length())


def at_least(lengths: Sequence[int], wanted: int) -> int:
    """Return the first length that is not below `wanted`."""
    return next(length for length in lengths if length >= wanted)


def _check_draft(policy: Policy, draft: Policy, config: EngineConfig) -> None:
    """Require that a policy can propose drafts."""
    named = f"engine.draft_policy={config.draft_policy}"
    for model in (draft.config, policy.config):
        if model.vision is not None:
            raise ValueError(
                f"{named}: {model.architecture} reads images, and drafts of a policy are for text "
                "alone; leave out engine.draft_policy"
            )
    if draft.config.linear is not None:
        raise ValueError(
            f"{named}: {draft.config.architecture} has linear attention, whose state cannot go "
            "back behind a rejected draft; name another policy"
        )
    if draft.config.readout != "CausalLM":
        raise ValueError(
            f"{named} is read out as {draft.config.readout}, expected CausalLM; name another policy"
        )


def _check(policy: Policy, draft: Policy | None, config: EngineConfig, mesh: Mesh) -> None:
    if config.router_replay and policy.config.moe is None:
        raise ValueError(
            f"engine.router_replay=true: {policy.config.architecture} has no experts; set it "
            "to false"
        )
    if config.draft_tokens and policy.config.linear is not None:
        raise ValueError(
            f"engine.draft_tokens={config.draft_tokens}: {policy.config.architecture} has "
            "linear attention, whose state cannot go back behind a rejected draft; set it to 0"
        )
    if config.num_slots % mesh.shape["data"]:
        raise ValueError(
            f"engine.num_slots={config.num_slots} is not divisible by the {mesh.shape['data']} "
            "rollout devices that share the slots; set engine.num_slots to a multiple of "
            f"{mesh.shape['data']}"
        )
    if config.draft_policy and not config.draft_tokens:
        raise ValueError(
            f"engine.draft_policy={config.draft_policy} with engine.draft_tokens=0: it proposes "
            "nothing; set engine.draft_tokens, or leave out engine.draft_policy"
        )
    assert (draft is None) == (not config.draft_policy)
    if draft is not None:
        _check_draft(policy, draft, config)
    if config.batch_invariant != "off" and config.draft_tokens:
        raise ValueError(
            f"engine.draft_tokens={config.draft_tokens} with engine.batch_invariant: how many "
            "drafts are accepted changes what a step computes, and so its bits; set "
            "engine.draft_tokens=0"
        )
    if config.batch_invariant != "off" and config.kv_tokens:
        raise ValueError(
            f"engine.kv_tokens={config.kv_tokens} with engine.batch_invariant: a preempted "
            "sequence is prefilled with its samples, which gives other bits; set engine.kv_tokens=0"
        )
    if config.max_prompt_tokens < 1:
        raise ValueError(
            "expected engine.max_prompt_tokens of at least 1, found "
            f"{config.max_prompt_tokens}; set it"
        )
