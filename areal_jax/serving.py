"""A policy at work for a server's clients: found, loaded, and warm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from areal_jax.engine.decode import Drawing
from areal_jax.engine.driver import Driver
from areal_jax.models import lora
from areal_jax.models.config import PolicyConfig
from areal_jax.named_policy import named_policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.policies import DecodingPolicy, decoding_mesh, find_decoding_policy
from areal_jax.records import Sampling
from areal_jax.run_plan import had
from areal_jax.serve.config import ServeConfig
from areal_jax.serve.engine_source import EngineSource
from areal_jax.settings import ConfigError, assign, build, from_text, settings
from areal_jax.weights.pinned import Pinned


@asynccontextmanager
async def engine_source(config: ServeConfig, api_key: str) -> AsyncIterator[EngineSource]:
    """The policy of the settings, warm. ConfigError where it cannot be had, or does not fit."""
    decoding = await asyncio.to_thread(find_served, config)
    engine, weights = decoding.engine, await asyncio.to_thread(decoding.load)
    # Clients ask for top_p often; programs for what else they may ask for are compiled while others are answered.
    await asyncio.to_thread(engine.warm_up, Drawing.FILTERED)
    driver = Driver(engine, Pinned(weights))
    totals: dict[str, float] = {"tokens": 0.0, "dispatches": 0.0, "requests": 0.0, "prefill_tokens": 0.0}

    def measure() -> dict[str, float]:
        # What the driver tells is since the last time.
        told = driver.metrics()
        totals.update({name: total + told[name][0] for name, total in totals.items()})
        return totals

    try:
        driver.start()
        driver.compile_ahead(Drawing.SHAPED)
        limits, stops = config.engine, decoding.tokenizer.stop_token_ids
        sampling = Sampling(limits.max_new_tokens, limits.temperature, limits.top_k, limits.top_p, stops)
        name = config.served_name or config.model
        yield EngineSource(driver, name, decoding.tokenizer, sampling, config.seed, api_key, limits.max_prompt_tokens, measure)
    finally:
        driver.close()


def find_served(config: ServeConfig) -> DecodingPolicy:
    """The policy that `model` names. ConfigError where it cannot be had, or does not fit."""
    given, checkpoint = named_policy(config.model, "model")
    if "path" not in given:
        base = config.base or had(lambda: lora.base_of(Path(config.model).expanduser()))
        if not base:
            raise ConfigError(f"model={config.model} is an adapter that names no policy beside which it was trained; set base")
        given["path"] = base
    elif config.base is not None:
        raise ConfigError(f"base={config.base} is for adapters, and model={config.model} is none; leave it out")
    policy = build(PolicyConfig, assign({**given, "compute_dtype": config.compute_dtype}, settings(PolicyConfig), from_text))
    mesh = decoding_mesh(PlacementConfig(rollout_devices=config.devices, rollout_tensor=config.tensor), "devices")
    return find_decoding_policy(policy, config.engine, mesh, checkpoint, seed=config.seed, setting="model")
