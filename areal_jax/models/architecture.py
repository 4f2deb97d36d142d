"""The shape of a policy: one record in which the differences between model families are data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"]

# What a family's config.json leaves unsaid. Biases on q, k, v and norms on q, k are what tells the families apart.
_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"model_type": "qwen2", "attention_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "attention_bias": False, "qk_norm": True},
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": False, "qk_norm": False},
}

# Settings that change the mathematics, with the only value the decoder computes; an absent one has that value.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that fixes a policy's parameters and its forward pass. Fields are named as in Hugging Face's config.json."""

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
    """RMSNorm over every head's q and k, before RoPE."""
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> ModelConfig:
        """Read a Hugging Face config.json; `source` names it in errors.

        Raises ValueError naming the setting where the architecture or a setting is not supported or is missing."""
        architecture = _architecture(config, source)
        family = _FAMILIES[architecture]
        for name, supported in _ONLY.items():
            if config.get(name, supported) not in (supported, None):
                raise ValueError(f"{source}: {name}={config[name]!r} is not supported; only {name}={supported!r} is")
        if config.get("attention_bias", family["attention_bias"]) != family["attention_bias"]:
            raise ValueError(
                f"{source}: attention_bias={config['attention_bias']!r} is not supported for {architecture}; "
                f"only attention_bias={family['attention_bias']!r} is"
            )
        if other := set(config.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError(f"{source}: layer_types={sorted(other)} are not supported; only 'full_attention' is")
        num_heads = _required(config, "num_attention_heads", source)
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        hidden_size = _required(config, "hidden_size", source)
        head_dim = config.get("head_dim") or hidden_size // num_heads
        if num_heads % num_kv_heads or head_dim % 2:
            raise ValueError(
                f"{source}: expected num_attention_heads to be a multiple of num_key_value_heads and head_dim to be even; "
                f"came num_attention_heads={num_heads}, num_key_value_heads={num_kv_heads}, head_dim={head_dim}"
            )
        eos = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=_required(config, "vocab_size", source),
            hidden_size=hidden_size,
            intermediate_size=_required(config, "intermediate_size", source),
            num_hidden_layers=_required(config, "num_hidden_layers", source),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=_rope_theta(config, source),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position_embeddings=_required(config, "max_position_embeddings", source),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=family["attention_bias"],
            qk_norm=family["qk_norm"],
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        )

    def to_hf(self) -> dict[str, Any]:
        """The content of a config.json that `from_hf` and transformers both read back as this policy."""
        return {
            "architectures": [self.architecture],
            "model_type": _FAMILIES[self.architecture]["model_type"],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
        }

    @property
    def num_params(self) -> int:
        """Parameters of the whole policy; a tied embedding counts once."""
        heads, kv_heads, width = self.num_attention_heads, self.num_key_value_heads, self.hidden_size
        attention = 2 * width * (heads + kv_heads) * self.head_dim
        biases = (heads + 2 * kv_heads) * self.head_dim if self.attention_bias else 0
        norms = 2 * width + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + biases + norms + 3 * width * self.intermediate_size
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self.vocab_size * width + self.num_hidden_layers * layer + width


def _architecture(config: Mapping[str, Any], source: str) -> Family:
    named = config.get("architectures") or ["none"]
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"):
        if named == [architecture]:
            return architecture
    raise ValueError(f"{source}: architectures={named} is not supported; expected one of {', '.join(_FAMILIES)}")


def _required(config: Mapping[str, Any], name: str, source: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: expected {name} to be a positive integer; came {value!r}")
    return value


def _rope_theta(config: Mapping[str, Any], source: str) -> float:
    """Base of the rotary angles; newer config.json files hold it in rope_parameters, older ones beside rope_scaling."""
    for name in ("rope_scaling", "rope_parameters"):
        settings = config.get(name) or {}
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{source}: {name}={settings!r} is not supported; only unscaled RoPE (rope_type='default') is")
    newer = config.get("rope_parameters") or {}
    return float(newer.get("rope_theta", config.get("rope_theta", 10000.0)))
