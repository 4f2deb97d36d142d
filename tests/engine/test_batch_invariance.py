"""With `engine.batch_invariant`, the bits of a request do not depend on the others in its batch."""

from __future__ import annotations

import chz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_decode import CONFIG, engine, request, with_engine_loop

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import hf, lora
from areal_jax.models.config import LoRA, PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.sharding import ROLLOUT_RULES, shardings
from areal_jax.records import Completion, Request, Weights
from areal_jax.run.models import find_policy
from areal_jax.weights.pinned import Pinned

INVARIANT = chz.replace(
    CONFIG, batch_invariant="full", max_prompt_tokens=40, page_tokens=8, prefill_chunk_tokens=32
)
TOKENS = np.random.default_rng(0).integers(3, 700, 37).tolist()
OTHERS = [request(f"other {i}", TOKENS[i:], 1, max_new_tokens=12, seed=i) for i in range(1, 6)]


def embedded() -> tuple[DecodeEngine, Weights]:
    """Return an engine of the embedded policy with random adapters, whose products are large enough
    for XLA to have several kernels, and its weights.
    """
    mesh, plain = engine().mesh, find_policy(PolicyConfig(), EMBEDDED)
    policy = Policy(plain.config, LoRA(rank=8))
    decode = DecodeEngine(policy, mesh, INVARIANT, np.float32, num_adapters=1)
    placed = shardings(mesh, plain.axes(), plain.abstract(), ROLLOUT_RULES)
    layout = jax.jit(decode.layout, out_shardings=decode.shapes.base_shardings)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 50, leaf.dtype),
        decode.shapes.adapters,
    )
    base = layout(hf.load(EMBEDDED, plain, placed))
    return decode, Weights(0, lora.attach_stack(base, adapters, jnp.full(1, 4.0)))


def answers(
    decode: DecodeEngine, weights: Weights, *batches: list[Request]
) -> list[list[Completion]]:
    """Return the completions of the last batch; each batch is submitted after the one before."""

    async def act(loop: EngineLoop) -> list[list[Completion]]:
        loop.start()
        found = list[list[Completion]]()
        for batch in batches:
            found = [await each for each in [loop.submit(each) for each in batch]]
        return found

    return with_engine_loop(decode, Pinned(weights), act)


def bits(completions: list[Completion]) -> list[bytes]:
    return [each.tokens.tobytes() + each.logp.tobytes() for each in completions]


@pytest.mark.slow
def test_a_request_gets_the_same_bits_in_any_batch() -> None:
    served = embedded()
    # A whole chunk and the next one; a part of a chunk.
    for length in (37, 30):
        asked = request("asked", TOKENS[:length], 2, seed=3)
        (alone,) = answers(*served, [asked])
        assert bits(answers(*served, [*OTHERS, asked])[-1]) == bits(alone)
        # Prefixes of prompts and of samples are cached.
        sampled = [*TOKENS[:length], *alone[0].tokens.tolist()[:3]]
        for before in (TOKENS[:length], TOKENS[:20], sampled):
            found = answers(*served, [request("before", before, seed=3)], [asked])
            assert bits(found[0]) == bits(alone)


def test_all_sequences_are_decoded_by_one_program() -> None:
    longer = {"max_prompt_tokens": 300, "max_new_tokens": 300}
    lengths = [
        engine(chz.replace(config, **longer)).shapes.view_lengths for config in (CONFIG, INVARIANT)
    ]
    # Shorter views otherwise. 599 columns are needed, in a multiple of 64.
    assert lengths == [[128, 256, 640], [640]]


def test_preemption_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine.kv_tokens=512 .* set engine.kv_tokens=0"):
        engine(chz.replace(INVARIANT, kv_tokens=512))
