"""Vision-language policies against transformers, whose results parity_vision/make.py has stored."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from areal_jax.json_files import read_json
from areal_jax.models import hf, lora
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.vision.image_processor import ImageGrid
from areal_jax.models.vision.layout import patch_layout, rope_offset, rope_positions
from areal_jax.models.vision.tower import ImageInputs

FIXTURES = Path(__file__).parent.parent / "parity_vision"
ADAPTERS = FIXTURES.with_name("parity_peft")
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


class Original(NamedTuple):
    """A checkpoint, and the results of transformers with it."""

    policy: Policy
    params: Params
    expected: dict[str, np.ndarray]
    grids: list[list[ImageGrid]]
    """Of the images of each row."""


@cache
def original(family: str) -> Original:
    folder = FIXTURES / family
    policy = Policy(hf.read_config(folder))
    placed = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), policy.abstract())
    params = hf.load(folder, policy, placed)
    expected = load_file(folder / "expected.safetensors")
    grids = iter(ImageGrid(*grid) for grid in expected["grids"].tolist())
    return Original(
        policy, params, expected, [[next(grids) for _ in range(n)] for n in expected["counts"]]
    )


def is_image(family: str) -> np.ndarray:
    policy, _, expected, _ = original(family)
    assert policy.config.vision is not None
    return expected["tokens"] == policy.config.vision.image_token_id


def packed(family: str) -> tuple[dict[str, jax.Array], ImageInputs]:
    """Pack both rows into one, with padding of tokens and patches."""
    _, _, expected, grids = original(family)
    tokens, images = expected["tokens"], is_image(family)
    R, T = tokens.shape
    slots = np.cumsum(images.ravel()) * images.ravel()
    columns = {
        "tokens": tokens.ravel(),
        "segments": np.repeat(np.arange(1, R + 1), T),
        "slots": slots,
    }
    positions = [rope_positions(*row, 2) for row in zip(images, grids, strict=True)]
    padded = {name: np.pad(column, (0, 5)) for name, column in columns.items()}
    padded["positions"] = np.pad(np.concatenate(positions), ((0, 5), (0, 0)))
    layout = patch_layout([grid for row in grids for grid in row], 2)
    patches, layout = (
        jnp.asarray(np.pad(each, ((0, 8), (0, 0))))[None] for each in (expected["patches"], layout)
    )
    inputs = ImageInputs(patches, layout, jnp.asarray(padded.pop("slots"))[None])
    return {name: jnp.asarray(column)[None] for name, column in padded.items()}, inputs


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_match_transformers(family: str) -> None:
    _, _, expected, grids = original(family)
    for row, own, positions in zip(is_image(family), grids, expected["positions"], strict=True):
        found = rope_positions(row, own, 2)
        np.testing.assert_array_equal(found, positions)
        # The last token is text: its position is its place plus the offset of the tokens before.
        assert found[-1].tolist() == [len(row) - 1 + rope_offset(found[:-1])] * 3


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_loss_and_gradient_match_transformers(family: str) -> None:
    policy, params, expected, _ = original(family)
    columns, inputs = packed(family)
    tokens, (R, T) = columns["tokens"][0], expected["tokens"].shape

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss_of(params: Params) -> tuple[jax.Array, jax.Array]:
        hidden, _, _ = policy.hidden(
            params,
            columns["tokens"],
            columns["positions"],
            packed_attention(columns["segments"]),
            compute_dtype=jnp.float32,
            images=policy.encode_images(params, inputs, compute_dtype=jnp.float32),
        )
        logits = (hidden[0, : R * T] @ policy.head(params)).reshape(R, T, -1)
        targets = tokens[: R * T].reshape(R, T)[:, 1:, None]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), targets, axis=-1)[..., 0]
        text = ~is_image(family)[:, 1:]
        return -(logp * text).sum() / text.sum(), logits

    (loss, logits), gradient = loss_of(params)
    assert expected["logits"].std() > 0.5
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    np.testing.assert_allclose(loss, expected["loss"], atol=1e-4)
    compared = set()
    for name, tensor in hf._to_files(policy, gradient):
        sums = {f"rows.{name}": tensor.sum(-1) if tensor.ndim > 1 else tensor}
        if tensor.ndim > 1:
            sums[f"columns.{name}"] = tensor.sum(-2)
        for key, ours in sums.items():
            np.testing.assert_allclose(ours, expected[key], atol=1e-4, err_msg=key)
        compared |= sums.keys()
    assert compared == {key for key in expected if key.startswith(("rows", "columns"))}
    tower = jax.tree.leaves(
        jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), gradient["vision"])
    )
    assert min(tower) >= 0 and np.median(tower) > 1e-3


def adapted(family: str) -> tuple[Policy, Params]:
    folder = ADAPTERS / family
    policy = Policy(original(family).policy.config, lora.read_config(folder))
    placed = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), lora.abstract(policy))
    return policy, lora.load(folder, policy, placed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_logits_match_peft(family: str) -> None:
    policy, adapter = adapted(family)
    columns, inputs = packed(family)
    expected = load_file(ADAPTERS / family / "expected.safetensors")["logits"]
    R, T, V = expected.shape

    @jax.jit
    def logits(params: Params) -> jax.Array:
        hidden, _, _ = policy.hidden(
            params,
            columns["tokens"],
            columns["positions"],
            packed_attention(columns["segments"]),
            compute_dtype=jnp.float32,
            images=policy.encode_images(params, inputs, compute_dtype=jnp.float32),
        )
        return (hidden[0, : R * T] @ policy.head(params)).reshape(R, T, V)

    base = original(family).params
    np.testing.assert_allclose(logits(lora.attach(policy, base, adapter)), expected, atol=1e-4)
    np.testing.assert_allclose(logits(lora.merge(policy, base, adapter)), expected, atol=1e-4)
    assert np.abs(original(family).expected["logits"] - expected).mean() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_named_as_in_peft(family: str, tmp_path: Path) -> None:
    policy, adapter = adapted(family)
    lora.save(tmp_path, policy, adapter, f"tests/models/parity_vision/{family}")
    theirs, ours = (load_file(folder / lora.WEIGHTS) for folder in (ADAPTERS / family, tmp_path))
    assert theirs.keys() == ours.keys()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    theirs, ours = (read_json(folder / lora.CONFIG) for folder in (ADAPTERS / family, tmp_path))
    assert {name: theirs[name] for name in ours} == ours
    # An adapter of the tower too, as PEFT makes one from target_modules=["up_proj"].
    tensors = load_file(tmp_path / lora.WEIGHTS)
    name = "base_model.model.model.visual.blocks.0.mlp.up_proj.lora_A.weight"
    save_file(tensors | {name: np.zeros((2, 32), np.float32)}, tmp_path / lora.WEIGHTS)
    with pytest.raises(ValueError, match=r"the language model alone(.|\n)*unexpected: .*visual"):
        lora.check_tensors(tmp_path, policy)


@pytest.mark.parametrize("family", FAMILIES)
def test_written_folders_are_read_back(family: str, tmp_path: Path) -> None:
    policy, params, _, _ = original(family)
    hf.save(tmp_path / "copy", policy, params)
    assert hf.read_config(tmp_path / "copy") == policy.config
    placed = jax.tree.map(lambda leaf: leaf.sharding, params)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path / "copy", policy, placed), params)
    written = read_json(tmp_path / "copy" / "config.json")
    stored = read_json(FIXTURES / family / "config.json")
    assert written["vision_config"].items() <= stored["vision_config"].items()
    assert policy.config.to_hf(stored) == stored
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert policy.config.num_params == num_params


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_without_special_blocks_are_read_back(family: str) -> None:
    """Absent lists of blocks would mean those of published policies."""
    config = original(family).policy.config
    assert config.vision is not None
    vision = replace(config.vision, fullatt_block_indexes=(), deepstack_visual_indexes=())
    config = replace(config, vision=vision)
    assert ModelConfig.from_hf(config.to_hf(), "a test") == config


def test_files_of_earlier_releases_are_read() -> None:
    """As Qwen published them: the keys of the language model are not nested."""
    stored = read_json(FIXTURES / "qwen2_5_vl" / "config.json")
    text = stored.pop("text_config")
    del text["rope_parameters"], text["model_type"]
    scaling = {"type": "mrope", "mrope_section": [2, 1, 1]}
    flat = stored | text | {"rope_scaling": scaling, "rope_theta": 1000.0, "vision_token_id": 44}
    flat["vision_config"]["in_chans"] = flat["vision_config"].pop("in_channels")
    assert ModelConfig.from_hf(flat, "a test") == original("qwen2_5_vl").policy.config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act='relu'"),
        ({"vision_config": {"shuffles": 1}}, "shuffles=1 is not a known key"),
        ({"vision_config": {"deepstack_visual_indexes": [3]}}, "blocks below depth"),
        ({"text_config": {"rope_parameters": {"mrope_section": [1, 1, 1]}}}, "head_dim / 2 = 6"),
        ({"image_token_id": None}, "expected positive integers"),
        ({"model_type": "qwen2_vl"}, "contradicts"),
    ],
)
def test_unsupported_towers_are_refused(change: dict[str, object], message: str) -> None:
    stored = read_json(FIXTURES / "qwen3_vl" / "config.json")
    for name, value in change.items():
        stored[name] = stored[name] | value if isinstance(value, dict) else value
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(stored, "a test")
