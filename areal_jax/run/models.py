"""Policies by name: their configuration, their weights on a mesh, and policies that only decode."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from areal_jax.checkpoint.checksums import CheckpointError
from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import FILES, saved_versions
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config.policy_names import RunCheckpoint
from areal_jax.data.grammars import Grammars
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine, find_too_long
from areal_jax.engine.decode_state import EngineParams
from areal_jax.errors import ConfigError, config_errors
from areal_jax.models import hf, lora
from areal_jax.models.architecture import ModelConfig, Readout
from areal_jax.models.config import PolicyConfig
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.hf import read_config
from areal_jax.models.vision.image_reader import ImageReader
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import compute_dtype, make_rollout_mesh
from areal_jax.parallel.sharding import ROLLOUT_RULES, Rules, abstract, shardings
from areal_jax.records import Weights, derive_seed
from areal_jax.run.draft_policies import find_draft_policy
from areal_jax.storage import fetch_objects, local_path
from areal_jax.trainer.state import trained

FINGERPRINT_BYTES = 1 << 20
"""Bytes read from the head and from the end of a file: training changes every tensor."""


def find_policy(
    config: PolicyConfig,
    folder: Path,
    readout: Readout = "CausalLM",
    *,
    setting: str = "policy.path",
) -> Policy:
    """Find the policy in a folder, with the adapter to train.

    Args:
        readout: another one than a language model's gets a fresh head where the folder holds a
            language model.
        setting: that names the policy, for messages.

    Raises:
        ValueError: the folder has another readout, or the adapter belongs to another policy.
    """
    model = read_model(config, folder)
    if model.readout not in ("CausalLM", readout):
        expected = " or ".join(dict.fromkeys(("CausalLM", readout)))
        raise ValueError(
            f"{setting}={config.path} is read out as {model.readout}; expected {expected}"
        )
    model = replace(model, readout=readout)
    if config.adapter is None:
        policy = Policy(model, config.lora)
    else:
        adapter = fetch_objects(config.adapter)
        policy = Policy(model, lora.read_config(adapter, config.ignore_config_keys))
        lora.check_base(adapter, config.path, str(folder))
        lora.check_tensors(adapter, policy)
    if policy.lora:
        lora.abstract(policy)
    return policy


def read_model(config: PolicyConfig, folder: Path) -> ModelConfig:
    """Read a folder's config.json with the policy's settings.

    Raises:
        ValueError: as `read_config`; also where the folder holds an adapter that is not the trained
            one.
    """
    adapter = config.adapter
    is_adapted = adapter is not None and local_path(str(adapter)).resolve() == folder.resolve()
    return read_config(
        folder, config.ignore_config_keys, is_adapted=is_adapted, long_rope=config.long_rope
    )


def find_critic(config: PolicyConfig, folder: Path) -> Policy:
    """Find the critic in a folder; a language model becomes the critic's trunk."""
    model = read_model(config, folder)
    return Policy(model if model.is_scalar else replace(model, readout="TokenClassification"))


def with_pad_token(policy: Policy, tokenizer: HFTokenizer, folder: Path) -> Policy:
    """Give a scalar head a padding token: without one, transformers refuses a batch of several
    texts.

    Raises:
        ValueError: the padding token of a reward model ends its texts; transformers scores the last
            token that is not padding.
    """
    model = policy.config
    if not model.is_scalar:
        return policy
    pad, is_reward = model.pad_token_id, model.readout == "SequenceClassification"
    if not is_reward:
        pad = tokenizer.pad_token_id if pad is None else pad
    elif pad is None or read_config(folder, model.ignored_keys).readout != model.readout:
        pad = tokenizer.find_pad_token_id()
    end = tokenizer.stop_token_ids[0]
    if is_reward and pad in (None, end):
        raise ValueError(
            f"{folder}: expected a pad_token_id that ends no text of a reward model, because "
            f"transformers scores the last token that is not padding; found {pad}, eos_token is "
            f"{end}. Set pad_token in tokenizer_config.json and pad_token_id in config.json to a "
            "special token that ends no answer"
        )
    return Policy(replace(model, pad_token_id=pad), policy.lora)


def find_image_reader(folder: Path, model: ModelConfig) -> ImageReader | None:
    """Find how a policy reads images; None if it does not, or has no image processor.

    Raises:
        ValueError: the image processor is not supported, or does not fit the vision tower.
    """
    try:
        return model.vision and ImageReader.from_folder(folder, model.vision)
    except FileNotFoundError:
        return None  # it reads text


def load_tokenizer(
    folder: Path, reader: ImageReader | None, ignored_keys: Collection[str] = ()
) -> HFTokenizer:
    """Read the tokenizer of a folder, which renders images if a reader is given; errors as of
    `HFTokenizer.from_folder`.
    """
    tokenizer = HFTokenizer.from_folder(folder, ignored_keys)
    if reader is not None:
        tokenizer.read_images(reader.vision.image_token_id, reader.num_tokens)
    return tokenizer


def initial_params(
    config: PolicyConfig,
    policy: Policy,
    folder: Path,
    mesh: Mesh,
    rules: Rules,
    dtype: DTypeLike,
    seed: int,
) -> tuple[Params, Params | None]:
    """Load a policy's weights onto a mesh, or initialize them.

    Args:
        dtype: of the weights' matrices; an adapter is float32.
        seed: of fresh weights.

    Returns:
        The weights and None; with an adapter, the adapter and the frozen weights.
    """
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
        return lora.load(local_path(config.adapter), policy, placed), weights
    init = jax.jit(partial(lora.init, policy), out_shardings=placed)
    return init(jax.random.key(derive_seed(seed, "adapter"))), weights


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodingPolicy:
    """A policy with an engine. Holds no weights."""

    config: PolicyConfig
    folder: Path
    policy: Policy
    tokenizer: HFTokenizer
    engine: DecodeEngine
    checkpoint: RunCheckpoint | None
    """Run checkpoint with trained weights, instead of those in the folder; has a version."""
    seed: int
    """Seed of weights that are in no file."""

    @property
    def version(self) -> int:
        """Version of the checkpoint; 0 for a folder."""
        return (self.checkpoint and self.checkpoint.version) or 0

    def grammars(self) -> Grammars:
        """Return the grammars that completions may match."""
        return Grammars.of(self.tokenizer, self.policy.config.vocab_size)

    def load(self) -> Weights:
        """Load the weights in the engine's layout.

        Raises:
            ConfigError: they are missing, or another policy's.
        """
        engine = self.engine
        try:
            with config_errors():
                weights, base = (
                    self._initial(self.seed)
                    if self.checkpoint is None
                    else self._restored(self.checkpoint)
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
        """Load the frozen weights of an adapter in the engine's layout; None where all weights are
        trained.
        """
        if not self.policy.lora:
            return None
        with config_errors():
            _, base = self._initial(self.seed)
        assert base is not None
        return _laid_out(self.engine, base, self.engine.base_shardings)

    def fingerprint(self) -> str:
        """Digest that identifies the weights: equal for copies of a folder. Reads a small part of
        each file.
        """
        trained_files = []
        if self.checkpoint is not None:
            store = CheckpointStore(self.checkpoint.folder / CHECKPOINTS, keep=1)
            trained_files = sorted(store.folder_of(self.version).glob(FILES))
        return _fingerprint([*self._files(), *trained_files])

    def _files(self) -> list[Path]:
        """Files of the policy and of its adapter."""
        adapter = self.config.adapter
        folders = [self.folder, *([] if adapter is None else [local_path(adapter)])]
        return [
            file
            for folder in folders
            for file in sorted(folder.iterdir())
            if file.suffix in (".json", ".safetensors")
        ]

    def _restored(self, checkpoint: RunCheckpoint) -> tuple[Params, Params | None]:
        shapes, axes = trained(self.policy)
        target = abstract(shapes, shardings(self.engine.mesh, axes, shapes, ROLLOUT_RULES))
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
    """Mesh of `placement.rollout_devices` devices, or of all.

    Args:
        setting: that gives the number of devices, for messages.

    Raises:
        ConfigError: there are fewer devices.
    """
    devices = jax.devices()
    wanted = placement.rollout_devices or len(devices)
    if wanted > len(devices):
        raise ConfigError(
            f"{setting}={wanted}: expected at most the {len(devices)} devices that there are; "
            f"lower {setting}"
        )
    with config_errors():
        return make_rollout_mesh(placement, devices[:wanted])


def find_decoding_policy(
    config: PolicyConfig,
    engine_config: EngineConfig,
    mesh: Mesh,
    checkpoint: RunCheckpoint | None,
    *,
    seed: int,
    setting: str = "policy.path",
) -> DecodingPolicy:
    """Find a policy, or what a run has trained of it, with an engine for it.

    Args:
        seed: of weights that are in no file.
        setting: that names the policy, for messages.

    Raises:
        ConfigError: a part is missing, or does not fit the others.
    """
    with config_errors():
        folder = resolve_policy_folder(config.path, setting)
        policy = find_policy(config, folder, setting=setting)
        dtype = compute_dtype(config.compute_dtype, mesh)
        reader = find_image_reader(folder, policy.config)
        tokenizer = load_tokenizer(folder, reader, config.ignore_config_keys)
        draft = find_draft_policy(engine_config, config, tokenizer, dtype, setting)
        engine = DecodeEngine(policy, mesh, engine_config, dtype, image_reader=reader, draft=draft)
    if problems := list(find_too_long(engine, f"{setting}={config.path}")):
        raise ConfigError("\n".join(problems))
    return DecodingPolicy(
        config=config,
        folder=folder,
        policy=policy,
        tokenizer=tokenizer,
        engine=engine,
        checkpoint=checkpoint and _with_version(checkpoint),
        seed=seed,
    )


def _with_version(checkpoint: RunCheckpoint) -> RunCheckpoint:
    """The checkpoint with the newest version where it names none.

    Raises:
        ConfigError: there is no such checkpoint.
    """
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
