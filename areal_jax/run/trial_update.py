"""One optimizer update of a tiny random policy, with an experiment's tokenizer and objective."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chz
import jax
from jaxtyping import Float32
from numpy import ndarray

from areal_jax.config.experiment import AnyExperiment
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.models import hf
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import LoRA, PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.records import Group, StepResult
from areal_jax.rl.config import Teacher
from areal_jax.run.make_plan import make_training_plan
from areal_jax.run.plan import TrainingPlan
from areal_jax.run.trainer import example_trainer, initial_weights, rl_trainer
from areal_jax.trainer.config import Critic, TrainerConfig

MAX_CHUNK_TOKENS = 256
"""Tokens whose logits exist at the same time: vocabularies are large, and hosts have little memory.
"""

ROW_MULTIPLE = 64
"""Rows are as long as the longest sequence, rounded up to a multiple."""


@dataclass(frozen=True, eq=False)
class UpdateResult:
    """What one update came to."""

    grad_norm: float
    """Norm of the gradient before clipping; nan if the update was refused."""
    num_tokens: int
    """Tokens in the loss."""
    error: str = ""
    """Why the update was refused."""
    advantages: Sequence[Sequence[Float32[ndarray, "_"]]] = ()
    """By group and sample, as in `StepResult`."""


def make_tiny_plan(experiment: AnyExperiment, policy_folder: Path, folder: Path) -> TrainingPlan:
    """Plan the training of a tiny random policy on one CPU device.

    The policy has the vocabulary, the stop tokens and the positions of the experiment's. So have
    teacher and reference, with other random weights. The objective is the experiment's; the
    gradient is that of one batch, after the warm-up of a critic.

    Args:
        experiment: its policy is replaced.
        policy_folder: config.json and tokenizer of its policy.
        folder: empty folder, for the files of the tiny policy.

    Raises:
        ConfigError: settings do not fit each other.
    """
    device = jax.local_devices(backend="cpu")[0]
    mesh = make_meshes(PlacementConfig(), [device]).train
    settings = experiment.policy
    model = hf.read_config(
        policy_folder,
        settings.ignore_config_keys,
        is_adapted=True,
        long_rope=settings.long_rope,
    )
    tokenizer = HFTokenizer.from_folder(policy_folder, settings.ignore_config_keys)
    policy = Policy(_shrink(model, tokenizer))
    for name in hf.TOKENIZER_FILES:
        if (policy_folder / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(policy_folder / name, folder / name)
    hf.save(folder, policy, policy.init(jax.random.key(experiment.seed + 1)))
    adapter = settings.lora or (LoRA() if settings.adapter is not None else None)
    tiny = chz.replace(
        experiment,
        policy=PolicyConfig(
            path=str(folder),
            random_init=True,
            lora=adapter,
            compute_dtype="float32",
            ignore_config_keys=settings.ignore_config_keys,
        ),
        trainer=_with_frozen(experiment.trainer, str(folder)),
    )
    return make_training_plan(tiny, mesh)


def update_from_groups(plan: TrainingPlan, groups: Sequence[Group]) -> UpdateResult:
    """Make one update from groups."""
    longest = max(len(sample.tokens) for group in groups for sample in group.samples)
    plan = _with_rows(plan, longest)
    return _update(rl_trainer(plan, *initial_weights(plan)), groups)


def update_from_examples(plan: TrainingPlan, examples: Sequence[Any], longest: int) -> UpdateResult:
    """Make one update from examples; `longest`: tokens of the longest one, or of a pair."""
    plan = _with_rows(plan, longest)
    return _update(example_trainer(plan, *initial_weights(plan)), examples)


def _update(trainer: Any, batch: Sequence[Any]) -> UpdateResult:
    try:
        result: StepResult = trainer.step(batch)
    except FloatingPointError as error:
        return UpdateResult(math.nan, 0, str(error))
    values = {
        name: value if isinstance(value, float | int) else value[0] / value[1]
        for name in ("grad_norm", "tokens_trained")
        if (value := result.metrics.get(name)) is not None
    }
    return UpdateResult(
        float(values.get("grad_norm", 0.0)),
        int(values["tokens_trained"]),
        advantages=result.advantages,
    )


def _with_rows(plan: TrainingPlan, longest: int) -> TrainingPlan:
    return replace(plan, row_tokens=math.ceil(longest / ROW_MULTIPLE) * ROW_MULTIPLE)


def _shrink(model: ModelConfig, tokenizer: HFTokenizer) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.stop_token_ids,
    }
    if model.vision is None:
        return ModelConfig(
            architecture="Qwen2ForCausalLM",
            head_dim=16,
            rope_theta=10000.0,
            rms_norm_eps=1e-6,
            max_position_embeddings=model.max_positions,
            attention_bias=True,
            qk_norm=False,
            pad_token_id=model.pad_token_id,
            **sizes,
        )
    # One block, which sees everything; patches and positions are those of the images.
    tower = replace(
        model.vision,
        depth=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=32,
        fullatt_block_indexes=(0,) if model.vision.fullatt_block_indexes else (),
        deepstack_visual_indexes=(0,) if model.vision.deepstack_visual_indexes else (),
    )
    # Of the original head size, which the sections of M-RoPE share.
    return replace(model, vision=tower, **sizes)


def _with_frozen(trainer: TrainerConfig, path: str) -> TrainerConfig:
    """The settings of one update, whose teacher and reference are in a folder."""
    reference, teacher = trainer.reference, trainer.teacher
    if reference is not None:
        is_initial = reference.path == "initial"
        reference = chz.replace(reference, path="initial" if is_initial else path, offload=False)
    return chz.replace(
        trainer,
        reference=reference,
        teacher=teacher and _tiny_teacher(teacher, path),
        critic=_without_warmup(trainer.critic),
        optimizer=chz.replace(trainer.optimizer, offload=False),
        num_mini_batches=1,
        rows_per_micro_batch=1,
        logp_chunk_tokens=min(trainer.logp_chunk_tokens, MAX_CHUNK_TOKENS),
    )


def _tiny_teacher(teacher: Teacher, path: str) -> Teacher:
    kept = teacher.path if teacher.path in ("initial", "current") else path
    return chz.replace(teacher, path=kept, offload=False, row_tokens=0)


def _without_warmup(critic: Critic) -> Critic:
    optimizer = critic.optimizer and chz.replace(critic.optimizer, offload=False)
    return chz.replace(critic, path=None, optimizer=optimizer, warmup_steps=0)
