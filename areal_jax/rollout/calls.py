"""Calls of one group's workflow: a journal of completions, and counts of graded answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from areal_jax.protocols import Engine, Grader
from areal_jax.records import (
    CallIds,
    Completion,
    OnProgress,
    Request,
    RewardResult,
    Sampling,
    Task,
    derive_seed,
)


@dataclass(slots=True, eq=False)
class JournaledGenerate:
    """One group's `generate`, with a journal of its completions.

    Calls have the ids of `CallIds`, so that concurrent turns find their own completions in the
    journal.
    """

    engine: Engine
    min_version: int
    """Oldest version that may start a request."""
    sampling: Sampling
    seed: int
    group_id: int
    journal: dict[str, tuple[Completion, ...]]
    """Request id to completions, of finished calls and of a restored group's unfinished calls."""
    images: tuple[bytes, ...] = ()
    """Images of the task, which every prompt of its workflow begins with."""
    pending: set[str] = field(default_factory=set)
    """Ids of unfinished requests."""
    _call_ids: CallIds = field(init=False)

    def __post_init__(self) -> None:
        self._call_ids = CallIds(self.group_id)

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        grammar: str = "",
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        call_id = self._call_ids.next(prompt_tokens, num_samples, max_new_tokens, grammar)
        sampled = self.journal.get(call_id, ())
        if sampled and len(sampled) != num_samples:
            raise ValueError(
                f"request {call_id}: expected {num_samples} samples, found {len(sampled)} in the "
                "journal"
            )
        if sampled and all(completion.stop_reason != "suspended" for completion in sampled):
            return list(sampled)
        request = Request(
            id=call_id,
            prompt_tokens=prompt_tokens,
            num_samples=num_samples,
            sampling=self.sampling.of_call(max_new_tokens, grammar),
            seed=derive_seed(self.seed, call_id),
            min_version=self.min_version,
            resume=sampled,
            on_progress=on_progress,
            images=self.images,
        )
        self.pending.add(call_id)
        try:
            completions = await self.engine.submit(request)
        finally:
            self.pending.discard(call_id)
        if len(completions) != num_samples:
            raise ValueError(
                f"request {call_id}: expected {num_samples} samples, the engine returned "
                f"{len(completions)}"
            )
        self.journal[call_id] = tuple(completions)
        return completions

    def sampled(
        self, partials: Mapping[str, tuple[Completion, ...]]
    ) -> dict[str, tuple[Completion, ...]]:
        """Return the journal, updated with the engine's tokens of unfinished requests."""
        return self.journal | {
            call_id: partials[call_id] for call_id in self.pending if call_id in partials
        }


@dataclass(slots=True, eq=False)
class RewardCalls:
    """One group's `grader`, with counts of its calls."""

    grader: Grader
    num_graded: int = 0
    failure: RewardResult | None = None
    """Result of the last call that failed."""

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        result = await self.grader(task, answer)
        if result.failed:
            self.failure = result
        else:
            self.num_graded += 1
        return result
