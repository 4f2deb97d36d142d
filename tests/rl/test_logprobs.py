"""Log-probs against their definition in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from areal_jax.rl.logprobs import token_logprobs, values_before

compiled_logprobs = jax.jit(token_logprobs, static_argnames=("temperature", "chunk_tokens"))
B, T, D, V = 3, 10, 8, 13
SEGMENTS = np.array([[1] * 4 + [2] * 6, [1] * 3 + [2] * 1 + [3] * 4 + [0] * 2, [0] * 10], np.int32)


def random_inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(B, T, D)), rng.normal(size=(D, V))
    return (
        hidden.astype(np.float32),
        head.astype(np.float32),
        rng.integers(0, V, (B, T)).astype(np.int32),
    )


def by_definition(
    hidden: np.ndarray, head: np.ndarray, tokens: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, in float64: log softmax(hidden[t-1] · head / temperature)[token t] where t-1
    is of the same segment."""
    logp, entropy = np.zeros((B, T)), np.zeros((B, T))
    for b, t in np.ndindex(B, T):
        if t and SEGMENTS[b, t] and SEGMENTS[b, t] == SEGMENTS[b, t - 1]:
            logits = hidden[b, t - 1].astype(np.float64) @ head / temperature
            log_softmax = logits - np.log(np.exp(logits).sum())
            logp[b, t] = log_softmax[tokens[b, t]]
            entropy[b, t] = -(np.exp(log_softmax) * log_softmax).sum()
    return logp, entropy


# One chunk; 3 of 4, 3, 3 columns; 4 with padding; one column each.
@pytest.mark.parametrize(
    ("chunk_tokens", "temperature"), [(1000, 1.0), (1000, 0.6), (12, 0.6), (9, 1.0), (1, 0.6)]
)
def test_logprobs_and_entropy_equal_the_definition(chunk_tokens: int, temperature: float) -> None:
    hidden, head, tokens = random_inputs()
    logp, entropy = compiled_logprobs(
        hidden, head, tokens, SEGMENTS, temperature=temperature, chunk_tokens=chunk_tokens
    )
    expected_logp, expected_entropy = by_definition(hidden, head, tokens, temperature)
    np.testing.assert_allclose(logp, expected_logp, atol=2e-6)
    np.testing.assert_allclose(entropy, expected_entropy, atol=2e-6)


def test_gradient_of_a_tied_head_in_bfloat16_is_summed_in_float32() -> None:
    # XLA on CPU has no product of bfloat16 with float32 sums in the layout of this gradient.
    rng = np.random.default_rng(0)
    hidden, embed = (
        jax.device_put(rng.normal(size=size).astype(np.float32))
        for size in ((4, 64, 64), (768, 64))
    )
    tokens = jax.device_put(rng.integers(0, 768, (4, 64)).astype(np.int32))

    def total(embed: jax.Array, dtype: type) -> jax.Array:
        ones = jnp.ones_like(tokens)
        return token_logprobs(
            hidden.astype(dtype), embed.T, tokens, ones, temperature=8.0, chunk_tokens=1000
        )[0].sum()

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    narrow, wide = gradient(embed, jnp.bfloat16), gradient(embed, jnp.float32)
    # Each number is a sum of terms of up to 4 / 8, each rounded to 8 bits: 0.002.
    np.testing.assert_allclose(narrow, wide, atol=0.02)
    assert np.abs(wide).max() > 0.5


@pytest.mark.parametrize("learns_entropy", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1000, 9])
@pytest.mark.slow
def test_logprob_gradients_equal_the_full_log_softmax(
    chunk_tokens: int, learns_entropy: bool
) -> None:
    hidden, head, tokens = (jnp.asarray(x) for x in random_inputs(1))
    weights = np.random.default_rng(2).normal(size=(B, T)).astype(np.float32)

    def chunked(hidden: jax.Array, head: jax.Array) -> jax.Array:
        logp, entropy = token_logprobs(
            hidden,
            head,
            tokens,
            jnp.asarray(SEGMENTS),
            temperature=0.7,
            chunk_tokens=chunk_tokens,
            learns_entropy=learns_entropy,
        )
        return jnp.sum(weights * logp) + jnp.sum(weights**2 * entropy)

    def full(hidden: jax.Array, head: jax.Array) -> jax.Array:
        log_softmax = jax.nn.log_softmax(hidden[:, :-1] @ head / 0.7)
        logp = jnp.take_along_axis(log_softmax, tokens[:, 1:, None], axis=2)[..., 0]
        predicted = (SEGMENTS[:, 1:] == SEGMENTS[:, :-1]) & (SEGMENTS[:, 1:] != 0)
        entropy = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
        entropy = (
            weights[:, 1:] ** 2 * entropy if learns_entropy else 0.0
        )  # where it is not to be learnt it must add nothing
        return jnp.sum(jnp.where(predicted, weights[:, 1:] * logp + entropy, 0.0))

    for ours, theirs in zip(
        jax.grad(chunked, (0, 1))(hidden, head), jax.grad(full, (0, 1))(hidden, head), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_packed_sequence_equals_the_sequence_alone() -> None:
    hidden, head, tokens = random_inputs(3)
    packed, _ = token_logprobs(
        *map(jnp.asarray, (hidden, head, tokens, SEGMENTS)), chunk_tokens=1000
    )
    alone, _ = token_logprobs(
        *map(jnp.asarray, (hidden[:1, 4:], head, tokens[:1, 4:], np.ones((1, 6), np.int32))),
        chunk_tokens=1000,
    )
    np.testing.assert_array_equal(packed[0, 4:], alone[0])


def test_softmax_is_float32_for_any_hidden_dtype() -> None:
    hidden, head, tokens = random_inputs(4)
    rounded, rounded_head = (x.astype(jnp.bfloat16) for x in (hidden, head))
    logp, _ = compiled_logprobs(rounded, head, tokens, SEGMENTS, chunk_tokens=1000)
    exact, _ = by_definition(
        rounded.astype(np.float32), rounded_head.astype(np.float32), tokens, 1.0
    )
    assert logp.dtype == jnp.float32
    # The product of bfloat16 numbers is exact in float32; logits rounded to bfloat16 would be off
    # by up to 2^-8 of 10.
    np.testing.assert_allclose(logp, exact, atol=1e-4)


def test_logits_of_all_tokens_are_never_materialised() -> None:
    # 2048 tokens times 4096 words are 32 MiB in float32; chunks of 128 tokens are 2 MiB, of which
    # two exist at a time.
    shapes = [(2, 1024, 16), (16, 4096), (2, 1024), (2, 1024)]
    arguments = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in zip(shapes, [jnp.float32] * 2 + [jnp.int32] * 2, strict=True)
    ]

    def loss(
        hidden: jax.Array, head: jax.Array, tokens: jax.Array, segment_ids: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logp, entropy = token_logprobs(hidden, head, tokens, segment_ids, chunk_tokens=128)
        return jnp.sum(logp), jnp.sum(entropy)

    memory = (
        jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
        .lower(*arguments)
        .compile()
        .memory_analysis()
    )
    assert memory is not None
    assert memory.temp_size_in_bytes < 5 * 2**20


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_logprobs_are_independent_of_sharding(tensor: int) -> None:
    rng = np.random.default_rng(5)
    rows, words = 8, 16
    hidden, head = (
        rng.normal(size=(rows, T, D)).astype(np.float32),
        rng.normal(size=(D, words)).astype(np.float32),
    )
    tokens, segments = (
        rng.integers(0, words, (rows, T)).astype(np.int32),
        np.ones((rows, T), np.int32),
    )
    mesh = jax.make_mesh((8 // tensor, tensor), ("fsdp", "tensor"), (AxisType.Auto,) * 2)

    def loss(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logp, entropy = token_logprobs(
            hidden, head, jnp.asarray(tokens), jnp.asarray(segments), chunk_tokens=rows * 4
        )
        return jnp.sum(logp), (logp, entropy)

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    alone = run(hidden, head)
    sharded = run(
        jax.device_put(hidden, NamedSharding(mesh, PartitionSpec("fsdp"))),
        jax.device_put(
            head, NamedSharding(mesh, PartitionSpec("fsdp" if tensor == 4 else None, "tensor"))
        ),
    )
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_temperature_zero_is_refused() -> None:
    hidden, head, tokens = map(jnp.asarray, random_inputs())
    with pytest.raises(ValueError, match="expected a temperature above 0"):
        token_logprobs(
            hidden, head, tokens, jnp.asarray(SEGMENTS), temperature=0.0, chunk_tokens=10
        )


def test_values_before_tokens_are_shifted_by_one() -> None:
    values = np.arange(1.0, 31.0, dtype=np.float32).reshape(B, T)
    before = values_before(jnp.asarray(values), jnp.asarray(SEGMENTS))
    # Rows of 4 and 6 tokens; of 3, 1 and 4 tokens and padding; of padding. A segment's first token
    # follows nothing.
    np.testing.assert_array_equal(
        before, [[0, 1, 2, 3, 0, 5, 6, 7, 8, 9], [0, 11, 12, 0, 0, 15, 16, 17, 0, 0], [0] * 10]
    )
