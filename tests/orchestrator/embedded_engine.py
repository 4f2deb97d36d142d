"""The embedded policy with an engine, its tokenizer, and what the engine loop draws with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import areal_jax
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import EngineParams
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import hf
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Completion, Request, Sampling, Weights, derive_seed
from areal_jax.weights.pinned import Pinned

FOLDER = Path(areal_jax.__file__).parent / "models" / "embedded"
CONFIG = EngineConfig(
    num_slots=4,
    max_prompt_tokens=64,
    max_new_tokens=40,
    steps_per_dispatch=1,
    prefill_chunk_tokens=16,
)
QUESTIONS = [f"What is {a} + {101 - a} * {a}?" for a in (2, 17, 4, 31, 8, 12, 5, 70, 9)]
DEVICES = (1, 4)
"""As many as the engine may have; four are two by two."""


@lru_cache
def tokenizer() -> HFTokenizer:
    return HFTokenizer.from_folder(FOLDER)


@lru_cache
def decoding(num_devices: int) -> tuple[DecodeEngine, EngineParams]:
    placement = (
        PlacementConfig()
        if num_devices == 1
        else PlacementConfig(rollout_devices=num_devices, rollout_tensor=2)
    )
    mesh = make_meshes(placement, jax.devices()[:1] if num_devices == 1 else None).rollout
    policy = Policy(hf.read_config(FOLDER))
    engine = DecodeEngine(policy, mesh, CONFIG, jnp.float32)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = hf.load(FOLDER, policy, jax.tree.map(lambda _: here, policy.abstract()))
    return engine, jax.device_put(jax.jit(engine.layout)(params), engine.param_shardings)


def by_engine_loop(
    num_devices: int, prompts: Sequence[np.ndarray], sampling: Sampling, num_samples: int = 1
) -> list[list[Completion]]:
    """Answers to every prompt, the n-th sampled with `derive_seed(7, str(n))`."""
    engine, params = decoding(num_devices)

    async def main() -> list[list[Completion]]:
        engine_loop = EngineLoop(engine, Pinned(Weights(0, params)))
        engine_loop.start()
        try:
            return await asyncio.gather(
                *(
                    engine_loop.submit(
                        Request(f"r{i}", prompt, num_samples, sampling, derive_seed(7, str(i)))
                    )
                    for i, prompt in enumerate(prompts)
                )
            )
        finally:
            engine_loop.close()

    return asyncio.run(main())
