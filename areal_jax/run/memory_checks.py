"""Whether the devices of a plan have enough memory, and the settings to change where they have
not.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import psutil

from areal_jax.cluster.config import Ray
from areal_jax.parallel.gpu_topologies import allocatable_bytes
from areal_jax.parallel.mesh import finer_meshes
from areal_jax.run.plan import Memory, Plan, TrainingPlan
from areal_jax.sim.hardware import device_of_kind

RESIDENT = ("frozen", "parameters", "optimizer", "weights", "draft policy")
"""Purposes of memory that is held all the time and known exactly."""


def find_shortage(plan: Plan) -> str:
    """The memory that is missing by the estimates, and the settings to change; empty where there is
    enough, or where the memory is unknown.
    """
    needed, available = _compare_memory(plan, plan.train_bytes(), plan.rollout_bytes())
    if not needed > available > 0:
        return ""
    return (
        f"about {format_bytes(needed)} are needed where there are {format_bytes(available)}: "
        f"{_relief(plan)}"
    )


def find_overflow(plan: Plan) -> str:
    """Why the devices, split as they are, cannot hold the policy; empty where they can, or where
    the memory is unknown.
    """
    train = {name: size for name, size in plan.train_bytes().items() if name in RESIDENT}
    rollout = {name: size for name, size in plan.rollout_bytes().items() if name in RESIDENT}
    needed, available = _compare_memory(plan, train, rollout)
    if not needed > available > 0:
        return ""
    return (
        f"{plan.devices} cannot hold the policy: {format_bytes(needed)} are needed where "
        f"there are {format_bytes(available)} (on each that trains {format_memory(train)}; on each "
        f"that decodes {format_memory(rollout)}); take more devices, split them otherwise by "
        "placement.rollout_share, or cut the policy over more of them by placement.train_fsdp or "
        "placement.rollout_tensor"
    )


def shard_to_fit(plan: TrainingPlan) -> TrainingPlan:
    """The plan with parameters cut over as many devices as the forecast of memory asks for, unless
    placement.train_fsdp is set.
    """
    is_given = plan.experiment.placement.train_fsdp is not None
    # All hosts must choose the same mesh: what a device reports may differ between them.
    available = _memory_of_kind(plan.train_mesh.devices.flat[0].device_kind)
    for mesh in (plan.train_mesh,) if is_given else finer_meshes(plan.train_mesh):
        plan = replace(plan, train_mesh=mesh)
        if sum(plan.train_bytes().values()) <= available:
            break
    return plan


def format_memory(sizes: Memory) -> str:
    """The sum of sizes, and each size."""
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    return f"about {format_bytes(sum(sizes.values()))}: {listed}"


def format_bytes(num_bytes: int) -> str:
    """A size in MiB or GiB."""
    return (
        f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
    )


def _compare_memory(plan: Plan, train: Memory, rollout: Memory) -> tuple[int, int]:
    """Bytes needed in one memory, and bytes available there; 0 where unknown."""
    if isinstance(plan.experiment.launch, Ray):
        return 0, 0  # the devices are elsewhere
    device = plan.train_mesh.devices.flat[0]
    on_train, on_rollout = sum(train.values()), sum(rollout.values())
    if device.platform == "cpu":
        # Simulated devices share the machine's memory.
        needed = on_train * plan.train_mesh.size + on_rollout * plan.rollout_mesh.size
        return needed, psutil.virtual_memory().total
    is_shared = device == plan.rollout_mesh.devices.flat[0]
    try:
        available = (device.memory_stats() or {}).get("bytes_limit", 0)
    except jax.errors.JaxRuntimeError:
        available = 0  # a compile-only device
    return on_train + on_rollout if is_shared else max(on_train, on_rollout), available


def _memory_of_kind(kind: str) -> float:
    """Bytes that a run can allocate on a device, by its data sheet; infinity where unknown."""
    try:
        return allocatable_bytes(kind) or device_of_kind(kind)[1].memory_bytes
    except ValueError:
        return math.inf


def _relief(plan: Plan) -> str:
    """The settings that lower the largest use of memory."""
    trainer = plan.experiment.trainer
    engine = {f"engine's {name}": size for name, size in plan.rollout_bytes().items()}
    sizes = {**plan.train_bytes(), **engine}
    largest = max(sizes, key=lambda name: sizes[name])
    more_devices = "cut over more devices with placement.train_fsdp or placement.train_tensor"

    def offload(setting: str, is_set: bool) -> str:
        return more_devices if is_set else f"set {setting}.offload=true, or {more_devices}"

    remat = "" if trainer.remat == "full" else "set trainer.remat=full, or "
    reliefs = {
        "optimizer": offload("trainer.optimizer", trainer.optimizer.offload),
        "activations": (
            f"{remat}lower trainer.rows_per_micro_batch or trainer.row_tokens, or cut rows with "
            "placement.train_context"
        ),
        "logits": "lower trainer.logp_chunk_tokens",
        **{spec.name: offload(f"trainer.{spec.name}", spec.offload) for spec in plan.frozen_models},
        "engine's weights": "cut over more devices with placement.rollout_tensor",
        "engine's draft policy": (
            "name a smaller engine.draft_policy, or cut over more devices with "
            "placement.rollout_tensor"
        ),
        "engine's KV caches": (
            "set engine.kv_tokens, or lower engine.num_slots or engine.max_new_tokens"
        ),
    }
    return f"most for {largest}; {reliefs.get(largest, more_devices)}"
