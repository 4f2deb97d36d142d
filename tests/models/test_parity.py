"""The decoder against results of transformers, which parity/make.py has stored."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_policies import cached_hidden, on_one_device

from areal_jax.models import hf
from areal_jax.models.attention import packed_attention, sharded_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.moe import Routing, balance_loss, sharded_experts
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import TRAIN_RULES, shardings

FIXTURES = Path(__file__).parent / "parity"
QUANTIZED = "gpt_oss_mxfp4"
FAMILIES = sorted(
    folder.name for folder in FIXTURES.iterdir() if folder.is_dir() and folder.name != QUANTIZED
)
VARIANTS = (
    *("llama3", "llama_yarn", "llama_linear_biased", "qwen2_tied", "qwen2_linear", "qwen2_yarn"),
    *("qwen3_window", "phi3_partial", "phi3_longrope", "deepseek_dense_query"),
    *("qwen3_moe_dense", "qwen3_next_dense"),
    *("seed_oss", "ernie4_5", "olmoe", "mixtral", "glm4_moe"),
)
"""Settings that no mesh axis depends on beyond those of other families: compared on one device
alone."""
SHARDED = [name for name in FAMILIES if name not in VARIANTS]
CACHED = [
    *SHARDED,
    *("llama_linear_biased", "qwen3_window", "phi3_partial", "phi3_longrope"),
    *("deepseek_dense_query", "qwen3_next_dense", "glm4_moe"),
]
"""Of the variants only those that change what is cached: others scale the positions of RoPE, tie
matrices, or have other MLPs, where a token is computed by itself."""
EXPERTS = [name for name in FAMILIES if hf.read_config(FIXTURES / name).moe is not None]


class Original(NamedTuple):
    """A checkpoint, and the results of transformers with it."""

    policy: Policy
    params: Params
    expected: dict[str, np.ndarray]
    tokens: jax.Array


@cache
def original(family: str) -> Original:
    folder = FIXTURES / family
    policy = Policy(hf.read_config(folder))
    params = hf.load(folder, policy, on_one_device(policy))
    expected = load_file(folder / "expected.safetensors")
    return Original(policy, params, expected, jnp.asarray(expected["tokens"]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_packed_logits_loss_and_gradient_match_transformers(family: str) -> None:
    policy, params, expected, tokens = original(family)
    rows, length = tokens.shape
    # Both rows packed into one, with padding.
    segments = np.pad(np.repeat(np.arange(1, rows + 1), length), (0, 4))
    positions = np.pad(np.tile(np.arange(length), rows), (0, 4))
    packed, positions, segments = jax.device_put(
        [
            each[None].astype(np.int32)
            for each in (np.pad(np.asarray(tokens).ravel(), (0, 4)), positions, segments)
        ]
    )
    hidden = partial(policy.hidden, attend=packed_attention(segments), compute_dtype=jnp.float32)
    assert_matches(
        Original(policy, params, expected, tokens),
        lambda params: hidden(params, packed, positions, counted=segments > 0),
    )


@pytest.mark.parametrize(
    ("family", "expert"),
    [
        # Linear attention with experts has the longest programs: each family on one mesh.
        *((family, 1) for family in SHARDED if family != "qwen3_5_moe"),
        *((family, 2) for family in SHARDED if family in EXPERTS and family != "qwen3_next"),
    ],
)
@pytest.mark.slow
def test_sharded_logits_loss_and_gradient_match_transformers(family: str, expert: int) -> None:
    policy, params, expected, tokens = original(family)
    # Eight devices: parameters, heads and either the tokens of a row or experts are sharded.
    placement = PlacementConfig(
        train_fsdp=2, train_tensor=2, train_context=2 // expert, train_expert=expert
    )
    mesh = make_train_mesh(placement, jax.devices())
    assert mesh.size == 8
    placed = shardings(mesh, policy.axes(), policy.abstract(), TRAIN_RULES)
    rows = np.tile(tokens, (2, 1))
    positions = np.broadcast_to(np.arange(rows.shape[1], dtype=np.int32), rows.shape)
    rows, segments, positions = jax.device_put((rows, np.ones_like(rows), positions))
    attend = sharded_attention(segments, "dense", mesh, TRAIN_RULES)
    assert_matches(
        # NumPy arrays are cut and placed without programs of their own for every shape.
        Original(policy, jax.device_put(jax.device_get(params), placed), expected, tokens),
        lambda params: policy.hidden(
            params,
            rows,
            positions,
            attend,
            compute_dtype=jnp.float32,
            experts=sharded_experts(mesh, TRAIN_RULES),
            counted=jnp.arange(4)[:, None] + 0 * rows < 2,
        ),
    )


def log_softmax(logits: jax.Array | np.ndarray) -> np.ndarray:
    exact = np.asarray(logits, np.float64)
    exact -= exact.max(axis=-1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))


def assert_matches(
    original: Original, run: Callable[[Params], tuple[jax.Array, None, Routing | None]]
) -> None:
    """Compare logits, log-probs, losses and gradients, to 1e-4."""
    policy, params, expected, tokens = original

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss_of(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        hidden, _, routing = run(params)
        hidden = hidden.reshape(-1, hidden.shape[-1])[: tokens.size]
        logits = (hidden @ policy.head(params)).reshape(*tokens.shape, -1)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        balance = (
            jnp.zeros(()) if routing is None else balance_loss(routing, jnp.float32(tokens.size))
        )
        coefficient = 0.0 if policy.config.moe is None else policy.config.moe.router_aux_loss_coef
        return coefficient * balance - logp.mean(), (logits, balance)

    (loss, (logits, balance)), gradient = loss_of(params)
    assert expected["logits"].std() > 0.5  # not a policy that says nothing
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    np.testing.assert_allclose(log_softmax(logits), log_softmax(expected["logits"]), atol=1e-4)
    np.testing.assert_allclose(loss, expected["loss"], atol=1e-4)
    # transformers has none for DeepSeek-V3.
    if policy.config.moe is None or policy.config.moe.groups is None:
        np.testing.assert_allclose(balance, expected.get("balance", 0.0), atol=1e-4)
    compared = set()
    for name, tensor in hf._to_files(policy, jax.device_get(gradient)):
        sums = (
            {f"rows.{name}": tensor.sum(-1), f"columns.{name}": tensor.sum(-2)}
            if tensor.ndim > 1
            else {f"rows.{name}": tensor}
        )
        for key, ours in sums.items():
            np.testing.assert_allclose(ours, expected[key], atol=1e-4, err_msg=key)
        compared |= sums.keys()
    assert compared == {key for key in expected if key.startswith(("rows", "columns"))}


@pytest.mark.parametrize("family", CACHED)
@pytest.mark.slow
def test_cached_logits_match_transformers(family: str) -> None:
    policy, params, expected, tokens = original(family)
    hidden = cached_hidden(policy, params, tokens, prompt=4)
    np.testing.assert_allclose(hidden @ policy.head(params), expected["logits"], atol=1e-4)


@pytest.mark.slow
def test_long_factors_of_longrope_match_transformers() -> None:
    _, params, expected, _ = original("phi3_longrope")
    policy = Policy(hf.read_config(FIXTURES / "phi3_longrope", long_rope=True))
    tokens = jnp.asarray(expected["long_tokens"])
    segments, positions = jnp.ones_like(tokens), jnp.arange(tokens.shape[1])[None]
    hidden, _, _ = policy.hidden(
        params, tokens, positions, packed_attention(segments), compute_dtype=jnp.float32
    )
    logits = hidden[:, -8:] @ policy.head(params)
    np.testing.assert_allclose(logits, expected["long_logits"], atol=1e-4)


@pytest.mark.slow
def test_quantized_weights_are_read_like_transformers(tmp_path: Path) -> None:
    policy, params, expected, tokens = original(QUANTIZED)
    segments = jnp.ones_like(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = policy.hidden(
        params, tokens, positions, packed_attention(segments), compute_dtype=jnp.float32
    )
    np.testing.assert_allclose(hidden @ policy.head(params), expected["logits"], atol=1e-4)
    # bfloat16 represents the numbers exactly, and the copy is not quantized.
    hf.save(tmp_path / "copy", policy, params, FIXTURES / QUANTIZED, dtype="bfloat16")
    assert "quantization_config" not in (tmp_path / "copy" / "config.json").read_text()
    copy = hf.load(tmp_path / "copy", policy, on_one_device(policy))
    jax.tree.map(np.testing.assert_array_equal, copy, params)
