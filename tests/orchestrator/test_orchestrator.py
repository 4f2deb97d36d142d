"""JetStream's own orchestrator decodes with the engine, token for token what the engine loop gives.

Needs the extra `jetstream`, and therefore an environment of its own; elsewhere these tests are not
collected.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import chz
import jax
import jax.numpy as jnp
import pytest
from embedded_engine import CONFIG, DEVICES, FOLDER, QUESTIONS, by_engine_loop, decoding, tokenizer

from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.jetstream import JetStreamEngine
from areal_jax.models import hf
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Message, Sampling

# The orchestrator of 0.2.2 asks for a name that JAX has given up.
jax.tree_map = jax.tree.map  # pyright: ignore[reportAttributeAccessIssue]

from jetstream.core import orchestrator  # pyright: ignore[reportMissingImports]  # noqa: E402
from jetstream.core.utils import async_multifuture  # pyright: ignore[reportMissingImports]  # noqa: E402

# Importing it makes all of this process tell everything.
logging.getLogger().setLevel(logging.WARNING)
logging.getLogger().handlers.clear()


class Orchestrator(orchestrator.Driver):
    """JetStream's engine loop, which ends the process where the last slot in use is given back
    between two of its looks at them."""

    def _generate_thread(self, idx: int) -> None:
        try:
            super()._generate_thread(idx)
        except AssertionError:
            # No slot is in use: nothing is lost by beginning again.
            if self.live:
                self._generate_thread(idx)


def by_jetstream(
    engine: JetStreamEngine, contents: Sequence[str | list[int]], max_tokens: int
) -> list[list[int]]:
    """What the orchestrator's own engine loop streams, request by request in the order in which
    they were asked."""
    params = engine.load_params()
    engine_loop = Orchestrator([engine], [engine], [params], [params], interleaved_mode=True)

    async def main() -> list[list[int]]:
        channels = []
        for content in contents:
            channels.append(async_multifuture.AsyncMultifuture())
            engine_loop.place_request_on_prefill_queue(
                orchestrator.ActiveRequest(
                    max_tokens=max_tokens, prefill_content=content, return_channel=channels[-1]
                )
            )

        async def tokens_of(channel: async_multifuture.AsyncMultifuture) -> list[int]:
            return [token async for samples in channel for token in samples[0].token_ids]

        try:
            async with asyncio.timeout(120):
                return await asyncio.gather(*map(tokens_of, channels))
        finally:
            # While the loop lives, which its threads still speak to.
            await asyncio.to_thread(engine_loop.stop)

    return asyncio.run(main())


@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_orchestrator_matches_the_engine_loop(num_devices: int, temperature: float) -> None:
    # More requests than slots, of one to three chunks, some of which stop and some of which are
    # cut.
    prompts = [tokenizer().render((Message("user", question),)) for question in QUESTIONS]
    sampling = Sampling(
        CONFIG.max_new_tokens, temperature, stop_token_ids=tokenizer().stop_token_ids
    )
    expected = [
        completion.tokens.tolist()
        for (completion,) in by_engine_loop(num_devices, prompts, sampling)
    ]
    found = by_jetstream(
        JetStreamEngine(*decoding(num_devices), tokenizer(), sampling, seed=7),
        [prompt.tolist() for prompt in prompts],
        CONFIG.max_new_tokens,
    )
    # JetStream keeps the stop token to itself.
    stops = set(tokenizer().stop_token_ids)
    assert found == [tokens[:-1] if tokens[-1] in stops else tokens for tokens in expected]
    assert {len(tokens) for tokens in found} != {CONFIG.max_new_tokens}
    assert threading.active_count() < 60


def test_text_goes_in_and_an_answer_may_be_cut_earlier() -> None:
    sampling = Sampling(CONFIG.max_new_tokens, 0.0, stop_token_ids=tokenizer().stop_token_ids)
    ((expected,),) = by_engine_loop(1, [tokenizer().encode(QUESTIONS[0])], sampling)
    (found,) = by_jetstream(
        JetStreamEngine(*decoding(1), tokenizer(), sampling, seed=7), [QUESTIONS[0]], 5
    )
    assert found == expected.tokens[:5].tolist()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"steps_per_dispatch": 2}, r"engine\.steps_per_dispatch=1, found 2"),
        ({"kv_tokens": 4096}, r"engine\.kv_tokens=0, found 4096"),
        ({"max_prompt_tokens": 8}, r"engine\.max_prompt_tokens of at least 16, found 8"),
    ],
)
def test_unsupported_jetstream_features_are_refused(settings: dict[str, int], named: str) -> None:
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    engine = DecodeEngine(
        Policy(hf.read_config(FOLDER)), mesh, chz.replace(CONFIG, **settings), jnp.float32
    )
    with pytest.raises(ValueError, match=named):
        JetStreamEngine(engine, {}, tokenizer(), Sampling(8))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(8, presence_penalty=0.5),
        Sampling(8, min_new_tokens=2),
        Sampling(8, num_top_logprobs=1),
    ],
)
def test_sequence_dependent_sampling_is_refused(sampling: Sampling) -> None:
    mesh = make_meshes(PlacementConfig(), jax.devices()[:1]).rollout
    engine = DecodeEngine(Policy(hf.read_config(FOLDER)), mesh, CONFIG, jnp.float32)
    with pytest.raises(ValueError, match="expected a sampling without penalties"):
        JetStreamEngine(engine, {}, tokenizer(), sampling)
