"""LoRA adapters (arXiv:2106.09685): what is trained beside frozen weights, and PEFT's files of it.

An adapter is a tree like the parameters, with a pair {"a", "b"} in the place of every matrix that
has one.
Axes: L layers, I inputs of a matrix, O its outputs, R rank.
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
    """Where a target lies."""

    path: tuple[str, ...]
    """In the parameters."""
    module: str
    """In a layer of transformers' model."""
    num_inputs: int
    """Leading dimensions of the matrix that it is multiplied along."""


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
"""PEFT writes nothing in any of these ways, whichever the release prefers."""

# What each key of PEFT's file does in PEFT 0.21.
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
    # What a file says of itself, and how PEFT begins, which the weights have behind them.
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
    # Read by PEFT beside others alone, which are refused.
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

_BEGUN_BESIDE_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights under which PEFT leaves the base as it is. Others (PiSSA, OLoRA,
CorDA, LoftQ, LoRA-GA) take what the adapter begins with out of the base, and MiCA trains one factor
alone."""


def abstract(policy: Policy) -> Params:
    """ShapeDtypeStruct of every leaf of the policy's adapter; float32.

    Raises ValueError naming a target that the architecture has no matrix for."""
    return _tree(
        policy,
        policy.abstract(),
        lambda leaf, place: _factors(leaf.shape, place, _lora(policy).rank, _struct),
    )


def axes(policy: Policy) -> Params:
    """Logical axis names of every leaf of the policy's adapter."""
    return _tree(policy, policy.axes(), lambda names, place: _factors(names, place, "rank", tuple))


def init(policy: Policy, key: PRNGKeyArray) -> Params:
    """A fresh adapter, which changes nothing yet: A uniform within 1 / sqrt(I), PEFT's
    kaiming_uniform(a=sqrt(5)); B zero."""

    def fresh(pair: Mapping[str, jax.ShapeDtypeStruct], key: PRNGKeyArray) -> dict[str, Array]:
        a, b = pair["a"].shape, pair["b"].shape
        bound = math.prod(a[1:-1]) ** -0.5
        return {"a": jax.random.uniform(key, a, jnp.float32, -bound, bound), "b": jnp.zeros(b)}

    pairs = _pairs(abstract(policy))
    keys = jax.random.split(key, len(pairs))
    return traverse_util.unflatten_dict(
        {path: fresh(pair, key) for (path, pair), key in zip(pairs.items(), keys, strict=True)}
    )


def attach(policy: Policy, base: Params, adapter: Params) -> Params:
    """The base's parameters with `Adapted` matrices, which the decoder reads; layers stacked in
    both, or a tuple in both."""
    scale = _lora(policy).scale

    def walk(base: Any, adapter: Any) -> Any:
        if isinstance(base, dict):
            return base | {name: walk(base[name], inner) for name, inner in adapter.items()}
        if isinstance(base, tuple):
            return tuple(walk(*pair) for pair in zip(base, adapter, strict=True))
        return Adapted(base, adapter["a"], adapter["b"], scale)

    return walk(base, adapter)


def merge(policy: Policy, base: Params, adapter: Params) -> Params:
    """Parameters of a policy without adapter that computes the same: w + scale · A · B, in float32.

    Matrix by matrix, on the host: the devices never hold the merged policy beside the base."""
    scale = _lora(policy).scale
    pairs = _pairs(adapter)

    def whole(path: tuple[str, ...], w: Array | np.ndarray) -> np.ndarray:
        found = fetch(_merged(w, pairs[path]["a"], pairs[path]["b"], scale) if path in pairs else w)
        return np.asarray(found, np.float32)

    merged = {path: whole(path, w) for path, w in _leaves(base).items()}
    return traverse_util.unflatten_dict(merged)


def read_config(folder: Path, ignored_keys: Collection[str] = ()) -> LoRA:
    """Read a PEFT folder's adapter_config.json.

    Args:
        ignored_keys: keys that are passed over instead of refused.

    Raises:
        ValueError: naming the keys that are not supported."""
    config, path = _read_json(folder), folder / CONFIG
    # The same setting names keys of config.json.
    check_keys(
        config,
        _RULES,
        {name for name in ignored_keys if _RULES.get(name) != "read"},
        str(path),
        "a LoRA adapter",
    )
    if (begun := config.get("init_lora_weights", True)) not in _BEGUN_BESIDE_THE_BASE:
        raise ValueError(
            f"{path}: init_lora_weights={begun!r} is not supported: it does not belong to the "
            "base as that is, but to one that "
            "PEFT has changed. Save it as a plain one, by "
            "save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(
            f"{path}: expected r to be a positive integer and lora_alpha a number; came "
            f"{rank!r} "
            f"and {alpha!r}"
        )
    known = get_args(Target)
    if not isinstance(targets, list) or not targets or not set(targets) <= set(known):
        raise ValueError(
            f"{path}: expected target_modules to be a list of some of {', '.join(known)}; came "
            f"{targets!r}"
        )
    named = tuple(target for target in known if target in targets)
    if not isinstance(rslora := config.get("use_rslora", False), bool | None):
        raise ValueError(f"{path}: expected use_rslora to be true or false; came {rslora!r}")
    return LoRA(rank=rank, alpha=float(alpha), targets=named, rslora=bool(rslora))


def base_of(folder: Path) -> str | None:
    """The policy beside which a PEFT folder's adapter was trained, where it names one."""
    return _read_json(folder).get("base_model_name_or_path")


def require_base(folder: Path, *names: str) -> None:
    """ValueError where a PEFT folder's adapter says that it was trained beside another policy than
    the one with these names.

    A hub name and a folder are the same policy where their last parts agree; an adapter that names
    none fits any."""
    came = base_of(folder)
    if came and Path(came).name not in {Path(name).name for name in names}:
        raise ValueError(
            f"{folder / CONFIG}: expected an adapter of {names[0]!r}, came "
            f"base_model_name_or_path={came!r}; set policy.path "
            "to that, or correct the file where both are the same policy"
        )


def require_tensors(folder: Path, policy: Policy) -> None:
    """ValueError listing every missing, unexpected, mis-shaped or non-float tensor of a PEFT
    folder; reads headers only."""
    with _opened(folder) as file:
        hf.require_shapes(
            f"{folder / WEIGHTS} does not fit the policy and {CONFIG}",
            {tensor.name: tensor.shape for tensor in _tensors(policy)},
            dict.fromkeys(file.offset_keys(), hf.Source(file, WEIGHTS)),
        )


def load(folder: Path, policy: Policy, shardings: Any) -> Params:
    """Read a PEFT folder's adapter as float32, laid out by `shardings`, a tree like
    `abstract(policy)`.

    Raises ValueError where `require_tensors` does."""
    require_tensors(folder, policy)
    leaves: dict[tuple[str, ...], np.ndarray] = {
        path: np.empty(leaf.shape, leaf.dtype) for path, leaf in _leaves(abstract(policy)).items()
    }
    with _opened(folder) as file:
        for tensor in _tensors(policy):
            stacked = leaves[tensor.path]
            stacked[tensor.layer] = file.get_tensor(tensor.name).T.reshape(stacked.shape[1:])
    return put(traverse_util.unflatten_dict(leaves), shardings)


def save(folder: Path, policy: Policy, adapter: Params, base: str) -> None:
    """Write a folder that PEFT, and `load`, read back. Of several processes all call it, and the
    first one writes.

    Args: base: name of the policy that the adapter was trained beside."""
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
    # What is not said has the value that is computed here, in every release of PEFT.
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
    # Each written aside and moved into place whole.
    weights_aside, config_aside = (folder / f".{name}" for name in (WEIGHTS, CONFIG))
    hf.write_tensors(tensors, weights_aside)
    with add_file_name(config_aside):
        config_aside.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(weights_aside, folder / WEIGHTS)
    os.replace(config_aside, folder / CONFIG)


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
            cut = 1 + (place.num_inputs if letter == "a" else 1)
            in_file = math.prod(shape[cut:]), math.prod(shape[1:cut])
            for layer in range(shape[0]):
                name = f"base_model.model.model.layers.{layer}.{place.module}.lora_{letter.upper()}.weight"
                yield _Tensor(name, in_file, (*place.path, letter), layer)


def _tree(policy: Policy, like: Params, make: Callable[[Any, _Place], Any]) -> Params:
    """`make` of every target's leaf in a tree like the parameters."""
    leaves = _leaves(like)
    places = {target: _PLACES[target] for target in _targets(policy)}
    if missing := [target for target, place in places.items() if place.path not in leaves]:
        raise ValueError(
            f"policy.lora.targets: {policy.config.architecture} has no {', '.join(missing)}; "
            "leave out what it lacks"
        )
    return traverse_util.unflatten_dict(
        {place.path: make(leaves[place.path], place) for place in places.values()}
    )


def _factors(
    dims: tuple[Any, ...], place: _Place, rank: Any, make: Callable[[tuple[Any, ...]], Any]
) -> dict[str, Any]:
    """What belongs to A and to B, from the dimensions [L, I.., O..] of a matrix, or from their
    names."""
    cut = 1 + place.num_inputs
    return {"a": make((*dims[:cut], rank)), "b": make((dims[0], rank, *dims[cut:]))}


def _struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _leaves(tree: Params) -> dict[tuple[str, ...], Any]:
    return dict(traverse_util.flatten_dict(tree))


def _pairs(adapter: Params) -> dict[tuple[str, ...], Any]:
    """The pair of every matrix, by its path."""
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
        raise ValueError("the policy has no adapter; give it one as Policy(config, lora)")
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


def _opened(folder: Path) -> Any:
    path = folder / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"expected {WEIGHTS} beside {CONFIG} in {folder}, found none")
    return hf.open_weights(path)
