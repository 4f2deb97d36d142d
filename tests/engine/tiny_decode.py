"""A tiny policy, engines for it, weights that arrive at a chosen moment, and the trainer's view of
what was sampled."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar

import chz
import jax
import jax.numpy as jnp
import numpy as np
from tiny_runs import TINY_ARCHITECTURE

from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import EngineParams
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Completion, Request, Sampling, Weights
from areal_jax.rl.logprobs import token_logprobs

T = TypeVar("T")

CONFIG = EngineConfig(
    num_slots=8,
    max_prompt_tokens=12,
    max_new_tokens=20,
    steps_per_dispatch=4,
    on_update="recompute",
    request_timeout_s=60,
)
POLICY = Policy(TINY_ARCHITECTURE)


@lru_cache
def params_of(seed: int) -> Params:
    """Random parameters, large enough that what attention reads decides what is sampled."""
    rng = np.random.default_rng(seed)
    return jax.device_put(
        jax.tree.map(
            lambda leaf: np.asarray(
                3 * rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype
            ),
            POLICY.abstract(),
        )
    )


@lru_cache
def engine(config: EngineConfig = CONFIG, devices: int = 1, tensor: int = 1) -> DecodeEngine:
    """One per setting, so that its programs are compiled once."""
    placement = (
        PlacementConfig()
        if devices == 1
        else PlacementConfig(rollout_devices=devices, rollout_tensor=tensor)
    )
    mesh = make_meshes(placement, jax.devices()[:1] if devices == 1 else None).rollout
    return DecodeEngine(POLICY, mesh, config, jnp.float32)


def with_setting(base: DecodeEngine, **settings: Any) -> DecodeEngine:
    """The same engine with other habits of its engine loop; it shares the compiled programs."""
    other = copy.copy(base)
    other.config = chz.replace(base.config, **settings)
    return other


@lru_cache
def laid_out(engine: DecodeEngine, seed: int) -> EngineParams:
    return _layout_of(engine)(params_of(seed))


@lru_cache
def _layout_of(engine: DecodeEngine) -> Callable[[Params], EngineParams]:
    return jax.jit(engine.layout, out_shardings=engine.param_shardings)


class Shelf:
    """A weight source whose versions appear at the engine loop's n-th look, counted from 0: one
    look before each dispatch."""

    def __init__(self, engine: DecodeEngine, *arrivals: tuple[int, int, int]):
        """Args: arrivals as (look, version, seed of the parameters)."""
        self.looks = 0
        self._arrivals = [
            (look, Weights(version, laid_out(engine, seed))) for look, version, seed in arrivals
        ]
        self._pause_at: int | None = None
        self._paused, self._go_on = threading.Event(), threading.Event()
        self.fails_at: int | None = None

    def pause_at(self, look: int) -> None:
        """Let the engine loop wait in this look until `go_on`."""
        self._pause_at = look

    async def paused(self) -> None:
        assert await asyncio.to_thread(self._paused.wait, 60)

    def go_on(self) -> None:
        self._go_on.set()

    def newest(self, after: int) -> Weights | None:
        look, self.looks = self.looks, self.looks + 1
        if look == self._pause_at:
            self._paused.set()
            assert self._go_on.wait(60)
        if look == self.fails_at:
            raise OSError("the transport broke")
        here = [
            weights
            for arrival, weights in self._arrivals
            if arrival <= look and weights.version > after
        ]
        return here[-1] if here else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        time.sleep(timeout_s)
        raise TimeoutError(f"no version {at_least} within {timeout_s} s")


def request(
    name: str = "a",
    prompt: Sequence[int] = (5, 9, 33, 2, 17),
    num_samples: int = 1,
    *,
    max_new_tokens: int = 20,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: tuple[int, ...] = (),
    seed: int = 0,
    min_version: int = 0,
    resume: tuple[Completion, ...] = (),
) -> Request:
    return Request(
        id=name,
        prompt_tokens=np.asarray(prompt, np.int32),
        num_samples=num_samples,
        sampling=Sampling(max_new_tokens, temperature, top_k, top_p, stop),
        seed=seed,
        min_version=min_version,
        resume=resume,
    )


def with_engine_loop(
    engine: DecodeEngine, weights: Any, act: Callable[[EngineLoop], Awaitable[T]]
) -> T:
    """Run `act` with an engine loop that it must start."""

    async def main() -> T:
        engine_loop = EngineLoop(engine, weights)
        try:
            return await asyncio.wait_for(act(engine_loop), 120)
        finally:
            engine_loop.close()

    return asyncio.run(main())


def answer(engine: DecodeEngine, weights: Any, *requests: Request) -> list[list[Completion]]:
    """Submit all before the engine loop starts, so that slots and dispatches are equal in every run."""

    async def act(engine_loop: EngineLoop) -> list[list[Completion]]:
        futures = [engine_loop.submit(each) for each in requests]
        engine_loop.start()
        return await asyncio.gather(*futures)

    return with_engine_loop(engine, weights, act)


@partial(jax.jit, static_argnames=("compute_dtype", "policy"))
def _forward(
    params: Params,
    tokens: jax.Array,
    compute_dtype: Any = jnp.float32,
    policy: Policy = POLICY,
) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = packed_attention(jnp.ones_like(tokens))
    return policy.hidden(params, tokens, positions, attend, compute_dtype=compute_dtype)[0]


@partial(jax.jit, static_argnames=("compute_dtype", "policy"))
def forward_logprobs(
    params: Params,
    tokens: jax.Array,
    temperature: jax.Array,
    compute_dtype: Any = jnp.float32,
    policy: Policy = POLICY,
) -> jax.Array:
    """Log-probs of the tokens of sequences of one length, by a full forward."""
    hidden = _forward(params, tokens, compute_dtype, policy)
    head = policy.head(params) / temperature
    return token_logprobs(hidden, head, tokens, jnp.ones_like(tokens), chunk_tokens=1024)[0]


def whole(prompt: Sequence[int] | np.ndarray, completion: Completion) -> np.ndarray:
    return np.concatenate([np.asarray(prompt, np.int32), completion.tokens])


def trainer_logp(
    prompt: Sequence[int] | np.ndarray,
    completion: Completion,
    seed: int,
    temperature: float = 1.0,
    *,
    sign: int = 1,
    compute_dtype: Any = jnp.float32,
    change: Callable[[Params], Params] = lambda params: params,
) -> np.ndarray:
    """Log-probs of the sampled tokens from a full forward over the whole sequence with the
    parameters of `seed`, or negated, or changed."""
    tokens = whole(prompt, completion)
    padded = np.zeros(
        (1, next(length for length in (64, 256, 1024) if len(tokens) <= length)), np.int32
    )
    padded[0, : len(tokens)] = tokens
    params = params_of(seed)
    if sign != 1:
        params = jax.tree.map(lambda leaf: sign * np.asarray(leaf), params)
    params = change(params)
    return np.asarray(forward_logprobs(params, padded, jnp.float32(temperature), compute_dtype))[
        0, len(prompt) : len(tokens)
    ]


def trainer_distribution(prompt: Sequence[int], completion: Completion, seed: int) -> np.ndarray:
    """Log-probs of the whole vocabulary at every sampled position, given the tokens before it."""
    tokens = whole(prompt, completion)
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(_forward(params_of(seed), padded))[0] @ np.asarray(
        POLICY.head(params_of(seed))
    )
    logits = logits[len(prompt) - 1 : len(tokens) - 1]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def same_samples(
    left: Sequence[Completion], right: Sequence[Completion], atol: float = 1e-5
) -> None:
    """Equal tokens; log-probs equal but for the order of floating-point sums."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.stop_reason == b.stop_reason
        np.testing.assert_allclose(a.logp, b.logp, atol=atol)


LATENT_ATTENTION = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Keys of config.json of a policy with latent attention and experts after its first layer."""
