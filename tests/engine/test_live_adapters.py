"""Versions of an adapter, through weight channel and engine loop: only the adapter travels,
and every token is sampled from base and adapter."""

from __future__ import annotations

import asyncio
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import CONFIG, POLICY, params_of, request, whole

from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import lora
from areal_jax.models.attention import packed_attention
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import Meshes, make_meshes
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.records import Completion
from areal_jax.rl.logprobs import token_logprobs
from areal_jax.weights.local import WeightChannel

PROMPT = (5, 9, 33, 2, 17)
ADAPTED = Policy(POLICY.config, LoRA(rank=4, alpha=8.0))
PLACEMENTS = {
    "one device": (PlacementConfig(), 1),
    "4 + 4 devices": (
        PlacementConfig(train_devices=4, train_tensor=2, rollout_devices=4, rollout_tensor=2),
        8,
    ),
}


def adapter_of(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 4, lora.abstract(ADAPTED)
    )


def weight_channels(meshes: Meshes, engine: DecodeEngine) -> tuple[WeightChannel, WeightChannel]:
    """One that has delivered the base, and one for adapters beside it."""
    placed = shardings(meshes.train, ADAPTED.axes(), ADAPTED.abstract(), TRAIN_RULES)
    once = WeightChannel(engine.layout, [engine.base_shardings], meshes.train)
    once.publish(0, jax.device_put(params_of(0), placed))
    base = once.wait(0, 60.0).params
    complete = partial(lora.attach, ADAPTED, base)
    return once, WeightChannel(
        engine.layout, [engine.param_shardings], meshes.train, complete=[complete]
    )


@jax.jit
def logprobs(params: Params, tokens: jax.Array) -> jax.Array:
    """The trainer's, of every token of one sequence."""
    ones = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = ADAPTED.hidden(
        params, tokens, positions, packed_attention(ones), compute_dtype=jnp.float32
    )
    return token_logprobs(hidden, ADAPTED.head(params), tokens, ones, chunk_tokens=1024)[0]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_weight_updates_transfer_only_the_adapter(placement: str) -> None:
    config, num_devices = PLACEMENTS[placement]
    meshes = make_meshes(config, jax.devices()[:num_devices])
    engine = DecodeEngine(ADAPTED, meshes.rollout, CONFIG, jnp.float32)
    once, weight_channel = weight_channels(meshes, engine)
    placed = shardings(meshes.train, lora.axes(ADAPTED), lora.abstract(ADAPTED), TRAIN_RULES)
    for version in range(2):
        weight_channel.publish(version, jax.device_put(adapter_of(version), placed))
        weight_channel.wait(version, 60.0)

    async def main() -> list[Completion]:
        engine_loop = EngineLoop(engine, weight_channel)
        engine_loop.start()
        try:
            first = await engine_loop.submit(request("a", PROMPT, num_samples=4, min_version=1))
            # Equal weights under another version change nothing; other weights rebuild what is
            # under way.
            weight_channel.publish(2, jax.device_put(adapter_of(1), placed))
            weight_channel.publish(3, jax.device_put(adapter_of(2), placed))
            weight_channel.wait(3, 60.0)
            return [
                *first,
                *await engine_loop.submit(request("b", PROMPT, num_samples=4, min_version=3)),
            ]
        finally:
            engine_loop.close()

    completions = asyncio.run(main())
    seeds = {1: 1, 3: 2}
    for completion in completions:
        (version,) = set(completion.versions.tolist())
        tokens = whole(PROMPT, completion)[None]
        expected = np.asarray(
            logprobs(lora.attach(ADAPTED, params_of(0), adapter_of(seeds[version])), tokens)
        )
        np.testing.assert_allclose(completion.logp, expected[0, len(PROMPT) :], atol=1e-4)
        alone = np.asarray(logprobs(params_of(0), tokens))[0, len(PROMPT) :]
        assert np.abs(completion.logp - alone).max() > 0.1
    assert engine.same_weights(
        *(lora.attach(ADAPTED, once.wait(0, 1.0).params, adapter) for adapter in deliveries(engine))
    )

    moved = num_devices > 1
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(lora.abstract(ADAPTED)))
    total, count = weight_channel.metrics()["transfer_bytes"]
    assert total == count * size * moved
    assert once.metrics()["transfer_bytes"] == (4.0 * POLICY.config.num_params * moved, 1.0)
    # The base is there once: every version points to it.
    newest = weight_channel.wait(3, 1.0).params
    assert newest["layers"][0]["attn"]["q"].w is once.wait(0, 1.0).params["layers"][0]["attn"]["q"]
    weight_channel.close()
    once.close()


def deliveries(engine: DecodeEngine) -> tuple[Params, Params]:
    """The same adapter laid out twice."""
    lay_out = jax.jit(engine.layout, out_shardings=engine.param_shardings)
    return lay_out(adapter_of(1)), lay_out(adapter_of(1))
