"""The host's mirror of the slots between two dispatches: what sits where, and all its tokens.

numpy over whole arrays: the device waits while this runs, so nothing here is done token by token. Axes: S slots.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int32

from areal_jax.engine.decode import MAX_STOP_TOKENS, Drawn, empty_slots
from areal_jax.records import NO_VERSION, Completion, Request, StopReason

_WORD = 0xFFFFFFFF


def nothing_drawn() -> Completion:
    """The completion of a sample that has not been started."""
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "suspended")


class SlotTable:
    """Tokens, log-probs and versions of every slot's sequence, and the records that the device decodes by."""

    def __init__(self, num_slots: int, max_tokens: int, steps_per_dispatch: int):
        self.slots = empty_slots(num_slots)
        self.changed = False
        """Whether `slots` differ from what the device holds after its dispatch: the owner seats them there and resets this."""
        # One dispatch of room to spare: every slot is written whole, and what it did not draw lies beyond its length.
        shape = (num_slots, max_tokens + steps_per_dispatch)
        self._tokens = np.zeros(shape, np.int32)
        self._logp = np.zeros(shape, np.float32)
        self._versions = np.full(shape, NO_VERSION, np.int32)
        self._prompt_length = np.zeros(num_slots, np.int32)
        self._length = np.zeros(num_slots, np.int32)
        self._rows = np.arange(num_slots)
        self._steps = np.arange(steps_per_dispatch)

    def seat(self, slot: int, request: Request, sample: int, drawn: Completion) -> None:
        """Let a slot go on with one sample of a request, after the tokens it has drawn before."""
        prompt, sampling = request.prompt_tokens, request.sampling
        start, end = len(prompt), len(prompt) + len(drawn.tokens)
        self._prompt_length[slot], self._length[slot] = start, end
        self._tokens[slot, :start], self._tokens[slot, start:end] = prompt, drawn.tokens
        self._logp[slot, start:end], self._versions[slot, start:end] = drawn.logp, drawn.versions
        # The most likely token is the same with filters and without; the program without them is cheaper.
        filtered = sampling.temperature > 0
        stop_tokens = np.full(MAX_STOP_TOKENS, -1, np.int32)
        stop_tokens[: len(sampling.stop_token_ids)] = sampling.stop_token_ids
        record = {
            "token": self._tokens[slot, end - 1],
            "position": end - 1,
            "remaining": sampling.max_new_tokens - len(drawn.tokens),
            "active": 1,
            "seed": (request.seed >> 32 & _WORD, request.seed & _WORD),
            "sample": sample,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k if filtered else 0,
            "top_p": sampling.top_p if filtered else 1,
            "stop_tokens": stop_tokens,
        }
        for name, value in record.items():
            self.slots[name][slot] = value
        self.changed = True

    def release(self, slot: int) -> None:
        """Empty a slot."""
        self.changed |= bool(self.slots["active"][slot])
        self.slots["active"][slot] = self.slots["position"][slot] = self._length[slot] = 0

    def harvest(self, drawn: Drawn, version: int) -> tuple[Int[np.ndarray, "_"], int]:
        """Take in what a dispatch drew with the weights of `version`: the slots that ended, and the number of new tokens."""
        slots, rows = self.slots, self._rows[:, None]
        columns = self._length[:, None] + self._steps
        self._tokens[rows, columns] = drawn.tokens.T
        self._logp[rows, columns] = drawn.logp.T
        self._versions[rows, columns] = version
        counts = (drawn.tokens >= 0).sum(0, dtype=np.int32)
        self._length += counts
        slots["position"] += counts
        slots["remaining"] -= counts
        slots["token"] = self._tokens[self._rows, self._length - 1]
        ended = np.flatnonzero((slots["active"] > 0) & ~drawn.active)
        slots["active"] = drawn.active
        return ended, int(counts.sum())

    def completion(self, slot: int, stop_reason: StopReason) -> Completion:
        """What a slot has drawn so far."""
        new = slice(self._prompt_length[slot], self._length[slot])
        return Completion(
            self._tokens[slot, new].copy(), self._logp[slot, new].copy(), self._versions[slot, new].copy(), stop_reason
        )

    def cached_tokens(self, slot: int) -> Int32[np.ndarray, "_"]:
        """Tokens whose keys and values the slot's cache holds: all but the last, which the next step feeds."""
        return self._tokens[slot, : self._length[slot] - 1]

    def live(self) -> list[int]:
        """Slots that are drawing."""
        return np.flatnonzero(self.slots["active"]).tolist()

    def num_columns(self) -> int:
        """Cache columns that the next dispatch needs."""
        ends = self.slots["position"] + np.minimum(self.slots["remaining"], len(self._steps))
        return int(np.max(ends, where=self.slots["active"] > 0, initial=1))

    def filtered(self) -> bool:
        """Whether a live slot asks for top-k or top-p."""
        slots = self.slots
        return bool(((slots["active"] > 0) & ((slots["top_k"] > 0) | (slots["top_p"] < 1))).any())
