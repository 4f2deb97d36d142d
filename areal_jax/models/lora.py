"""LoRA adapters (arXiv:2106.09685) and their files in PEFT's format.

An adapter is a tree like the parameters, with a pair {"a", "b"} instead of every adapted matrix;
other leaves are absent.

Axes: L layers, E experts, I inputs of a matrix, O its outputs, R rank.

The file has more than 400 lines because loading and saving use one table of matrices.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from areal_jax.models.adapted import Adapted, AdaptedRows, AdapterStack
from areal_jax.models.config import ADAPTER_CONFIG as CONFIG
from areal_jax.models.config import LoRA, Target
from areal_jax.models.config_keys import Only, Rule, check_keys
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import fetch, put

WEIGHTS = "adapter_model.safetensors"


class _Place(NamedTuple):
    """Location of a target."""

    path: tuple[str, ...]
    """Path in the parameters."""
    module: str
    """Name in a layer of transformers' model; of experts, that of all together."""
    num_inputs: int = 1
    """Number of input dimensions of the matrix."""
    num_stacked: int = 1
    """Number of dimensions before them: layers, or layers and experts."""


_LATENT: Mapping[Target, str] = {
    "q_a_proj": "q_a",
    "q_b_proj": "q_b",
    "kv_a_proj_with_mqa": "kv_a",
    "kv_b_proj": "kv_b",
}

_LINEAR: tuple[Target, ...] = (
    *("in_proj_q", "in_proj_k", "in_proj_v"),
    *("in_proj_z", "in_proj_b", "in_proj_a"),
)

_MLP: Mapping[Target, str] = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}

_EXPERTS: Mapping[Target, str] = {
    "experts.gate_proj": "expert_gate",
    "experts.up_proj": "expert_up",
    "experts.down_proj": "expert_down",
}

_PLACES: Mapping[Target, tuple[_Place, ...]] = {
    "q_proj": (_Place(("layers", "attn", "q"), "self_attn.q_proj"),),
    "k_proj": (_Place(("layers", "attn", "k"), "self_attn.k_proj"),),
    "v_proj": (_Place(("layers", "attn", "v"), "self_attn.v_proj"),),
    "o_proj": (_Place(("layers", "attn", "o"), "self_attn.o_proj", num_inputs=2),),
    **{
        target: (
            _Place(("layers", "mlp", name), f"mlp.{target}"),
            _Place(("layers", "mlp", "shared", name), f"mlp.shared_expert.{target}"),
        )
        for target, name in _MLP.items()
    },
    **{
        target: (_Place(("layers", "attn", name), f"self_attn.{target}"),)
        for target, name in _LATENT.items()
    },
    **{
        target: (_Place(("layers", "linear", target[-1]), f"linear_attn.{target}"),)
        for target in _LINEAR
    },
    "out_proj": (_Place(("layers", "linear", "o"), "linear_attn.out_proj", num_inputs=2),),
    **{
        target: (_Place(("layers", "mlp", name), "mlp.experts", num_stacked=2),)
        for target, name in _EXPERTS.items()
    },
}
"""Matrices of each target; a policy may have some of them alone."""

_FUSED: Mapping[str, tuple[Target, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkv": _LINEAR[:3],
    "in_proj_qkvz": _LINEAR[:4],
    "in_proj_ba": _LINEAR[4:],
    "experts.gate_up_proj": ("experts.gate_proj", "experts.up_proj"),
    "experts.down_proj": ("experts.down_proj",),
}
"""Matrices of transformers that contain several targets, along the outputs.

Here each target has its own factors. The file has one pair for the fused matrix: the rows of A are
those of all targets, and B is block-diagonal, so that the rank is that of all targets together.
An adapter of PEFT itself has one A for all targets, which are read with copies of it.

A matrix of all experts has one pair too, A [E · R, I] and B [O, R · E] (`ParamWrapper` of PEFT)."""

_JOINED_EXPERTS = r".*\.gate_up_proj"
"""Key of PEFT for the rank of "experts.gate_up_proj", of factors that single experts had."""

_NOTHING = Only((None, {}, [], False))
"""Values for an unset key in the releases of PEFT."""

# Supported keys of adapter_config.json, with their meaning in PEFT 0.21.
_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "r",
            "lora_alpha",
            "target_modules",
            "target_parameters",
            "use_rslora",
            "init_lora_weights",
            "base_model_name_or_path",
            "rank_pattern",
            "alpha_pattern",
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
    # The tensors say what is excluded.
    "exclude_modules": "harmless",
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
            "layers_to_transform",
            "layer_replication",
        ),
        _NOTHING,
    ),
    **dict.fromkeys(
        (
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

    pairs, places = _pairs(abstract(policy)), _places(policy)

    def sample(path: tuple[str, ...], key: PRNGKeyArray) -> dict[str, Array]:
        a, b = pairs[path]["a"].shape, pairs[path]["b"].shape
        bound = math.prod(a[places[path].num_stacked : -1]) ** -0.5
        return {"a": jax.random.uniform(key, a, jnp.float32, -bound, bound), "b": jnp.zeros(b)}

    keys = jax.random.split(key, len(pairs))
    return traverse_util.unflatten_dict(
        {path: sample(path, key) for path, key in zip(pairs, keys, strict=True)}
    )


def attach(policy: Policy, base: Params, adapter: Params) -> Params:
    """Combine base and adapter into parameters with `Adapted` matrices, for the decoder.

    Args:
        policy: policy with an adapter.
        base: parameters of the base; layers stacked, or a tuple.
        adapter: the adapter, with layers in the same form.
    """
    scale = _lora(policy).scale
    return _attached(base, adapter, lambda w, a, b: Adapted(w, a, b, scale))


def attach_rows(base: Params, adapters: Params, scales: Float[Array, "B"]) -> Params:
    """Combine base and an adapter for each row of a batch into parameters for the decoder.

    Args:
        base: parameters of the base; layers stacked.
        adapters: factors [B, L, ...].
        scales: scale of each row's adapter.

    Raises:
        ValueError: adapters of experts.
    """
    _refuse_experts(adapters)

    def join(w: Any, a: Array, b: Array) -> AdaptedRows:
        # Layers come first, because the decoder scans over them.
        by_layer = jnp.broadcast_to(scales, (a.shape[1], len(scales)))
        return AdaptedRows(w, jnp.moveaxis(a, 1, 0), jnp.moveaxis(b, 1, 0), by_layer)

    return _attached(base, adapters, join)


def attach_stack(base: Params, adapters: Params, scales: Any) -> Params:
    """Combine base and several adapters into parameters, for `assign_rows`.

    Args:
        base: parameters of the base, with `layers` as a tuple.
        adapters: factors [A, ...], with layers as a tuple.
        scales: scale of each adapter, [A].

    Raises:
        ValueError: adapters of experts.
    """
    _refuse_experts(adapters)
    return _attached(base, adapters, lambda w, a, b: AdapterStack(w, a, b, scales))


def _refuse_experts(adapters: Params) -> None:
    names = {path[-2].key for path, _ in jax.tree_util.tree_leaves_with_path(adapters)}
    if found := [target for target, name in _EXPERTS.items() if name in names]:
        raise ValueError(
            "expected adapters without experts, because rows of a batch have different adapters, "
            f"found {', '.join(found)}; leave them out of the targets, or use an engine and a "
            "trainer of one adapter"
        )


def _attached(base: Any, adapter: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    if isinstance(base, dict):
        return base | {n: _attached(base[n], inner, join) for n, inner in adapter.items()}
    if isinstance(base, tuple):
        return tuple(_attached(*pair, join) for pair in zip(base, adapter, strict=True))
    return join(base, adapter["a"], adapter["b"])


def pad(adapter: Params, like: Params) -> Params:
    """Pad an adapter with zeros to the rank and the matrices of another, which changes no update.

    Args:
        adapter: factors.
        like: leaves with shapes, which no dimension of the adapter exceeds.
    """

    def walk(found: Any, like: Any) -> Any:
        if isinstance(like, dict):
            return {name: walk((found or {}).get(name), inner) for name, inner in like.items()}
        if isinstance(like, tuple):
            return tuple(walk(*pair) for pair in zip(found, like, strict=True))
        if found is None:
            return jnp.zeros(like.shape, like.dtype)
        sizes = zip(found.shape, like.shape, strict=True)
        return jnp.pad(found, [(0, most - size) for size, most in sizes])

    return walk(adapter, like)


def cut(adapter: Params, like: Params) -> Params:
    """Return the part of a padded adapter that has these shapes; the inverse of `pad`."""

    def walk(found: Any, like: Any) -> Any:
        if isinstance(like, dict):
            return {name: walk(found[name], inner) for name, inner in like.items()}
        return found[tuple(slice(size) for size in like.shape)]

    return walk(adapter, like)


def merge(policy: Policy, base: Params, adapter: Params) -> Params:
    """Merge the adapter into the base: w + scale · A · B, in float32.

    The result is on the host and is computed matrix by matrix, so that devices never have the
    merged policy in memory besides the base.
    """
    scale, places = _lora(policy).scale, _places(policy)
    pairs = _pairs(adapter)

    def merge_leaf(path: tuple[str, ...], w: Array | np.ndarray) -> np.ndarray:
        if path in pairs:
            a, b = pairs[path]["a"], pairs[path]["b"]
            w = _merged(w, a, b, scale=scale, num_stacked=places[path].num_stacked)
        return np.asarray(fetch(w), np.float32)

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
    known, parameters = get_args(Target), config.get("target_parameters") or []
    with _open(folder) as file:
        tensors = [name for name in file.offset_keys() if "." in name]
    if single := next((name for name in tensors if re.search(r"\.experts\.\d+\.", name)), None):
        raise ValueError(
            f"{folder / WEIGHTS}: expected one tensor for all experts of a layer, found {single}; "
            "load the adapter with PEFT 0.19 or later and transformers 5, which joins them, and "
            "save it again"
        )
    if isinstance(targets, str):
        # A regular expression; the tensors say what it has matched.
        targets = sorted({name.split(".")[-3] for name in tensors} - {"experts", "base_layer"})
    if isinstance(targets, list) or parameters:
        names = [*(targets or []), *map(_target_of_parameter, parameters)]
        targets = [each for name in names for each in _FUSED.get(name, (name,))]
    if not isinstance(targets, list) or not targets or not set(targets) <= set(known):
        raise ValueError(
            f"{path}: expected target_modules and target_parameters to be lists with items of "
            f"{', '.join(known)}, found {targets!r}"
        )
    ordered = tuple(target for target in known if target in targets)
    if not isinstance(rslora := config.get("use_rslora", False), bool | None):
        raise ValueError(f"{path}: expected use_rslora to be true or false, found {rslora!r}")
    lora = LoRA(rank=rank, alpha=float(alpha), targets=ordered, rslora=bool(rslora))
    found = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if found not in (({}, {}), _patterns(lora, [*found[0]])):
        raise ValueError(
            f"{path}: expected rank_pattern and alpha_pattern to be empty, or as written here for "
            f"fused matrices, found rank_pattern={found[0]!r} and alpha_pattern={found[1]!r}"
        )
    return lora


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
    summary = f"{folder / WEIGHTS} does not match the policy and {CONFIG}"
    if policy.config.vision is not None:
        summary += ", which adapts the language model alone (no matrix of the vision tower)"
    with _open(folder) as file:
        hf.check_shapes(
            summary,
            {tensor.name: tensor.shape for tensor in _tensors(policy)}
            | _fused_shapes(policy, _read_json(folder)),
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
        for fused in _fused_modules(policy):
            a, b = (file.get_tensor(name) for name in fused.names)
            for place, factors in zip(fused.places, fused.split(a, b, folder), strict=True):
                for letter, factor in zip("ab", factors, strict=True):
                    stacked = leaves[*place.path, letter]
                    stacked[fused.layer] = factor.swapaxes(-1, -2).reshape(stacked.shape[1:])
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
    lora, fused_names = _lora(policy), set[str]()
    for fused in _fused_modules(policy):
        pairs = [
            [leaves[*place.path, letter][fused.layer] for letter in "ab"] for place in fused.places
        ]
        tensors |= dict(zip(fused.names, fused.join(pairs), strict=True))
        fused_names.add(fused.module)
    parts = {target for name in fused_names for target in _FUSED[name]}
    ranks, alphas = _patterns(lora, sorted(fused_names - {*lora.targets}))
    parameters = _target_parameters(policy)
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
        "target_modules": _target_modules(policy, {*lora.targets} - parts | fused_names),
        "use_rslora": lora.rslora,
    }
    if parameters:
        config |= {"target_parameters": parameters}
    if ranks:
        config |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    # Each file is replaced atomically.
    temporary_weights, temporary_config = (folder / f".{name}" for name in (WEIGHTS, CONFIG))
    hf.write_tensors(tensors, temporary_weights)
    with add_file_name(temporary_config):
        temporary_config.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(temporary_weights, folder / WEIGHTS)
    os.replace(temporary_config, folder / CONFIG)


def _layers(policy: Policy) -> str:
    """Name of the layers in transformers' model."""
    return "model.layers" if policy.config.vision is None else "model.language_model.layers"


def _target_modules(policy: Policy, names: Collection[str]) -> list[str] | str:
    """Return the modules to adapt as PEFT reads them: names, or a pattern of their full names.

    Modules of a vision tower have the same names as those of layers.
    """
    if policy.config.vision is None:
        hidden = {*_MLP} if policy.config.moe is not None else set[str]()
        return sorted(name for name in {*names} - hidden if not name.startswith("experts."))
    pattern = "|".join(sorted(re.escape(place.module) for place in _places(policy).values()))
    return rf"{re.escape(_layers(policy))}\.\d+\.({pattern})"


def _target_parameters(policy: Policy) -> list[str]:
    """Return the parameters to adapt that are no modules for PEFT, by the end of their names.

    They are those of experts, and of MLPs beside them: PEFT takes the names of such modules for
    those of experts in transformers 4 (`_MOE_TARGET_MODULE_MAPPING`).
    """
    if policy.config.moe is None:
        return []
    experts = {f"mlp.{fused.module}" for fused in _fused_modules(policy) if fused.num_experts}
    mlps = {
        f"{_module(policy, place)}.weight"
        for place in _places(policy).values()
        if place.path[1] == "mlp" and place.num_stacked == 1
    }
    return sorted(experts | mlps)


def _target_of_parameter(name: str) -> str:
    """Return the target of an item of `target_parameters`, as in `_target_parameters`."""
    leaf = name.removesuffix(".weight")
    return leaf.rpartition(".")[2] if leaf != name else f"experts.{name.rpartition('.')[2]}"


def _module(policy: Policy, place: _Place) -> str:
    """Return the name of a matrix in a layer of transformers' model."""
    if policy.config.traits.has_shared_gate:
        return place.module
    return place.module.replace(".shared_expert.", ".shared_experts.")


class _Tensor(NamedTuple):
    """One tensor of the file, [outputs, inputs], and the layer of the leaf that it fills."""

    name: str
    shape: tuple[int, int]
    path: tuple[str, ...]
    layer: int


def _tensors(policy: Policy) -> Iterator[_Tensor]:
    leaves = _leaves(abstract(policy))
    for place in _places(policy).values():
        if place.num_stacked > 1 or hf.find_fusion(policy, place.path) is not None:
            continue
        for letter in ("a", "b"):
            shape = leaves[*place.path, letter].shape
            split = 1 + (place.num_inputs if letter == "a" else 1)
            file_shape = math.prod(shape[split:]), math.prod(shape[1:split])
            for i, layer in enumerate(policy.config.layers_with(place.path[1:])):
                module = f"{_layers(policy)}.{layer}.{_module(policy, place)}"
                name = f"base_model.model.{module}.lora_{letter.upper()}.weight"
                yield _Tensor(name, file_shape, (*place.path, letter), i)


class _Fused(NamedTuple):
    """The factors of a fused matrix of one layer in the file."""

    module: str
    names: tuple[str, str]
    """Names of A and B."""
    layer: int
    places: tuple[_Place, ...]
    sizes: tuple[int, ...]
    """Outputs of each target."""
    num_inputs: int
    rank: int
    """Rank of each target."""
    num_groups: int
    """Equal groups of outputs, in each of which the targets follow each other."""
    num_experts: int | None
    """None: the matrix is not one of experts."""

    def join(self, pairs: Sequence[Sequence[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        """Make A [ranks, inputs] and the block-diagonal B [outputs, ranks].

        Of all experts, their A follow each other, and the columns of their B take turns.
        """
        if self.num_experts is None:
            return self._join(pairs)
        by_expert = [self._join([(a[i], b[i]) for a, b in pairs]) for i in range(self.num_experts)]
        a, b = (np.stack(each) for each in zip(*by_expert, strict=True))
        return a.reshape(-1, self.num_inputs), np.moveaxis(b, 0, -1).reshape(sum(self.sizes), -1)

    def split(
        self, a: np.ndarray, b: np.ndarray, folder: Path
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return A and B of each target, of experts [E, ...].

        Raises:
            ValueError: B is not block-diagonal.
        """
        if self.num_experts is None:
            return self._split(a, b, folder)
        a = a.reshape(self.num_experts, -1, self.num_inputs)
        b = np.moveaxis(b.reshape(len(b), -1, self.num_experts), -1, 0)
        by_expert = [self._split(*pair, folder) for pair in zip(a, b, strict=True)]
        return [
            (np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs]))
            for pairs in zip(*by_expert, strict=True)
        ]

    def _join(self, pairs: Sequence[Sequence[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        a = np.concatenate([a.T for a, _ in pairs])
        b = np.zeros((sum(self.sizes), len(a)), np.float32)
        for (rows, columns), (_, factor) in zip(self._blocks(), pairs, strict=True):
            b[rows, columns] = factor.reshape(self.rank, -1).T
        return np.ascontiguousarray(a), b

    def _split(
        self, a: np.ndarray, b: np.ndarray, folder: Path
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        if len(a) == self.rank:
            return [(a, b[rows]) for rows, _ in self._blocks()]
        rest = b.copy()
        for block in self._blocks():
            rest[block] = 0
        if rest.any():
            raise ValueError(
                f"{folder / WEIGHTS}: expected {self.names[1]} to be block-diagonal, with a block "
                f"for each of {', '.join(_FUSED[self.module])}, found other numbers"
            )
        return [(a[columns], b[rows, columns]) for rows, columns in self._blocks()]

    def _blocks(self) -> list[tuple[np.ndarray, slice]]:
        """Rows and columns of B of each target."""
        sizes = np.array(self.sizes) // self.num_groups
        groups = np.arange(self.num_groups)[:, None] * sizes.sum()
        return [
            (
                (groups + np.arange(end - size, end)).ravel(),
                slice(i * self.rank, (i + 1) * self.rank),
            )
            for i, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True))
        ]


def _fused_modules(policy: Policy) -> Iterator[_Fused]:
    leaves, targets = _leaves(abstract(policy)), _targets(policy)
    for module, parts in _FUSED.items():
        places = tuple(_PLACES[part][0] for part in parts)
        fusion = _fusion(policy, module)
        if parts[0] not in targets or fusion is None:
            continue
        shapes, stacked = [leaves[*each.path, "b"].shape for each in places], places[0].num_stacked
        for i, layer in enumerate(policy.config.layers_with(places[0].path[1:])):
            name = f"base_model.model.{_layers(policy)}.{layer}.{fusion.module}"
            yield _Fused(
                module,
                (f"{name}.lora_A.weight", f"{name}.lora_B.weight"),
                i,
                places,
                tuple(math.prod(shape[stacked + 1 :]) for shape in shapes),
                leaves[*places[0].path, "a"].shape[stacked],
                _lora(policy).rank,
                fusion.num_groups,
                shapes[0][1] if stacked > 1 else None,
            )


def _fusion(policy: Policy, module: str) -> hf.Fusion | None:
    """Return the fused module of this name, if the files of the family have it."""
    (first, *others), moe = _FUSED[module], policy.config.moe
    if first in _EXPERTS:
        if moe is None:
            return None
        # PEFT puts the second wrapper of a module around the first one.
        inner = ".base_layer" if others and "experts.down_proj" in _lora(policy).targets else ""
        is_interleaved = others and policy.config.traits.interleaved
        groups = moe.moe_intermediate_size if is_interleaved else 1
        return hf.Fusion(f"{_PLACES[first][0].module}{inner}", groups)
    found = hf.find_fusion(policy, _PLACES[first][0].path)
    return found if found is not None and found.module.endswith(f".{module}") else None


def _fused_shapes(policy: Policy, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of fused matrices in a file."""
    ranks, shapes = config.get("rank_pattern") or {}, dict[str, tuple[int, ...]]()
    for fused in _fused_modules(policy):
        rank = ranks.get(fused.module, fused.rank)
        rank *= fused.num_experts or 1
        shapes |= dict(
            zip(fused.names, ((rank, fused.num_inputs), (sum(fused.sizes), rank)), strict=True)
        )
    return shapes


def _patterns(lora: LoRA, modules: Sequence[str]) -> tuple[dict[str, int], dict[str, float]]:
    """Rank and alpha of fused matrices, whose scale is that of their targets."""
    counts = {name: len(_FUSED.get(name, ())) for name in modules}
    ranks = {name: count * lora.rank for name, count in counts.items()}
    power = 0.5 if lora.rslora else 1.0
    return ranks, {name: lora.alpha * count**power for name, count in counts.items()}


def find_targets(policy: Policy) -> tuple[Target, ...]:
    """Return the targets of which a policy has matrices."""
    leaves = _leaves(policy.abstract())
    return tuple(
        target
        for target, places in _PLACES.items()
        if any(place.path in leaves for place in places)
    )


def find_batched_targets(policy: Policy) -> tuple[Target, ...]:
    """Return the targets of which each row of a batch may have an adapter of its own."""
    return tuple(target for target in find_targets(policy) if target not in _EXPERTS)


def _tree(policy: Policy, like: Params, make: Callable[[Any, _Place], Any]) -> Params:
    """Make a tree of the targets from their leaves in a tree like the parameters."""
    leaves, targets = _leaves(like), _targets(policy)
    has = find_targets(policy)
    if missing := [target for target in targets if target not in has]:
        raise ValueError(
            f"policy.lora.targets: {policy.config.architecture} has no {', '.join(missing)}; "
            f"choose from {', '.join(has)}"
        )
    for module, parts in _FUSED.items():
        lacking = sorted(set(parts) - set(targets))
        is_fused = _fusion(policy, module) is not None
        if is_fused and lacking and len(lacking) < len(parts):
            raise ValueError(
                f"policy.lora.targets: {policy.config.architecture} has {', '.join(parts)} in one "
                f"matrix, {module}; add {', '.join(lacking)}, or remove the others"
            )
    return traverse_util.unflatten_dict(
        {path: make(leaves[path], place) for path, place in _places(policy).items()}
    )


def _factors(
    dims: tuple[Any, ...], place: _Place, rank: Any, make: Callable[[tuple[Any, ...]], Any]
) -> dict[str, Any]:
    """Make A and B from the dimensions [L, I.., O..] or [L, E, I, O] of a matrix, or from their
    names.
    """
    stacked, split = place.num_stacked, place.num_stacked + place.num_inputs
    return {"a": make((*dims[:split], rank)), "b": make((*dims[:stacked], rank, *dims[split:]))}


def _struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _leaves(tree: Params) -> dict[tuple[str, ...], Any]:
    return dict(traverse_util.flatten_dict(tree))


def _pairs(adapter: Params) -> dict[tuple[str, ...], Any]:
    """Pair of every matrix, by path."""

    def is_pair(_: object, node: Params) -> bool:
        # Linear attention has a matrix a.
        return not isinstance(node.get("a", {}), dict)

    return dict(traverse_util.flatten_dict(adapter, is_leaf=is_pair))


@partial(jax.jit, static_argnames=("scale", "num_stacked"))
def _merged(
    w: Float[Array, "L ..."],
    a: Float[Array, "L ..."],
    b: Float[Array, "L ..."],
    *,
    scale: float,
    num_stacked: int,
) -> Array:
    stacked, R = b.shape[:num_stacked], b.shape[num_stacked]
    update = jnp.matmul(
        a.reshape(*stacked, -1, R), b.reshape(*stacked, R, -1), precision=jax.lax.Precision.HIGHEST
    )
    return w.astype(jnp.float32) + scale * update.reshape(w.shape)


def _lora(policy: Policy) -> LoRA:
    if policy.lora is None:
        raise ValueError("expected a policy with an adapter; make it with Policy(config, lora)")
    return policy.lora


def _targets(policy: Policy) -> list[Target]:
    return [target for target in _PLACES if target in _lora(policy).targets]


def _places(policy: Policy) -> dict[tuple[str, ...], _Place]:
    """Return the matrices with adapters, by path."""
    leaves = _leaves(policy.abstract())
    places = [place for target in _targets(policy) for place in _PLACES[target]]
    return {place.path: place for place in places if place.path in leaves}


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a PEFT folder with {CONFIG} at {folder}; set policy.adapter to one"
        )
    config = read_json(path)
    for name in ("rank_pattern", "alpha_pattern"):
        if _JOINED_EXPERTS in (pattern := config.get(name) or {}):
            pattern["experts.gate_up_proj"] = pattern.pop(_JOINED_EXPERTS)
    return config


def _open(folder: Path) -> Any:
    path = folder / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"expected {WEIGHTS} and {CONFIG} in {folder}, found no {WEIGHTS}")
    return hf.open_weights(path)
