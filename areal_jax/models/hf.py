"""Policies in and out of Hugging Face folders: config.json and model.safetensors, as transformers writes them.

Axes: V vocabulary, D width, N query heads, K key-value heads, H head size, F MLP width, L layers.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Sharding
from jax.typing import DTypeLike
from safetensors import safe_open
from safetensors.numpy import save_file

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Params, Policy

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What `save` takes along of a folder, so that other tools can talk to the policy at once."""

SavedDtype = Literal["float32", "float16", "bfloat16"]

_FLOATS = {"F32", "F16", "BF16"}


class _Entry(NamedTuple):
    """Where one leaf lives in a checkpoint."""

    name: str
    """With {layer} where there is one tensor per layer."""
    num_inputs: int
    """Leading dimensions that a matrix is multiplied along; the file holds [outputs, inputs], flat. 0: as it is."""


_ENTRIES: dict[tuple[str, ...], _Entry] = {
    ("embed",): _Entry("model.embed_tokens.weight", 0),
    ("norm",): _Entry("model.norm.weight", 0),
    ("head",): _Entry("lm_head.weight", 1),
    ("layers", "attn_norm"): _Entry("model.layers.{layer}.input_layernorm.weight", 0),
    ("layers", "mlp_norm"): _Entry("model.layers.{layer}.post_attention_layernorm.weight", 0),
    ("layers", "attn", "q"): _Entry("model.layers.{layer}.self_attn.q_proj.weight", 1),
    ("layers", "attn", "k"): _Entry("model.layers.{layer}.self_attn.k_proj.weight", 1),
    ("layers", "attn", "v"): _Entry("model.layers.{layer}.self_attn.v_proj.weight", 1),
    ("layers", "attn", "o"): _Entry("model.layers.{layer}.self_attn.o_proj.weight", 2),
    ("layers", "attn", "q_bias"): _Entry("model.layers.{layer}.self_attn.q_proj.bias", 0),
    ("layers", "attn", "k_bias"): _Entry("model.layers.{layer}.self_attn.k_proj.bias", 0),
    ("layers", "attn", "v_bias"): _Entry("model.layers.{layer}.self_attn.v_proj.bias", 0),
    ("layers", "attn", "q_norm"): _Entry("model.layers.{layer}.self_attn.q_norm.weight", 0),
    ("layers", "attn", "k_norm"): _Entry("model.layers.{layer}.self_attn.k_norm.weight", 0),
    ("layers", "mlp", "gate"): _Entry("model.layers.{layer}.mlp.gate_proj.weight", 1),
    ("layers", "mlp", "up"): _Entry("model.layers.{layer}.mlp.up_proj.weight", 1),
    ("layers", "mlp", "down"): _Entry("model.layers.{layer}.mlp.down_proj.weight", 1),
}


class _Tensor(NamedTuple):
    """One tensor of the checkpoint and the leaf, or the layer of a leaf, that it fills."""

    name: str
    shape: tuple[int, ...]
    """In the file."""
    layer: int | None
    num_inputs: int
    leaf_shape: tuple[int, ...]
    """In the policy, of one layer."""

    def from_file(self, array: np.ndarray) -> np.ndarray:
        return (array.T if self.num_inputs else array).reshape(self.leaf_shape)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        if self.num_inputs:
            array = array.reshape(self.shape[::-1]).T
        return np.ascontiguousarray(array.reshape(self.shape))


def read_config(folder: Path) -> ModelConfig:
    """Read a folder's config.json. ValueError names the setting that is not supported."""
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"expected a Hugging Face folder with {_CONFIG} at {folder}; set policy.path to one")
    return ModelConfig.from_hf(json.loads(path.read_text()), source=str(path))


def load(folder: Path, policy: Policy, shardings: Any, *, dtype: DTypeLike = np.float32) -> Params:
    """Read a folder's weights as parameters like `policy.abstract(dtype)`, laid out by `shardings`, a tree like it.

    Reads tensor by tensor: the host never holds more than one stacked leaf besides what lies on the devices.
    Takes one model.safetensors or several files with an index, in float32, float16 or bfloat16.
    Raises ValueError listing every missing, unexpected, mis-shaped or non-float tensor."""
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="np")) for path in _weight_files(folder)]
        opened = {tensor: file for file in files for tensor in file.offset_keys()}
        _check(folder, policy, opened)
        layouts = _leaves(shardings)
        leaves = {
            path: _load_leaf(opened, _tensors(policy.config, path, leaf), leaf, layouts[path])
            for path, leaf in _leaves(policy.abstract(dtype)).items()
        }
    return traverse_util.unflatten_dict(leaves)


def save(
    folder: Path, policy: Policy, params: Params, tokenizer_folder: Path | None = None, *, dtype: SavedDtype = "float32"
) -> None:
    """Write a folder that transformers, and `load`, read back: config.json, model.safetensors, and the tokenizer's files.

    The files are written aside and moved into place whole: a new folder appears at once; in an existing one they
    replace their namesakes, and whatever else lies there stays. float32 is exact."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name in TOKENIZER_FILES:
            if tokenizer_folder is not None and (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, aside / name)
        tensors = {name: array.astype(dtype) for name, array in _to_files(policy, params)}
        # Readers of this format look for who wrote it, and refuse a file that does not say.
        save_file(tensors, aside / _WEIGHTS, metadata={"format": "pt"})
        (aside / _CONFIG).write_text(json.dumps(policy.config.to_hf() | {"torch_dtype": dtype}, indent=2) + "\n")
        if folder.exists():
            for file in aside.iterdir():
                os.replace(file, folder / file.name)
        else:
            aside.chmod(0o755)  # mkdtemp's folders are for their owner alone
            os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _leaves(tree: Params) -> dict[tuple[str, ...], Any]:
    return dict(traverse_util.flatten_dict(tree))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the only one, or those that the index lists."""
    if (folder / _WEIGHTS).is_file():
        names = [_WEIGHTS]
    elif (folder / _INDEX).is_file():
        names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    else:
        found = sorted(file.name for file in folder.iterdir())
        raise FileNotFoundError(f"expected {_WEIGHTS} or {_INDEX} in {folder}; found {', '.join(found) or 'nothing'}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder / _INDEX} lists {', '.join(missing)}, which the folder does not hold")
    return [folder / name for name in names]


def _tensors(config: ModelConfig, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> Iterator[_Tensor]:
    """The tensors that fill one leaf, in the order of layers."""
    entry = _ENTRIES[path]
    stacked = path[0] == "layers"
    leaf_shape = leaf.shape[1:] if stacked else leaf.shape
    cut = entry.num_inputs
    shape = (math.prod(leaf_shape[cut:]), math.prod(leaf_shape[:cut])) if cut else leaf_shape
    if path[-1].endswith("_bias"):
        shape = (math.prod(leaf_shape),)
    for layer in range(config.num_hidden_layers) if stacked else [None]:
        yield _Tensor(entry.name.format(layer=layer), shape, layer, cut, leaf_shape)


def _check(folder: Path, policy: Policy, opened: Mapping[str, Any]) -> None:
    """One error for all that is wrong with a checkpoint, before anything is read."""
    wrong, expected = [], set()
    for path, leaf in _leaves(policy.abstract()).items():
        for tensor in _tensors(policy.config, path, leaf):
            expected.add(tensor.name)
            if tensor.name not in opened:
                wrong.append(f"missing: {tensor.name}")
                continue
            found = opened[tensor.name].get_slice(tensor.name)
            if tuple(found.get_shape()) != tensor.shape:
                wrong.append(f"expected shape {tensor.shape}, came {tuple(found.get_shape())}: {tensor.name}")
            if found.get_dtype() not in _FLOATS:
                wrong.append(f"expected one of {', '.join(sorted(_FLOATS))}, came {found.get_dtype()}: {tensor.name}")
    # A tied head that a file repeats is not read, and old files hold RoPE's frequencies, which follow from config.json.
    known = {"lm_head.weight"} if policy.config.tie_word_embeddings else set()
    wrong += [
        f"unexpected: {name}" for name in opened if name not in expected | known and not name.endswith("rotary_emb.inv_freq")
    ]
    if wrong:
        rest = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(f"the weights in {folder} do not fit its {_CONFIG}:\n  " + "\n  ".join(wrong[:20]) + rest)


def _load_leaf(
    opened: Mapping[str, Any], tensors: Iterator[_Tensor], leaf: jax.ShapeDtypeStruct, layout: Sharding
) -> jax.Array:
    """Read every tensor of a leaf once, and keep of it what this process's devices hold."""
    held = layout.addressable_devices_indices_map(leaf.shape).values()
    indices = {_key(index): index for index in held if index is not None}
    parts = {key: np.empty(layout.shard_shape(leaf.shape), leaf.dtype) for key in indices}
    for tensor in tensors:
        array = tensor.from_file(opened[tensor.name].get_tensor(tensor.name))
        for key, index in indices.items():
            if tensor.layer is None:
                parts[key][...] = array[index]
            else:
                start, stop, _ = index[0].indices(leaf.shape[0])
                if start <= tensor.layer < stop:
                    parts[key][tensor.layer - start] = array[index[1:]]
    return jax.make_array_from_callback(leaf.shape, layout, lambda index: parts[_key(index)])


def _key(index: tuple[slice, ...] | None) -> tuple[tuple[int | None, int | None], ...]:
    # Slices are not hashable before Python 3.12.
    return tuple((part.start, part.stop) for part in index or ())


def _to_files(policy: Policy, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its name in the file, one leaf at a time on the host."""
    leaves = _leaves(params)
    for path, abstract in _leaves(policy.abstract()).items():
        leaf = np.asarray(leaves[path])
        for tensor in _tensors(policy.config, path, abstract):
            yield tensor.name, tensor.to_file(leaf if tensor.layer is None else leaf[tensor.layer])
