"""Load and save policies as Hugging Face folders: config.json and safetensors files.

Axes: V vocabulary, D width, N query heads, K key-value heads, H head size, F MLP width, L layers.

The file has more than 400 lines because loading and saving use one table of tensor names.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Sharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from areal_jax.json_files import read_json
from areal_jax.metrics.files import add_file_name
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import ADAPTER_CONFIG
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.language_models import find_tensors
from areal_jax.models.mxfp4 import find_quantized
from areal_jax.models.vision.tensor_names import TOWER_TENSORS
from areal_jax.parallel.sharding import fetch, put

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# Weight files of an earlier save.
_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
"""Files that `save` copies with the weights, so that other tools can use the policy."""

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_UNREAD = "rotary_emb.inv_freq"
"""Name ending of tensors in old files that are not read, since config.json decides them."""

SavedDtype = Literal["float32", "float16", "bfloat16"]

_FLOATS = {"F32", "F16", "BF16"}


class _Entry(NamedTuple):
    """Tensor name and layout of one leaf in a checkpoint."""

    name: str
    """Name with {} for the layer, and for the expert."""
    num_inputs: int
    """Number of leading input dimensions of a matrix, which is [outputs, inputs] in the file; 0:
    the layouts are the same.
    """
    is_reversed: bool = False
    """Whether the file has all dimensions in the opposite order."""


_ENTRIES: dict[tuple[str, ...], _Entry] = {
    ("embed",): _Entry(_EMBED, 0),
    ("norm",): _Entry("model.norm.weight", 0),
    ("head",): _Entry(_HEAD, 1),
    ("value",): _Entry("score.weight", 1),
    ("value_bias",): _Entry("score.bias", 0),
    ("layers", "attn_norm"): _Entry("model.layers.{}.input_layernorm.weight", 0),
    ("layers", "mlp_norm"): _Entry("model.layers.{}.post_attention_layernorm.weight", 0),
    # The names of GLM-4.
    ("layers", "attn_post_norm"): _Entry("model.layers.{}.post_self_attn_layernorm.weight", 0),
    ("layers", "mlp_post_norm"): _Entry("model.layers.{}.post_mlp_layernorm.weight", 0),
    ("layers", "attn", "q_a"): _Entry("model.layers.{}.self_attn.q_a_proj.weight", 1),
    ("layers", "attn", "q_b"): _Entry("model.layers.{}.self_attn.q_b_proj.weight", 1),
    ("layers", "attn", "kv_a"): _Entry("model.layers.{}.self_attn.kv_a_proj_with_mqa.weight", 1),
    ("layers", "attn", "kv_b"): _Entry("model.layers.{}.self_attn.kv_b_proj.weight", 1),
    ("layers", "attn", "q_a_norm"): _Entry("model.layers.{}.self_attn.q_a_layernorm.weight", 0),
    ("layers", "attn", "kv_a_norm"): _Entry("model.layers.{}.self_attn.kv_a_layernorm.weight", 0),
    ("layers", "attn", "q_a_bias"): _Entry("model.layers.{}.self_attn.q_a_proj.bias", 0),
    ("layers", "attn", "kv_a_bias"): _Entry("model.layers.{}.self_attn.kv_a_proj_with_mqa.bias", 0),
    ("layers", "attn", "q"): _Entry("model.layers.{}.self_attn.q_proj.weight", 1),
    ("layers", "attn", "k"): _Entry("model.layers.{}.self_attn.k_proj.weight", 1),
    ("layers", "attn", "v"): _Entry("model.layers.{}.self_attn.v_proj.weight", 1),
    ("layers", "attn", "o"): _Entry("model.layers.{}.self_attn.o_proj.weight", 2),
    ("layers", "attn", "q_bias"): _Entry("model.layers.{}.self_attn.q_proj.bias", 0),
    ("layers", "attn", "k_bias"): _Entry("model.layers.{}.self_attn.k_proj.bias", 0),
    ("layers", "attn", "v_bias"): _Entry("model.layers.{}.self_attn.v_proj.bias", 0),
    ("layers", "attn", "o_bias"): _Entry("model.layers.{}.self_attn.o_proj.bias", 0),
    ("layers", "attn", "q_norm"): _Entry("model.layers.{}.self_attn.q_norm.weight", 0),
    ("layers", "attn", "k_norm"): _Entry("model.layers.{}.self_attn.k_norm.weight", 0),
    ("layers", "mlp", "gate"): _Entry("model.layers.{}.mlp.gate_proj.weight", 1),
    ("layers", "mlp", "up"): _Entry("model.layers.{}.mlp.up_proj.weight", 1),
    ("layers", "mlp", "down"): _Entry("model.layers.{}.mlp.down_proj.weight", 1),
    ("layers", "mlp", "router"): _Entry("model.layers.{}.mlp.gate.weight", 1),
    ("layers", "mlp", "expert_gate"): _Entry("model.layers.{}.mlp.experts.{}.gate_proj.weight", 1),
    ("layers", "mlp", "expert_up"): _Entry("model.layers.{}.mlp.experts.{}.up_proj.weight", 1),
    ("layers", "mlp", "expert_down"): _Entry("model.layers.{}.mlp.experts.{}.down_proj.weight", 1),
    ("layers", "mlp", "shared", "gate"): _Entry(
        "model.layers.{}.mlp.shared_expert.gate_proj.weight", 1
    ),
    ("layers", "mlp", "shared", "up"): _Entry(
        "model.layers.{}.mlp.shared_expert.up_proj.weight", 1
    ),
    ("layers", "mlp", "shared", "down"): _Entry(
        "model.layers.{}.mlp.shared_expert.down_proj.weight", 1
    ),
    ("layers", "mlp", "shared_gate"): _Entry("model.layers.{}.mlp.shared_expert_gate.weight", 1),
    **{
        ("layers", "linear", name): _Entry(
            f"model.layers.{{}}.linear_attn.in_proj_{name}.weight", 1
        )
        for name in ("q", "k", "v", "z", "b", "a")
    },
    **{
        ("layers", "linear", f"conv_{name}"): _Entry(
            f"model.layers.{{}}.linear_attn.conv1d_{name}.weight", 0
        )
        for name in ("q", "k", "v")
    },
    ("layers", "linear", "a_log"): _Entry("model.layers.{}.linear_attn.A_log", 0),
    ("layers", "linear", "dt_bias"): _Entry("model.layers.{}.linear_attn.dt_bias", 0),
    ("layers", "linear", "norm"): _Entry("model.layers.{}.linear_attn.norm.weight", 0),
    ("layers", "linear", "o"): _Entry("model.layers.{}.linear_attn.out_proj.weight", 2),
    ("layers", "attn", "sinks"): _Entry("model.layers.{}.self_attn.sinks", 0),
    ("layers", "mlp", "selection_bias"): _Entry(
        "model.layers.{}.mlp.gate.e_score_correction_bias", 0
    ),
    ("layers", "mlp", "router_bias"): _Entry("model.layers.{}.mlp.gate.bias", 0),
    ("layers", "mlp", "expert_gate_bias"): _Entry(
        "model.layers.{}.mlp.experts.{}.gate_proj.bias", 0
    ),
    ("layers", "mlp", "expert_up_bias"): _Entry("model.layers.{}.mlp.experts.{}.up_proj.bias", 0),
    ("layers", "mlp", "expert_down_bias"): _Entry(
        "model.layers.{}.mlp.experts.{}.down_proj.bias", 0
    ),
    ("layers", "mlp", "gate_bias"): _Entry("model.layers.{}.mlp.gate_proj.bias", 0),
    ("layers", "mlp", "up_bias"): _Entry("model.layers.{}.mlp.up_proj.bias", 0),
    ("layers", "mlp", "down_bias"): _Entry("model.layers.{}.mlp.down_proj.bias", 0),
    **{path: _Entry(*tensor) for path, tensor in TOWER_TENSORS.items()},
}

_SCALAR_HEAD = {("value",), ("value_bias",)}


class Source(NamedTuple):
    """The open file of a tensor."""

    file: Any
    name: str
    """Name of the file, for errors."""


class _Tensor(NamedTuple):
    """One tensor of the checkpoint, or a part of one, and the part of a leaf that it fills."""

    name: str
    shape: tuple[int, ...]
    """Shape in the file, of the part."""
    stack_index: tuple[int, ...]
    """Layer, or layer and expert, in the leaf; empty if the tensor is the complete leaf."""
    num_inputs: int
    leaf_shape: tuple[int, ...]
    """Shape of the part of the leaf."""
    part: tuple[slice, ...] = ()
    """Part of the tensor in the file; empty: all."""
    file_shape: tuple[int, ...] = ()
    """Shape of the whole tensor in the file; empty: `shape`."""
    numbers: tuple[int, ...] = ()
    """Layer, or layer and expert, in the file."""
    num_groups: int = 1
    """Equal groups of the first dimension, of each of which `part` is a part."""

    def from_file(self, array: np.ndarray) -> np.ndarray:
        """Convert from the layout of the file to that of the leaf."""
        return (array.T if self.num_inputs else array).reshape(self.leaf_shape)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """Convert from the layout of the leaf to that of the file."""
        if self.num_inputs:
            array = array.reshape(self.shape[::-1]).T
        return np.ascontiguousarray(array.reshape(self.shape))

    def grouped(self, whole: np.ndarray) -> np.ndarray:
        """Return the whole tensor with a leading dimension for the groups."""
        return whole.reshape(self.num_groups, -1, *whole.shape[1:])

    def write(self, whole: np.ndarray, array: np.ndarray) -> None:
        """Write the part, in the layout of the file, to the whole tensor."""
        view = self.grouped(whole)[:, *self.part]
        view[...] = array.reshape(view.shape)

    def read(self, source: Source) -> np.ndarray:
        """Read the part of the leaf."""
        if not self.part:
            return self.from_file(source.file.get_tensor(self.name))
        header = source.file.get_slice(self.name)
        if self.num_groups > 1:
            return self.from_file(self.grouped(header[:])[:, *self.part].reshape(self.shape))
        if self.part[-1].step is None:
            return self.from_file(header[self.part])
        # safetensors reads no steps.
        return self.from_file(header[:][self.part])


def read_config(
    folder: Path,
    ignored_keys: Collection[str] = (),
    *,
    is_adapted: bool = False,
    long_rope: bool = False,
) -> ModelConfig:
    """Read a folder's config.json.

    Args:
        folder: a Hugging Face folder.
        ignored_keys: unsupported keys to ignore.
        is_adapted: whether the caller also reads an adapter in the folder.
        long_rope: as in `ModelConfig.from_hf`.

    Raises:
        FileNotFoundError: the folder has no config.json.
        ValueError: a key is not supported, or the folder has an adapter, which transformers would
            add to the weights.
    """
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a Hugging Face folder with {_CONFIG} at {folder}; set policy.path to one"
        )
    if not is_adapted and (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"expected a policy without adapter, but {folder} holds {ADAPTER_CONFIG}: "
            f"transformers would add it to the weights; set policy.adapter={folder} to train it, "
            "or move its files to another folder"
        )
    return ModelConfig.from_hf(read_json(path), str(path), ignored_keys, long_rope=long_rope)


def load(folder: Path, policy: Policy, shardings: Any, *, dtype: DTypeLike = np.float32) -> Params:
    """Read a folder's weights as parameters like `policy.abstract(dtype)`.

    Weights are read tensor by tensor: the host has at most one stacked leaf besides the shards of
    its devices. Supported are one model.safetensors, or several files with an index, in float32,
    float16, bfloat16 or MXFP4. A policy with a scalar head reads all but the head from the folder
    of a language model; the head is then zeros.

    Args:
        folder: a Hugging Face folder.
        policy: architecture.
        shardings: sharding of every parameter.
        dtype: dtype of matrices.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: a file is truncated, or tensors are missing, unexpected, or of the wrong shape
            or dtype; the message lists them with their files.
    """
    with ExitStack() as stack:
        files = {
            path.name: stack.enter_context(open_weights(path)) for path in _weight_files(folder)
        }
        opened = {
            tensor: Source(file, name)
            for name, file in files.items()
            for tensor in file.offset_keys()
        }
        _check_index(folder, files, opened)
        if policy.config.vision is None:
            # Families with interleaved matrices have their own layout of experts.
            splits = not policy.config.traits.interleaved
            opened = find_tensors(opened, str(folder), splits_experts=splits)
        quantized = find_quantized({name: source.file for name, source in opened.items()})
        for name, file in quantized.items():
            opened[name] = Source(file, opened.pop(f"{name}_blocks").name)
            del opened[f"{name}_scales"]
        abstract, layouts = _leaves(policy.abstract(dtype)), _leaves(shardings)
        fresh = (
            _SCALAR_HEAD if policy.config.is_scalar and not _is_scalar(folder, policy) else set()
        )
        stored = {path: leaf for path, leaf in abstract.items() if path not in fresh}
        _check(folder, policy, stored, opened)
        leaves = {
            path: _load_leaf(opened, _tensors(policy, path, leaf), leaf, layouts[path])
            if path in stored
            else put(np.zeros(leaf.shape, leaf.dtype), layouts[path])
            for path, leaf in abstract.items()
        }
    return traverse_util.unflatten_dict(leaves)


def save(
    folder: Path,
    policy: Policy,
    params: Params,
    tokenizer_folder: Path | None = None,
    *,
    dtype: SavedDtype = "float32",
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a folder that transformers and `load` read: config.json, weights, tokenizer files.

    Files are written to a temporary folder and then moved: a new folder appears atomically; in an
    existing one they replace weights and files of the same name, and other files stay. float32 is
    exact. If the parameters are on the devices of several processes, all processes call this, and
    the first one writes.

    Args:
        folder: folder to write.
        policy: architecture.
        params: parameters.
        tokenizer_folder: folder with the tokenizer's files and the original config.json, of which
            all unchanged keys are kept.
        dtype: dtype in the files.
        shard_bytes: maximum size of a file; larger weights are split into several files with an
            index, of which the host has one in memory at a time.
    """
    if jax.process_index() != 0:
        for _ in _to_files(policy, params):
            pass
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name in TOKENIZER_FILES:
            if tokenizer_folder is not None and (tokenizer_folder / name).is_file():
                (temporary / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(tokenizer_folder / name, temporary / name)
        _write_weights(
            temporary,
            _to_files(policy, params),
            _shards(policy, np.dtype(dtype).itemsize, shard_bytes),
            dtype,
        )
        if (
            policy.config.readout == "SequenceClassification"
            and policy.config.pad_token_id is not None
        ):
            _set_pad_token(temporary, policy.config.pad_token_id)
        with add_file_name(folder / _CONFIG):
            (temporary / _CONFIG).write_text(
                _format_config(policy, dtype, tokenizer_folder), encoding="utf-8"
            )
        if folder.exists():
            stale = {file.name for file in folder.iterdir() if _WEIGHT_FILES.fullmatch(file.name)}
            for file in [file for file in temporary.rglob("*") if file.is_file()]:
                destination = folder / file.relative_to(temporary)
                destination.parent.mkdir(exist_ok=True)
                os.replace(file, destination)
                stale.discard(file.name)
            for name in stale:
                (folder / name).unlink()
        else:
            temporary.chmod(0o755)  # mkdtemp makes folders that only their owner can read
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_scalar(folder: Path, policy: Policy) -> bool:
    return read_config(folder, policy.config.ignored_keys, is_adapted=True).is_scalar


def _format_config(policy: Policy, dtype: SavedDtype, folder: Path | None) -> str:
    """Format config.json; if it has not changed, return the text of the one in `folder`."""
    text, original = None, None
    if folder is not None and (folder / _CONFIG).is_file():
        text, original = (folder / _CONFIG).read_text(encoding="utf-8"), read_json(folder / _CONFIG)
    content = policy.config.to_hf(original)
    dtype_keys = [name for name in ("dtype", "torch_dtype") if name in content] or ["torch_dtype"]
    content |= dict.fromkeys(dtype_keys, dtype)
    if text is not None and content == original:
        return text
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _set_pad_token(folder: Path, pad_token_id: int) -> None:
    """Set the padding token of a tokenizer; transformers uses it to find the ends of texts."""
    file = folder / "tokenizer.json"
    added = read_json(file).get("added_tokens", []) if file.is_file() else []
    text = next((token["content"] for token in added if token["id"] == pad_token_id), None)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if text is None or not (file := folder / name).is_file():
            continue
        settings = read_json(file)
        before = settings.get("pad_token")
        if (before.get("content") if isinstance(before, dict) else before) != text:
            file.write_text(
                json.dumps(settings | {"pad_token": text}, indent=2, ensure_ascii=False) + "\n",
                encoding="utf-8",
            )


def _leaves(tree: Params) -> dict[tuple[str, ...], Any]:
    return dict(traverse_util.flatten_dict(tree))


def _weight_files(folder: Path) -> list[Path]:
    """Find the safetensors files of a folder: a single one, or those of the index, but not both."""
    has_single_file = (folder / _WEIGHTS).is_file()
    names = [_WEIGHTS]
    if (folder / _INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        if has_single_file and names != [_WEIGHTS]:
            raise ValueError(
                f"{folder}: expected {_WEIGHTS} or {_INDEX}, found both, with {len(names)} other "
                "files in the index; remove the older weights"
            )
    elif not has_single_file:
        found = sorted(file.name for file in folder.iterdir())
        raise FileNotFoundError(
            f"expected {_WEIGHTS} or {_INDEX} in {folder}, found {', '.join(found) or 'nothing'}"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder / _INDEX}: expected the listed files in the folder, {', '.join(missing)} not "
            "found; download the missing files"
        )
    return [folder / name for name in names]


def _tensors(
    policy: Policy, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct
) -> Iterator[_Tensor]:
    """Yield the tensors that fill one leaf, in the order of layers and experts."""
    if (fusion := _fusion(policy, path)) is None:
        yield from _own_tensors(policy, path, leaf)
        return
    (name, paths, step, num_groups), leaves = fusion, _leaves(policy.abstract())
    index, axis = paths.index(path), -1 if step else 0
    sizes = [next(_own_tensors(policy, each, leaves[each])).shape[axis] for each in paths]
    total, start, size = sum(sizes), sum(sizes[:index]) // num_groups, sizes[index] // num_groups
    span = slice(index, total, step) if step else slice(start, start + size)
    for tensor in _own_tensors(policy, path, leaf):
        rest = tuple(slice(None) for _ in tensor.shape[1:])
        yield tensor._replace(
            name=name.format(*tensor.numbers),
            part=(*rest, span) if step else (span, *rest),
            file_shape=(*tensor.shape[:-1], total) if step else (total, *tensor.shape[1:]),
            num_groups=num_groups,
        )


def _own_tensors(
    policy: Policy, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct
) -> Iterator[_Tensor]:
    """Yield the tensors of one leaf, as if none were fused with others."""
    entry = _ENTRIES[path]
    name = _name(policy, entry.name)
    num_stacked, num_inputs = name.count("{}"), entry.num_inputs
    if num_stacked < entry.name.count("{}"):
        # One tensor of all experts has the layout of the leaf.
        num_inputs = 0
    leaf_shape = leaf.shape[num_stacked:]
    shape = leaf_shape
    if entry.is_reversed:
        shape = leaf_shape[::-1]
    elif num_inputs:
        shape = math.prod(leaf_shape[num_inputs:]), math.prod(leaf_shape[:num_inputs])
    elif "attn" in path[:-1] and path[-1].endswith("_bias"):
        shape = (math.prod(leaf_shape),)
    elif path[-1].startswith("conv_"):
        # torch has a dimension for the inputs of a channel.
        shape = (math.prod(leaf_shape[:-1]), 1, leaf_shape[-1])
    layers = policy.config.layers_with(path[1:]) if path[0] == "layers" else range(leaf.shape[0])
    for index in np.ndindex(leaf.shape[:num_stacked]):
        numbers = (layers[index[0]], *index[1:]) if index else index
        named = name.format(*numbers)
        yield _Tensor(named, shape, index, num_inputs, leaf_shape, numbers=numbers)


def _fusion(
    policy: Policy, path: tuple[str, ...]
) -> tuple[str, tuple[tuple[str, ...], ...], int, int] | None:
    """Name of the tensor in which a leaf is fused with others, their paths, the number of
    interleaved leaves (0: they follow each other), and the number of groups in each of which they
    do; None: it has its own tensors.
    """
    traits, paths = policy.config.traits, {entry.name: path for path, entry in _ENTRIES.items()}
    linear = policy.config.linear
    num_heads = 1 if linear is None else linear.linear_num_key_heads
    for fused, is_interleaved, num_groups in (
        (traits.fused, False, 1),
        (traits.interleaved, True, 1),
        (traits.fused_by_head, False, num_heads),
    ):
        for name, parts in fused.items():
            if _ENTRIES[path].name in parts:
                leaves = tuple(paths[part] for part in parts)
                return name, leaves, len(parts) * is_interleaved, num_groups
    return None


class Fusion(NamedTuple):
    """A module of transformers whose matrix contains several leaves, along the outputs."""

    module: str
    """Name in a layer."""
    num_groups: int
    """Equal groups of outputs, in each of which the leaves follow each other."""


def find_fusion(policy: Policy, path: tuple[str, ...]) -> Fusion | None:
    """Return the module of which the files have a leaf as a part; None: it has its own."""
    found = _fusion(policy, path)
    if found is None:
        return None
    name, _, _, num_groups = found
    return Fusion(name.partition("{}.")[2].removesuffix(".weight"), num_groups)


def _name(policy: Policy, name: str) -> str:
    """The name of a tensor in the files of the policy's family."""
    return policy.config.traits.tensor_names.get(name, name)


def _weight_map(folder: Path) -> dict[str, str]:
    """Read the file of each tensor from the index."""
    index = read_json(folder / _INDEX)
    if not isinstance(weight_map := index.get("weight_map"), dict) or not all(
        isinstance(f, str) for f in weight_map.values()
    ):
        raise ValueError(
            f"{folder / _INDEX}: expected weight_map with the file of each tensor, found "
            f"{', '.join(index)}"
        )
    return weight_map


def _check_index(folder: Path, files: Mapping[str, Any], opened: Mapping[str, Source]) -> None:
    """Raise ValueError if two files have the same tensor, or the index does not match the files."""
    for name, file in files.items():
        if duplicates := [
            f"{tensor} in {name} and {opened[tensor].name}"
            for tensor in file.offset_keys()
            if opened[tensor].name != name
        ]:
            raise ValueError(
                f"{folder}: expected each tensor in one file, found {', '.join(duplicates[:5])}"
            )
    if (folder / _INDEX).is_file():
        listed = _weight_map(folder)
        misplaced = [
            tensor
            for tensor, file in listed.items()
            if tensor not in opened or opened[tensor].name != file
        ]
        unlisted = [
            tensor for tensor in opened if tensor not in listed and not tensor.endswith(_UNREAD)
        ]
        if wrong := misplaced + unlisted:
            entries = ", ".join(
                f"{tensor} in {listed.get(tensor, 'no file')}" for tensor in wrong[:5]
            )
            raise ValueError(
                f"{folder / _INDEX}: expected the file of each tensor, found another file for "
                f"{len(wrong)} tensors: {entries}"
            )


def open_weights(path: Path) -> Any:
    """Open a safetensors file and read its header.

    Raises:
        ValueError: the file is truncated or of another format.
    """
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        size = f"{path.stat().st_size:,} bytes"
        raise ValueError(
            f"{path}: expected a complete safetensors file, found {size} ({error}); download it "
            "again"
        ) from error


def _check(
    folder: Path,
    policy: Policy,
    stored: Mapping[tuple[str, ...], jax.ShapeDtypeStruct],
    opened: Mapping[str, Source],
) -> None:
    shapes = {
        tensor.name: tensor.file_shape or tensor.shape
        for path, leaf in stored.items()
        for tensor in _tensors(policy, path, leaf)
    }
    # Not read: a head that is replaced by a scalar head or the embedding, and RoPE frequencies of
    # old files, which config.json decides.
    embed_name, head_name = _name(policy, _EMBED), _name(policy, _HEAD)
    unread = {head_name} if policy.config.tie_word_embeddings or policy.config.is_scalar else set()
    found = {
        name: source
        for name, source in opened.items()
        if name not in unread and not name.endswith(_UNREAD) and not _is_extra(policy, name)
    }
    check_shapes(f"the weights in {folder} do not match its {_CONFIG}", shapes, found)
    if policy.config.tie_word_embeddings and not policy.config.is_scalar and head_name in opened:
        _check_tied(folder, opened, embed_name, head_name)


def _is_extra(policy: Policy, name: str) -> bool:
    """Whether a tensor belongs to a layer after the last one, and may."""
    if not policy.config.traits.has_unread_layers:
        return False
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if name.startswith("mtp."):
        return True
    return layer is not None and int(layer[1]) >= policy.config.num_hidden_layers


def _check_tied(
    folder: Path, opened: Mapping[str, Source], embed_name: str, head_name: str
) -> None:
    """Raise ValueError if a tied head differs from the embedding."""
    embed, head = opened[embed_name], opened[head_name]
    rows, head_rows = embed.file.get_slice(embed_name), head.file.get_slice(head_name)
    num_rows = _shape(rows)[0]
    spans = [slice(i, min(i + 4096, num_rows)) for i in range(0, num_rows, 4096)]
    if _shape(rows) != _shape(head_rows) or any(
        rows[span].tobytes() != head_rows[span].tobytes() for span in spans
    ):
        raise ValueError(
            f"{folder / _CONFIG}: expected {head_name} in {head.name} to equal {embed_name} in "
            f"{embed.name} with tie_word_embeddings=true, found another tensor; set "
            "tie_word_embeddings to false to read the head, or remove the tensor"
        )


def check_shapes(
    summary: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Source]
) -> None:
    """Check names, shapes and dtypes of tensors; only headers are read.

    Args:
        summary: first line of the error.
        expected: shape of each tensor, by name.
        found: open file of each tensor, by name.

    Raises:
        ValueError: with all tensors that are missing, unexpected, or of the wrong shape or dtype.
    """
    files = sorted({source.name for source in found.values()})
    searched = files[0] if len(files) == 1 else f"any of {len(files)} files"
    wrong = []
    for name, shape in expected.items():
        if name not in found:
            wrong.append(f"missing: {name} of shape {shape} in {searched}")
            continue
        header, place = found[name].file.get_slice(name), f"{name} in {found[name].name}"
        if _shape(header) != shape:
            wrong.append(f"expected shape {shape}, found {_shape(header)}: {place}")
        if header.get_dtype() not in _FLOATS:
            wrong.append(
                f"expected one of {', '.join(sorted(_FLOATS))}, found {header.get_dtype()}: {place}"
            )
    wrong += [
        f"unexpected: {name} of shape {_shape(source.file.get_slice(name))} in {source.name}"
        for name, source in found.items()
        if name not in expected
    ]
    if wrong:
        rest = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(f"{summary}:\n  " + "\n  ".join(wrong[:20]) + rest)


def _shape(header: Any) -> tuple[int, ...]:
    return tuple(header.get_shape())


def _load_leaf(
    opened: Mapping[str, Source],
    tensors: Iterator[_Tensor],
    leaf: jax.ShapeDtypeStruct,
    layout: Sharding,
) -> jax.Array:
    """Read every tensor of a leaf once, and keep the shards of this process's devices."""
    local = layout.addressable_devices_indices_map(leaf.shape).values()
    indices = {_key(index): index for index in local if index is not None}
    shards = {key: np.empty(layout.shard_shape(leaf.shape), leaf.dtype) for key in indices}
    for tensor in tensors:
        array = tensor.read(opened[tensor.name])
        for key, index in indices.items():
            num_stacked = len(tensor.stack_index)
            sizes = leaf.shape[:num_stacked]
            spans = [
                part.indices(size)[:2]
                for part, size in zip(index[:num_stacked], sizes, strict=True)
            ]
            if all(
                start <= i < stop
                for i, (start, stop) in zip(tensor.stack_index, spans, strict=True)
            ):
                target = tuple(
                    i - start for i, (start, _) in zip(tensor.stack_index, spans, strict=True)
                )
                shards[key][target] = array[index[num_stacked:]]
    return jax.make_array_from_callback(leaf.shape, layout, lambda index: shards[_key(index)])


def _key(index: tuple[slice, ...] | None) -> tuple[tuple[int | None, int | None], ...]:
    # Slices are not hashable before Python 3.12.
    return tuple((part.start, part.stop) for part in index or ())


def _file_parts(policy: Policy) -> Iterator[list[tuple[tuple[str, ...], _Tensor]]]:
    """Yield every tensor of the files as its parts, each with the path of its leaf."""
    leaves, done = _leaves(policy.abstract()), set()
    for path in leaves:
        fusion = _fusion(policy, path)
        paths = (path,) if fusion is None else fusion[1]
        if path not in done:
            done |= {*paths}
            columns = (_tensors(policy, each, leaves[each]) for each in paths)
            for tensors in zip(*columns, strict=True):
                yield list(zip(paths, tensors, strict=True))


def _to_files(policy: Policy, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor with its name in the file; the host has one layer of a leaf at a time."""
    leaves = _leaves(params)
    layer = lambda parts: tuple((path, tensor.stack_index[:1]) for path, tensor in parts)  # noqa: E731 (a key of groupby)
    for paths, group in itertools.groupby(_file_parts(policy), layer):
        arrays = {path: fetch(leaves[path][index]) for path, index in paths}
        for parts in group:
            filled = [
                tensor.to_file(arrays[path][tensor.stack_index[1:]]) for path, tensor in parts
            ]
            first = parts[0][1]
            if not first.part:
                yield first.name, filled[0]
                continue
            whole = np.empty(first.file_shape, filled[0].dtype)
            for (_, tensor), array in zip(parts, filled, strict=True):
                tensor.write(whole, array)
            yield first.name, whole


def _shards(policy: Policy, itemsize: int, shard_bytes: int) -> list[list[str]]:
    """Assign tensor names to files, in the order of `_to_files`.

    A tensor larger than `shard_bytes` has its own file.
    """
    shards, free_bytes = [], 0
    for parts in _file_parts(policy):
        tensor = parts[0][1]
        num_bytes = math.prod(tensor.file_shape or tensor.shape) * itemsize
        if not shards or num_bytes > free_bytes:
            shards.append([])
            free_bytes = shard_bytes
        shards[-1].append(tensor.name)
        free_bytes -= num_bytes
    return shards


def _write_weights(
    folder: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    shards: list[list[str]],
    dtype: SavedDtype,
) -> None:
    weight_map, num_bytes = {}, 0
    for i, names in enumerate(shards, start=1):
        file = _WEIGHTS if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        shard = {name: array.astype(dtype) for name, array in itertools.islice(tensors, len(names))}
        write_tensors(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
        num_bytes += sum(array.nbytes for array in shard.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        with add_file_name(folder / _INDEX):
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    try:
        # Readers refuse a file whose metadata does not name a framework.
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if match := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
        raise
