"""Weight channel and engine loop together, while a trainer on other devices overwrites its
parameters."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import CONFIG, POLICY, Shelf, answer, engine, params_of, request, trainer_logp

from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.records import Completion
from areal_jax.weights.local import WeightChannel

PROMPT = (5, 9, 33, 2, 17)


@pytest.mark.slow
def test_logp_is_that_of_the_token_version_while_a_trainer_publishes():
    four = engine(CONFIG, devices=4)
    train = make_meshes(PlacementConfig(rollout_devices=4)).train
    assert not set(train.devices.flat) & set(four.mesh.devices.flat)
    placed = shardings(train, POLICY.axes(), POLICY.abstract(), TRAIN_RULES)
    # A trainer's step that is easy to follow: in the same memory, every parameter changes its sign.
    step = jax.jit(
        lambda params: jax.tree.map(lambda leaf: -leaf, params),
        donate_argnums=0,
        out_shardings=placed,
    )
    weight_channel = WeightChannel(four.layout, [four.param_shardings], train)
    params = jax.device_put(jax.tree.map(np.array, params_of(0)), placed)
    weight_channel.publish(0, params)

    async def main() -> list[list[Completion]]:
        nonlocal params
        engine_loop = EngineLoop(four, weight_channel)
        engine_loop.start()
        waves = []
        version = 0
        for wave in range(3):
            futures = [
                engine_loop.submit(request(f"{wave}-{i}", PROMPT, num_samples=6, seed=i))
                for i in range(2)
            ]
            while not all(future.done() for future in futures):
                await asyncio.sleep(0.02)
                params, version = step(params), version + 1
                weight_channel.publish(version, params)
            waves += [future.result() for future in futures]
        engine_loop.close()
        return waves

    waves = asyncio.run(main())
    weight_channel.close()
    completions = [completion for group in waves for completion in group]
    assert len(completions) == 36
    assert sum(len(set(completion.versions)) > 1 for completion in completions) > 0
    # Even versions are the parameters of seed 0, odd ones their negatives.
    for completion in completions:
        logp = np.stack([trainer_logp(PROMPT, completion, 0, sign=sign) for sign in (1, -1)])
        np.testing.assert_allclose(
            completion.logp, logp[completion.versions % 2, np.arange(20)], atol=1e-4
        )
        assert (np.diff(completion.versions) >= 0).all()


@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-4), (jnp.bfloat16, 0.01)])
@pytest.mark.slow
def test_engine_and_trainer_logprobs_agree_over_thirty_swaps(dtype: type, most: float):
    # Eight answers of 31 tokens, all under way when each of 30 versions comes: their caches are
    # rebuilt 30 times.
    config = CONFIG.__class__(
        num_slots=8, max_prompt_tokens=12, max_new_tokens=31, steps_per_dispatch=1
    )
    one = DecodeEngine(POLICY, engine().mesh, config, dtype)
    [group] = answer(
        one,
        Shelf(one, *((look, look, look) for look in range(31))),
        request(num_samples=8, max_new_tokens=31),
    )
    errors = np.zeros((8, 31))
    for sample, completion in enumerate(group):
        assert completion.versions.tolist() == list(range(31))
        for version in range(31):
            logp = trainer_logp(PROMPT, completion, version, compute_dtype=dtype)
            errors[sample, version] = abs(completion.logp[version] - logp[version])
    assert errors.mean() < most
    assert errors[:, 16:].mean() < 2 * errors[:, :15].mean()
