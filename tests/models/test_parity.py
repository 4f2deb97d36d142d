"""The decoder against what transformers computed; parity/make.py says how it was made."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_policies import cached_hidden, on_one_device

from areal_jax.models import hf
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy

FIXTURES = Path(__file__).parent / "parity"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir())


class Original(NamedTuple):
    """A checkpoint, and what transformers computes of it."""

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


def forward(policy: Policy, params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    hidden, _ = policy.hidden(params, tokens, positions, packed_attention(segments), compute_dtype=jnp.float32)
    return hidden @ policy.head(params)


def whole_rows(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Positions and segments."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones_like(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_those_of_transformers(family: str) -> None:
    policy, params, expected, tokens = original(family)

    @jax.jit
    @jax.value_and_grad
    def loss_of(params: Params) -> jax.Array:
        logp = jax.nn.log_softmax(forward(policy, params, tokens, *whole_rows(tokens))[:, :-1])
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()

    loss, gradient = loss_of(params)
    np.testing.assert_allclose(loss, expected["loss"], atol=1e-4)
    for name, tensor in hf._to_files(policy, gradient):
        rows = tensor.sum(-1) if tensor.ndim == 2 else tensor
        np.testing.assert_allclose(rows, expected.pop(f"rows.{name}"), atol=1e-4, err_msg=name)
        if tensor.ndim == 2:
            np.testing.assert_allclose(tensor.sum(0), expected.pop(f"columns.{name}"), atol=1e-4, err_msg=name)
    # A tied head is written twice by none: nothing of theirs was passed over.
    assert [name for name in expected if name.startswith(("rows", "columns"))] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_logprobs_are_those_of_transformers(family: str) -> None:
    policy, params, expected, tokens = original(family)
    rows, length = tokens.shape
    # Both rows one behind the other, and padding.
    segments = jnp.concatenate([jnp.repeat(jnp.arange(1, rows + 1), length), jnp.zeros(4, int)])[None]
    positions = jnp.concatenate([jnp.tile(jnp.arange(length), rows), jnp.zeros(4, int)])[None]
    packed = jnp.concatenate([tokens.ravel(), jnp.zeros(4, tokens.dtype)])[None]
    logits = jax.jit(forward, static_argnums=0)(policy, params, packed, positions, segments)[0, : rows * length]
    theirs = expected["logits"].reshape(rows * length, -1)
    assert theirs.std() > 0.5  # not a policy that says nothing
    np.testing.assert_allclose(logits, theirs, atol=1e-4)
    np.testing.assert_allclose(jax.nn.log_softmax(logits), jax.nn.log_softmax(theirs), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_logits_are_those_of_transformers(family: str) -> None:
    policy, params, expected, tokens = original(family)
    hidden = cached_hidden(policy, params, tokens, prompt=4)
    np.testing.assert_allclose(hidden @ policy.head(params), expected["logits"], atol=1e-4)
