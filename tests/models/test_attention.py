import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention import masked_attention, packed_attention


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_attention_by_hand():
    # One head of size 1, so sqrt(H) = 1. q = ln 3; keys 0, 1, 1; the mask hides the third.
    # Scores 0 and ln 3, weights 1/4 and 3/4, values 8 and 4: 8/4 + 4·3/4 = 5.
    out = masked_attention(
        jnp.full((1, 1, 1, 1), np.log(3.0), jnp.float32),
        jnp.array([0.0, 1.0, 1.0]).reshape(1, 1, 1, 3),
        jnp.array([8.0, 4.0, 1000.0]).reshape(1, 1, 3, 1),
        jnp.array([True, True, False]).reshape(1, 1, 3),
    )
    assert out.item() == pytest.approx(5.0, rel=1e-6)


def test_query_heads_share_key_value_heads_in_order():
    q, k, v = draw(2, 5, 4, 8), draw(2, 2, 8, 7, seed=1), draw(2, 2, 7, 8, seed=2)
    mask = jnp.asarray(np.random.default_rng(3).random((2, 5, 7)) < 0.7).at[:, :, 0].set(True)
    out = masked_attention(q, k, v, mask)
    for n in range(4):
        # Head n alone, against key-value head n // 2, straight from the formula; scores are divided by sqrt(8).
        scores = np.where(mask, q[:, :, n] @ k[:, n // 2] / 8**0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out[:, :, n], weights @ v[:, n // 2], atol=1e-5)


def test_a_query_without_any_key_stays_finite_in_its_gradient_too():
    q, k, v = draw(1, 2, 2, 4), draw(1, 1, 4, 3, seed=1), draw(1, 1, 3, 4, seed=2)
    mask = jnp.array([[[False] * 3, [True] * 3]])
    loss = lambda q, k, v: (masked_attention(q, k, v, mask) ** 2).sum()  # noqa: E731
    grads = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(grad).all() for grad in grads)
    np.testing.assert_allclose(masked_attention(q, k, v, mask)[0, 0], np.broadcast_to(v[0, 0].mean(0), (2, 4)), atol=1e-6)


def test_scores_far_apart_do_not_overflow():
    q = jnp.full((1, 1, 1, 1), 1e4)
    k = jnp.array([[[[-1e4, 1e4]]]])
    assert masked_attention(q, k, jnp.array([[[[1.0], [2.0]]]]), jnp.ones((1, 1, 2), bool)).item() == 2.0


@pytest.mark.parametrize("tokens", [128, 300])
def test_blocks_of_queries_change_nothing(tokens):
    # 300 tokens are cut into blocks of 128, 128 and 44; one call over the whole mask is the same.
    q, k, v = draw(2, tokens, 4, 8), draw(2, tokens, 2, 8, seed=1), draw(2, tokens, 2, 8, seed=2)
    segments = jnp.asarray(np.sort(np.random.default_rng(3).integers(1, 4, (2, tokens)), axis=1))
    mask = jnp.tril(jnp.ones((tokens, tokens), bool)) & (segments[:, :, None] == segments[:, None, :])
    whole = masked_attention(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask)
    np.testing.assert_allclose(packed_attention(segments)(q, k, v, None)[0], whole, atol=1e-5)


def test_bfloat16_attention_takes_its_softmax_in_float32():
    # 512 equal keys: in bfloat16 the sum of 512 ones would stop growing at 256 and double the result.
    ones = jnp.ones((1, 1, 512, 1), jnp.bfloat16)
    out = masked_attention(jnp.ones((1, 1, 1, 1), jnp.bfloat16), ones.swapaxes(2, 3), ones, jnp.ones((1, 1, 512), bool))
    assert out.dtype == jnp.bfloat16 and out.item() == 1.0
