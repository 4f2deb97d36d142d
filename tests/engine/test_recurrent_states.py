"""Recurrent states of linear attention in the engine: always those of the tokens before."""

from __future__ import annotations

from functools import cache

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import request, with_engine_loop

from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import EngineParams
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.kv_cache.manager import KVCacheManager
from areal_jax.engine.kv_cache.pages import PageTable
from areal_jax.engine.sequence import SequenceGroup
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Completion, Request, Weights
from areal_jax.rl.logprobs import token_logprobs

POLICY = Policy(
    ModelConfig.from_hf(
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "full_attention_interval": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "rms_norm_eps": 1e-2,
        },
        source="a test",
    )
)
# Two of three samples start together; pages for little more than one sequence, and chunks that end
# within a page.
CONFIG = EngineConfig(
    num_slots=2,
    max_prompt_tokens=48,
    max_new_tokens=24,
    steps_per_dispatch=4,
    page_tokens=8,
    kv_tokens=96,
    prefill_chunk_tokens=20,
    router_replay=True,
)
PROMPT = tuple(np.random.default_rng(1).integers(0, 64, 45).tolist())


@cache
def params() -> Params:
    rng = np.random.default_rng(0)
    return jax.device_put(
        jax.tree.map(
            lambda leaf: np.asarray(
                rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype
            ),
            POLICY.abstract(),
        )
    )


@cache
def engine() -> DecodeEngine:
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    return DecodeEngine(POLICY, mesh, CONFIG, jnp.float32)


def test_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine.draft_tokens=2: Qwen3NextForCausalLM has linear"):
        DecodeEngine(POLICY, engine().mesh, chz.replace(CONFIG, draft_tokens=2), jnp.float32)


@cache
def laid_out() -> EngineParams:
    return jax.jit(engine().layout)(params())


class Updates:
    """Equal weights under a new version before every n-th dispatch."""

    def __init__(self, period: int):
        self.weights, self.period, self.looks = laid_out(), period, -1

    def newest(self, after: int) -> Weights | None:
        self.looks += 1
        if self.looks % self.period:
            return None
        return Weights(self.looks // self.period, self.weights)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        raise AssertionError("no request waits for a version")


def answers(period: int, *requests: Request) -> list[Completion]:
    """Submit each request after the one before."""

    async def act(engine_loop: EngineLoop) -> list[Completion]:
        engine_loop.start()
        return [each for asked in requests for each in await engine_loop.submit(asked)]

    return with_engine_loop(engine(), Updates(period), act)


@jax.jit
def _logp(tokens: jax.Array, experts: jax.Array) -> jax.Array:
    ones, positions = jnp.ones_like(tokens), jnp.arange(tokens.shape[1])[None]
    hidden, _, _ = POLICY.hidden(
        params(),
        tokens,
        positions,
        packed_attention(ones),
        compute_dtype=jnp.float32,
        replay=experts,
    )
    head = POLICY.head(params())
    return token_logprobs(hidden, head, tokens, ones, chunk_tokens=1024)[0]


def assert_trained_as_sampled(prompt: tuple[int, ...], completion: Completion) -> None:
    """Compare log-probs with a full forward pass that replays the recorded experts (R3)."""
    tokens = np.zeros((1, 80), np.int32)
    length = len(prompt) + len(completion.tokens)
    tokens[0, :length] = [*prompt, *completion.tokens.tolist()]
    assert completion.experts is not None
    experts = np.zeros((1, 80, *completion.experts.shape[1:]), completion.experts.dtype)
    experts[0, : len(completion.experts)] = completion.experts
    logp = _logp(tokens, experts)[0, len(prompt) : length]
    np.testing.assert_allclose(completion.logp, logp, atol=1e-4)


@pytest.mark.slow
def test_states_follow_shared_prompts_chunks_and_preemption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The second request continues the first prompt, and the third repeats it: pages of both would
    # be cached.
    longer = (*PROMPT, 3, 60)
    asked = [
        request("a", PROMPT, 3, max_new_tokens=24),
        request("b", longer, 1, max_new_tokens=12),
        request("c", PROMPT, 3, max_new_tokens=24),
    ]
    plain = answers(1000, *asked)
    for completion, prompt in zip(plain, [PROMPT] * 3 + [longer] + [PROMPT] * 3, strict=True):
        assert_trained_as_sampled(prompt, completion)
    assert [each.tokens.tolist() for each in plain[:3]] == [
        each.tokens.tolist() for each in plain[4:]
    ]
    # Equal weights whose states are rebuilt or kept change no token.
    monkeypatch.setattr(engine(), "same_weights", lambda old, new: False)
    recompute, keep = CONFIG, chz.replace(CONFIG, on_update="keep")
    assert recompute.on_update == "recompute"
    for config in (recompute, keep):
        monkeypatch.setattr(engine(), "config", config)
        # More seldom than a prefill has chunks, which starts again.
        swapped = answers(5, *asked)
        assert max(len(set(each.versions.tolist())) for each in swapped) > 1
        for old, new in zip(plain, swapped, strict=True):
            assert old.tokens.tolist() == new.tokens.tolist()
            np.testing.assert_allclose(old.logp, new.logp, atol=1e-4)


def allocated(num_samples: int) -> tuple[KVCacheManager, SequenceGroup]:
    """A manager of recurrent states, with a group whose samples share the prefill of 18 tokens."""
    manager = KVCacheManager(PageTable(6, 2, 12, 4, 8), 16, has_states=True)
    group = SequenceGroup(request("a", range(19), num_samples), deadline_s=0.0)
    for sequence, slot in zip(group.sequences[:2], (4, 3), strict=False):
        assert manager.allocate(sequence, slot, 4, group.prompts)
    return manager, group


def test_a_prompt_is_computed_in_the_slot_of_its_first_sequence() -> None:
    manager, group = allocated(3)
    for start, end in ((0, 16), (16, 18)):
        (chunk,), complete = manager.next_chunks(others_run=False)
        assert (chunk.start, chunk.start + len(chunk.tokens)) == (start, end)
        # Slots 3 to 5 are those of shard 1.
        assert (chunk.slot, chunk.shard) == (4, 1)
    assert manager.complete(complete).states == [[], [(1, 0)]]
    # Whoever joins later gets a prefill of their own: the state has changed.
    assert manager.allocate(group.sequences[2], 5, 4, group.prompts)
    (chunk,), _ = manager.next_chunks(others_run=False)
    assert (chunk.slot, chunk.start) == (5, 0)


def test_a_prefill_starts_again_if_the_slot_of_its_state_is_freed() -> None:
    manager, group = allocated(2)
    manager.next_chunks(others_run=False)
    manager.free(group.sequences[0])
    (chunk,), _ = manager.next_chunks(others_run=False)
    assert (chunk.slot, chunk.start) == (3, 0)


@pytest.mark.slow
def test_scores_are_the_log_probs_of_sampled_tokens():
    async def act(engine_loop: EngineLoop) -> tuple[Completion, Completion]:
        engine_loop.start()
        [completion] = await engine_loop.submit(request("a", PROMPT[:20]))
        tokens = np.array([*PROMPT[:20], *completion.tokens], np.int32)
        return completion, await engine_loop.score(tokens, 1)

    completion, scored = with_engine_loop(engine(), Updates(1 << 20), act)
    np.testing.assert_allclose(scored.logp[20:], completion.logp, atol=1e-4)
