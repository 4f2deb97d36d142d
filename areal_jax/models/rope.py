"""Rotary position embeddings (RoPE, arXiv:2104.09864) and their scaling to longer contexts.

A scaling changes the frequencies theta^(-2i / H), i < H / 2, of a head of size H. Fields are named
as in Hugging Face's config.json; formulas are those of modeling_rope_utils.py in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float64, Int


@dataclass(frozen=True)
class Linear:
    """Linear scaling: positions divided by `factor` (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: low frequencies divided by `factor`, high ones unchanged, interpolation
    between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv:2309.00071): low frequencies divided by `factor`, high ones unchanged, a ramp
    between; q and k are multiplied by `attention_factor`.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    """Rotations over the original length above which a frequency is high."""
    beta_slow: float = 1.0
    """Rotations over the original length below which a frequency is low."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to dimensions."""


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv:2402.13753): each frequency has its own divisor, one for sequences up to the
    original length and one for longer ones; q and k are multiplied by `attention_factor`.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float
    is_long: bool = False
    """Whether `long_factor` is used, whatever the length of a sequence: tokens that are decoded
    cannot be rotated again when their sequence becomes long."""


RopeScaling: TypeAlias = Linear | Llama3 | Yarn | LongRope

_KINDS: dict[str, type[RopeScaling]] = {
    "linear": Linear,
    "llama3": Llama3,
    "yarn": Yarn,
    "longrope": LongRope,
}
ALL_TYPES = tuple(_KINDS)
"""Values of rope_type of all scalings."""
_ALIASES = {"su": "longrope"}
"""Earlier names."""


class Rotary(NamedTuple):
    """RoPE of a config.json."""

    theta: float
    scaling: RopeScaling | None
    partial_factor: float = 1.0
    """Share of a head's dimensions that are rotated."""
    local_theta: float | None = None
    """Base of layers with a window, which are not scaled; None: as of other layers."""


def from_hf(
    config: Mapping[str, Any], source: str, *, by_window: bool = False, is_long: bool = False
) -> Rotary:
    """Read RoPE from a config.json.

    Its keys are in rope_parameters, or in files of transformers before version 5 in rope_theta,
    rope_scaling, partial_rotary_factor and rope_local_base_freq.

    Args:
        config: content of the file.
        source: name of the file, for errors.
        by_window: whether layers with a window have their own RoPE.
        is_long: of `LongRope`.

    Raises:
        ValueError: a setting is not supported, contradictory or missing.
    """
    spelling = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    written = config.get(spelling) or {}
    if not isinstance(written, dict):
        raise ValueError(f"{source}: expected {spelling} to be an object, found {written!r}")
    if spelling == "rope_scaling" and (config.get("rope_parameters") or written) != written:
        raise ValueError(
            f"{source}: rope_scaling={written!r} contradicts "
            f"rope_parameters={config['rope_parameters']!r}; leave one out"
        )
    local_theta = config.get("rope_local_base_freq") if by_window else None
    if by_window and spelling == "rope_parameters" and written:
        written, local_theta = _by_window(written, local_theta, source)
    settings = dict(written)
    theta = settings.pop("rope_theta", config.get("rope_theta", 10000.0))
    bases = [theta] if local_theta is None else [theta, local_theta]
    if wrong := [each for each in bases if not _is_base(each)]:
        raise ValueError(
            f"{source}: expected rope_theta to be a number above 1, found {wrong[0]!r}"
        )
    kinds = [settings.pop(name) for name in ("rope_type", "type") if name in settings]
    kinds = [_ALIASES.get(kind, kind) for kind in kinds]
    kind = kinds[0] if kinds else "default"
    known = ", ".join(map(repr, ["default", *_KINDS]))
    if kind not in ("default", *_KINDS) or set(kinds) - {kind}:
        raise ValueError(
            f"{source}: expected {spelling} with one rope_type of {known}, found {written!r}"
        )
    factor = settings.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    factor = 1.0 if factor is None else factor
    if not _is_number(factor):
        raise ValueError(
            f"{source}: expected partial_rotary_factor to be a number, found {factor!r}"
        )
    try:
        scaling = _scaling(kind, settings, config)
        if isinstance(scaling, LongRope):
            scaling = replace(scaling, is_long=is_long)
    except (TypeError, ValueError) as error:
        fields = [name for name in getattr(_KINDS.get(kind), "__dataclass_fields__", ["nothing"])]
        fields = ", ".join(name for name in fields if name != "is_long")
        raise ValueError(
            f"{source}: expected {spelling} of rope_type={kind!r} with numbers for {fields}, found "
            f"{written!r} ({error})"
        ) from error
    return Rotary(
        float(theta), scaling, factor, None if local_theta is None else float(local_theta)
    )


def _by_window(
    written: Mapping[str, Any], local_theta: Any, source: str
) -> tuple[Mapping[str, Any], Any]:
    """Return the RoPE parameters of layers without a window, and the base of those with one."""
    if set(written) != {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{source}: expected rope_parameters with full_attention and sliding_attention, "
            f"found {written!r}"
        )
    local = written["sliding_attention"]
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"{source}: expected rope_parameters without scaling of sliding_attention, found "
            f"{local!r}"
        )
    return written["full_attention"], local.get("rope_theta", local_theta)


def mrope_axes(
    section: tuple[int, ...], num_frequencies: int, is_interleaved: bool
) -> Int[np.ndarray, "H"]:
    """Return by which position each frequency rotates: 0 time, 1 row, 2 column (M-RoPE,
    arXiv:2409.12191).

    Args:
        section: number of frequencies of each position.
        num_frequencies: number of frequencies.
        is_interleaved: whether positions alternate, as long as each has frequencies left, instead
            of following each other.
    """
    if not is_interleaved:
        return np.repeat(np.arange(3), section)
    axes = np.zeros(num_frequencies, int)
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


def _is_base(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaling(
    kind: str, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> RopeScaling | None:
    """Make the scaling; fill in values that the file omits or sets to null."""
    values: dict[str, Any] = dict(settings)
    max_position_embeddings: Any = config["max_position_embeddings"]
    if kind == "default":
        if values:
            raise ValueError(f"unexpected {', '.join(values)}")
        return None
    if kind != "linear":
        # In transformers the key outside of the object has precedence over the one inside.
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
        if "factor" in settings and settings["factor"] is None:
            values["factor"] = max_position_embeddings / values["original_max_position_embeddings"]
        scales = values.pop("mscale", None), values.pop("mscale_all_dim", None)
        if "factor" in values and "attention_factor" not in values:
            values["attention_factor"] = _attention_factor(values["factor"], *scales)
    if kind == "longrope":
        return _long_rope(values, max_position_embeddings)
    if not isinstance(values.get("truncate", True), bool):
        raise ValueError(f"expected truncate to be true or false, found {values['truncate']!r}")
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
    not_floats = ("original_max_position_embeddings", "truncate")
    fields: dict[str, Any] = {
        name: value if name in not_floats else float(value) for name, value in values.items()
    }
    return _KINDS[kind](**fields)


def _long_rope(values: dict[str, Any], max_position_embeddings: int) -> LongRope:
    """Make a LongRoPE; the attention factor of a scaling by s is sqrt(1 + ln s / ln(length))
    (equation 6).
    """
    length = values["original_max_position_embeddings"]
    factors = [values.pop(name, None) for name in ("short_factor", "long_factor")]
    factor, attention = (
        number if (number := values.pop(name, None)) is not None else default
        for name, default in (("factor", max_position_embeddings / length), ("attention_factor", 0))
    )
    if any(not isinstance(each, list) or not each for each in factors):
        raise ValueError("expected lists of numbers for short_factor and long_factor")
    short, long = factors
    numbers = [*short, *long, length, factor]
    if len(short) != len(long) or any(not _is_number(each) or each <= 0 for each in numbers):
        raise ValueError("expected numbers above 0, and as many in short_factor as in long_factor")
    if not _is_number(attention) or attention < 0 or length < 2:
        raise ValueError("expected attention_factor of at least 0, and a length of at least 2")
    if not attention:
        attention = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    short, long = (tuple(map(float, each)) for each in factors)
    # Other settings have no meaning.
    return LongRope(short, long, **values, attention_factor=float(attention))


_MAY_BE_NULL = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Settings of YaRN that transformers computes if they are null."""


def to_hf(
    theta: float,
    scaling: RopeScaling | None,
    partial_factor: float | None = None,
    by_window: bool = False,
    local_theta: float | None = None,
) -> dict[str, Any]:
    """Format the settings with the older keys, which all versions of transformers read.

    With a RoPE by window they are in rope_parameters, because versions disagree about the older
    keys.
    """
    written = None if scaling is None else {"rope_type": type_of(scaling)} | asdict(scaling)
    if isinstance(scaling, LongRope) and written is not None:
        del written["is_long"]
        written |= {name: list(written[name]) for name in ("short_factor", "long_factor")}
    if by_window:
        full = {"rope_theta": theta} | (written or {"rope_type": "default"})
        local = {"rope_type": "default", "rope_theta": local_theta or theta}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    partial = {} if partial_factor is None else {"partial_rotary_factor": partial_factor}
    return {"rope_theta": theta, "rope_scaling": written} | partial


def type_of(scaling: RopeScaling) -> str:
    """Return the rope_type of a scaling."""
    return next(name for name, cls in _KINDS.items() if isinstance(scaling, cls))


def check_length(scaling: RopeScaling | None, rotary_dim: int, source: str) -> None:
    """Raise ValueError if longrope has not one factor for each pair of rotated dimensions."""
    if isinstance(scaling, LongRope) and 2 * len(scaling.short_factor) != rotary_dim:
        raise ValueError(
            f"{source}: expected rope_scaling of rope_type='longrope' with {rotary_dim // 2} "
            f"numbers in short_factor and long_factor, found {len(scaling.short_factor)}"
        )


def frequencies(
    rotary_dim: int, theta: float, scaling: RopeScaling | None
) -> Float64[np.ndarray, "_"]:
    """Compute the angle per position of every pair of a head's rotated dimensions."""
    return _scaled(theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim), theta, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Factor of cos and sin: the attention factor of YaRN and LongRoPE, else 1."""
    return scaling.attention_factor if isinstance(scaling, Yarn | LongRope) else 1.0


def _scaled(
    frequencies: Float64[np.ndarray, "_"], theta: float, scaling: RopeScaling | None
) -> Float64[np.ndarray, "_"]:
    match scaling:
        case None:
            return frequencies
        case Linear(factor):
            return frequencies / factor
        case LongRope(short, long):
            return frequencies / np.array(long if scaling.is_long else short)
        case Llama3(factor, low, high, length):
            rotations = length * frequencies / (2 * math.pi)
            unchanged = np.clip((rotations - low) / (high - low), 0, 1)
        case Yarn(factor, length):
            size = len(frequencies)
            first, last = (
                size * math.log(length / (rotations * 2 * math.pi)) / math.log(theta)
                for rotations in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * size - 1)
            unchanged = 1 - np.clip((np.arange(size) - first) / (last - first or 0.001), 0, 1)
    return frequencies * (unchanged + (1 - unchanged) / factor)


def yarn_scale(factor: float, scale: float) -> float:
    """Compute 0.1 · scale · ln(factor) + 1 (YaRN, equation 22, as in transformers)."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Compute the default attention factor."""
    if mscale and mscale_all_dim:
        return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    return yarn_scale(factor, 1.0)
