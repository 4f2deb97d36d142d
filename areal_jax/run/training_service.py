"""The policy behind a Tinker-compatible training server, which all of its models share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import jax

from areal_jax.data.policy_files import EMBEDDED_POLICIES, resolve_policy_folder
from areal_jax.engine.decode import DecodeEngine, find_too_long
from areal_jax.engine.decode_state import EngineParams
from areal_jax.errors import ConfigError, config_errors
from areal_jax.models.config import LoRA, PolicyConfig
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import compute_dtype, make_train_mesh
from areal_jax.parallel.sharding import ROLLOUT_RULES, TRAIN_RULES
from areal_jax.run.draft_policies import find_draft_policy
from areal_jax.run.models import decoding_mesh, find_policy, initial_params, load_tokenizer
from areal_jax.tinker.catalog import ServedPolicy
from areal_jax.tinker.config import TinkerConfig
from areal_jax.tinker.engine_pool import EnginePool
from areal_jax.tinker.journal import Journal
from areal_jax.tinker.pooled_engine import SamplerWeights
from areal_jax.tinker.service import Service
from areal_jax.tinker.tenants import Tenants
from areal_jax.tinker.training import TrainingBackend


@asynccontextmanager
async def training_service(
    config: TinkerConfig, journal: Journal, tenants: Tenants
) -> AsyncIterator[Service]:
    """Load the policy and resume what the journal holds, until the block ends.

    The function has more than 60 lines because it makes and connects all parts.

    Raises:
        ConfigError: the policy is missing, or does not fit.
    """
    placement = PlacementConfig(
        rollout_devices=config.devices, rollout_tensor=config.tensor, train_tensor=config.tensor
    )
    rollout_mesh = decoding_mesh(placement, "devices")
    policy_config = PolicyConfig(path=config.model, compute_dtype=config.compute_dtype)
    with config_errors():
        folder = resolve_policy_folder(config.model, "model")
        policy = find_policy(policy_config, folder, setting="model")
        train_mesh = make_train_mesh(placement, list(rollout_mesh.devices.flat))
        tokenizer = load_tokenizer(folder, None)
        dtype = compute_dtype(config.compute_dtype, rollout_mesh)
        draft = find_draft_policy(config.engine, policy_config, tokenizer, dtype, "model")

    def load(mesh: jax.sharding.Mesh, rules: dict[str, tuple[str, ...]], exact: bool) -> Params:
        # Frozen parameters are in the compute dtype, trained ones in float32.
        with config_errors():
            weights, _ = initial_params(
                policy_config,
                policy,
                folder,
                mesh,
                rules,
                "float32" if exact else dtype,
                config.seed,
            )
        return weights

    params = await asyncio.to_thread(load, train_mesh, dict(TRAIN_RULES), not config.lora)
    tokenizer_id = _tokenizer_id(config.model, folder)
    name = config.served_name or tokenizer_id
    backend = TrainingBackend(policy, params, train_mesh, dtype, config, name)

    def make_engine(shape: LoRA | None) -> DecodeEngine:
        num_adapters = 0 if shape is None else config.limits.max_adapters
        adapted = Policy(policy.config, shape)
        return DecodeEngine(
            adapted, rollout_mesh, config.engine, dtype, num_adapters=num_adapters, draft=draft
        )

    with config_errors():
        if problems := list(find_too_long(make_engine(None), f"model={config.model}")):
            raise ConfigError("\n".join(problems))

    @cache
    def base_weights() -> EngineParams:
        engine = make_engine(None)
        weights = load(rollout_mesh, dict(ROLLOUT_RULES), False)
        return jax.jit(engine.layout, out_shardings=engine.param_shardings)(weights)

    async def load_sampler(path: str) -> SamplerWeights:
        return await service.load_sampler(path)

    pool = EnginePool(
        make_engine,
        backend.bucket,
        base_weights if config.lora else lambda: None,
        load_sampler,
        config.limits.max_engines,
    )
    names = frozenset({name, config.model, str(folder)})
    served = ServedPolicy(name, names, tokenizer, tokenizer_id)
    service = Service(config, served, backend, journal, pool, tenants)
    async with service.running():
        yield service


def _tokenizer_id(model: str, folder: Path) -> str:
    """Return the name from which clients load the tokenizer: of the hub, or a folder."""
    is_local = folder in EMBEDDED_POLICIES.values() or Path(model).expanduser().exists()
    return str(folder.absolute()) if is_local else model
