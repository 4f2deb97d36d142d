"""Rotary position embeddings (RoPE, arXiv:2104.09864), and the ways in which checkpoints stretch them to longer texts.

Each way turns the frequencies theta^(-2i / H), i < H / 2, of a head of size H into others. Fields are named as in
Hugging Face's config.json, and formulas are those of its modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True)
class Linear:
    """Positions divided by `factor` (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Long waves divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Yarn:
    """Slow dimensions divided by `factor`, fast ones kept, a ramp between; q and k grow by `attention_factor`
    (arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    """Turns over the original length from which on a dimension is fast."""
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ramp begins and ends at whole dimensions."""


RopeScaling: TypeAlias = Linear | Llama3 | Yarn

_KINDS: dict[str, type[RopeScaling]] = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}


def from_hf(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base of the angles, and the scaling, of a config.json: in rope_parameters, or in files of transformers before
    version 5 in rope_theta and rope_scaling. ValueError names what is not supported or missing."""
    spelling = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = dict[str, Any]()
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(of_name := config.get(name) or {}, dict):
            raise ValueError(f"{source}: expected {name} to be an object; came {of_name!r}")
        given |= of_name
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ValueError(f"{source}: expected rope_theta to be a number; came {theta!r}")
    theta = float(theta)
    kinds = [given.pop(name, None) for name in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    if kind == "default" and not given:
        return theta, None
    if kind not in _KINDS:
        known = ", ".join(map(repr, ["default", *_KINDS]))
        raise ValueError(f"{source}: {spelling}={config[spelling]!r} is not supported; only rope_type {known} are")
    try:
        return theta, _KINDS[kind](**_completed(kind, given, config["max_position_embeddings"]))
    except (TypeError, ValueError) as error:
        fields = ", ".join(_KINDS[kind].__dataclass_fields__)
        raise ValueError(
            f"{source}: {spelling}={config[spelling]!r} is not supported; rope_type={kind!r} takes numbers for {fields}"
        ) from error


def _completed(kind: str, given: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """With what a file leaves out or writes as null."""
    whole = ("original_max_position_embeddings", "truncate")
    values = {name: value if name in whole else float(value) for name, value in given.items() if value is not None}
    if kind != "linear":
        values.setdefault("original_max_position_embeddings", max_position_embeddings)
    if kind == "yarn":
        values.setdefault("factor", max_position_embeddings / values["original_max_position_embeddings"])
        scales = values.pop("mscale", None), values.pop("mscale_all_dim", None)
        values.setdefault("attention_factor", _attention_factor(values["factor"], *scales))
    return values


def to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The settings in the older spelling, which older and newer readers know."""
    kinds = {cls: kind for kind, cls in _KINDS.items()}
    written = None if scaling is None else {"rope_type": kinds[type(scaling)]} | asdict(scaling)
    return {"rope_theta": theta, "rope_scaling": written}


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Float64[np.ndarray, "_"]:
    """By which a position turns every pair of a head's dimensions."""
    return _scaled(theta ** (-np.arange(0, head_dim, 2) / head_dim), theta, scaling)


def growth(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: yarn's attention factor."""
    return scaling.attention_factor if isinstance(scaling, Yarn) else 1.0


def _scaled(frequencies: Float64[np.ndarray, "_"], theta: float, scaling: RopeScaling | None) -> Float64[np.ndarray, "_"]:
    match scaling:
        case None:
            return frequencies
        case Linear(factor):
            return frequencies / factor
        case Llama3(factor, low, high, length):
            turns = length * frequencies / (2 * math.pi)
            kept = np.clip((turns - low) / (high - low), 0, 1)
        case Yarn(factor, length):
            size = len(frequencies)
            first, last = (
                size * math.log(length / (turns * 2 * math.pi)) / math.log(theta)
                for turns in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * size - 1)
            kept = 1 - np.clip((np.arange(size) - first) / (last - first or 0.001), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What q and k grow by where a file does not say (YaRN, equation 22, as transformers applies it)."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)
