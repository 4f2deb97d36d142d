"""Encoding of records between processes as numbers, strings, arrays, lists and dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from areal_jax.records import Completion, Request, Sampling, TopLogprobs

Plain = Any
"""Value of the types in the first line of this module."""


def encode_completion(completion: Completion) -> Plain:
    top = completion.top_logprobs
    return (
        *(completion.tokens, completion.logp, completion.versions, completion.stop_reason),
        None if top is None else (top.tokens, top.logp),
        completion.experts,
    )


def decode_completion(plain: Plain) -> Completion:
    tokens, logp, versions, stop_reason, top_logprobs, experts = plain
    return Completion(
        tokens,
        logp,
        versions,
        stop_reason,
        None if top_logprobs is None else TopLogprobs(*top_logprobs),
        experts,
    )


def encode_completions(completions: Sequence[Completion]) -> Plain:
    return [encode_completion(completion) for completion in completions]


def decode_completions(plain: Plain) -> list[Completion]:
    return [decode_completion(each) for each in plain]


def decode_snapshot(plain: Mapping[str, Plain]) -> dict[str, tuple[Completion, ...]]:
    """Decode the partial completions in an engine's snapshot."""
    return {name: tuple(decode_completions(sampled)) for name, sampled in plain.items()}


def encode_request(request: Request) -> Plain:
    """Encode all of a request except its progress callback."""
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
        "resume": encode_completions(request.resume),
        "images": [np.frombuffer(image, np.uint8) for image in request.images],
    }


def decode_request(plain: Plain) -> Request:
    sampling = plain["sampling"]
    return Request(
        **{
            name: plain[name]
            for name in ("id", "prompt_tokens", "num_samples", "seed", "min_version")
        },
        sampling=Sampling(**{**sampling, "stop_token_ids": tuple(sampling["stop_token_ids"])}),
        resume=tuple(decode_completions(plain["resume"])),
        images=tuple(image.tobytes() for image in plain["images"]),
    )
