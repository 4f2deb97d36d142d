"""Rotary position embeddings (RoPE, arXiv:2104.09864), and the ways in which checkpoints stretch
them to longer texts.

Each way turns the frequencies theta^(-2i / H), i < H / 2, of a head of size H into others. Fields
are named as in Hugging Face's config.json, and formulas are those of its modeling_rope_utils.py.
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
    """Slow dimensions divided by `factor`, fast ones kept, a ramp between; q and k grow by
    `attention_factor` (arXiv:2309.00071)."""

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
    """Base of the angles, and the scaling, of a config.json: in rope_parameters, or in files of
    transformers before version 5 in rope_theta and rope_scaling.

    Raises:
        ValueError: naming what is not supported, contradictory or missing."""
    spelling = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    written = config.get(spelling) or {}
    if not isinstance(written, dict):
        raise ValueError(f"{source}: expected {spelling} to be an object; came {written!r}")
    if spelling == "rope_scaling" and (config.get("rope_parameters") or written) != written:
        raise ValueError(
            f"{source}: rope_scaling={written!r} contradicts "
            f"rope_parameters={config['rope_parameters']!r}; leave one out"
        )
    given = dict(written)
    theta = given.pop("rope_theta", config.get("rope_theta", 10000.0))
    if not _is_number(theta) or theta <= 1:
        raise ValueError(f"{source}: expected rope_theta to be a number above 1; came {theta!r}")
    kinds = [given.pop(name) for name in ("rope_type", "type") if name in given]
    kind = kinds[0] if kinds else "default"
    known = ", ".join(map(repr, ["default", *_KINDS]))
    if kind not in ("default", *_KINDS) or set(kinds) - {kind}:
        raise ValueError(
            f"{source}: {spelling}={written!r} is not supported; only rope_type {known} are"
        )
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{source}: {spelling}={written!r} is not supported; only partial_rotary_factor=1.0 is"
        )
    try:
        return float(theta), _scaling(kind, given, config)
    except (TypeError, ValueError) as error:
        fields = ", ".join(_KINDS[kind].__dataclass_fields__) if kind in _KINDS else "nothing"
        raise ValueError(
            f"{source}: {spelling}={written!r} is not supported; rope_type={kind!r} takes "
            f"numbers for {fields} ({error})"
        ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaling(kind: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling | None:
    """The scaling, with what a file leaves out or writes as null."""
    values: dict[str, Any] = dict(given)
    max_position_embeddings: Any = config["max_position_embeddings"]
    if kind == "default":
        if values:
            raise ValueError(f"unexpected {', '.join(values)}")
        return None
    if kind != "linear":
        # In transformers the one beside the object goes before the one inside it.
        inside = values.get("original_max_position_embeddings", max_position_embeddings)
        values["original_max_position_embeddings"] = config.get(
            "original_max_position_embeddings", inside
        )
    if kind == "yarn":
        values = {
            name: value
            for name, value in values.items()
            if value is not None or name not in _MAY_BE_NULL
        }
        if values.get("truncate", True) is None:
            values["truncate"] = False
        if "factor" in given and given["factor"] is None:
            values["factor"] = max_position_embeddings / values["original_max_position_embeddings"]
        scales = values.pop("mscale", None), values.pop("mscale_all_dim", None)
        if "factor" in values and "attention_factor" not in values:
            values["attention_factor"] = _attention_factor(values["factor"], *scales)
    if not isinstance(values.get("truncate", True), bool):
        raise ValueError(f"expected truncate to be true or false; came {values['truncate']!r}")
    if wrong := [
        name
        for name, value in values.items()
        if name != "truncate" and (not _is_number(value) or value <= 0)
    ]:
        raise ValueError(f"expected numbers above 0 for {', '.join(wrong)}")
    if (
        kind == "llama3"
        and "high_freq_factor" in values
        and values["high_freq_factor"] <= values.get("low_freq_factor", 0)
    ):
        raise ValueError("expected high_freq_factor to be above low_freq_factor")
    whole = ("original_max_position_embeddings", "truncate")
    fields: dict[str, Any] = {
        name: value if name in whole else float(value) for name, value in values.items()
    }
    return _KINDS[kind](**fields)


_MAY_BE_NULL = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Settings of yarn that null leaves to what transformers computes."""


def to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The settings in the older spelling, which older and newer readers know."""
    kinds = {cls: kind for kind, cls in _KINDS.items()}
    written = None if scaling is None else {"rope_type": kinds[type(scaling)]} | asdict(scaling)
    return {"rope_theta": theta, "rope_scaling": written}


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float64[np.ndarray, "_"]:
    """By which a position turns every pair of a head's dimensions."""
    return _scaled(theta ** (-np.arange(0, head_dim, 2) / head_dim), theta, scaling)


def growth(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: yarn's attention factor."""
    return scaling.attention_factor if isinstance(scaling, Yarn) else 1.0


def _scaled(
    frequencies: Float64[np.ndarray, "_"], theta: float, scaling: RopeScaling | None
) -> Float64[np.ndarray, "_"]:
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
    """What q and k grow by where a file does not say (YaRN, equation 22, as transformers applies
    it)."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    return of(mscale) / of(mscale_all_dim) if mscale and mscale_all_dim else of(1.0)
