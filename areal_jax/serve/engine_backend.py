"""Who answers the clients of a server: an engine, for whoever shows the token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from jaxtyping import Int32

from areal_jax.data.grammars import Grammars
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.protocols import Engine
from areal_jax.records import Completion, Message, OnProgress, Request, Sampling, derive_seed
from areal_jax.serve.bodies import Chat, GenerationParams, require_key
from areal_jax.serve.responses import Part
from areal_jax.serve.validation import APIError


@dataclass(slots=True)
class EngineBackend:
    """Answers every request by itself, and is the `Auth` to itself."""

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
    score_tokens: Callable[[Int32[np.ndarray, "N"], int], Awaitable[Completion]] | None = None
    """`EngineLoop.score`."""
    grammars: Grammars | None = None
    """Those of the engine; None: answers have no format."""
    score_answer: Callable[[Sequence[Message], str], Awaitable[tuple[float, int]]] | None = None
    """Returns the score of an answer and the tokens of the conversation; None: the model is no
    reward model."""
    _numbers: count[int] = field(default_factory=count)

    @property
    def unmasked_logprobs(self) -> bool:
        return False

    def enter(self, session: str, key: str) -> EngineBackend:
        if session:
            raise APIError(404, "this server has no sessions")
        require_key(key, self.api_key, "the server's bearer token")
        return self

    def serves(self, model: str) -> bool:
        return model == self.model

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prompt_of(self, chat: Chat) -> Int32[np.ndarray, "P"]:
        images = chat.generation_params.images
        variables = chat.template_variables(self.tokenizer)
        most = self.max_prompt_tokens
        return self.tokenizer.render(chat.turns, chat.tools, most, images, variables)

    def prompt_of_text(self, text: str) -> Int32[np.ndarray, "P"]:
        return self.tokenizer.encode_prompt(text, self.max_prompt_tokens)

    async def generate(
        self,
        prompt: Int32[np.ndarray, "P"],
        generation_params: GenerationParams,
        on_progress: OnProgress | None,
    ) -> list[Completion]:
        number = f"request-{next(self._numbers)}"
        stops = tuple(
            dict.fromkeys((*self.sampling.stop_token_ids, *generation_params.stop_tokens))
        )
        budget = generation_params.max_new_tokens or self.sampling.max_new_tokens
        request = Request(
            id=number,
            prompt_tokens=prompt,
            num_samples=generation_params.num_samples,
            sampling=replace(
                self.sampling,
                **generation_params.sampling,
                max_new_tokens=budget,
                stop_token_ids=stops,
            ),
            seed=derive_seed(self.seed, number)
            if generation_params.seed is None
            else generation_params.seed,
            on_progress=on_progress,
            images=generation_params.images,
        )
        return await self.engine.submit(request)

    async def score(self, prompt: Int32[np.ndarray, "P"], num_top: int) -> Completion:
        if self.score_tokens is None:
            raise APIError(400, "echo with logprobs is not supported by this server", param="echo")
        return await self.score_tokens(prompt, num_top)

    async def classify(self, messages: Sequence[Message], answer: str) -> tuple[float, int]:
        if self.score_answer is None:
            raise APIError(400, f"{self.model} is no reward model, which /classify needs")
        return await self.score_answer(messages, answer)

    def reported(
        self, prompt: Int32[np.ndarray, "P"], chat: Chat | None, parts: Sequence[Part]
    ) -> None:
        """Nothing is kept."""
