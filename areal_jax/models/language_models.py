"""Language models inside published folders: those of policies that also read images, without the
vision tower, and experts that are stored together.

A folder whose architecture is a key of `LANGUAGE_MODELS` is read as the policy of text on the right
side. What is written is a folder of that policy alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

logger = logging.getLogger(__name__)

LANGUAGE_MODELS: Final = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
}
"""Architecture of the language model of each architecture with images that is read as text."""

_OF_IMAGES: Final = frozenset(
    (
        *("architectures", "model_type", "text_config", "vision_config"),
        *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("image_token_index", "boi_token_index", "eoi_token_index", "mm_tokens_per_image"),
        *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
        *("vision_feature_layer", "language_model_only"),
    )
)
"""Keys beside `text_config` that have no effect on text."""

_TOWER: Final = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.")
_PREFIX: Final = re.compile(r"(model\.)?language_model\.(model\.)?")
_EXPERTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Matrices of all experts [experts, outputs, inputs] in one tensor, along the outputs."""

Source = TypeVar("Source", bound=Any)


@dataclass(frozen=True)
class TensorPart:
    """A tensor of an open safetensors file under another name, or the matrix of one expert in it.

    It is read like an open file with this tensor alone, and like a slice of that.
    """

    file: Any
    name: str
    expert: int | None = None
    start: int = 0
    """First of the outputs of the expert."""
    end: int = 0

    def get_slice(self, name: str) -> TensorPart:
        return self

    def get_tensor(self, name: str) -> np.ndarray:
        return self[:]

    def get_dtype(self) -> str:
        return self.file.get_slice(self.name).get_dtype()

    def get_shape(self) -> list[int]:
        shape = list(self.file.get_slice(self.name).get_shape())
        return shape if self.expert is None else [self.end - self.start, *shape[2:]]

    def __getitem__(self, index: Any) -> np.ndarray:
        header = self.file.get_slice(self.name)
        if self.expert is None:
            return header[index]
        return header[self.expert : self.expert + 1, self.start : self.end][0][index]


def find_language_model(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the config.json of the language model, or the same content if it is one.

    Args:
        config: content of the file.
        source: name of the file, for errors.

    Raises:
        ValueError: `text_config` is missing.
    """
    names = config.get("architectures") or ["none"]
    if len(names) != 1 or names[0] not in LANGUAGE_MODELS:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"{source}: expected text_config to be an object, found {text!r}")
    outer = {name: value for name, value in config.items() if name not in _OF_IMAGES}
    # transformers ties the head by the key beside text_config.
    tied = {name: outer[name] for name in ("tie_word_embeddings",) if name in outer}
    return outer | text | tied | {"architectures": [LANGUAGE_MODELS[names[0]]]}


def find_tensors(
    opened: Mapping[str, Source], folder: str, *, splits_experts: bool
) -> dict[str, Source]:
    """Return the tensors of the language model by the names of its own folder.

    Args:
        opened: open file of each tensor, a record with a field `file`.
        folder: name of the folder, for the log.
        splits_experts: whether a tensor of all experts is returned as one for each.
    """
    is_inside = any(_PREFIX.match(name) for name in opened)
    ignored = [name for name in opened if is_inside and _TOWER.match(name)]
    if ignored:
        logger.info(
            "%s: reading the language model; vision tensors=%d ignored", folder, len(ignored)
        )
    found: dict[str, Source] = {}
    for name, source in opened.items():
        if is_inside and _TOWER.match(name):
            continue
        own = _PREFIX.sub("model.", name, count=1) if _PREFIX.match(name) else name
        own = own.removeprefix("model.") if own.startswith("model.lm_head.") else own
        whole = TensorPart(source.file, name)
        for part_name, part in _split(own, whole) if splits_experts else [(own, whole)]:
            is_same = part_name == name
            found[part_name] = source if is_same else source._replace(file=part)
    return found


def _split(name: str, tensor: TensorPart) -> Iterator[tuple[str, TensorPart]]:
    """Yield the matrices of each expert in a tensor of all, or the tensor itself."""
    layer, _, matrix = name.rpartition(".experts.")
    parts = _EXPERTS.get(matrix, ())
    shape = tensor.get_shape() if parts else []
    if len(shape) != 3 or shape[1] % len(parts):
        yield name, tensor
        return
    size = shape[1] // len(parts)
    for expert in range(shape[0]):
        for i, part in enumerate(parts):
            start = i * size
            yield (
                f"{layer}.experts.{expert}.{part}.weight",
                replace(tensor, expert=expert, start=start, end=start + size),
            )
