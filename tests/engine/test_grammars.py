"""Completions that match a grammar: masks on the device, and the grammar's place on the host."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import chz
import numpy as np
import pytest
from tiny_decode import (
    CONFIG,
    Shelf,
    engine,
    request,
    same_samples,
    trainer_distribution,
    with_setting,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_jax.data.grammars import (
    MAX_GRAMMAR_BYTES,
    Grammars,
    json_grammar,
    merged_grammar,
    regex_grammar,
)
from areal_jax.engine.admission import check_request
from areal_jax.engine.batch import SamplingMode
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.errors import EngineStopped, InvalidRequest
from areal_jax.records import Completion, Request

# One token for each character, and one that ends an answer.
LETTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345{}":,'
STOP = 63
PROMPT = (5, 9, 33, 2, 17)
# At most 7 characters, all of them in LETTERS.
PATTERN = "[a-m]{2}(X|[0-3]{1,4})z"


@lru_cache
def grammars() -> Grammars:
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<stop>"])
    assert tokenizer.token_to_id("<stop>") == STOP
    return Grammars(tokenizer.to_str, 64, [STOP])


def text(completion: Completion) -> str:
    return "".join(LETTERS[token] for token in completion.tokens if token != STOP)


def constrained(name: str = "g", grammar: str | None = None, **how: Any) -> Request:
    sampling = {key: how.pop(key) for key in ("presence_penalty", "num_top_logprobs") if key in how}
    plain = request(name, PROMPT, stop=(STOP,), **how)
    grammar = regex_grammar(PATTERN) if grammar is None else grammar
    return replace(plain, sampling=replace(plain.sampling, grammar=grammar, **sampling))


def answered(
    *requests: Request, on: DecodeEngine | None = None, weights: Shelf | None = None
) -> tuple[list[Any], dict[str, tuple[float, float]]]:
    """Completions or the error of each request, and the engine's metrics."""

    async def main() -> tuple[list[Any], dict[str, tuple[float, float]]]:
        own = on or engine()
        loop = EngineLoop(own, weights or Shelf(own, (0, 0, 0)), grammars=grammars())
        try:
            futures = [loop.submit(each) for each in requests]
            loop.start()
            found = await asyncio.gather(*futures, return_exceptions=True)
            for each in found:
                if isinstance(each, EngineStopped):
                    raise each
            return found, loop.metrics()
        finally:
            loop.close()

    return asyncio.run(asyncio.wait_for(main(), 120))


def allowed_after(tokens: np.ndarray, grammar: str) -> np.ndarray:
    matcher, bits = grammars().matcher(grammar), np.zeros(2, np.int32)
    matcher.consume(tokens)
    matcher.allowed(bits)
    return np.unpackbits(bits.view(np.uint8), bitorder="little") > 0


def masked_logp(completion: Completion, grammar: str, seed: int = 0) -> list[float]:
    """Log-probs of the sampled tokens among those that may follow."""
    plain = trainer_distribution(PROMPT, completion, seed)
    found = []
    for place, token in enumerate(completion.tokens):
        allowed = allowed_after(completion.tokens[:place], grammar)
        found.append(plain[place][token] - np.log(np.exp(plain[place][allowed]).sum()))
    return found


def test_completions_match_and_logp_are_of_the_masked_distribution():
    [completions], _ = answered(constrained(num_samples=6, seed=3))
    texts = [text(each) for each in completions]
    assert all(re.fullmatch(PATTERN, each) for each in texts) and len(set(texts)) > 3
    for each in completions:
        assert each.stop_reason == "stop" and each.tokens[-1] == STOP
        np.testing.assert_allclose(each.logp, masked_logp(each, regex_grammar(PATTERN)), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_unmasked_logprobs_of_matching_completions_are_the_trainers(temperature: float):
    masked = constrained(num_samples=6, seed=3, temperature=temperature)
    sampling = replace(masked.sampling, unmasked_logprobs=True)
    [same, completions], _ = answered(masked, replace(masked, id="u", sampling=sampling))
    for one, other in zip(same, completions, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        logits = trainer_distribution(PROMPT, other, 0) / temperature
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        logp = np.take_along_axis(expected, other.tokens[:, None], 1)[:, 0]
        np.testing.assert_allclose(other.logp, logp, atol=1e-4)
        assert (one.logp > other.logp + 1e-3).any()


def test_requests_without_grammar_keep_their_tokens_and_dispatches():
    # 20 tokens in dispatches of 4 steps, alone and beside completions of at most 8 tokens.
    plain = request("plain", num_samples=2)
    [[alone], before] = answered(plain)
    [[beside, matching], after] = answered(plain, constrained(num_samples=2, seed=3))
    same_samples(alone, beside)
    assert all(re.fullmatch(PATTERN, text(each)) for each in matching)
    # A completion of 8 tokens needs 8 dispatches, of which the last have one step.
    lengths = [len(each.tokens) for each in matching]
    assert (before["dispatches"][0], after["dispatches"][0]) == (5, max(5, *lengths))
    [[alone], _] = answered(constrained(num_samples=2, seed=3))
    same_samples(alone, matching)


def test_grammars_survive_weight_swaps_and_suspension():
    grammar = regex_grammar("[a-z]{8}[0-5]{8}")
    weights = Shelf(engine(), (0, 0, 0), (5, 1, 1))
    [[completion]], metrics = answered(constrained(grammar=grammar, seed=2), weights=weights)
    assert re.fullmatch("[a-z]{8}[0-5]{8}", text(completion))
    assert metrics["swaps"][0] == 2 and set(completion.versions.tolist()) == {0, 1}
    first = completion.slice(0, 9)
    first = replace(first, stop_reason="suspended")
    # The rest is sampled with the weights of version 1 on an engine that starts with its tokens.
    [[resumed]], _ = answered(
        constrained(grammar=grammar, seed=2, resume=(first,)),
        weights=Shelf(engine(), (0, 1, 1)),
    )
    assert resumed.tokens.tolist() == completion.tokens.tolist()


@pytest.mark.slow
def test_grammars_survive_preemption():
    config = chz.replace(CONFIG, kv_tokens=2 * 32, page_tokens=8)
    requests = [constrained(f"{i}", regex_grammar("[a-z]{15}"), seed=i) for i in range(4)]
    crowded, metrics = answered(*requests, on=engine(config))
    assert metrics["preemptions"][0] > 0
    roomy, _ = answered(*requests)
    for one, other in zip(crowded, roomy, strict=True):
        same_samples(one, other)
        assert re.fullmatch("[a-z]{15}", text(one[0]))


@pytest.mark.slow
def test_grammars_with_penalties_filters_and_top_logprobs():
    plain = request("plain", top_k=5)
    [[alone], _] = answered(plain)
    asked = constrained(num_samples=2, seed=1, num_top_logprobs=3, presence_penalty=2.0, top_k=2)
    [[beside, completions], _] = answered(plain, asked)
    same_samples(alone, beside)
    for each in completions:
        assert re.fullmatch(PATTERN, text(each)) and each.top_logprobs is not None
        assert each.top_logprobs.tokens.shape == (len(each.tokens), 3)
        for place, (tokens, logp) in enumerate(zip(*each.top_logprobs, strict=True)):
            allowed = allowed_after(each.tokens[:place], regex_grammar(PATTERN))
            assert all(allowed[tokens[logp > -np.inf]]) and (logp > -np.inf).sum() <= 2


def test_a_grammar_that_fails_ends_its_request_alone():
    # Sampled without the grammar, or with another one.
    other = Completion(
        np.array([20], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "suspended"
    )
    found, _ = answered(
        constrained("invalid", merged_grammar("start: nothing", {})),
        constrained("resumed", resume=(other,)),
        constrained("fine"),
    )
    assert isinstance(found[0], InvalidRequest) and "nothing" in str(found[0])
    assert isinstance(found[1], InvalidRequest) and "satisfy" in str(found[1])
    assert re.fullmatch(PATTERN, text(found[2][0]))


def test_programs_are_compiled_once_for_mixed_requests():
    own = with_setting(engine())
    own.warm, own.warm_masked = SamplingMode.PLAIN, False
    answered(request("plain"), constrained(), on=own)
    assert own.warm_masked
    count = own.num_programs
    answered(request("plain"), constrained(seed=5), request("other", seed=1), on=own)
    assert own.num_programs == count


def test_requests_with_grammar_are_refused_at_admission():
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        check_request(constrained(), CONFIG, 64)
    shaped = replace(constrained().sampling, min_new_tokens=2)
    with pytest.raises(InvalidRequest, match="min_new_tokens=2, expected 0"):
        check_request(replace(constrained(), sampling=shaped), CONFIG, 64, has_grammars=True)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (regex_grammar("((("), "unclosed group"),
        (json_grammar({"enum": ["x" * MAX_GRAMMAR_BYTES]}), f"at most {MAX_GRAMMAR_BYTES} bytes"),
        (json_grammar({"$ref": "https://example.com/schema"}), "schema"),
        (merged_grammar('start: "é"', {}), "no token of the policy"),
        ("{}", "grammars"),
    ],
)
def test_unsupported_grammars_are_refused_with_the_reason(grammar: str, reason: str):
    with pytest.raises(InvalidRequest, match=reason):
        grammars().matcher(grammar)


def test_json_answers_are_valid():
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    closed = json_grammar(schema | {"additionalProperties": False})
    [completions], _ = answered(constrained(grammar=closed, num_samples=3, seed=4))
    assert all(json.loads(text(each))["a"] in ("b", "c") for each in completions)
