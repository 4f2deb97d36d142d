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
# Programs of linear attention take longest to compile, and its states lie beside either layout. The
# caches of the second row are those of other families.
ONE_LAYOUT = {
    **{"qwen3_next_dense": "sharded pages", "qwen3_5": "view", "qwen3_5_moe": "view"},
    **dict.fromkeys(("seed_oss", "ernie4_5", "olmoe", "mixtral", "glm4_moe"), "view"),
}
CASES = [
    pytest.param(family, *layout, id=f"{family}-{name}")
    for family in FAMILIES.values()
    for name, layout in LAYOUTS.items()
    if ONE_LAYOUT.get(family, name) == name
]
CONFIG = EngineConfig(
    num_slots=4, max_prompt_tokens=8, max_new_tokens=64, steps_per_dispatch=8, page_tokens=4
)


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
    engine = DecodeEngine(policy, mesh, CONFIG, np.float32, reader)
    weights = jax.jit(engine.layout, out_shardings=engine.param_shardings)(
        jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    )
    # Equal weights are not compared, so that every update rebuilds the KV cache.
    monkeypatch.setattr(engine, "same_weights", lambda old, new: False)
    greedy = load_file(FIXTURES / family / "expected.safetensors")["greedy"][0]

    async def act(engine_loop: EngineLoop) -> list[Completion]:
        engine_loop.start()
        asked = request(
            prompt=greedy[:8].tolist(), num_samples=2, max_new_tokens=64, temperature=0.0
        )
        return await engine_loop.submit(asked)

    for completion in with_engine_loop(engine, Updates(weights), act):
        assert completion.tokens.tolist() == greedy[8:].tolist()
        assert len(set(completion.versions.tolist())) > 4  # several updates during the answer
