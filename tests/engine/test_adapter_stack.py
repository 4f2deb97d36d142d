"""Several adapters in one batch: each sequence gets what it gets alone, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import (
    CONFIG,
    POLICY,
    answer,
    laid_out,
    params_of,
    request,
    same_samples,
    trainer_logp,
)
from tiny_decode import engine as plain_engine

from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.drafts import DraftPolicy
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import lora
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params, Policy
from areal_jax.records import Completion, Request, Weights
from areal_jax.weights.pinned import Pinned

NUM_ADAPTERS = 3
BUCKET = Policy(POLICY.config, LoRA(rank=8))
SHAPES = {0: LoRA(rank=4, alpha=8.0), 1: LoRA(rank=8, alpha=4.0, targets=("q_proj", "down_proj"))}


@lru_cache
def engine() -> DecodeEngine:
    mesh = plain_engine().mesh
    return DecodeEngine(BUCKET, mesh, CONFIG, jnp.float32, num_adapters=NUM_ADAPTERS)


def adapter_of(shape: LoRA, seed: int) -> Params:
    rng = np.random.default_rng(seed)
    leaves = lora.abstract(Policy(POLICY.config, shape))
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 4, leaves)


@lru_cache
def padding() -> Callable[[Params], Any]:
    own = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), engine().shapes.adapters)
    return jax.jit(lambda adapter: lora.pad(engine().layout(adapter), own))


def stacked(adapters: Mapping[int, tuple[int, int]]) -> Any:
    """Weights with adapters, given as shape and seed by place."""
    shapes = engine().shapes
    stack = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.adapters)
    scales = np.zeros(NUM_ADAPTERS, np.float32)
    for place, (shape, seed) in adapters.items():
        padded = padding()(adapter_of(SHAPES[shape], seed))
        for leaf, one in zip(jax.tree.leaves(stack), jax.tree.leaves(padded), strict=True):
            leaf[place] = one
        scales[place] = SHAPES[shape].scale
    return lora.attach_stack(laid_out(plain_engine(), 0), stack, scales)


def asked(name: str, adapter: int, num_samples: int = 2) -> Request:
    return replace(request(name, num_samples=num_samples), adapter=adapter)


def bits(completions: list[Completion]) -> list[tuple[list[int], bytes]]:
    return [(each.tokens.tolist(), each.logp.tobytes()) for each in completions]


@pytest.mark.slow
def test_adapters_in_one_batch_get_what_each_gets_alone() -> None:
    both = Pinned(Weights(0, stacked({0: (0, 1), 2: (1, 2)})))
    # The same prompt, of which no page may be shared.
    requests = asked("a", 0), asked("b", 2), asked("base", 1)
    together = answer(engine(), both, *requests)
    alone = [
        answer(engine(), Pinned(Weights(0, stacked({1: (0, 1)}))), asked("a", 1)),
        answer(engine(), Pinned(Weights(0, stacked({0: (1, 2)}))), asked("b", 0)),
        answer(plain_engine(), Pinned(Weights(0, laid_out(plain_engine(), 0))), asked("base", 0)),
    ]
    for found, (expected,) in zip(together[:2], alone[:2], strict=True):
        assert bits(found) == bits(expected)
    assert [s.tokens.tolist() for s in together[2]] == [s.tokens.tolist() for s in alone[2][0]]
    # As the trainer computes it, with the adapter merged.
    own, adapter = Policy(POLICY.config, SHAPES[0]), adapter_of(SHAPES[0], 1)
    expected = trainer_logp(
        (5, 9, 33, 2, 17),
        together[0][0],
        0,
        change=lambda params: lora.merge(own, params, adapter),
    )
    np.testing.assert_allclose(together[0][0].logp, expected, atol=1e-3)


@pytest.mark.slow
def test_drafts_leave_the_samples_of_every_adapter() -> None:
    both = Pinned(Weights(0, stacked({0: (0, 1), 2: (1, 2)})))
    requests = asked("a", 0), asked("b", 2), asked("base", 1)
    config = chz.replace(CONFIG, draft_tokens=2, draft_policy="base")
    base = DraftPolicy(POLICY, lambda placed: jax.device_put(params_of(0), placed))
    drafted = DecodeEngine(
        BUCKET,
        plain_engine().mesh,
        config,
        jnp.float32,
        num_adapters=NUM_ADAPTERS,
        draft=base,
    )
    for found, expected in zip(
        answer(drafted, both, *requests), answer(engine(), both, *requests), strict=True
    ):
        same_samples(found, expected)


class Once:
    """Weights that come after the first dispatches."""

    def __init__(self, first: Any, second: Any, look: int) -> None:
        self._weights, self._look, self._looks = (first, second), look, 0

    def newest(self, after: int) -> Weights | None:
        self._looks += 1
        version = int(self._looks > self._look)
        return Weights(version, self._weights[version]) if version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        raise TimeoutError


def test_new_weights_of_one_adapter_leave_the_other_as_it_is() -> None:
    first, second = stacked({0: (0, 1), 1: (1, 2)}), stacked({0: (0, 3), 1: (1, 2)})
    requests = asked("a", 0), asked("b", 1)
    undisturbed = answer(engine(), Pinned(Weights(0, first)), *requests)
    programs = set(engine().programs.compiled)

    async def main() -> tuple[list[list[Completion]], dict[str, tuple[float, float]]]:
        loop = EngineLoop(engine(), Once(first, second, 3))
        futures = [loop.submit(each) for each in requests]
        loop.start()
        try:
            return [await each for each in futures], loop.metrics()
        finally:
            loop.close()

    (changed, other), metrics = asyncio.run(main())
    assert bits(other) == bits(undisturbed[1])
    num_before = int((changed[0].versions == 0).sum())
    assert 0 < num_before < 20
    assert changed[0].tokens[:num_before].tolist() == undisturbed[0][0].tokens[:num_before].tolist()
    assert bits(changed) != bits(undisturbed[0])
    # Of the changed adapter alone: two samples of the prompt and what they had sampled, less the
    # last token of each.
    assert metrics["recompute_tokens"][0] <= 2 * (5 + num_before)
    assert set(engine().programs.compiled) - programs <= {("same_adapters",)}
