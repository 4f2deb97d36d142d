"""Checks of requests at admission: limits of the engine and of what the device can represent."""

from __future__ import annotations

from areal_jax.engine.batch import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from areal_jax.engine.config import MAX_TOP_K, EngineConfig
from areal_jax.errors import InvalidRequest
from areal_jax.records import Request, Sampling

_LEAST, _MOST = 1e-6, 1e6
"""Bounds of what divides, multiplies or shifts logits, so that float32 represents the result."""


def check_request(
    request: Request, config: EngineConfig, vocab_size: int, *, has_grammars: bool = False
) -> None:
    """Check a request against the limits of the engine.

    Args:
        request: the request.
        config: limits.
        vocab_size: tokens of the policy.
        has_grammars: whether the engine can let completions match grammars.

    Raises:
        InvalidRequest: naming the limit that the request exceeds, and its setting.
    """
    name, prompt, sampling = f"request {request.id!r}", request.prompt_tokens, request.sampling
    if not 1 <= len(prompt) <= config.max_prompt_tokens:
        limit = f"engine.max_prompt_tokens={config.max_prompt_tokens}"
        raise InvalidRequest(f"{name}: its prompt has {len(prompt)} tokens, expected 1 to {limit}")
    if not 1 <= sampling.max_new_tokens <= config.max_new_tokens:
        raise InvalidRequest(
            f"{name}: sampling.max_new_tokens={sampling.max_new_tokens}, "
            f"expected 1 to engine.max_new_tokens={config.max_new_tokens}"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise InvalidRequest(
            f"{name}: prompt tokens {prompt.min()} to {prompt.max()}, expected 0 to "
            f"{vocab_size - 1}"
        )
    if request.num_samples < 1 or len(request.resume) not in (0, request.num_samples):
        raise InvalidRequest(
            f"{name}: num_samples={request.num_samples} with {len(request.resume)} completions "
            "to resume; expected at least 1 sample, and one completion for each or none at all"
        )
    if sampling.grammar and not has_grammars:
        raise InvalidRequest(
            f"{name}: expected a request without sampling.grammar, for which this engine has no "
            "tokenizer"
        )
    if sampling.grammar and sampling.min_new_tokens > 0:
        raise InvalidRequest(
            f"{name}: sampling.min_new_tokens={sampling.min_new_tokens}, expected 0 with a "
            "grammar, which says where a completion ends"
        )
    _check_sampling(name, sampling)


def _check_sampling(name: str, sampling: Sampling) -> None:
    temperature, repetition = sampling.temperature, sampling.repetition_penalty
    within = f"{_LEAST:g} to {_MOST:g}"
    # Written so that nan fails.
    for field, is_valid, expected in (
        ("temperature", temperature == 0 or _LEAST <= temperature <= _MOST, f"0, or {within}"),
        ("top_k", 0 <= sampling.top_k <= MAX_TOP_K, f"0 to {MAX_TOP_K}"),
        ("top_p", _LEAST <= sampling.top_p <= 1, f"{_LEAST:g} to 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "0 to 1"),
        (
            "min_new_tokens",
            0 <= sampling.min_new_tokens <= sampling.max_new_tokens,
            "0 to max_new_tokens",
        ),
        ("presence_penalty", abs(sampling.presence_penalty) <= _MOST, f"-{_MOST:g} to {_MOST:g}"),
        ("frequency_penalty", abs(sampling.frequency_penalty) <= _MOST, f"-{_MOST:g} to {_MOST:g}"),
        ("repetition_penalty", _LEAST <= repetition <= _MOST, within),
        (
            "num_top_logprobs",
            0 <= sampling.num_top_logprobs <= MAX_TOP_LOGPROBS,
            f"0 to {MAX_TOP_LOGPROBS}",
        ),
    ):
        if not is_valid:
            raise InvalidRequest(
                f"{name}: sampling.{field}={getattr(sampling, field)}, expected {expected}"
            )
    stops = sampling.stop_token_ids
    if len(stops) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"{name}: {len(stops)} stop_token_ids, expected at most {MAX_STOP_TOKENS}"
        )
    if not all(0 <= token < 2**31 for token in stops):
        raise InvalidRequest(f"{name}: sampling.stop_token_ids={stops}, expected 0 to {2**31 - 1}")
