"""A tiny policy, batches of groups that could be its own, and meshes of simulated devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.compilation import Compiler, compile_lowered
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.records import NO_VERSION, Group, Sample, StepResult, Task
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.critic import critic_learner
from areal_jax.trainer.distillation import TeacherInput
from areal_jax.trainer.frozen import ReadOnlyPolicy
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.step import TrainableModel

ROW_TOKENS = 24
PROMPT_TOKENS = 4

POLICY = Policy(
    ModelConfig.from_hf(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        },
        source="a test",
    )
)

SCALAR = Policy(dataclasses.replace(POLICY.config, readout="TokenClassification"))


def params(seed: int = 0) -> Params:
    """Host arrays; large enough that no two tokens are equally likely."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / leaf.shape[-1] ** 0.5,
        POLICY.abstract(),
    )


def critic_params() -> Any:
    """The policy's trunk, and a head of equal numbers."""
    trunk = {name: leaf for name, leaf in params(7).items() if name != "head"}
    return trunk | {
        "value": np.full((16, 1), 0.3, np.float32),
        "value_bias": np.full(1, 0.3, np.float32),
    }


def train_mesh(
    devices: int = 1, tensor: int = 1, fsdp: int | None = None, expert: int = 1, context: int = 1
) -> Mesh:
    placement = PlacementConfig(
        train_tensor=tensor,
        train_fsdp=fsdp,
        train_expert=expert,
        train_context=context,
    )
    return make_train_mesh(placement, jax.devices()[:devices])


def make_trainer(
    config: TrainerConfig,
    mesh: Mesh,
    *,
    given: Params | None = None,
    compute_dtype: DTypeLike = np.float32,
    row_tokens: int = ROW_TOKENS,
    max_new_tokens: int = ROW_TOKENS - PROMPT_TOKENS,
    num_updates: int = 100,
    critic: Params | None = None,
    reference: ReadOnlyPolicy | None = None,
    teacher: ReadOnlyPolicy | None = None,
    teacher_input: TeacherInput | None = None,
    compiler: Compiler = compile_lowered,
) -> Trainer:
    """Return a trainer of the tiny policy.

    Args:
        given: Its parameters; by default random.
        critic: Parameters of `SCALAR`.
        reference: What the settings name.
        teacher: What the settings name.
        teacher_input: How it reads.
        compiler: Compiles its programs.
    """
    model = TrainableModel(
        policy=POLICY,
        params=params() if given is None else given,
        mesh=mesh,
        compute_dtype=compute_dtype,
        row_tokens=row_tokens,
        compiler=compiler,
    )
    values = None
    if critic is not None:
        values = critic_learner(
            config, dataclasses.replace(model, policy=SCALAR, params=critic), num_updates
        )
    return Trainer(
        config=config,
        limits=SampleLimits(max_staleness=2, max_new_tokens=max_new_tokens),
        policy=policy_learner(
            config, model, num_updates, teacher_input and teacher_input.vocabulary
        ),
        critic=values,
        reference=reference,
        teacher=teacher,
        teacher_input=teacher_input,
    )


def sample(
    rng: np.random.Generator,
    num_tokens: int,
    versions: int | np.ndarray = 0,
    reward: float | None = None,
) -> Sample:
    mask = np.arange(num_tokens) >= PROMPT_TOKENS
    right = rng.random() < 0.5 if reward is None else reward > 0
    return Sample(
        tokens=rng.integers(0, POLICY.config.vocab_size, num_tokens).astype(np.int32),
        loss_mask=mask,
        behave_logp=np.where(mask, rng.normal(-3.5, 0.2, num_tokens), 0.0).astype(np.float32),
        versions=np.where(mask, versions, NO_VERSION).astype(np.int32),
        reward=float(right) if reward is None else reward,
        grade="correct" if right else "wrong",
        stop_reason="stop" if rng.random() < 0.8 else "length",
    )


def group(id: int, *samples: Sample) -> Group:
    return Group(id, Task(f"task-{id}", (), "1"), samples)


def batch(
    seed: int = 0, num_groups: int = 4, samples_per_group: int = 3, version: int = 0
) -> list[Group]:
    """Groups of samples of 6 to ROW_TOKENS tokens."""
    rng = np.random.default_rng(seed)
    return [
        group(
            i,
            *(
                sample(rng, int(rng.integers(6, ROW_TOKENS + 1)), version)
                for _ in range(samples_per_group)
            ),
        )
        for i in range(num_groups)
    ]


def made_once(
    make: Callable[..., Trainer], variants: Mapping[str, Mapping[str, Any]]
) -> Callable[[str], Trainer]:
    """Trainers by variant. Compiling takes longer than all else here, so each is made once and
    brought back to its first state when it is asked for again."""
    made: dict[str, tuple[Trainer, Any]] = {}

    def get(variant: str) -> Trainer:
        if variant not in made:
            trainer = make(**variants[variant])
            made[variant] = trainer, jax.device_get(trainer.state)
        trainer, first = made[variant]
        trainer.restore(first)
        return trainer

    return get


def mean(result: StepResult, name: str) -> float:
    """A metric of a step that is a sum with a weight."""
    value = result.metrics[name]
    assert isinstance(value, tuple)
    return value[0] / value[1]
