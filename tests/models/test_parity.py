"""The decoder against logits that transformers computed; parity/make.py says how they were made."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_policies import on_one_device

from areal_jax.models import hf
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Policy

FIXTURES = Path(__file__).parent / "parity"


@pytest.mark.parametrize("family", ["qwen2", "qwen2_tied", "llama", "qwen3"])
def test_logits_are_those_of_transformers(family):
    folder = FIXTURES / family
    policy = Policy(hf.read_config(folder))
    params = hf.load(folder, policy, on_one_device(policy))
    expected = load_file(folder / "expected.safetensors")
    tokens = jnp.asarray(expected["tokens"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend = packed_attention(jnp.ones_like(tokens))
    hidden, _ = policy.hidden(params, tokens, positions, attend, compute_dtype=jnp.float32)
    np.testing.assert_allclose(hidden @ policy.head(params), expected["logits"], atol=1e-4)
    assert expected["logits"].std() > 0.5  # not a policy that says nothing
