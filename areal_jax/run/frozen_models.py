"""Frozen policies of training: references and teachers, found and checked against the policy."""

from __future__ import annotations

from jax.sharding import Mesh

from areal_jax.config.experiment import AnyExperiment, PreferenceExperiment
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.rl.config import CrossTokenizer, Reference, Teacher, TeacherAdvantage
from areal_jax.run.models import read_model
from areal_jax.run.plan import FrozenModelSpec
from areal_jax.trainer.forward import check_row_shards
from areal_jax.trainer.state import require_host_memory


def find_frozen_models(
    experiment: AnyExperiment, policy: Policy, tokenizer: HFTokenizer, mesh: Mesh, row_tokens: int
) -> tuple[FrozenModelSpec, ...]:
    """Find the frozen policies that the trainer's settings name. A teacher that is the trained
    policy itself is none of them.

    Raises:
        ValueError: one is missing, has other tokens than `policy`, or does not fit in memory.
    """
    trainer, specs = experiment.trainer, []
    reference = (
        experiment.reference if isinstance(experiment, PreferenceExperiment) else trainer.reference
    )
    for name, config in (("reference", reference), ("teacher", trainer.teacher)):
        if config is None:
            continue
        if isinstance(config, Teacher) and policy.config.vision is not None:
            _require_plain_reading(config)
        if config.path == "current":
            continue
        if config.path == "initial":
            # A fresh adapter adds nothing yet; a trained one is part of the initial policy.
            has_adapter = experiment.policy.adapter is not None
            initial = policy if has_adapter else Policy(policy.config)
            spec = FrozenModelSpec(
                name=name, path=config.path, policy=initial, folder=None, offload=config.offload
            )
        else:
            spec = _find(experiment, name, config, policy, tokenizer, row_tokens)
            check_row_shards(spec.policy, mesh, row_tokens)
        if config.offload:
            require_host_memory(mesh, f"trainer.{name}.offload")
        specs.append(spec)
    return tuple(specs)


def _require_plain_reading(teacher: Teacher) -> None:
    """Require that a teacher reads samples with images as they are."""
    if teacher.hint is None and isinstance(teacher.distillation, TeacherAdvantage):
        return
    raise ValueError(
        "trainer.teacher reads no images where it has a hint or its own distillation; with a "
        "vision-language policy leave out trainer.teacher.hint and trainer.teacher.distillation"
    )


def _find(
    experiment: AnyExperiment,
    name: str,
    config: Reference | Teacher,
    policy: Policy,
    tokenizer: HFTokenizer,
    row_tokens: int,
) -> FrozenModelSpec:
    setting, ignored = f"trainer.{name}.path", experiment.policy.ignore_config_keys
    folder = resolve_policy_folder(config.path, setting)
    model = read_model(experiment.policy, folder)
    if not (isinstance(config, Teacher) and isinstance(config.distillation, CrossTokenizer)):
        if difference := tokenizer.describe_difference(HFTokenizer.from_folder(folder, ignored)):
            remedy = (
                " or set trainer.teacher.distillation=CrossTokenizer" if name == "teacher" else ""
            )
            raise ValueError(
                f"{setting}={config.path} has other tokens than "
                f"policy.path={experiment.policy.path}: {difference}; name a policy with the same "
                f"tokenizer{remedy}"
            )
        _require_size(model, f"{setting}={config.path}", experiment, policy, row_tokens)
    return FrozenModelSpec(
        name=name, path=config.path, policy=Policy(model), folder=folder, offload=config.offload
    )


def _require_size(
    model: ModelConfig, named: str, experiment: AnyExperiment, policy: Policy, row_tokens: int
) -> None:
    """Require that a frozen model reads every token and position of a sample."""
    if model.vocab_size < policy.config.vocab_size:
        raise ValueError(
            f"{named} has vocab_size={model.vocab_size}, fewer than the "
            f"{policy.config.vocab_size} tokens that policy.path={experiment.policy.path} may "
            "sample; name a policy with at least as many"
        )
    if model.max_positions < min(row_tokens, policy.config.max_positions):
        raise ValueError(
            f"{named} was made for {model.max_positions} positions, fewer than a "
            "sequence may have; lower engine.max_prompt_tokens or engine.max_new_tokens"
        )
