"""What a run is made of, found out without training: the policy, the data, the meshes, and the memory all that takes.

Everything that can be missing or contradict is looked for here, before any device is busy; bad input ends here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import Mesh

from areal_jax.config import AnyExperiment, Experiment
from areal_jax.data.config import TaskSource
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.sft import ExampleSet, load_examples
from areal_jax.data.sources import TaskSet, load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.decode import DecodeEngine
from areal_jax.models.decoder import Policy
from areal_jax.models.hf import read_config
from areal_jax.parallel.mesh import Meshes, make_meshes
from areal_jax.parallel.sharding import ROLLOUT_RULES, bytes_per_device, sharding
from areal_jax.records import derive_seed
from areal_jax.settings import ConfigError, as_text
from areal_jax.trainer.memory import predicted_bytes
from areal_jax.trainer.step import check_cut

T = TypeVar("T")

NUM_PROMPTS_TRIED = 64
"""So many prompts are measured: enough to tell that none will fit, few enough not to be waited for."""

Memory = Mapping[str, int]
"""Bytes on each device, by what they are for."""


@dataclass(frozen=True, eq=False)
class Plan:
    """An experiment with all that its settings name on this machine. Holds no weights."""

    experiment: AnyExperiment
    policy_folder: Path
    policy: Policy
    tokenizer: HFTokenizer
    compute_dtype: jnp.dtype
    tasks: TaskSet
    """What reinforcement learning trains on; empty in supervised fine-tuning."""
    examples: ExampleSet
    """What supervised fine-tuning trains on; empty in reinforcement learning."""
    eval_tasks: TaskSet
    """Empty where the experiment does not evaluate."""
    meshes: Meshes
    engine: DecodeEngine

    def headline(self) -> str:
        """One line: which policy, data and devices."""
        return f"policy: {self._policy()}; data: {self._data()}; devices: {self.devices}"

    def text(self) -> str:
        """All of it, a line each."""
        lines = (
            ("policy", self._policy()),
            ("data", self._data()),
            ("training", self._training()),
            ("evaluation", self._evaluation()),
            ("devices", self.devices),
            ("train mesh", _shape(self.meshes.train)),
            ("  on each", _memory(self.train_bytes())),
            ("rollout mesh", _shape(self.meshes.rollout)),
            ("  on each", _memory(self.rollout_bytes())),
            ("memory", self.shortage() or "will do"),
        )
        return "\n".join(f"{name:<12}  {line}" for name, line in lines)

    def train_bytes(self) -> Memory:
        """What training takes of each device of its mesh."""
        config, mesh = self.experiment.trainer, self.meshes.train
        return predicted_bytes(config, self.policy, mesh, self.compute_dtype, row_tokens=self.row_tokens)

    @property
    def row_tokens(self) -> int:
        """Tokens of a packed row."""
        return self.experiment.trainer.row_tokens or self.engine.max_tokens

    def rollout_bytes(self) -> Memory:
        """The engine's weights, twice while newer ones arrive; keys and values of every slot at its longest."""
        engine, model = self.engine, self.policy.config
        weights = jax.eval_shape(engine.layout, self.policy.abstract())
        half = jax.ShapeDtypeStruct(
            (model.num_hidden_layers, engine.config.num_slots, model.num_key_value_heads, model.head_dim, engine.max_tokens),
            engine.compute_dtype,
        )
        half_sharding = sharding(engine.mesh, ("layers", "slots", "kv_heads"), half.shape, ROLLOUT_RULES)
        return {
            "weights": 2 * bytes_per_device(weights, engine.param_shardings),
            "KV caches": 2 * bytes_per_device(half, half_sharding),
        }

    def _policy(self) -> str:
        model = self.policy.config
        size = f"{model.num_params / 1e6:,.1f} M parameters"
        return f"{self.experiment.policy.path} ({model.architecture}, {size}, {self.compute_dtype.name})"

    def _data(self) -> str:
        if isinstance(self.experiment, Experiment):
            return _count("tasks", len(self.tasks.tasks), self.tasks.skipped, self.experiment.tasks)
        return _count("examples", len(self.examples.examples), self.examples.skipped, self.experiment.examples)

    def _training(self) -> str:
        experiment = self.experiment
        if not isinstance(experiment, Experiment):
            return f"{experiment.num_steps} updates of {experiment.examples_per_batch} examples"
        rollout = experiment.rollout
        return (
            f"{experiment.num_steps} steps of {rollout.groups_per_batch} groups x {rollout.samples_per_group} samples, "
            f"{experiment.trainer.num_mini_batches} updates each; max_staleness {as_text(rollout.max_staleness)}"
        )

    def _evaluation(self) -> str:
        evaluation = self.experiment.evaluation
        if not evaluation.every_steps:
            return "none"
        num_tasks = "all" if evaluation.num_tasks is None else f"at most {evaluation.num_tasks}"
        tasks = _count("tasks", len(self.eval_tasks.tasks), self.eval_tasks.skipped, self.experiment.eval_tasks)
        return f"every {evaluation.every_steps} steps; {num_tasks} of {tasks}; samples_per_task {evaluation.samples_per_task}"

    @property
    def devices(self) -> str:
        """How many, of which kind; those that train before those that decode."""
        train, rollout = (mesh.devices.flat[0] for mesh in self.meshes)
        if train == rollout:
            return f"1 {train.device_kind}, shared by both meshes"
        return f"{self.meshes.train.size} + {self.meshes.rollout.size} {train.device_kind}"

    def shortage(self) -> str:
        """What to do where memory will not do by these estimates; empty where it will, or where nobody knows."""
        device = self.meshes.train.devices.flat[0]
        on_train, on_rollout = sum(self.train_bytes().values()), sum(self.rollout_bytes().values())
        if device.platform == "cpu":
            # Simulated devices share the machine's memory.
            has = psutil.virtual_memory().total
            needs = on_train * self.meshes.train.size + on_rollout * self.meshes.rollout.size
        else:
            has = (device.memory_stats() or {}).get("bytes_limit", 0)
            needs = on_train + on_rollout if device == self.meshes.rollout.devices.flat[0] else max(on_train, on_rollout)
        if not has or needs <= has:
            return ""
        return f"about {_size(needs)} are needed where there are {_size(has)}: {self._relief()}"

    def _relief(self) -> str:
        """The settings that lower the largest part of what memory goes to."""
        trainer = self.experiment.trainer
        parts = {**self.train_bytes(), **{f"engine's {name}": size for name, size in self.rollout_bytes().items()}}
        largest = max(parts, key=lambda name: parts[name])
        more_devices = "cut over more devices with placement.train_fsdp or placement.train_tensor"
        reliefs = {
            "optimizer": more_devices
            if trainer.optimizer.offload
            else f"set trainer.optimizer.offload=true, or {more_devices}",
            "activations": (
                ("" if trainer.remat == "full" else "set trainer.remat=full, or ")
                + "lower trainer.rows_per_micro_batch or trainer.row_tokens, or cut rows with placement.train_context"
            ),
            "logits": "lower trainer.logp_chunk_tokens",
            "engine's weights": "cut over more devices with placement.rollout_tensor",
            "engine's KV caches": "lower engine.num_slots or engine.max_new_tokens",
        }
        return f"most for {largest}; {reliefs.get(largest, more_devices)}"


def make_plan(experiment: AnyExperiment) -> Plan:
    """Find the policy and the data, cut the meshes. ConfigError where one of them cannot be had, or does not fit another."""
    folder = _had(lambda: resolve_policy_folder(experiment.policy.path))
    policy = Policy(_had(lambda: read_config(folder)))
    meshes = _had(lambda: make_meshes(experiment.placement))
    auto = "float32" if meshes.train.devices.flat[0].platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(experiment.policy.compute_dtype.replace("auto", auto))
    engine = _had(lambda: DecodeEngine(policy, meshes.rollout, experiment.engine, dtype))
    tokenizer = _had(lambda: HFTokenizer.from_folder(folder))
    tasks, examples, eval_tasks = TaskSet((), {}), ExampleSet((), {}), TaskSet((), {})
    if isinstance(experiment, Experiment):
        tasks = _had(lambda: load_tasks(experiment.tasks, experiment.prompt))
    else:
        seed, max_tokens = derive_seed(experiment.seed, "examples"), engine.max_tokens
        examples = _had(
            lambda: load_examples(experiment.examples, experiment.prompt, tokenizer, seed=seed, max_tokens=max_tokens)
        )
    if experiment.evaluation.every_steps:
        eval_tasks = _had(lambda: load_tasks(experiment.eval_tasks, experiment.prompt))
    plan = Plan(experiment, folder, policy, tokenizer, dtype, tasks, examples, eval_tasks, meshes, engine)
    _had(lambda: check_cut(policy, meshes.train, plan.row_tokens))
    _had(plan.train_bytes)
    if problems := list(misfits(plan)):
        raise ConfigError("\n".join(problems))
    return plan


def misfits(plan: Plan) -> Iterator[str]:
    """What in a plan does not go together, each in a sentence that names the knobs; nothing where all is well."""
    engine, model, path = plan.engine, plan.policy.config, plan.experiment.policy.path
    if engine.max_tokens > model.max_position_embeddings:
        yield (
            f"engine.max_prompt_tokens + engine.max_new_tokens = {engine.max_tokens} is longer than the "
            f"{model.max_position_embeddings} positions that policy.path={path} was made for; lower either"
        )
    if plan.tokenizer.vocab_size > model.vocab_size:
        yield (
            f"policy.path={path} has a tokenizer of {plan.tokenizer.vocab_size} tokens, "
            f"but its config.json says vocab_size={model.vocab_size}"
        )
    first = (plan.tasks.tasks or plan.eval_tasks.tasks)[:NUM_PROMPTS_TRIED]
    shortest = min((len(plan.tokenizer.render(task.prompt)) for task in first), default=0)
    if shortest > engine.config.max_prompt_tokens:
        yield (
            f"engine.max_prompt_tokens={engine.config.max_prompt_tokens} leaves out each of the first {len(first)} prompts, "
            f"the shortest of which has {shortest} tokens; raise it"
        )


def _had(find: Callable[[], T]) -> T:
    """What `find` returns. Doors say what cannot be had as ValueError or OSError: bad input, not a bug."""
    try:
        return find()
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _count(what: str, number: int, skipped: Mapping[str, int], source: TaskSource) -> str:
    where = getattr(source, "path", None) or getattr(source, "name", None) or "problems"
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
    return f"{number} {what} from {type(source).__name__} {where}" + (f" (skipped: {reasons})" if reasons else "")


def _shape(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def _memory(parts: Memory) -> str:
    return f"about {_size(sum(parts.values()))}: {', '.join(f'{name} {_size(size)}' for name, size in parts.items())}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
