"""The policy behind a server: found, loaded and compiled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import jax

from areal_jax.config.overrides import assign, build, from_text, settings
from areal_jax.config.policy_names import named_policy
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.engine.batch import SamplingMode
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.errors import ConfigError, InvalidRequest, config_errors
from areal_jax.models import lora
from areal_jax.models.config import PolicyConfig
from areal_jax.parallel.config import PlacementConfig
from areal_jax.records import Completion, Message, Request, Sampling
from areal_jax.rewards.config import RewardModelConfig
from areal_jax.run.models import DecodingPolicy, decoding_mesh, find_decoding_policy
from areal_jax.run.reward_model import RewardModel, find_reward_model, is_reward_model
from areal_jax.serve.config import ServeConfig
from areal_jax.serve.engine_backend import EngineBackend
from areal_jax.storage import local_path
from areal_jax.weights.pinned import Pinned

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


class LoggedCompilation:
    """Logs which program is compiled: the first one, and then one every LOG_INTERVAL_S."""

    def __init__(self) -> None:
        self._logged_s = float("-inf")

    def __call__(self, name: str, number: int, total: int) -> None:
        """Receive the program that is compiled next, as `OnProgram` says."""
        if time.monotonic() - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = time.monotonic()
            logger.info("compiling %d of %d: %s", number, total, name)


@asynccontextmanager
async def engine_backend(config: ServeConfig, api_key: str) -> AsyncIterator[EngineBackend]:
    """Start an engine with the policy of the settings, compiled, until the block ends; where
    `model` is a reward model, load and compile that.

    Raises:
        ConfigError: the policy is missing, or does not fit.
    """
    if (reward_model := await asyncio.to_thread(find_served_reward_model, config)) is not None:
        async with reward_model_backend(config, reward_model, api_key) as backend:
            yield backend
        return
    decoding = await asyncio.to_thread(find_served, config)
    engine, weights = decoding.engine, await asyncio.to_thread(decoding.load)
    # Clients often set top_p; programs for other sampling settings are compiled while requests are
    # answered.
    await asyncio.to_thread(engine.warm_up, SamplingMode.FILTERED, LoggedCompilation())
    grammars = decoding.grammars()
    engine_loop = EngineLoop(engine, Pinned(weights), grammars=grammars)
    totals: dict[str, float] = {
        "tokens": 0.0,
        "dispatches": 0.0,
        "requests": 0.0,
        "prefill_tokens": 0.0,
    }

    def measure() -> dict[str, float]:
        # The engine loop counts since the last call.
        reported = engine_loop.metrics()
        totals.update({name: total + reported[name][0] for name, total in totals.items()})
        return totals

    try:
        engine_loop.start()
        engine_loop.compile_ahead(SamplingMode.SHAPED)
        limits, stops = config.engine, decoding.tokenizer.stop_token_ids
        sampling = Sampling(
            limits.max_new_tokens, limits.temperature, limits.top_k, limits.top_p, stops
        )
        name = config.served_name or config.model
        yield EngineBackend(
            engine_loop,
            name,
            decoding.tokenizer,
            sampling,
            config.seed,
            api_key,
            limits.max_prompt_tokens,
            measure,
            engine_loop.score,
            grammars,
        )
    finally:
        engine_loop.close()


class NoEngine:
    """In place of the engine of a reward model, which generates nothing."""

    async def submit(self, request: Request) -> list[Completion]:
        raise InvalidRequest(
            "expected a language model, found a reward model, which generates nothing; send "
            "conversations to /classify"
        )

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        return {}


@asynccontextmanager
async def reward_model_backend(
    config: ServeConfig, reward_model: RewardModel, api_key: str
) -> AsyncIterator[EngineBackend]:
    """Load and compile a reward model, which scores conversations until the block ends.

    Raises:
        ConfigError: its weights do not fit its architecture.
    """

    async def score_answer(messages: Sequence[Message], answer: str) -> tuple[float, int]:
        # Of a client: large conversations take long.
        tokens = await asyncio.to_thread(reward_model.encode, messages, answer)
        return await reward_model.score_tokens(tokens), len(tokens)

    try:
        await reward_model.start()
        yield EngineBackend(
            NoEngine(),
            config.served_name or config.model,
            reward_model.tokenizer,
            Sampling(config.engine.max_new_tokens),
            config.seed,
            api_key,
            score_answer=score_answer,
        )
    finally:
        await reward_model.close()


def find_served_reward_model(config: ServeConfig) -> RewardModel | None:
    """Find the reward model that `model` names; None where it names another policy.

    Its batches have `engine.num_slots` conversations of at most `engine.max_tokens` tokens.

    Raises:
        ConfigError: its files are not supported.
    """
    given, checkpoint = named_policy(config.model, "model")
    if checkpoint is not None or "path" not in given:
        return None
    scored = RewardModelConfig(
        path=given["path"],
        batch_size=config.engine.num_slots,
        max_tokens=config.engine.max_tokens,
    )
    with config_errors():
        if not is_reward_model(resolve_policy_folder(given["path"], "model")):
            return None
        return find_reward_model(
            scored, jax.devices()[-1], setting="model", limit="engine.max_new_tokens"
        )


def find_served(config: ServeConfig) -> DecodingPolicy:
    """Find the policy that `model` names.

    Raises:
        ConfigError: it is missing, or does not fit.
    """
    given, checkpoint = named_policy(config.model, "model")
    if "path" not in given:
        with config_errors():
            base = config.base or lora.read_base_name(local_path(config.model))
        if not base:
            raise ConfigError(
                f"model={config.model} is an adapter that names no base policy; set base"
            )
        given["path"] = base
    elif config.base is not None:
        raise ConfigError(
            f"base={config.base} is for adapters, and model={config.model} is none; leave out base"
        )
    policy = build(
        PolicyConfig,
        assign({**given, "compute_dtype": config.compute_dtype}, settings(PolicyConfig), from_text),
    )
    mesh = decoding_mesh(
        PlacementConfig(rollout_devices=config.devices, rollout_tensor=config.tensor), "devices"
    )
    return find_decoding_policy(
        policy, config.engine, mesh, checkpoint, seed=config.seed, setting="model"
    )
