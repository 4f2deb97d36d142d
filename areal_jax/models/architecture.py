"""Architecture of a policy: one record for all model families.

The file has more than 400 lines because it also reads every key of config.json into the record.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from areal_jax.models import rope
from areal_jax.models.config_keys import Family, check_keys, rules
from areal_jax.models.language_models import LANGUAGE_MODELS, find_language_model
from areal_jax.models.traits import TRAITS, Traits, Windows
from areal_jax.models.vision.config import VisionConfig, join_config, split_config

Readout = Literal["CausalLM", "TokenClassification", "SequenceClassification"]
"""Output head, as named by transformers. CausalLM: logits of the vocabulary. TokenClassification:
one number per token, with a bias (critics). SequenceClassification: one number without a bias, used
of the last token (reward models)."""


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts; fields as in Hugging Face's config.json."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    """Width of the MLP of one expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts sum to one."""
    router_aux_loss_coef: float
    """Weight of the load-balance loss."""
    shared_expert_intermediate_size: int = 0
    """Width of the MLP that every token goes to, besides its experts; 0: there is none."""
    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers without experts."""
    groups: ExpertGroups | None = None
    """Choice of experts by sigmoid and groups; None: by softmax."""


@dataclass(frozen=True)
class ExpertGroups:
    """Choice of experts in DeepSeek-V3 (arXiv:2412.19437); fields as in config.json."""

    n_group: int
    """Groups of experts."""
    topk_group: int
    """Groups that a token's experts are in."""
    routed_scaling_factor: float
    """Factor of the weights of a token's experts."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA, arXiv:2405.04434); fields as in config.json.

    Keys and values of all heads are products with one latent vector, beside a key that all heads
    share and RoPE rotates.
    """

    q_lora_rank: int | None
    """Width of the latent of queries; None: they are products with the hidden state."""
    kv_lora_rank: int
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int
    """Dimensions of a head's query and key that RoPE does not rotate."""
    qk_rope_head_dim: int
    """Dimensions that it rotates."""
    v_head_dim: int
    rope_interleave: bool = True
    """Whether RoPE rotates dimensions 2i and 2i + 1, not i and i + half."""
    mscale_all_dim: float = 0.0
    """Of YaRN: scores are multiplied by the square of its attention factor with this scale."""

    @property
    def width(self) -> int:
        """Numbers per token in the KV cache of a layer: latent and rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def num_params(self, hidden_size: int, num_heads: int, *, has_biases: bool) -> int:
        """Number of parameters of a layer's attention."""
        rank, matrices = self.q_lora_rank, self.matmul_params(hidden_size, num_heads)
        biases = (rank or 0) + self.width + hidden_size if has_biases else 0
        return matrices + (rank or 0) + self.kv_lora_rank + biases

    def matmul_params(self, hidden_size: int, num_heads: int) -> int:
        """Number of parameters of a layer's attention in matrix products."""
        rank, queries = (
            self.q_lora_rank,
            num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim),
        )
        return (
            (hidden_size * queries if rank is None else rank * (hidden_size + queries))
            + hidden_size * self.width
            + self.kv_lora_rank * num_heads * (self.qk_nope_head_dim + self.v_head_dim)
            + num_heads * self.v_head_dim * hidden_size
        )


@dataclass(frozen=True)
class LinearAttention:
    """Layers with linear attention (Gated DeltaNet, arXiv:2412.06464); fields as in config.json."""

    linear_conv_kernel_dim: int
    """Tokens that the causal convolution sees."""
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    layers: tuple[int, ...]
    """Numbers of these layers; the others have full attention."""

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def matmul_params(self, hidden_size: int) -> int:
        """Number of parameters of a layer in matrix products."""
        width = 2 * self.key_width + 3 * self.value_width + 2 * self.linear_num_value_heads
        return hidden_size * width

    def num_params(self, hidden_size: int) -> int:
        """Number of parameters of a layer, without those of its MLP."""
        taps = self.linear_conv_kernel_dim * (2 * self.key_width + self.value_width)
        vectors = 2 * self.linear_num_value_heads + self.linear_value_head_dim
        return self.matmul_params(hidden_size) + taps + vectors


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a policy; fields as in Hugging Face's config.json.

    It has more than 200 lines because it is the one record of all families: fields, and checks
    between them.
    """

    architecture: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on the q, k and v projections."""
    qk_norm: bool
    """RMSNorm over q and k, before RoPE."""
    output_bias: bool = False
    """Bias on the output projection of attention."""
    mlp_bias: bool = False
    rope_scaling: rope.RopeScaling | None = None
    local_rope_theta: float | None = None
    """Base of the unscaled RoPE of layers with a window; None: as of other layers."""
    rotary_dim: int | None = None
    """Dimensions of a head that RoPE rotates, the first ones; None: all."""
    query_pre_attn_scalar: float | None = None
    """Scores are divided by the root of this; None: head_dim."""
    sliding_windows: tuple[int | None, ...] = ()
    """Window of each layer: number of tokens that a query sees, including its own; None: all.
    Empty: no layer has a window.
    """
    latent: LatentAttention | None = None
    """Latent attention, where `head_dim` is the size of a head's query and key."""
    linear: LinearAttention | None = None
    """Linear attention of some layers."""
    moe: MoEConfig | None = None
    """Experts that replace the MLP of every layer, or of all but some."""
    vision: VisionConfig | None = None
    """Tower that reads images."""
    mrope_section: tuple[int, ...] = ()
    """Frequencies of RoPE that rotate by the time, row and column of a token of an image, in this
    order; interleaved in Qwen3-VL. Empty: all rotate by the position.
    """
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    readout: Readout = "CausalLM"
    ignored_keys: tuple[str, ...] = ()
    """Keys of the file that the user has set to be ignored."""

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        source: str,
        ignored_keys: Collection[str] = (),
        *,
        long_rope: bool = False,
    ) -> ModelConfig:
        """Read a Hugging Face config.json.

        The function has more than 60 lines because it sets every field of the record.

        Args:
            config: content of the file.
            source: name of the file, for errors.
            ignored_keys: unsupported keys to ignore.
            long_rope: whether longrope has its factors of long sequences.

        Raises:
            ValueError: the architecture, a key or a value is not supported, or a key is missing.
        """
        config = find_language_model(config, source)
        architecture, readout = _read_architecture(config, source)
        family = TRAITS[architecture]
        what = _with_readout(architecture, readout)
        vision, section = None, ()
        if family.vision is not None:
            config, vision, section = split_config(
                config, family.vision, family.model_type, ignored_keys, source
            )
        check_keys(
            config, rules(architecture, is_scalar=readout != "CausalLM"), ignored_keys, source, what
        )
        if config.get("model_type") not in (family.model_type, None):
            raise ValueError(
                f"{source}: model_type={config['model_type']!r} contradicts "
                f"architectures={config['architectures']}; "
                f"expected model_type={family.model_type!r}"
            )
        if null := [name for name in family.not_null if config.get(name, 1) is None]:
            raise ValueError(
                f"{source}: expected {', '.join(null)} to be a positive integer, found None"
            )
        # null means the number of attention heads in every family; an absent key may not.
        if "quantization_config" not in ignored_keys:
            _check_quantization(config, source)
        config = _with_defaults(config, family)
        latent = _read_latent(config, source) if family.has_latent_attention else None
        if latent is not None:
            size = latent.qk_nope_head_dim + latent.qk_rope_head_dim
            config = {**config, "head_dim": size}
        num_heads = _read_count(config, "num_attention_heads", source)
        num_kv_heads = _read_count(config, "num_key_value_heads", source, num_heads)
        hidden_size = _read_count(config, "hidden_size", source)
        head_dim = _read_count(config, "head_dim", source, hidden_size // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise ValueError(
                f"{source}: expected num_attention_heads to be a multiple of num_key_value_heads "
                f"and head_dim to be even, found num_attention_heads={num_heads}, "
                f"num_key_value_heads={num_kv_heads}, head_dim={head_dim}"
            )
        if vision is not None and vision.out_hidden_size != hidden_size:
            raise ValueError(
                f"{source}: expected out_hidden_size in vision_config to equal hidden_size="
                f"{hidden_size}, found {vision.out_hidden_size}"
            )
        if section and sum(section) != head_dim // 2:
            raise ValueError(
                f"{source}: expected mrope_section with a sum of head_dim / 2 = {head_dim // 2}, "
                f"found {list(section)}"
            )
        max_position_embeddings = _read_count(config, "max_position_embeddings", source)
        linear = _read_linear(config, source) if family.has_linear_attention else None
        windows = () if linear else _read_sliding_windows(config, architecture, source)
        rotary = _read_rotary(config, architecture, source, long_rope)
        rotary_dim = latent.qk_rope_head_dim if latent else None
        if latent is None:
            rotary_dim = _rotary_dim(rotary.partial_factor, head_dim, source)
        rope.check_length(rotary.scaling, rotary_dim or head_dim, source)
        has_bias = _read_flag(config, "attention_bias", source)
        return cls(
            architecture=architecture,
            vocab_size=_read_count(config, "vocab_size", source),
            hidden_size=hidden_size,
            intermediate_size=_read_count(config, "intermediate_size", source),
            num_hidden_layers=_read_count(config, "num_hidden_layers", source),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=rotary.theta,
            rms_norm_eps=_read_number(config, "rms_norm_eps", source, 1e-6),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=_read_flag(config, "tie_word_embeddings", source),
            attention_bias=has_bias or family.qkv_bias,
            qk_norm=family.qk_norm
            and ("use_qk_norm" not in config or _read_flag(config, "use_qk_norm", source)),
            output_bias=has_bias and family.has_output_bias,
            mlp_bias=_read_flag(config, "mlp_bias", source),
            rope_scaling=rotary.scaling,
            # Without layers with a window, their RoPE has no effect.
            local_rope_theta=rotary.local_theta if any(windows) else None,
            rotary_dim=rotary_dim,
            query_pre_attn_scalar=_read_query_scalar(config, head_dim, source),
            sliding_windows=windows,
            latent=latent,
            linear=linear,
            moe=_read_moe(_with_expert_keys(config, family), source) if family.is_moe else None,
            bos_token_id=_read_token(config, "bos_token_id", source),
            eos_token_id=_read_tokens(config, "eos_token_id", source),
            pad_token_id=_read_token(config, "pad_token_id", source),
            vision=vision,
            mrope_section=section,
            readout=readout,
            ignored_keys=tuple(sorted(set(ignored_keys) & config.keys())),
        )

    def to_hf(self, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Content of a config.json that `from_hf` and transformers read back as this policy.

        Args:
            original: content of the config.json that the policy was read from; keys that have not
                changed are kept.
        """
        written = self._to_hf()
        if original is None:
            return self._with_vision(written)
        original = find_language_model(original, "config.json")
        if original.get("quantization_config") is not None:
            # The written weights are not quantized.
            original = {k: v for k, v in original.items() if k != "quantization_config"}
        is_long = isinstance(self.rope_scaling, rope.LongRope) and self.rope_scaling.is_long
        before = ModelConfig.from_hf(original, "config.json", self.ignored_keys, long_rope=is_long)
        if replace(before, ignored_keys=self.ignored_keys) == self:
            return dict(original)
        if self.vision is not None:
            return self._with_vision(written)
        unchanged = before._to_hf()
        changed = {
            name: value
            for name, value in written.items()
            if name not in unchanged or unchanged[name] != value
        }
        if self.readout != before.readout:
            # These keys describe the previous head.
            changed |= {name: None for name in ("problem_type",) if name in original}
            changed |= {name: 1 for name in ("num_labels",) if name in original}
        kept = {
            name: value
            for name, value in original.items()
            if name in written or name not in unchanged
        }
        return kept | changed

    def _to_hf(self) -> dict[str, Any]:
        written = {
            "architectures": [_with_readout(self.architecture, self.readout)],
            "model_type": self.traits.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            **_latent_to_hf(self.latent),
            **_linear_to_hf(self.linear, self.num_hidden_layers),
            **_activation_key(self.traits),
            **self._rope_to_hf(),
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id)
            if isinstance(self.eos_token_id, tuple)
            else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        if self.mlp_bias:
            written["mlp_bias"] = True
        if "use_qk_norm" in self.traits.defaults:
            written["use_qk_norm"] = self.qk_norm
        if "query_pre_attn_scalar" in self.traits.defaults:
            scalar = float(self.query_pre_attn_scalar or self.head_dim)
            # transformers refuses 256.0.
            written["query_pre_attn_scalar"] = int(scalar) if scalar.is_integer() else scalar
        written |= _windows_to_hf(self.traits.windows, self.sliding_windows, self.num_hidden_layers)
        if self.moe is not None:
            written |= _moe_to_hf(self.moe, self.traits)
        if self.is_scalar:
            # transformers counts the labels of id2label.
            written |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return written

    def _with_vision(self, written: dict[str, Any]) -> dict[str, Any]:
        if self.vision is None:
            return written
        return join_config(written, self.vision, self.mrope_section)

    def _rope_to_hf(self) -> dict[str, Any]:
        share = 1.0 if self.rotary_dim is None else self.rotary_dim / self.head_dim
        if "rope_parameters" in self.traits.defaults and self.rope_scaling is None:
            # The older keys would mean the default.
            return {"rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta}}
        factor = share if self.traits.rotates_part else None
        local = self.traits.rope_by_window, self.local_rope_theta
        written = rope.to_hf(self.rope_theta, self.rope_scaling, factor, *local)
        if self.latent is not None and self.latent.mscale_all_dim:
            written["rope_scaling"] |= {"mscale_all_dim": self.latent.mscale_all_dim}
        return written

    @property
    def traits(self) -> Traits:
        """Properties of the family."""
        return TRAITS[self.architecture]

    def layers_with(self, path: tuple[str, ...]) -> tuple[int, ...]:
        """Numbers of the layers that have a parameter, in ascending order.

        Args:
            path: path of the parameter in a layer, such as ("mlp", "router").
        """
        if path[0] == "linear":
            return self.linear_layers
        if path[0] == "attn":
            return self.attention_layers
        if path[0] != "mlp":
            return tuple(range(self.num_hidden_layers))
        return self.dense_layers if path[1] in _DENSE_MLP else self.moe_layers

    @cached_property
    def dense_layers(self) -> tuple[int, ...]:
        """Numbers of the layers without experts."""
        if self.moe is None:
            return tuple(range(self.num_hidden_layers))
        return self.moe.dense_layers

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.dense_layers)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with linear attention."""
        return () if self.linear is None else self.linear.layers

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with attention to keys and values."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.linear_layers)

    @property
    def num_moe_layers(self) -> int:
        """Number of layers with experts."""
        return len(self.moe_layers)

    @property
    def max_positions(self) -> int:
        """Longest sequence: of longrope with its short factors, the original length."""
        scaling = self.rope_scaling
        if isinstance(scaling, rope.LongRope) and not scaling.is_long:
            return min(scaling.original_max_position_embeddings, self.max_position_embeddings)
        return self.max_position_embeddings

    @property
    def is_scalar(self) -> bool:
        """Whether the output is one number per token instead of logits."""
        return self.readout != "CausalLM"

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        heads, kv_heads, width = (
            self.num_attention_heads,
            self.num_key_value_heads,
            self.hidden_size,
        )
        attention = 2 * width * (heads + kv_heads) * self.head_dim
        if self.latent is not None:
            attention = self.latent.num_params(width, heads, has_biases=self.output_bias)
        if self.traits.gates_attention:
            attention += width * heads * self.head_dim
        biases = (heads + 2 * kv_heads) * self.head_dim if self.attention_bias else 0
        biases += width if self.output_bias and self.latent is None else 0
        biases += heads if self.traits.has_sinks else 0
        biases += 2 * self.intermediate_size + width if self.mlp_bias else 0
        norms = (4 if self.traits.norms == "both" else 2) * width
        head_norms = 0
        if self.qk_norm:
            # Of one head, or of all heads of q and k.
            head_norms = (
                heads + kv_heads if self.traits.qk_norm_over == "heads" else 2
            ) * self.head_dim
        dense, mlp = 3 * width * self.intermediate_size, 0
        if (moe := self.moe) is not None:
            mlp = moe.num_experts * (width + 3 * width * moe.moe_intermediate_size)
            if self.traits.has_expert_biases:
                # Of the router, of gate and up, and of down.
                mlp += moe.num_experts * (1 + 2 * moe.moe_intermediate_size + width)
            mlp += moe.num_experts if moe.groups is not None else 0
            mlp += 3 * width * moe.shared_expert_intermediate_size
            if moe.shared_expert_intermediate_size and self.traits.has_shared_gate:
                mlp += width
        layers = self.num_hidden_layers * norms
        layers += len(self.attention_layers) * (attention + biases + head_norms)
        if self.linear is not None:
            layers += len(self.linear_layers) * self.linear.num_params(width)
        layers += self.num_moe_layers * mlp + len(self.dense_layers) * dense
        if self.is_scalar:
            head = width + (self.readout == "TokenClassification")
        else:
            head = 0 if self.tie_word_embeddings else self.vocab_size * width
        tower = 0 if self.vision is None else self.vision.num_params
        return self.vocab_size * width + layers + width + head + tower

    @property
    def matmul_params(self) -> int:
        """Parameters in the matrix products of one token: experts and head, no embedding."""
        heads, width, moe = (
            self.num_attention_heads + self.num_key_value_heads,
            self.hidden_size,
            self.moe,
        )
        mlp = 0
        if moe is not None:
            mlp = (
                width * moe.num_experts
                + 3 * width * moe.moe_intermediate_size * moe.num_experts_per_tok
                + 3 * width * moe.shared_expert_intermediate_size
            )
        head = width if self.is_scalar else self.vocab_size * width
        attention = 2 * width * heads * self.head_dim
        if self.latent is not None:
            attention = self.latent.matmul_params(width, self.num_attention_heads)
        if self.traits.gates_attention:
            attention += width * self.num_attention_heads * self.head_dim
        attention *= len(self.attention_layers)
        if self.linear is not None:
            attention += len(self.linear_layers) * self.linear.matmul_params(width)
        dense = len(self.dense_layers) * 3 * width * self.intermediate_size
        return attention + self.num_moe_layers * mlp + dense + head

    @property
    def attention_width(self) -> int:
        """Layers x heads x head size: each pair of query and key costs 4 times this in FLOPs (12 in
        a training step). Linear attention has no pairs.
        """
        width = self.num_attention_heads * self.head_dim
        if self.latent is not None:
            # Values are narrower than queries and keys.
            width -= self.num_attention_heads * (self.head_dim - self.latent.v_head_dim) // 2
        return len(self.attention_layers) * width

    @property
    def cached_per_token(self) -> int:
        """Numbers per token in the KV cache."""
        if self.latent is not None:
            return self.num_hidden_layers * self.latent.width
        return 2 * len(self.attention_layers) * self.num_key_value_heads * self.head_dim


_DENSE_MLP = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
"""Parameters of an MLP without experts."""


def _with_readout(architecture: Family, readout: Readout) -> str:
    if readout == "CausalLM":
        return architecture
    return re.sub("For(CausalLM|ConditionalGeneration)$", f"For{readout}", architecture)


def _read_architecture(config: Mapping[str, Any], source: str) -> tuple[Family, Readout]:
    names = config.get("architectures") or ["none"]
    for architecture, readout in itertools.product(TRAITS, get_args(Readout)):
        if names == [_with_readout(architecture, readout)]:
            if readout != "CausalLM" and (num_labels := _read_num_labels(config, source)) != 1:
                raise ValueError(
                    f"{source}: expected {names[0]} with 1 label in id2label, found {num_labels}"
                )
            return architecture, readout
    raise ValueError(
        f"{source}: expected architectures to be one of {', '.join([*TRAITS, *LANGUAGE_MODELS])}, "
        f"found {names}"
    )


def _read_num_labels(config: Mapping[str, Any], source: str) -> int:
    labels, num_labels = config.get("id2label"), config.get("num_labels")
    if not isinstance(labels, dict | None):
        raise ValueError(f"{source}: expected id2label to be an object, found {labels!r}")
    if num_labels is None:
        return 2 if labels is None else len(labels)
    if labels is not None and num_labels != len(labels):
        raise ValueError(f"{source}: num_labels={num_labels!r} contradicts id2label={labels!r}")
    return _read_count(config, "num_labels", source)


def _read_count(
    config: Mapping[str, Any], name: str, source: str, default: int | None = None
) -> int:
    value = default if config.get(name) is None else config[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: expected {name} to be a positive integer, found {value!r}")
    return value


def _read_number(config: Mapping[str, Any], name: str, source: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{source}: expected {name} to be a number, found {value!r}")
    return float(value)


def _read_flag(config: Mapping[str, Any], name: str, source: str) -> bool:
    """Read a flag; False by default."""
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{source}: expected {name} to be true or false, found {value!r}")
    return value


def _read_tokens(config: Mapping[str, Any], name: str, source: str) -> int | tuple[int, ...] | None:
    value: Any = config.get(name)
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int | None) for each in ids):
        raise ValueError(
            f"{source}: expected {name} to be a token id or a list of token ids, found {value!r}"
        )
    return tuple(ids) if isinstance(value, list) else value


def _read_token(config: Mapping[str, Any], name: str, source: str) -> int | None:
    value = _read_tokens(config, name, source)
    if isinstance(value, tuple):
        raise ValueError(f"{source}: expected {name} to be a token id, found {list(value)}")
    return value


def _check_quantization(config: Mapping[str, Any], source: str) -> None:
    quantization = config.get("quantization_config")
    if quantization is not None and quantization.get("quant_method") != "mxfp4":
        raise ValueError(
            f"{source}: expected quantization_config with quant_method='mxfp4', found "
            f"{quantization!r}"
        )


def _with_defaults(config: Mapping[str, Any], family: Traits) -> dict[str, Any]:
    """Add the family's values of absent keys; a RoPE scaling has two keys."""
    has_scaling = bool(config.get("rope_scaling"))
    absent = {
        name: value
        for name, value in family.defaults.items()
        if not (has_scaling and name == "rope_parameters")
    }
    return {**absent, **config}


def _read_rotary(
    config: Mapping[str, Any], architecture: Family, source: str, is_long: bool
) -> rope.Rotary:
    family = TRAITS[architecture]
    if family.has_linear_attention and isinstance(config.get("rope_parameters"), dict):
        # Of images; all three positions of a text's token are equal.
        unread = ("mrope_section", "mrope_interleaved")
        written = config["rope_parameters"]
        kept = {name: value for name, value in written.items() if name not in unread}
        config = {**config, "rope_parameters": kept}
    rotary = rope.from_hf(config, source, by_window=family.rope_by_window, is_long=is_long)
    if rotary.scaling is not None and rope.type_of(rotary.scaling) not in family.rope_types:
        raise ValueError(
            f"{source}: expected {architecture} with no RoPE scaling but "
            f"{' or '.join(family.rope_types)}, found {rotary.scaling}"
        )
    if rotary.partial_factor != 1 and not family.rotates_part:
        raise ValueError(
            f"{source}: expected rope_parameters with partial_rotary_factor=1.0 for "
            f"{architecture}, found {rotary.partial_factor}"
        )
    return rotary


def _activation_key(traits: Traits) -> dict[str, str]:
    if traits.activation == "gelu_tanh":
        return {"hidden_activation": "gelu_pytorch_tanh"}
    return {"hidden_act": "silu"}


def _rotary_dim(factor: float, head_dim: int, source: str) -> int | None:
    size = int(head_dim * factor)
    if not 0 < factor <= 1 or size % 2 or not size:
        raise ValueError(
            f"{source}: expected partial_rotary_factor to be at most 1 and to select an even "
            f"number of the {head_dim} dimensions of a head, found {factor}"
        )
    return None if size == head_dim else size


def _read_query_scalar(config: Mapping[str, Any], head_dim: int, source: str) -> float | None:
    value = _read_number(config, "query_pre_attn_scalar", source, float(head_dim))
    if value <= 0:
        raise ValueError(f"{source}: expected query_pre_attn_scalar to be above 0, found {value!r}")
    return None if value == head_dim else value


def _windows_to_hf(
    windows: Windows | None, sizes: tuple[int | None, ...], num_layers: int
) -> dict[str, Any]:
    """Keys of the window of each layer, which `_read_sliding_windows` and transformers read."""
    if windows is None or (windows.is_optional and not sizes):
        return {}
    if not windows.is_optional and not windows.by_layer:
        return {"sliding_window": sizes[0] if sizes else None}
    sizes = sizes or (None,) * num_layers
    kinds = ["full_attention" if size is None else "sliding_attention" for size in sizes]
    written: dict[str, Any] = {"layer_types": kinds}
    if any(sizes):
        written["sliding_window"] = max(size or 0 for size in sizes)
    if windows.is_optional:
        written["use_sliding_window"] = True
        first = kinds.index("sliding_attention")
        if windows.limit != "below" and "full_attention" not in kinds[first:]:
            # For readers that do not support layer_types.
            written["max_window_layers"] = first
    return written


def _read_sliding_windows(
    config: Mapping[str, Any], architecture: Family, source: str
) -> tuple[int | None, ...]:
    """Read the window of each layer, as transformers does; empty if no layer has one."""
    num_layers, windows = (
        _read_count(config, "num_hidden_layers", source),
        TRAITS[architecture].windows,
    )
    is_enabled = windows is not None and (
        not windows.is_optional or _read_flag(config, "use_sliding_window", source)
    )
    window = (
        _read_count(config, "sliding_window", source, 4096)
        if is_enabled and config.get("sliding_window", 0) is not None
        else None
    )
    windows = windows or Windows()
    period = windows.period and _read_count(
        config, "sliding_window_pattern", source, windows.period
    )
    limit = _read_number(config, "max_window_layers", source, 28.0)

    def is_local(i: int) -> bool:
        if period and (i + 1) % period == 0:
            return False
        return windows.limit is None or (i >= limit if windows.limit == "from" else i < limit)

    computed = [
        "sliding_attention" if window and is_local(i) else "full_attention"
        for i in range(num_layers)
    ]
    kinds = computed if config.get("layer_types") is None else config["layer_types"]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or set(kinds) - {"full_attention", "sliding_attention"}
    ):
        raise ValueError(
            f"{source}: expected layer_types to be 'full_attention' or 'sliding_attention' for "
            f"each of {num_layers} layers, found {kinds}"
        )
    if kinds != computed and (TRAITS[architecture].windows is None or not windows.by_layer):
        # There transformers uses layer_types for caches, but not for layers.
        raise ValueError(
            f"{source}: expected layer_types={computed} for {architecture}, found {kinds}"
        )
    if "sliding_attention" not in kinds:
        return ()
    if window is None:
        raise ValueError(
            f"{source}: expected sliding_window and use_sliding_window for 'sliding_attention' in "
            "layer_types, found none"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _with_expert_keys(config: Mapping[str, Any], family: Traits) -> dict[str, Any]:
    """Add the names of MoEConfig's fields to a config.json."""
    named = {
        field: config[key] for field, key in family.expert_keys.items() if key and key in config
    }
    return {**config, **named}


def _moe_to_hf(experts: MoEConfig, family: Traits) -> dict[str, Any]:
    moe = asdict(experts)
    dense, groups = moe.pop("dense_layers"), moe.pop("groups")
    if groups is not None:
        shared = moe.pop("shared_expert_intermediate_size") // experts.moe_intermediate_size
        moe |= groups | {"n_shared_experts": shared, "first_k_dense_replace": len(dense)}
    elif not experts.shared_expert_intermediate_size:
        del moe["shared_expert_intermediate_size"]
    if not family.expert_keys:
        return moe | {"decoder_sparse_step": 1, "mlp_only_layers": list(dense)}
    names = {field: family.expert_keys.get(field, field) for field in moe}
    return {name: moe[field] for field, name in names.items() if name is not None}


def _latent_to_hf(latent: LatentAttention | None) -> dict[str, Any]:
    if latent is None:
        return {}
    written = asdict(latent)
    # It is a setting of RoPE.
    del written["mscale_all_dim"]
    # transformers names the rotated part of a head so.
    return written | {"head_dim": latent.qk_rope_head_dim}


def _read_latent(config: Mapping[str, Any], source: str) -> LatentAttention:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, nope, rotated, values = (_read_count(config, name, source) for name in sizes)
    derived = {
        "num_key_value_heads": _read_count(config, "num_attention_heads", source),
        "qk_head_dim": nope + rotated,
        "head_dim": rotated,
    }
    if wrong := {
        name: config[name]
        for name, value in derived.items()
        if config.get(name) not in (None, value)
    }:
        raise ValueError(
            f"{source}: expected latent attention with {derived} or without these keys, found "
            f"{wrong}"
        )
    if rotated % 2 or values > nope + rotated:
        raise ValueError(
            f"{source}: expected qk_rope_head_dim to be even, and v_head_dim to be at most "
            f"qk_nope_head_dim + qk_rope_head_dim, found qk_rope_head_dim={rotated}, "
            f"v_head_dim={values}, qk_nope_head_dim={nope}"
        )
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return LatentAttention(
        q_lora_rank=None
        if config.get("q_lora_rank") is None
        else _read_count(config, "q_lora_rank", source),
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=values,
        rope_interleave=_read_flag(config, "rope_interleave", source),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
    )


def _linear_to_hf(linear: LinearAttention | None, num_layers: int) -> dict[str, Any]:
    if linear is None:
        return {}
    written = asdict(linear)
    layers = written.pop("layers")
    kinds = ["linear_attention" if i in layers else "full_attention" for i in range(num_layers)]
    return written | {"layer_types": kinds}


def _read_linear(config: Mapping[str, Any], source: str) -> LinearAttention:
    num_layers = _read_count(config, "num_hidden_layers", source)
    period = _read_count(config, "full_attention_interval", source, 4)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [
            "linear_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)
        ]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or set(kinds) != {"full_attention", "linear_attention"}
    ):
        raise ValueError(
            f"{source}: expected layer_types to be 'full_attention' or 'linear_attention' for each "
            f"of {num_layers} layers, and both to occur, found {kinds}"
        )
    sizes = {
        field.name: _read_count(config, field.name, source)
        for field in fields(LinearAttention)
        if field.name != "layers"
    }
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    linear = LinearAttention(**sizes, layers=layers)
    if linear.linear_num_value_heads % linear.linear_num_key_heads:
        raise ValueError(
            f"{source}: expected linear_num_value_heads to be a multiple of linear_num_key_heads, "
            f"found {linear.linear_num_value_heads} and {linear.linear_num_key_heads}"
        )
    if linear.linear_conv_kernel_dim < 2:
        raise ValueError(f"{source}: expected linear_conv_kernel_dim of at least 2, found 1")
    return linear


def _read_moe(config: Mapping[str, Any], source: str) -> MoEConfig:
    # Files of transformers 5 may use either name.
    names = [name for name in ("num_experts", "num_local_experts") if name in config]
    if len({config[name] for name in names}) > 1:
        raise ValueError(
            f"{source}: num_experts={config['num_experts']!r} contradicts "
            f"num_local_experts={config['num_local_experts']!r}"
        )
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    num_experts, per_token = (
        _read_count(config, key, source) for key in (name, "num_experts_per_tok")
    )
    if per_token > num_experts:
        raise ValueError(
            f"{source}: expected num_experts_per_tok to be at most {name}={num_experts}, found "
            f"{per_token}"
        )
    groups = _read_groups(config, num_experts, per_token, source) if "n_group" in config else None
    width = _read_count(config, "moe_intermediate_size", source)
    if groups is not None:
        num_dense = config["first_k_dense_replace"]
        if not 0 <= num_dense < _read_count(config, "num_hidden_layers", source):
            raise ValueError(
                f"{source}: expected first_k_dense_replace below num_hidden_layers, found "
                f"{num_dense!r}"
            )
        return MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=per_token,
            moe_intermediate_size=width,
            norm_topk_prob=_read_flag(config, "norm_topk_prob", source),
            router_aux_loss_coef=0.0,
            shared_expert_intermediate_size=width * _read_count(config, "n_shared_experts", source),
            dense_layers=tuple(range(num_dense)),
            groups=groups,
        )
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        moe_intermediate_size=width,
        norm_topk_prob=_read_flag(config, "norm_topk_prob", source),
        router_aux_loss_coef=_read_number(config, "router_aux_loss_coef", source, 0.001),
        shared_expert_intermediate_size=_read_count(
            config, "shared_expert_intermediate_size", source
        )
        if "shared_expert_intermediate_size" in config
        else 0,
        dense_layers=_read_dense_layers(config, source),
    )


def _read_dense_layers(config: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Read which layers have no experts: of Qwen's families, some named ones and all but each
    `decoder_sparse_step`-th.
    """
    num_layers = _read_count(config, "num_hidden_layers", source)
    step = _read_count(config, "decoder_sparse_step", source, 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(
        isinstance(i, bool) or i not in range(num_layers) for i in named
    ):
        raise ValueError(
            f"{source}: expected mlp_only_layers to be numbers of {num_layers} layers, found "
            f"{named!r}"
        )
    dense = tuple(i for i in range(num_layers) if i in named or (i + 1) % step)
    if len(dense) == num_layers:
        raise ValueError(
            f"{source}: expected at least one layer with experts, found decoder_sparse_step={step} "
            f"and mlp_only_layers={named} for {num_layers} layers"
        )
    return dense


def _read_groups(
    config: Mapping[str, Any], num_experts: int, per_token: int, source: str
) -> ExpertGroups:
    count, top = (_read_count(config, name, source) for name in ("n_group", "topk_group"))
    size = num_experts // count
    # The score of a group is that of its two best experts.
    if num_experts % count or size < 2 or top > count or per_token > top * size:
        raise ValueError(
            f"{source}: expected n_group groups of at least two experts each, and topk_group of "
            f"them with num_experts_per_tok experts, found n_group={count}, topk_group={top}, "
            f"n_routed_experts={num_experts}, num_experts_per_tok={per_token}"
        )
    return ExpertGroups(count, top, _read_number(config, "routed_scaling_factor", source, 1.0))
