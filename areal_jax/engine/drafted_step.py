"""One dispatch of decoding with drafts (speculative decoding, arXiv:2211.17192).

A step feeds each slot's last token and N drafts at once, and samples after each of them with the
key of its position, as long as what was sampled is the next draft. So every token is sampled as
without drafts, given the same tokens before it, and a step samples 1 to N + 1 tokens.

Axes: S slots, C columns of the view, V vocabulary, T tokens, U = N + 1 tokens that a step feeds,
n `engine.tokens_per_dispatch`, L layers, k experts of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from areal_jax.engine.batch import SamplingMode, TokenMasks
from areal_jax.engine.decode_shapes import DecodeShapes
from areal_jax.engine.decode_state import DecodeState, EngineParams
from areal_jax.engine.decode_step import Dispatch, Step
from areal_jax.engine.drafting import DraftDispatch
from areal_jax.engine.drafts import DraftState, draft_tokens
from areal_jax.parallel.sharding import ROLLOUT_RULES, on_shards, specs


def generate_drafted(
    shapes: DecodeShapes,
    mode: SamplingMode,
    params: EngineParams,
    state: DecodeState,
    sequences: Int32[Array, "S T"] | None = None,
    masks: TokenMasks | None = None,
) -> tuple[DecodeState, Int32[Array, "m S"]]:
    """Sample tokens with drafts; arguments and results as of `decode_step.generate`, with two more
    rows of the output: steps in which each slot sampled, and drafts that it verified.
    """
    own = state._replace(
        pages=shapes.split_layers(state.pages)[0], view=shapes.split_layers(state.view)[0]
    )
    dispatch = Dispatch(shapes, mode, params, own, sequences, masks)
    started, remaining = dispatch.field("active") > 0, dispatch.field("remaining")
    drafting = shapes.draft and DraftDispatch(shapes, mode, params, state, dispatch)
    steps, drafts = _DraftedSteps(shapes, dispatch, drafting), state.drafts
    assert drafts is not None
    zeros = jnp.zeros(len(started), jnp.int32)
    step = dispatch.first_step(started, remaining)
    cache = drafting and drafting.cache
    first = _State(jnp.int32(0), step, drafts, cache, zeros, zeros, zeros)
    last = jax.lax.while_loop(steps.continues, steps.run, first)
    following, packed = dispatch.finish(last.step, started)
    if drafting is not None:
        pages, view = drafting.keep(last.draft_cache, last.taken, last.drafts)
        following = following._replace(
            pages=(*following.pages, *pages), view=(*following.view, *view)
        )
    counts = jnp.stack([last.num_steps, last.num_drafts])
    at = 2 * dispatch.num_tokens + 3
    packed = jnp.concatenate([packed[:at], counts, packed[at:]])
    return following._replace(drafts=last.drafts), packed


class _State(NamedTuple):
    """State between two steps."""

    i: Int32[Array, ""]
    """Number of steps so far."""
    step: Step
    drafts: DraftState
    draft_cache: Any
    """View or pages of the draft policy; None without one."""
    taken: Int32[Array, "S"]
    """Tokens that each slot has sampled in this dispatch."""
    num_steps: Int32[Array, "S"]
    """Steps in which it sampled."""
    num_drafts: Int32[Array, "S"]
    """Drafts that it verified."""


class _DraftedSteps:
    """The steps of a dispatch with drafts, during tracing."""

    def __init__(self, shapes: DecodeShapes, dispatch: Dispatch, drafting: DraftDispatch | None):
        self._shapes, self._dispatch, self._drafting = shapes, dispatch, drafting
        self._num_fed = 1 + shapes.config.draft_tokens
        # Most tokens that each slot samples: those with a grammar one.
        limit = dispatch.slot_tokens
        self._limit = dispatch.num_tokens if limit is None else limit

    def continues(self, state: _State) -> Bool[Array, ""]:
        """Return whether a slot samples in the next step."""
        is_left = state.step.active & (state.taken < self._limit)
        return (state.i < self._shapes.config.steps_per_dispatch) & is_left.any()

    def run(self, state: _State) -> _State:
        """Draft, feed last tokens and drafts, and sample as long as drafts are accepted."""
        dispatch, carry, taken, width = self._dispatch, state.step, state.taken, self._num_fed
        samples = carry.active & (taken < self._limit)
        left = jnp.minimum(carry.remaining, self._limit - taken)
        counts = jnp.where(samples, jnp.minimum(left, width), 0)
        ahead = taken[:, None] + jnp.arange(width, dtype=jnp.int32)
        draft_cache = state.draft_cache
        if self._drafting is None:
            proposed = self._match(state.drafts, dispatch.position + taken)
        else:
            proposed, draft_cache = self._drafting.propose(
                draft_cache, state.drafts, carry, taken, counts
            )
        hidden, cache, used = dispatch.feed(
            carry.cache,
            jnp.concatenate([carry.token[:, None], proposed], axis=1),
            dispatch.rope_position[:, None] + ahead,
            dispatch.attend_to_block(taken, width, counts),
            counts,
        )
        logits = dispatch.logits(hidden.reshape(-1, hidden.shape[2])).reshape(*ahead.shape, -1)
        block = self._sample(carry, logits, proposed, ahead, counts)

        def put(x: Array, new: Array, slots_axis: int = -1) -> Array:
            # What a block has after its last sampled token is overwritten by the next block.
            return _place_block(x, new, taken, slots_axis)

        experts = carry.experts
        if experts is not None and used is not None:
            experts = put(experts, used.swapaxes(0, 1), 1)
        following = block._replace(
            cache=cache,
            tokens=put(carry.tokens, block.tokens),
            logp=put(carry.logp, block.logp),
            top_logprobs=jax.tree.map(put, carry.top_logprobs, block.top_logprobs),
            experts=experts,
        )
        num_sampled = (block.tokens >= 0).sum(0, dtype=jnp.int32)
        unread = state.drafts.unread
        if unread is not None:
            # Of all drafts the policy has read the last one, too.
            unread = jnp.where(counts > 0, (num_sampled == width).astype(jnp.int32), unread)
        history, after = state.drafts.history, dispatch.position + taken + 1
        history = _place_block(history, block.tokens.T, after, 0)
        return _State(
            state.i + 1,
            following,
            state.drafts._replace(history=history, unread=unread),
            draft_cache,
            taken + num_sampled,
            state.num_steps + (counts > 0),
            state.num_drafts + jnp.maximum(counts - 1, 0),
        )

    def _sample(
        self,
        carry: Step,
        logits: Float32[Array, "S U V"],
        proposed: Int32[Array, "S N"],
        ahead: Int32[Array, "S U"],
        counts: Int32[Array, "S"],
    ) -> Step:
        """Return the state after the tokens of a step, with these tokens alone and no cache.

        Args:
            carry: State before the step.
            logits: Logits after the last token and each draft.
            proposed: Drafts.
            ahead: Tokens that the dispatch has sampled before each.
            counts: Most tokens that each slot samples.
        """
        dispatch = self._dispatch
        places = jnp.arange(self._num_fed, dtype=jnp.int32)[:, None]
        # -1 is never sampled: nothing is accepted after the last draft.
        drafts = jnp.pad(proposed, ((0, 0), (0, 1)), constant_values=-1).T
        # Each as if all drafts before it were accepted; those after another one are dropped.
        token_counts, top_logprobs = carry.token_counts, carry.top_logprobs
        if token_counts.shape[1] == 0:
            chosen, logp, _ = jax.vmap(dispatch.choose, (1, 1, None))(ahead, logits, token_counts)
        else:
            slots = jnp.arange(len(counts))

            def choose(before: Array, each: tuple[Array, ...]) -> tuple[Array, Any]:
                ahead, logits, draft = each
                token, logp, processed = dispatch.choose(ahead, logits, before)
                after = before.at[slots, draft].add(1)
                return after, (token, logp, dispatch.most_likely(processed))

            _, (chosen, logp, top_logprobs) = jax.lax.scan(
                choose, token_counts, (ahead.T, logits.swapaxes(0, 1), drafts)
            )
        is_accepted = (chosen == drafts) & ~dispatch.is_stop(chosen) & (places + 1 < counts)
        num_sampled = jnp.where(is_accepted, self._num_fed, places + 1).min(0)
        num_sampled = jnp.where(counts > 0, num_sampled, 0)
        is_sampled = places < num_sampled
        if token_counts.shape[1] > 0:
            token_counts = token_counts.at[jnp.arange(len(counts)), chosen].add(is_sampled)
        last = jnp.where(places + 1 == num_sampled, chosen, 0).sum(0)
        token = jnp.where(num_sampled > 0, last, carry.token)
        stopped, remaining = dispatch.is_stop(token), carry.remaining - num_sampled
        return carry._replace(
            cache=None,
            token=token,
            active=carry.active & ~stopped & (remaining > 0),
            remaining=remaining,
            stopped=stopped,
            tokens=jnp.where(is_sampled, chosen, -1),
            logp=jnp.where(is_sampled, logp, 0),
            token_counts=token_counts,
            top_logprobs=top_logprobs,
            experts=None,
        )

    def _match(self, state: DraftState, positions: Int32[Array, "S"]) -> Int32[Array, "S N"]:
        """Return the drafts of earlier n-grams, on each device those of its own slots."""
        mesh, count = self._shapes.mesh, self._num_fed - 1
        slots = specs(mesh, ("slots",), (state, positions), ROLLOUT_RULES)

        def draft(state: DraftState, positions: Array) -> Array:
            return draft_tokens(state, positions, count)

        return on_shards(draft, mesh, slots, slots[1])(state, positions)


def _place_block(into: Array, block: Array, starts: Int32[Array, "S"], slots_axis: int) -> Array:
    """Write a block of rows, into the rows of each slot from its own start on.

    Args:
        into: Rows of all slots; rows are the first axis besides the slots.
        block: Rows to write.
        starts: First row of each slot.
        slots_axis: Axis of the slots.
    """

    def place(x: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, new, start, 0)

    return jax.vmap(place, (slots_axis, slots_axis, 0), slots_axis)(into, block, starts)
