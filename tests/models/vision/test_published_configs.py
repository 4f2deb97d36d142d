"""config.json files of published vision-language policies, with all their keys."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.models.architecture import ModelConfig

TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
LAYERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def qwen2_5_vl(*sizes: int, kv_heads: int, vocab_size: int, is_tied: bool) -> dict[str, Any]:
    """Language model beside the other keys, as in files of transformers 4.41."""
    layers = dict(zip(LAYERS, sizes, strict=True))
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **TOKENS,
        **layers,
        "vision_token_id": 151654,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": layers["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    }


def qwen3_vl(*sizes: int, is_tied: bool, tower: tuple[int, int, int]) -> dict[str, Any]:
    """Language model in text_config, as in files of transformers 4.57."""
    depth, width, inner = tower
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        **TOKENS,
        "tie_word_embeddings": is_tied,
        "transformers_version": "4.57.0.dev0",
        "text_config": {
            **dict(zip(LAYERS, sizes, strict=True)),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "tie_word_embeddings": is_tied,
            "use_cache": True,
            "vocab_size": 151936,
        },
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17] if depth == 24 else [8, 16, 24],
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": width,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": inner,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": sizes[0],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


SMALL, LARGE = (24, 1024, 4096), (27, 1152, 4304)


# Numbers of parameters as the hub counts them in the safetensors files; a tied head once.
@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (
            qwen2_5_vl(2048, 11008, 36, 16, kv_heads=2, vocab_size=151936, is_tied=True),
            3_754_622_976,
        ),
        (
            qwen2_5_vl(3584, 18944, 28, 28, kv_heads=4, vocab_size=152064, is_tied=False),
            8_292_166_656,
        ),
        (qwen3_vl(2048, 6144, 28, 16, is_tied=True, tower=SMALL), 2_127_532_032),
        (qwen3_vl(2560, 9728, 36, 32, is_tied=True, tower=SMALL), 4_437_815_808),
        (qwen3_vl(4096, 12288, 36, 32, is_tied=False, tower=LARGE), 8_767_123_696),
    ],
    ids=["qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b"],
)
def test_published_configs_have_the_parameters_of_their_files(
    config: dict[str, Any], num_params: int
) -> None:
    read = ModelConfig.from_hf(config, "config.json")
    assert read.num_params == num_params
    # What is written is read as the same policy.
    assert ModelConfig.from_hf(read.to_hf(), "config.json") == read
    assert read.to_hf(config) == config
