"""Greedy tokens of the engine against those of transformers' `generate`, for each family.

The checkpoints and tokens are those of tests/models/parity/make.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file
from tiny_decode import request, with_engine_loop

from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import Reader
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import hf
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Completion, Weights

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "models" / "parity"
# The last checkpoint of each architecture.
FAMILIES = {
    json.loads((folder / "config.json").read_text())["architectures"][0]: folder.name
    for folder in sorted(FIXTURES.iterdir())
    if (folder / "config.json").is_file() and "mxfp4" not in folder.name
}
LAYOUTS: dict[str, tuple[Reader, int]] = {"view": ("view", 1), "sharded pages": ("plain", 2)}
# Each kind of cache and of layer that runs on shards is read in both layouts: keys and values, with
# windows and sinks, latent ones, recurrent states, experts. The caches of others are among these.
ONE_LAYOUT = {
    **dict.fromkeys(
        ("qwen3_next_dense", "gemma3", "mistral", "olmo3", "phi3_partial"), "sharded pages"
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe_dense"), "sharded pages"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "seed_oss", "ernie4_5", "olmoe", "mixtral"), "view"),
    **dict.fromkeys(("glm4", "glm4_moe", "ministral", "olmo2", "qwen2_yarn"), "view"),
}
CASES = [
    pytest.param(family, *layout, id=f"{family}-{name}")
    for family in FAMILIES.values()
    for name, layout in LAYOUTS.items()
    if ONE_LAYOUT.get(family, name) == name
]
# Those of one layout end within the shortest programs.
NUM_TOKENS = {family: 24 if family in ONE_LAYOUT else 64 for family in FAMILIES.values()}


class Updates:
    """A weight source with equal weights under a new version before every dispatch."""

    def __init__(self, params: object):
        self.params, self.version = params, -1

    def newest(self, after: int) -> Weights:
        self.version += 1
        return Weights(self.version, self.params)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return self.newest(at_least - 1)


@pytest.mark.parametrize(("family", "reader", "tensor"), CASES)
def test_greedy_tokens_match_generate(
    family: str, reader: Reader, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(hf.read_config(FIXTURES / family))
    one = SingleDeviceSharding(jax.devices()[0])
    params = hf.load(FIXTURES / family, policy, jax.tree.map(lambda _: one, policy.abstract()))
    placement = PlacementConfig(rollout_devices=tensor**2, train_devices=1, rollout_tensor=tensor)
    mesh = make_meshes(placement, jax.devices()[: tensor**2 + 1]).rollout
    count = NUM_TOKENS[family]
    config = EngineConfig(
        num_slots=4,
        max_prompt_tokens=8,
        max_new_tokens=count,
        steps_per_dispatch=count // 8,
        page_tokens=4,
    )
    engine = DecodeEngine(policy, mesh, config, np.float32, reader)
    weights = jax.jit(engine.layout, out_shardings=engine.param_shardings)(
        jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    )
    # Equal weights are not compared, so that every update rebuilds the KV cache.
    monkeypatch.setattr(engine, "same_weights", lambda old, new: False)
    greedy = load_file(FIXTURES / family / "expected.safetensors")["greedy"][0]

    async def act(engine_loop: EngineLoop) -> list[Completion]:
        engine_loop.start()
        asked = request(
            prompt=greedy[:8].tolist(), num_samples=2, max_new_tokens=count, temperature=0.0
        )
        return await engine_loop.submit(asked)

    for completion in with_engine_loop(engine, Updates(weights), act):
        assert completion.tokens.tolist() == greedy[8 : 8 + count].tolist()
        assert len(set(completion.versions.tolist())) > 4  # several updates during the answer
