"""Make the parity fixtures: tiny random checkpoints and their logits, both from transformers.

Needs torch, which areal_jax itself does not:

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
    python tests/models/parity/make.py

Each family has a folder with config.json and model.safetensors (or several files with an index),
written by `save_pretrained`, and expected.safetensors with
- `tokens` [2, 16] and float32 `logits` [2, 16, vocabulary],
- `loss`: mean negative log-probability of all tokens but the first of a row, plus the weighted
  load-balance loss with experts,
- `balance`: the load-balance loss alone,
- the gradient of `loss`: of matrices the sums over each dimension, `rows.NAME` and `columns.NAME`;
  of vectors `rows.NAME`.

Every parameter is random, including biases and norms, so that a missing one shows. Weights are
bfloat16 to save space; the results are those of the same values in float32.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

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
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
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


def gradient(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return gradients by their names in checkpoints, which may differ from those of modules."""
    gradients = copy.deepcopy(model)
    for into, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
        into.data = parameter.grad
    with tempfile.TemporaryDirectory() as folder:
        gradients.save_pretrained(folder)
        loaded = load_file(Path(folder) / "model.safetensors")
    return loaded


def main() -> None:
    here = Path(__file__).parent
    torch.manual_seed(0)
    for name, model in families().items():
        for path, parameter in model.named_parameters():
            fan_in = parameter.shape[-1] if parameter.ndim == 2 and "embed" not in path else 4
            sampled = torch.randn(parameter.shape) / fan_in**0.5
            parameter.data = (1 + sampled if "norm" in path else sampled).to(torch.bfloat16).float()
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
            expected[f"rows.{path}"] = grad.sum(-1) if grad.ndim == 2 else grad
            if grad.ndim == 2:
                expected[f"columns.{path}"] = grad.sum(0)
        model.zero_grad()
        # Llama in several files, to test the index.
        model.to(torch.bfloat16).save_pretrained(
            here / name, max_shard_size="20KB" if name == "llama" else "1GB"
        )
        (here / name / "generation_config.json").unlink()
        expected = {name: tensor.detach().contiguous() for name, tensor in expected.items()}
        save_file(expected, here / name / "expected.safetensors")


if __name__ == "__main__":
    main()
