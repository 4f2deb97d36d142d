"""Which tokens the sequences with grammars may sample next, computed on the host.

Axes: S slots, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from areal_jax.data.grammars import Grammars
from areal_jax.engine.batch import TokenMasks
from areal_jax.engine.sequence import Sequence
from areal_jax.errors import InvalidRequest


class TokenMasker:
    """Computes the masks of a dispatch. Used by the engine thread only."""

    def __init__(self, grammars: Grammars, num_slots: int, tokens_per_dispatch: int):
        self._grammars, self._most = grammars, tokens_per_dispatch
        self._shape = num_slots, -(-grammars.vocab_size // 32)

    def masks(
        self, sequences: SequenceOf[Sequence]
    ) -> tuple[TokenMasks, dict[str, InvalidRequest]]:
        """Return the masks of a dispatch, and errors by request.

        Args:
            sequences: those that sample in it and have a grammar.
        """
        # A new array, because one on a CPU device may share memory with the host's.
        bits, failed = np.full(self._shape, -1, np.int32), dict[str, InvalidRequest]()
        num_tokens = np.full(self._shape[0], self._most, np.int32)
        unmasked = np.zeros(self._shape[0], np.bool_)
        for sequence in sequences:
            assert sequence.slot is not None
            num_tokens[sequence.slot] = 1
            unmasked[sequence.slot] = sequence.request.sampling.unmasked_logprobs
            try:
                if sequence.matcher is None:
                    sequence.matcher = self._grammars.matcher(sequence.request.sampling.grammar)
                # Also what was sampled before a preemption, or on another engine.
                sequence.matcher.consume(sequence.sampled.tokens[sequence.matcher.num_tokens :])
                sequence.matcher.allowed(bits[sequence.slot])
            except InvalidRequest as error:
                failed[sequence.request.id] = error
        return TokenMasks(bits, num_tokens, unmasked), failed
