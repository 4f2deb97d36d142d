"""Settings of the policy: files, adapter, and compute precision."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import POSITIVE

ADAPTER_CONFIG = "adapter_config.json"
"""File that marks a folder as a PEFT adapter."""

Remat = Literal["none", "dots", "attention", "full"]
"""Activations of a layer that are saved for the backward pass; the others are recomputed.

none: all are saved. dots: outputs of weight matrices and of attention. attention: outputs of
attention, so that attention is not computed twice. full: the input of the layer alone."""

Target = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "in_proj_q",
    "in_proj_k",
    "in_proj_v",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "experts.gate_proj",
    "experts.up_proj",
    "experts.down_proj",
]
"""Matrices of a layer, as named by PEFT and transformers; of latent attention (..._a_proj and so
on) and of linear attention (in_proj_..., out_proj), whose files have some of them in one matrix.
gate_proj, up_proj and down_proj are those of MLPs and of shared experts; each of the experts among
which a router chooses has factors of its own."""


@chz.chz
class LoRA:
    """Train a low-rank adapter on frozen weights.

    Without dropout: trainer and engine must compute the same log-probs.
    """

    rank: int = chz.field(validator=POSITIVE, default=16, doc="rank of the adapter")
    alpha: float = chz.field(
        validator=POSITIVE,
        default=32.0,
        doc="scale of the adapter: its output is multiplied by alpha / rank",
    )
    targets: tuple[Target, ...] = chz.field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        doc="matrices of every layer with an adapter; experts.gate_proj, experts.up_proj and "
        "experts.down_proj: each expert of a mixture has its own",
    )
    rslora: bool = chz.field(
        default=False,
        doc="scale alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv:2312.03732)",
    )

    @property
    def scale(self) -> float:
        """Factor of x · A · B."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@chz.chz
class PolicyConfig:
    """Files and precision of the policy, and its adapter."""

    path: str = chz.field(
        default="embedded",
        doc="'embedded' or 'embedded_vision' (tiny policies inside the package), a "
        "Hugging Face folder, or a hub "
        "name such as deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    )
    random_init: bool = chz.field(
        default=False, doc="random weights; of `path` only config.json and the tokenizer are read"
    )
    ignore_config_keys: tuple[str, ...] = chz.field(
        default=(),
        doc="unsupported keys of config.json, adapter_config.json, tokenizer_config.json and "
        "generation_config.json to ignore instead of refusing the policy",
    )
    long_rope: bool = chz.field(
        default=False,
        doc="for a policy with longrope (Phi-3, Phi-4-mini with 128k positions): rotate all tokens "
        "by the factors of long sequences, so that sequences may be longer than "
        "original_max_position_embeddings",
    )
    lora: LoRA | None = chz.field(
        default=None,
        doc="adapter to train instead of all parameters (policy.lora=LoRA, or any of its settings)",
    )
    adapter: str | None = chz.field(
        default=None,
        doc="PEFT folder of a LoRA adapter to train further, with its own rank, alpha and targets",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto",
        doc="dtype of activations and engine weights; auto: float32 on CPU, bfloat16 elsewhere. "
        "bfloat16 is faster on CPUs that multiply it (AVX512_BF16, AMX), from jax 0.12 on",
    )
