"""Scalar heads: one number per token instead of logits."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_policies import EXPERTS, SIZES, host_params, on_one_device, tiny_policy

from areal_jax.models import hf
from areal_jax.models.architecture import TRAITS, Family, ModelConfig, Readout
from areal_jax.models.attention import packed_attention
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params, Policy

FIXTURES = Path(__file__).parent / "parity_scalar"
SCALAR: list[Readout] = ["TokenClassification", "SequenceClassification"]


def scalar(policy: Policy, readout: Readout = "TokenClassification") -> Policy:
    return Policy(dataclasses.replace(policy.config, readout=readout))


@partial(jax.jit, static_argnums=(0, 1))
def new_head(policy: Policy, names: tuple[str, ...]) -> Params:
    """Sample parameters, of which the program computes these alone."""
    params = policy.init(jax.random.key(0))
    return {name: params[name] for name in names}


WITH_HEADS = [name for name in TRAITS if not TRAITS[name].vision]
"""Policies with a vision tower have no scalar heads."""


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_scalar_head_values_match_transformers(name: str) -> None:
    policy = Policy(hf.read_config(FIXTURES / name))
    params = hf.load(FIXTURES / name, policy, on_one_device(policy))
    expected = load_file(FIXTURES / name / "expected.safetensors")
    tokens = jnp.asarray(expected["tokens"])

    @jax.jit
    def values_of(tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        attend = packed_attention(jnp.ones_like(tokens))
        return policy.values(
            params, policy.hidden(params, tokens, positions, attend, compute_dtype=jnp.float32)[0]
        )

    values = values_of(tokens)
    assert expected["values"].std() > 0.1
    np.testing.assert_allclose(
        values if name == "token" else values[:, -1], expected["values"], atol=1e-5
    )


@pytest.mark.parametrize("name", ["token", "sequence"])
def test_resaving_transformers_folder_is_bit_exact(tmp_path: Path, name: str) -> None:
    policy = Policy(hf.read_config(FIXTURES / name))
    params = hf.load(FIXTURES / name, policy, on_one_device(policy))
    hf.save(tmp_path / "critic", policy, jax.device_get(params), dtype="bfloat16")
    assert hf.read_config(tmp_path / "critic") == policy.config
    theirs, ours = (
        load_file(folder / "model.safetensors") for folder in (FIXTURES / name, tmp_path / "critic")
    )
    assert theirs.keys() == ours.keys()
    for tensor, array in theirs.items():
        np.testing.assert_array_equal(array.view(np.uint16), ours[tensor].view(np.uint16))


@pytest.mark.parametrize("architecture", WITH_HEADS)
@pytest.mark.parametrize("readout", SCALAR)
@pytest.mark.slow
def test_scalar_head_policy_loads_language_model_body(
    tmp_path: Path, architecture: Family, readout: Readout
) -> None:
    for tied in (True, False):
        language_model = tiny_policy(architecture, tie_word_embeddings=tied)
        params = host_params(language_model)
        hf.save(tmp_path / f"{tied}", language_model, params)
        policy = scalar(language_model, readout)
        assert policy.config.num_params == sum(
            leaf.size for leaf in jax.tree.leaves(policy.abstract())
        )
        loaded = hf.load(tmp_path / f"{tied}", policy, on_one_device(policy))
        # The values of a new head are 0.
        head = {"value": np.zeros((16, 1))} | (
            {"value_bias": np.zeros(1)} if readout == "TokenClassification" else {}
        )
        trunk = {name: leaf for name, leaf in params.items() if name != "head"}
        jax.tree.map(np.testing.assert_array_equal, loaded, trunk | head)
        begun = new_head(policy, tuple(head))
        jax.tree.map(np.testing.assert_array_equal, begun, head)


def test_missing_scalar_head_is_refused(tmp_path: Path) -> None:
    policy = scalar(tiny_policy())
    hf.save(tmp_path, policy, host_params(policy))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: score\.weight"):
        hf.load(tmp_path, policy, on_one_device(policy))


@pytest.mark.parametrize("architecture", WITH_HEADS)
@pytest.mark.parametrize("readout", SCALAR)
def test_scalar_head_config_round_trips(architecture: Family, readout: Readout) -> None:
    config = dataclasses.replace(tiny_policy(architecture).config, readout=readout)
    written = json.loads(json.dumps(config.to_hf()))
    assert written["architectures"] == [architecture.replace("CausalLM", readout)]
    assert ModelConfig.from_hf(written, source="its own") == config


@pytest.mark.parametrize("labels", [None, {"0": "bad", "1": "good"}])
def test_several_labels_are_refused(labels: dict[str, str] | None) -> None:
    named = {"architectures": ["Qwen3MoeForSequenceClassification"], **SIZES, **EXPERTS}
    with pytest.raises(
        ValueError,
        match="a test: expected Qwen3MoeForSequenceClassification with 1 label in id2label, found 2",
    ):
        ModelConfig.from_hf(named | {"id2label": labels}, source="a test")


def test_adapter_with_scalar_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leave out policy\.lora"):
        Policy(scalar(tiny_policy()).config, LoRA())


def test_scalar_head_is_float32_in_every_dtype() -> None:
    abstract = scalar(tiny_policy()).abstract(jnp.bfloat16)
    assert (abstract["embed"].dtype, abstract["value"].dtype, abstract["value_bias"].dtype) == (
        jnp.bfloat16,
        *[jnp.float32] * 2,
    )
