"""Which policy to load, what of it to train, and in which precision to compute."""

from __future__ import annotations

from typing import Literal

import chz

ADAPTER_CONFIG = "adapter_config.json"
"""What tells a folder with an adapter, as PEFT writes it, from others."""

Remat = Literal["none", "dots", "attention", "full"]
"""What the forward pass of a layer keeps for the backward pass, from all to nothing but its input.
dots: products with weights, and what attention gave. attention: what attention gave, so that long
rows are not attended to twice."""

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Matrices of a layer, named as PEFT and transformers name them."""


@chz.chz
class LoRA:
    """Train a low-rank adapter beside frozen weights, without dropout: trainer and engine must
    agree on every log-prob."""

    rank: int = chz.field(default=16, doc="columns of A and rows of B")
    alpha: float = chz.field(
        default=32.0, doc="what the adapter adds is multiplied by alpha / rank"
    )
    targets: tuple[Target, ...] = chz.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        doc="matrices of every layer that get an adapter",
    )
    rslora: bool = chz.field(
        default=False, doc="alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv:2312.03732)"
    )

    @property
    def scale(self) -> float:
        """What x · A · B is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@chz.chz
class PolicyConfig:
    path: str = chz.field(
        default="embedded",
        doc="'embedded' (the tiny policy inside the package), a Hugging Face folder, or a hub "
        "name such as "
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    )
    random_init: bool = chz.field(
        default=False, doc="take only config.json from `path` and draw fresh weights"
    )
    ignore_config_keys: tuple[str, ...] = chz.field(
        default=(),
        doc="keys of config.json, adapter_config.json, tokenizer_config.json and "
        "generation_config.json that are ignored "
        "instead of refused, by name",
    )
    lora: LoRA | None = chz.field(
        default=None,
        doc="train an adapter (policy.lora=LoRA, or any of its settings) instead of all parameters",
    )
    adapter: str | None = chz.field(
        default=None,
        doc=(
            "PEFT folder of a LoRA adapter to go on training; it brings its own rank, alpha and "
            "targets"
        ),
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto",
        doc=(
            "dtype of activations and of the engine's weights; auto: float32 on CPU, bfloat16 "
            "elsewhere"
        ),
    )
