"""Experts that the engine records, against those of a full forward."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import LATENT_ATTENTION, request, with_engine_loop, with_setting

from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import (
    EngineParams,
    lay_out_params,
    pack_experts,
    unpack_experts,
)
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Completion, Request, Weights

POLICY = Policy(
    ModelConfig.from_hf(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
        },
        source="a test",
    )
)
LATENT = Policy(
    ModelConfig.from_hf(
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 512,
            **LATENT_ATTENTION,
        },
        source="a test",
    )
)
CONFIG = EngineConfig(
    num_slots=4,
    max_prompt_tokens=12,
    max_new_tokens=24,
    steps_per_dispatch=4,
    page_tokens=4,
    prefill_chunk_tokens=32,
    router_replay=True,
)
PROMPT = (5, 9, 33, 2, 17, 40, 41, 42, 7)


@cache
def params_of(seed: int, policy: Policy = POLICY) -> Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: np.asarray(
            3 * rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype
        ),
        policy.abstract(),
    )


def engine_of(config: EngineConfig, tensor: int, policy: Policy = POLICY) -> DecodeEngine:
    """One for all settings that its programs do not depend on."""
    of_loop = "on_update", "replayed_experts"
    compiled = chz.replace(config, **{name: getattr(CONFIG, name) for name in of_loop})
    settings = {name: getattr(config, name) for name in of_loop}
    return with_setting(_engine_of(compiled, tensor, policy), **settings)


@cache
def _engine_of(config: EngineConfig, tensor: int, policy: Policy) -> DecodeEngine:
    placement = PlacementConfig(rollout_devices=tensor**2, train_devices=1, rollout_tensor=tensor)
    mesh = make_meshes(placement, jax.devices()[: tensor**2 + 1]).rollout
    return DecodeEngine(policy, mesh, config, np.float32, "plain" if tensor > 1 else None)


@cache
def layers_of(seed: int, policy: Policy) -> EngineParams:
    """Parameters in the layout of every engine of the policy."""
    lay_out = jax.jit(lay_out_params, static_argnames=("policy", "compute_dtype"))
    return lay_out(policy, params_of(seed, policy), np.float32)


class Updates:
    """A weight source: the weights of each seed arrive before a dispatch, by its number."""

    def __init__(self, engine: DecodeEngine, *seeds: tuple[int, int]):
        self.looks = 0
        self.weights = [(look, self._laid_out(engine, seed)) for look, seed in seeds]

    def _laid_out(self, engine: DecodeEngine, seed: int) -> EngineParams:
        params = layers_of(seed, engine.policy)
        return jax.device_put(params, engine.param_shardings)

    def newest(self, after: int) -> Weights | None:
        look, self.looks = self.looks, self.looks + 1
        arrived = [version for version, (at, _) in enumerate(self.weights) if at <= look]
        version = arrived[-1]
        return Weights(version, self.weights[version][1]) if version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        raise TimeoutError


@partial(jax.jit, static_argnames="policy")
def experts_of(
    params: Params, tokens: jax.Array, replay: jax.Array | None = None, policy: Policy = POLICY
):
    """Hidden states and experts of a full forward."""
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _, routing = policy.hidden(
        params,
        tokens,
        positions,
        packed_attention(jnp.ones_like(tokens)),
        compute_dtype=jnp.float32,
        replay=replay,
        records_experts=True,
    )
    assert routing is not None and routing.ids is not None
    return hidden, jnp.moveaxis(routing.ids, 0, 2)


def fed(completion: Completion, prompt: tuple[int, ...] = PROMPT) -> np.ndarray:
    return np.concatenate([np.asarray(prompt, np.int32), completion.tokens])[:-1]


def run(engine: DecodeEngine, updates: Updates, *requests: Request) -> list[Completion]:
    async def act(engine_loop: EngineLoop) -> list[Completion]:
        engine_loop.start()
        # One after the other, so that later ones find cached prefixes.
        return [each for asked in requests for each in await engine_loop.submit(asked)]

    return with_engine_loop(engine, updates, act)


def asked(name: str, num_samples: int, prompt: tuple[int, ...] = PROMPT) -> Request:
    return request(name, prompt, num_samples, max_new_tokens=24, seed=len(name))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.slow
def test_recorded_experts_are_those_of_a_full_forward(tensor: int) -> None:
    # Three samples share the pages of a prompt; the second request finds them cached.
    engine = engine_of(CONFIG, tensor)
    completions = run(engine, Updates(engine, (0, 1)), asked("a", 3), asked("bb", 2))
    for completion in completions:
        assert completion.experts is not None and completion.experts.dtype == np.uint8
        _, experts = experts_of(params_of(1), fed(completion)[None])
        np.testing.assert_array_equal(completion.experts, experts[0])


@pytest.mark.slow
def test_dense_layers_have_no_recorded_experts() -> None:
    engine = engine_of(CONFIG, 1, LATENT)
    (completion,) = run(engine, Updates(engine, (0, 1)), asked("a", 1))
    tokens, params = fed(completion)[None], params_of(1, LATENT)
    _, experts = experts_of(params, tokens, policy=LATENT)
    assert completion.experts is not None and completion.experts.shape[1:] == (2, 2)
    np.testing.assert_array_equal(completion.experts, experts[0])
    # Other weights choose other experts, and replay these.
    other = params_of(2, LATENT)
    replayed, same = experts_of(other, tokens, completion.experts[None], policy=LATENT)
    np.testing.assert_array_equal(same, experts)
    own, differing = experts_of(other, tokens, policy=LATENT)
    assert (differing != experts).any() and np.abs(own - replayed).max() > 0.1


@pytest.mark.slow
def test_experts_survive_preemption() -> None:
    # 19 pages for four sequences of 9.
    engine = engine_of(chz.replace(CONFIG, kv_tokens=76), 1)
    for completion in run(engine, Updates(engine, (0, 1)), asked("a", 4)):
        _, experts = experts_of(params_of(1), fed(completion)[None])
        np.testing.assert_array_equal(completion.experts, experts[0])


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
@pytest.mark.slow
def test_experts_are_kept_from_when_a_token_was_first_fed(on_update: str) -> None:
    engine = engine_of(chz.replace(CONFIG, on_update=on_update), 1)
    for completion in run(engine, Updates(engine, (0, 1), (3, 2)), asked("a", 3)):
        before = len(PROMPT) + int((completion.versions == 0).sum()) - 1
        tokens = fed(completion)[None]
        (_, old), (_, new) = (experts_of(params_of(seed), tokens) for seed in (1, 2))
        assert len(PROMPT) < before < tokens.shape[1] and completion.experts is not None
        assert len(completion.experts) == tokens.shape[1]
        np.testing.assert_array_equal(completion.experts[:before], old[0, :before])
        assert (old[0, :before] != new[0, :before]).any()
        if on_update == "recompute":
            # The cache is that of the new weights.
            np.testing.assert_array_equal(completion.experts[before:], new[0, before:])


@pytest.mark.parametrize("kv_tokens", [0, 76])
@pytest.mark.slow
def test_experts_of_rebuilt_caches_are_those_of_the_new_weights(kv_tokens: int) -> None:
    # With 76 tokens of KV cache the last sequence is preempted, and prefilled by new weights.
    config = chz.replace(CONFIG, replayed_experts="rebuilt", kv_tokens=kv_tokens)
    engine = engine_of(config, 1)
    for completion in run(engine, Updates(engine, (0, 1), (3, 2)), asked("a", 4)):
        tokens = fed(completion)[None]
        (_, old), (_, new) = (experts_of(params_of(seed), tokens) for seed in (1, 2))
        assert set(completion.versions.tolist()) == {0, 1}
        assert (old != new).any()
        np.testing.assert_array_equal(completion.experts, new[0])


@pytest.mark.slow
def test_suspended_completions_keep_their_experts() -> None:
    engine = engine_of(CONFIG, 1)
    whole = run(engine, Updates(engine, (0, 1)), asked("a", 1))[0]
    part = Completion(
        whole.tokens[:8],
        whole.logp[:8],
        whole.versions[:8],
        "suspended",
        experts=np.full_like(whole.experts, 3)[: len(PROMPT) + 7],
    )
    resumed = request("a", PROMPT, 1, max_new_tokens=24, seed=1, resume=(part,))
    completion = run(engine, Updates(engine, (0, 1)), resumed)[0]
    assert completion.tokens.tolist() == whole.tokens.tolist()
    # Of five tokens, the last of which was not fed.
    first = whole.slice(0, 5).experts
    assert first is not None and whole.slice(2, 5).experts is None
    assert completion.experts is not None and whole.experts is not None
    np.testing.assert_array_equal(first, whole.experts[: len(PROMPT) + 4])
    # A worker reports the last part with the experts of the whole.
    last = dataclasses.replace(whole.slice(5), experts=whole.experts)
    assert whole.slice(0, 5).concatenate(last).experts is whole.experts
    assert (completion.experts[: len(PROMPT) + 7] == 3).all()
    np.testing.assert_array_equal(completion.experts[16:], whole.experts[16:])


def test_packed_experts_are_read_back() -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.uint8, np.uint16):
        ids = rng.integers(0, 250, (3, 4, 5, 3)).astype(dtype)
        words = np.asarray(pack_experts(jnp.asarray(ids)))
        np.testing.assert_array_equal(unpack_experts(words, ids.shape, dtype), ids)


def test_router_replay_of_a_dense_policy_is_refused() -> None:
    dense = Policy(
        ModelConfig.from_hf(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "max_position_embeddings": 64,
            },
            "a test",
        )
    )
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    with pytest.raises(ValueError, match=r"engine.router_replay=true: LlamaForCausalLM has no"):
        DecodeEngine(dense, mesh, CONFIG, np.float32)
