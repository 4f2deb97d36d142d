"""Architecture of a vision tower, read from the config.json of a vision-language policy.

Such a file has the language model in `text_config` (or, before version 5 of transformers, beside
the other keys) and the tower in `vision_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from areal_jax.models.config_keys import Only, Rule, check_keys

VisionKind: TypeAlias = Literal["qwen2_5_vl", "qwen3_vl"]
"""qwen2_5_vl: RMSNorm, gated MLPs, attention within windows in most blocks. qwen3_vl: LayerNorm,
learned positions, and features of several blocks, which are added to the first layers of the
decoder (DeepStack, arXiv:2406.04334)."""


@dataclass(frozen=True)
class VisionConfig:
    """Architecture of a vision tower; fields as in Hugging Face's config.json."""

    kind: VisionKind
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    """Width of the decoder."""
    patch_size: int
    spatial_merge_size: int
    """Patches of one token, along each side of their square."""
    temporal_patch_size: int
    in_channels: int
    image_token_id: int
    """Token that stands for an embedding of an image in a prompt."""
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    window_size: int | None = None
    """Side of a window of attention, in pixels; of kind qwen2_5_vl."""
    fullatt_block_indexes: tuple[int, ...] = ()
    """Blocks whose attention has no windows."""
    num_position_embeddings: int | None = None
    """Number of learned positions, a square; of kind qwen3_vl."""
    deepstack_visual_indexes: tuple[int, ...] = ()
    """Blocks whose features are added to the first layers of the decoder."""

    @property
    def patch_width(self) -> int:
        """Number of pixel values of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_patches(self) -> int:
        """Number of patches of one token."""
        return self.spatial_merge_size**2

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        D, F, E = self.hidden_size, self.intermediate_size, self.out_hidden_size
        is_deep = self.kind == "qwen3_vl"
        # Norms have a bias, as the patch embedding has, and MLPs two matrices instead of three.
        norm, W = 1 + is_deep, D * self.merged_patches
        mlp = (2 * D + 1) * F + D if is_deep else (3 * D + 2) * F + D
        block = 2 * norm * D + 4 * D * (D + 1) + mlp
        merger = W * (W + 1) + E * (W + 1)
        embeddings = (self.patch_width + is_deep + (self.num_position_embeddings or 0)) * D
        deep = len(self.deepstack_visual_indexes) * (norm * W + merger)
        return embeddings + self.depth * block + norm * D + merger + deep

    @property
    def window_patches(self) -> int | None:
        """Side of a window, in patches."""
        if self.window_size is None:
            return None
        merged = self.window_size // self.spatial_merge_size // self.patch_size
        return merged * self.spatial_merge_size


class Files(NamedTuple):
    """A config.json, as the language model's keys, the tower, and M-RoPE."""

    text: dict[str, Any]
    vision: VisionConfig
    mrope_section: tuple[int, ...]
    """Number of frequencies of each axis."""


_TOKENS: Final = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)

_SECTIONS: Final[Mapping[VisionKind, tuple[int, ...]]] = {
    "qwen2_5_vl": (16, 24, 24),
    "qwen3_vl": (24, 20, 20),
}
"""Values of an absent mrope_section."""

_DEFAULTS: Final[Mapping[VisionKind, Mapping[str, Any]]] = {
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
}
"""Values of absent keys in transformers; each is also read from the file."""

_SHARED_DEFAULTS: Final = {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}

_ACTIVATIONS: Final[Mapping[VisionKind, str]] = {
    "qwen2_5_vl": "silu",
    "qwen3_vl": "gelu_pytorch_tanh",
}

_HARMLESS: Final = (
    # Of videos, of the origin of the file, and other names of keys that are read.
    *("tokens_per_second", "initializer_range", "dtype", "torch_dtype", "spatial_patch_size"),
    *("model_type", "_attn_implementation", "attn_implementation", "transformers_version"),
)


def split_config(
    config: Mapping[str, Any],
    kind: VisionKind,
    model_type: str,
    ignored: Collection[str],
    source: str,
) -> Files:
    """Read the tower and M-RoPE; return the other keys as those of a language model.

    Args:
        config: content of the file.
        kind: of the family.
        model_type: of the family.
        ignored: unsupported keys to ignore.
        source: name of the file, for errors.

    Raises:
        ValueError: a key or a value is not supported, or a key is missing.
    """
    if config.get("model_type", model_type) != model_type:
        raise ValueError(
            f"{source}: model_type={config['model_type']!r} contradicts "
            f"architectures={config['architectures']}; expected model_type={model_type!r}"
        )
    outer = {
        name: value
        for name, value in config.items()
        if name not in ("text_config", "vision_config", "vision_token_id", *_TOKENS)
    }
    text = dict(config.get("text_config") or {})
    if text.pop("model_type", None) not in (model_type, f"{model_type}_text", None):
        raise ValueError(f"{source}: expected text_config of model_type={model_type}_text")
    is_tied = outer.get("tie_word_embeddings", False)
    if kind == "qwen2_5_vl":
        # As transformers does, for files before its version 5.
        is_tied = is_tied or text.get("tie_word_embeddings", False)
    text = outer | text | {"tie_word_embeddings": is_tied}
    section = _pop_section(text, kind, source)
    return Files(text, _read_vision(config, kind, ignored, source), section)


def join_config(
    text: dict[str, Any], vision: VisionConfig, section: tuple[int, ...]
) -> dict[str, Any]:
    """Return the content of a config.json; the inverse of `split_config`."""
    text = dict(text)
    names = ("architectures", "tie_word_embeddings", "id2label", "label2id")
    outer = {name: text.pop(name) for name in names if name in text}
    outer["model_type"] = text["model_type"]
    text["model_type"] = f"{outer['model_type']}_text"
    theta = text.pop("rope_theta", None)
    rope = text.pop("rope_scaling", None) or text.pop("rope_parameters", None) or {}
    rope = {"rope_type": "default"} | ({} if theta is None else {"rope_theta": theta}) | rope
    text["rope_parameters"] = rope | {"mrope_section": list(section)}
    if vision.kind == "qwen2_5_vl":
        # It has neither key.
        del text["attention_bias"], text["head_dim"]
    tower = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(vision).items()
        if name in _SHARED_DEFAULTS | _DEFAULTS[vision.kind]
    }
    tower |= {
        "model_type": f"{outer['model_type']}_vision",
        "hidden_act": _ACTIVATIONS[vision.kind],
    }
    tokens = {name: getattr(vision, name) for name in _TOKENS}
    return outer | {"text_config": text, "vision_config": tower} | tokens


def _pop_section(text: dict[str, Any], kind: VisionKind, source: str) -> tuple[int, ...]:
    """Remove M-RoPE from the RoPE of the language model."""
    section: Any = _SECTIONS[kind]
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(text.get(name), dict):
            continue
        rope = dict(text[name])
        section = rope.pop("mrope_section", section)
        if rope.pop("mrope_interleaved", kind == "qwen3_vl") != (kind == "qwen3_vl"):
            raise ValueError(f"{source}: expected mrope_interleaved={kind == 'qwen3_vl'} in {name}")
        rope |= {each: "default" for each in ("type", "rope_type") if rope.get(each) == "mrope"}
        text[name] = rope
    if not isinstance(section, list | tuple) or len(section) != 3:
        raise ValueError(f"{source}: expected mrope_section with 3 numbers, found {section!r}")
    return tuple(section)


def _read_vision(
    config: Mapping[str, Any], kind: VisionKind, ignored: Collection[str], source: str
) -> VisionConfig:
    found = config.get("vision_config")
    if not isinstance(found, dict):
        raise ValueError(f"{source}: expected vision_config to be an object, found {found!r}")
    # Both names are in use.
    found = dict(found)
    if "in_chans" in found:
        found["in_channels"] = found.pop("in_chans")
    defaults = _SHARED_DEFAULTS | _DEFAULTS[kind]
    rules: dict[str, Rule] = {
        **dict.fromkeys(_HARMLESS, "harmless"),
        **dict.fromkeys(defaults, "read"),
        "hidden_act": Only((_ACTIVATIONS[kind],)),
        "rope_parameters": Only(({"rope_type": "axial", "rope_theta": 10000.0}, None)),
    }
    check_keys(found, rules, ignored, f"{source}: vision_config", f"the vision tower of {kind}")
    tokens = {name: config.get(name) for name in _TOKENS}
    values = defaults | {name: value for name, value in found.items() if name in defaults}
    values = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    numbers = [*values.values(), *tokens.values()]
    if wrong := [each for each in numbers if not isinstance(each, tuple) and not _is_count(each)]:
        raise ValueError(
            f"{source}: expected positive integers in vision_config and {', '.join(_TOKENS)}, "
            f"found {wrong[0]!r}"
        )
    vision = VisionConfig(kind=kind, **values, **tokens)  # type: ignore[reportArgumentType] (checked above)
    blocks = (*vision.fullatt_block_indexes, *vision.deepstack_visual_indexes)
    side = round((vision.num_position_embeddings or 1) ** 0.5)
    if (
        vision.hidden_size % (4 * vision.num_heads)
        or side * side != (vision.num_position_embeddings or 1)
        or any(block not in range(vision.depth) for block in blocks)
        or list(vision.deepstack_visual_indexes) != sorted(set(vision.deepstack_visual_indexes))
    ):
        raise ValueError(
            f"{source}: expected a vision_config with heads of a multiple of 4 numbers, a square "
            f"number of positions, and blocks below depth, found {vision}"
        )
    return vision


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
