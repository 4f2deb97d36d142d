"""Ring buffer of sampled tokens: the device waits while it is written, so no loop runs per token.

Axes: S slots, R rows of the ring buffer, T tokens of one slot, A top logprobs.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int32

from areal_jax.engine.batch import MAX_TOP_LOGPROBS, DecodeOutput
from areal_jax.records import Completion, TopLogprobs


class TokenLog:
    """Tokens, log-probs, versions and top logprobs of the last dispatches, by step and slot.

    An active slot samples in every step, so its tokens are consecutive rows of its column. The log
    holds the longest completion.
    """

    def __init__(self, num_slots: int, max_new_tokens: int, steps_per_dispatch: int):
        self.counts = np.zeros(num_slots, np.int32)
        """Tokens that each slot has sampled since `begin`."""
        # Row of each slot's first token, counted without wrapping around, as is the end.
        self._first = np.zeros(num_slots, np.int64)
        self._end = 0
        self._steps = steps_per_dispatch
        num_rows = -(-max_new_tokens // steps_per_dispatch) * steps_per_dispatch
        self._tokens = np.zeros((num_rows, num_slots), np.int32)
        self._logp = np.zeros((num_rows, num_slots), np.float32)
        self._versions = np.zeros(num_rows, np.int32)
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
        start = self._end % len(self._tokens)
        rows = slice(start, start + self._steps)
        self._tokens[rows], self._logp[rows] = output.tokens, output.logp
        self._versions[rows] = version
        if output.top_logprobs is not None and self._top_logprobs is not None:
            for log, new in zip(self._top_logprobs, output.top_logprobs, strict=True):
                log[rows] = new
        self._end += self._steps
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
        return Completion(tokens, logp, self._versions[rows], "suspended", top_logprobs)

    def _rows(self, slot: int, start: int = 0) -> Int[np.ndarray, "_"]:
        first = self._first[slot]
        return np.arange(first + start, first + self.counts[slot]) % len(self._tokens)
