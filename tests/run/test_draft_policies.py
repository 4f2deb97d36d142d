"""Draft policies by name: loaded, counted, and refused if they do not fit the policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.load import load_experiment
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode_shapes import DRAFT
from areal_jax.errors import ConfigError
from areal_jax.models.config import PolicyConfig
from areal_jax.models.hf import read_config
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_rollout_mesh
from areal_jax.run.draft_policies import random_draft_policy
from areal_jax.run.make_plan import make_plan
from areal_jax.run.models import DecodingPolicy, find_decoding_policy
from areal_jax.run.plan_report import plan_text

ENGINE = EngineConfig(
    num_slots=4,
    max_prompt_tokens=64,
    max_new_tokens=64,
    draft_tokens=2,
    draft_policy="embedded",
)


def found(engine: EngineConfig, tensor: int = 1) -> DecodingPolicy:
    placement = PlacementConfig(rollout_devices=tensor, rollout_tensor=tensor)
    mesh = make_rollout_mesh(placement, jax.devices()[:tensor])
    return find_decoding_policy(PolicyConfig(), engine, mesh, None, seed=0)


def changed(folder: Path, name: str, **settings: object) -> str:
    """Copy the embedded policy, with other settings in one of its files."""
    shutil.copytree(EMBEDDED, folder, dirs_exist_ok=True)
    content = json.loads((folder / name).read_text()) | settings
    (folder / name).write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_weights_of_a_draft_policy_are_those_of_its_folder(tensor: int) -> None:
    decoding = found(ENGINE, tensor)
    draft, weights = decoding.engine.load_draft()[DRAFT], decoding.load().params
    jax.tree.map(np.testing.assert_array_equal, draft, weights)
    assert decoding.engine.draft_bytes() > 0
    assert found(chz.replace(ENGINE, draft_policy="")).engine.load_draft() == {}


def test_random_weights_have_the_shapes_that_programs_take() -> None:
    draft = random_draft_policy(read_config(EMBEDDED), jnp.bfloat16)
    shapes = draft.policy.abstract(jnp.bfloat16)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = draft.load(jax.tree.map(lambda _: one, shapes))
    kinds = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (params, shapes))
    assert kinds[0] == kinds[1]


def test_draft_policies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.draft_policy=\./missing: expected 'embedded'"):
        found(chz.replace(ENGINE, draft_policy="./missing"))
    short = changed(tmp_path / "short", "config.json", max_position_embeddings=100)
    with pytest.raises(ConfigError, match=f"128 is longer than the 100 positions of .*={short}"):
        found(chz.replace(ENGINE, draft_policy=short))
    vocab = json.loads((EMBEDDED / "tokenizer.json").read_text())["model"]
    first, second = sorted(vocab["vocab"])[:2]
    ids = vocab["vocab"]
    vocab["vocab"] = ids | {first: ids[second], second: ids[first]}
    other = changed(tmp_path / "other", "tokenizer.json", model=vocab)
    with pytest.raises(
        ConfigError,
        match=f"engine.draft_policy={other} has other tokens than policy.path=embedded: 2 tokens",
    ):
        found(chz.replace(ENGINE, draft_policy=other))


@pytest.mark.slow
def test_a_draft_policy_is_counted_in_the_memory_of_engines() -> None:
    few = "tasks.num_tasks=256", "engine.num_slots=12"
    alone, drafted = (
        make_plan(load_experiment("aime", *few, "engine.draft_tokens=1", *more))
        for more in ((), ("engine.draft_policy=embedded",))
    )
    before, after = alone.rollout_bytes(), drafted.rollout_bytes()
    # The policy itself: one more set of weights, and as many keys and values again.
    assert after["draft policy"] * 2 == before["weights"] == after["weights"]
    assert after["KV caches"] == 2 * before["KV caches"]
    assert "draft policy  embedded (Qwen2ForCausalLM, 0.9 M parameters)" in plan_text(drafted)
    assert "draft policy" not in plan_text(alone)
