"""MXFP4 weights (OCP Microscaling Formats 1.0), which are read by dequantizing.

A matrix NAME is stored as NAME_blocks [..., outputs, blocks, 16], two numbers per byte with the
first one in the low bits, and NAME_scales [..., outputs, blocks]. A block of 32 numbers along the
inputs has the scale 2^(byte - 127).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
"""Numbers of the 4-bit codes (E2M1)."""


def dequantize(
    blocks: UInt8[np.ndarray, "*E O b h"], scales: UInt8[np.ndarray, "*E O b"]
) -> Float32[np.ndarray, "*E I O"]:
    """Compute the matrices [inputs, outputs], which bfloat16 represents exactly."""
    numbers = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1)
    numbers = numbers.reshape(*blocks.shape[:-1], -1)
    scaled = np.ldexp(numbers, scales[..., None].astype(np.int32) - 127)
    return scaled.reshape(*blocks.shape[:-2], -1).swapaxes(-1, -2)


class QuantizedFile(NamedTuple):
    """The open safetensors file of a quantized tensor, which reads as if it were not."""

    blocks: Any
    scales: Any

    def get_slice(self, name: str) -> QuantizedSlice:
        return QuantizedSlice(self, name)

    def get_tensor(self, name: str) -> np.ndarray:
        return dequantize(
            self.blocks.get_tensor(name + _BLOCKS), self.scales.get_tensor(name + _SCALES)
        )


@dataclass(frozen=True)
class QuantizedSlice:
    """A tensor of a `QuantizedFile`."""

    file: QuantizedFile
    name: str

    def get_shape(self) -> list[int]:
        *experts, outputs, blocks, half = self.file.blocks.get_slice(
            self.name + _BLOCKS
        ).get_shape()
        return [*experts, 2 * half * blocks, outputs]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.file.get_tensor(self.name)[index]


def find_quantized(files: Mapping[str, Any]) -> dict[str, QuantizedFile]:
    """Find the quantized tensors.

    Args:
        files: open file of each tensor of a checkpoint.

    Returns:
        A file for each quantized tensor, by its name without the endings of its parts.
    """
    names = [name.removesuffix(_BLOCKS) for name in files if name.endswith(_BLOCKS)]
    return {
        name: QuantizedFile(files[name + _BLOCKS], files[name + _SCALES])
        for name in names
        if name + _SCALES in files
    }
