import dataclasses

import jax
import pytest
from tiny_policies import SIZES, tiny_policy

from areal_jax.models.architecture import ModelConfig

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], **SIZES}


def read(**settings: object) -> ModelConfig:
    return ModelConfig.from_hf(QWEN2 | settings, source="some/config.json")


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_num_params_counts_every_leaf_once(architecture, tied):
    policy = tiny_policy(architecture, tie_word_embeddings=tied)
    assert policy.config.num_params == sum(leaf.size for leaf in jax.tree.leaves(policy.abstract()))


def test_num_params_of_a_published_policy():
    # DeepSeek-R1-Distill-Qwen-1.5B. A layer: q and o, k and v (2 heads of 128), their biases, the MLP, two norms.
    config = read(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12)
    layer = 2 * 1536 * 1536 + 2 * 1536 * 256 + 1536 + 512 + 3 * 1536 * 8960 + 2 * 1536
    assert config.num_params == 2 * 151936 * 1536 + 28 * layer + 1536 == 1777088000


def test_a_config_survives_the_trip_through_its_own_json():
    config = read(head_dim=12, rope_theta=5e5, rms_norm_eps=1e-5, bos_token_id=3, eos_token_id=[1, 2], tie_word_embeddings=True)
    assert ModelConfig.from_hf(config.to_hf(), source="its own") == config


def test_old_and_new_files_name_the_rope_base_differently():
    # Up to version 4, transformers writes rope_theta; from 5 on, rope_parameters.
    assert read(rope_theta=7.0) == read(rope_parameters={"rope_type": "default", "rope_theta": 7.0})


def test_what_a_file_leaves_out_has_the_value_of_its_family():
    config = ModelConfig.from_hf(
        {name: value for name, value in QWEN2.items() if name != "num_key_value_heads"}, source="some/config.json"
    )
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta, config.rms_norm_eps) == (4, 4, 10000.0, 1e-6)
    assert config.attention_bias and not config.qk_norm and not config.tie_word_embeddings
    qwen3 = tiny_policy("Qwen3ForCausalLM").config
    assert qwen3.qk_norm and not qwen3.attention_bias


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("architectures", ["MixtralForCausalLM"]),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("hidden_act", "gelu"),
        ("attention_bias", False),
        ("attention_dropout", 0.1),
        ("hidden_size", None),
        ("num_key_value_heads", 3),
    ],
)
def test_what_is_not_supported_is_named_with_its_file(setting, value):
    with pytest.raises(ValueError, match=rf"some/config.json: .*{setting}"):
        read(**{setting: value})


def test_a_config_is_a_key():
    assert len({read(), read(), dataclasses.replace(read(), rope_theta=2.0)}) == 2
