"""State of the sequences in the engine: one `Sequence` per sample, one `SequenceGroup` per request.

Axes: T tokens of a sequence.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from jaxtyping import Int32, Shaped

from areal_jax.data.grammars import Matcher
from areal_jax.engine.token_log import TokenLog
from areal_jax.records import Completion, Request, StopReason, TopLogprobs, empty_completion


class SequenceState(Enum):
    """Stages of a sequence. Preemption returns it to WAITING."""

    WAITING = "waiting"
    """It has no slot."""
    PREFILLING = "prefilling"
    """It has a slot and pages, and its prefill is incomplete."""
    RUNNING = "running"
    """It samples in every dispatch."""
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class PrefillJob:
    """Tokens whose keys and values are being computed, for one sequence or a group's prompt."""

    tokens: Int32[np.ndarray, "T"]
    shard: int
    pages: list[int]
    num_computed: int = 0
    """Tokens whose keys and values are in the pages."""
    sequences: list[Sequence] = field(default_factory=list)
    """Sequences that start when the job is complete."""
    is_prompt: bool = False
    """Whether the job owns its pages: its sequences share the full ones and copy the last.

    Otherwise the pages belong to its only sequence.
    """
    is_open: bool = True
    """Of a prompt: whether more sequences may join."""
    adapter: int = 0
    """Adapter that computes them."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request."""

    request: Request
    sample: int
    sampled: Completion = field(default_factory=empty_completion)
    """Tokens, log-probs and versions sampled before the current slot; all of them once finished."""
    state: SequenceState = SequenceState.WAITING
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    """Pages of the KV cache, in order of position."""
    prefill: PrefillJob | None = None
    """Incomplete prefill that the sequence waits for."""
    log: TokenLog | None = None
    """Log of the tokens sampled in the current slot; None unless running."""
    is_outdated: bool = False
    """Whether its pages were computed with earlier weights (`engine.on_update=keep`)."""
    group: SequenceGroup = field(init=False)
    """Set by the group; a sequence by itself has none."""
    experts: Shaped[np.ndarray, "_ L k"] | None = None
    """Recorded experts of the first tokens of prompt and completion."""
    rope_offset: int = 0
    """Added to the place of a sampled token, for its position in RoPE."""
    matcher: Matcher | None = None
    """Its place in the request's grammar, from its first dispatch on."""
    num_reported: int = 0
    """Tokens that were passed to the request's `on_progress`."""

    def completion(self, start: int = 0) -> Completion:
        """Return what was sampled so far, from token `start` on, in time linear in its length."""
        before = self.sampled.slice(start) if start else self.sampled
        if self.log is None:
            return before
        assert self.slot is not None
        count = self.request.sampling.num_top_logprobs
        logged = self.log.read(self.slot, max(start - len(self.sampled.tokens), 0), count)
        if logged.top_logprobs is not None and before.top_logprobs is None:
            # A resumed completion may come without.
            shape = len(before.tokens), count
            unknown = TopLogprobs(np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32))
            before = replace(before, top_logprobs=unknown)
        return before.concatenate(logged)

    def tokens(self) -> Int32[np.ndarray, "T"]:
        """Return the prompt and all tokens sampled so far."""
        parts = [self.request.prompt_tokens, self.sampled.tokens]
        if self.log is not None:
            assert self.slot is not None
            parts.append(self.log.tokens(self.slot))
        return np.concatenate(parts)

    @property
    def prompt_checksum(self) -> int:
        """Checksum of the prompt."""
        return zlib.crc32(self.request.prompt_tokens.tobytes()) >> 1

    @property
    def num_tokens(self) -> int:
        """Number of `tokens`."""
        logged = 0 if self.log is None or self.slot is None else int(self.log.counts[self.slot])
        return len(self.request.prompt_tokens) + len(self.sampled.tokens) + logged

    def cached_tokens(self) -> Int32[np.ndarray, "T"]:
        """Return the tokens whose keys and values decoding needs: all but the last, its input."""
        return self.tokens()[:-1]

    def take_logged(self) -> None:
        """Move the logged tokens into `sampled`."""
        self.sampled = replace(self.completion(), experts=self.experts)

    def leave_slot(self) -> None:
        """Move the logged tokens into `sampled`, and wait."""
        self.take_logged()
        self.log = None
        self.slot, self.state, self.is_outdated = None, SequenceState.WAITING, False

    def finish(self, reason: StopReason) -> None:
        """Finish the sequence, which has left its slot."""
        if self.sampled.stop_reason != reason:
            self.sampled = replace(self.sampled, stop_reason=reason)
        self.state = SequenceState.FINISHED


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """The sequences of one request."""

    request: Request
    deadline_s: float
    """Time of `time.perf_counter` at which the request fails."""
    sequences: list[Sequence] = field(init=False)
    waiting: deque[Sequence] = field(init=False)
    """Sequences without a slot, the next one first."""
    prompts: dict[int, PrefillJob] = field(default_factory=dict)
    """By data shard: prefill of the prompt, as long as sequences wait that will share it."""
    images: tuple[object, ...] = ()
    """Images of the prompt, kept as long as the group."""
    rope_offset: int = 0
    """Of its sequences."""

    def __post_init__(self) -> None:
        request = self.request
        resumed = request.resume or [empty_completion() for _ in range(request.num_samples)]
        self.sequences = [
            Sequence(request, sample, sampled) for sample, sampled in enumerate(resumed)
        ]
        for sequence in self.sequences:
            sequence.group, sampled = self, sequence.sampled
            sequence.rope_offset = self.rope_offset
            sequence.experts = sampled.experts
            if sampled.stop_reason != "suspended":
                sequence.finish(sampled.stop_reason)
            elif len(sampled.tokens) >= request.sampling.max_new_tokens:
                sequence.finish("length")
        unfinished = (each for each in self.sequences if each.state is SequenceState.WAITING)
        self.waiting = deque(unfinished)

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.request.id

    @property
    def is_running(self) -> bool:
        """Whether any sequence has a slot."""
        return any(sequence.slot is not None for sequence in self.sequences)

    @property
    def is_finished(self) -> bool:
        """Whether all sequences are finished."""
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    def completions(self) -> list[Completion]:
        """Return what every sequence has sampled so far, by sample."""
        return [sequence.completion() for sequence in self.sequences]
