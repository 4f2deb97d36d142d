"""Make the LoRA fixtures: adapters and their logits, both from PEFT, for the policies of parity/.

Needs torch, which areal_jax itself does not, and the fixtures of parity/make.py:

    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2 safetensors==0.8.0
    python tests/models/parity_peft/make.py

Each adapter has a folder with adapter_config.json and adapter_model.safetensors, written by
`save_pretrained`, and expected.safetensors with `tokens` [2, 16] and float32 `logits`
[2, 16, vocabulary]. Both A and B are random, so that a missing one shows. The tokens of
vision-language policies are those of parity_vision/, with their images.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS = {
    "qwen2": LoraConfig(r=4, lora_alpha=8, target_modules=ALL, task_type="CAUSAL_LM"),
    "llama": LoraConfig(
        r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    ),
    "qwen3": LoraConfig(
        r=4, lora_alpha=2, target_modules=ALL, use_rslora=True, task_type="CAUSAL_LM"
    ),
    "phi3": LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    ),
}

# Linear attention in some layers; its matrices are fused, in qwen3_next for each key head by itself.
LINEAR_ADAPTERS = {
    "qwen3_5": LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj"],
        task_type="CAUSAL_LM",
    ),
    "qwen3_next": LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj"],
        task_type="CAUSAL_LM",
    ),
}

# Experts, whose parameters are no modules, and the MLP beside them; in gpt_oss the outputs of gate
# and up take turns.
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERT_ADAPTERS = {
    "qwen3_moe": LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        target_parameters=EXPERTS,
        task_type="CAUSAL_LM",
    ),
    "qwen2_moe": LoraConfig(
        r=2,
        lora_alpha=4,
        target_modules=[],
        target_parameters=[
            "mlp.experts.down_proj",
            *(f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")),
        ],
        use_rslora=True,
        task_type="CAUSAL_LM",
    ),
    "gpt_oss": LoraConfig(
        r=3,
        lora_alpha=12,
        target_modules=["o_proj"],
        target_parameters=EXPERTS,
        task_type="CAUSAL_LM",
    ),
}

LANGUAGE = r"model\.language_model\.layers\.\d+\.(mlp\.up_proj|self_attn\.o_proj|self_attn\.q_proj)"

VISION_ADAPTERS = {
    family: LoraConfig(r=2, lora_alpha=6, target_modules=LANGUAGE, task_type="CAUSAL_LM")
    for family in ("qwen2_5_vl", "qwen3_vl")
}


@torch.no_grad()
def main() -> None:
    here = Path(__file__).parent
    torch.manual_seed(0)
    adapt_text(here, ADAPTERS)
    for family, config in VISION_ADAPTERS.items():
        folder = here.parent / "parity_vision" / family
        base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        model, inputs = adapt(base, config), load_file(folder / "expected.safetensors")
        tokens, grids = inputs["tokens"].long(), inputs["grids"]
        logits = model(
            input_ids=tokens,
            mm_token_type_ids=(tokens == base.config.image_token_id).int(),
            pixel_values=inputs["patches"],
            image_grid_thw=torch.cat([torch.ones(len(grids), 1), grids], 1).long(),
        ).logits
        save(model, here / family, "parity_vision", tokens, logits)
    adapt_text(here, LINEAR_ADAPTERS)
    adapt_text(here, EXPERT_ADAPTERS)


def adapt_text(here: Path, adapters: dict[str, LoraConfig]) -> None:
    for family, config in adapters.items():
        base = AutoModelForCausalLM.from_pretrained(
            here.parent / "parity" / family, dtype=torch.float32
        )
        model = adapt(base, config)
        tokens = torch.randint(base.config.vocab_size, (2, 16))
        save(model, here / family, "parity", tokens, model(tokens).logits)


def adapt(base: PreTrainedModel, config: LoraConfig) -> PeftModel:
    """Put a random adapter on a policy."""
    model = get_peft_model(base, config).eval()
    for path, parameter in model.named_parameters():
        if "lora_" in path:
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return model


def save(
    model: PeftModel, folder: Path, bases: str, tokens: torch.Tensor, logits: torch.Tensor
) -> None:
    # A relative name instead of the path on this machine.
    model.peft_config["default"].base_model_name_or_path = f"tests/models/{bases}/{folder.name}"
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    expected = {"tokens": tokens.to(torch.int32), "logits": logits.contiguous()}
    save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
