"""Prompts with images in the engine: tokens of `generate`, cached embeddings, and weight updates."""

from __future__ import annotations

import asyncio
import io
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from PIL import Image
from safetensors.numpy import load_file
from tiny_decode import Shelf, with_setting

from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.errors import InvalidRequest
from areal_jax.models import hf
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.vision.image_processor import ImageGrid, ImagePatches, ImageProcessor
from areal_jax.models.vision.image_reader import ImageReader
from areal_jax.models.vision.tower import ImageInputs
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Completion, Request, Sampling, Weights

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "models" / "parity_vision"
CONFIG = EngineConfig(
    num_slots=4,
    max_prompt_tokens=40,
    max_new_tokens=24,
    steps_per_dispatch=4,
    page_tokens=8,
    # The images of the prompt lie in several chunks.
    prefill_chunk_tokens=16,
    on_update="recompute",
    request_timeout_s=120,
)


class StoredReader(ImageReader):
    """A reader of "files" that name the patches which transformers was given."""

    def __init__(self, family: str, policy: Policy):
        assert policy.config.vision is not None
        super().__init__(ImageProcessor(patch_size=4, min_pixels=64), policy.config.vision)
        self._stored = load_file(FIXTURES / family / "expected.safetensors")

    def patches(self, file: bytes) -> ImagePatches:
        if not file.isdigit():
            return super().patches(file)
        sizes = self._stored["grids"].prod(axis=1)
        start = int(sizes[: int(file)].sum())
        patches = self._stored["patches"][start : start + sizes[int(file)]]
        return ImagePatches(patches, ImageGrid(*self._stored["grids"][int(file)].tolist()))


@lru_cache
def policy_of(family: str) -> tuple[Policy, Params]:
    policy = Policy(hf.read_config(FIXTURES / family))
    placed = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), policy.abstract())
    return policy, hf.load(FIXTURES / family, policy, placed)


@lru_cache
def engine_of(family: str, draft_tokens: int = 0) -> DecodeEngine:
    policy, _ = policy_of(family)
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    reader = StoredReader(family, policy)
    config = chz.replace(CONFIG, draft_tokens=draft_tokens)
    return DecodeEngine(policy, mesh, config, jnp.float32, image_reader=reader)


@lru_cache
def weights_of(family: str, scale: float = 1.0, tower_scale: float = 1.0) -> Any:
    """The weights in the engine's layout, with a scaled last norm, and a scaled merger."""
    engine, (_, params) = engine_of(family), policy_of(family)
    tower = params["vision"]
    down = {name: leaf * tower_scale for name, leaf in tower["merger"]["down"].items()}
    tower = tower | {"merger": tower["merger"] | {"down": down}}
    changed = params | {"norm": params["norm"] * scale, "vision": tower}
    return jax.jit(engine.layout, out_shardings=engine.param_shardings)(changed)


class Source(Shelf):
    """Versions of the weights of a family, by the look at which they arrive."""

    def __init__(self, *arrivals: tuple[int, int, Any]):
        self.looks, self._pause_at, self.fails_at = 0, None, None
        self._arrivals = [(look, Weights(version, params)) for look, version, params in arrivals]


def request(
    tokens: np.ndarray,
    *images: bytes,
    num_samples: int = 1,
    name: str = "a",
    temperature: float = 0.0,
) -> Request:
    return Request(
        id=name,
        prompt_tokens=np.asarray(tokens, np.int32),
        num_samples=num_samples,
        sampling=Sampling(24, temperature),
        seed=3,
        images=images,
    )


def run(
    family: str,
    source: Source,
    *requests: Request,
    one_by_one: bool = False,
    draft_tokens: int = 0,
) -> tuple[list[list[Completion]], int]:
    """Return the completions, and the number of images whose embeddings were computed."""

    async def act() -> tuple[list[list[Completion]], int]:
        loop = EngineLoop(engine_of(family, draft_tokens), source)
        loop.start()
        try:
            futures = []
            for each in requests:
                futures.append(loop.submit(each))
                if one_by_one:
                    await futures[-1]
            done = await asyncio.wait_for(asyncio.gather(*futures), 120)
        finally:
            loop.close()
        assert loop._core.images is not None
        return done, loop._core.images.num_encoded

    return asyncio.run(act())


def prompt_and_greedy(family: str) -> tuple[np.ndarray, np.ndarray]:
    greedy = load_file(FIXTURES / family / "expected.safetensors")["greedy"][0]
    return greedy[:-24], greedy[-24:]


@pytest.mark.parametrize(
    ("family", "draft_tokens"), [("qwen2_5_vl", 0), ("qwen3_vl", 0), ("qwen3_vl", 2)]
)
def test_greedy_tokens_equal_generate_and_embeddings_are_cached(
    family: str, draft_tokens: int
) -> None:
    prompt, greedy = prompt_and_greedy(family)
    source = Source((0, 0, weights_of(family)))
    again = request(prompt, b"0", b"1", name="b")
    found, num_encoded = run(
        family,
        source,
        request(prompt, b"0", b"1", num_samples=3),
        again,
        one_by_one=True,
        draft_tokens=draft_tokens,
    )
    for completions in found:
        for completion in completions:
            assert completion.tokens.tolist() == greedy.tolist()
    assert num_encoded == 2


@pytest.mark.parametrize(("tower_scale", "num_encoded"), [(1.0, 2), (1.5, 4)])
def test_updates_recompute_embeddings_if_the_tower_changed(
    tower_scale: float, num_encoded: int
) -> None:
    family = "qwen3_vl"
    prompt, _ = prompt_and_greedy(family)
    after = weights_of(family, 1.1, tower_scale)
    source = Source((0, 0, weights_of(family)), (4, 1, after))
    ((completion,),), found = run(family, source, request(prompt, b"0", b"1", temperature=1.0))
    assert found == num_encoded
    assert {*completion.versions.tolist()} == {0, 1}
    expected = full_forward(family, prompt, completion.tokens, 1.1, tower_scale)
    is_new = completion.versions == 1
    np.testing.assert_allclose(completion.logp[is_new], expected[is_new], atol=1e-4)


def test_a_warm_engine_compiles_nothing_for_images_of_any_size() -> None:
    family = "qwen3_vl"
    engine = with_setting(engine_of(family))
    engine.warm_up()
    num_programs = engine.num_programs
    largest = CONFIG.max_tokens * 4
    assert engine.image_lengths[-1] >= largest > engine.image_lengths[-2]
    weights = weights_of(family)
    for width in (4, 16, largest // 2):
        grid = ImageGrid(2, width)
        engine.encode(weights, ImagePatches(np.zeros((2 * width, 96), np.float32), grid))
    assert engine.same_tower(weights, weights)
    assert engine.num_programs == num_programs


def full_forward(
    family: str, prompt: np.ndarray, sampled: np.ndarray, scale: float, tower_scale: float
) -> np.ndarray:
    """Log-probs of sampled tokens from one pass over the whole sequence."""
    policy, params = policy_of(family)
    down = {name: leaf * tower_scale for name, leaf in params["vision"]["merger"]["down"].items()}
    merger = params["vision"]["merger"] | {"down": down}
    params = params | {
        "norm": params["norm"] * scale,
        "vision": params["vision"] | {"merger": merger},
    }
    reader = engine_of(family).image_reader
    assert reader is not None
    tokens = np.concatenate([prompt, sampled]).astype(np.int32)
    read = reader.read((b"0", b"1"), tokens)
    slots = np.cumsum(read.is_image) * read.is_image
    inputs = ImageInputs(read.patches[None], read.layout[None], slots[None])
    logp = logprobs_of(policy, params, tokens[None], read.positions[None], inputs)
    places = np.arange(len(prompt) - 1, len(tokens) - 1)
    return np.asarray(logp)[places, tokens[places + 1]]


@partial(jax.jit, static_argnames="policy")
def logprobs_of(
    policy: Policy, params: Params, tokens: jax.Array, positions: jax.Array, inputs: ImageInputs
) -> jax.Array:
    hidden, _, _ = policy.hidden(
        params,
        tokens,
        positions,
        packed_attention(jnp.ones_like(tokens)),
        compute_dtype=jnp.float32,
        images=policy.encode_images(params, inputs, compute_dtype=jnp.float32),
    )
    return jax.nn.log_softmax(hidden[0] @ policy.head(params))


def test_equal_weights_change_nothing() -> None:
    family = "qwen2_5_vl"
    prompt, greedy = prompt_and_greedy(family)
    weights = weights_of(family)
    found, num_encoded = run(
        family, Source((0, 0, weights), (4, 1, weights)), request(prompt, b"0", b"1")
    )
    assert found[0][0].tokens.tolist() == greedy.tolist()
    assert num_encoded == 2


def test_prompts_with_other_images_share_no_prefix() -> None:
    family = "qwen2_5_vl"
    files = []
    for seed in (0, 1):
        pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        files.append(buffer.getvalue())
    prompt = np.array([3, *[40] * 4, *range(5, 20)], np.int32)
    source = Source((0, 0, weights_of(family)))
    alone = [run(family, source, request(prompt, file))[0][0][0] for file in files]
    assert np.abs(alone[0].logp - alone[1].logp).max() > 1e-3
    both, _ = run(
        family,
        source,
        *(request(prompt, file, name=str(i)) for i, file in enumerate(files)),
        one_by_one=True,
    )
    for (found,), expected in zip(both, alone, strict=True):
        np.testing.assert_allclose(found.logp, expected.logp, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "images", "message"),
    [
        ([3, *[40] * 3, 5], (b"2",) * 2, "a prompt with 4 tokens of 2 images"),
        ([3, 40, 40], (b"2",), "text after them"),
        ([3, 40, 40, 5], (b"not an image",), "expected an image, found 12 bytes"),
    ],
)
def test_invalid_images_are_refused(
    tokens: list[int], images: tuple[bytes, ...], message: str
) -> None:
    source = Source((0, 0, weights_of("qwen2_5_vl")))
    with pytest.raises(InvalidRequest, match=message):
        run("qwen2_5_vl", source, request(np.array(tokens), *images))
