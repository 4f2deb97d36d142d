"""A judge: a model behind an OpenAI-compatible URL that scores answers by a rubric."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from areal_jax.errors import first_error
from areal_jax.records import RewardResult, Task
from areal_jax.rewards.config import JudgeConfig
from areal_jax.rewards.http_client import ModelClient, Refused

MAX_UNSCORED = 4
"""Votes without a score after which the judge is not asked again."""

_SCORE = re.compile(r"(?:score|rating)\W*?(?:is\W*?)?(-?\d+(?:\.\d+)?)", re.IGNORECASE)


class Verdict(NamedTuple):
    """The votes of a judge on one answer."""

    score: float
    """Mean vote, from 0 to 1."""
    disagreement: float
    """Standard deviation of the votes."""


class Judge:
    """Asks for `num_votes` scores of an answer, and counts what they cost.

    A vote without a score is asked for again. What does not come within `timeout_s` fails the
    answer, which then is not trained on.
    """

    def __init__(self, config: JudgeConfig) -> None:
        """Create the judge; it connects with its first answer."""
        self.config = config
        self._client = ModelClient(config.url)
        self._model = config.model
        self._num_answers = self._num_votes = self._num_tokens = self._num_unscored = 0
        self._disagreement = 0.0

    async def __call__(self, task: Task, answer: str, verified: RewardResult) -> RewardResult:
        """Return the result of the verifier with the judge's share.

        Args:
            task: the task.
            answer: the answer.
            verified: result of the verifier; of no share with a weight of 1.
        """
        config = self.config
        try:
            async with asyncio.timeout(config.timeout_s):
                found = await self._judge(task, answer)
        except TimeoutError:
            detail = (
                f"no verdict of {config.url} within rewards.judge.timeout_s={config.timeout_s:g} s"
            )
            return RewardResult("infrastructure", f"{detail}: {self._client.last_failure}")
        except Exception as error:  # re-raised, unless there is no verdict
            if not isinstance(refused := first_error(error), Refused):
                raise
            return RewardResult("infrastructure", f"the judge at {config.url}: {refused}")
        if config.weight == 1:
            kind = "correct" if found.score == 1 else "wrong"
            return RewardResult(kind, score=found.score, components={"judge": found.score})
        score = (1 - config.weight) * verified.credit + config.weight * found.score
        components = {"verifier": verified.credit, "judge": found.score}
        return replace(verified, score=score, components={**verified.components, **components})

    def counters(self) -> dict[str, float]:
        """Return the counts since the start."""
        return {
            "judge_votes": float(self._num_votes),
            "judge_unscored": float(self._num_unscored),
            "judge_tokens": float(self._num_tokens),
            "judge_disagreement": self._disagreement / max(1, self._num_answers),
        }

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _judge(self, task: Task, answer: str) -> Verdict:
        texts = {
            "question": "\n\n".join(message.content for message in task.prompt),
            "reference": task.answer or "(none)",
            "answer": answer,
            "max_score": f"{self.config.max_score:g}",
        }
        # Not str.format: answers and rubrics contain braces.
        prompt = re.sub(
            r"\{(question|reference|answer|max_score)\}", lambda m: texts[m[1]], self.config.rubric
        )
        async with asyncio.TaskGroup() as group:
            votes = [group.create_task(self._vote(prompt)) for _ in range(self.config.num_votes)]
        scores = [vote.result() / self.config.max_score for vote in votes]
        verdict = Verdict(fmean(scores), pstdev(scores))
        self._num_answers += 1
        self._disagreement += verdict.disagreement
        return verdict

    async def _vote(self, prompt: str) -> float:
        """Ask until the judge gives a score, a few times."""
        config, text = self.config, ""
        for _ in range(MAX_UNSCORED):
            body: dict[str, Any] = {
                "model": await self._find_model(),
                "messages": [{"role": "user", "content": prompt}],
                "temperature": config.temperature,
                "max_tokens": config.max_new_tokens,
            }
            reply = await self._client.call("chat/completions", body)
            try:
                text = reply["choices"][0]["message"]["content"] or ""
                self._num_tokens += int(reply.get("usage", {}).get("total_tokens", 0))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise Refused(f"expected a chat completion, found {str(reply)[:100]}") from error
            self._num_votes += 1
            if (score := read_score(text, config.max_score)) is not None:
                return score
            self._num_unscored += 1
        raise Refused(
            f"expected a line such as 'Score: 7' from 0 to {config.max_score:g}, found none in "
            f"{MAX_UNSCORED} votes, the last of which ends with {text[-100:]!r}; set "
            "rewards.judge.rubric or max_new_tokens"
        )

    async def _find_model(self) -> str:
        if self._model is None:
            models = await self._client.call("models", None)
            names = [str(model["id"]) for model in models.get("data", ())]
            if len(names) != 1:
                raise Refused(
                    f"expected one model, found {', '.join(names) or 'none'}; set "
                    "rewards.judge.model"
                )
            self._model = names[0]
        return self._model


def read_score(text: str, max_score: float) -> float | None:
    """Return the last score in a judge's text; None if there is none in range."""
    found = [float(number) for number in _SCORE.findall(text)]
    if not found:
        try:
            found = [float(text.strip())]
        except ValueError:
            return None
    return found[-1] if math.isfinite(found[-1]) and 0 <= found[-1] <= max_score else None
