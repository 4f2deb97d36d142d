"""Model families as data: what their config.json does not contain, and their tensor names.

The file has more than 400 lines because it lists every family.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from areal_jax.models.rope import ALL_TYPES
from areal_jax.models.vision.config import VisionKind
from areal_jax.models.vision.tensor_names import QWEN3_VL_NAMES

Activation: TypeAlias = Literal["silu", "gelu_tanh", "clipped_swish"]
"""silu: silu(gate) · up. gelu_tanh: gelu(gate) · up, with the approximation by tanh. clipped_swish:
gate · sigmoid(1.702 · gate) · (up + 1), with gate of at most 7 and up within -7 and 7."""

_NONE: Mapping[str, Any] = MappingProxyType({})


class Windows(NamedTuple):
    """Which layers have a sliding window."""

    is_optional: bool = True
    """Whether use_sliding_window must be true; otherwise any number in sliding_window is used."""
    period: int = 0
    """Every layer of this number sees all tokens, unless layer_types is set; 0: none does."""
    limit: Literal["from", "below"] | None = None
    """Whether max_window_layers is the first layer with a window, or the first one without."""
    by_layer: bool = True
    """Whether transformers reads layer_types for the layers, and not for caches alone."""


class Traits(NamedTuple):
    """Properties of a family that its config.json does not contain."""

    model_type: str
    defaults: Mapping[str, Any] = _NONE
    """Values of absent keys of config.json, where they differ from Llama's."""
    qkv_bias: bool = False
    """Whether q, k and v always have biases."""
    has_output_bias: bool = True
    """Whether attention_bias also adds a bias to the output of attention."""
    qk_norm: bool = False
    """Whether q and k have a norm, before RoPE; use_qk_norm decides where it is in `defaults`."""
    qk_norm_over: Literal["head", "heads"] = "head"
    """Numbers under one norm of q and k: those of a head, or of all heads."""
    norms: Literal["before", "after", "both"] = "before"
    """Norms before attention and MLP, after them (before the residual is added), or both."""
    norm_offset: float = 0.0
    """Added to the stored scale of every norm; 1: files contain the difference from 1."""
    activation: Activation = "silu"
    """Activation of MLPs and experts."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by sqrt(hidden_size)."""
    has_latent_attention: bool = False
    """Whether keys and values are products with a latent vector (MLA)."""
    has_linear_attention: bool = False
    """Whether some layers have linear attention (Gated DeltaNet)."""
    gates_attention: bool = False
    """Whether the result of attention is multiplied by the sigmoid of a gate, whose matrix is that
    of queries: twice as many outputs per head, of which the gate has the last."""
    has_sinks: bool = False
    """Whether each head has a learned score that takes a share of the softmax."""
    rope_by_window: bool = False
    """Whether layers with a window have their own RoPE, unscaled."""
    rotates_part: bool = False
    """Whether RoPE may rotate the first dimensions of a head alone (partial_rotary_factor)."""
    rope_interleaved: bool = False
    """Whether RoPE rotates dimensions 2i and 2i + 1, not i and i + half."""
    rope_types: tuple[str, ...] = ALL_TYPES
    """RoPE scalings that transformers reads."""
    windows: Windows | None = None
    vision: VisionKind | None = None
    """Vision tower, whose images have positions of their own in RoPE (M-RoPE)."""
    is_moe: bool = False
    has_shared_gate: bool = True
    """Whether the output of a shared expert is multiplied by a gate."""
    has_expert_biases: bool = False
    """Whether router and experts have biases."""
    expert_keys: Mapping[str, str | None] = _NONE
    """Keys of config.json of the fields of MoEConfig, where they differ; None: there is none."""
    has_unread_layers: bool = False
    """Whether files may have layers after the last one, which predict several tokens."""
    not_null: tuple[str, ...] = ("head_dim",)
    """Keys for which null differs from an absent key in transformers, or is invalid."""
    tensor_names: Mapping[str, str] = _NONE
    """Names of tensors in the files, by Llama's names; {} is the layer. Empty: as Llama's. A name
    without {} for the expert is one tensor of all experts, in the layout of the parameter."""
    fused: Mapping[str, tuple[str, ...]] = _NONE
    """Tensors that contain several of Llama's, with these names, along the outputs."""
    interleaved: Mapping[str, tuple[str, ...]] = _NONE
    """Like `fused`, but output i of part j is number i · parts + j of the last dimension."""
    fused_by_head: Mapping[str, tuple[str, ...]] = _NONE
    """Like `fused`, but for each key head of linear attention by itself."""


_LAYER = "model.layers.{}."
_GATE_UP = {
    f"{_LAYER}mlp.gate_up_proj.weight": (
        f"{_LAYER}mlp.gate_proj.weight",
        f"{_LAYER}mlp.up_proj.weight",
    )
}
_QKV = {
    f"{_LAYER}self_attn.qkv_proj.weight": (
        f"{_LAYER}self_attn.q_proj.weight",
        f"{_LAYER}self_attn.k_proj.weight",
        f"{_LAYER}self_attn.v_proj.weight",
    )
}
_OLMO_NORMS = {
    f"{_LAYER}post_self_attn_layernorm.weight": f"{_LAYER}post_attention_layernorm.weight",
    f"{_LAYER}post_mlp_layernorm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
}
_OLMO = {"rms_norm_eps": 1e-5}
_EXPERTS = f"{_LAYER}mlp.experts."
_GROUPED_KEYS = {"num_experts": "n_routed_experts", "router_aux_loss_coef": None}
_SHARED_EXPERTS = {
    f"{_LAYER}mlp.shared_expert.{name}_proj.weight": (
        f"{_LAYER}mlp.shared_experts.{name}_proj.weight"
    )
    for name in ("gate", "up", "down")
}
_LINEAR = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _linear_names(*parts: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}linear_attn.in_proj_{part}.weight" for part in parts)


_FUSED_CONVOLUTION = {
    f"{_LAYER}linear_attn.conv1d.weight": tuple(
        f"{_LAYER}linear_attn.conv1d_{part}.weight" for part in ("q", "k", "v")
    )
}

_QWEN3_5 = Traits(
    "qwen3_5_text",
    _LINEAR | {"num_key_value_heads": 4},
    qk_norm=True,
    norm_offset=1.0,
    rotates_part=True,
    has_linear_attention=True,
    gates_attention=True,
    has_unread_layers=True,
    not_null=("head_dim", "num_key_value_heads"),
    fused=_FUSED_CONVOLUTION
    | {f"{_LAYER}linear_attn.in_proj_qkv.weight": _linear_names("q", "k", "v")},
)

TRAITS: dict[str, Traits] = {
    "Qwen2ForCausalLM": Traits(
        "qwen2",
        {"num_key_value_heads": 32},
        qkv_bias=True,
        has_output_bias=False,
        windows=Windows(limit="from"),
    ),
    "Qwen3ForCausalLM": Traits(
        "qwen3",
        {"num_key_value_heads": 32, "head_dim": 128},
        qk_norm=True,
        windows=Windows(limit="from"),
    ),
    "Qwen3MoeForCausalLM": Traits(
        "qwen3_moe",
        {"num_key_value_heads": 4},
        qk_norm=True,
        windows=Windows(by_layer=False),
        is_moe=True,
        not_null=("head_dim", "num_key_value_heads"),
    ),
    "LlamaForCausalLM": Traits("llama", not_null=()),
    "SeedOssForCausalLM": Traits(
        "seed_oss",
        {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        has_output_bias=False,
    ),
    "Ernie4_5ForCausalLM": Traits(
        "ernie4_5",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        rope_interleaved=True,
    ),
    "OlmoeForCausalLM": Traits(
        "olmoe",
        {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
        | {"router_aux_loss_coef": 0.01},
        qk_norm=True,
        qk_norm_over="heads",
        is_moe=True,
        expert_keys={"moe_intermediate_size": "intermediate_size"},
    ),
    "MixtralForCausalLM": Traits(
        "mixtral",
        {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        windows=Windows(is_optional=False, by_layer=False),
        is_moe=True,
        expert_keys={
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
            "norm_topk_prob": None,
        },
        not_null=(),
        tensor_names={f"{_LAYER}mlp.gate.weight": f"{_LAYER}block_sparse_moe.gate.weight"}
        | {
            f"{_EXPERTS}{{}}.{name}_proj.weight": (
                f"{_LAYER}block_sparse_moe.experts.{{}}.{own}.weight"
            )
            for name, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    ),
    "MistralForCausalLM": Traits(
        "mistral",
        {"num_key_value_heads": 8, "sliding_window": 4096},
        windows=Windows(is_optional=False, by_layer=False),
        not_null=(),
    ),
    "MinistralForCausalLM": Traits(
        "ministral",
        {"num_key_value_heads": 8, "sliding_window": 4096},
        windows=Windows(is_optional=False),
    ),
    "Olmo2ForCausalLM": Traits(
        "olmo2",
        _OLMO,
        qk_norm=True,
        qk_norm_over="heads",
        norms="after",
        tensor_names=_OLMO_NORMS,
    ),
    "Olmo3ForCausalLM": Traits(
        "olmo3",
        _OLMO | {"rope_theta": 5e5, "rope_local_base_freq": 5e5, "sliding_window": 4096},
        qk_norm=True,
        qk_norm_over="heads",
        norms="after",
        rope_by_window=True,
        windows=Windows(is_optional=False, period=4),
        tensor_names=_OLMO_NORMS,
    ),
    # Phi-4 and Phi-3.
    "Phi3ForCausalLM": Traits(
        "phi3",
        {"rms_norm_eps": 1e-5, "sliding_window": None},
        rope_types=("longrope",),
        rotates_part=True,
        windows=Windows(is_optional=False, by_layer=False),
        fused=_QKV | _GATE_UP,
    ),
    "Glm4ForCausalLM": Traits(
        "glm4",
        {
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
        },
        has_output_bias=False,
        norms="both",
        rotates_part=True,
        rope_interleaved=True,
        fused=_GATE_UP,
    ),
    "Gemma3ForCausalLM": Traits(
        "gemma3_text",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
        },
        qk_norm=True,
        norms="both",
        norm_offset=1.0,
        activation="gelu_tanh",
        scales_embedding=True,
        rope_by_window=True,
        windows=Windows(is_optional=False, period=6),
        tensor_names={
            f"{_LAYER}post_self_attn_layernorm.weight": f"{_LAYER}post_attention_layernorm.weight",
            f"{_LAYER}post_attention_layernorm.weight": f"{_LAYER}pre_feedforward_layernorm.weight",
            f"{_LAYER}post_mlp_layernorm.weight": f"{_LAYER}post_feedforward_layernorm.weight",
        },
    ),
    "Qwen2MoeForCausalLM": Traits(
        "qwen2_moe",
        {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
        qkv_bias=True,
        has_output_bias=False,
        windows=Windows(period=2, limit="below"),
        is_moe=True,
        not_null=("head_dim", "num_key_value_heads"),
    ),
    "DeepseekV3ForCausalLM": Traits(
        "deepseek_v3",
        {
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
        },
        has_latent_attention=True,
        is_moe=True,
        has_shared_gate=False,
        has_unread_layers=True,
        expert_keys=_GROUPED_KEYS,
        not_null=(),
        tensor_names=_SHARED_EXPERTS,
    ),
    # GLM-4.5 and 4.6.
    "Glm4MoeForCausalLM": Traits(
        "glm4_moe",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        has_output_bias=False,
        qk_norm=True,
        rotates_part=True,
        is_moe=True,
        has_shared_gate=False,
        has_unread_layers=True,
        expert_keys=_GROUPED_KEYS,
        tensor_names=_SHARED_EXPERTS,
    ),
    "Qwen3NextForCausalLM": Traits(
        "qwen3_next",
        _LINEAR
        | {
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        qk_norm=True,
        norm_offset=1.0,
        rotates_part=True,
        has_linear_attention=True,
        gates_attention=True,
        is_moe=True,
        has_unread_layers=True,
        not_null=("head_dim", "num_key_value_heads"),
        fused=_FUSED_CONVOLUTION,
        fused_by_head={
            f"{_LAYER}linear_attn.in_proj_qkvz.weight": _linear_names("q", "k", "v", "z"),
            f"{_LAYER}linear_attn.in_proj_ba.weight": _linear_names("b", "a"),
        },
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5._replace(
        model_type="qwen3_5_moe_text",
        defaults=_LINEAR
        | {
            "num_key_value_heads": 2,
            "norm_topk_prob": True,
            # There is no MLP beside experts.
            "intermediate_size": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        is_moe=True,
        expert_keys={"norm_topk_prob": None},
    ),
    "Qwen2_5_VLForConditionalGeneration": Traits(
        "qwen2_5_vl",
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        qkv_bias=True,
        has_output_bias=False,
        vision="qwen2_5_vl",
    ),
    "Qwen3VLForConditionalGeneration": Traits(
        "qwen3_vl",
        {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 5e5},
        qk_norm=True,
        vision="qwen3_vl",
        tensor_names=QWEN3_VL_NAMES,
    ),
    "GptOssForCausalLM": Traits(
        "gpt_oss",
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "attention_bias": True,
            "sliding_window": 128,
            "norm_topk_prob": True,
        },
        activation="clipped_swish",
        has_sinks=True,
        windows=Windows(is_optional=False, period=2),
        is_moe=True,
        has_expert_biases=True,
        expert_keys={
            "num_experts": "num_local_experts",
            "moe_intermediate_size": "intermediate_size",
            "norm_topk_prob": None,
        },
        tensor_names={
            f"{_LAYER}mlp.gate.{kind}": f"{_LAYER}mlp.router.{kind}" for kind in ("weight", "bias")
        }
        | {
            f"{_LAYER}mlp.experts.{{}}.{name}_proj.{kind}": f"{_EXPERTS}{own}_proj{end}"
            for name, own in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down"))
            for kind, end in (("weight", ""), ("bias", "_bias"))
        },
        interleaved={
            f"{_EXPERTS}gate_up_proj{end}": (
                f"{_LAYER}mlp.experts.{{}}.gate_proj.{kind}",
                f"{_LAYER}mlp.experts.{{}}.up_proj.{kind}",
            )
            for kind, end in (("weight", ""), ("bias", "_bias"))
        },
    ),
}
