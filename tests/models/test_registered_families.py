"""A model family that is registered outside the package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_policies import SIZES, on_one_device, random_params, tiny_policy
from tiny_runs import tiny_experiment, write_tiny_policy

import areal_jax
from areal_jax import register_model_family
from areal_jax.models import hf
from areal_jax.models.architecture import TRAITS, ModelConfig
from areal_jax.models.config_keys import FAMILY_KEYS
from areal_jax.models.decoder import Policy

ACME = {
    "architectures": ["AcmeForCausalLM"],
    "model_type": "acme",
    "sliding_window": None,
    **SIZES,
}
# The names in its files, where they differ.
OWN_NAMES = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.wq.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
    "lm_head.weight": "output.weight",
}


@pytest.fixture(autouse=True)
def no_registration_stays() -> Iterator[None]:
    before = dict(TRAITS), dict(FAMILY_KEYS)
    yield
    for registered, known in zip((TRAITS, FAMILY_KEYS), before, strict=True):
        for name in registered.keys() - known.keys():
            del registered[name]


def register(**traits: Any) -> None:
    register_model_family("AcmeForCausalLM", like="LlamaForCausalLM", model_type="acme", **traits)


def test_unregistered_family_is_refused() -> None:
    with pytest.raises(ValueError, match="expected architectures to be one of"):
        ModelConfig.from_hf(ACME, "a test")


def test_registered_family_reads_and_writes_its_own_files(tmp_path: Path) -> None:
    register(tensor_names=OWN_NAMES)
    policy = Policy(ModelConfig.from_hf(ACME, "a test"))
    params = random_params(policy)
    hf.save(tmp_path / "acme", policy, params)
    names = load_file(tmp_path / "acme" / "model.safetensors").keys()
    assert "layers.2.attention.wq.weight" in names and "output.weight" in names
    assert not any("q_proj" in name or "lm_head" in name for name in names)
    config = hf.read_config(tmp_path / "acme")
    assert (config.architecture, config.to_hf()["model_type"]) == ("AcmeForCausalLM", "acme")
    loaded = hf.load(tmp_path / "acme", Policy(config), on_one_device(policy))
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_registered_family_has_the_layers_of_the_known_one() -> None:
    register(qk_norm=True)
    acme = Policy(ModelConfig.from_hf(ACME, "a test"))
    llama = tiny_policy("LlamaForCausalLM")
    # Two norms of head_dim (16 / 4) in each of three layers.
    assert acme.config.num_params == llama.config.num_params + 3 * 2 * 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"like": "GPT2LMHeadModel"}, "like=GPT2LMHeadModel: expected one of"),
        ({"architecture": "Acme"}, "ends in ForCausalLM"),
        ({"qk_norms": True}, "expected traits of"),
        ({"tensor_names": {"model.layers.{}.x": "layers.x"}}, "as many {} in both names"),
        ({"architecture": "Qwen2ForCausalLM"}, "already registered"),
    ],
)
def test_invalid_registrations_are_refused(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"architecture": "AcmeForCausalLM", "like": "LlamaForCausalLM"}
    with pytest.raises(ValueError) as refused:
        register_model_family(**(given | changed), model_type="acme")
    assert message in str(refused.value)


@pytest.mark.slow
def test_registered_family_trains(tmp_path: Path) -> None:
    register()
    folder = write_tiny_policy(tmp_path / "policy")
    config = json.loads((folder / "config.json").read_text())
    for name in ("use_sliding_window", "max_window_layers", "attention_bias"):
        config.pop(name, None)
    config |= {key: ACME[key] for key in ("architectures", "model_type", "sliding_window")}
    (folder / "config.json").write_text(json.dumps(config))
    experiment = tiny_experiment(folder, num_steps=1).replace(
        **{"rewards.function": lambda task, answer: len(answer) % 2}
    )
    result = areal_jax.train(experiment, tmp_path / "run")
    assert result.policy_folder is not None
    assert hf.read_config(result.policy_folder).architecture == "AcmeForCausalLM"
