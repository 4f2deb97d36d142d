"""Speculative decoding by drafts: the samples are those without drafts, in fewer steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import chdtri
from test_grammars import constrained, grammars
from test_recurrent_states import POLICY as RECURRENT
from tiny_decode import (
    LATENT_ATTENTION,
    forward_logprobs,
    request,
    same_samples,
    with_engine_loop,
    with_setting,
)
from tiny_runs import TINY_SIZES

from areal_jax.data.grammars import regex_grammar
from areal_jax.data.policy_files import EMBEDDED_VISION
from areal_jax.engine.batch import PrefillChunk, SamplingMode, empty_slots
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import EngineParams, Reader, lay_out_params
from areal_jax.engine.drafts import DraftPolicy, DraftState, draft_tokens
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.hf import read_config
from areal_jax.models.paged_attention import read_pages
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Completion, Request, Weights

FAMILIES: dict[str, Mapping[str, object]] = {
    "dense": {"architectures": ["Qwen2ForCausalLM"]},
    "window": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
    },
    "latent": LATENT_ATTENTION | {"num_key_value_heads": 4},
    "sinks": {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 8,
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
CONFIG = EngineConfig(
    num_slots=8,
    max_prompt_tokens=12,
    max_new_tokens=40,
    steps_per_dispatch=3,
    page_tokens=4,
    request_timeout_s=120,
)
DRAFTED = chz.replace(CONFIG, draft_tokens=3)
# Draft policies: the policy itself with the weights of seed 0, and a smaller one that guesses.
SAME, GUESSING = (chz.replace(DRAFTED, draft_policy=each) for each in ("same", "guessing"))
SMALLER: Mapping[str, object] = {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    # Padded to another size than the policy's, and smaller than the largest token.
    "vocab_size": 60,
}
PROMPT = (5, 9, 33, 2, 17)
# Groups and single samples, temperatures, filters; a stop token that ends answers early; budgets
# that end within accepted drafts; more samples than slots. The longest samples have filters, so that
# all dispatches run one program.
REQUESTS = (
    request("a", PROMPT, 4, max_new_tokens=40, top_k=40, temperature=0.6),
    request("b", (1, 2, 3), 2, max_new_tokens=37, temperature=0.0),
    request("c", (4, 4, 4, 4), 5, max_new_tokens=40, top_k=4, temperature=0.8, stop=(7, 11, 40)),
    request("d", (8,), 2, max_new_tokens=5, temperature=0.5, top_p=0.8, seed=3),
    request("e", (1, 2, 3), 2, max_new_tokens=40, top_k=40, temperature=0.4, seed=2),
)


@cache
def policy_of(family: str) -> Policy:
    return Policy(ModelConfig.from_hf({**TINY_SIZES, **FAMILIES[family]}, source="a test"))


@cache
def params_of(family: str, seed: int) -> Params:
    """Random parameters whose layers change the next token seldom enough for drafts to be right."""
    random = random_params(policy_of(family), seed, 3)
    return random | {"layers": jax.tree.map(lambda leaf: leaf / 2, random["layers"])}


def random_params(policy: Policy, seed: int, scale: float) -> Params:
    rng = np.random.default_rng(seed)

    def random(leaf: Any) -> np.ndarray:
        return np.asarray(scale * rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype)

    return jax.tree.map(random, policy.abstract())


def mixed(params: Params, other: Params, share: float) -> Params:
    return jax.tree.map(lambda a, b: ((1 - share) * a + share * b).astype(a.dtype), params, other)


def draft_of(name: str, family: str) -> DraftPolicy | None:
    if not name:
        return None
    policy, params = policy_of(family), params_of(family, 0)
    if name == "similar":
        params = mixed(params, params_of(family, 1), 0.05)
    if name == "guessing":
        sizes = {**TINY_SIZES, **FAMILIES[family], **SMALLER}
        policy = Policy(ModelConfig.from_hf(sizes, source="a test"))
        params = random_params(policy, 5, 2)
    return DraftPolicy(policy, lambda placed: jax.device_put(params, placed))


def engine_of(
    config: EngineConfig, family: str = "dense", reader: Reader = "view", tensor: int = 1
) -> DecodeEngine:
    """One for all settings that its programs do not depend on."""
    replay = family in ("experts", "latent")
    compiled = chz.replace(config, router_replay=replay, on_update="recompute")
    return with_setting(_engine_of(compiled, family, reader, tensor), on_update=config.on_update)


@cache
def _engine_of(config: EngineConfig, family: str, reader: Reader, tensor: int) -> DecodeEngine:
    placement = PlacementConfig(rollout_devices=tensor**2, train_devices=1, rollout_tensor=tensor)
    mesh = make_meshes(placement, jax.devices()[: tensor**2 + 1]).rollout
    draft = draft_of(config.draft_policy, family)
    return DecodeEngine(policy_of(family), mesh, config, jnp.float32, reader, draft=draft)


@cache
def layers_of(family: str, seed: int) -> EngineParams:
    """Parameters in the layout of every engine of the family."""
    return _layout_of(family)(params_of(family, seed))


@cache
def _layout_of(family: str) -> Callable[[Params], EngineParams]:
    return jax.jit(partial(lay_out_params, policy_of(family), compute_dtype=jnp.float32))


def laid_out(engine: DecodeEngine, family: str, seed: int) -> EngineParams:
    return jax.device_put(layers_of(family, seed), engine.param_shardings)


class Updates:
    """A weight source: (look, seed) are the weights from the engine loop's look on."""

    def __init__(self, engine: DecodeEngine, family: str, *arrivals: tuple[int, int]):
        self.looks = 0
        self._weights = [(look, laid_out(engine, family, seed)) for look, seed in arrivals]

    def newest(self, after: int) -> Weights | None:
        look, self.looks = self.looks, self.looks + 1
        version = sum(at <= look for at, _ in self._weights) - 1
        return Weights(version, self._weights[version][1]) if version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        raise TimeoutError


def run(
    engine: DecodeEngine,
    requests: Sequence[Request] = REQUESTS,
    family: str = "dense",
    arrivals: tuple[tuple[int, int], ...] = ((0, 0),),
) -> tuple[list[Completion], dict[str, tuple[float, float]]]:
    """Completions of all requests, submitted before the engine starts, and the metrics."""

    async def act(engine_loop: EngineLoop) -> tuple[list[Completion], Any]:
        futures = [engine_loop.submit(each) for each in requests]
        engine_loop.start()
        found = [each for group in await asyncio.gather(*futures) for each in group]
        return found, engine_loop.metrics()

    return with_engine_loop(engine, Updates(engine, family, *arrivals), act)


def drafts_of(
    histories: Sequence[Sequence[int]], prompts: Sequence[int], count: int
) -> list[list[int]]:
    history = np.full((len(histories), 16), -1, np.int32)
    for row, tokens in zip(history, histories, strict=True):
        row[: len(tokens)] = tokens
    state = DraftState(history, np.asarray(prompts, np.int32))
    positions = np.asarray([len(tokens) - 1 for tokens in histories], np.int32)
    return np.asarray(jax.jit(draft_tokens, static_argnums=2)(state, positions, count)).tolist()


def test_drafts_follow_the_longest_and_then_latest_match():
    # "1 2" matches twice, and longer than "2" alone: what followed it last is drafted.
    assert drafts_of([[1, 2, 7, 1, 2, 8, 9, 3, 2, 5, 1, 2]], [0], 3) == [[8, 9, 3]]
    # Up to its end the sequence repeats "3 4", and the drafts go on so.
    assert drafts_of([[9, 3, 4, 3, 4]], [0], 5) == [[3, 4, 3, 4, 3]]


def test_drafts_come_from_the_longest_match_in_samples_of_the_same_prompt():
    own, longer, other = [1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9, 9, 9]
    histories = [own, longer, other, [1, 2], [7, 3, 8, 8, 8, 8, 8]]
    found = drafts_of(histories, [5, 5, 6, 5, 5], 2)
    # Of slot 0: after "1 2 3" in a sample of prompt 5, not of prompt 6, nor after "3" alone.
    assert found[0] == [4, 5]
    # Of slot 3: after "1 2" in the longest of the samples with it.
    assert found[3] == [3, 4]
    # Tokens of images are negative: 0 is drafted.
    assert drafts_of([[2, -7, -7, 2]], [5], 2) == [[0, 0]]


@cache
def samples_without_drafts(family: str) -> list[Completion]:
    return run(engine_of(CONFIG, family), family=family)[0]


def run_beside_plain(
    config: EngineConfig, family: str, reader: Reader, tensor: int
) -> tuple[list[Completion], dict[str, tuple[float, float]]]:
    """Run an engine with drafts and require the samples of one without, on one device."""
    expected = samples_without_drafts(family)
    found, metrics = run(engine_of(config, family, reader, tensor), family=family)
    same_samples(found, expected, atol=1e-4)
    for mine, other in zip(found, expected, strict=True):
        assert (mine.experts is None) == (family not in ("experts", "latent"))
        if mine.experts is not None and other.experts is not None:
            np.testing.assert_array_equal(mine.experts, other.experts)
    return found, metrics


# Each family and each reader is here or below, where the drafts are those of a policy.
@pytest.mark.parametrize(
    ("family", "reader", "tensor"),
    [
        ("dense", "view", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("dense", "plain", 2),
                ("window", "view", 1),
                ("latent", "plain", 1),
            ]
        ),
    ],
)
def test_tokens_are_those_without_drafts(family: str, reader: Reader, tensor: int):
    found, metrics = run_beside_plain(DRAFTED, family, reader, tensor)
    # Each step samples one token and what it accepts.
    accepted, num_drafts = metrics["accepted_draft_tokens"][0], metrics["draft_tokens"][0]
    assert accepted > 0.1 * metrics["tokens"][0] and accepted < num_drafts
    assert metrics["occupancy"][0] == metrics["tokens"][0] - accepted
    # Some answers end with a stop token, some with their budget.
    assert {each.stop_reason for each in found} == {"stop", "length"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "reader", "tensor", "draft_policy"),
    [
        ("dense", "view", 1, "same"),
        ("dense", "plain", 2, "guessing"),
        ("window", "plain", 1, "same"),
        ("experts", "view", 2, "same"),
        ("latent", "view", 1, "same"),
        ("sinks", "view", 1, "same"),
    ],
)
def test_a_draft_policy_changes_no_sample(
    family: str, reader: Reader, tensor: int, draft_policy: str
):
    config = chz.replace(DRAFTED, draft_policy=draft_policy)
    _, metrics = run_beside_plain(config, family, reader, tensor)
    if draft_policy == "same":
        # After a stop token, the other drafts of a step are not accepted.
        assert metrics["draft_acceptance"][0] > 0.95 * metrics["draft_acceptance"][1]
    else:
        assert metrics["draft_acceptance"][0] < 0.05 * metrics["draft_acceptance"][1]


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, 5])
def test_drafts_of_the_policy_itself_are_accepted(num_drafts: int):
    # Prompts of one token, of several prefill chunks, and of a cached prefix; one step in each
    # dispatch, which begins with what the draft policy has not read.
    config = chz.replace(
        SAME,
        draft_tokens=num_drafts,
        prefill_chunk_tokens=8,
        steps_per_dispatch=1,
        max_prompt_tokens=40,
        num_slots=2,
    )
    prompt = tuple(range(1, 39))
    requests = [
        request("a", (8,), 2, max_new_tokens=40, top_k=40),
        request("b", prompt, 2, max_new_tokens=40, top_k=40, temperature=0.8),
        request("c", (*prompt[:25], 3), 1, max_new_tokens=40, top_k=5, top_p=0.9),
    ]
    found, metrics = run(engine_of(config), requests)
    plain = engine_of(chz.replace(config, draft_tokens=0, draft_policy=""))
    same_samples(found, run(plain, requests)[0], atol=1e-4)
    accepted, verified = metrics["draft_acceptance"]
    assert accepted > 0.99 * verified
    # Nearly all steps sample num_drafts + 1 tokens.
    assert metrics["occupancy"][0] < 1.1 * metrics["tokens"][0] / (num_drafts + 1)


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["view", "plain"])
def test_decoded_pages_are_those_of_a_prefill(reader: Reader):
    config = chz.replace(
        DRAFTED, num_slots=2, steps_per_dispatch=1, draft_tokens=1, draft_policy="similar"
    )
    engine = engine_of(config, reader=reader)
    params = laid_out(engine, "dense", 0) | engine.load_draft()
    tokens = np.asarray(PROMPT, np.int32)
    table = np.arange(2 * engine.pages_per_slot, dtype=np.int32).reshape(2, -1)
    state = engine.point(engine.init_state(), table)
    state = engine.prefill(params, state, [PrefillChunk(tokens[:-1], 0, table[0].tolist())])
    state = engine.insert(state, {0: len(tokens) - 1})
    state = engine.record(state, {0: (tokens, 0)})
    slots = empty_slots(2)
    slots[["token", "position", "remaining", "active"]][0] = tokens[-1], len(tokens) - 1, 40, 1
    state, unread = engine.assign_slot(state, slots), [0]
    while len(tokens) < 36:
        state, packed = engine.generate(params, state)
        sampled = engine.fetch(packed).tokens[:, 0]
        tokens = np.concatenate([tokens, sampled[sampled >= 0]])
        assert state.drafts is not None
        unread.append(int(np.asarray(state.drafts.unread)[0]))
    # The draft policy is behind after some dispatches, and then catches up.
    assert {*pairwise(unread)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    state = engine.prefill(params, state, [PrefillChunk(tokens[:-1], 0, table[1].tolist())])
    for i, layer in enumerate(state.pages):
        count = len(tokens) - 1 - (unread[-1] if i >= 2 else 0)
        decoded, filled = (read_pages(layer, jnp.asarray(ids), jnp.float32) for ids in table)
        for mine, other in zip(decoded, filled, strict=True):
            np.testing.assert_allclose(mine[:, :count], other[:, :count], atol=1e-4)


@pytest.mark.parametrize(
    ("kv_dtype", "on_update", "drafted_config"),
    [
        pytest.param("compute", "recompute", DRAFTED, id="ngrams"),
        pytest.param("compute", "keep", DRAFTED, id="ngrams, kept caches"),
        pytest.param("compute", "recompute", SAME, id="policy"),
        pytest.param("compute", "keep", SAME, id="policy, kept caches"),
        pytest.param("int8", "recompute", SAME, id="policy, int8"),
    ],
)
@pytest.mark.slow
def test_drafts_survive_preemption_and_rebuilt_caches(
    kv_dtype: str, on_update: str, drafted_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    # 30 pages for 8 sequences of up to 11; equal weights, whose arrival rebuilds the caches. They
    # arrive at other tokens with drafts than without, and quantized caches differ by rounding.
    crowded = chz.replace(drafted_config, kv_tokens=120, kv_dtype=kv_dtype, on_update=on_update)
    drafted = engine_of(crowded, reader="plain")
    monkeypatch.setattr(drafted, "same_weights", lambda old, new: False)
    found, metrics = run(drafted, arrivals=((0, 0), (3, 0), (5, 0)))
    if kv_dtype == "compute":
        same_samples(found, samples_without_drafts("dense"), atol=1e-4)
    else:
        plain = engine_of(chz.replace(CONFIG, kv_tokens=120, kv_dtype=kv_dtype), reader="plain")
        same_samples(found, run(plain)[0], atol=0.2)
    assert metrics["preemptions"][0] > 0
    assert (metrics["recompute_tokens"][0] > 0) == (on_update == "recompute")
    if drafted_config.draft_policy:
        # The caches of the draft policy are rebuilt, too, or kept.
        assert metrics["draft_acceptance"][0] > 0.9 * metrics["draft_acceptance"][1]
    assert len({version for each in found for version in each.versions.tolist()}) == 3


@pytest.mark.parametrize("config", [DRAFTED, SAME], ids=["ngrams", "policy"])
@pytest.mark.parametrize("on_update", ["recompute", "keep"])
@pytest.mark.slow
def test_logp_is_that_of_the_token_version(on_update: str, config: EngineConfig):
    engine = engine_of(chz.replace(config, on_update=on_update))
    requests = [
        replace(each, sampling=replace(each.sampling, top_k=0, top_p=1.0))
        for each in REQUESTS
        if each.sampling.temperature > 0
    ]
    found, _ = run(engine, requests, arrivals=((0, 0), (3, 1)))
    asked = [each for each in requests for _ in range(each.num_samples)]
    several = 0
    for completion, each in zip(found, asked, strict=True):
        tokens = np.concatenate([each.prompt_tokens, completion.tokens])
        logp = np.concatenate(
            [
                logprobs(
                    engine.policy,
                    params_of("dense", seed),
                    tokens[None],
                    each.sampling.temperature,
                )
                for seed in (0, 1)
            ]
        )[:, len(each.prompt_tokens) :]
        expected = logp[completion.versions, np.arange(len(completion.tokens))]
        # Kept caches are those of the old weights.
        checked = completion.versions == 0 if on_update == "keep" else completion.versions >= 0
        np.testing.assert_allclose(completion.logp[checked], expected[checked], atol=1e-3)
        several += len(set(completion.versions.tolist())) > 1
    assert several > 0


def logprobs(
    policy: Policy, params: Params, tokens: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """`forward_logprobs`, of few lengths."""
    rows, length = tokens.shape
    padded = np.zeros((rows, -(-length // 64) * 64), np.int32)
    padded[:, :length] = tokens
    found = forward_logprobs(params, padded, np.float32(temperature), policy=policy)
    return np.asarray(found)[:, :length]


@pytest.mark.slow
def test_shaped_samples_and_top_logprobs_are_those_without_drafts():
    shaped = [
        replace(each, sampling=replace(each.sampling, **settings))
        for each, settings in zip(
            REQUESTS,
            (
                {"num_top_logprobs": 3},
                {"repetition_penalty": 1.1},
                {"min_new_tokens": 9, "frequency_penalty": 0.05},
                {},
                {"presence_penalty": 0.1},
            ),
            strict=True,
        )
    ]
    expected, (found, metrics) = run(engine_of(CONFIG), shaped)[0], run(engine_of(SAME), shaped)
    same_samples(found, expected, atol=1e-4)
    assert metrics["accepted_draft_tokens"][0] > 0
    for mine, other in zip(found[:4], expected[:4], strict=True):
        assert mine.top_logprobs is not None and other.top_logprobs is not None
        np.testing.assert_array_equal(mine.top_logprobs[0], other.top_logprobs[0])
        np.testing.assert_allclose(mine.top_logprobs[1], other.top_logprobs[1], atol=1e-4)


@pytest.mark.slow
def test_grammars_hold_beside_drafts():
    # Drafts of "ababab" are right, but its mask is that of one token.
    repeated = constrained("r", regex_grammar("(ab){9}"), num_samples=2)
    requests = [constrained(num_samples=3, seed=3), repeated, *REQUESTS[:2]]

    async def act(engine: DecodeEngine) -> tuple[list[Completion], Any]:
        loop = EngineLoop(engine, Updates(engine, "dense", (0, 0)), grammars=grammars())
        try:
            futures = [loop.submit(each) for each in requests]
            loop.start()
            groups = await asyncio.wait_for(asyncio.gather(*futures), 120)
            return [each for group in groups for each in group], loop.metrics()
        finally:
            loop.close()

    expected, _ = asyncio.run(act(engine_of(CONFIG)))
    found, metrics = asyncio.run(act(engine_of(SAME)))
    same_samples(found, expected, atol=1e-4)
    assert metrics["accepted_draft_tokens"][0] > 0


@pytest.mark.parametrize("config", [DRAFTED, SAME], ids=["ngrams", "policy"])
def test_suspended_samples_resume_without_drafts(config: EngineConfig):
    expected, drafted = samples_without_drafts("dense"), engine_of(config)
    paused, continues = threading.Event(), threading.Event()

    class Paused(Updates):
        def newest(self, after: int) -> Weights | None:
            if self.looks == 2:
                paused.set()
                assert continues.wait(60)
            return super().newest(after)

    async def act(engine_loop: EngineLoop) -> tuple[Completion, ...]:
        future = engine_loop.submit(REQUESTS[0])
        engine_loop.start()
        assert await asyncio.to_thread(paused.wait, 60)
        suspended = engine_loop.suspend("a")
        future.cancel()
        continues.set()
        return await suspended

    parts = with_engine_loop(drafted, Paused(drafted, "dense", (0, 0)), act)
    assert all(0 < len(part.tokens) < 40 for part in parts)
    for resuming in (CONFIG, config):
        resumed, _ = run(engine_of(resuming), [replace(REQUESTS[0], resume=parts)])
        same_samples(resumed, expected[:4], atol=1e-4)


@pytest.mark.parametrize("draft_policy", ["", "similar"])
@pytest.mark.slow
def test_drafted_samples_have_the_distribution_of_the_policy(draft_policy: str):
    # A vocabulary of 6 tokens and answers of 4: 1296 of them, whose probabilities are known.
    sizes = {**TINY_SIZES, **FAMILIES["dense"], "vocab_size": 6}
    policy = Policy(ModelConfig.from_hf(sizes, source="a test"))
    params = random_params(policy, 0, 2)
    prompt, num_samples, length = (1, 2, 1, 3), 6000, 4
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    config = chz.replace(
        DRAFTED,
        num_slots=64,
        max_new_tokens=length,
        draft_tokens=2,
        draft_policy=draft_policy,
    )
    similar = mixed(params, random_params(policy, 1, 2), 0.1)
    draft = DraftPolicy(policy, lambda placed: jax.device_put(similar, placed))
    engine = DecodeEngine(policy, mesh, config, jnp.float32, draft=draft if draft_policy else None)
    weights = jax.jit(engine.layout, out_shardings=engine.param_shardings)(params)

    class Fixed:
        def newest(self, after: int) -> Weights | None:
            return Weights(0, weights) if after < 0 else None

        def wait(self, at_least: int, timeout_s: float) -> Weights:
            raise TimeoutError

    async def act(engine_loop: EngineLoop) -> tuple[list[Completion], Any]:
        engine_loop.start()
        asked = request("a", prompt, num_samples, max_new_tokens=length, seed=7)
        return await engine_loop.submit(asked), engine_loop.metrics()

    found, metrics = with_engine_loop(engine, Fixed(), act)
    accepted = metrics["accepted_draft_tokens"][0] / metrics["draft_tokens"][0]
    assert 0.1 < accepted < 0.95
    answers = np.asarray(list(product(range(6), repeat=length)), np.int32)
    whole = np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(answers), 1)), answers], 1)
    share = np.exp(logprobs(policy, params, whole)[:, len(prompt) :].sum(1))
    np.testing.assert_allclose(share.sum(), 1, atol=1e-4)
    places = np.stack([each.tokens for each in found]) @ 6 ** np.arange(length)[::-1]
    counts = np.bincount(places, minlength=len(answers))
    # Answers that are expected less than 5 times count together.
    is_rare = share * num_samples < 5
    expected = np.append(share[~is_rare], share[is_rare].sum()) * num_samples
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert len(expected) > 100
    assert statistic < chdtri(len(expected) - 1, 1e-3)


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up():
    draft, mesh = draft_of("guessing", "dense"), engine_of(DRAFTED).mesh
    engine = DecodeEngine(policy_of("dense"), mesh, GUESSING, jnp.float32, draft=draft)
    engine.warm_up(SamplingMode.FILTERED)
    engine.load_draft()
    before, compiled = engine.num_programs, list[float]()

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    laid_out(engine, "dense", 0)
    laid_out(engine, "dense", 1)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(engine, arrivals=((0, 0), (3, 1)))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.num_programs == before and compiled == []


def test_settings_that_drafts_do_not_support_are_refused():
    mesh = engine_of(DRAFTED).mesh
    with pytest.raises(ValueError, match=r"engine.draft_tokens=3 with engine.batch_invariant"):
        DecodeEngine(
            policy_of("dense"), mesh, chz.replace(DRAFTED, batch_invariant="full"), jnp.float32
        )


@pytest.mark.parametrize(
    ("model", "num_drafts", "expected"),
    [
        (policy_of("dense").config, 0, "draft_policy=x with engine.draft_tokens=0: it proposes"),
        (RECURRENT.config, 2, "engine.draft_policy=x: Qwen3NextForCausalLM has linear attention"),
        (read_config(EMBEDDED_VISION), 2, "engine.draft_policy=x: .* reads images"),
        (
            replace(policy_of("dense").config, readout="TokenClassification"),
            2,
            "engine.draft_policy=x is read out as TokenClassification, expected CausalLM",
        ),
    ],
    ids=["no drafts", "linear attention", "images", "readout"],
)
def test_policies_that_propose_no_drafts_are_refused(
    model: ModelConfig, num_drafts: int, expected: str
):
    draft = DraftPolicy(Policy(model), lambda placed: placed)
    config = chz.replace(CONFIG, draft_tokens=num_drafts, draft_policy="x")
    with pytest.raises(ValueError, match=expected):
        DecodeEngine(policy_of("dense"), engine_of(DRAFTED).mesh, config, jnp.float32, draft=draft)
