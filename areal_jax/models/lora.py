"""LoRA adapters (arXiv:2106.09685) and their files in PEFT's format.

An adapter is a tree like the parameters, with a pair {"a", "b"} instead of every adapted matrix;
other leaves are absent.

Axes: L layers, I inputs of a matrix, O its outputs, R rank.

The file has more than 400 lines because loading and saving use one table of matrices.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jaxtyping import Array, Float, PRNGKeyArray

from areal_jax.json_files import read_json
from areal_jax.metrics.files import add_file_name
from areal_jax.models import hf
from areal_jax.models.config import ADAPTER_CONFIG as CONFIG
from areal_jax.models.config import LoRA, Target
from areal_jax.models.config_keys import Only, Rule, check_keys
from areal_jax.models.decoder import Adapted, Params, Policy
from areal_jax.parallel.sharding import fetch, put

WEIGHTS = "adapter_model.safetensors"


class _Place(NamedTuple):
    """Location of a target."""

    path: tuple[str, ...]
    """Path in the parameters."""
    module: str
    """Name in a layer of transformers' model."""
    num_inputs: int
    """Number of leading input dimensions of the matrix."""


_PLACES: Mapping[Target, _Place] = {
    "q_proj": _Place(("layers", "attn", "q"), "self_attn.q_proj", 1),
    "k_proj": _Place(("layers", "attn", "k"), "self_attn.k_proj", 1),
    "v_proj": _Place(("layers", "attn", "v"), "self_attn.v_proj", 1),
    "o_proj": _Place(("layers", "attn", "o"), "self_attn.o_proj", 2),
    "gate_proj": _Place(("layers", "mlp", "gate"), "mlp.gate_proj", 1),
    "up_proj": _Place(("layers", "mlp", "up"), "mlp.up_proj", 1),
    "down_proj": _Place(("layers", "mlp", "down"), "mlp.down_proj", 1),
}

_NOTHING = Only((None, {}, [], False))
"""Values for an unset key in the releases of PEFT."""

# Supported keys of adapter_config.json, with their meaning in PEFT 0.21.
_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "r",
            "lora_alpha",
            "target_modules",
            "use_rslora",
            "init_lora_weights",
            "base_model_name_or_path",
        ),
        "read",
    ),
    # Origin of the file, and initialization in PEFT, which no longer affects the weights.
    **dict.fromkeys(
        (
            "task_type",
            "peft_version",
            "auto_mapping",
            "revision",
            "inference_mode",
            "runtime_config",
        ),
        "harmless",
    ),
    **dict.fromkeys(("loftq_config", "corda_config", "eva_config", "lora_ga_config"), "harmless"),
    # Used by PEFT only together with other keys, which are refused.
    **dict.fromkeys(
        ("layers_pattern", "qalora_group_size", "megatron_core", "ensure_weight_tying"), "harmless"
    ),
    "peft_type": Only(("LORA",)),
    "bias": Only(("none", None)),
    "lora_dropout": Only((0.0, None)),
    **dict.fromkeys(
        ("modules_to_save", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_bdlora"),
        _NOTHING,
    ),
    **dict.fromkeys(
        (
            "exclude_modules",
            "layers_to_transform",
            "layer_replication",
            "rank_pattern",
            "alpha_pattern",
        ),
        _NOTHING,
    ),
    **dict.fromkeys(
        (
            "target_parameters",
            "trainable_token_indices",
            "alora_invocation_tokens",
            "megatron_config",
        ),
        _NOTHING,
    ),
    **dict.fromkeys(
        ("arrow_config", "kasa_config", "monteclora_config", "velora_config"), _NOTHING
    ),
}

_UNCHANGED_BASE_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which PEFT does not change the base. Others (PiSSA, OLoRA,
CorDA, LoftQ, LoRA-GA) subtract the initial adapter from the base, and MiCA trains one factor alone.
"""


def abstract(policy: Policy) -> Params:
    """ShapeDtypeStruct of every leaf of the policy's adapter, in float32.

    Raises:
        ValueError: the architecture has no matrix for a target.
    """
    return _tree(
        policy,
        policy.abstract(),
        lambda leaf, place: _factors(leaf.shape, place, _lora(policy).rank, _struct),
    )


def axes(policy: Policy) -> Params:
    """Logical axis names of every leaf of the policy's adapter."""
    return _tree(policy, policy.axes(), lambda names, place: _factors(names, place, "rank", tuple))


def init(policy: Policy, key: PRNGKeyArray) -> Params:
    """Sample a random adapter, whose update is 0.

    A is uniform within 1 / sqrt(I) (PEFT's kaiming_uniform(a=sqrt(5))); B is 0.
    """

    def sample(pair: Mapping[str, jax.ShapeDtypeStruct], key: PRNGKeyArray) -> dict[str, Array]:
        a, b = pair["a"].shape, pair["b"].shape
        bound = math.prod(a[1:-1]) ** -0.5
        return {"a": jax.random.uniform(key, a, jnp.float32, -bound, bound), "b": jnp.zeros(b)}

    pairs = _pairs(abstract(policy))
    keys = jax.random.split(key, len(pairs))
    return traverse_util.unflatten_dict(
        {path: sample(pair, key) for (path, pair), key in zip(pairs.items(), keys, strict=True)}
    )


def attach(policy: Policy, base: Params, adapter: Params) -> Params:
    """Combine base and adapter into parameters with `Adapted` matrices, for the decoder.

    Args:
        policy: policy with an adapter.
        base: parameters of the base; layers stacked, or a tuple.
        adapter: the adapter, with layers in the same form.
    """
    scale = _lora(policy).scale

    def walk(base: Any, adapter: Any) -> Any:
        if isinstance(base, dict):
            return base | {name: walk(base[name], inner) for name, inner in adapter.items()}
        if isinstance(base, tuple):
            return tuple(walk(*pair) for pair in zip(base, adapter, strict=True))
        return Adapted(base, adapter["a"], adapter["b"], scale)

    return walk(base, adapter)


def merge(policy: Policy, base: Params, adapter: Params) -> Params:
    """Merge the adapter into the base: w + scale · A · B, in float32.

    The result is on the host and is computed matrix by matrix, so that devices never have the
    merged policy in memory besides the base.
    """
    scale = _lora(policy).scale
    pairs = _pairs(adapter)

    def merge_leaf(path: tuple[str, ...], w: Array | np.ndarray) -> np.ndarray:
        leaf = _merged(w, pairs[path]["a"], pairs[path]["b"], scale) if path in pairs else w
        return np.asarray(fetch(leaf), np.float32)

    merged = {path: merge_leaf(path, w) for path, w in _leaves(base).items()}
    return traverse_util.unflatten_dict(merged)


def read_config(folder: Path, ignored_keys: Collection[str] = ()) -> LoRA:
    """Read a PEFT folder's adapter_config.json.

    Args:
        folder: a PEFT folder.
        ignored_keys: unsupported keys to ignore.

    Raises:
        FileNotFoundError: the folder has no adapter_config.json.
        ValueError: a key or a value is not supported.
    """
    config, path = _read_json(folder), folder / CONFIG
    # The setting also contains keys of config.json.
    check_keys(
        config,
        _RULES,
        {name for name in ignored_keys if _RULES.get(name) != "read"},
        str(path),
        "a LoRA adapter",
    )
    if (initialization := config.get("init_lora_weights", True)) not in _UNCHANGED_BASE_INITS:
        raise ValueError(
            f"{path}: expected an adapter of an unchanged base, found "
            f"init_lora_weights={initialization!r}, with which PEFT changes the base; convert it "
            "with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(
            f"{path}: expected r to be a positive integer and lora_alpha a number, found {rank!r} "
            f"and {alpha!r}"
        )
    known = get_args(Target)
    if not isinstance(targets, list) or not targets or not set(targets) <= set(known):
        raise ValueError(
            f"{path}: expected target_modules to be a list with items of {', '.join(known)}, found "
            f"{targets!r}"
        )
    ordered = tuple(target for target in known if target in targets)
    if not isinstance(rslora := config.get("use_rslora", False), bool | None):
        raise ValueError(f"{path}: expected use_rslora to be true or false, found {rslora!r}")
    return LoRA(rank=rank, alpha=float(alpha), targets=ordered, rslora=bool(rslora))


def read_base_name(folder: Path) -> str | None:
    """Read the name of the base policy of a PEFT folder's adapter; None if the file has none."""
    return _read_json(folder).get("base_model_name_or_path")


def check_base(folder: Path, *names: str) -> None:
    """Check that a PEFT folder's adapter belongs to a policy.

    Args:
        folder: a PEFT folder.
        names: names of the policy. A hub name and a folder are the same policy if their last parts
            are equal; an adapter without base name belongs to any policy.

    Raises:
        ValueError: the adapter has another base.
    """
    found = read_base_name(folder)
    if found and Path(found).name not in {Path(name).name for name in names}:
        raise ValueError(
            f"{folder / CONFIG}: expected an adapter of {names[0]!r}, found "
            f"base_model_name_or_path={found!r}; set policy.path to that, or correct the file if "
            "both are the same policy"
        )


def check_tensors(folder: Path, policy: Policy) -> None:
    """Check the tensors of a PEFT folder; only the header is read.

    Raises:
        ValueError: with all tensors that are missing, unexpected, or of the wrong shape or dtype.
    """
    with _open(folder) as file:
        hf.check_shapes(
            f"{folder / WEIGHTS} does not match the policy and {CONFIG}",
            {tensor.name: tensor.shape for tensor in _tensors(policy)},
            dict.fromkeys(file.offset_keys(), hf.Source(file, WEIGHTS)),
        )


def load(folder: Path, policy: Policy, shardings: Any) -> Params:
    """Read a PEFT folder's adapter as float32.

    Args:
        folder: a PEFT folder.
        policy: policy with the adapter's settings.
        shardings: sharding of every leaf of `abstract(policy)`.

    Raises:
        ValueError: as `check_tensors`.
    """
    check_tensors(folder, policy)
    leaves: dict[tuple[str, ...], np.ndarray] = {
        path: np.empty(leaf.shape, leaf.dtype) for path, leaf in _leaves(abstract(policy)).items()
    }
    with _open(folder) as file:
        for tensor in _tensors(policy):
            stacked = leaves[tensor.path]
            stacked[tensor.layer] = file.get_tensor(tensor.name).T.reshape(stacked.shape[1:])
    return put(traverse_util.unflatten_dict(leaves), shardings)


def save(folder: Path, policy: Policy, adapter: Params, base: str) -> None:
    """Write a folder that PEFT and `load` read.

    All processes call this, and the first one writes.

    Args:
        folder: folder to write.
        policy: policy with the adapter's settings.
        adapter: the adapter.
        base: name of the base policy.
    """
    leaves = fetch(_leaves(adapter))
    if jax.process_index() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        tensor.name: np.ascontiguousarray(
            leaves[tensor.path][tensor.layer].reshape(tensor.shape[::-1]).T
        )
        for tensor in _tensors(policy)
    }
    lora = _lora(policy)
    # In every release of PEFT, absent keys have the values that apply here.
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "lora_dropout": 0.0,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [*lora.targets],
        "use_rslora": lora.rslora,
    }
    # Each file is replaced atomically.
    temporary_weights, temporary_config = (folder / f".{name}" for name in (WEIGHTS, CONFIG))
    hf.write_tensors(tensors, temporary_weights)
    with add_file_name(temporary_config):
        temporary_config.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(temporary_weights, folder / WEIGHTS)
    os.replace(temporary_config, folder / CONFIG)


class _Tensor(NamedTuple):
    """One tensor of the file, [outputs, inputs], and the layer of the leaf that it fills."""

    name: str
    shape: tuple[int, int]
    path: tuple[str, ...]
    layer: int


def _tensors(policy: Policy) -> Iterator[_Tensor]:
    leaves = _leaves(abstract(policy))
    for place in map(_PLACES.__getitem__, _targets(policy)):
        for letter in ("a", "b"):
            shape = leaves[*place.path, letter].shape
            split = 1 + (place.num_inputs if letter == "a" else 1)
            file_shape = math.prod(shape[split:]), math.prod(shape[1:split])
            for layer in range(shape[0]):
                module = f"base_model.model.model.layers.{layer}.{place.module}"
                name = f"{module}.lora_{letter.upper()}.weight"
                yield _Tensor(name, file_shape, (*place.path, letter), layer)


def _tree(policy: Policy, like: Params, make: Callable[[Any, _Place], Any]) -> Params:
    """Make a tree of the targets from their leaves in a tree like the parameters."""
    leaves = _leaves(like)
    places = {target: _PLACES[target] for target in _targets(policy)}
    if missing := [target for target, place in places.items() if place.path not in leaves]:
        raise ValueError(
            f"policy.lora.targets: {policy.config.architecture} has no {', '.join(missing)}; "
            "remove these targets"
        )
    if fused := [target for target, place in places.items() if hf.is_fused(policy, place.path)]:
        raise ValueError(
            f"policy.lora.targets: {policy.config.architecture} has {', '.join(fused)} inside of a "
            "fused matrix, which PEFT adapts as one; remove these targets"
        )
    return traverse_util.unflatten_dict(
        {place.path: make(leaves[place.path], place) for place in places.values()}
    )


def _factors(
    dims: tuple[Any, ...], place: _Place, rank: Any, make: Callable[[tuple[Any, ...]], Any]
) -> dict[str, Any]:
    """Make A and B from the dimensions [L, I.., O..] of a matrix, or from their names."""
    split = 1 + place.num_inputs
    return {"a": make((*dims[:split], rank)), "b": make((dims[0], rank, *dims[split:]))}


def _struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _leaves(tree: Params) -> dict[tuple[str, ...], Any]:
    return dict(traverse_util.flatten_dict(tree))


def _pairs(adapter: Params) -> dict[tuple[str, ...], Any]:
    """Pair of every matrix, by path."""
    return dict(traverse_util.flatten_dict(adapter, is_leaf=lambda _, node: "a" in node))


@partial(jax.jit, static_argnames="scale")
def _merged(
    w: Float[Array, "L ..."], a: Float[Array, "L ..."], b: Float[Array, "L R ..."], scale: float
) -> Array:
    L, R = b.shape[:2]
    update = jnp.matmul(
        a.reshape(L, -1, R), b.reshape(L, R, -1), precision=jax.lax.Precision.HIGHEST
    )
    return w.astype(jnp.float32) + scale * update.reshape(w.shape)


def _lora(policy: Policy) -> LoRA:
    if policy.lora is None:
        raise ValueError("expected a policy with an adapter; make it with Policy(config, lora)")
    return policy.lora


def _targets(policy: Policy) -> list[Target]:
    return [target for target in _PLACES if target in _lora(policy).targets]


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a PEFT folder with {CONFIG} at {folder}; set policy.adapter to one"
        )
    return read_json(path)


def _open(folder: Path) -> Any:
    path = folder / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"expected {WEIGHTS} and {CONFIG} in {folder}, found no {WEIGHTS}")
    return hf.open_weights(path)
