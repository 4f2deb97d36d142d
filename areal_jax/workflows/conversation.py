"""A trajectory of several calls of the policy, token for token, and the samples that are made of
it.

Nothing is ever decoded and encoded again: what a policy is given next is what it was given before,
what it drew, and what the chat template puts behind that. So the tokens that are trained on are the
tokens that were sampled, odd ones too, whatever a template would make of earlier turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int32

from areal_jax.protocols import Tokenizer
from areal_jax.records import (
    NO_VERSION,
    Completion,
    Message,
    ResultKind,
    Sample,
    StopReason,
    with_stop_token,
)

Export: TypeAlias = Literal["concatenated", "per_call"]
"""What becomes a sample: calls that resume from one another together, or every call alone. Each
sampled token is trained on once either way, after the same tokens, so that a mean over tokens has
the same gradient if their advantages are the same."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of the policy: what it was given, and what it drew."""

    prompt: Int32[np.ndarray, "P"]
    completion: Completion

    @property
    def tokens(self) -> Int32[np.ndarray, "T"]:
        """Both, one after the other."""
        return np.concatenate([self.prompt, self.completion.tokens])

    def follows(self, other: Call) -> bool:
        """Whether it was given all of another call, and went on from there."""
        before = other.tokens
        return np.array_equal(self.prompt[: len(before)], before)


def build_next_prompt(
    tokenizer: Tokenizer, call: Call, messages: Sequence[Message]
) -> Int32[np.ndarray, "P"]:
    """What the policy is given after a call: all that was, and the messages that answer it.

    The token that ends a turn that was cut is context."""
    answer = with_stop_token(call.completion.tokens, tokenizer.stop_token_ids)
    return np.concatenate([call.prompt, answer, tokenizer.render_next(messages)])


def make_samples(
    calls: Sequence[Call],
    rewards: Sequence[float],
    grade: ResultKind,
    *,
    export: Export = "concatenated",
    stop_reason: StopReason | None = None,
) -> tuple[Sample, ...]:
    """The samples that hold what was sampled in the calls, in their order, each token once.

    Args:
        rewards: one for each call; a sample of several calls has that of its last.
        stop_reason: of the trajectory; None: a sample's is that of its last call.
    """
    chains = (
        chain_calls(calls)
        if export == "concatenated"
        else [[number] for number in range(len(calls))]
    )
    return tuple(
        _sample([calls[number] for number in chain], rewards[chain[-1]], grade, stop_reason)
        for chain in chains
    )


def chain_calls(calls: Sequence[Call]) -> list[list[int]]:
    """The places of calls that resume from one another, together. Where two resume from the same
    call, the first does so in its chain, and the other begins one, in which all before it is
    context."""
    chains = list[list[int]]()
    for number, call in enumerate(calls):
        chain = next((chain for chain in chains if call.follows(calls[chain[-1]])), None)
        if chain is None:
            chains.append([number])
        else:
            chain.append(number)
    return chains


def _sample(
    chain: Sequence[Call], reward: float, grade: ResultKind, stop_reason: StopReason | None
) -> Sample:
    """All of the last call's tokens; trained on is what the calls drew, stop tokens among it."""
    tokens = chain[-1].tokens
    loss_mask, logp = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), NO_VERSION, np.int32)
    for call in chain:
        sampled = slice(len(call.prompt), len(call.prompt) + len(call.completion.tokens))
        loss_mask[sampled], logp[sampled], versions[sampled] = (
            True,
            call.completion.logp,
            call.completion.versions,
        )
    return Sample(
        tokens=tokens,
        loss_mask=loss_mask,
        behave_logp=logp,
        versions=versions,
        reward=reward,
        grade=grade,
        stop_reason=stop_reason or chain[-1].completion.stop_reason,
    )
