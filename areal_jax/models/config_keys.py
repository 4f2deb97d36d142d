"""Supported keys of config.json: those that are read, that are harmless, or that need one value.

A key that is neither in these tables nor in `policy.ignore_config_keys` is refused, because it may
change the mathematics. The meaning of keys is that of transformers 5.23. The file has more than 400
lines because it lists the keys of every family.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Family: TypeAlias = str
"""Architecture of a language model, as config.json names it: one of `TRAITS`."""

SETTING = "policy.ignore_config_keys"


@dataclass(frozen=True)
class Only:
    """A key that has no effect with these values and is refused with any other.

    An absent key has the first value.
    """

    values: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        # In JSON true is not 1, unlike in Python.
        return any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.values
        )


Rule: TypeAlias = Only | Literal["read", "harmless"]

_READ: Final = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "layer_types",
    "tie_word_embeddings",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "id2label",
    "num_labels",
)
"""Keys that are read in every family."""

_HARMLESS: Final = (
    # Origin of the file.
    "_name_or_path",
    "name_or_path",
    "_commit_hash",
    "transformers_version",
    "finetuning_task",
    "task_specific_params",
    "unsloth_version",
    "unsloth_fixed",
    "model_name",
    "is_llama_config",
    # Weights are converted to the dtype of the run; `Policy.init` samples random ones.
    "dtype",
    "torch_dtype",
    "use_bfloat16",
    "initializer_range",
    # Execution and outputs of transformers.
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "torchscript",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_attn_implementation_autoset",
    "experts_implementation",
    "_experts_implementation",
    "_experts_implementation_internal",
    "tie_last_hidden_states",
    "is_decoder",
    "tf_legacy_loss",
    "chunk_size_feed_forward",
    # The tokenizer has its own files.
    "tokenizer_class",
    "prefix",
    "sep_token_id",
    "decoder_start_token_id",
    # Label names, and dropout before a scalar head, which transformers also applies by default.
    "label2id",
    "classifier_dropout",
    "hidden_dropout",
    # Defaults of transformers' generate(); here engine.* decides sampling.
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "do_sample",
    "early_stopping",
    "num_beams",
    "num_beam_groups",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "diversity_penalty",
    "repetition_penalty",
    "encoder_repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "renormalize_logits",
    "constraints",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "num_return_sequences",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "penalty_alpha",
    "cache_implementation",
    "max_time",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
)

_ONLY: Final[Mapping[str, Only]] = {
    "hidden_act": Only(("silu", "swish")),
    "attention_dropout": Only((0.0, None)),
    "partial_rotary_factor": Only((1.0, None)),
    "rope_interleaved": Only((False, None)),
    "use_mrope": Only((False, None)),
    "pretraining_tp": Only((1, None)),
    "quantization_config": Only((None,)),
    "compression_config": Only((None,)),
    "per_layer_config": Only((None,)),
    "auto_map": Only((None,)),
    "pruned_heads": Only(({}, None)),
    "is_encoder_decoder": Only((False,)),
    "add_cross_attention": Only((False,)),
    "cross_attention_hidden_size": Only((None,)),
    "tie_encoder_decoder": Only((False,)),
    "token_classification_bias": Only((True,)),
    "mlp_bias": Only((False,)),
    # Constraints on the tokens of an answer.
    **dict.fromkeys(
        ("bad_words_ids", "force_words_ids", "suppress_tokens", "begin_suppress_tokens"),
        Only((None, [])),
    ),
    **dict.fromkeys(
        ("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), Only((None,))
    ),
    **dict.fromkeys(("sequence_bias", "stop_strings"), Only((None, {}, []))),
}

_WINDOWS: Final[Mapping[str, Rule]] = dict.fromkeys(
    ("use_sliding_window", "sliding_window", "max_window_layers"), "read"
)

_NO_BIASES: Final[Mapping[str, Rule]] = dict.fromkeys(
    ("attention_bias", "mlp_bias"), Only((False, None))
)

_EXPERTS: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
        "read",
    ),
    **dict.fromkeys(
        ("norm_topk_prob", "router_aux_loss_coef", "decoder_sparse_step", "mlp_only_layers"),
        "read",
    ),
}

_GROUPED_EXPERTS: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(
        (
            "n_routed_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "n_group",
            "topk_group",
            "first_k_dense_replace",
            "norm_topk_prob",
            "routed_scaling_factor",
        ),
        "read",
    ),
    # Layers that predict several tokens, which are not read.
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), "harmless"),
}

_LINEAR: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(
        (
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "full_attention_interval",
            "partial_rotary_factor",
        ),
        "read",
    ),
    "attention_bias": Only((False, None)),
    # Layers that predict several tokens, which are not read; the state here is always float32.
    **dict.fromkeys(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"), "harmless"),
    "mamba_ssm_dtype": Only(("float32", None)),
    "attn_output_gate": Only((True, None)),
}

FAMILY_KEYS: Final[dict[Family, Mapping[str, Rule]]] = {
    # Its q, k and v always have biases.
    "Qwen2ForCausalLM": {**_WINDOWS, "attention_bias": Only((True,))},
    "Qwen3ForCausalLM": _WINDOWS,
    "Qwen3MoeForCausalLM": {
        **_WINDOWS,
        **_EXPERTS,
        "max_window_layers": "harmless",
    },
    "LlamaForCausalLM": {
        "mlp_bias": "read",
        "use_sliding_window": Only((False, None)),
        "sliding_window": Only((None,)),
    },
    "SeedOssForCausalLM": {
        "mlp_bias": "read",
        "attention_out_bias": Only((False, None)),
        # Of pretraining: trainer and engine must compute the same log-probs.
        **dict.fromkeys(("attention_dropout", "residual_dropout"), "harmless"),
    },
    "Ernie4_5ForCausalLM": {
        **_NO_BIASES,
        "use_bias": Only((False, None)),
    },
    "OlmoeForCausalLM": {
        **dict.fromkeys(
            (
                "num_experts",
                "num_local_experts",
                "num_experts_per_tok",
                "norm_topk_prob",
                "router_aux_loss_coef",
            ),
            "read",
        ),
        "clip_qkv": Only((None,)),
    },
    "MixtralForCausalLM": {
        **_NO_BIASES,
        **dict.fromkeys(
            (
                "num_experts",
                "num_local_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                "sliding_window",
            ),
            "read",
        ),
        "router_jitter_noise": Only((0.0, None)),
    },
    "MistralForCausalLM": {**_NO_BIASES, "sliding_window": "read"},
    "MinistralForCausalLM": {**_NO_BIASES, "sliding_window": "read"},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {"sliding_window": "read"},
    "Phi3ForCausalLM": {
        **_NO_BIASES,
        **dict.fromkeys(("sliding_window", "partial_rotary_factor"), "read"),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop"), Only((0.0, None))),
    },
    "Glm4ForCausalLM": {"partial_rotary_factor": "read"},
    "Gemma3ForCausalLM": {
        **dict.fromkeys(
            (
                "sliding_window",
                "sliding_window_pattern",
                "_sliding_window_pattern",
                "rope_local_base_freq",
                "query_pre_attn_scalar",
            ),
            "read",
        ),
        "hidden_activation": Only(("gelu_pytorch_tanh",)),
        "hidden_act": Only(("gelu_pytorch_tanh", None)),
        "use_bidirectional_attention": Only((False, None)),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), Only((None,))),
    },
    "GptOssForCausalLM": {
        **dict.fromkeys(
            (
                "num_local_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                "sliding_window",
                "quantization_config",
            ),
            "read",
        ),
        # Written by its authors beside the keys that are read.
        **dict.fromkeys(("experts_per_token", "initial_context_length"), "harmless"),
        "swiglu_limit": Only((7.0,)),
        "swiglu_alpha": Only((1.702,)),
    },
    "DeepseekV3ForCausalLM": {
        **dict.fromkeys(
            (
                "kv_lora_rank",
                "q_lora_rank",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "qk_head_dim",
                "v_head_dim",
                "rope_interleave",
            ),
            "read",
        ),
        **_GROUPED_EXPERTS,
        # The balance loss of pretraining, its parallelism, and code that transformers no longer
        # needs.
        **dict.fromkeys(("aux_loss_alpha", "seq_aux", "ep_size", "auto_map"), "harmless"),
        "moe_layer_freq": Only((1, None)),
        "scoring_func": Only(("sigmoid", None)),
        "topk_method": Only(("noaux_tc", None)),
    },
    "Glm4MoeForCausalLM": {
        **_GROUPED_EXPERTS,
        **dict.fromkeys(("partial_rotary_factor", "use_qk_norm"), "read"),
    },
    "Qwen3NextForCausalLM": {
        **_EXPERTS,
        **_LINEAR,
        "shared_expert_intermediate_size": "read",
    },
    "Qwen3_5ForCausalLM": {**_LINEAR, "mlp_only_layers": Only(([], None))},
    "Qwen3_5MoeForCausalLM": {
        **_EXPERTS,
        **_LINEAR,
        "shared_expert_intermediate_size": "read",
        "norm_topk_prob": Only((True, None)),
        "decoder_sparse_step": Only((1, None)),
        "mlp_only_layers": Only(([], None)),
    },
    # Keys of their language models; those of towers are in models/vision/config.py.
    "Qwen2_5_VLForConditionalGeneration": {
        "attention_bias": Only((True,)),
        "use_sliding_window": Only((False, None)),
        **dict.fromkeys(("sliding_window", "max_window_layers"), "harmless"),
    },
    "Qwen3VLForConditionalGeneration": {},
    "Qwen2MoeForCausalLM": {
        **_WINDOWS,
        **_EXPERTS,
        "shared_expert_intermediate_size": "read",
        **dict.fromkeys(("attention_bias", "qkv_bias"), Only((True,))),
    },
}


def rules(family: Family, *, is_scalar: bool) -> Mapping[str, Rule]:
    """Rule of each supported key of a family's config.json.

    Args:
        family: architecture.
        is_scalar: whether the file describes a scalar head.
    """
    return {
        **dict.fromkeys(_READ, "read"),
        **dict.fromkeys(_HARMLESS, "harmless"),
        **_ONLY,
        # Of one label, transformers supports regression only.
        "problem_type": Only((None, "regression")) if is_scalar else "harmless",
        **FAMILY_KEYS[family],
    }


def check_keys(
    config: Mapping[str, Any],
    rules: Mapping[str, Rule],
    ignored: Collection[str],
    source: str,
    what: str,
) -> None:
    """Check that all keys and their values are supported.

    Args:
        config: content of the file.
        rules: rule of each supported key.
        ignored: keys to skip.
        source: name of the file, for errors.
        what: what the file describes, for errors.

    Raises:
        ValueError: with each unsupported key, its value, and the setting that ignores it.
    """
    if read := sorted(name for name in ignored if rules.get(name) == "read"):
        raise ValueError(
            f"{SETTING}: expected keys without effect, found {', '.join(read)}, which are read; "
            f"change them in {source} instead"
        )
    wrong = {
        name: _describe(name, value, rules.get(name), what)
        for name, value in config.items()
        if name not in ignored and not _is_accepted(value, rules.get(name))
    }
    if wrong:
        raise ValueError(
            f"{source}: {'; '.join(wrong.values())}. To ignore this, set "
            f"{SETTING}={','.join(wrong)}"
        )


def _is_accepted(value: object, rule: Rule | None) -> bool:
    return rule is not None and (not isinstance(rule, Only) or value in rule)


def _describe(name: str, value: object, rule: Rule | None, what: str) -> str:
    shown = repr(value) if len(repr(value)) <= 100 else f"{repr(value)[:100]}..."
    if isinstance(rule, Only):
        return (
            f"{name}={shown} is not supported for {what}; only "
            f"{name}={' or '.join(map(repr, rule.values))} is"
        )
    return f"{name}={shown} is not a known key of {what}"
