"""Policies in and out of Hugging Face folders: config.json and safetensors files, as transformers
writes them.

Axes: V vocabulary, D width, N query heads, K key-value heads, H head size, F MLP width, L layers.
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
from areal_jax.parallel.sharding import fetch, put

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# Weights that a folder may hold of an earlier save.
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")

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
)
"""What `save` takes along of a folder, so that other tools can talk to the policy at once."""

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_UNREAD = "rotary_emb.inv_freq"
"""Ending of the names of tensors in old files that follow from config.json."""

SavedDtype = Literal["float32", "float16", "bfloat16"]

_FLOATS = {"F32", "F16", "BF16"}


class _Entry(NamedTuple):
    """Where one leaf lives in a checkpoint."""

    name: str
    """With {} for the layer, and for the expert, where there is one tensor for each."""
    num_inputs: int
    """Leading dimensions that a matrix is multiplied along; the file holds [outputs, inputs], flat.
    0: as it is."""


_ENTRIES: dict[tuple[str, ...], _Entry] = {
    ("embed",): _Entry(_EMBED, 0),
    ("norm",): _Entry("model.norm.weight", 0),
    ("head",): _Entry(_HEAD, 1),
    ("value",): _Entry("score.weight", 1),
    ("value_bias",): _Entry("score.bias", 0),
    ("layers", "attn_norm"): _Entry("model.layers.{}.input_layernorm.weight", 0),
    ("layers", "mlp_norm"): _Entry("model.layers.{}.post_attention_layernorm.weight", 0),
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
    ("layers", "mlp", "gate_bias"): _Entry("model.layers.{}.mlp.gate_proj.bias", 0),
    ("layers", "mlp", "up_bias"): _Entry("model.layers.{}.mlp.up_proj.bias", 0),
    ("layers", "mlp", "down_bias"): _Entry("model.layers.{}.mlp.down_proj.bias", 0),
}

_SCALAR_HEAD = {("value",), ("value_bias",)}


class _Tensor(NamedTuple):
    """One tensor of the checkpoint and the leaf, or the part of a leaf, that it fills."""

    name: str
    shape: tuple[int, ...]
    """In the file."""
    place: tuple[int, ...]
    """Layer, or layer and expert, in the leaf; empty where the tensor is all of it."""
    num_inputs: int
    leaf_shape: tuple[int, ...]
    """In the policy, of that place."""

    def from_file(self, array: np.ndarray) -> np.ndarray:
        return (array.T if self.num_inputs else array).reshape(self.leaf_shape)

    def to_file(self, array: np.ndarray) -> np.ndarray:
        if self.num_inputs:
            array = array.reshape(self.shape[::-1]).T
        return np.ascontiguousarray(array.reshape(self.shape))


def read_config(
    folder: Path, ignored_keys: Collection[str] = (), *, is_adapted: bool = False
) -> ModelConfig:
    """Read a folder's config.json.

    Args:
        ignored_keys: keys that are passed over instead of refused.
        is_adapted: whether an adapter in the folder is read too.

    Raises:
        ValueError: naming the keys that are not supported, or an adapter, which transformers would
            add to the weights."""
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"expected a Hugging Face folder with {_CONFIG} at {folder}; set policy.path to one"
        )
    if not is_adapted and (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder} holds {ADAPTER_CONFIG}: expected a policy alone, found a LoRA adapter, "
            "which transformers "
            f"would add to the weights; set policy.adapter={folder} to train it, or move its "
            "files to another folder"
        )
    return ModelConfig.from_hf(read_json(path), str(path), ignored_keys)


def load(folder: Path, policy: Policy, shardings: Any, *, dtype: DTypeLike = np.float32) -> Params:
    """Read a folder's weights as parameters like `policy.abstract(dtype)`, laid out by `shardings`,
    a tree like it.

    Reads tensor by tensor: the host never holds more than one stacked leaf besides what lies on the
    devices. Takes one model.safetensors or several files with an index, in float32, float16 or
    bfloat16. Of a language model's folder a policy with a scalar head takes all but the head, which
    is then fresh: zeros. Raises ValueError naming a file that is cut off, or listing every missing,
    unexpected, mis-shaped or non-float tensor with its file."""
    with ExitStack() as stack:
        files = {
            path.name: stack.enter_context(open_weights(path)) for path in _weight_files(folder)
        }
        opened = {
            tensor: Source(file, name)
            for name, file in files.items()
            for tensor in file.offset_keys()
        }
        _check_places(folder, files, opened)
        abstract, layouts = _leaves(policy.abstract(dtype)), _leaves(shardings)
        fresh = (
            _SCALAR_HEAD if policy.config.is_scalar and not _is_scalar(folder, policy) else set()
        )
        stored = {path: leaf for path, leaf in abstract.items() if path not in fresh}
        _check(folder, policy, stored, opened)
        leaves = {
            path: _load_leaf(opened, _tensors(path, leaf), leaf, layouts[path])
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
    """Write a folder that transformers, and `load`, read back: config.json, the weights, and the
    tokenizer's files.

    config.json keeps every key of the one in `tokenizer_folder` but those that differ for this
    policy.

    Weights of more than `shard_bytes` go into several files with an index; the host holds one of
    them at a time. The files are written aside and moved into place whole: a new folder appears at
    once; in an existing one they replace its weights and their namesakes, and whatever else lies
    there stays. float32 is exact.

    Where the parameters lie on the devices of several processes, all of them call it, and the first
    one writes."""
    if jax.process_index() != 0:
        for _ in _to_files(policy, params):
            pass
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name in TOKENIZER_FILES:
            if tokenizer_folder is not None and (tokenizer_folder / name).is_file():
                (aside / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(tokenizer_folder / name, aside / name)
        _write_weights(
            aside,
            _to_files(policy, params),
            _shards(policy, np.dtype(dtype).itemsize, shard_bytes),
            dtype,
        )
        if (
            policy.config.readout == "SequenceClassification"
            and policy.config.pad_token_id is not None
        ):
            _set_pad_token(aside, policy.config.pad_token_id)
        with add_file_name(folder / _CONFIG):
            (aside / _CONFIG).write_text(
                _written_config(policy, dtype, tokenizer_folder), encoding="utf-8"
            )
        if folder.exists():
            stale = {file.name for file in folder.iterdir() if _OURS.fullmatch(file.name)}
            for file in [file for file in aside.rglob("*") if file.is_file()]:
                place = folder / file.relative_to(aside)
                place.parent.mkdir(exist_ok=True)
                os.replace(file, place)
                stale.discard(file.name)
            for name in stale:
                (folder / name).unlink()
        else:
            aside.chmod(0o755)  # mkdtemp's folders are for their owner alone
            os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_scalar(folder: Path, policy: Policy) -> bool:
    return read_config(folder, policy.config.ignored_keys, is_adapted=True).is_scalar


def _written_config(policy: Policy, dtype: SavedDtype, original: Path | None) -> str:
    """The text of config.json: as it was in the folder `original`, but for what has changed
    since."""
    text, given = None, None
    if original is not None and (original / _CONFIG).is_file():
        text, given = (
            (original / _CONFIG).read_text(encoding="utf-8"),
            read_json(original / _CONFIG),
        )
    written = policy.config.to_hf(given)
    spellings = [name for name in ("dtype", "torch_dtype") if name in written] or ["torch_dtype"]
    written |= dict.fromkeys(spellings, dtype)
    return (
        text
        if text is not None and written == given
        else json.dumps(written, indent=2, ensure_ascii=False) + "\n"
    )


def _set_pad_token(folder: Path, pad_token_id: int) -> None:
    """Make the tokenizer in a folder pad with a token, so that transformers sees where the texts of
    a batch end."""
    file = folder / "tokenizer.json"
    added = read_json(file).get("added_tokens", []) if file.is_file() else []
    text = next((token["content"] for token in added if token["id"] == pad_token_id), None)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if text is None or not (file := folder / name).is_file():
            continue
        given = read_json(file)
        before = given.get("pad_token")
        if (before.get("content") if isinstance(before, dict) else before) != text:
            file.write_text(
                json.dumps(given | {"pad_token": text}, indent=2, ensure_ascii=False) + "\n",
                encoding="utf-8",
            )


def _leaves(tree: Params) -> dict[tuple[str, ...], Any]:
    return dict(traverse_util.flatten_dict(tree))


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the only one, or those that the index lists. ValueError
    where it has both."""
    is_whole = (folder / _WEIGHTS).is_file()
    names = [_WEIGHTS]
    if (folder / _INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        if is_whole and names != [_WEIGHTS]:
            raise ValueError(
                f"{folder} holds {_WEIGHTS} and {_INDEX} with {len(names)} other files, of which "
                "some tools read the one and "
                "some the others; remove the older weights"
            )
    elif not is_whole:
        found = sorted(file.name for file in folder.iterdir())
        raise FileNotFoundError(
            f"expected {_WEIGHTS} or {_INDEX} in {folder}; found {', '.join(found) or 'nothing'}"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(
            f"{folder / _INDEX} lists {', '.join(missing)}, which the folder does not hold"
        )
    return [folder / name for name in names]


def _tensors(path: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> Iterator[_Tensor]:
    """The tensors that fill one leaf, in the order of layers and of experts."""
    entry = _ENTRIES[path]
    num_places = entry.name.count("{}")
    leaf_shape = leaf.shape[num_places:]
    cut = entry.num_inputs
    shape = (math.prod(leaf_shape[cut:]), math.prod(leaf_shape[:cut])) if cut else leaf_shape
    if path[-1].endswith("_bias"):
        shape = (math.prod(leaf_shape),)
    for place in np.ndindex(leaf.shape[:num_places]):
        yield _Tensor(entry.name.format(*place), shape, place, cut, leaf_shape)


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says."""
    index = read_json(folder / _INDEX)
    if not isinstance(weight_map := index.get("weight_map"), dict) or not all(
        isinstance(f, str) for f in weight_map.values()
    ):
        raise ValueError(
            f"{folder / _INDEX}: expected weight_map, the file of each tensor; found "
            f"{', '.join(index)}"
        )
    return weight_map


def _check_places(folder: Path, files: Mapping[str, Any], opened: Mapping[str, Source]) -> None:
    """ValueError where two files hold the same tensor, or the index places a tensor where it is
    not."""
    for name, file in files.items():
        if twice := [
            f"{tensor} in {name} and {opened[tensor].name}"
            for tensor in file.offset_keys()
            if opened[tensor].name != name
        ]:
            raise ValueError(
                f"{folder}: expected each tensor in one file; came {', '.join(twice[:5])}"
            )
    if (folder / _INDEX).is_file():
        placed = _weight_map(folder)
        elsewhere = [
            tensor
            for tensor, file in placed.items()
            if tensor not in opened or opened[tensor].name != file
        ]
        unlisted = [
            tensor for tensor in opened if tensor not in placed and not tensor.endswith(_UNREAD)
        ]
        if wrong := elsewhere + unlisted:
            places = ", ".join(
                f"{tensor} in {placed.get(tensor, 'no file')}" for tensor in wrong[:5]
            )
            raise ValueError(
                f"{folder / _INDEX} names another file than the one that holds it for "
                f"{len(wrong)} tensors: {places}"
            )


class Source(NamedTuple):
    """Where a tensor is read from."""

    file: Any
    name: str


def open_weights(path: Path) -> Any:
    """A safetensors file of which nothing but the header is read yet. ValueError where it is cut
    off, or none."""
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        size = f"{path.stat().st_size:,} bytes"
        raise ValueError(
            f"{path}: expected a whole safetensors file, came {size} that are none ({error}); "
            "get it anew"
        ) from error


def _check(
    folder: Path,
    policy: Policy,
    stored: Mapping[tuple[str, ...], jax.ShapeDtypeStruct],
    opened: Mapping[str, Source],
) -> None:
    shapes = {
        tensor.name: tensor.shape
        for path, leaf in stored.items()
        for tensor in _tensors(path, leaf)
    }
    # A head in whose place there is another one, or the embedding, is not read; and old files hold
    # RoPE's frequencies, which follow from config.json.
    known = {_HEAD} if policy.config.tie_word_embeddings or policy.config.is_scalar else set()
    found = {
        name: source
        for name, source in opened.items()
        if name not in known and not name.endswith(_UNREAD)
    }
    require_shapes(f"the weights in {folder} do not fit its {_CONFIG}", shapes, found)
    if policy.config.tie_word_embeddings and not policy.config.is_scalar and _HEAD in opened:
        _check_tied(folder, opened[_EMBED], opened[_HEAD])


def _check_tied(folder: Path, embed: Source, head: Source) -> None:
    """ValueError where the head differs from the embedding that it is tied to."""
    ours, theirs = embed.file.get_slice(_EMBED), head.file.get_slice(_HEAD)
    spans = [slice(i, min(i + 4096, _shape(ours)[0])) for i in range(0, _shape(ours)[0], 4096)]
    if _shape(ours) != _shape(theirs) or any(
        ours[span].tobytes() != theirs[span].tobytes() for span in spans
    ):
        raise ValueError(
            f"{folder / _CONFIG}: tie_word_embeddings=true, but {_HEAD} in {head.name} differs "
            f"from {_EMBED} in {embed.name}; "
            "set tie_word_embeddings to false to read the head, or remove the tensor"
        )


def require_shapes(
    complaint: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Source]
) -> None:
    """One ValueError for all tensors that are missing, unexpected, mis-shaped or no floats; reads
    headers only."""
    files = sorted({source.name for source in found.values()})
    searched = files[0] if len(files) == 1 else f"any of {len(files)} files"
    wrong = []
    for name, shape in expected.items():
        if name not in found:
            wrong.append(f"missing: {name} of shape {shape} in {searched}")
            continue
        header, where = found[name].file.get_slice(name), f"{name} in {found[name].name}"
        if _shape(header) != shape:
            wrong.append(f"expected shape {shape}, came {_shape(header)}: {where}")
        if header.get_dtype() not in _FLOATS:
            wrong.append(
                f"expected one of {', '.join(sorted(_FLOATS))}, came {header.get_dtype()}: {where}"
            )
    wrong += [
        f"unexpected: {name} of shape {_shape(source.file.get_slice(name))} in {source.name}"
        for name, source in found.items()
        if name not in expected
    ]
    if wrong:
        rest = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(f"{complaint}:\n  " + "\n  ".join(wrong[:20]) + rest)


def _shape(header: Any) -> tuple[int, ...]:
    return tuple(header.get_shape())


def _load_leaf(
    opened: Mapping[str, Source],
    tensors: Iterator[_Tensor],
    leaf: jax.ShapeDtypeStruct,
    layout: Sharding,
) -> jax.Array:
    """Read every tensor of a leaf once, and keep of it what this process's devices hold."""
    held = layout.addressable_devices_indices_map(leaf.shape).values()
    indices = {_key(index): index for index in held if index is not None}
    parts = {key: np.empty(layout.shard_shape(leaf.shape), leaf.dtype) for key in indices}
    for tensor in tensors:
        array = tensor.from_file(opened[tensor.name].file.get_tensor(tensor.name))
        for key, index in indices.items():
            spans = [part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True)][
                : len(tensor.place)
            ]
            if all(start <= i < stop for i, (start, stop) in zip(tensor.place, spans, strict=True)):
                here = tuple(i - start for i, (start, _) in zip(tensor.place, spans, strict=True))
                parts[key][here] = array[index[len(tensor.place) :]]
    return jax.make_array_from_callback(leaf.shape, layout, lambda index: parts[_key(index)])


def _key(index: tuple[slice, ...] | None) -> tuple[tuple[int | None, int | None], ...]:
    # Slices are not hashable before Python 3.12.
    return tuple((part.start, part.stop) for part in index or ())


def _to_files(policy: Policy, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its name in the file, one layer of a leaf at a time on the host."""
    leaves = _leaves(params)
    for path, abstract in _leaves(policy.abstract()).items():
        leaf = leaves[path]
        for layer, tensors in itertools.groupby(
            _tensors(path, abstract), lambda tensor: tensor.place[:1]
        ):
            part = fetch(leaf[layer])
            for tensor in tensors:
                yield tensor.name, tensor.to_file(part[tensor.place[1:]])


def _shards(policy: Policy, itemsize: int, shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file, in the order of `_to_files`; a tensor larger than a file
    has one for itself."""
    shards, room = [], 0
    for path, leaf in _leaves(policy.abstract()).items():
        for tensor in _tensors(path, leaf):
            num_bytes = math.prod(tensor.shape) * itemsize
            if not shards or num_bytes > room:
                shards.append([])
                room = shard_bytes
            shards[-1].append(tensor.name)
            room -= num_bytes
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
    """Write a safetensors file. OSError, which names it, where the disk does not take it."""
    try:
        # Readers of this format look for who wrote it, and refuse a file that does not say.
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if match := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
        raise
