"""Host mirror of the decode slots between two dispatches.

The device waits while this runs, so it operates on whole arrays, and no loop runs per token.
Axes: S slots.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Shaped

from areal_jax.engine.batch import (
    MAX_STOP_TOKENS,
    DecodeOutput,
    SamplingMode,
    empty_slots,
    sampling_mode,
)
from areal_jax.engine.sequence import Sequence, SequenceState
from areal_jax.engine.token_log import TokenLog

_WORD = 0xFFFFFFFF
_COPIED_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class SlotTable:
    """Sampling parameters and progress of the running sequence of each slot, and the token log."""

    def __init__(
        self,
        num_slots: int,
        max_new_tokens: int,
        tokens_per_dispatch: int,
        *,
        has_drafts: bool = False,
    ):
        self.active = np.zeros(num_slots, bool)
        self.changed = False
        """Whether `records` differ from the device's: the owner copies them and resets this."""
        most = tokens_per_dispatch
        self.log = TokenLog(num_slots, max_new_tokens, most, has_drafts=has_drafts)
        self._settings = empty_slots(num_slots)
        # Of each slot: last token of its sequence, cached tokens when it was assigned, and tokens
        # that it may sample from then on.
        self._token = np.zeros(num_slots, np.int32)
        self._assigned_at = np.zeros(num_slots, np.int32)
        self._budget = np.zeros(num_slots, np.int32)
        self._modes = np.full(num_slots, SamplingMode.PLAIN)
        # Most tokens of a slot in a dispatch, and columns of the view that it needs after them.
        self._most, self._beyond = most, most if has_drafts else 0

    def assign_slot(self, sequence: Sequence) -> None:
        """Let a sequence run in its slot, after the tokens that it has sampled before."""
        slot, request, before = sequence.slot, sequence.request, sequence.sampled.tokens
        assert slot is not None
        sampling = request.sampling
        record = self._settings[slot]
        record["seed"] = request.seed >> 32 & _WORD, request.seed & _WORD
        record["sample"] = sequence.sample
        for name in _COPIED_FIELDS:
            record[name] = getattr(sampling, name)
        record["num_prompt_tokens"] = len(request.prompt_tokens)
        record["rope_offset"], record["adapter"] = sequence.rope_offset, request.adapter
        record["stops_from"] = len(request.prompt_tokens) + sampling.min_new_tokens
        stop_tokens = np.full(MAX_STOP_TOKENS, -1, np.int32)
        stop_tokens[: len(sampling.stop_token_ids)] = sampling.stop_token_ids
        record["stop_tokens"] = stop_tokens
        self._modes[slot] = sampling_mode(sampling)
        self._token[slot] = before[-1] if len(before) else request.prompt_tokens[-1]
        self._assigned_at[slot] = len(request.prompt_tokens) + len(before) - 1
        self._budget[slot] = sampling.max_new_tokens - len(before)
        self.log.begin(slot, has_top_logprobs=sampling.num_top_logprobs > 0)
        sequence.log, sequence.state = self.log, SequenceState.RUNNING
        self.active[slot] = self.changed = True

    def free_slot(self, slot: int) -> None:
        """Deactivate a slot."""
        self.changed |= bool(self.active[slot])
        self.active[slot] = False
        self._modes[slot] = SamplingMode.PLAIN

    def process_outputs(self, output: DecodeOutput, version: int) -> Int[np.ndarray, "_"]:
        """Log the output of a dispatch with weights of `version`; return the slots that ended."""
        self.log.append(output, version)
        self._token[:] = output.last
        ended = np.flatnonzero(self.active & ~output.active)
        self.active[:] = output.active
        return ended

    def restart(self, sequence: Sequence) -> None:
        """Log the next tokens of a running sequence as if its slot had just been assigned.

        The log holds consecutive rows of a slot, and a slot with a grammar leaves rows out.
        """
        slot = sequence.slot
        assert slot is not None
        count = self.log.counts[slot]
        sequence.take_logged()
        self._assigned_at[slot] += count
        self._budget[slot] -= count
        self.log.begin(slot, has_top_logprobs=sequence.request.sampling.num_top_logprobs > 0)

    def live(self) -> list[int]:
        """Return the active slots."""
        return np.flatnonzero(self.active).tolist()

    def ends(self, num_ahead: int = 0) -> Int[np.ndarray, "S"]:
        """Return the most tokens that each slot may have cached after the next dispatch.

        Args:
            num_ahead: dispatches before that one whose output is not known yet.

        Returns:
            Counts by slot; 0 for inactive slots.
        """
        most = self.log.counts + self._most * (num_ahead + 1)
        return self.active * (self._assigned_at + np.minimum(self._budget, most))

    def num_columns(self, num_ahead: int = 0) -> int:
        """Return the columns that the view needs for the next dispatch, at least 1."""
        return max(int(self.ends(num_ahead).max()) + self._beyond, 1)

    def num_lasting(self) -> int:
        """Count active slots whose budget outlasts the next dispatch."""
        return int((self.active & (self.log.counts + self._most < self._budget)).sum())

    def mode(self) -> SamplingMode:
        """Return the highest sampling mode of any slot."""
        return SamplingMode(self._modes.max())

    def positions(self) -> Int[np.ndarray, "S"]:
        """Return by slot the number of cached tokens, at which the next dispatch continues."""
        return self._assigned_at + self.log.counts

    def records(self) -> Shaped[np.ndarray, "S"]:
        """Return the `SLOT` records of all slots, for the device."""
        records = self._settings.copy()
        records["active"], records["token"] = self.active, self._token
        records["position"] = self.positions()
        records["remaining"] = self._budget - self.log.counts
        return records
