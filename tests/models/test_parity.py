"""The decoder against results of transformers, which parity/make.py has stored."""

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
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.moe import balance_loss

pytestmark = pytest.mark.usefixtures("quick_compilation")

FIXTURES = Path(__file__).parent / "parity"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir())


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
    segments = jnp.concatenate([jnp.repeat(jnp.arange(1, rows + 1), length), jnp.zeros(4, int)])[
        None
    ]
    positions = jnp.concatenate([jnp.tile(jnp.arange(length), rows), jnp.zeros(4, int)])[None]
    packed = jnp.concatenate([tokens.ravel(), jnp.zeros(4, tokens.dtype)])[None]

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss_of(params: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        hidden, _, routing = policy.hidden(
            params,
            packed,
            positions,
            packed_attention(segments),
            compute_dtype=jnp.float32,
            counted=segments > 0,
        )
        logits = (hidden @ policy.head(params))[0, : tokens.size].reshape(*tokens.shape, -1)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        balance = (
            jnp.zeros(()) if routing is None else balance_loss(routing, jnp.float32(tokens.size))
        )
        coefficient = 0.0 if policy.config.moe is None else policy.config.moe.router_aux_loss_coef
        return coefficient * balance - logp.mean(), (logits, balance)

    (loss, (logits, balance)), gradient = loss_of(params)
    assert expected["logits"].std() > 0.5  # not a policy that says nothing
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    np.testing.assert_allclose(
        jax.nn.log_softmax(logits), jax.nn.log_softmax(expected["logits"]), atol=1e-4
    )
    np.testing.assert_allclose(loss, expected["loss"], atol=1e-4)
    np.testing.assert_allclose(balance, expected.get("balance", 0.0), atol=1e-4)
    compared = set()
    for name, tensor in hf._to_files(policy, gradient):
        sums = (
            {f"rows.{name}": tensor.sum(-1), f"columns.{name}": tensor.sum(0)}
            if tensor.ndim == 2
            else {f"rows.{name}": tensor}
        )
        for key, ours in sums.items():
            np.testing.assert_allclose(ours, expected[key], atol=1e-4, err_msg=key)
        compared |= sums.keys()
    assert compared == {key for key in expected if key.startswith(("rows", "columns"))}


@pytest.mark.parametrize("family", ["qwen2", "llama3", "qwen3_window", "qwen3_moe"])
@pytest.mark.slow
def test_cached_logits_match_transformers(family: str) -> None:
    policy, params, expected, tokens = original(family)
    hidden = cached_hidden(policy, params, tokens, prompt=4)
    np.testing.assert_allclose(hidden @ policy.head(params), expected["logits"], atol=1e-4)
