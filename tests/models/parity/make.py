"""Make the parity fixtures: tiny random checkpoints and their logits, both from transformers.

Needs torch, which areal_jax itself does not:

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
    python tests/models/parity/make.py [NAME...]

With names, only these of the later families are made.

Each family has a folder with config.json and model.safetensors (or several files with an index),
written by `save_pretrained`, and expected.safetensors with
- `tokens` [2, 16] and float32 `logits` [2, 16, vocabulary],
- `loss`: mean negative log-probability of all tokens but the first of a row, plus the weighted
  load-balance loss with experts,
- `balance`: the load-balance loss alone,
- the gradient of `loss`: of matrices the sums over each of the last two dimensions, `rows.NAME` and
  `columns.NAME`; of vectors `rows.NAME`,
- `greedy` [1, 72]: 8 tokens of a prompt, and 64 of `generate`,
- of a policy with longrope `long_tokens` [1, 100], and the last 8 of their logits.

Every parameter is random, including biases and norms, so that a missing one shows. Weights are
bfloat16 to save space; the results are those of the same values in float32.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import json
import random
import sys
import tempfile
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SMALL = SIZES | {
    "hidden_size": 16,
    "intermediate_size": 20,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def sampled_sizes(seed: int) -> dict[str, int]:
    """Sample small sizes with several layers, groups of heads and odd widths."""
    draw = random.Random(seed).choice
    heads, head_dim = draw((2, 4)), draw((4, 8))
    return {
        "vocab_size": 40,
        "hidden_size": heads * head_dim,
        "intermediate_size": draw((12, 20, 28)),
        "num_hidden_layers": draw((3, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw((1, 2)),
        "max_position_embeddings": 128,
    }


def families() -> dict[str, PreTrainedModel]:
    """Make one model per variant of the decoder."""
    return {
        "qwen2": Qwen2ForCausalLM(
            Qwen2Config(**SIZES, rope_theta=1000.0, tie_word_embeddings=False)
        ),
        "qwen2_tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(
            LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=False)
        ),
        # Heads larger than hidden_size / num_attention_heads, as in small models of this family.
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True)),
        "llama3": LlamaForCausalLM(
            LlamaConfig(**SMALL, rope_parameters=LLAMA3, tie_word_embeddings=True)
        ),
        "llama_yarn": LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=YARN)),
        "llama_linear_biased": LlamaForCausalLM(
            LlamaConfig(**SMALL, rope_parameters=LINEAR, attention_bias=True, mlp_bias=True)
        ),
        "qwen2_yarn": Qwen2ForCausalLM(
            Qwen2Config(**SMALL, rope_parameters=YARN | {"attention_factor": 1.3})
        ),
        "qwen2_linear": Qwen2ForCausalLM(Qwen2Config(**SMALL, rope_parameters=LINEAR)),
        "qwen3_window": Qwen3ForCausalLM(
            Qwen3Config(
                **SMALL,
                use_sliding_window=True,
                sliding_window=5,
                max_window_layers=1,
                attention_bias=True,
            )
        ),
        "qwen3_moe": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SMALL,
                num_experts=6,
                num_experts_per_tok=2,
                moe_intermediate_size=12,
                norm_topk_prob=True,
                router_aux_loss_coef=0.1,
            )
        ),
    }


def later_families() -> dict[str, PreTrainedModel]:
    """Make one model per later family, each with a seed of its own."""
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    by_window = {
        "full_attention": {"rope_theta": 5000.0} | LINEAR,
        "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
    }
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    linear = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        # Otherwise the norm of small results amplifies the rounding of float32 beyond 1e-4.
        "rms_norm_eps": 1e-2,
    }
    return {
        "qwen3_next": Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **sampled_sizes(13) | {"num_hidden_layers": 4, "hidden_size": 32},
                **linear,
                **experts,
                head_dim=8,
                shared_expert_intermediate_size=20,
                router_aux_loss_coef=0.1,
                **tokens,
            )
        ),
        "qwen3_5": Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                **sampled_sizes(14) | {"num_hidden_layers": 4, "hidden_size": 32},
                **linear,
                head_dim=8,
                layer_types=[
                    f"{kind}_attention" for kind in ("linear", "full", "linear", "linear")
                ],
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_section": [1, 1, 0],
                    "mrope_interleaved": True,
                },
                tie_word_embeddings=True,
                **tokens,
            )
        ),
        "qwen3_5_moe": Qwen3_5MoeForCausalLM(
            Qwen3_5MoeTextConfig(
                **sampled_sizes(15) | {"num_hidden_layers": 3, "hidden_size": 24},
                **linear,
                **experts,
                head_dim=8,
                layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear")],
                shared_expert_intermediate_size=12,
                router_aux_loss_coef=0.1,
                **tokens,
            )
        ),
        "mistral": MistralForCausalLM(
            MistralConfig(**sampled_sizes(1), head_dim=12, sliding_window=5, **tokens)
        ),
        "ministral": MinistralForCausalLM(
            MinistralConfig(
                **sampled_sizes(2) | {"num_hidden_layers": 3},
                head_dim=8,
                sliding_window=4,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                **tokens,
            )
        ),
        "seed_oss": SeedOssForCausalLM(
            SeedOssConfig(
                **sampled_sizes(19),
                head_dim=12,
                rope_parameters={"rope_theta": 1000.0} | YARN,
                **tokens,
            )
        ),
        "ernie4_5": Ernie4_5ForCausalLM(Ernie4_5Config(**sampled_sizes(20), head_dim=8, **tokens)),
        "olmoe": OlmoeForCausalLM(
            OlmoeConfig(
                **sampled_sizes(21),
                num_experts=5,
                num_experts_per_tok=2,
                attention_bias=True,
                router_aux_loss_coef=0.1,
                **tokens,
            )
        ),
        "mixtral": MixtralForCausalLM(
            MixtralConfig(
                **sampled_sizes(22),
                num_local_experts=5,
                num_experts_per_tok=2,
                sliding_window=5,
                router_aux_loss_coef=0.1,
                **tokens,
            )
        ),
        "olmo2": Olmo2ForCausalLM(Olmo2Config(**sampled_sizes(3), **tokens)),
        "olmo3": Olmo3ForCausalLM(
            Olmo3Config(
                **sampled_sizes(4) | {"num_hidden_layers": 4},
                sliding_window=5,
                rope_parameters={
                    "full_attention": {"rope_theta": 5e5} | YARN,
                    "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
                },
                attention_bias=True,
                **tokens,
            )
        ),
        "phi3": Phi3ForCausalLM(
            Phi3Config(**sampled_sizes(5) | {"hidden_size": 32}, sliding_window=6, **tokens)
        ),
        "phi3_longrope": Phi3ForCausalLM(
            Phi3Config(
                **sampled_sizes(16) | {"hidden_size": 32, "num_hidden_layers": 2},
                original_max_position_embeddings=96,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1000.0,
                    "short_factor": [1.0, 1.1, 1.4, 2.0],
                    "long_factor": [1.0, 2.5, 4.0, 6.0],
                },
                **tokens,
            )
        ),
        "phi3_partial": Phi3ForCausalLM(
            Phi3Config(
                **sampled_sizes(6) | {"hidden_size": 32},
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1000.0,
                    "partial_rotary_factor": 0.75,
                },
                tie_word_embeddings=True,
                **tokens,
            )
        ),
        "glm4": Glm4ForCausalLM(Glm4Config(**sampled_sizes(7), head_dim=8, **tokens)),
        "glm4_moe": Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **sampled_sizes(23) | GROUPED,
                head_dim=8,
                use_qk_norm=True,
                attention_bias=True,
                **tokens,
            )
        ),
        "gemma3": Gemma3ForCausalLM(
            Gemma3TextConfig(
                **sampled_sizes(8) | {"num_hidden_layers": 3},
                head_dim=8,
                sliding_window=4,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                query_pre_attn_scalar=12,
                rope_parameters=by_window,
                **tokens,
            )
        ),
        "qwen2_moe": Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **sampled_sizes(9),
                **experts,
                shared_expert_intermediate_size=20,
                router_aux_loss_coef=0.1,
                **tokens,
            )
        ),
        # Layers without experts.
        "qwen3_moe_dense": Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **sampled_sizes(17) | {"num_hidden_layers": 4, "hidden_size": 16},
                **experts,
                head_dim=4,
                decoder_sparse_step=2,
                mlp_only_layers=[1],
                norm_topk_prob=True,
                router_aux_loss_coef=0.1,
                **tokens,
            )
        ),
        "qwen3_next_dense": Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **sampled_sizes(18) | {"num_hidden_layers": 4, "hidden_size": 16},
                **linear,
                **experts | {"num_experts": 3},
                head_dim=8,
                layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear", "full")],
                mlp_only_layers=[0, 3],
                shared_expert_intermediate_size=12,
                router_aux_loss_coef=0.1,
                **tokens,
            )
        ),
        "gpt_oss": gpt_oss(sampled_sizes(10) | {"num_hidden_layers": 3}),
        "deepseek_dense_query": deepseek_v3(
            11, q_lora_rank=None, n_group=1, topk_group=1, first_k_dense_replace=0
        ),
        "deepseek_v3": deepseek_v3(
            12,
            rope_parameters={"rope_theta": 1000.0, "mscale": 0.7, "mscale_all_dim": 1.3} | YARN,
            attention_bias=True,
        ),
    }


def deepseek_v3(seed: int, **settings: object) -> DeepseekV3ForCausalLM:
    """Make a policy with latent attention, whose sizes are sampled, and experts in groups."""
    sizes = sampled_sizes(seed) | {"num_hidden_layers": 3}
    draw = random.Random(seed).choice
    latent = {
        "q_lora_rank": draw((6, 10)),
        "kv_lora_rank": draw((6, 12)),
        "qk_nope_head_dim": draw((4, 6)),
        "qk_rope_head_dim": draw((4, 8)),
        "v_head_dim": draw((6, 8)),
    }
    experts = GROUPED | {"n_shared_experts": draw((1, 2))}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    config = sizes | latent | experts | tokens | settings
    config["num_key_value_heads"] = config["num_attention_heads"]
    return DeepseekV3ForCausalLM(DeepseekV3Config(**config))


def gpt_oss(sizes: dict[str, int]) -> GptOssForCausalLM:
    """Make a policy with sinks, alternating windows and experts with biases."""
    return GptOssForCausalLM(
        GptOssConfig(
            **sizes,
            head_dim=8,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=5,
            rope_parameters={"rope_theta": 1000.0, "truncate": False} | YARN,
            router_aux_loss_coef=0.1,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def save_quantized(folder: Path) -> None:
    """Write `gpt_oss_mxfp4`: experts as their authors quantize them, and the logits alone."""
    torch.manual_seed(zlib.crc32(folder.name.encode()))
    model = gpt_oss(sampled_sizes(10) | {"hidden_size": 32, "intermediate_size": 32}).float().eval()
    tensors = {}
    for name, parameter in model.named_parameters():
        parameter.data = (torch.randn(parameter.shape) / 4 + ("norm" in name)).to(torch.bfloat16)
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, blocks.shape[:-1], dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data = convert_moe_packed_tensors(blocks, scales)
        else:
            tensors[name] = parameter.data
    tokens = torch.randint(SIZES["vocab_size"], (2, 16))
    expected = {"tokens": tokens.to(torch.int32), "logits": model.float()(tokens).logits.detach()}
    config = model.config.to_dict() | {
        "architectures": ["GptOssForCausalLM"],
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(expected, folder / "expected.safetensors")


def gradient(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return gradients by their names in checkpoints, which may differ from those of modules."""
    gradients = copy.deepcopy(model)
    for into, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
        into.data = parameter.grad
    for buffer in gradients.buffers():
        buffer.zero_()
    with tempfile.TemporaryDirectory() as folder:
        gradients.save_pretrained(folder)
        loaded = load_file(Path(folder) / "model.safetensors")
    return loaded


def main(names: list[str]) -> None:
    here = Path(__file__).parent
    torch.manual_seed(0)
    # Lazily: making models samples numbers too.
    models = ((make, *item) for make in (families, later_families) for item in make().items())
    for make, name, model in models:
        if make is later_families:
            torch.manual_seed(zlib.crc32(name.encode()))
        if names and (make is not later_families or name not in names):
            continue
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.copy_((torch.randn(buffer.shape) / 4).to(torch.bfloat16))
        for path, parameter in model.named_parameters():
            fan_in = parameter.shape[-1] if parameter.ndim == 2 and "embed" not in path else 4
            sampled = torch.randn(parameter.shape) / fan_in**0.5
            # Norms of these two store the difference from 1.
            is_scale = "norm" in path and not (
                name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_next_dense")
                and "linear_attn" not in path
            )
            parameter.data = (1 + sampled if is_scale else sampled).to(torch.bfloat16).float()
        tokens = torch.randint(SIZES["vocab_size"], (2, 16))
        is_moe = hasattr(model.config, "num_experts")
        out = model.float().eval()(
            tokens, labels=tokens, **({"output_router_logits": True} if is_moe else {})
        )
        out.loss.backward()
        expected = {"tokens": tokens.to(torch.int32), "logits": out.logits, "loss": out.loss}
        if is_moe:
            expected["balance"] = out.aux_loss
        for path, grad in gradient(model).items():
            expected[f"rows.{path}"] = grad.sum(-1) if grad.ndim > 1 else grad
            if grad.ndim > 1:
                expected[f"columns.{path}"] = grad.sum(-2)
        model.zero_grad()
        model.generation_config.eos_token_id = None
        greedy = model.generate(tokens[:1, :8], do_sample=False, max_new_tokens=64)
        expected["greedy"] = greedy.to(torch.int32)
        if name == "phi3_longrope":
            # Beyond the original length, where the long factors are used.
            expected["long_tokens"] = torch.randint(SIZES["vocab_size"], (1, 100)).to(torch.int32)
            expected["long_logits"] = model(expected["long_tokens"].long()).logits[:, -8:]
        # Llama in several files, to test the index.
        model.to(torch.bfloat16).save_pretrained(
            here / name, max_shard_size="20KB" if name == "llama" else "1GB"
        )
        (here / name / "generation_config.json").unlink()
        expected = {name: tensor.detach().contiguous() for name, tensor in expected.items()}
        save_file(expected, here / name / "expected.safetensors")
    if not names:
        save_quantized(here / "gpt_oss_mxfp4")


if __name__ == "__main__":
    main(sys.argv[1:])
