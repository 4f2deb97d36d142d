"""Sampling requests: their limits, stop strings, and log-probs of prompts."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Float32, Int32

from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.records import (
    Completion,
    OnProgress,
    Progress,
    Request,
    Sampling,
    derive_seed,
    empty_completion,
)
from areal_jax.serve.detokenizer import StreamDetokenizer
from areal_jax.tinker.bodies import Sample
from areal_jax.tinker.config import TinkerConfig
from areal_jax.tinker.engine_pool import EnginePool
from areal_jax.tinker.fairness import FairQueue
from areal_jax.tinker.futures import Futures, error_result
from areal_jax.tinker.journal import RequestRow
from areal_jax.tinker.messages import SampledTokens, sample_response
from areal_jax.tinker.pooled_engine import Seat
from areal_jax.tinker.programs import PromptLogprobs
from areal_jax.tinker.tenants import session_of

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 16

ScorePrompt: TypeAlias = Callable[[str, np.ndarray, int], Awaitable[PromptLogprobs]]
"""Scores a prompt with the weights of a path, and that many most likely tokens."""


@dataclass(eq=False)
class SamplingRequests:
    """Answers sampling requests, each in a task of its own.

    It has more than 200 lines because turns, places and samples of a request end together.

    Attributes:
        pool: Engines.
        futures: Gets the results.
        tokenizer: Of the policy.
        config: Settings of the server.
        score: Computes log-probs of prompts.
        tenant_of: Returns the name of the tenant of a session.
    """

    pool: EnginePool
    futures: Futures
    tokenizer: HFTokenizer
    config: TinkerConfig
    score: ScorePrompt
    tenant_of: Callable[[str], str]
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Tasks by request, whose id starts with that of the session."""
    num_unfinished: Counter[str] = field(default_factory=Counter)
    """Unfinished requests by session."""

    def __post_init__(self) -> None:
        # As many again as decode wait in the engines, so that a free slot never waits.
        num_slots = self.config.engine.num_slots
        self._turns = FairQueue(lambda: 2 * num_slots * max(1, self.pool.num_engines))

    def start(self, row: RequestRow, body: Sample, path: str) -> None:
        """Answer a request, whose body was read, with the weights of a path."""
        session = session_of(row.id)
        task = asyncio.get_running_loop().create_task(self._answer(row, body, path))
        self.running[row.id] = task
        self.num_unfinished[session] += 1

        def forget(_: object) -> None:
            del self.running[row.id]
            self.num_unfinished[session] -= 1
            if not self.num_unfinished[session]:
                del self.num_unfinished[session]

        task.add_done_callback(forget)

    def end_session(self, session: str) -> None:
        """Cancel the unfinished requests of a session."""
        for request in [each for each in self.running if session_of(each) == session]:
            self.cancel(request)

    def cancel(self, request: str) -> None:
        """Cancel a request, if it is unfinished."""
        if (task := self.running.get(request)) is not None:
            self.futures.finish(request, *error_result("the request was cancelled", "user"))
            task.cancel()

    async def close(self) -> None:
        """Leave unfinished requests to the next start of the server."""
        tasks = list(self.running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, row: RequestRow, body: Sample, path: str) -> None:
        try:
            result = "protobuf", await self._sample(row, body, path)
        except InvalidRequest as error:
            result = error_result(str(error), "user")
        except TimeoutError as error:
            result = error_result(str(error), "server")
        except EngineStopped as error:
            logger.error("the decode engine stopped: %s", error)
            result = error_result("the decode engine stopped", "server")
        except Exception as error:  # of any class: the client gets it, and others go on
            logger.exception("sampling request %s failed", row.id)
            result = error_result(f"the server failed: {type(error).__name__}", "server")
        self.futures.finish(row.id, *result)

    async def _sample(self, row: RequestRow, body: Sample, path: str) -> bytes:
        prompt, stops = self._prompt(body), body.sampling_params.stop
        sampling, texts = self._sampling(body), [stops] if isinstance(stops, str) else stops or []
        strings = [stop for stop in texts if isinstance(stop, str)]
        if len(strings) > MAX_STOP_STRINGS or "" in strings:
            raise InvalidRequest(f"stop: expected at most {MAX_STOP_STRINGS} strings, none empty")
        detokenizers = [
            StreamDetokenizer(
                lambda tokens: self.tokenizer.decode(np.array(tokens, np.int32)), strings
            )
            for _ in range(body.num_samples)
        ]
        seed = body.sampling_params.seed
        async with self._seated(row, body.num_samples, path) as seat:
            request = Request(
                id=row.id,
                prompt_tokens=prompt,
                num_samples=body.num_samples,
                sampling=sampling,
                seed=derive_seed(self.config.seed, row.id) if seed is None else seed % (1 << 31),
                adapter=seat.adapter,
                on_progress=_end_at_stops(detokenizers) if strings else None,
            )
            try:
                completions = await self._submit(request, seat, body.sampling_params.max_staleness)
            except EngineStopped:
                self.pool.discard(seat.engine)
                raise
            sequences = [
                _sequence(
                    completion,
                    detokenizers[i] if strings else None,
                    seat,
                    body.topk_sample_logprobs,
                )
                for i, completion in enumerate(completions)
            ]
        logp, top = None, None
        if body.prompt_logprobs or body.topk_prompt_logprobs:
            num_top = body.topk_prompt_logprobs
            logp, ids, top_logp = await self.score(path, prompt, num_top)
            first = max(1, len(prompt) - (body.prompt_logprobs_last_n or len(prompt)))
            logp, top_logp = _nan_before(first, logp), _nan_before(first, top_logp)
            top = (np.maximum(ids, 0), top_logp) if num_top else None
        return sample_response(sequences, logp if body.prompt_logprobs else None, top)

    @asynccontextmanager
    async def _seated(self, row: RequestRow, num_samples: int, path: str) -> AsyncIterator[Seat]:
        """Wait for a turn and for the sampler's place in an engine, and hold both in the block.

        Where the place is not there yet, only requests of this sampler wait for it.
        """
        session = session_of(row.id)
        whose = self.tenant_of(session), session, path
        async with self._turns.turn(whose, num_samples) as paused:
            while not self.pool.is_placed(path):
                with paused():
                    await self.pool.place(path)
            with self.pool.held(path) as seat:
                yield seat

    async def _submit(
        self, request: Request, seat: Seat, max_staleness: int | None
    ) -> list[Completion]:
        """Sample, and again what is too old at the end.

        Args:
            request: the request.
            seat: the sampler.
            max_staleness: most optimizer steps between the weights of a token and the sampler's
                newest ones; None: any number.

        Raises:
            InvalidRequest: samples are too old each time.
        """
        # Finished completions are returned as they are.
        resume, ages = tuple[Completion, ...](), np.zeros(1)
        for _ in range(self.config.limits.max_resamples + 1):
            again = replace(request, min_version=seat.version, resume=resume)
            completions = await seat.engine.loop.submit(again)
            if max_staleness is None:
                return completions
            oldest = [seat.step_of(int(each.versions.min())) for each in completions]
            ages = seat.step - np.array(oldest)
            if ages.max() <= max_staleness:
                return completions
            resume = tuple(
                empty_completion() if age > max_staleness else completion
                for age, completion in zip(ages, completions, strict=True)
            )
        raise InvalidRequest(
            f"max_staleness={max_staleness}: samples are {ages.max()} optimizer steps old after "
            f"limits.max_resamples={self.config.limits.max_resamples} more tries; set a higher "
            "bound, or sample fewer tokens"
        )

    def _prompt(self, body: Sample) -> Int32[np.ndarray, "P"]:
        """Return the tokens of the prompt.

        Raises:
            InvalidRequest: it is no text, or the request asks for what is not supported.
        """
        if body.target_prompt_logprobs is not None or body.prompt_alt_tokens_k:
            raise InvalidRequest(
                "target_prompt_logprobs and prompt_alt_tokens_k are not supported; use "
                "topk_prompt_logprobs"
            )
        if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
            raise InvalidRequest("prompt: expected chunks of encoded_text, found another kind")
        most = self.config.limits.max_samples
        if body.num_samples > most:
            raise InvalidRequest(
                f"num_samples={body.num_samples}: expected at most limits.max_samples={most}"
            )
        return np.array([t for chunk in body.prompt.chunks for t in chunk.tokens], np.int32)

    def _sampling(self, body: Sample) -> Sampling:
        given, most = body.sampling_params, self.config.engine.max_new_tokens
        stops = given.stop
        tokens = tuple(self.tokenizer.stop_token_ids)
        if isinstance(stops, list):
            # An empty list disables the policy's own stop tokens.
            own = tokens if stops else ()
            tokens = (*(stop for stop in stops if isinstance(stop, int)), *own)
        return Sampling(
            max_new_tokens=most if given.max_tokens is None else given.max_tokens,
            temperature=given.temperature,
            top_k=max(0, given.top_k),
            top_p=given.top_p,
            stop_token_ids=tuple(dict.fromkeys(tokens)),
            num_top_logprobs=body.topk_sample_logprobs,
        )


def _end_at_stops(detokenizers: Sequence[StreamDetokenizer]) -> OnProgress:
    """Return a callback that ends samples whose text has a stop string."""

    def follow(progress: Sequence[Progress]) -> list[int]:
        for sample, sampled in progress:
            detokenizers[sample].push(sampled.tokens.tolist())
        return [sample for sample, _ in progress if detokenizers[sample].is_stopped]

    return follow


def _sequence(
    completion: Completion, detokenizer: StreamDetokenizer | None, seat: Seat, num_top: int
) -> SampledTokens:
    """Return a sample up to the token that completes a stop string, if it has one."""
    end = len(completion.tokens)
    if detokenizer is not None:
        detokenizer.push(completion.tokens.tolist()[detokenizer.num_tokens :])
        end = detokenizer.num_tokens if detokenizer.is_stopped else end
    kept, top = completion.slice(0, end), None
    if num_top and kept.top_logprobs is not None:
        top = kept.top_logprobs.tokens[:, :num_top], kept.top_logprobs.logp[:, :num_top]
    versions, places = np.unique(kept.versions, return_inverse=True)
    steps = np.array([seat.step_of(int(each)) for each in versions], np.int32)[places]
    is_stopped = detokenizer is not None and detokenizer.is_stopped
    reason = "stop" if is_stopped else completion.stop_reason
    return SampledTokens(reason, kept.tokens, kept.logp, steps, top)


def _nan_before(first: int, values: Float32[np.ndarray, "P ..."]) -> Float32[np.ndarray, "P ..."]:
    values = values.astype(np.float32)
    values[:first] = np.nan
    return values
