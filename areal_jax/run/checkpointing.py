"""Checkpoints and results of a run: the trainer's state, and policy, adapter and critic in files
of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from areal_jax.checkpoint.checksums import CheckpointError
from areal_jax.checkpoint.config import CHECKPOINTS, POLICY
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.checkpoint.recovery import Columns, encode
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config.load import CONFIG_FILE, read_plainly
from areal_jax.data.policy_files import EMBEDDED_POLICIES
from areal_jax.errors import ConfigError, NotSaved
from areal_jax.models import hf, lora
from areal_jax.records import RolloutState
from areal_jax.run.checks import RUN_ID
from areal_jax.run.plan import TrainingPlan
from areal_jax.run.recording import CHECKPOINT, Recording
from areal_jax.storage import shown
from areal_jax.trainer.versions import HostState, Versions

CRITIC = "critic"
ADAPTER = "adapter"
TRAINER = "trainer"
"""Name of a trainer's host state beside the rollouts."""


@runtime_checkable
class CheckpointWriter(Protocol):
    """Writes the trainer's state: a `Checkpointer`, or trainer hosts that each have one."""

    def save(self, version: int, beside: Columns) -> None: ...
    def write_results(self, version: int) -> Sequence[str]: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpointer:
    """Saves and restores one trainer's state. Use it from one thread at a time."""

    plan: TrainingPlan
    folder: Path
    """Run folder."""
    trainer: Versions
    store: CheckpointStore

    def restore(self, version: int) -> Columns:
        """Restore the trainer from a checkpoint; what the checkpoint holds beside its state.

        Raises:
            ConfigError: the checkpoint cannot be read, or belongs to another policy.
        """
        try:
            # The trainer frees its state first: two would not fit.
            state, beside = self.store.restore(version, self.trainer.let_go())
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        self.trainer.restore(state)
        if TRAINER in beside.facts:
            arrays = {
                name.removeprefix(f"{TRAINER}."): array
                for name, array in beside.arrays.items()
                if name.startswith(f"{TRAINER}.")
            }
            self.trainer.restore_host_state(HostState(beside.facts[TRAINER], arrays))
        return beside

    def save(self, version: int, beside: Columns) -> None:
        """Start writing a checkpoint.

        Raises:
            CheckpointError: this one, or the one before, cannot be written.
        """
        if (state := self.trainer.host_state) is not None:
            arrays = {f"{TRAINER}.{name}": array for name, array in state.arrays.items()}
            beside = Columns(beside.facts | {TRAINER: state.facts}, beside.arrays | arrays)
        self.store.save(version, self.trainer.state, beside)

    def write_results(self, version: int) -> list[str]:
        """Write policy, adapter and critic as Hugging Face and PEFT folders, and wait for the
        checkpoint that is being written; lines to show.
        """
        return list(self._results(version))

    def _results(self, version: int) -> Iterator[str]:
        plan, config = self.plan, self.plan.experiment
        policy, params, exports = plan.policy, self.trainer.params, config.checkpoint.export_hf
        if policy.lora:
            # Other tools do not know the names of embedded policies.
            is_embedded = config.policy.path in EMBEDDED_POLICIES
            base = str(plan.policy_folder) if is_embedded else config.policy.path
            lora.save(self.folder / ADAPTER, policy, params, base)
            yield f"adapter of version {version}: {shown(self.folder / ADAPTER)}"
        if exports:
            merged = lora.merge(policy, self.trainer.base, params) if policy.lora else params
            hf.save(self.folder / POLICY, policy, merged, plan.policy_folder)
            yield f"policy of version {version}: {shown(self.folder / POLICY)}"
        critic = self.trainer.state.critic
        if critic is not None and plan.critic is not None and exports:
            hf.save(self.folder / CRITIC, plan.critic, critic.params, plan.critic_folder)
            yield f"critic of version {version}: {shown(self.folder / CRITIC)}"
        try:
            self.store.wait()
        except CheckpointError as error:
            yield f"warning: {error}"


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Checkpoints of a run: trainer and rollouts together."""

    folder: Path
    """Run folder."""
    writer: CheckpointWriter
    recording: Recording

    def save(self, version: int, state: RolloutState) -> None:
        """Start writing a checkpoint. Where it cannot be written, a warning is shown and training
        continues: its samples are worth more.
        """
        beside = encode(state, {RUN_ID: read_plainly(self.folder / CONFIG_FILE)[0]})
        try:
            with self.recording.span(CHECKPOINT, f"version {version}"):
                self.recording.flush()
                self.writer.save(version, beside)
        except CheckpointError as error:
            self.recording.say(f"warning: {error}")

    def write_results(self, version: int) -> None:
        """Write the results as `Checkpointer.write_results`, and show where they are."""
        with self.recording.span(CHECKPOINT, "results"):
            lines = self.writer.write_results(version)
        for line in lines:
            self.recording.say(line)

    def require_saved(self, version: int) -> None:
        """Require a checkpoint of the last version.

        Raises:
            NotSaved: there is none.
        """
        if version not in saved_versions(self.folder / CHECKPOINTS):
            raise NotSaved(
                f"version {version}, the last that was trained, has no checkpoint: see the "
                "warning above"
            )
