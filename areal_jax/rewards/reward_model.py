"""A trained reward model as a reward: on this process's devices, or behind a URL."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, runtime_checkable

from areal_jax.errors import ConfigError, InvalidRequest
from areal_jax.records import Message, RewardResult, Task
from areal_jax.rewards.config import RewardModelConfig
from areal_jax.rewards.http_client import ModelClient, Refused


@runtime_checkable
class Scorer(Protocol):
    """Scores conversations."""

    async def start(self) -> None:
        """Load what `score` needs; without it, the first call does."""
        ...

    async def score(self, prompt: Sequence[Message], answer: str) -> float:
        """Return the output at the last token of a conversation.

        Raises:
            InvalidRequest: the conversation is too long, or its chat template refuses it.
            Refused: the server refuses the request.
        """
        ...

    def describe_failure(self) -> str:
        """Return why there is no score yet."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Return counts since the start."""
        ...

    async def close(self) -> None: ...


class RemoteScorer:
    """A reward model behind vLLM's `/classify`, which `areal-serve` has too."""

    def __init__(self, url: str) -> None:
        self._client = ModelClient(url)
        self._num_tokens = 0

    async def start(self) -> None:
        """The server has loaded its model."""

    async def score(self, prompt: Sequence[Message], answer: str) -> float:
        turns = [*prompt, Message("assistant", answer)]
        body: dict[str, Any] = {
            "messages": [{"role": turn.role, "content": turn.content} for turn in turns],
            # Without it, a sigmoid is applied.
            "use_activation": False,
        }
        reply = await self._client.call("classify", body)
        try:
            (score,) = reply["data"][0]["probs"]
            self._num_tokens += int(reply.get("usage", {}).get("total_tokens", 0))
            return float(score)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(f"expected one score, found {str(reply)[:200]}") from error

    def describe_failure(self) -> str:
        return self._client.last_failure

    def counters(self) -> Mapping[str, float]:
        return {"model_tokens": float(self._num_tokens)}

    async def close(self) -> None:
        await self._client.close()


class ModelReward:
    """Scores answers by a reward model, and adds the verifier's share.

    What is not scored within `timeout_s` fails the answer, which then is not trained on.
    """

    def __init__(
        self, config: RewardModelConfig, scale: Literal["unit", "raw"], scorer: Scorer | None
    ) -> None:
        """
        Args:
            config: settings.
            scale: raw: rewards are scores; unit: their sigmoid.
            scorer: the model of `config.path`.

        Raises:
            ConfigError: the settings name a folder, and there is no scorer.
        """
        if scorer is None:
            if config.url is None:
                raise ConfigError(
                    f"rewards.model.path={config.path} is scored in the process of a run; set "
                    "rewards.model.url to a server of it (areal-serve model=PATH)"
                )
            scorer = RemoteScorer(config.url)
        self.config, self.scorer, self._scale = config, scorer, scale
        self._num_answers, self._seconds = 0, 0.0

    async def __call__(
        self, task: Task, answer: str, verified: RewardResult | None
    ) -> RewardResult:
        """Return the result of the verifier with the model's share.

        Args:
            task: the task.
            answer: the answer.
            verified: result of the verifier; with a weight of 1 only a component beside the score.
                None: the task has no verifier.
        """
        config, clock = self.config, asyncio.get_running_loop().time
        named, start_s = f"rewards.model={config.url or config.path}", clock()
        try:
            async with asyncio.timeout(config.timeout_s):
                score = await self.scorer.score(task.prompt, answer)
        except TimeoutError:
            detail = f"no score of {named} within rewards.model.timeout_s={config.timeout_s:g} s"
            return RewardResult("infrastructure", f"{detail}: {self.scorer.describe_failure()}")
        except (Refused, InvalidRequest) as error:
            return RewardResult("infrastructure", f"{named}: {error}")
        if not math.isfinite(score):
            return RewardResult("infrastructure", f"{named}: expected a number, found {score}")
        self._num_answers += 1
        self._seconds += clock() - start_s
        return self._combine(score, verified)

    def _combine(self, score: float, verified: RewardResult | None) -> RewardResult:
        weight = self.config.weight
        if self._scale == "unit":
            score = sigmoid(score)
        components = {"reward_model": score}
        if verified is not None:
            components = {**verified.components, "verifier": verified.credit, **components}
            score = (1 - weight) * verified.credit + weight * score
        if self._scale == "raw":
            return RewardResult("scored", score=score, components=components)
        if verified is None:
            kind = "correct" if score == 1 else "wrong"
            return RewardResult(kind, score=score, components=components)
        return replace(verified, score=score, components=components)

    def counters(self) -> dict[str, float]:
        """Return counts since the start."""
        return {
            "model_answers": float(self._num_answers),
            "model_s": self._seconds,
            **self.scorer.counters(),
        }


def sigmoid(score: float) -> float:
    """Return 1 / (1 + exp(-score)), without overflow for scores of either sign."""
    return 0.5 + 0.5 * math.tanh(score / 2)
