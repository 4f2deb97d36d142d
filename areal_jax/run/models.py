"""Policies as they are found: their weights brought onto a mesh, and those that only decode, with
nothing that trains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.checkpoint.store import FILES, CheckpointError, CheckpointStore
from areal_jax.config.policy_names import RunCheckpoint
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine, EngineParams, too_long
from areal_jax.errors import ConfigError
from areal_jax.models import hf, lora
from areal_jax.models.config import PolicyConfig
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import compute_dtype, make_rollout_mesh
from areal_jax.parallel.sharding import ROLLOUT_RULES, Rules, shardings
from areal_jax.records import Weights, derive_seed
from areal_jax.run.plan import find_policy, had
from areal_jax.trainer.state import trained

FINGERPRINT_BYTES = 1 << 20
"""Of the head of a file, and of its end: after training, every tensor has changed."""


def initial_params(
    config: PolicyConfig,
    policy: Policy,
    folder: Path,
    mesh: Mesh,
    rules: Rules,
    dtype: DTypeLike,
    seed: int,
) -> tuple[Params, Params | None]:
    """The policy's weights; or an adapter, and the weights beside it: from their folders, or fresh,
    on a mesh.

    Args: dtype: of the weights' matrices; an adapter is float32. seed: of fresh weights."""
    dtype = jnp.dtype(dtype)
    abstract = policy.abstract(dtype)
    placed = shardings(mesh, policy.axes(), abstract, rules)

    def fresh(key: PRNGKeyArray) -> Params:
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), policy.init(key), abstract)

    if config.random_init:
        weights = jax.jit(fresh, out_shardings=placed)(jax.random.key(seed))
    else:
        weights = hf.load(folder, policy, placed, dtype=dtype)
    if not policy.lora:
        return weights, None
    placed = shardings(mesh, lora.axes(policy), lora.abstract(policy), rules)
    if config.adapter is not None:
        return lora.load(Path(config.adapter).expanduser(), policy, placed), weights
    init = jax.jit(partial(lora.init, policy), out_shardings=placed)
    return init(jax.random.key(derive_seed(seed, "adapter"))), weights


@dataclass(frozen=True, eq=False)
class DecodingPolicy:
    """A policy with an engine. Holds no weights."""

    config: PolicyConfig
    folder: Path
    policy: Policy
    tokenizer: HFTokenizer
    engine: DecodeEngine
    checkpoint: RunCheckpoint | None
    """Where what was trained comes from, instead of the folder; with a version."""
    seed: int
    """Of weights that lie nowhere."""

    @property
    def version(self) -> int:
        """Of a run's checkpoint; 0 for a folder."""
        return (
            0
            if self.checkpoint is None or self.checkpoint.version is None
            else self.checkpoint.version
        )

    def load(self) -> Weights:
        """The weights in the engine's layout. ConfigError where they cannot be had, or are another
        policy's."""
        engine, checkpoint = self.engine, self.checkpoint
        try:
            weights, base = had(
                lambda: (
                    self._initial(self.seed) if checkpoint is None else self._restored(checkpoint)
                )
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        arrived = _laid_out(engine, weights, engine.param_shardings)
        if base is not None:
            arrived = lora.attach(
                self.policy, _laid_out(engine, base, engine.base_shardings), arrived
            )
        return Weights(self.version, arrived)

    def load_base(self) -> EngineParams | None:
        """The frozen weights that an adapter belongs to, in the engine's layout; None where all
        weights are trained."""
        if not self.policy.lora:
            return None
        _, base = had(lambda: self._initial(self.seed))
        assert base is not None
        return _laid_out(self.engine, base, self.engine.base_shardings)

    def fingerprint(self) -> str:
        """A few letters that other weights would not have; tells copies of a folder for the same,
        and reads little of it."""
        trained_files = []
        if self.checkpoint is not None:
            store = CheckpointStore(self.checkpoint.folder / CHECKPOINTS, keep=1)
            trained_files = sorted(store.folder_of(self.version).glob(FILES))
        return _fingerprint([*self._files(), *trained_files])

    def _files(self) -> list[Path]:
        """Of the policy and, where one is named, of its adapter."""
        adapter = self.config.adapter
        folders = [self.folder, *([] if adapter is None else [Path(adapter).expanduser()])]
        return [
            file
            for folder in folders
            for file in sorted(folder.iterdir())
            if file.suffix in (".json", ".safetensors")
        ]

    def _restored(self, checkpoint: RunCheckpoint) -> tuple[Params, Params | None]:
        abstract, axes = trained(self.policy)
        placed = shardings(self.engine.mesh, axes, abstract, ROLLOUT_RULES)
        target = jax.tree.map(
            lambda leaf, how: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=how),
            abstract,
            placed,
        )
        store = CheckpointStore(checkpoint.folder / CHECKPOINTS, keep=1)
        weights = store.restore_field(checkpoint.version, "params", target)
        if not self.policy.lora:
            return weights, None
        return weights, self._initial(checkpoint.seed)[1]

    def _initial(self, seed: int) -> tuple[Params, Params | None]:
        engine = self.engine
        return initial_params(
            self.config,
            self.policy,
            self.folder,
            engine.mesh,
            ROLLOUT_RULES,
            engine.compute_dtype,
            seed,
        )


def decoding_mesh(placement: PlacementConfig, setting: str) -> Mesh:
    """All devices, or as many as `placement.rollout_devices`, which `setting` names. ConfigError
    where there are fewer."""
    devices = jax.devices()
    wanted = placement.rollout_devices or len(devices)
    if wanted > len(devices):
        raise ConfigError(f"{setting}={wanted}, and there are {len(devices)} devices")
    return had(lambda: make_rollout_mesh(placement, devices[:wanted]))


def find_decoding_policy(
    config: PolicyConfig,
    engine_config: EngineConfig,
    mesh: Mesh,
    checkpoint: RunCheckpoint | None,
    *,
    seed: int,
    setting: str = "policy.path",
) -> DecodingPolicy:
    """A policy, with what a run has trained of it, ready to be loaded.

    Args: seed: of weights that lie nowhere. setting: which names the policy, for messages.
    ConfigError where something is missing, or does not fit the others."""
    folder = had(lambda: resolve_policy_folder(config.path, setting))
    policy = had(lambda: find_policy(config, folder, setting=setting))
    engine = had(
        lambda: DecodeEngine(policy, mesh, engine_config, compute_dtype(config.compute_dtype, mesh))
    )
    tokenizer = had(lambda: HFTokenizer.from_folder(folder, config.ignore_config_keys))
    if checkpoint is not None:
        checkpoint = _with_version(checkpoint)
    if problems := list(too_long(engine, f"{setting}={config.path}")):
        raise ConfigError("\n".join(problems))
    return DecodingPolicy(config, folder, policy, tokenizer, engine, checkpoint, seed)


def _with_version(checkpoint: RunCheckpoint) -> RunCheckpoint:
    """The newest where none is named. ConfigError where there is no such checkpoint."""
    versions = saved_versions(checkpoint.folder / CHECKPOINTS)
    if not versions or checkpoint.version not in (None, *versions):
        wanted = "yet" if checkpoint.version is None else f"of version {checkpoint.version}"
        found = ", ".join(map(str, versions)) or "none"
        raise ConfigError(
            f"{checkpoint.folder}: this run has no checkpoint {wanted}; found {found}"
        )
    return replace(
        checkpoint, version=versions[-1] if checkpoint.version is None else checkpoint.version
    )


def _laid_out(engine: DecodeEngine, params: Params, placed: Any) -> EngineParams:
    return jax.jit(engine.layout, out_shardings=placed)(params)


def _fingerprint(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINT_BYTES))
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
