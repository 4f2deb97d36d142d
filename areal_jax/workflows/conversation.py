"""Trajectories of several calls of the policy, and their samples.

Token-in/token-out, no re-tokenization: the next prompt is the last prompt, the sampled tokens, and
the chat template's tokens of the new messages. The tokens in the loss are the sampled tokens, even
where the chat template would render earlier turns differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int32, Shaped

from areal_jax.protocols import Tokenizer
from areal_jax.records import (
    NO_VERSION,
    Completion,
    Message,
    RewardResult,
    Sample,
    StopReason,
    native_expert,
    with_stop_token,
)

Export: TypeAlias = Literal["concatenated", "per_call"]
"""Samples of a trajectory: calls that extend one another together, or each call alone.

Either way each sampled token is trained on once, with the same prefix, so that a mean over tokens
has the same gradient for the same advantages.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Prompt and completion of one call of the policy."""

    prompt: Int32[np.ndarray, "P"]
    completion: Completion

    @property
    def tokens(self) -> Int32[np.ndarray, "T"]:
        """Prompt and completion, concatenated."""
        return np.concatenate([self.prompt, self.completion.tokens])

    def follows(self, other: Call) -> bool:
        """Return whether the prompt starts with all tokens of another call."""
        prefix = other.tokens
        return np.array_equal(self.prompt[: len(prefix)], prefix)


def build_next_prompt(
    tokenizer: Tokenizer, call: Call, messages: Sequence[Message]
) -> Int32[np.ndarray, "P"]:
    """Build the prompt after a call: its tokens, followed by messages that answer it.

    The stop token of a truncated turn is added as context.
    """
    answer = with_stop_token(call.completion.tokens, tokenizer.stop_token_ids)
    return np.concatenate([call.prompt, answer, tokenizer.render_next(messages)])


def make_samples(
    calls: Sequence[Call],
    rewards: Sequence[float],
    grade: RewardResult,
    *,
    export: Export = "concatenated",
    stop_reason: StopReason | None = None,
    step_rewards: Sequence[float] | None = None,
) -> tuple[Sample, ...]:
    """Make samples of calls, in order, with each sampled token once.

    Args:
        calls: calls of one trajectory.
        rewards: reward of each call; a sample of several calls gets that of its last.
        grade: grade of the trajectory.
        export: how calls are combined.
        stop_reason: stop reason of the trajectory; None: that of a sample's last call.
        step_rewards: part of the reward that each call earned itself.
    """
    chains = (
        chain_calls(calls)
        if export == "concatenated"
        else [[number] for number in range(len(calls))]
    )
    return tuple(
        _sample(
            [calls[number] for number in chain],
            rewards[chain[-1]],
            grade,
            stop_reason,
            None if step_rewards is None else [step_rewards[number] for number in chain],
        )
        for chain in chains
    )


def chain_calls(calls: Sequence[Call]) -> list[list[int]]:
    """Group the indices of calls that extend one another.

    If two calls extend the same call, the first continues its chain, and the second begins a chain,
    in which all earlier tokens are context.
    """
    chains = list[list[int]]()
    for number, call in enumerate(calls):
        chain = next((chain for chain in chains if call.follows(calls[chain[-1]])), None)
        if chain is None:
            chains.append([number])
        else:
            chain.append(number)
    return chains


def _sample(
    chain: Sequence[Call],
    reward: float,
    grade: RewardResult,
    stop_reason: StopReason | None,
    step_rewards: Sequence[float] | None,
) -> Sample:
    """Make a sample of the last call's tokens, with all calls' completions in the loss mask."""
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
    token_rewards = None
    if step_rewards is not None:
        token_rewards = np.zeros(len(tokens), np.float32)
        for call, step_reward in zip(chain, step_rewards, strict=True):
            token_rewards[len(call.tokens) - 1] += step_reward
    return Sample(
        tokens=tokens,
        loss_mask=loss_mask,
        behave_logp=logp,
        versions=versions,
        reward=reward,
        grade=grade.kind,
        components=grade.components,
        stop_reason=stop_reason or chain[-1].completion.stop_reason,
        experts=_experts(chain, len(tokens)),
        token_rewards=token_rewards,
    )


def _experts(chain: Sequence[Call], num_tokens: int) -> Shaped[np.ndarray, "T L k"] | None:
    """Return the experts of every token from the first call that fed it; None if a call has none.

    A later call feeds the tokens of earlier ones again, with other weights perhaps.
    """
    found = [call.completion.experts for call in chain if call.completion.experts is not None]
    if len(found) < len(chain):
        return None
    dtype, each = found[0].dtype, found[0].shape[1:]
    experts, known = np.full((num_tokens, *each), native_expert(dtype), dtype), 0
    for of_call in found:
        experts[known : len(of_call)] = of_call[known:]
        known = max(known, len(of_call))
    return experts
