"""One dispatch of decoding: up to `tokens_per_dispatch` tokens for every active slot.

`drafted_step.py` has the steps with drafts.

Axes: S slots, F fields of a slot, C columns of the view, D width, V vocabulary, T tokens, U tokens
that a step feeds, n `engine.tokens_per_dispatch` or, of one step with drafts, U, A top logprobs.

The file has more than 400 lines because all parts of a step read the constants of its one class.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from areal_jax.engine import sampling
from areal_jax.engine.batch import MAX_TOP_LOGPROBS, SamplingMode, TokenMasks
from areal_jax.engine.decode_shapes import DecodeShapes
from areal_jax.engine.decode_state import (
    CONTINUES,
    FIELDS,
    STOPPED,
    DecodeState,
    EngineParams,
    View,
    as_bits,
    join_caches,
    pack_experts,
    read_field,
    split_caches,
)
from areal_jax.engine.decode_view import attend_to_view, settle
from areal_jax.engine.prefill import recorded_experts, write_pages
from areal_jax.models.decoder import Attend
from areal_jax.models.delta_rule import RecurrentState, sharded_recurrence
from areal_jax.models.moe import sharded_experts
from areal_jax.models.paged_attention import Pages, paged_attention
from areal_jax.parallel.sharding import ROLLOUT_RULES, sharding


def generate(
    shapes: DecodeShapes,
    mode: SamplingMode,
    params: EngineParams,
    state: DecodeState,
    sequences: Int32[Array, "S T"] | None = None,
    masks: TokenMasks | None = None,
) -> tuple[DecodeState, Int32[Array, "m S"]]:
    """Sample tokens, and return the next state and the output as one integer array.

    Args:
        shapes: Policy, mesh and sizes.
        mode: Processing of logits before sampling.
        params: Weights.
        state: State before the dispatch.
        sequences: In mode SHAPED, the tokens so far of slots with penalties; -1 elsewhere.
        masks: Tokens that slots may sample; None: all.
    """
    return Dispatch(shapes, mode, params, state, sequences, masks).run()


class Step(NamedTuple):
    """State between two decode steps of a dispatch."""

    cache: Any
    """View or pages: what attention reads; and recurrent states."""
    token: Int32[Array, "S"]
    active: Bool[Array, "S"]
    remaining: Int32[Array, "S"]
    stopped: Bool[Array, "S"]
    """Whether the last token is one of the slot's stop tokens."""
    tokens: Int32[Array, "n S"]
    logp: Float32[Array, "n S"]
    token_counts: Int32[Array, "S _"]
    """Number of occurrences of each token in each slot's completion; no column without
    penalties."""
    top_logprobs: tuple[Int32[Array, "n A S"], Float32[Array, "n A S"]]
    """Most likely tokens and their log-probs; empty in cheaper modes."""
    experts: Shaped[Array, "n S L k"] | None
    """Experts of the input of each token, if they are recorded."""


class Dispatch:
    """A dispatch during tracing: the constants of its steps, and the step.

    The class has more than 200 lines because all parts of a step read these constants.
    """

    def __init__(
        self,
        shapes: DecodeShapes,
        mode: SamplingMode,
        params: EngineParams,
        state: DecodeState,
        sequences: Int32[Array, "S T"] | None,
        masks: TokenMasks | None,
    ):
        self._shapes, self._mode, self._params, self._state = shapes, mode, params, state
        self.num_tokens = shapes.config.tokens_per_dispatch
        self._reads_view = shapes.reader == "view"
        self.position = self.field("position")
        self.rope_position = self.position
        if shapes.policy.config.vision is not None:
            self.rope_position = self.position + self.field("rope_offset")
        self._temperature = self.field("temperature")
        self.slot_tokens, self._allowed, self._unmasked = None, None, None
        if masks is not None:
            self.slot_tokens, self._unmasked = masks.num_tokens, masks.unmasked
            self._allowed = sampling.unpack_bits(masks.bits, shapes.policy.config.vocab_size)
        self._stop_tokens = self.field("stop_tokens")
        self._in_prompt, self._num_top_logprobs = None, 0
        self._initial_counts = jnp.zeros((len(self.position), 0), jnp.int32)
        if sequences is not None:
            is_prompt = jnp.arange(sequences.shape[1]) < self.field("num_prompt_tokens")[:, None]
            size, self._num_top_logprobs = shapes.policy.config.vocab_size, MAX_TOP_LOGPROBS
            self._in_prompt = sampling.count_tokens(jnp.where(is_prompt, sequences, -1), size) > 0
            self._initial_counts = sampling.count_tokens(jnp.where(is_prompt, -1, sequences), size)
        self._head = shapes.policy.head(params)
        self.steps = jnp.arange(self.num_tokens, dtype=jnp.int32)
        columns = jnp.arange(
            state.view[0][0].shape[3] - self.num_tokens if state.view else 0, dtype=jnp.int32
        )
        self.past = columns < self.position[:, None]
        # Position in its sequence of the token in each column.
        self.positions = jnp.concatenate(
            [
                self.position[:, None] + self.steps,
                jnp.broadcast_to(columns, self.past.shape),
            ],
            axis=1,
        )
        self._uniforms = sampling.uniforms(
            self.field("seed"), self.field("sample"), self.position[:, None] + 1 + self.steps
        )

    def run(self) -> tuple[DecodeState, Int32[Array, "m S"]]:
        """Run all steps."""
        started, remaining = self.field("active") > 0, self.field("remaining")
        first = self.first_step(started, remaining)
        # No step without an active slot: a dispatch in which all have ended costs almost nothing.
        most = remaining
        if self.slot_tokens is not None:
            most = jnp.minimum(remaining, self.slot_tokens)
        most = jnp.minimum(self.num_tokens, jnp.max(most * started))
        return self.finish(jax.lax.fori_loop(0, most, self._step, first), started)

    def field(self, name: str) -> Shaped[Array, "S ..."]:
        return read_field(self._state.slots, name)

    def cache(self) -> Any:
        """Return what attention reads before the first step, and recurrent states."""
        attended = self._state.view if self._reads_view else self._state.pages
        return join_caches(self._shapes.policy.config, attended, self._state.recurrent)

    def first_step(self, started: Bool[Array, "S"], remaining: Int32[Array, "S"]) -> Step:
        tokens = jnp.full((self.num_tokens, len(started)), -1, jnp.int32)
        logp = jnp.zeros((self.num_tokens, len(started)), jnp.float32)
        shape = self.num_tokens, self._num_top_logprobs, len(started)
        return Step(
            self.cache(),
            self.field("token"),
            started,
            remaining,
            jnp.zeros_like(started),
            tokens,
            logp,
            self._initial_counts,
            (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)),
            jnp.zeros(shapes.experts(*tokens.shape), shapes.experts_dtype)
            if (shapes := self._shapes).config.router_replay
            else None,
        )

    def _step(self, i: Int32[Array, ""], carry: Step) -> Step:
        active, ids = carry.active, carry.experts
        # Slots that sample in this step. Those with a grammar wait from the second one on.
        samples = active if self.slot_tokens is None else active & (i < self.slot_tokens)
        hidden, cache, used = self.feed(
            carry.cache,
            carry.token[:, None],
            (self.rope_position + i)[:, None],
            self._attention(i, samples),
            samples.astype(jnp.int32),
        )
        if ids is not None:
            assert used is not None
            ids = ids.at[i].set(used[:, 0])
        fed = carry._replace(cache=cache, experts=ids)
        chosen = self.choose(i, self.logits(hidden[:, 0]), fed.token_counts)
        return self.advance(i, fed, chosen, samples)

    def feed(
        self,
        cache: Any,
        tokens: Int32[Array, "S U"],
        positions: Int32[Array, "S U"],
        attend: Attend,
        counts: Int32[Array, "S"],
    ) -> tuple[Float[Array, "S U D"], Any, Shaped[Array, "S U L k"] | None]:
        """Return hidden states and caches after the tokens, and their experts if recorded."""
        is_recorded = self._shapes.config.router_replay
        hidden, cache, routing = self._shapes.policy.hidden(
            self._params,
            tokens,
            positions,
            attend,
            cache,
            compute_dtype=self._shapes.compute_dtype,
            unroll=True,
            experts=sharded_experts(self._shapes.mesh, ROLLOUT_RULES),
            recur=sharded_recurrence(self._shapes.mesh, ROLLOUT_RULES),
            num_tokens=counts,
            records_experts=is_recorded,
            absorbs=True,
        )
        return hidden, cache, recorded_experts(routing) if is_recorded else None

    def choose(
        self,
        i: Int32[Array, "..."],
        logits: Float32[Array, "S V"],
        token_counts: Int32[Array, "S _"],
    ) -> tuple[Int32[Array, "S"], Float32[Array, "S"], Float32[Array, "S V"]]:
        """Sample a token for every slot.

        Args:
            i: Tokens that the dispatch has sampled before, of all slots or of each.
            logits: Logits of the token.
            token_counts: Number of occurrences of each token before it.

        Returns:
            Tokens, their log-probs, and the processed logits.
        """
        processed = self._process(i, logits, token_counts)
        uniform = (
            self._uniforms[:, i]
            if i.ndim == 0
            else jnp.take_along_axis(self._uniforms, i[:, None], axis=1)[:, 0]
        )
        tokens, logp = sampling.sample_tokens(processed, uniform, self._temperature)
        if self._unmasked is not None:
            among_all = sampling.logprobs_among_all(logits, self._temperature, tokens)
            logp = jnp.where(self._unmasked, among_all, logp)
        return tokens, logp, processed

    def advance(
        self,
        row: Int32[Array, ""],
        carry: Step,
        chosen: tuple[Int32[Array, "S"], Float32[Array, "S"], Float32[Array, "S V"]],
        samples: Bool[Array, "S"],
    ) -> Step:
        """Append what `choose` returned to some slots, as row `row` of the output."""
        _, token, active, remaining, _, tokens, logps, token_counts, top_logprobs, _ = carry
        sampled, logp, logits = chosen
        if self._in_prompt is not None:
            token_counts = token_counts.at[jnp.arange(len(sampled)), sampled].add(samples)
            likely, likely_logp = self.most_likely(logits)
            top_logprobs = (
                top_logprobs[0].at[row].set(likely),
                top_logprobs[1].at[row].set(likely_logp),
            )
        # A slot that has ended or waits is fed its last token again, and samples nothing.
        token = jnp.where(samples, sampled, token)
        remaining = remaining - samples
        stopped = self.is_stop(token)
        continues = active & ~stopped & (remaining > 0)
        return Step(
            carry.cache,
            token,
            continues,
            remaining,
            stopped,
            tokens.at[row].set(jnp.where(samples, sampled, -1)),
            logps.at[row].set(jnp.where(samples, logp, 0)),
            token_counts,
            top_logprobs,
            carry.experts,
        )

    def most_likely(
        self, logits: Float32[Array, "S V"]
    ) -> tuple[Int32[Array, "A S"], Float32[Array, "A S"]]:
        """Return the most likely tokens and their log-probs, given processed logits."""
        tokens, logp = sampling.most_likely(logits, self._temperature, self._num_top_logprobs)
        return tokens.T, logp.T

    def is_stop(self, tokens: Int32[Array, "... S"]) -> Bool[Array, "... S"]:
        """Return whether tokens are stop tokens of their slots."""
        return (tokens[..., None] == self._stop_tokens).any(-1)

    def _attention(self, i: Int32[Array, ""], active: Bool[Array, "S"]) -> Attend:
        """Return the attention of step `i` to the view or to the pages."""
        reader = self._shapes.reader
        if reader == "view":
            fresh = jnp.broadcast_to(self.steps <= i, (self.past.shape[0], self.num_tokens))
            return attend_to_view(
                i,
                jnp.concatenate([fresh, self.past], axis=1),
                (self.position + i)[:, None] - self.positions,
                self._shapes.kv_dtype,
            )
        # A slot that samples nothing writes nothing, and reads almost nothing.
        starts = jnp.where(active, self.position + i, 0)
        return paged_attention(
            self._state.table,
            starts,
            active.astype(jnp.int32),
            reader,
            self._shapes.mesh,
            ROLLOUT_RULES,
        )

    def attend_to_block(
        self, starts: Int32[Array, "S"], width: int, counts: Int32[Array, "S"]
    ) -> Attend:
        """Return the attention of several tokens of each slot to the view or to the pages.

        Args:
            starts: Number of tokens from the slot's position to the first one.
            width: Number of tokens.
            counts: Tokens of each slot that are kept: its first ones.
        """
        reader = self._shapes.reader
        if reader == "view":
            ahead = starts[:, None] + jnp.arange(width, dtype=jnp.int32)
            fresh = self.steps <= ahead[:, :, None]
            past = jnp.broadcast_to(self.past[:, None], (*ahead.shape, self.past.shape[1]))
            positions = (self.position[:, None] + ahead)[:, :, None]
            ages = positions - self.positions[:, None]
            seen = jnp.concatenate([fresh, past], axis=2)
            return attend_to_view(starts, seen, ages, self._shapes.kv_dtype)
        # A slot that samples nothing writes nothing, and reads almost nothing.
        first = jnp.where(counts > 0, self.position + starts, 0)
        mesh = self._shapes.mesh
        return paged_attention(self._state.table, first, counts, reader, mesh, ROLLOUT_RULES)

    def logits(self, hidden: Float[Array, "S D"]) -> Float32[Array, "S V"]:
        logits = jnp.matmul(hidden, self._head, preferred_element_type=jnp.float32)
        # Each tensor shard computes its part of the vocabulary. Sampling reads the whole, whatever
        # the mesh.
        for axes in (("slots", "vocab"), ("slots", None)):
            how = sharding(self._shapes.mesh, axes, logits.shape, ROLLOUT_RULES)
            logits = jax.lax.with_sharding_constraint(logits, how)
        return logits

    def _process(
        self,
        i: Int32[Array, "..."],
        logits: Float32[Array, "S V"],
        token_counts: Int32[Array, "S _"],
    ) -> Float32[Array, "S V"]:
        """Apply masks, penalties, forbidden stop tokens and filters, as the mode asks."""
        field = self.field
        if self._allowed is not None:
            logits = jnp.where(self._allowed, logits, -jnp.inf)
        if self._in_prompt is not None:
            penalties = (
                field(f"{name}_penalty") for name in ("presence", "frequency", "repetition")
            )
            logits = sampling.penalize(logits, self._in_prompt, token_counts, *penalties)
            logits = sampling.forbid(
                logits, self._stop_tokens, self.position + 1 + i < field("stops_from")
            )
        if self._mode >= SamplingMode.FILTERED:
            logits = sampling.keep_most_likely(
                logits, self._temperature, field("top_k"), field("top_p"), field("min_p")
            )
        return logits

    def finish(
        self, last: Step, started: Bool[Array, "S"]
    ) -> tuple[DecodeState, Int32[Array, "m S"]]:
        """Return the next state and the packed output."""
        state = self._state
        cache, token, active, remaining, stopped, tokens, logp, _, others, ids = last
        status = jnp.where(active, CONTINUES, jnp.where(started & stopped, STOPPED, 0)).astype(
            jnp.int32
        )
        counts = (tokens >= 0).sum(0, dtype=jnp.int32)
        packed = [tokens, as_bits(logp), jnp.stack([counts, status, token])]
        if self._in_prompt is not None:
            packed += [x.reshape(-1, len(started)) for x in (others[0], as_bits(others[1]))]
        if ids is not None:
            packed.append(pack_experts(ids))
        now = {
            "token": token,
            "position": self.position + counts,
            "remaining": remaining,
            "active": active.astype(jnp.int32),
        }
        slots = state.slots.at[:, [FIELDS[name][1].start for name in now]].set(
            jnp.stack([*now.values()], axis=1)
        )
        pages, view, recurrent = self.keep(cache, counts)
        following = DecodeState(pages, view, slots, state.table, recurrent)
        return following, jnp.concatenate(packed)

    def keep(
        self, cache: Any, counts: Int32[Array, "S"]
    ) -> tuple[tuple[Pages, ...], View, tuple[RecurrentState, ...]]:
        """Return pages, view and recurrent states, with the first tokens of each slot."""
        state, num_tokens = self._state, self.num_tokens
        cache, recurrent = split_caches(self._shapes.policy.config, cache)
        if not self._reads_view:
            return cache, state.view, recurrent
        computed = [
            (
                keys[..., :num_tokens].transpose(0, 3, 1, 2),
                None if values is None else values[:, :, :num_tokens].swapaxes(1, 2),
            )
            for keys, values in cache
        ]
        pages = write_pages(self._shapes, state.pages, computed, state.table, self.position, counts)
        return pages, settle(cache, self.position, num_tokens), recurrent
