"""Frozen opponents of environments with several players: engine loops with weights of their own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from jaxtyping import Int32

from areal_jax.config.experiment import AnyExperiment
from areal_jax.config.overrides import assign, build, from_text, settings
from areal_jax.config.policy_names import named_policy
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.errors import ConfigError
from areal_jax.models.config import PolicyConfig
from areal_jax.protocols import Engine
from areal_jax.records import Completion, Request, Sampling, derive_seed
from areal_jax.run.generation import training_sampling
from areal_jax.run.models import DecodingPolicy, find_decoding_policy
from areal_jax.weights.pinned import Pinned
from areal_jax.workflows.config import Environment
from areal_jax.workflows.environment import Opponent

INITIAL = "initial"
"""Name of the policy that training starts from."""


@dataclass(frozen=True, slots=True)
class FrozenOpponent:
    """Answers with weights that never change."""

    engine: Engine
    sampling: Sampling
    seed: int
    # Requests of evaluations and of training may have one key.
    _numbers: count[int] = field(default_factory=count)

    async def __call__(self, prompt_tokens: Int32[np.ndarray, "P"], key: str) -> Completion:
        request = Request(
            id=f"opponent-{next(self._numbers)}",
            prompt_tokens=prompt_tokens,
            num_samples=1,
            sampling=self.sampling,
            seed=derive_seed(self.seed, key),
        )
        (completion,) = await self.engine.submit(request)
        return completion


async def start_opponents(
    stack: AsyncExitStack, experiment: AnyExperiment, engine: DecodeEngine, tokenizer: HFTokenizer
) -> dict[str, Opponent]:
    """Load the opponents of `workflow.opponents` and start an engine loop for each, until the stack
    ends. They share the compiled programs of an engine, and have weights and KV caches of their
    own.

    Raises:
        ConfigError: one is missing, or of another architecture than the policy.
    """
    config = experiment.workflow
    found = dict[str, Opponent]()
    if not isinstance(config, Environment):
        return found
    sampling = training_sampling(experiment, tokenizer.stop_token_ids)
    for name in dict.fromkeys(config.opponents):
        decoding = _find(experiment, name, engine)
        loop = EngineLoop(engine, Pinned(await asyncio.to_thread(decoding.load)))
        stack.callback(loop.close)
        loop.start()
        found[name] = FrozenOpponent(loop, sampling, derive_seed(experiment.seed, name))
    return found


def _find(experiment: AnyExperiment, name: str, engine: DecodeEngine) -> DecodingPolicy:
    config, checkpoint, setting = experiment.policy, None, "workflow.opponents"
    if name != INITIAL:
        given, checkpoint = named_policy(name, setting)
        given = {**given, "compute_dtype": config.compute_dtype}
        config = build(PolicyConfig, assign(given, settings(PolicyConfig), from_text))
    decoding = find_decoding_policy(
        config, engine.config, engine.mesh, checkpoint, seed=experiment.seed, setting=setting
    )
    if decoding.policy != engine.policy:
        raise ConfigError(
            f"{setting}={name} has another architecture or adapter than "
            f"policy.path={experiment.policy.path}; name a policy that differs in its weights alone"
        )
    return decoding
