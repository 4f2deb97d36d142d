"""Which keys of config.json are read, which are harmless and with which values, and which are
refused.

A key that is neither in these tables nor named in `policy.ignore_config_keys` is refused: it may
change the mathematics. What a key does is what transformers 5.23 does with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

Family = Literal["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM"]

SETTING = "policy.ignore_config_keys"


@dataclass(frozen=True)
class Only:
    """A key that changes nothing with these values and is refused with any other. An absent key has
    the first of them."""

    values: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        # In JSON true is not 1.
        return any(
            value == each and isinstance(value, bool) == isinstance(each, bool)
            for each in self.values
        )


Rule: TypeAlias = Only | Literal["read", "harmless"]

_READ: Final = (
    *(
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
    ),
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
    ),
    *(
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "original_max_position_embeddings",
        "layer_types",
    ),
    *("tie_word_embeddings", "attention_bias", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("id2label", "num_labels"),
)
"""In every family."""

_HARMLESS: Final = (
    # What a file says of itself.
    *(
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "finetuning_task",
        "task_specific_params",
    ),
    *("unsloth_version", "unsloth_fixed", "model_name", "is_llama_config"),
    # Weights are converted to the dtype of the run; fresh ones are sampled as `Policy.init` says.
    *("dtype", "torch_dtype", "use_bfloat16", "initializer_range"),
    # How transformers computes and what it returns.
    *(
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_router_logits",
        "torchscript",
    ),
    *(
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_attn_implementation_autoset",
    ),
    *(
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "tie_last_hidden_states",
    ),
    *("is_decoder", "tf_legacy_loss", "chunk_size_feed_forward"),
    # The tokenizer has its own files.
    *("tokenizer_class", "prefix", "sep_token_id", "decoder_start_token_id"),
    # Names of labels, and dropout before a scalar head, which transformers has where the file says
    # nothing.
    *("label2id", "classifier_dropout", "hidden_dropout"),
    # Defaults of transformers' generate(); here sampling is a matter of engine.*.
    *(
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "do_sample",
        "early_stopping",
        "num_beams",
    ),
    *(
        "num_beam_groups",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
    ),
    *(
        "diversity_penalty",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
    ),
    *("encoder_no_repeat_ngram_size", "renormalize_logits", "constraints"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "guidance_scale"),
    *(
        "num_return_sequences",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "penalty_alpha",
    ),
    *("cache_implementation", "max_time", "num_assistant_tokens", "num_assistant_tokens_schedule"),
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
    # Which tokens an answer may have.
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

_FAMILIES: Final[Mapping[Family, Mapping[str, Rule]]] = {
    # Its q, k and v have biases whatever the file says.
    "Qwen2ForCausalLM": {**_WINDOWS, "attention_bias": Only((True,))},
    "Qwen3ForCausalLM": _WINDOWS,
    "Qwen3MoeForCausalLM": {
        **_WINDOWS,
        "max_window_layers": "harmless",
        **dict.fromkeys(
            ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
            "read",
        ),
        **dict.fromkeys(("norm_topk_prob", "router_aux_loss_coef"), "read"),
        "decoder_sparse_step": Only((1,)),
        "mlp_only_layers": Only(([], None)),
    },
    "LlamaForCausalLM": {
        "mlp_bias": "read",
        "use_sliding_window": Only((False, None)),
        "sliding_window": Only((None,)),
    },
}


def rules(family: Family, *, is_scalar: bool) -> Mapping[str, Rule]:
    """What is done with each known key of a family's config.json.

    Args: is_scalar: whether the file describes a scalar head."""
    return {
        **dict.fromkeys(_READ, "read"),
        **dict.fromkeys(_HARMLESS, "harmless"),
        **_ONLY,
        # transformers loads no classifier of one label.
        "problem_type": Only((None, "regression")) if is_scalar else "harmless",
        **_FAMILIES[family],
    }


def check_keys(
    config: Mapping[str, Any],
    rules: Mapping[str, Rule],
    ignored: Collection[str],
    source: str,
    what: str,
) -> None:
    """Refuse every key that is not known, or that has a value which is not supported.

    Args:
        rules: of the keys that are known.
        ignored: keys to pass over.
        source: names the file in errors.
        what: names what the file describes in errors.

    Raises:
        ValueError: naming each key with its value and how to ignore it."""
    if read := sorted(name for name in ignored if rules.get(name) == "read"):
        raise ValueError(
            f"{SETTING} names {', '.join(read)}, which are read; correct them in {source} instead"
        )
    wrong = {
        name: _refusal(name, value, rules.get(name), what)
        for name, value in config.items()
        if name not in ignored and not _is_accepted(value, rules.get(name))
    }
    if wrong:
        raise ValueError(
            f"{source}: {'; '.join(wrong.values())}. To load it as if this were not there, set "
            f"{SETTING}={','.join(wrong)}"
        )


def _is_accepted(value: object, rule: Rule | None) -> bool:
    return rule is not None and (not isinstance(rule, Only) or value in rule)


def _refusal(name: str, value: object, rule: Rule | None, what: str) -> str:
    shown = repr(value) if len(repr(value)) <= 100 else f"{repr(value)[:100]}..."
    if isinstance(rule, Only):
        return (
            f"{name}={shown} is not supported for {what}; only "
            f"{name}={' or '.join(map(repr, rule.values))} is"
        )
    return f"{name}={shown} is not a known key of {what}"
