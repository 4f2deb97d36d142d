"""Drafts of a draft policy: a smaller one that proposes what the policy may sample next.

It has pages and a view of its own for the same tokens, with the page table of the policy, so that
prefix caching, preemption and rebuilt caches hold for both. It samples with the uniform number of
each position, with which the policy samples too: of equal distributions both then sample the same
token, and of similar ones mostly (common random numbers; for other samplers of this kind see
arXiv:2408.07978).

Axes: S slots, N drafts, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from areal_jax.engine.batch import SamplingMode
from areal_jax.engine.decode_shapes import DRAFT, DecodeShapes
from areal_jax.engine.decode_state import FIELDS, DecodeState, EngineParams, View
from areal_jax.engine.decode_step import Dispatch, Step
from areal_jax.engine.drafts import DraftState
from areal_jax.models.paged_attention import Pages


class DraftDispatch:
    """The forwards of a draft policy in a dispatch, during tracing."""

    def __init__(
        self,
        shapes: DecodeShapes,
        mode: SamplingMode,
        params: EngineParams,
        state: DecodeState,
        dispatch: Dispatch,
    ):
        """
        Args:
            shapes: Shapes of the policy.
            mode: Processing of logits before sampling.
            params: Weights of policy and draft policy.
            state: State before the dispatch.
            dispatch: Dispatch of the policy.
        """
        assert shapes.draft is not None and state.drafts is not None
        unread = state.drafts.unread
        assert unread is not None
        self._policy, self._unread = dispatch, unread
        self._vocab_size = shapes.policy.config.vocab_size
        # Its columns begin with the first token that it has not read.
        column = FIELDS["position"][1].start
        own = DecodeState(
            shapes.split_layers(state.pages)[1],
            shapes.split_layers(state.view)[1],
            state.slots.at[:, column].add(-unread),
            state.table,
        )
        self._draft = Dispatch(shapes.draft, mode, params[DRAFT], own, None, None)
        self._largest = shapes.draft.policy.config.vocab_size - 1
        self.cache = self._draft.cache()
        self._count = shapes.config.draft_tokens

    def propose(
        self,
        cache: Any,
        drafts: DraftState,
        carry: Step,
        taken: Int32[Array, "S"],
        counts: Int32[Array, "S"],
    ) -> tuple[Int32[Array, "S N"], Any]:
        """Read what is not read yet, and sample the drafts one after the other.

        Args:
            cache: View or pages of the draft policy.
            drafts: Tokens of all slots.
            carry: State before the step.
            taken: Tokens that the dispatch has sampled before.
            counts: Most tokens that each slot samples in the step.

        Returns:
            Drafts, and the cache after all of them but the last.
        """
        assert drafts.unread is not None
        unread = drafts.unread
        # The last token, and before it the one that is not read.
        places = (self._policy.position + taken - unread)[:, None] + jnp.arange(2, dtype=jnp.int32)
        tokens = jnp.take_along_axis(drafts.history, places, axis=1, mode="clip")
        starts = taken + self._unread - unread
        read = jnp.where(counts > 0, 1 + unread, 0)
        hidden, cache = self._feed(cache, tokens, starts, read)
        last = jnp.take_along_axis(hidden, unread[:, None, None], axis=1)[:, 0]
        first = self._sample(taken, last, carry)

        def propose_next(
            state: tuple[Any, Int32[Array, "S"]], j: Int32[Array, ""]
        ) -> tuple[tuple[Any, Int32[Array, "S"]], Int32[Array, "S"]]:
            cache, token = state
            fed = (j < counts).astype(jnp.int32)
            hidden, cache = self._feed(cache, token[:, None], taken + self._unread + j, fed)
            token = self._sample(taken + j, hidden[:, 0], carry)
            return (cache, token), token

        later = jnp.arange(1, self._count, dtype=jnp.int32)
        (cache, _), others = jax.lax.scan(propose_next, (cache, first), later)
        return jnp.concatenate([first[None], others]).T, cache

    def keep(
        self, cache: Any, sampled: Int32[Array, "S"], drafts: DraftState
    ) -> tuple[tuple[Pages, ...], View]:
        """Return pages and view after a dispatch in which each slot sampled `sampled` tokens."""
        pages, view, _ = self._draft.keep(cache, sampled + self._unread - drafts.unread)
        return pages, view

    def _feed(
        self,
        cache: Any,
        tokens: Int32[Array, "S U"],
        starts: Int32[Array, "S"],
        counts: Int32[Array, "S"],
    ) -> tuple[Array, Any]:
        draft, width = self._draft, tokens.shape[1]
        ahead = starts[:, None] + jnp.arange(width, dtype=jnp.int32)
        hidden, cache, _ = draft.feed(
            cache,
            # Its vocabulary may be padded to another size.
            jnp.clip(tokens, 0, self._largest),
            draft.position[:, None] + ahead,
            draft.attend_to_block(starts, width, counts),
            counts,
        )
        return hidden, cache

    def _sample(self, ahead: Int32[Array, "S"], hidden: Array, carry: Step) -> Int32[Array, "S"]:
        logits: Float32[Array, "S V"] = self._draft.logits(hidden)[:, : self._vocab_size]
        missing = self._vocab_size - logits.shape[1]
        logits = jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)
        return self._policy.choose(ahead, logits, carry.token_counts)[0]
