"""Training an adapter: the weights beside it stay as they are, and nothing is kept for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_training import POLICY, ROW_TOKENS, batch, params, train_mesh

from areal_jax.models import lora
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import bytes_per_device
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.memory_estimate import predicted_bytes
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.optimizer import make_optimizer
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.state import frozen, frozen_shardings
from areal_jax.trainer.step import TrainableModel

ADAPTED = Policy(POLICY.config, LoRA(rank=2, alpha=4.0))
CONFIG = TrainerConfig(
    optimizer=OptimizerConfig(learning_rate=1e-2),
    num_mini_batches=2,
    rows_per_micro_batch=2,
    remat="none",
)


def base_on(mesh: Mesh, compute_dtype: Any = jnp.float32) -> Params:
    like = frozen(ADAPTED, compute_dtype)
    cast = jax.tree.map(lambda leaf, struct: jnp.asarray(leaf, struct.dtype), params(), like)
    return jax.device_put(cast, frozen_shardings(ADAPTED, mesh))


def adapter() -> Params:
    """B is not zero, so that A has a gradient at once."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 4, lora.abstract(ADAPTED)
    )


def trainer_on(mesh: Mesh, compute_dtype: Any = jnp.float32) -> Trainer:
    model = TrainableModel(
        policy=ADAPTED,
        params=adapter(),
        mesh=mesh,
        compute_dtype=compute_dtype,
        row_tokens=ROW_TOKENS,
        base=base_on(mesh, compute_dtype),
    )
    return Trainer(
        config=CONFIG,
        limits=SampleLimits(max_staleness=2, max_new_tokens=ROW_TOKENS),
        policy=policy_learner(CONFIG, model, num_updates=100),
    )


@pytest.mark.slow
def test_the_adapter_learns_and_the_base_stays_bit_for_bit() -> None:
    trainer = trainer_on(train_mesh())
    base = trainer._learner.base
    before = jax.device_get(base)
    trainer.step(batch())
    trainer.step(batch(seed=1, version=1))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(base), before)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(base_on(train_mesh())))
    changed = jax.tree.map(
        lambda new, old: float(np.abs(np.asarray(new) - old).max()), trainer.params, adapter()
    )
    assert min(jax.tree.leaves(changed)) > 1e-3
    assert trainer.num_compilations == 6  # init, zeros, logprobs, accumulate, add, apply


@pytest.mark.slow
def test_checkpoint_has_the_adapter_and_its_moments() -> None:
    trainer = trainer_on(train_mesh(), jnp.bfloat16)
    trainer.step(batch())
    num_params = sum(leaf.size for leaf in jax.tree.leaves(lora.abstract(ADAPTED)))
    # Two layers of rank 2: q 16+16, k and v 16+8 each, o 16+16, gate and up 16+24 each, down 24+16.
    assert num_params == 2 * 2 * (32 + 24 + 24 + 32 + 40 + 40 + 40)
    leaves = jax.tree.leaves(trainer.state)
    assert (
        sum(leaf.size for leaf in leaves) == 3 * num_params + 2
    )  # two moments each; Adam's count and the version
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.params)} == {jnp.dtype(jnp.float32)}
    # The base has no master in float32; scales of norms stay wide, as the engine has them.
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, trainer._learner.base)
    assert (
        dtypes["layers"]["attn"]["q"]
        == dtypes["embed"]
        == dtypes["layers"]["attn"]["q_bias"]
        == "bfloat16"
    )
    assert dtypes["layers"]["attn_norm"] == dtypes["norm"] == "float32"


@pytest.mark.slow
def test_one_device_equals_four() -> None:
    mesh = train_mesh(4, tensor=2)
    alone, spread = trainer_on(train_mesh()), trainer_on(mesh)
    q, down = (
        spread.params["layers"][room][name] for room, name in (("attn", "q"), ("mlp", "down"))
    )
    # A of q is cut along the width, its B along the heads; the rank is whole everywhere.
    assert q["a"].addressable_shards[0].data.shape == (2, 8, 2)
    assert q["b"].addressable_shards[0].data.shape == (2, 2, 2, 4)
    assert down["a"].addressable_shards[0].data.shape == (2, 12, 2)
    ours, theirs = (trainer.step(batch()) for trainer in (alone, spread))
    for name in ("loss", "grad_norm", "entropy"):
        np.testing.assert_allclose(ours.metrics[name], theirs.metrics[name], rtol=1e-5, atol=1e-6)
    # Adam divides by the root of a gradient's square: what is nearly zero may turn either way.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        alone.params,
        jax.device_get(spread.params),
    )


def test_memory_counts_frozen_weights_once_and_narrow() -> None:
    mesh = train_mesh()
    reported = predicted_bytes(CONFIG, ADAPTED, mesh, jnp.bfloat16, row_tokens=ROW_TOKENS)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(lora.abstract(ADAPTED)))
    assert reported["parameters"] == reported["gradients"] == 4 * num_params
    assert reported["optimizer"] == 8 * num_params + 4
    norms = 16 * 5  # two in each of two layers, and the last
    assert reported["frozen"] == 2 * (POLICY.config.num_params - norms) + 4 * norms
    base = base_on(mesh, jnp.bfloat16)
    assert reported["frozen"] == bytes_per_device(base, frozen_shardings(ADAPTED, mesh))
    assert "frozen" not in predicted_bytes(
        CONFIG, POLICY, mesh, jnp.bfloat16, row_tokens=ROW_TOKENS
    )


@pytest.mark.slow
def test_both_factors_of_an_adapter_decay() -> None:
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), lora.axes(ADAPTED))
    zeros = jax.tree.map(jnp.zeros_like, adapter())
    # Without a gradient, what is left of AdamW's direction is the decay: half of each parameter.
    direction, _ = optimizer.update(zeros, optimizer.init(adapter()), adapter())
    jax.tree.map(
        lambda found, leaf: np.testing.assert_allclose(found, 0.5 * leaf, rtol=1e-6),
        direction,
        adapter(),
    )
