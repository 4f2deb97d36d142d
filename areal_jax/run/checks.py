"""Refusals before a run starts: a plan whose parts do not fit together, and a run folder that
disagrees with its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.checkpoint.recovery import Columns
from areal_jax.cluster.config import Ray
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.config.load import CONFIG_FILE, read_plainly
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.decode import find_too_long
from areal_jax.errors import ConfigError
from areal_jax.metrics import consistency, description, trackers
from areal_jax.models.architecture import ModelConfig
from areal_jax.run.memory_checks import find_overflow
from areal_jax.run.plan import Plan, possible_splits
from areal_jax.workflows.agent import parse_command
from areal_jax.workflows.config import Agent

NEEDED_BY_RAY = ("ray", "xxhash")

RUN_ID = "run"
"""Note of a checkpoint: the run's id, which config.json has too."""


def find_mismatches(plan: Plan) -> Iterator[str]:
    """Parts of a plan that do not fit together, each in a sentence that names the settings."""
    engine, path = plan.engine, plan.experiment.policy.path
    if overflow := find_overflow(plan):
        yield overflow
    if isinstance(plan.experiment.launch, Ray) and (
        missing := [name for name in NEEDED_BY_RAY if find_spec(name) is None]
    ):
        yield (
            f"launch=Ray needs {' and '.join(missing)}, which are not installed: pip install "
            "'areal-jax[ray]'"
        )
    if plan.experiment.placement.adaptive and len(possible_splits(plan)) < 2:
        yield _one_split_only(plan)
    yield from trackers.find_missing(plan.experiment.metrics.trackers)
    if plan.decodes:
        yield from find_too_long(engine, f"policy.path={path}")
        yield from _missing_program(plan.experiment)
    yield from find_unreadable(plan.experiment, engine.policy.config, plan.tokenizer)
    yield from _small_critic(plan)
    yield from _no_room_for_images(plan)


def _one_split_only(plan: Plan) -> str:
    launch = plan.experiment.launch
    if isinstance(launch, Ray):
        per_host = launch.trainer_devices // launch.engine_devices
        return (
            "placement.adaptive=true makes a trainer host into as many engines as have its devices "
            f"({per_host}), or the reverse, and launch.trainer_hosts={launch.trainer_hosts}, "
            f"launch.rollout_engines={launch.rollout_engines} and "
            f"launch.max_engines={launch.max_engines} leave one split only; set "
            "launch.trainer_hosts to at least 2, with fewer launch.trainer_devices each, or "
            f"launch.rollout_engines to more than {per_host}, and launch.max_engines to 0"
        )
    num_devices = plan.train_mesh.size + plan.rollout_mesh.size
    return (
        "placement.adaptive=true moves the devices of whole engines, and engines of "
        f"{plan.engine.mesh.size} of {num_devices} devices leave one split only; raise "
        "placement.engines"
    )


def _no_room_for_images(plan: Plan) -> Iterator[str]:
    # Generated tasks, which are made on access, have none.
    tasks = plan.tasks.tasks if isinstance(plan.tasks.tasks, list) else ()
    longest = max((task.images for task in tasks), key=len, default=())
    if not longest or plan.image_reader is None or plan.experiment.trainer.row_image_tokens:
        return
    num_tokens = sum(map(plan.image_reader.num_tokens, longest))
    yield (
        "trainer.row_image_tokens=0 leaves no room for the images of the tasks; set it to at least "
        f"{num_tokens}, the image tokens of a task"
    )


def find_unreadable(
    experiment: AnyExperiment, model: ModelConfig, tokenizer: HFTokenizer
) -> Iterator[str]:
    """Reasons why the policy cannot read the tokenizer's tokens."""
    path = experiment.policy.path
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


def require_consistency(
    plan: Plan, folder: Path, version: int, restored: Columns | None
) -> consistency.Gaps:
    """Require that settings and files of a run folder belong to its checkpoint of `version`.

    Args:
        restored: what the checkpoint holds beside the trainer's state.

    Returns:
        Versions whose rows are known to be absent, by file.

    Raises:
        ConfigError: settings, metrics.jsonl or samples.jsonl are not those of the checkpoint.
    """
    run_id, settings = read_plainly(folder / CONFIG_FILE)
    prefix = f"{folder} cannot be resumed from its checkpoint of version {version}: "
    facts = {} if restored is None else restored.facts
    saved_id = facts.get("notes", {}).get(RUN_ID)
    if saved_id is not None and saved_id != run_id:
        raise ConfigError(
            f"{prefix}{CONFIG_FILE} is of another run (expected the run {saved_id}, found "
            f"{run_id or 'no name'}); put the {CONFIG_FILE} of this run back"
        )
    is_rl = isinstance(plan.experiment, Experiment)
    num_tasks = len(plan.tasks.tasks if is_rl else plan.examples.examples)
    for name, setting, found in (
        ("seed", "seed", plan.experiment.seed),
        ("num_tasks", "tasks or examples", num_tasks),
    ):
        if (expected := facts.get("tasks", {}).get(name, found)) != found:
            raise ConfigError(
                f"{prefix}expected {setting} {expected}, with which it was trained, found {found}; "
                f"tasks would be lost or repeated. Set {setting} as before"
            )
    ids = [entry["id"] for kind in ("buffered", "suspended") for entry in facts.get(kind, ())]
    has_groups = bool(facts) and is_rl
    result = consistency.check_rows(
        folder,
        version,
        known_gaps=consistency.read_gaps(folder / description.FILE),
        writes_samples=is_rl and bool(settings.get("metrics.samples", True)),
        unused_groups=consistency.UnusedGroups(ids, facts["next_group_id"])
        if has_groups
        else consistency.UnusedGroups(),
    )
    if result.faults:
        faults = "; ".join(f"{fault.file} {fault.text}" for fault in result.faults)
        older = saved_versions(folder / CHECKPOINTS)
        remedy = consistency.suggest_remedy(folder, result.faults[0], version, older)
        raise ConfigError(f"{prefix}{faults}. To go on, {remedy}")
    return result.gaps


def _missing_program(experiment: AnyExperiment) -> Iterator[str]:
    """Refuse an agent's command whose program is missing; agents run where the plan is made."""
    match experiment.workflow:
        case Agent(command=str(command)):
            try:
                parse_command(command)
            except ValueError as refusal:
                yield str(refusal)


def _small_critic(plan: Plan) -> Iterator[str]:
    """Refuse a critic that cannot read all tokens or positions of a sample."""
    if plan.critic is None:
        return
    critic, engine = plan.critic.config, plan.engine
    setting = f"trainer.critic.path={plan.experiment.trainer.critic.path}"
    if critic.vocab_size < plan.tokenizer.vocab_size:
        yield (
            f"{setting} knows {critic.vocab_size} tokens, and "
            f"policy.path={plan.experiment.policy.path} has a tokenizer.json of "
            f"{plan.tokenizer.vocab_size}; expected a critic that reads the same"
        )
    if engine.max_tokens > critic.max_positions:
        yield (
            f"engine.max_prompt_tokens + engine.max_new_tokens = {engine.max_tokens} is longer "
            f"than the {critic.max_positions} positions that {setting} was made for; "
            "lower either"
        )
