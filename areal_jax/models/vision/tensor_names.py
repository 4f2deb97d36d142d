"""Names of the tensors of vision towers in the files, by the path of the parameter.

The names are those of Qwen2.5-VL; Qwen3-VL has others for the same parameters, and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class TowerTensor(NamedTuple):
    """A tensor of a tower; {} is the block."""

    name: str
    num_inputs: int = 0
    """As in the table of the decoder's tensors."""
    is_reversed: bool = False
    """Whether all dimensions are in the opposite order (convolutions)."""


def _linear(path: str, name: str) -> dict[str, TowerTensor]:
    return {
        f"{path} w": TowerTensor(f"{name}.weight", 1),
        f"{path} bias": TowerTensor(f"{name}.bias"),
    }


def _norm(path: str, name: str) -> dict[str, TowerTensor]:
    return {
        f"{path} scale": TowerTensor(f"{name}.weight"),
        f"{path} bias": TowerTensor(f"{name}.bias"),
    }


_BLOCK, _DEEP = "visual.blocks.{}.", "visual.deepstack_merger_list.{}."

_TENSORS: Final[Mapping[str, TowerTensor]] = {
    "patch_embed": TowerTensor("visual.patch_embed.proj.weight", 4, is_reversed=True),
    "patch_bias": TowerTensor("visual.patch_embed.proj.bias"),
    "position_embed": TowerTensor("visual.pos_embed.weight"),
    **_norm("blocks attn_norm", f"{_BLOCK}norm1"),
    **_norm("blocks mlp_norm", f"{_BLOCK}norm2"),
    "blocks attn qkv": TowerTensor(f"{_BLOCK}attn.qkv.weight", 1),
    "blocks attn qkv_bias": TowerTensor(f"{_BLOCK}attn.qkv.bias"),
    "blocks attn proj": TowerTensor(f"{_BLOCK}attn.proj.weight", 2),
    "blocks attn proj_bias": TowerTensor(f"{_BLOCK}attn.proj.bias"),
    **_linear("blocks mlp gate", f"{_BLOCK}mlp.gate_proj"),
    **_linear("blocks mlp up", f"{_BLOCK}mlp.up_proj"),
    **_linear("blocks mlp down", f"{_BLOCK}mlp.down_proj"),
    **_norm("merger norm", "visual.merger.ln_q"),
    **_linear("merger up", "visual.merger.mlp.0"),
    **_linear("merger down", "visual.merger.mlp.2"),
    **_norm("deep_mergers norm", f"{_DEEP}norm"),
    **_linear("deep_mergers up", f"{_DEEP}linear_fc1"),
    **_linear("deep_mergers down", f"{_DEEP}linear_fc2"),
}

TOWER_TENSORS: Final[Mapping[tuple[str, ...], TowerTensor]] = {
    ("vision", *path.split()): tensor for path, tensor in _TENSORS.items()
}
"""By the path of the parameter."""

_OF_QWEN3: Final = {
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "merger.ln_q": "merger.norm",
    "merger.mlp.0": "merger.linear_fc1",
    "merger.mlp.2": "merger.linear_fc2",
}


def _qwen3(name: str) -> str:
    for before, after in _OF_QWEN3.items():
        name = name.replace(before, after)
    return f"model.{name}"


_LAYER = "layers.{}."

_LANGUAGE: Final = (
    "embed_tokens",
    "norm",
    *(f"{_LAYER}{name}" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"{_LAYER}self_attn.{name}" for name in ("q_norm", "k_norm")),
    *(f"{_LAYER}self_attn.{name}_proj" for name in "qkvo"),
    *(f"{_LAYER}mlp.{name}_proj" for name in ("gate", "up", "down")),
)

QWEN3_VL_NAMES: Final[Mapping[str, str]] = {
    **{tensor.name: _qwen3(tensor.name) for tensor in _TENSORS.values()},
    **{
        f"model.{name}.{kind}": f"model.language_model.{name}.{kind}"
        for name in _LANGUAGE
        for kind in ("weight", "bias")
    },
}
"""Names of Qwen3-VL, by those of Qwen2.5-VL and Llama."""
