"""Make the scalar-head fixtures: tiny random checkpoints and their values, from transformers.

Needs torch, which areal_jax itself does not:

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
    python tests/models/parity_scalar/make.py

Each head has a folder with config.json and model.safetensors, written by `save_pretrained`, and
expected.safetensors with `tokens` [2, 12] and float32 `values`: of every token [2, 12], or of the
last token of each row [2]. Rows of `reward` are padded with 0 to 61 tokens, [7, 61].
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_labels": 1,
}


def main() -> None:
    here = Path(__file__).parent
    torch.manual_seed(0)
    models = {
        "token": Qwen2ForTokenClassification(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "sequence": LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0)),
        "reward": Qwen2ForSequenceClassification(Qwen2Config(**SIZES, pad_token_id=0)),
    }
    for name, model in models.items():
        for path, parameter in model.named_parameters():
            sampled = (
                torch.randn(parameter.shape)
                / (parameter.shape[-1] if parameter.ndim == 2 else 4) ** 0.5
            )
            parameter.data = (1 + sampled if "norm" in path else sampled).to(torch.bfloat16).float()
        tokens = torch.randint(1, SIZES["vocab_size"], (2, 12))
        if name == "reward":
            lengths = torch.tensor([1, 2, 15, 16, 17, 33, 61])
            tokens = torch.randint(1, SIZES["vocab_size"], (7, 61))
            tokens *= torch.arange(61) < lengths[:, None]
        with torch.no_grad():
            values = model.float().eval()(tokens).logits[..., 0]
        model.to(torch.bfloat16).save_pretrained(here / name)
        save_file(
            {"tokens": tokens.to(torch.int32), "values": values.contiguous()},
            here / name / "expected.safetensors",
        )


if __name__ == "__main__":
    main()
