"""The host's mirror of the slots between two dispatches: what sits where, and what it has sampled.

The device waits while this runs, so it is numpy over whole arrays, and nothing is done token by
token.
Axes: S slots, R rows of the log.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int32, Shaped

from areal_jax.engine.batch import (
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    DecodeOutput,
    SamplingMode,
    empty_slots,
    is_penalized,
    sampling_mode,
)
from areal_jax.records import Completion, Request, StopReason, TopLogprobs

_WORD = 0xFFFFFFFF


class SlotTable:
    """Who sits in which slot, how far each is, and the log of all dispatches, from which
    completions are read.

    A live slot draws in every step, so its tokens are consecutive rows of its column of the log."""

    def __init__(self, num_slots: int, max_new_tokens: int, steps_per_dispatch: int):
        self.active = np.zeros(num_slots, bool)
        self.changed = False
        """Whether `records` differ from what the device holds: the owner seats them there and
        resets this."""
        self._settings = empty_slots(num_slots)
        # Of each slot: its last token, how many columns its cache had when it was seated, how many
        # tokens it may draw from then on, how many it has sampled since, and the row of the log
        # where they begin.
        self._token = np.zeros(num_slots, np.int32)
        self._assigned_at = np.zeros(num_slots, np.int32)
        self._budget = np.zeros(num_slots, np.int32)
        self._count = np.zeros(num_slots, np.int32)
        self._first = np.zeros(num_slots, np.int64)
        self._modes = np.full(num_slots, SamplingMode.PLAIN)
        self._origin: dict[int, tuple[Request, Completion]] = {}
        # The log: one block of rows per dispatch, around and around. It holds the longest answer.
        self._steps = steps_per_dispatch
        num_rows = -(-max_new_tokens // steps_per_dispatch) * steps_per_dispatch
        self._tokens = np.zeros((num_rows, num_slots), np.int32)
        self._logp = np.zeros((num_rows, num_slots), np.float32)
        self._versions = np.zeros(num_rows, np.int32)
        # Of the log too, made for the first request that asks.
        self._alternatives: TopLogprobs | None = None
        self._end = 0

    def assign_slot(self, slot: int, request: Request, sample: int, sampled: Completion) -> None:
        """Let a slot go on with one sample of a request, after the tokens it has sampled before."""
        sampling = request.sampling
        stop_tokens = np.full(MAX_STOP_TOKENS, -1, np.int32)
        stop_tokens[: len(sampling.stop_token_ids)] = sampling.stop_token_ids
        record = self._settings[slot]
        record["seed"] = request.seed >> 32 & _WORD, request.seed & _WORD
        record["sample"] = sample
        record["temperature"] = sampling.temperature
        for name in (
            "top_k",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            record[name] = getattr(sampling, name)
        record["num_prompt_tokens"] = len(request.prompt_tokens)
        record["stops_from"] = len(request.prompt_tokens) + sampling.min_new_tokens
        record["stop_tokens"] = stop_tokens
        self._modes[slot] = sampling_mode(sampling)
        if sampling.num_top_logprobs and self._alternatives is None:
            shape = len(self._tokens), MAX_TOP_LOGPROBS, self._tokens.shape[1]
            self._alternatives = TopLogprobs(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
        self._origin[slot] = request, sampled
        self._token[slot] = sampled.tokens[-1] if len(sampled.tokens) else request.prompt_tokens[-1]
        self._assigned_at[slot] = len(request.prompt_tokens) + len(sampled.tokens) - 1
        self._budget[slot] = sampling.max_new_tokens - len(sampled.tokens)
        self._count[slot], self._first[slot] = 0, self._end
        self.active[slot] = self.changed = True

    def release(self, slot: int) -> None:
        """Empty a slot."""
        self.changed |= bool(self.active[slot])
        self.active[slot] = False
        self._modes[slot] = SamplingMode.PLAIN
        self._origin.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._origin

    def collect_outputs(self, sampled: DecodeOutput, version: int) -> Int[np.ndarray, "_"]:
        """Take in what a dispatch drew with the weights of `version`; returns the slots that
        ended."""
        start = self._end % len(self._tokens)
        rows = slice(start, start + self._steps)
        self._tokens[rows], self._logp[rows], self._versions[rows] = (
            sampled.tokens,
            sampled.logp,
            version,
        )
        if sampled.top_logprobs is not None and self._alternatives is not None:
            for log, new in zip(self._alternatives, sampled.top_logprobs, strict=True):
                log[rows] = new
        self._end += self._steps
        self._token[:] = sampled.last
        self._count += sampled.counts
        ended = np.flatnonzero(self.active & ~sampled.active)
        self.active[:] = sampled.active
        return ended

    def completion(self, slot: int, stop_reason: StopReason, start: int = 0) -> Completion:
        """What a slot has sampled so far, from token `start` of the answer on; it costs as much as
        that holds."""
        request, before = self._origin[slot]
        before, rows = before.slice(start), self._rows(slot, max(start - len(before.tokens), 0))
        return Completion(
            np.concatenate([before.tokens, self._tokens[rows, slot]]),
            np.concatenate([before.logp, self._logp[rows, slot]]),
            np.concatenate([before.versions, self._versions[rows]]),
            stop_reason,
            self._reported(rows, slot, request.sampling.num_top_logprobs, before),
        )

    def _reported(
        self, rows: Int[np.ndarray, "_"], slot: int, count: int, before: Completion
    ) -> TopLogprobs | None:
        """The alternatives of a slot's answer, in the rows of the log and those before; none of
        tokens that came without."""
        if self._alternatives is None or not count:
            return None
        num_before = len(before.tokens)
        unknown = TopLogprobs(
            np.zeros((num_before, count), np.int32),
            np.full((num_before, count), -np.inf, np.float32),
        )
        earlier, log = before.top_logprobs or unknown, self._alternatives
        return TopLogprobs(
            *(
                np.concatenate([old, new[rows, :count, slot]])
                for old, new in zip(earlier, log, strict=True)
            )
        )

    def cached_tokens(self, slot: int) -> Int32[np.ndarray, "_"]:
        """Tokens whose keys and values the slot's pages hold: all but the last, which the next step
        feeds."""
        request, before = self._origin[slot]
        return np.concatenate(
            [request.prompt_tokens, before.tokens, self._tokens[self._rows(slot), slot]]
        )[:-1]

    def live(self) -> list[int]:
        """Slots that are active."""
        return np.flatnonzero(self.active).tolist()

    def ends(self, num_ahead: int = 0) -> Int[np.ndarray, "S"]:
        """Tokens whose keys and values each slot may have after the next dispatch, after
        `num_ahead` of which nothing is known but that they will be; 0 where none is sampled."""
        return self.active * (
            self._assigned_at
            + np.minimum(self._budget, self._count + self._steps * (num_ahead + 1))
        )

    def num_columns(self, num_ahead: int = 0) -> int:
        """The most of `ends`, and at least one."""
        return max(int(self.ends(num_ahead).max()), 1)

    def num_lasting(self) -> int:
        """Live slots whose budget outlasts the next dispatch."""
        return int((self.active & (self._count + self._steps < self._budget)).sum())

    def mode(self) -> SamplingMode:
        """The most that a live slot asks for."""
        return SamplingMode(self._modes.max())

    def sequences(self, max_tokens: int) -> Int32[np.ndarray, "S T"]:
        """Tokens of every live slot whose draws depend on them; -1 elsewhere."""
        sequences = np.full((len(self.active), max_tokens), -1, np.int32)
        for slot in self.live():
            if is_penalized(self._origin[slot][0].sampling):
                tokens = self.cached_tokens(slot)
                sequences[slot, : len(tokens)], sequences[slot, len(tokens)] = (
                    tokens,
                    self._token[slot],
                )
        return sequences

    def records(self) -> Shaped[np.ndarray, "S"]:
        """`SLOT` records of all slots, for the device."""
        records = self._settings.copy()
        records["active"], records["token"] = self.active, self._token
        records["position"] = self._assigned_at + self._count
        records["remaining"] = self._budget - self._count
        return records

    def _rows(self, slot: int, start: int = 0) -> Int[np.ndarray, "_"]:
        """Rows of the log that a slot has sampled, but for the first `start`."""
        return np.arange(self._first[slot] + start, self._first[slot] + self._count[slot]) % len(
            self._tokens
        )
