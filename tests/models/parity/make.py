"""Make the parity fixtures: tiny random checkpoints written by transformers, with the logits that transformers computes.

Run where torch is installed, which areal_jax itself does not need:

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
    python tests/models/parity/make.py

One folder per family: config.json and model.safetensors (or shards and an index), as `save_pretrained` writes them, and
expected.safetensors with `tokens` [2, 16] and float32 `logits` [2, 16, vocabulary]. Every parameter is random, biases and
norms too, so that leaving any of them out shows. Weights are bfloat16 to be small; the logits are those of the same values in
float32.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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


def families() -> dict[str, PreTrainedModel]:
    """One model per difference that the decoder knows."""
    return {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_theta=1000.0, tie_word_embeddings=False)),
        "qwen2_tied": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, rms_norm_eps=1e-5, tie_word_embeddings=False)),
        # Heads wider than hidden_size / num_attention_heads, as the small models of this family have them.
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True)),
    }


@torch.no_grad()
def main() -> None:
    here = Path(__file__).parent
    torch.manual_seed(0)
    for name, model in families().items():
        for path, parameter in model.named_parameters():
            fan_in = parameter.shape[-1] if parameter.ndim == 2 and "embed" not in path else 4
            drawn = torch.randn(parameter.shape) / fan_in**0.5
            parameter.copy_((1 + drawn if "norm" in path else drawn).to(torch.bfloat16).float())
        tokens = torch.randint(SIZES["vocab_size"], (2, 16))
        logits = model.float().eval()(tokens).logits
        # Llama in several files, so that an index is read too.
        model.to(torch.bfloat16).save_pretrained(here / name, max_shard_size="20KB" if name == "llama" else "1GB")
        (here / name / "generation_config.json").unlink()
        expected = {"tokens": tokens.to(torch.int32), "logits": logits.contiguous()}
        save_file(expected, here / name / "expected.safetensors")


if __name__ == "__main__":
    main()
