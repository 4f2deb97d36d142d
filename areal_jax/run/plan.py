"""What a run is made of, found out without training: the policy, the data, the meshes, and the
memory all that takes.

Everything that can be missing or contradict is looked for here, before any device is busy; bad
input ends here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import chz
import jax
import jax.numpy as jnp
import psutil
from jax.sharding import Mesh

from areal_jax.cluster.config import Ray
from areal_jax.config.checks import contradictions
from areal_jax.config.experiment import AnyExperiment, Experiment, PreferenceExperiment
from areal_jax.config.overrides import as_text
from areal_jax.data.config import HeldOut, TaskSource
from areal_jax.data.examples import ExampleSet
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.preferences import load_pairs
from areal_jax.data.sft import load_examples
from areal_jax.data.sources import Skipped, TaskSet, format_skipped, load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.decode import DecodeEngine, too_long
from areal_jax.errors import ConfigError
from areal_jax.models import lora
from areal_jax.models.architecture import ModelConfig, Readout
from areal_jax.models.config import PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.models.hf import read_config
from areal_jax.parallel.mesh import Meshes, compute_dtype, engine_meshes, make_meshes
from areal_jax.parallel.sharding import bytes_per_device
from areal_jax.records import Message, Task, derive_seed
from areal_jax.rl.config import GAE, Reference
from areal_jax.trainer.forward import check_cut
from areal_jax.trainer.memory_estimate import frozen_bytes, predicted_bytes
from areal_jax.trainer.state import require_host_memory, trained
from areal_jax.workflows.agent import parse_command
from areal_jax.workflows.config import Agent, MultiTurn, ToolUse
from areal_jax.workflows.prompt_budget import (
    Limits,
    Prompts,
    doubtful_prompts,
    later_turns,
    measure_prompts,
    refused_prompts,
    required_prompt_tokens,
    too_few_tasks,
)

T = TypeVar("T")

NEEDED_BY_RAY = ("ray", "xxhash")

EXAMPLES_PROMPT_TOKENS = 1024
"""engine.max_prompt_tokens of learning from examples where it is not set, unless an evaluation
needs more."""

Memory = Mapping[str, int]
"""Bytes on each device, by what they are for."""

RESTING = ("frozen", "parameters", "optimizer", "weights")
"""Of these, what lies there all the time and is known exactly."""


@dataclass(frozen=True)
class FrozenModelSpec:
    """A frozen policy beside the one that is trained: a reference, a teacher."""

    name: str
    """Of its settings, trainer.NAME."""
    path: str
    policy: Policy
    folder: Path | None
    """None: the weights that training starts from."""
    offload: bool


@dataclass(frozen=True, eq=False)
class TrainingPlan:
    """What a trainer is made of. Holds no weights."""

    experiment: AnyExperiment
    policy_folder: Path
    policy: Policy
    beside: tuple[FrozenModelSpec, ...]
    """What training asks and leaves as it is; a policy for each of the trainer's settings that name
    one."""
    tokenizer: HFTokenizer
    compute_dtype: jnp.dtype
    train_mesh: Mesh
    row_tokens: int
    """Tokens of a packed row."""
    critic: Policy | None
    """What advantages=GAE asks."""
    critic_folder: Path | None
    """Where the critic's weights are: its own, or all of them but the head."""

    def train_bytes(self) -> Memory:
        """What training takes of each device of its mesh."""
        config, mesh = self.experiment.trainer, self.train_mesh
        parts = dict(
            predicted_bytes(
                config,
                self.policy,
                mesh,
                self.compute_dtype,
                row_tokens=self.row_tokens,
                critic=self.critic,
            )
        )
        # What is offloaded comes to the device when there are neither gradients nor activations.
        room = sum(parts[name] for name in ("gradients", "activations", "logits"))
        for found in self.beside:
            if found.folder is None and self.policy.lora:
                continue  # the frozen weights themselves
            size = frozen_bytes(found.policy, mesh, self.compute_dtype)
            parts[found.name] = max(0, size - room) if found.offload else size
        return parts


@dataclass(frozen=True, eq=False)
class Plan(TrainingPlan):
    """An experiment with all that its settings name on this machine. Holds no weights."""

    tasks: TaskSet
    """What reinforcement learning trains on; empty in learning from examples."""
    examples: ExampleSet[Any]
    """What fine-tuning trains on, such as its trainer learns from; empty in reinforcement
    learning."""
    eval_examples: ExampleSet[Any]
    """What fine-tuning measures its loss on; empty where it does not."""
    eval_tasks: TaskSet
    """Empty where the experiment does not evaluate."""
    prompts: tuple[Prompts, ...]
    """Of tasks to train on and to evaluate on, as they were measured."""
    warnings: tuple[str, ...]
    """What will fail in part."""
    rollout_mesh: Mesh
    engines: tuple[DecodeEngine, ...]
    """Alike, on meshes of their own; idle where the experiment does not decode."""

    @property
    def engine(self) -> DecodeEngine:
        """One of them."""
        return self.engines[0]

    @property
    def num_slots(self) -> int:
        """Of all engines together, wherever they are."""
        launch, num_slots = self.experiment.launch, self.experiment.engine.num_slots
        return num_slots * launch.rollout_engines if isinstance(launch, Ray) else num_slots

    @property
    def decodes(self) -> bool:
        """Whether anything is generated; learning from examples does so to evaluate only."""
        return _decodes(self.experiment)

    def headline(self) -> str:
        """One line: which policy, data and devices."""
        return f"policy: {self._policy()}; data: {self._data()}; devices: {self.devices}"

    def text(self) -> str:
        """All of it, a line each."""
        lines = (
            ("policy", self._policy()),
            ("trained", self._trained()),
            *self._critic(),
            *((found.name, self._frozen_models(found)) for found in self.beside),
            ("data", self._data()),
            ("training", self._training()),
            ("evaluation", self._evaluation()),
            *(("prompts", self._prompts(found)) for found in self.prompts),
            ("devices", self.devices),
            ("train mesh", _shape(self.train_mesh)),
            ("  on each", format_memory(self.train_bytes())),
            *self._rollout(),
            ("memory", self.shortage() or "will do"),
        )
        return "\n".join(f"{name:<12}  {line}" for name, line in lines)

    def rollout_bytes(self) -> Memory:
        """The engine's weights, what is trained of them twice as it arrives; keys and values."""
        if not self.decodes:
            return {}
        engine = self.engine
        arriving = jax.eval_shape(engine.layout, trained(self.policy).abstract)
        weights = 2 * bytes_per_device(arriving, engine.param_shardings)
        if self.policy.lora:
            weights += bytes_per_device(
                jax.eval_shape(engine.layout, self.policy.abstract()), engine.base_shardings
            )
        return {"weights": weights, "KV caches": engine.kv_bytes()}

    def _policy(self) -> str:
        return described(self.experiment.policy, self.policy, self.compute_dtype)

    def _trained(self) -> str:
        policy, config = self.policy, self.experiment.policy
        if policy.lora is None:
            return f"all parameters, read out as {policy.config.readout}"
        num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(lora.abstract(policy)))
        return (
            f"{num_params / 1e6:,.3f} M parameters of an adapter of rank {policy.lora.rank} on "
            f"{as_text(policy.lora.targets)}, "
            f"{config.adapter or 'fresh'}; {policy.config.num_params / 1e6:,.1f} M frozen"
        )

    def _critic(self) -> Iterator[tuple[str, str]]:
        if self.critic is not None and self.critic_folder is not None:
            model, path = (
                self.critic.config,
                self.experiment.trainer.critic.path or self.experiment.policy.path,
            )
            size = f"{model.num_params / 1e6:,.1f} M parameters"
            is_scalar = read_model(self.experiment.policy, self.critic_folder).is_scalar
            head = "" if is_scalar else ", with a fresh head"
            yield "critic", f"{path} ({model.architecture}, {size}{head})"

    def _frozen_models(self, found: FrozenModelSpec) -> str:
        model = found.policy.config
        where = ", in the host's memory" if found.offload else ""
        what = "the weights that training starts from" if found.folder is None else found.path
        return f"{what} ({model.architecture}, {model.num_params / 1e6:,.1f} M parameters{where})"

    def _data(self) -> str:
        if isinstance(self.experiment, Experiment):
            return counted("tasks", *self.tasks, self.experiment.tasks)
        return counted(
            self._kind(), self.examples.examples, self.examples.skipped, self.experiment.examples
        )

    def _kind(self) -> str:
        return "pairs" if isinstance(self.experiment, PreferenceExperiment) else "examples"

    def _training(self) -> str:
        experiment = self.experiment
        if not isinstance(experiment, Experiment):
            return (
                f"{experiment.num_steps} updates of {experiment.examples_per_batch} {self._kind()}"
            )
        rollout = experiment.rollout
        return (
            f"{experiment.num_steps} steps of {rollout.groups_per_batch} groups x "
            f"{rollout.samples_per_group} samples, "
            f"{experiment.trainer.num_mini_batches} updates each; max_staleness "
            f"{as_text(rollout.max_staleness)}"
        )

    def _prompts(self, found: Prompts) -> str:
        of = (
            "all"
            if len(found.lengths) == found.num_tasks
            else f"{len(found.lengths):,} of {found.num_tasks:,}"
        )
        limit = f"engine.max_prompt_tokens={self.experiment.engine.max_prompt_tokens}"
        return (
            f"{found.source}: {min(found.lengths)} to {max(found.lengths)} tokens ({of} "
            f"measured); {limit}"
        )

    def _rollout(self) -> Iterator[tuple[str, str]]:
        if self.decodes:
            yield "rollout mesh", _shape(self.rollout_mesh)
            yield "  on each", format_memory(self.rollout_bytes())

    def _evaluation(self) -> str:
        return "; ".join(found for found in (self._heldout(), self._pass_at_1()) if found) or "none"

    def _heldout(self) -> str:
        experiment, found = self.experiment, self.eval_examples
        if isinstance(experiment, Experiment) or not experiment.heldout_every_steps:
            return ""
        measured = "accuracy" if isinstance(experiment, PreferenceExperiment) else "perplexity"
        examples = counted(self._kind(), found.examples, found.skipped, experiment.eval_examples)
        return f"loss and {measured} every {experiment.heldout_every_steps} steps of {examples}"

    def _pass_at_1(self) -> str:
        evaluation = self.experiment.evaluation
        if not evaluation.every_steps:
            return ""
        num_tasks = "all" if evaluation.num_tasks is None else f"at most {evaluation.num_tasks}"
        tasks = counted("tasks", *self.eval_tasks, self.experiment.eval_tasks)
        samples = f"samples_per_task {evaluation.samples_per_task}"
        return f"pass@1 every {evaluation.every_steps} steps; {num_tasks} of {tasks}; {samples}"

    @property
    def devices(self) -> str:
        """How many, of which kind; those that train before those that decode."""
        train, rollout = (mesh.devices.flat[0] for mesh in (self.train_mesh, self.rollout_mesh))
        if not self.decodes:
            return f"{self.train_mesh.size} {train.device_kind}"
        if train == rollout:
            return f"1 {train.device_kind}, shared by both meshes"
        until = (
            ", until a trial has shown what is balanced"
            if self.experiment.placement.rollout_share == "auto"
            else ""
        )
        return f"{self.train_mesh.size} + {self.rollout_mesh.size} {train.device_kind}{until}"

    def shortage(self) -> str:
        """What to do where memory will not do by these estimates; empty where it will, or where
        nobody knows."""
        needs, has = self._needs_and_has(self.train_bytes(), self.rollout_bytes())
        if not needs > has > 0:
            return ""
        return f"about {sized(needs)} are needed where there are {sized(has)}: {self._relief()}"

    def overflow(self) -> str:
        """Why these devices cannot hold the policy, split as they are; empty where they can, or
        where nobody knows."""
        train = {name: size for name, size in self.train_bytes().items() if name in RESTING}
        rollout = {name: size for name, size in self.rollout_bytes().items() if name in RESTING}
        needs, has = self._needs_and_has(train, rollout)
        if not needs > has > 0:
            return ""
        return (
            f"{self.devices} cannot hold the policy: {sized(needs)} are needed where there are "
            f"{sized(has)} (on each that "
            f"trains {format_memory(train)}; on each that decodes {format_memory(rollout)}); "
            "take more devices, split them "
            "otherwise by placement.rollout_share, or cut the policy over more of them by "
            "placement.train_fsdp or "
            "placement.rollout_tensor"
        )

    def _needs_and_has(self, train: Memory, rollout: Memory) -> tuple[int, int]:
        """Bytes needed by one memory for these parts, and bytes it has; 0 where nobody knows."""
        if isinstance(self.experiment.launch, Ray):
            return 0, 0  # The devices are elsewhere.
        device, on_train, on_rollout = (
            self.train_mesh.devices.flat[0],
            sum(train.values()),
            sum(rollout.values()),
        )
        if device.platform == "cpu":
            # Simulated devices share the machine's memory.
            return (
                on_train * self.train_mesh.size + on_rollout * self.rollout_mesh.size,
                psutil.virtual_memory().total,
            )
        shared = device == self.rollout_mesh.devices.flat[0]
        has = (device.memory_stats() or {}).get("bytes_limit", 0)
        return on_train + on_rollout if shared else max(on_train, on_rollout), has

    def _relief(self) -> str:
        """The settings that lower the largest part of what memory goes to."""
        trainer = self.experiment.trainer
        parts = {
            **self.train_bytes(),
            **{f"engine's {name}": size for name, size in self.rollout_bytes().items()},
        }
        largest = max(parts, key=lambda name: parts[name])
        more_devices = "cut over more devices with placement.train_fsdp or placement.train_tensor"
        reliefs = {
            "optimizer": more_devices
            if trainer.optimizer.offload
            else f"set trainer.optimizer.offload=true, or {more_devices}",
            "activations": (
                ("" if trainer.remat == "full" else "set trainer.remat=full, or ")
                + (
                    "lower trainer.rows_per_micro_batch or trainer.row_tokens, or cut rows with "
                    "placement.train_context"
                )
            ),
            "logits": "lower trainer.logp_chunk_tokens",
            **{
                found.name: more_devices
                if found.offload
                else f"set trainer.{found.name}.offload=true, or {more_devices}"
                for found in self.beside
            },
            "engine's weights": "cut over more devices with placement.rollout_tensor",
            "engine's KV caches": (
                "set engine.kv_tokens, or lower engine.num_slots or engine.max_new_tokens"
            ),
        }
        return f"most for {largest}; {reliefs.get(largest, more_devices)}"


def make_plan(experiment: AnyExperiment) -> Plan:
    """Find the policy and the data, cut the meshes. ConfigError where one of them cannot be had, or
    does not fit another."""
    meshes = had(lambda: _meshes(experiment))
    tasks, eval_tasks = had(partial(_tasks, experiment))
    num_tasks = experiment.evaluation.num_tasks
    budget = budgeted(
        experiment,
        tasks=tasks.tasks,
        eval_tasks=eval_tasks.tasks[:num_tasks] if eval_tasks.tasks else (),
    )
    experiment, examples, eval_examples = budget.experiment, ExampleSet((), {}), ExampleSet((), {})
    training = make_training_plan(experiment, meshes.train)
    policy, tokenizer, row_tokens = training.policy, training.tokenizer, training.row_tokens
    if not isinstance(experiment, Experiment):
        load = load_examples
        if isinstance(experiment, PreferenceExperiment):
            load = partial(load_pairs, max_pair_tokens=row_tokens)
        examples, eval_examples = had(
            lambda: load(
                experiment.examples,
                experiment.eval_examples if experiment.heldout_every_steps else None,
                experiment.prompt,
                tokenizer,
                seed=derive_seed(experiment.seed, "examples"),
                max_tokens=min(row_tokens, policy.config.max_position_embeddings),
            )
        )
    plan = Plan(
        **{each.name: getattr(training, each.name) for each in fields(training)},
        tasks=tasks,
        examples=examples,
        eval_examples=eval_examples,
        eval_tasks=eval_tasks,
        prompts=budget.prompts,
        warnings=budget.warnings,
        rollout_mesh=meshes.rollout,
        engines=had(lambda: _engines(experiment, policy, meshes, training.compute_dtype)),
    )
    if problems := list(find_mismatches(plan)):
        raise ConfigError("\n".join(problems))
    return plan


def _tasks(experiment: AnyExperiment) -> tuple[TaskSet, TaskSet]:
    """Tasks to train on and to evaluate on; none where the experiment does not."""
    tasks, eval_tasks = TaskSet((), {}), TaskSet((), {})
    if isinstance(experiment, Experiment):
        tasks = had(lambda: load_tasks(experiment.tasks, experiment.prompt), "tasks")
    if experiment.evaluation.every_steps:
        eval_tasks = had(lambda: load_tasks(experiment.eval_tasks, experiment.prompt), "eval_tasks")
    return tasks, eval_tasks


def make_training_plan(experiment: AnyExperiment, mesh: Mesh) -> TrainingPlan:
    """Find what the trainer needs, to train on a mesh. ConfigError where something cannot be had,
    or does not fit another."""
    folder = had(lambda: resolve_policy_folder(experiment.policy.path))
    readout: Readout = "CausalLM"
    if isinstance(experiment, PreferenceExperiment) and experiment.trains_reward_model:
        readout = "SequenceClassification"
    policy = had(lambda: find_policy(experiment.policy, folder, readout))
    critic_folder, critic = None, None
    if isinstance(experiment.trainer.advantages, GAE):
        critic_folder = had(
            lambda: resolve_policy_folder(experiment.trainer.critic.path or experiment.policy.path)
        )
        critic = had(lambda: find_critic(experiment.policy, critic_folder))
    tokenizer = had(lambda: HFTokenizer.from_folder(folder, experiment.policy.ignore_config_keys))
    policy, critic = (
        had(partial(_with_pad_token, each, tokenizer, folder)) for each in (policy, critic)
    )
    assert policy is not None
    # A pair lies in one row.
    longest = experiment.engine.max_tokens * (
        2 if isinstance(experiment, PreferenceExperiment) else 1
    )
    row_tokens = experiment.trainer.row_tokens or longest
    plan = TrainingPlan(
        experiment,
        folder,
        policy,
        had(lambda: find_frozen_models(experiment, policy, tokenizer, mesh, row_tokens)),
        tokenizer,
        compute_dtype(experiment.policy.compute_dtype, mesh),
        mesh,
        row_tokens,
        critic,
        critic_folder,
    )
    for which in filter(None, (policy, critic)):
        had(partial(check_cut, which, mesh, row_tokens))
    had(plan.train_bytes)
    return plan


def _decodes(experiment: AnyExperiment) -> bool:
    return isinstance(experiment, Experiment) or experiment.evaluation.every_steps > 0


def _engines(
    experiment: AnyExperiment, policy: Policy, meshes: Meshes, dtype: jnp.dtype
) -> tuple[DecodeEngine, ...]:
    count, num_slots = (
        experiment.placement.engines if _decodes(experiment) else 1,
        experiment.engine.num_slots,
    )
    if num_slots % count:
        raise ValueError(
            f"engine.num_slots={num_slots} does not divide by placement.engines={count}, which "
            "share the slots"
        )
    config = chz.replace(
        experiment.engine,
        num_slots=num_slots // count,
        kv_tokens=experiment.engine.kv_tokens // count,
    )
    return tuple(
        DecodeEngine(policy, mesh, config, dtype) for mesh in engine_meshes(meshes.rollout, count)
    )


def _meshes(experiment: AnyExperiment) -> Meshes:
    placement, devices = experiment.launch.placement(experiment.placement), jax.devices()
    num_train = placement.train_devices or len(devices)
    if _decodes(experiment) or num_train > len(devices):
        return make_meshes(placement)
    # All devices train. The other mesh lies on the first of them, where nothing will use it.
    alone = chz.replace(
        placement, rollout_share=None, train_devices=num_train, rollout_devices=1, rollout_tensor=1
    )
    return make_meshes(alone, [*devices, devices[0]])


def find_policy(
    config: PolicyConfig,
    folder: Path,
    readout: Readout = "CausalLM",
    *,
    setting: str = "policy.path",
) -> Policy:
    """The policy in a folder, with the adapter that is to be trained beside it.

    Args: readout: another than a language model's has a fresh head where the folder holds a
        language model. setting: which names the policy, for messages. Raises ValueError where the
        folder is read out otherwise, or the adapter does not belong to the policy."""
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
        adapter = Path(config.adapter).expanduser()
        policy = Policy(model, lora.read_config(adapter, config.ignore_config_keys))
        lora.check_base(adapter, config.path, str(folder))
        lora.check_tensors(adapter, policy)
    if policy.lora:
        lora.abstract(policy)
    return policy


def read_model(config: PolicyConfig, folder: Path) -> ModelConfig:
    """Read a folder's config.json by the policy's settings, which may name an adapter in that
    folder.

    Raises:
        ValueError: as `read_config`; for an adapter, unless it is the one that is trained.
    """
    adapter = config.adapter
    is_adapted = adapter is not None and Path(adapter).expanduser().resolve() == folder.resolve()
    return read_config(folder, config.ignore_config_keys, is_adapted=is_adapted)


def _with_pad_token(policy: Policy | None, tokenizer: HFTokenizer, folder: Path) -> Policy | None:
    """A scalar head with a padding token: without one, transformers reads no batch of several
    texts.

    Raises ValueError where a reward model's padding token ends its texts: transformers reads the
    last token that is another."""
    if policy is None or not policy.config.is_scalar:
        return policy
    pad, is_reward = policy.config.pad_token_id, policy.config.readout == "SequenceClassification"
    if not is_reward:
        pad = tokenizer.pad_token_id if pad is None else pad
    elif (
        pad is None
        or read_config(folder, policy.config.ignored_keys).readout != policy.config.readout
    ):
        pad = tokenizer.find_pad_token_id()
    if is_reward and pad in (None, tokenizer.stop_token_ids[0]):
        raise ValueError(
            f"{folder}: expected a pad_token_id that ends no text of a reward model, because "
            "transformers scores the last "
            f"token that is not padding; found {pad}, eos_token is "
            f"{tokenizer.stop_token_ids[0]}. Set pad_token in "
            "tokenizer_config.json and pad_token_id in config.json to a special token that ends "
            "no answer"
        )
    return Policy(replace(policy.config, pad_token_id=pad), policy.lora)


def find_critic(config: PolicyConfig, folder: Path) -> Policy:
    """The critic in a folder; with the language model in it for a trunk, if it is one."""
    model = read_model(config, folder)
    return Policy(model if model.is_scalar else replace(model, readout="TokenClassification"))


def find_frozen_models(
    experiment: AnyExperiment, policy: Policy, tokenizer: HFTokenizer, mesh: Mesh, row_tokens: int
) -> tuple[FrozenModelSpec, ...]:
    """The frozen policies that the trainer's settings name.

    Raises ValueError where one is not found, speaks other tokens than `policy`, or cannot be kept
    as it is asked to."""
    trainer, found = experiment.trainer, []
    reference = (
        experiment.reference if isinstance(experiment, PreferenceExperiment) else trainer.reference
    )
    for name, config in (("reference", reference), ("teacher", trainer.teacher)):
        if config is None:
            continue
        setting = f"trainer.{name}.path"
        if isinstance(config, Reference) and config.path == "initial":
            # A fresh adapter adds nothing yet; one that was trained before is part of what training
            # starts from.
            alone = policy if experiment.policy.adapter is not None else Policy(policy.config)
            found.append(FrozenModelSpec(name, config.path, alone, None, config.offload))
        else:
            folder = resolve_policy_folder(config.path, setting)
            other = Policy(read_model(experiment.policy, folder))
            if difference := tokenizer.describe_difference(
                HFTokenizer.from_folder(folder, experiment.policy.ignore_config_keys)
            ):
                raise ValueError(
                    f"{setting}={config.path} speaks other tokens than "
                    f"policy.path={experiment.policy.path}: {difference}; "
                    "name a policy with the same tokenizer"
                )
            if other.config.vocab_size < policy.config.vocab_size:
                raise ValueError(
                    f"{setting}={config.path} has vocab_size={other.config.vocab_size}, fewer "
                    "than the "
                    f"{policy.config.vocab_size} tokens that "
                    f"policy.path={experiment.policy.path} may draw"
                )
            if other.config.max_position_embeddings < min(
                row_tokens, policy.config.max_position_embeddings
            ):
                raise ValueError(
                    f"{setting}={config.path} was made for "
                    f"{other.config.max_position_embeddings} positions, fewer than a "
                    f"sequence may have; lower engine.max_prompt_tokens or engine.max_new_tokens"
                )
            check_cut(other, mesh, row_tokens)
            found.append(FrozenModelSpec(name, config.path, other, folder, config.offload))
        if config.offload:
            require_host_memory(mesh, f"trainer.{name}.offload")
    return tuple(found)


def find_mismatches(plan: Plan) -> Iterator[str]:
    """What in a plan does not go together, each in a sentence that names the knobs; nothing where
    all is well."""
    engine, path = plan.engine, plan.experiment.policy.path
    if overflow := plan.overflow():
        yield overflow
    if isinstance(plan.experiment.launch, Ray) and (
        missing := [name for name in NEEDED_BY_RAY if find_spec(name) is None]
    ):
        yield (
            f"launch=Ray needs {' and '.join(missing)}, which are not installed: pip install "
            "'areal-jax[ray]'"
        )
    if plan.decodes:
        yield from too_long(engine, f"policy.path={path}")
        yield from _missing_program(plan)
    yield from unreadable(plan.experiment, engine, plan.tokenizer)
    if plan.critic is not None and plan.critic.config.vocab_size < plan.tokenizer.vocab_size:
        yield (
            f"trainer.critic.path={plan.experiment.trainer.critic.path} knows "
            f"{plan.critic.config.vocab_size} tokens, and "
            f"policy.path={path} has a tokenizer.json of {plan.tokenizer.vocab_size}; expected a "
            "critic that reads the same"
        )
    if plan.critic is not None and engine.max_tokens > plan.critic.config.max_position_embeddings:
        yield (
            f"engine.max_prompt_tokens + engine.max_new_tokens = {engine.max_tokens} is longer "
            "than the "
            f"{plan.critic.config.max_position_embeddings} positions that trainer.critic.path="
            f"{plan.experiment.trainer.critic.path} was made for; lower either"
        )


def described(config: PolicyConfig, policy: Policy, dtype: jnp.dtype) -> str:
    """Name, architecture, size and precision of a policy."""
    model = policy.config
    ignored = f"; ignoring {', '.join(model.ignored_keys)}" if model.ignored_keys else ""
    return (
        f"{config.path} ({model.architecture}, {model.num_params / 1e6:,.1f} M parameters, "
        f"{dtype.name}{ignored})"
    )


class Budget(NamedTuple):
    """What prompts take."""

    experiment: AnyExperiment
    """With a limit on prompts."""
    prompts: tuple[Prompts, ...]
    """By the setting that names their tasks."""
    warnings: tuple[str, ...]
    """What will not fit, with the setting to change."""


def budgeted(experiment: AnyExperiment, **tasks: Sequence[Task]) -> Budget:
    """Measure prompts, and find a limit on them where engine.max_prompt_tokens is 0.

    Args:
        tasks: by the setting that names them.

    Raises:
        ConfigError: prompts, or the workflow's later turns, can never fit.
    """
    folder = had(lambda: resolve_policy_folder(experiment.policy.path))
    ignored = experiment.policy.ignore_config_keys
    positions = had(lambda: read_config(folder, ignored, is_adapted=True).max_position_embeddings)
    tokenizer = had(lambda: HFTokenizer.from_folder(folder, ignored))
    engine, workflow, rewards = experiment.engine, experiment.workflow, experiment.rewards
    is_decoded = any(len(of_source) for of_source in tasks.values())
    if is_decoded and (problems := list(_one_turn_only(experiment, tokenizer))):
        raise ConfigError("\n".join(problems))
    is_boxed = not (rewards.accept_plain or rewards.function or isinstance(workflow, Agent))
    measure = partial(
        measure_prompts,
        tokenizer,
        workflow=workflow,
        max_new_tokens=engine.max_new_tokens,
        is_boxed=is_boxed,
    )
    prompts = had(
        lambda: tuple(
            measure(source, of_source) for source, of_source in tasks.items() if len(of_source)
        )
    )
    turns, longest = (
        later_turns(tokenizer, workflow),
        max((found.longest for found in prompts), default=0),
    )
    limit, most = engine.max_prompt_tokens, engine.max_new_tokens
    if not limit:
        # Where the policy has fewer positions than all turns may take, the last ones may not come.
        limit = max(1, min(required_prompt_tokens(longest, turns, most), positions - most))
        if not isinstance(experiment, Experiment):
            limit = max(limit, EXAMPLES_PROMPT_TOKENS)
        experiment = chz.replace(experiment, engine=chz.replace(engine, max_prompt_tokens=limit))
        if problems := list(contradictions(experiment)):
            raise ConfigError("\n".join(problems))
    limits = Limits(limit, most, positions)
    if problems := [each for found in prompts for each in refused_prompts(found, turns, limits)]:
        raise ConfigError("\n".join(problems))
    warnings = [each for found in prompts for each in doubtful_prompts(found, turns, limits)]
    trained = next((found for found in prompts if found.source == "tasks"), None)
    if isinstance(experiment, Experiment) and trained is not None:
        warnings += too_few_tasks(
            trained, experiment.rollout.groups_per_batch, experiment.num_steps
        )
    return Budget(experiment, prompts, tuple(warnings))


def unreadable(
    experiment: AnyExperiment, engine: DecodeEngine, tokenizer: HFTokenizer
) -> Iterator[str]:
    """Why the policy cannot read what the tokenizer makes of a text."""
    model, path = engine.policy.config, experiment.policy.path
    if tokenizer.vocab_size > model.vocab_size:
        yield (
            f"policy.path={path} has a tokenizer.json of {tokenizer.vocab_size} tokens, "
            f"but its config.json says vocab_size={model.vocab_size}, which is the number of "
            "rows of the embedding"
        )
    if not tokenizer.has_template and not experiment.prompt.plain_text:
        yield (
            f"policy.path={path} has a tokenizer without a chat template: expected "
            "chat_template.jinja, or chat_template in "
            "tokenizer_config.json; found neither. Add one, or set prompt.plain_text=true"
        )


def _one_turn_only(experiment: AnyExperiment, tokenizer: HFTokenizer) -> Iterator[str]:
    """Messages that a chat template cannot put behind an answer."""
    match workflow := experiment.workflow:
        case MultiTurn():
            role, knob = "user", "set workflow=SingleTurn"
        case ToolUse():
            role, knob = (
                workflow.call_format.result_role,
                "set workflow.call_format.result_role=user, or workflow=SingleTurn",
            )
        case _:
            return
    try:
        tokenizer.render_next([Message(role, "?")])
    except ValueError as refusal:
        yield (
            f"workflow={type(workflow).__name__} answers policy.path={experiment.policy.path} "
            "with a message of role "
            f"{role}, and {refusal}; {knob}"
        )


def _missing_program(plan: Plan) -> Iterator[str]:
    """An agent's command without its program; agents run where the plan is made."""
    match plan.experiment.workflow:
        case Agent(command=str(command)):
            try:
                parse_command(command)
            except ValueError as refusal:
                yield str(refusal)


def had(find: Callable[[], T], setting: str = "") -> T:
    """What `find` returns. Doors say what cannot be had as ValueError or OSError: bad input, not a
    bug.

    Args: setting: that asks for it, where the door does not know."""
    try:
        return find()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{setting}: {error}" if setting else str(error)) from error


def counted(what: str, found: Sequence[object], skipped: Skipped, source: TaskSource) -> str:
    """How many there are, from where, and what was skipped; in words."""
    where = (
        f"{type(source).__name__} "
        f"{getattr(source, 'path', None) or getattr(source, 'name', None) or 'problems'}"
    )
    origin = "those held out" if isinstance(source, HeldOut) else where
    return f"{len(found)} {what} from {origin}" + (
        f" (skipped: {format_skipped(skipped)})" if skipped else ""
    )


def _shape(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def format_memory(parts: Memory) -> str:
    """The sum and its parts, in words."""
    return (
        f"about {sized(sum(parts.values()))}: "
        f"{', '.join(f'{name} {sized(size)}' for name, size in parts.items())}"
    )


def sized(num_bytes: int) -> str:
    """Bytes in words."""
    return (
        f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
    )
