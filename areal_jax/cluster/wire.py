"""Records as they cross between processes: numbers, texts, arrays, lists and dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from areal_jax.records import Completion, Request, Sampling, TopLogprobs

Plain = Any
"""Made of what this module's first line lists."""


def completion_to(completion: Completion) -> Plain:
    reported = completion.top_logprobs
    return (
        *(completion.tokens, completion.logp, completion.versions, completion.stop_reason),
        None if reported is None else (reported.tokens, reported.logp),
    )


def completion_from(plain: Plain) -> Completion:
    tokens, logp, versions, stop_reason, reported = plain
    return Completion(
        tokens, logp, versions, stop_reason, None if reported is None else TopLogprobs(*reported)
    )


def completions_to(completions: Sequence[Completion]) -> Plain:
    return [completion_to(completion) for completion in completions]


def completions_from(plain: Plain) -> list[Completion]:
    return [completion_from(each) for each in plain]


def partials_from(plain: Mapping[str, Plain]) -> dict[str, tuple[Completion, ...]]:
    """What a snapshot of an engine tells."""
    return {name: tuple(completions_from(sampled)) for name, sampled in plain.items()}


def request_to(request: Request) -> Plain:
    """All of it but whom to tell of its progress."""
    return {
        "id": request.id,
        "prompt_tokens": request.prompt_tokens,
        "num_samples": request.num_samples,
        "sampling": {
            **asdict(request.sampling),
            "stop_token_ids": list(request.sampling.stop_token_ids),
        },
        "seed": request.seed,
        "min_version": request.min_version,
        "resume": completions_to(request.resume),
    }


def request_from(plain: Plain) -> Request:
    sampling = plain["sampling"]
    return Request(
        **{
            name: plain[name]
            for name in ("id", "prompt_tokens", "num_samples", "seed", "min_version")
        },
        sampling=Sampling(**{**sampling, "stop_token_ids": tuple(sampling["stop_token_ids"])}),
        resume=tuple(completions_from(plain["resume"])),
    )
