"""The engine also has JetStream's later interface: a first token of every prefill, log-probs, one
prompt in several slots.

That interface is in no release; `later_engine_api.py` states what it declares, and stands here for
the installed one."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import uuid
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jetstream.engine  # pyright: ignore[reportMissingImports]
import later_engine_api
import numpy as np
import pytest
from embedded_engine import CONFIG, DEVICES, QUESTIONS, by_engine_loop, decoding, tokenizer
from jetstream.engine import engine_api, token_utils  # pyright: ignore[reportMissingImports]

from areal_jax.engine import jetstream as adapter
from areal_jax.records import Message, Sampling

SAMPLING = Sampling(CONFIG.max_new_tokens, stop_token_ids=tokenizer().stop_token_ids)
PROMPTS = [tokenizer().render((Message("user", question),)) for question in QUESTIONS[:4]]


@pytest.fixture(scope="module")
def later() -> Iterator[ModuleType]:
    """The adapter, as it is where the later interface is installed."""
    spec = importlib.util.spec_from_file_location("later_adapter", adapter.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.util.module_from_spec(spec)
        patch.setattr(jetstream.engine, "engine_api", later_engine_api)
        patch.setitem(sys.modules, "later_adapter", module)
        spec.loader.exec_module(module)
        yield module


def padded(tokens: np.ndarray) -> dict[str, Any]:
    """The tokens as JetStream hands them over."""
    array, true_length = token_utils.pad_tokens(tokens, bos_id=-1, pad_id=0, max_prefill_length=64)
    return {"padded_tokens": array, "true_length": true_length}


def decode(engine: Any, state: Any, firsts: Sequence[Any]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of slots 0, 1, ... of which the first ones are known, to the end of
    each."""
    found = [([int(first.tokens[0, 0])], [float(first.log_prob[0, 0])]) for first in firsts]
    slots, ended = (
        tuple(range(len(found))),
        [first.tokens[0, 0] in SAMPLING.stop_token_ids for first in firsts],
    )
    while not all(ended):
        state, results = engine.generate(engine.load_params(), state)
        results.copy_to_host_async()
        sampled = results.convert_to_numpy().get_result_at_slots(slots)
        for slot, (tokens, logps) in enumerate(found):
            assert (
                ended[slot]
                or not sampled.valid[slot, 0]
                or sampled.lengths[slot] == len(tokens) + 1
            )
            ended[slot] |= not sampled.valid[slot, 0]
            if not ended[slot]:
                tokens.append(int(sampled.tokens[slot, 0]))
                logps.append(float(sampled.log_prob[slot, 0]))
    return found


def is_what_the_engine_sampled(
    found: Sequence[tuple[list[int], list[float]]], expected: Sequence[Any]
) -> None:
    assert [tokens for tokens, _ in found] == [
        completion.tokens.tolist() for completion in expected
    ]
    for (_, logps), completion in zip(found, expected, strict=True):
        np.testing.assert_allclose(logps, completion.logp, atol=1e-5)


@pytest.mark.parametrize("num_devices", DEVICES)
def test_tokens_and_logprobs_match_the_engine_loop(later: ModuleType, num_devices: int) -> None:
    engine = later.JetStreamEngine(*decoding(num_devices), tokenizer(), SAMPLING, seed=7)
    state, firsts = engine.init_decode_state(), []
    for slot, prompt in enumerate(PROMPTS):
        prefix, first = engine.prefill(
            params=engine.load_params(), **padded(prompt), request_id=uuid.uuid4()
        )
        data = first.convert_to_numpy().get_result_at_slots((0,))
        assert (data.valid.item(), data.lengths.item()) == (1, 1)
        firsts.append(data)
        state = engine.insert(prefix, state, slot=slot, request_id=uuid.uuid4())
        engine.free_resource(slot)
    is_what_the_engine_sampled(
        decode(engine, state, firsts),
        [completion for (completion,) in by_engine_loop(num_devices, PROMPTS, SAMPLING)],
    )


@pytest.mark.parametrize("num_devices", DEVICES)
def test_one_prefill_serves_a_group(later: ModuleType, num_devices: int) -> None:
    engine = later.JetStreamEngine(*decoding(num_devices), tokenizer(), SAMPLING, seed=7)
    prefix, first = engine.prefill_multisampling(
        params=engine.load_params(), **padded(PROMPTS[0]), num_samples=4
    )
    assert first.samples_per_slot == 4 and first.get_result_at_slot(0).tokens.shape == (4, 1)
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [0, 1, 2, 3])
    (expected,) = by_engine_loop(num_devices, PROMPTS[:1], SAMPLING, num_samples=4)
    is_what_the_engine_sampled(
        decode(engine, state, [first.get_result_at_slots((sample,)) for sample in range(4)]),
        expected,
    )
    with pytest.raises(ValueError, match="expected a slot for each of 4 answers, found 2"):
        engine.bulk_insert(prefix, state, [0, 1])


@pytest.mark.parametrize("num_before", [1, 9, 16])
def test_existing_prefix_is_not_prefilled_again(later: ModuleType, num_before: int) -> None:
    engine = later.JetStreamEngine(*decoding(1), tokenizer(), SAMPLING, seed=7)
    params, prompt = engine.load_params(), PROMPTS[0]
    before, _ = engine.prefill(params=params, **padded(prompt[:num_before]))
    existing = later_engine_api.ExistingPrefix(before.cache, before.common_prefix_tokens)
    # Of the pages of another prompt nothing is left.
    engine.prefill(params=params, **padded(PROMPTS[1]))
    found, _ = engine.prefill(
        params=params, existing_prefix=existing, **padded(prompt[num_before:])
    )
    expected, _ = engine.prefill(params=params, **padded(prompt))
    assert np.array_equal(found.common_prefix_tokens, prompt)
    for ours, theirs in zip(found.cache, expected.cache, strict=True):
        np.testing.assert_allclose(
            by_token(ours)[:, : len(prompt)], by_token(theirs)[:, : len(prompt)], atol=1e-5
        )


def by_token(pages: Any) -> np.ndarray:
    """Keys and values of a layer: [2K, tokens, H]."""
    both = np.concatenate([pages.keys, pages.values])
    return both.reshape(len(both), -1, both.shape[3])


def test_custom_sampler_is_refused(later: ModuleType) -> None:
    engine = later.JetStreamEngine(*decoding(1), tokenizer(), SAMPLING)
    with pytest.raises(ValueError, match="expected sampler=None"):
        engine.prefill(params=engine.load_params(), **padded(PROMPTS[0]), sampler=len)


@pytest.mark.parametrize("api", [engine_api, later_engine_api], ids=["0.2.2", "later"])
def test_every_verb_takes_what_either_interface_hands_it(api: ModuleType) -> None:
    for name in api.Engine.__abstractmethods__:
        ours, theirs = getattr(adapter.JetStreamEngine, name), getattr(api.Engine, name)
        if not isinstance(theirs, property):
            wanted = set(inspect.signature(theirs).parameters) - {"args", "kwargs"}
            assert wanted <= set(inspect.signature(ours).parameters), name
