"""Models in one batch get the bits that each gets alone."""

from __future__ import annotations

from functools import lru_cache

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import TINY_ARCHITECTURE as ARCHITECTURE

from areal_jax.models import lora
from areal_jax.models.attention import packed_attention
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import put_copy
from areal_jax.tinker.batches import BatchPrograms, Outputs, Work
from areal_jax.tinker.config import TinkerConfig, TinkerLimits
from areal_jax.tinker.messages import Datum
from areal_jax.tinker.objective import read_loss
from areal_jax.tinker.programs import TrainingPrograms
from areal_jax.tinker.training import TrainingBackend

CONFIG = TinkerConfig(
    micro_batch_tokens=128, remat="none", limits=TinkerLimits(max_batched_models=3)
)
BUCKET = Policy(ARCHITECTURE, LoRA(rank=8))
SHAPES = LoRA(rank=8), LoRA(rank=3, alpha=8.0), LoRA(rank=4, targets=("q_proj", "up_proj"))
# Rows of 64 tokens, two in a micro-batch: 3, 2 and 1.
LENGTHS = (40, 50, 40), (30, 60), (5, 9)


@lru_cache
def programs() -> BatchPrograms:
    mesh = make_train_mesh(PlacementConfig(), jax.devices()[:1])
    base = Policy(ARCHITECTURE).init(jax.random.key(0))
    return BatchPrograms(BUCKET, base, mesh, np.float32, CONFIG)


@lru_cache
def work(number: int) -> Work:
    rng, shape = np.random.default_rng(number), SHAPES[number]
    own = TrainingPrograms(Policy(ARCHITECTURE, shape), programs()._mesh, np.float32, CONFIG)
    leaves = lora.abstract(Policy(ARCHITECTURE, shape))
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 4, leaves)
    datums = [
        Datum(
            rng.integers(1, 64, length).astype(np.int32),
            rng.integers(1, 64, length).astype(np.int32),
            {"weights": rng.random(length).astype(np.float32)},
        )
        for length in LENGTHS[number]
    ]
    return Work(put_copy(params, own.shardings.params), shape, datums)


def run(*numbers: int, learns: bool = True) -> list[Outputs]:
    return programs().run(read_loss("cross_entropy", {}), [*map(work, numbers)], learns=learns)


def bits(outputs: Outputs) -> list[bytes]:
    leaves = [*outputs.logprobs, *jax.tree.leaves(outputs.gradients)]
    return [np.float64(outputs.loss).tobytes(), *(np.asarray(leaf).tobytes() for leaf in leaves)]


def test_a_model_gets_the_same_bits_in_any_company() -> None:
    for number, together in zip((2, 0, 1), run(2, 0, 1), strict=True):
        (alone,) = run(number)
        assert bits(together) == bits(alone)
        shapes = jax.tree.map(np.shape, alone.gradients)
        assert shapes == jax.tree.map(np.shape, work(number).params)


@pytest.mark.slow
def test_gradients_are_those_of_the_adapter_by_itself() -> None:
    (found,), given = run(1), work(1)
    policy, base = Policy(ARCHITECTURE, given.shape), programs()._base

    @jax.jit
    @jax.value_and_grad
    def loss(
        params: lora.Params, tokens: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> jax.Array:
        whole, places = lora.attach(policy, base, params), jnp.arange(len(tokens))
        attend = packed_attention(jnp.ones((1, len(tokens)), np.int32))
        hidden, _, _ = policy.hidden(
            whole, tokens[None], places[None], attend, compute_dtype=np.float32
        )
        logp = jax.nn.log_softmax(hidden[0] @ policy.head(whole))
        return -(logp[places, targets] * weights).sum()

    found_each = [
        loss(given.params, d.tokens, d.targets, d.columns["weights"]) for d in given.datums
    ]
    total = sum(float(value) for value, _ in found_each)
    expected = jax.tree.map(np.add, *(gradients for _, gradients in found_each))
    assert found.loss == pytest.approx(total, rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
        found.gradients,
        expected,
    )


def test_an_adapter_with_infinite_numbers_changes_no_other() -> None:
    broken = work(0)._replace(params=jax.tree.map(lambda leaf: leaf * np.inf, work(0).params))
    loss = read_loss("cross_entropy", {})
    first, second = programs().run(loss, [broken, work(1)], learns=True)
    assert not np.isfinite(first.loss)
    assert bits(second) == bits(run(1)[0])


def test_outputs_without_gradients_are_the_same() -> None:
    (outputs,), (learned,) = run(1, learns=False), run(1)
    assert outputs.gradients is None
    for found, expected in zip(outputs.logprobs, learned.logprobs, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_bucket_of_a_rank_is_the_next_power_of_two() -> None:
    backend = TrainingBackend(
        Policy(ARCHITECTURE), {}, programs()._mesh, np.float32, chz.replace(CONFIG), "tiny"
    )
    assert [backend.bucket(LoRA(rank=r)).rank for r in (1, 8, 9, 32, 33)] == [8, 8, 16, 32, 64]
