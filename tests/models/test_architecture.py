import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from tiny_policies import EXPERTS, SIZES, tiny_policy

from areal_jax.models import rope
from areal_jax.models.architecture import TRAITS, ModelConfig
from areal_jax.models.config_keys import FAMILY_KEYS

LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], **SIZES}


def read(**settings: object) -> ModelConfig:
    return ModelConfig.from_hf(QWEN2 | settings, source="some/config.json")


@pytest.mark.parametrize("architecture", tuple(TRAITS))
@pytest.mark.parametrize("tied", [True, False])
def test_num_params_counts_every_leaf_once(architecture, tied):
    policy = tiny_policy(architecture, tie_word_embeddings=tied)
    assert policy.config.num_params == sum(leaf.size for leaf in jax.tree.leaves(policy.abstract()))


def test_num_params_counts_every_bias():
    policy = tiny_policy("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    assert policy.config.num_params == sum(leaf.size for leaf in jax.tree.leaves(policy.abstract()))


def test_num_params_of_a_published_policy():
    # DeepSeek-R1-Distill-Qwen-1.5B. A layer: q and o, k and v (2 heads of 128), their biases, the
    # MLP, two norms.
    config = read(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
    )
    layer = 2 * 1536 * 1536 + 2 * 1536 * 256 + 1536 + 512 + 3 * 1536 * 8960 + 2 * 1536
    assert config.num_params == 2 * 151936 * 1536 + 28 * layer + 1536 == 1777088000


def test_config_round_trips():
    config = read(
        head_dim=12,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        bos_token_id=3,
        eos_token_id=[1, 2],
        tie_word_embeddings=True,
    )
    assert ModelConfig.from_hf(config.to_hf(), source="its own") == config


def test_rope_base_is_read_from_old_and_new_keys():
    # transformers 4 writes rope_theta, transformers 5 rope_parameters.
    assert read(rope_theta=7.0) == read(rope_parameters={"rope_type": "default", "rope_theta": 7.0})


def test_absent_keys_have_family_defaults():
    absent = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"} | {
        "num_attention_heads": 32
    }
    # hidden_size / num_attention_heads would be 2.
    config = ModelConfig.from_hf(
        {**absent, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64},
        source="some/config.json",
    )
    assert (
        config.num_key_value_heads,
        config.head_dim,
        config.rope_theta,
        config.rms_norm_eps,
    ) == (32, 2, 10000.0, 1e-6)
    assert config.attention_bias and not config.qk_norm and not config.tie_word_embeddings
    config = ModelConfig.from_hf(
        {**absent, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64},
        source="some/config.json",
    )
    assert (config.num_key_value_heads, config.head_dim) == (32, 128)
    assert config.qk_norm and not config.attention_bias
    experts = {**absent, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64}
    assert ModelConfig.from_hf(experts, source="some/config.json").num_key_value_heads == 4
    llama = {**absent, "architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}
    assert ModelConfig.from_hf(llama, source="some/config.json").num_key_value_heads == 8


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"]
)
def test_null_key_value_heads_means_attention_heads(architecture):
    assert tiny_policy(architecture, num_key_value_heads=None).config.num_key_value_heads == 4


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("architectures", ["FalconForCausalLM"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}),
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "turns": 3}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("partial_rotary_factor", 0.5),
        ("mlp_bias", True),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["chunked_attention"] * 3),
        ("quantization_config", {"quant_method": "fp8"}),
        ("hidden_act", "gelu"),
        ("attention_bias", False),
        ("attention_dropout", 0.1),
        ("hidden_size", None),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", "2"),
        ("head_dim", "32"),
        ("rms_norm_eps", "1e-6"),
        ("rope_theta", "1e6"),
        ("rope_scaling", "yarn"),
        ("tie_word_embeddings", "false"),
        ("max_window_layers", "28"),
        ("layer_types", 3),
        ("num_hidden_layers", True),
    ],
)
def test_unsupported_settings_are_refused_with_their_file(setting, value):
    with pytest.raises(ValueError, match=rf"some/config.json: .*{setting}"):
        read(**{setting: value})


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        (
            "LlamaForCausalLM",
            {"use_sliding_window": True, "sliding_window": 4},
            "use_sliding_window",
        ),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 4}, "at least one layer with experts"),
        ("Qwen3_5MoeForCausalLM", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": LONG | {"long_factor": [1.0], "short_factor": [1.0]}},
            "with 2 numbers in short_factor and long_factor, found 1",
        ),
        ("Phi3ForCausalLM", {"rope_scaling": LONG | {"long_factor": [1.0]}}, "as many in short_f"),
        ("Phi3ForCausalLM", {"rope_scaling": LONG | {"long_factor": 2.0}}, "lists of numbers"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "no RoPE scaling but longrope",
        ),
        (
            "Qwen3MoeForCausalLM",
            {
                "layer_types": ["full_attention"] * 3,
                "use_sliding_window": True,
                "sliding_window": 4,
            },
            "layer_types",
        ),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [3]}, "mlp_only_layers"),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts_per_tok": 5},
            "expected num_experts_per_tok to be at most num_experts=4, found 5",
        ),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_unsupported_family_settings_are_refused(architecture, settings, named):
    with pytest.raises(ValueError, match=rf"a test: .*{named}"):
        tiny_policy(architecture, **settings)


def test_rope_scaling_is_read_from_old_and_new_keys():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16}
    old = read(rope_theta=7.0, rope_scaling={"type": "yarn"} | yarn)
    assert old == read(rope_parameters={"rope_type": "yarn", "rope_theta": 7.0} | yarn)
    # The attention factor of arXiv:2309.00071, equation 22.
    assert old.rope_scaling == rope.Yarn(4.0, 16, attention_factor=0.1 * math.log(4) + 1)
    # A factor of null is the ratio of lengths: 64 positions over 16.
    assert (
        read(
            rope_theta=7.0,
            rope_scaling={"type": "yarn", "original_max_position_embeddings": 16, "factor": None},
        )
        == old
    )
    # The ratio of two factors: (0.1 · 2 · ln 4 + 1) / (0.1 · ln 4 + 1).
    halved = read(
        rope_scaling={"type": "yarn", "mscale": 2.0, "mscale_all_dim": 1.0} | yarn
    ).rope_scaling
    assert isinstance(halved, rope.Yarn) and halved.attention_factor == pytest.approx(
        1.2772589 / 1.1386294, abs=1e-6
    )


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        # As in every published checkpoint: the first layer with a window does not exist.
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3}, ()),
        ({"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (None, 4, 4)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (4, None, None),
        ),
    ],
)
def test_windows_are_read_by_layer(settings, windows):
    config = read(**settings)
    assert config.sliding_windows == windows
    assert ModelConfig.from_hf(config.to_hf(), source="its own") == config


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8.0, "truncate": False},
        LONG,
    ],
)
def test_rope_scaling_round_trips(scaling):
    config = tiny_policy(
        "LlamaForCausalLM", rope_scaling=scaling, attention_bias=True, mlp_bias=True
    ).config
    assert config.rope_scaling is not None and config.output_bias and config.mlp_bias
    assert ModelConfig.from_hf(config.to_hf(), source="its own") == config


def test_expert_config_round_trips():
    config = tiny_policy(
        "Qwen3MoeForCausalLM", norm_topk_prob=True, use_sliding_window=True, sliding_window=4
    ).config
    assert config.moe is not None and config.moe.num_experts == 4 and config.moe.norm_topk_prob
    assert config.sliding_windows == (4, 4, 4)
    assert ModelConfig.from_hf(config.to_hf(), source="its own") == config


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 4}),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 12, "rope_theta": 3e5}),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 3}),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 1.0}),
        ("GptOssForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MinistralForCausalLM", {"layer_types": ["full_attention"] * 3}),
        ("Olmo3ForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 4}),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}),
        ("Qwen3NextForCausalLM", {"mlp_only_layers": [0, 3]}),
    ],
)
def test_settings_beside_a_familys_defaults_round_trip(architecture, settings):
    config = tiny_policy(architecture, **settings).config
    assert config != tiny_policy(architecture).config
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written, source="its own") == config


def test_config_is_hashable():
    assert len({read(), read(), dataclasses.replace(read(), rope_theta=2.0)}) == 2


def test_unknown_keys_are_refused_with_their_values():
    with pytest.raises(
        ValueError,
        match=r"frob=1 is not a known key.*mlp_bias=True is not.*ignore_config_keys=frob,mlp_bias",
    ):
        read(frob=1, mlp_bias=True)
    read_anyway = ModelConfig.from_hf(
        QWEN2 | {"frob": 1, "attention_dropout": 0.1}, "a test", ["frob", "attention_dropout"]
    )
    assert read_anyway.ignored_keys == ("attention_dropout", "frob")


def test_keys_that_are_read_cannot_be_ignored():
    with pytest.raises(
        ValueError, match="expected keys without effect, found rope_scaling, which are read"
    ):
        ModelConfig.from_hf(QWEN2, "a test", ["rope_scaling"])


@pytest.mark.parametrize("architecture", tuple(TRAITS))
def test_inert_keys_are_accepted_with_supported_values_only(architecture):
    plain = tiny_policy(architecture).config
    harmless = {
        "use_cache": False,
        "torch_dtype": "float16",
        "temperature": 0.6,
        "_attn_implementation": "eager",
        "label2id": {},
    }
    if not TRAITS[architecture].rotates_part:
        harmless["partial_rotary_factor"] = 1.0
    if TRAITS[architecture].activation == "silu":
        harmless["hidden_act"] = "swish"
    assert tiny_policy(architecture, **harmless, pretraining_tp=1).config == plain
    for name, value in {
        "auto_map": {},
        "per_layer_config": {"0": {}},
        "pretraining_tp": True,
        "is_encoder_decoder": True,
    }.items():
        if FAMILY_KEYS[architecture].get(name) == "harmless":
            continue
        with pytest.raises(ValueError, match=rf"{name}=.* is not supported for {architecture}"):
            tiny_policy(architecture, **{name: value})


@pytest.mark.parametrize("architecture", tuple(TRAITS))
def test_contradictory_model_type_is_refused(architecture):
    with pytest.raises(ValueError, match="model_type='gpt2' contradicts architectures"):
        tiny_policy(architecture, model_type="gpt2")


def test_llama_sliding_window_is_refused():
    with pytest.raises(
        ValueError, match="sliding_window=4096 is not supported for LlamaForCausalLM"
    ):
        tiny_policy("LlamaForCausalLM", sliding_window=4096)
    with pytest.raises(ValueError, match="layer_types"):
        tiny_policy("LlamaForCausalLM", layer_types=["sliding_attention"] * 3)


def test_longrope_has_short_factors_unless_set():
    original = tiny_policy("Phi3ForCausalLM").config.to_hf()
    # sqrt(1 + ln(64 / 16) / ln 16) = sqrt(1.5), with max_position_embeddings=64.
    original |= {"rope_scaling": LONG, "original_max_position_embeddings": 16}
    short, long = (
        ModelConfig.from_hf(original, "a test", long_rope=is_on) for is_on in (False, True)
    )
    assert (short.max_positions, long.max_positions) == (16, 64)
    assert isinstance(short.rope_scaling, rope.LongRope)
    assert short.rope_scaling.attention_factor == pytest.approx(1.5**0.5)
    plain = rope.frequencies(4, 100.0, None)
    for config, factors in ((short, [1.0, 2.0]), (long, [3.0, 4.0])):
        found = rope.frequencies(4, 100.0, config.rope_scaling)
        np.testing.assert_allclose(found, plain / factors)
        assert config.to_hf(original) == original
    # The name in the first files.
    older = original | {"rope_scaling": {name: LONG[name] for name in LONG if name != "rope_type"}}
    older["rope_scaling"] |= {"type": "su"}
    assert ModelConfig.from_hf(older, "a test") == short


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_outer_original_max_position_embeddings_has_precedence(kind):
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16, **bands}
    outer = read(rope_scaling=scaling, original_max_position_embeddings=32)
    assert outer == read(rope_scaling=scaling | {"original_max_position_embeddings": 32})
    assert outer != read(rope_scaling=scaling)
    # transformers cannot compute with null, but only some scalings read the key.
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        read(rope_scaling=scaling, original_max_position_embeddings=None)
    assert read(original_max_position_embeddings=32) == read()


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": None},
        {"rope_theta": 1.0},
        {
            "rope_parameters": {"rope_type": "default"},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}},
        {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            }
        },
    ],
)
def test_contradictory_or_unknown_rope_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"some/config\.json: .*rope_"):
        read(**settings)


def test_null_truncate_is_false_as_in_transformers():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert read(rope_scaling=scaling | {"truncate": None}) == read(
        rope_scaling=scaling | {"truncate": False}
    )
    assert read(rope_scaling=scaling | {"truncate": None}) != read(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Qwen2ForCausalLM", {"tie_word_embeddings": None}),
        ("Qwen2ForCausalLM", {"use_sliding_window": None}),
        ("Qwen2ForCausalLM", {"rms_norm_eps": None}),
        ("Qwen3ForCausalLM", {"head_dim": None}),
        ("Qwen3MoeForCausalLM", {"num_key_value_heads": None}),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": None}),
        ("Qwen3MoeForCausalLM", {"num_local_experts": 3}),
    ],
)
def test_values_that_transformers_refuses_are_refused(architecture, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        tiny_policy(architecture, **settings)


def test_export_writes_max_window_layers():
    settings = {"use_sliding_window": True, "sliding_window": 4}
    assert read(**settings, max_window_layers=1).to_hf()["max_window_layers"] == 1
    mixed = read(**settings, layer_types=["sliding_attention", "full_attention", "full_attention"])
    assert "max_window_layers" not in mixed.to_hf()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"n_group": 3}, "n_group groups of at least two experts"),
        ({"topk_group": 1}, "n_group=4, topk_group=1, n_routed_experts=8, num_experts_per_tok=3"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace below num_hidden_layers, found 3"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.* is not suppor"),
        ({"num_key_value_heads": 2}, "num_key_value_heads.: 4.* found {'num_key_value_heads': 2}"),
        ({"v_head_dim": 9}, "v_head_dim to be at most"),
        ({"index_topk": 2048}, "index_topk=2048 is not a known key"),
    ],
)
def test_unsupported_settings_of_deepseek_are_refused(settings, expected):
    with pytest.raises(ValueError, match=expected):
        tiny_policy("DeepseekV3ForCausalLM", **settings)


def test_yarn_scale_of_latent_attention_round_trips():
    yarn = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    config = tiny_policy("DeepseekV3ForCausalLM", rope_scaling=yarn).config
    assert config.latent is not None and config.latent.mscale_all_dim == 0.5
    assert ModelConfig.from_hf(config.to_hf(), source="its own") == config
