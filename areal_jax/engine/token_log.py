"""Ring buffer of sampled tokens: the device waits while it is written, so no loop runs per token.

Axes: S slots, R rows of the ring buffer, T tokens of one slot, A top logprobs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from areal_jax.engine.batch import MAX_TOP_LOGPROBS, DecodeOutput
from areal_jax.records import Completion, TopLogprobs


class TokenLog:
    """Tokens, log-probs, versions and top logprobs of the last dispatches, by step and slot.

    An active slot samples in every step, so its tokens are consecutive rows of its column. The log
    holds the longest completion. With drafts, slots sample different numbers of tokens in a
    dispatch: the tokens of each are then the first rows of its column.
    """

    def __init__(
        self, num_slots: int, max_new_tokens: int, tokens_per_dispatch: int, *, has_drafts: bool
    ):
        self.counts = np.zeros(num_slots, np.int32)
        """Tokens that each slot has sampled since `begin`."""
        # Row of each slot's first token, counted without wrapping around, as is the end.
        self._first = np.zeros(num_slots, np.int64)
        self._end = 0
        self._steps, self._has_drafts = tokens_per_dispatch, has_drafts
        num_rows = -(-max_new_tokens // tokens_per_dispatch) * tokens_per_dispatch
        self._tokens = np.zeros((num_rows, num_slots), np.int32)
        self._logp = np.zeros((num_rows, num_slots), np.float32)
        # Of each row, or with drafts of each token.
        self._versions = np.zeros((num_rows, num_slots if has_drafts else 1), np.int32)
        # [R, A, S], allocated by the first request that asks for it.
        self._top_logprobs: TopLogprobs | None = None

    def begin(self, slot: int, *, has_top_logprobs: bool) -> None:
        """Start a sequence in a slot, at the next dispatch."""
        self.counts[slot], self._first[slot] = 0, self._end
        if has_top_logprobs and self._top_logprobs is None:
            shape = len(self._tokens), MAX_TOP_LOGPROBS, self._tokens.shape[1]
            tokens, logp = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
            self._top_logprobs = TopLogprobs(tokens, logp)

    def append(self, output: DecodeOutput, version: int) -> None:
        """Append the output of a dispatch, sampled with the weights of `version`."""
        new: tuple[Any, ...] = (slice(None),)
        if self._has_drafts:
            steps, slots = np.nonzero(output.tokens >= 0)
            rows, new = (self.counts[slots] + steps, slots), (steps, slots)
        else:
            start = self._end % len(self._tokens)
            rows = (slice(start, start + self._steps),)
            self._end += self._steps
        self._tokens[rows], self._logp[rows] = output.tokens[new], output.logp[new]
        self._versions[rows] = version
        if output.top_logprobs is not None and self._top_logprobs is not None:
            for log, found in zip(self._top_logprobs, output.top_logprobs, strict=True):
                np.moveaxis(log, 1, 2)[rows] = np.moveaxis(found, 1, 2)[new]
        self.counts += output.counts

    def tokens(self, slot: int) -> Int32[np.ndarray, "T"]:
        """Return the tokens of a slot's sequence since `begin`."""
        return self._tokens[self._rows(slot), slot]

    def read(self, slot: int, start: int = 0, num_top_logprobs: int = 0) -> Completion:
        """Return what a slot has sampled since `begin`, without its first `start` tokens."""
        rows, top_logprobs = self._rows(slot, start), None
        if num_top_logprobs and self._top_logprobs is not None:
            top_logprobs = TopLogprobs(
                *(log[rows, :num_top_logprobs, slot] for log in self._top_logprobs)
            )
        tokens, logp = self._tokens[rows, slot], self._logp[rows, slot]
        versions = self._versions[rows, slot if self._has_drafts else 0]
        return Completion(tokens, logp, versions, "suspended", top_logprobs)

    def _rows(self, slot: int, start: int = 0) -> Int[np.ndarray, "_"]:
        first = self._first[slot]
        return np.arange(first + start, first + self.counts[slot]) % len(self._tokens)
