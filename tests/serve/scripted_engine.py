"""A scripted engine for tests of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import openai

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Completion, Progress, Request, Sampling, StopReason
from areal_jax.serve.app import App, listening
from areal_jax.serve.config import LimitsConfig
from areal_jax.serve.engine_backend import EngineBackend

TOKENIZER = HFTokenizer.from_folder(EMBEDDED)
KEY = "key"


def completion(tokens: Sequence[int], stop_reason: StopReason = "stop") -> Completion:
    sampled = np.array(tokens, np.int32)
    return Completion(
        sampled,
        np.full(len(sampled), -0.5, np.float32),
        np.zeros(len(sampled), np.int32),
        stop_reason,
    )


@dataclass
class Scripted:
    """Answers each request with the next text of a script, in chunks of three tokens."""

    script: list[str] = field(default_factory=list)
    error: Exception | None = None
    hangs: bool = False
    requests: list[Request] = field(default_factory=list)
    num_cancelled: int = 0

    async def submit(self, request: Request) -> list[Completion]:
        self.requests.append(request)
        text = self.script.pop(0) if self.script else ""
        tokens = [*TOKENIZER.encode(text).tolist(), *TOKENIZER.stop_token_ids[:1]]
        answer = [completion(tokens) for _ in range(request.num_samples)]
        try:
            for start in range(0, len(tokens), 3):
                await asyncio.sleep(0)
                if request.on_progress is not None and tokens[start : start + 3]:
                    list(
                        request.on_progress(
                            [
                                Progress(i, each.slice(start, start + 3))
                                for i, each in enumerate(answer)
                            ]
                        )
                    )
            if self.error is not None:
                raise self.error
            if self.hangs:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return answer

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        return {}


@asynccontextmanager
async def served(
    engine: Scripted, limits: LimitsConfig | None = None, tokenizer: HFTokenizer = TOKENIZER
) -> AsyncIterator[tuple[App, openai.AsyncOpenAI]]:
    """A server over the engine, and a client of it."""
    sampling = Sampling(100, stop_token_ids=tokenizer.stop_token_ids)
    app = App(EngineBackend(engine, "m", tokenizer, sampling, 0, KEY), limits or LimitsConfig())
    async with (
        listening(app, "127.0.0.1", 0, 0.1) as port,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0
        ) as client,
    ):
        yield app, client
