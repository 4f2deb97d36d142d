"""Architectures of published policies by name, from the config.json files on the Hugging
Face hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_jax.models.architecture import ModelConfig

_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1e6, "head_dim": 128}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "rope_theta": 1e6,
    "head_dim": 128,
    "norm_topk_prob": True,
}
_QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "rope_theta": 1e6,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "rope_theta": 1e6, "sliding_window": None}
_OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "rope_theta": 5e5}
_OLMO3 = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 4096}
_PHI4 = {"architectures": ["Phi3ForCausalLM"], "rope_theta": 250000.0}
_GLM4 = {"architectures": ["Glm4ForCausalLM"], "head_dim": 128, "attention_bias": True}
# Other values of GLM-4.5-Air are the defaults of the family.
_GLM4_MOE = {"architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "rope_theta": 1e6}
_GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "sliding_window": 512}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
}
# Other values of DeepSeek-V3 are the defaults of the family.
_DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"]}
_MOONLIGHT = _DEEPSEEK | {
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "rope_theta": 50000.0,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e5}


def _shape(family: Mapping[str, Any], *columns: int) -> dict[str, Any]:
    return (
        dict(family)
        | dict(zip(_COLUMNS, columns, strict=True))
        | {"tie_word_embeddings": bool(columns[-1])}
    )


def _experts(num_experts: int, num_experts_per_tok: int, width: int) -> dict[str, Any]:
    return {
        **_QWEN3_MOE,
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "moe_intermediate_size": width,
        "router_aux_loss_coef": 0.001,
    }


KNOWN: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _shape(_QWEN2, 896, 4864, 24, 14, 2, 151936, 32768, True),
    "qwen2.5-1.5b": _shape(_QWEN2, 1536, 8960, 28, 12, 2, 151936, 32768, True),
    "qwen2.5-7b": _shape(_QWEN2, 3584, 18944, 28, 28, 4, 152064, 32768, False),
    "qwen2.5-14b": _shape(_QWEN2, 5120, 13824, 48, 40, 8, 152064, 32768, False),
    "qwen2.5-32b": _shape(_QWEN2, 5120, 27648, 64, 40, 8, 152064, 32768, False),
    "r1-distill-qwen-1.5b": _shape(_QWEN2, 1536, 8960, 28, 12, 2, 151936, 131072, False),
    "r1-distill-qwen-7b": _shape(_QWEN2, 3584, 18944, 28, 28, 4, 152064, 131072, False),
    "r1-distill-qwen-14b": _shape(_QWEN2, 5120, 13824, 48, 40, 8, 152064, 131072, False),
    "r1-distill-qwen-32b": _shape(_QWEN2, 5120, 27648, 64, 40, 8, 152064, 131072, False),
    "r1-distill-llama-8b": _shape(_LLAMA, 4096, 14336, 32, 32, 8, 128256, 131072, False),
    "llama-3.1-8b": _shape(_LLAMA, 4096, 14336, 32, 32, 8, 128256, 131072, False),
    "qwen3-0.6b": _shape(_QWEN3, 1024, 3072, 28, 16, 8, 151936, 40960, True),
    "qwen3-1.7b": _shape(_QWEN3, 2048, 6144, 28, 16, 8, 151936, 40960, True),
    "qwen3-4b": _shape(_QWEN3, 2560, 9728, 36, 32, 8, 151936, 40960, True),
    "qwen3-8b": _shape(_QWEN3, 4096, 12288, 36, 32, 8, 151936, 40960, False),
    "qwen3-14b": _shape(_QWEN3, 5120, 17408, 40, 40, 8, 151936, 40960, False),
    "qwen3-32b": _shape(_QWEN3, 5120, 25600, 64, 64, 8, 151936, 40960, False),
    "qwen3-30b-a3b": _shape(_experts(128, 8, 768), 2048, 6144, 48, 32, 4, 151936, 40960, False),
    "qwen1.5-moe-a2.7b": _shape(_QWEN2_MOE, 2048, 5632, 24, 16, 16, 151936, 8192, False),
    "mistral-7b-v0.3": _shape(_MISTRAL, 4096, 14336, 32, 32, 8, 32768, 32768, False),
    "olmo-2-7b": _shape(_OLMO2, 4096, 11008, 32, 32, 32, 100352, 4096, False),
    "olmo-3-7b": _shape(_OLMO3, 4096, 11008, 32, 32, 32, 100278, 65536, False),
    "phi-4": _shape(_PHI4, 5120, 17920, 40, 40, 10, 100352, 16384, False),
    "glm-4-9b": _shape(_GLM4, 4096, 13696, 40, 32, 2, 151552, 32768, False),
    "glm-4.5-air": _shape(_GLM4_MOE, 4096, 10944, 46, 96, 8, 151552, 131072, False),
    "gemma-3-1b": _shape(_GEMMA3, 1152, 6912, 26, 4, 1, 262144, 32768, True),
    "deepseek-v3": _shape(_DEEPSEEK, 7168, 18432, 61, 128, 128, 129280, 163840, False),
    "moonlight-16b-a3b": _shape(_MOONLIGHT, 2048, 11264, 27, 16, 16, 163840, 8192, False),
    "gpt-oss-20b": _shape(
        _GPT_OSS | {"num_local_experts": 32}, 2880, 2880, 24, 64, 8, 201088, 131072, False
    ),
    "gpt-oss-120b": _shape(
        _GPT_OSS | {"num_local_experts": 128}, 2880, 2880, 36, 64, 8, 201088, 131072, False
    ),
}
"""Content of config.json by name, as far as it decides the architecture."""


def known_shape(name: str) -> ModelConfig:
    """Return the architecture of a published policy.

    Raises:
        ValueError: the name is unknown; the message lists the known names.
    """
    if name not in KNOWN:
        raise ValueError(
            f"expected the name of a known policy ({', '.join(KNOWN)}), found {name!r}"
        )
    return ModelConfig.from_hf(KNOWN[name], name)
