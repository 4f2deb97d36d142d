"""Training on rows with images: the laws of packing, of meshes, and of a frozen vision tower."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from PIL import Image
from tiny_training import train_mesh

from areal_jax.data.packing import TrainingSequence, pack
from areal_jax.data.sft import SupervisedExample
from areal_jax.models import hf
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.vision.image_processor import ImageProcessor
from areal_jax.models.vision.image_reader import ImageReader
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.step import TrainableModel

pytestmark = pytest.mark.slow

CHECKPOINTS = Path(__file__).parents[1] / "models" / "parity_vision"
FAMILIES = ("qwen3_vl", "qwen2_5_vl")
POLICIES = {family: Policy(hf.read_config(CHECKPOINTS / family)) for family in FAMILIES}
ROW_TOKENS, ROW_IMAGE_TOKENS = 32, 16


def make_reader(family: str) -> ImageReader:
    vision = POLICIES[family].config.vision
    assert vision is not None
    return ImageReader(
        ImageProcessor(patch_size=4, min_pixels=8 * 8 * 2, max_pixels=8 * 8 * 8), vision
    )


READER = make_reader(FAMILIES[0])


def params(family: str = FAMILIES[0]) -> Params:
    policy = POLICIES[family]
    placed = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), policy.abstract())
    return hf.load(CHECKPOINTS / family, policy, placed)


def image(seed: int, height: int, width: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def example(seed: int, *images: bytes) -> SupervisedExample:
    """An example with its images between random texts; its last five tokens are learnt."""
    rng = np.random.default_rng(seed)
    parts = [rng.integers(2, 40, 2)]
    for file in images:
        parts += [np.full(READER.num_tokens(file), 40), rng.integers(2, 40, 1)]
    tokens = np.concatenate([*parts, rng.integers(2, 40, 5)]).astype(np.int32)
    return SupervisedExample(tokens, np.arange(len(tokens)) >= len(tokens) - 5, images)


def examples() -> list[SupervisedExample]:
    return [
        example(0, image(0, 20, 30)),
        example(1),
        example(2, image(1, 24, 16), image(2, 8, 16)),
        example(3, image(3, 10, 50)),
    ]


def make_trainer(
    *,
    family: str = FAMILIES[0],
    row_image_tokens: int = ROW_IMAGE_TOKENS,
    devices: int = 1,
    axes: dict[str, int] | None = None,
    **settings,
):
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
        row_image_tokens=row_image_tokens,
        rows_per_micro_batch=2,
        **settings,
    )
    mesh = train_mesh(devices, **(axes or {}))
    model = TrainableModel(
        policy=POLICIES[family],
        params=params(family),
        mesh=mesh,
        compute_dtype=np.float32,
        row_tokens=ROW_TOKENS,
        image_reader=make_reader(family),
    )
    return SupervisedTrainer(config, model, num_updates=10)


def logprobs(trainer: SupervisedTrainer, given: list[SupervisedExample]) -> list[np.ndarray]:
    packed = trainer.pack(given)
    columns = [np.asarray(trainer._learner.logprobs(batch)) for batch in packed.batches]
    return packed.layout.gather(np.stack(columns))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_images_read_like_images_alone(family: str) -> None:
    trainer = make_trainer(family=family)
    together = logprobs(trainer, examples())
    for alone, found in zip(examples(), together, strict=True):
        (expected,) = logprobs(trainer, [alone])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    # The image matters: another one of the same size changes what follows it.
    (other,) = logprobs(trainer, [example(0, image(9, 20, 30))])
    assert np.abs(other - together[0])[-5:].max() > 1e-2


@pytest.mark.parametrize("is_frozen", [False, True])
def test_only_a_trained_tower_changes(is_frozen: bool) -> None:
    trainer = make_trainer(freeze_vision=is_frozen)
    first = trainer.step(examples()).metrics["loss"]
    before, after = params(), jax.device_get(trainer.params)
    changed = jax.tree.map(lambda old, new: bool((np.asarray(old) != new).any()), before, after)
    assert changed["embed"] and all(jax.tree.leaves(changed["layers"]["mlp"]))
    if is_frozen:
        assert not any(jax.tree.leaves(changed["vision"]))
    else:
        assert all(jax.tree.leaves(changed["vision"]))
    last = [trainer.step(examples()) for _ in range(5)][-1].metrics["loss"]
    assert isinstance(first, tuple) and isinstance(last, tuple)
    assert last[0] < 0.7 * first[0]


@cache
def on_one_device_alone(family: str) -> list[float]:
    return step_of(make_trainer(family=family))


def step_of(trainer: SupervisedTrainer) -> list[float]:
    """Loss and norm of the gradient of a step."""
    metrics = trainer.step(examples()).metrics
    found = [metrics[name] for name in ("loss", "grad_norm")]
    return [each[0] / each[1] if isinstance(each, tuple) else each for each in found]


ALL_AXES: tuple[int, dict[str, int]] = 8, {"fsdp": 2, "tensor": 2, "context": 2}


# Both families on all axes, and each axis by itself.
@pytest.mark.parametrize(
    ("family", "devices", "axes"),
    [
        *((family, *ALL_AXES) for family in FAMILIES),
        (FAMILIES[0], 2, {"fsdp": 1}),
        (FAMILIES[1], 2, {"fsdp": 2}),
        (FAMILIES[1], 2, {"fsdp": 1, "tensor": 2}),
        (FAMILIES[0], 2, {"fsdp": 1, "context": 2}),
    ],
    ids=[*(f"{family}-all" for family in FAMILIES), "data", "fsdp", "tensor", "context"],
)
def test_devices_train_like_one(family: str, devices: int, axes: dict[str, int]) -> None:
    found = step_of(make_trainer(family=family, devices=devices, axes=axes))
    np.testing.assert_allclose(found, on_one_device_alone(family), rtol=1e-4)


def test_images_need_room_in_a_row() -> None:
    with pytest.raises(ValueError, match=r"set trainer\.row_image_tokens"):
        make_trainer(row_image_tokens=0).pack(examples())
    with pytest.raises(ValueError, match=r"32 patches, and a row has room for 16; raise trainer"):
        make_trainer(row_image_tokens=4).pack([example(0, image(0, 32, 16))])


def test_a_row_has_no_more_patches_than_it_has_room_for() -> None:
    # Each has 8 tokens of an image and 8 others: 4 would fit into a row of 64 tokens, 2 do.
    given = [example(seed, image(seed, 16, 32)) for seed in range(4)]
    sequences = [
        TrainingSequence(each.tokens, each.loss_mask, images=READER.read(each.images, each.tokens))
        for each in given
    ]
    batches, layout = pack(sequences, rows=2, row_tokens=64, row_patches=64)
    images = batches[0].images
    assert images is not None
    assert [int((row[:, 0] > 0).sum()) for row in images.layout] == [64, 64]
    assert images.slots.max() == 16 and layout.shape == (1, 2, 64)
