"""Who answers the clients of a server: an engine, for whoever shows the token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from jaxtyping import Int32

from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Completion, Engine, OnProgress, Request, Sampling, derive_seed
from areal_jax.serve.answers import Part
from areal_jax.serve.bodies import Chat, Refused, Wishes, require_key


@dataclass(slots=True)
class EngineSource:
    """Answers every request by itself, and is the `Door` to itself."""

    engine: Engine
    model: str
    tokenizer: HFTokenizer
    sampling: Sampling
    """Of a request that says nothing of it."""
    seed: int
    api_key: str
    max_prompt_tokens: int | None = None
    """Of the engine: longer prompts are refused before they are tokenized."""
    measure: Callable[[], Mapping[str, float]] = dict
    """What the engine has counted so far."""
    _numbers: count[int] = field(default_factory=count)

    def enter(self, session: str, key: str) -> EngineSource:
        if session:
            raise Refused(404, "this server has no sessions")
        require_key(key, self.api_key, "the server's bearer token")
        return self

    def serves(self, model: str) -> bool:
        return model == self.model

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prompt_of(self, chat: Chat) -> Int32[np.ndarray, "P"]:
        return self.tokenizer.render(chat.turns, chat.tools, self.max_prompt_tokens)

    def prompt_of_text(self, text: str) -> Int32[np.ndarray, "P"]:
        return self.tokenizer.encode_prompt(text, self.max_prompt_tokens)

    async def draw(self, prompt: Int32[np.ndarray, "P"], wishes: Wishes, on_progress: OnProgress | None) -> list[Completion]:
        number = f"request-{next(self._numbers)}"
        stops = tuple(dict.fromkeys((*self.sampling.stop_token_ids, *wishes.stop_tokens)))
        budget = wishes.max_new_tokens or self.sampling.max_new_tokens
        request = Request(
            id=number,
            prompt_tokens=prompt,
            num_samples=wishes.num_samples,
            sampling=replace(self.sampling, **wishes.sampling, max_new_tokens=budget, stop_token_ids=stops),
            seed=derive_seed(self.seed, number) if wishes.seed is None else wishes.seed,
            on_progress=on_progress,
        )
        return await self.engine.submit(request)

    def told(self, prompt: Int32[np.ndarray, "P"], chat: Chat | None, parts: Sequence[Part]) -> None:
        """Nothing is kept."""
