"""The programs of a run, what it holds on a device beside each of them, and whether they fit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from areal_jax.config.experiment import Experiment
from areal_jax.errors import ConfigError
from areal_jax.models.architecture import ModelConfig
from areal_jax.parallel.compilation import Program, peak_bytes
from areal_jax.parallel.sharding import bytes_per_device, shardings_of
from areal_jax.parallel.topologies import on_own_slice
from areal_jax.run.memory_checks import format_bytes
from areal_jax.run.plan import Plan, TrainingPlan
from areal_jax.run.trainer import abstract_weights, example_trainer, rl_trainer
from areal_jax.trainer.memory_estimate import frozen_bytes
from areal_jax.trainer.versions import Versions
from areal_jax.weights.local import weight_copy

_SHARDS = "raise placement.train_fsdp or placement.train_tensor, or take more devices"
_PREFILL = (
    "lower engine.prefill_chunk_tokens or engine.kv_tokens, or raise placement.rollout_tensor"
)
RELIEFS = {
    "accumulate": "set trainer.remat=full, lower trainer.row_tokens, "
    "trainer.rows_per_micro_batch or trainer.logp_chunk_tokens, or raise placement.train_fsdp, "
    "train_context or train_tensor",
    "apply": f"set trainer.optimizer.offload=true, or {_SHARDS}",
    "prefill": _PREFILL,
    "extend": _PREFILL,
    "score": "lower rewards.model.batch_size or rewards.model.max_tokens",
    "engine": "lower engine.num_slots, engine.max_new_tokens or engine.kv_tokens, or raise "
    "placement.rollout_tensor",
    "": _SHARDS,
}
"""Settings to change where a program does not fit, by a word of its name."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program to compile, and what it is measured by."""

    program: Program
    mesh: Mesh
    beside_bytes: int = 0
    model_flops: float = 0.0
    decode_steps: int = 0
    """Steps of a dispatch with all slots active; 0 where nothing is decoded."""
    decoded_tokens: int = 0
    decode_bytes: float = 0.0


@contextmanager
def refusing_what_does_not_fit(plan: TrainingPlan, trainer: Versions) -> Iterator[None]:
    """Refuse a run whose programs, compiled within the block, do not fit the devices of this
    process. On CPUs, whose memory is not limited, none is refused.

    Raises:
        ConfigError: one does not fit; the message has its sizes and the settings to change.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (sizes := exceeded_memory(error)) is None:
            raise
        raise ConfigError(
            f"a program does not fit the devices ({sizes}). For the trainer, "
            f"{RELIEFS['accumulate']}. For an engine, {RELIEFS['engine']}"
        ) from error
    stats = jax.local_devices()[0].memory_stats() or {}
    has_bytes = stats.get("bytes_limit", 0)
    if has_bytes and (problems := list(find_too_large(plan, trainer, has_bytes))):
        raise ConfigError("\n".join(problems))


def find_too_large(
    plan: TrainingPlan,
    trainer: Versions,
    has_bytes: int,
    *,
    is_wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[str]:
    """Yield the programs of a run that need more memory than a device has, by the compiler, each
    with the settings to change. What is compiled already is not compiled again.

    Args:
        plan: Plan of the run.
        trainer: Its trainer.
        has_bytes: Memory that the run can allocate on each device.
        is_wanted: Whether to look at the program of this name.
    """
    jobs = list(trainer_jobs(plan, trainer))
    of_trainer, of_engine = 0, 0
    if isinstance(plan, Plan) and plan.decodes:
        jobs += engine_jobs(plan)
        if plan.train_mesh.devices.flat[0] == plan.engine.mesh.devices.flat[0]:
            # Each waits on the other's device.
            of_trainer = sum(plan.rollout_bytes().values())
            of_engine = _bytes(trainer.state.params) + _bytes(trainer.state.opt_state)
    for job in jobs:
        name, compile_it = job.program
        if not is_wanted(name):
            continue
        peak = peak_bytes(compile_it())
        beside = job.beside_bytes + (of_trainer if name.startswith("trainer") else of_engine)
        if peak + beside > has_bytes:
            yield (
                f"{name} needs {format_bytes(peak)} and the run {format_bytes(beside)} beside it "
                f"(compiled), expected at most {format_bytes(has_bytes)} on a device; "
                f"{relief_of(name)}"
            )


def relief_of(program: str) -> str:
    """Return the settings to change where a program does not fit."""
    return next(text for word, text in RELIEFS.items() if word in program)


def training_flops(model: ModelConfig, rows: int, row_tokens: int) -> float:
    """Operations of a forward and a backward pass over full rows of one sequence each, without
    recomputation: 3 (2 P T + 4 A T² / 2) for each row.
    """
    pairs = row_tokens**2 / 2
    return 3.0 * rows * (2 * model.matmul_params * row_tokens + 4 * model.attention_width * pairs)


def abstract_trainer(plan: TrainingPlan) -> Versions:
    """Return the trainer of a plan, of shapes alone."""
    params, base = abstract_weights(plan)
    make = rl_trainer if isinstance(plan.experiment, Experiment) else example_trainer
    return make(plan, params, base)


def trainer_jobs(plan: TrainingPlan, trainer: Versions) -> Iterator[Job]:
    state = trainer.state
    sizes = {
        "params": _bytes(state.params),
        "opt_state": _bytes(state.opt_state),
        "critic": 0 if state.critic is None else _bytes(state.critic),
    }
    sizes["frozen"] = sum(
        0 if spec.offload else frozen_bytes(spec.policy, plan.train_mesh, plan.compute_dtype)
        for spec in plan.frozen_models
    )
    config, mesh = plan.experiment.trainer, plan.train_mesh
    rows = config.rows_per_micro_batch * math.prod(
        mesh.shape[axis] for axis in ("data", "fsdp", "expert")
    )
    for name, compile_it in trainer.list_programs():
        verb = name.split()[-1]
        takes = {"init": {"params"}, "apply": {"params", "opt_state"}}.get(verb, {"params"})
        if name.startswith("critic "):
            takes = {"critic"}
        elif name.startswith(("frozen ", "reference ")):
            takes = {"frozen"}
        flops = training_flops(plan.policy.config, rows, plan.row_tokens) / mesh.size
        yield Job(
            program=(f"trainer {name}", compile_it),
            mesh=mesh,
            beside_bytes=sum(size for part, size in sizes.items() if part not in takes)
            - (sizes["opt_state"] if verb == "init" else 0),
            model_flops=flops if name == "accumulate" else 0.0,
        )


def copy_job(plan: Plan, *, moves: bool) -> Job:
    params, _ = abstract_weights(plan)
    engine, mesh = plan.engine, plan.train_mesh
    copy = weight_copy(engine.layout, engine.param_shardings, mesh, moves=moves, on_device=True)
    return Job(program=("weights copy", lambda: copy.lower(params).compile()), mesh=mesh)


def engine_jobs(plan: Plan) -> Iterator[Job]:
    engine = plan.engine
    weights = bytes_per_device(engine.shapes.params, shardings_of(engine.shapes.params))
    config, draft = engine.config, engine.draft_bytes()
    alone = "init", "same_weights", "lay_out_draft"
    # Each step of the policy is one, too, of the draft policy for each draft.
    read = weights - draft + config.draft_tokens * draft + engine.kv_bytes()
    for name, compile_it in engine.list_programs():
        decodes = name.startswith("generate")
        yield Job(
            program=(f"engine {name}", compile_it),
            mesh=engine.mesh,
            # An update brings the next weights while these decode.
            beside_bytes=0 if name in alone else weights - draft,
            decode_steps=config.steps_per_dispatch if decodes else 0,
            decoded_tokens=config.num_slots * config.tokens_per_dispatch if decodes else 0,
            decode_bytes=config.steps_per_dispatch * read if decodes else 0.0,
        )


def exceeded_memory(error: jax.errors.JaxRuntimeError) -> str | None:
    """Return the device memory that a program needs, by XLA's error; None for other errors.

    What exceeds a kernel's own memory (VMEM, SMEM, shared memory) is no lack of device memory,
    although XLA calls it RESOURCE_EXHAUSTED as well: no setting of a run would mend it.
    """
    found = _NO_MEMORY.search(str(error))
    if found is None:
        return None
    needs, has, allocates = found.groups()
    return f"{allocates} in one array" if allocates else f"{needs} of {has} by XLA"


_NO_MEMORY = re.compile(
    r"Ran out of memory "
    r"(?:on HBM, the total memory required for .*? \(|in memory space hbm.*?Used )"
    r"([\d.]+[KMGT]?)\)? (?:exceeds available HBM \(|of )([\d.]+[KMGT]?)"
    r"|[Oo]ut of memory (?:while trying to allocate|allocating) ([\d.]+ ?\w+)",
    re.DOTALL,
)


def reward_model_jobs(plan: Plan) -> Iterator[Job]:
    """The programs that score answers on a rollout device, beside what decoding holds there."""
    if plan.reward_model is None:
        return
    mesh = on_own_slice(plan.reward_model.mesh)
    sizes = plan.rollout_bytes()
    beside = sum(size for part, size in sizes.items() if part != "reward model")
    for name, compile_it in plan.reward_model.list_programs(mesh):
        yield Job(program=(f"reward_model {name}", compile_it), mesh=mesh, beside_bytes=beside)


def _bytes(tree: object) -> int:
    """Bytes per device of a tree of shapes with shardings, without those in host memory."""
    leaves = [
        leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind in (None, "device")
    ]
    return bytes_per_device(leaves, [leaf.sharding for leaf in leaves])
