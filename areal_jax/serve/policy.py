"""A policy with an engine at work, from the server's settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import jax

from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.decode import DecodeEngine, Drawing, EngineParams, too_long
from areal_jax.engine.driver import Driver
from areal_jax.models import hf
from areal_jax.models.decoder import Policy
from areal_jax.models.hf import read_config
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import compute_dtype, make_rollout_mesh
from areal_jax.parallel.sharding import ROLLOUT_RULES, shardings
from areal_jax.records import Sampling, Weights
from areal_jax.serve.config import ServeConfig
from areal_jax.serve.engine_source import EngineSource
from areal_jax.settings import ConfigError
from areal_jax.weights.pinned import Pinned


class Loaded(NamedTuple):
    engine: DecodeEngine
    params: EngineParams
    tokenizer: HFTokenizer


@asynccontextmanager
async def engine_source(config: ServeConfig, api_key: str) -> AsyncIterator[EngineSource]:
    """The policy of the settings, warm. ConfigError where it cannot be had, or does not fit."""
    try:
        engine, params, tokenizer = await asyncio.to_thread(load, config)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    # Clients ask for top_p often; what else takes a program of its own is compiled when it is first asked for.
    await asyncio.to_thread(engine.warm_up, Drawing.FILTERED)
    driver = Driver(engine, Pinned(Weights(0, params)))
    totals: dict[str, float] = {"tokens": 0.0, "dispatches": 0.0, "requests": 0.0, "prefill_tokens": 0.0}

    def measure() -> dict[str, float]:
        # What the driver tells is since the last time.
        told = driver.metrics()
        totals.update({name: total + told[name][0] for name, total in totals.items()})
        return totals

    try:
        driver.start()
        settings, name = config.engine, config.served_name or config.model
        sampling = Sampling(
            settings.max_new_tokens, settings.temperature, settings.top_k, settings.top_p, tokenizer.stop_token_ids
        )
        yield EngineSource(driver, name, tokenizer, sampling, config.seed, api_key, measure)
    finally:
        driver.close()


def load(config: ServeConfig) -> Loaded:
    """Weights on the devices, an engine for them, and the tokenizer. ValueError or OSError where there are none."""
    folder = resolve_policy_folder(config.model, "model")
    policy, tokenizer = Policy(read_config(folder)), HFTokenizer.from_folder(folder)
    settings, model = config.engine, policy.config
    if model.is_scalar:
        raise ValueError(f"model={config.model} is read out as {model.readout}; expected a language model, which answers")
    devices = jax.devices()
    if (wanted := config.devices or len(devices)) > len(devices):
        raise ValueError(f"devices={wanted}, and there are {len(devices)}")
    mesh = make_rollout_mesh(PlacementConfig(rollout_tensor=config.tensor), devices[:wanted])
    dtype = compute_dtype(config.compute_dtype, mesh)
    engine = DecodeEngine(policy, mesh, settings, dtype)
    for problem in too_long(engine, f"model={config.model}"):
        raise ValueError(problem)
    weights = hf.load(folder, policy, shardings(mesh, policy.axes(), policy.abstract(dtype), ROLLOUT_RULES), dtype=dtype)
    return Loaded(engine, jax.jit(engine.layout, out_shardings=engine.param_shardings)(weights), tokenizer)
