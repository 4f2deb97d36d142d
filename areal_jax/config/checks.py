"""Bounds of settings and rules between settings; each violation is one sentence that names the
settings."""

from __future__ import annotations

from collections.abc import Iterator

from areal_jax.cluster.config import Ray
from areal_jax.config.experiment import AnyExperiment, Experiment, FineTuning, PreferenceExperiment
from areal_jax.config.overrides import (
    as_text,
    settings,
)
from areal_jax.data.config import Files, Hub
from areal_jax.parallel.config import PlacementConfig
from areal_jax.rewards.tools import TOOLS
from areal_jax.rl.config import GAE, GroupNormalized, LeaveOneOut, Reference
from areal_jax.rollout.config import RolloutConfig
from areal_jax.trainer.config import Critic, TrainerConfig
from areal_jax.workflows.config import Agent, MultiTurn, ToolUse


def contradictions(experiment: AnyExperiment) -> Iterator[str]:
    """What cannot be in an experiment's settings, each in a sentence that names the knobs; nothing
    where all is well."""
    yield from two_adapters(experiment)
    yield from two_homes(experiment)
    yield from raw_without_meaning(experiment)
    yield from tools_in_vain(experiment)
    yield from agent_without_program(experiment)
    yield from two_placements(experiment)
    yield from split_twice(experiment)
    if isinstance(experiment, Experiment):
        yield from row_too_short(experiment)
        yield from too_many_mini_batches(experiment)
        yield from no_signal(experiment)
        yield from idle_critic(experiment)
        yield from nothing_in_bounds(experiment)
    else:
        yield from idle(experiment)
    if isinstance(experiment, PreferenceExperiment):
        yield from answers_of_a_reward_model(experiment)


def split_twice(experiment: AnyExperiment) -> Iterator[str]:
    """Devices are counted or shared out, and only what decodes while it trains can be balanced."""
    placement = experiment.placement
    share, rollout, train = (
        placement.rollout_share,
        placement.rollout_devices,
        placement.train_devices,
    )
    if share is not None and (rollout is not None or (share == "auto" and train is not None)):
        yield (
            f"placement.rollout_share={share} with placement.rollout_devices={as_text(rollout)} "
            "and placement.train_devices="
            f"{as_text(train)}: each says how devices are split; set one of them"
        )
    if share == "auto" and not isinstance(experiment, Experiment):
        yield (
            "placement.rollout_share=auto balances decoding with training, and learning from "
            "examples only trains"
        )


def nothing_in_bounds(experiment: Experiment) -> Iterator[str]:
    """Success rates between which there is not enough resources."""
    for name, bounds in (
        ("rollout", experiment.rollout),
        ("tasks", experiment.tasks),
        ("eval_tasks", experiment.eval_tasks),
    ):
        if not isinstance(bounds, RolloutConfig | Files | Hub) or bounds.success_rate_above is None:
            continue
        above, below = (
            bounds.success_rate_above,
            1.0 if bounds.success_rate_below is None else bounds.success_rate_below,
        )
        if above >= below:
            yield (
                f"{name}.success_rate_above={above} and {name}.success_rate_below={below}: "
                "nothing lies between them; "
                "lower the first or raise the second"
            )


def row_too_short(experiment: Experiment) -> Iterator[str]:
    """A sequence is never cut to fit a row, so the longest one must fit."""
    longest, row_tokens = experiment.engine.max_tokens, experiment.trainer.row_tokens
    if 0 < row_tokens < longest:
        yield (
            f"trainer.row_tokens={row_tokens} is shorter than the longest sequence, "
            "engine.max_prompt_tokens + "
            f"engine.max_new_tokens = {longest}; raise it, or set it to 0"
        )


def two_adapters(experiment: AnyExperiment) -> Iterator[str]:
    """There is one adapter, and it belongs to the weights it was trained beside."""
    policy = experiment.policy
    if policy.lora is not None and policy.adapter is not None:
        yield (
            f"policy.adapter={policy.adapter} brings its own rank, alpha and targets; leave "
            "out policy.lora"
        )
    if policy.adapter is not None and policy.random_init:
        yield (
            f"policy.adapter={policy.adapter} was not trained beside fresh weights; leave out "
            "policy.random_init"
        )
    if policy.lora is not None and not policy.lora.targets:
        yield (
            "policy.lora.targets is empty, which leaves nothing to train: name at least one, "
            "such as q_proj"
        )


def two_homes(experiment: AnyExperiment) -> Iterator[str]:
    """Weights that an adapter is trained beside are needed on the device all the time, whoever else
    reads them."""
    policy, reference = experiment.policy, experiment.trainer.reference
    has_adapter = policy.lora is not None or policy.adapter is not None
    if has_adapter and reference is not None and reference.path == "initial" and reference.offload:
        yield (
            "trainer.reference.offload=true would save nothing: beside an adapter, the initial "
            "policy is the frozen weights "
            "themselves; leave it out"
        )


def too_many_mini_batches(experiment: Experiment) -> Iterator[str]:
    """A group is never split over two updates."""
    groups, mini_batches = experiment.rollout.groups_per_batch, experiment.trainer.num_mini_batches
    if mini_batches > groups:
        yield (
            f"trainer.num_mini_batches={mini_batches} is more than "
            f"rollout.groups_per_batch={groups}: "
            "each update needs a group of its own"
        )


def no_signal(experiment: Experiment) -> Iterator[str]:
    """Mixtures under which every advantage is zero."""
    advantages, is_distilled = experiment.trainer.advantages, experiment.trainer.teacher is not None
    alone = experiment.rollout.samples_per_group == 1 and not is_distilled
    if alone and isinstance(advantages, GroupNormalized | LeaveOneOut):
        yield (
            "rollout.samples_per_group=1 leaves nothing to compare with under "
            f"trainer.advantages={type(advantages).__name__}: "
            "draw at least 2, or set trainer.advantages=BatchNormalized"
        )
    if experiment.engine.temperature == 0:
        yield (
            "engine.temperature=0 draws the same answer again and again: training needs a "
            "temperature above 0"
        )
    if experiment.rewards.correct <= experiment.rewards.wrong:
        yield (
            f"rewards.correct={experiment.rewards.correct} is not above "
            f"rewards.wrong={experiment.rewards.wrong}"
        )


def raw_without_meaning(experiment: AnyExperiment) -> Iterator[str]:
    """Settings that need a right and a wrong answer, where rewards are plain numbers."""
    rewards, chosen = experiment.rewards, experiment.workflow
    if rewards.scale != "raw":
        return
    if rewards.function is None and not isinstance(chosen, Agent):
        yield "rewards.scale=raw needs a reward function of yours: set rewards.function, or leave it out"
    if rewards.form is not None and rewards.no_answer is None:
        yield (
            f"rewards.scale=raw with rewards.form={rewards.form}: set rewards.no_answer, the "
            "reward of a text in no such form"
        )
    if isinstance(chosen, MultiTurn):
        yield "rewards.scale=raw has no wrong answer that workflow=MultiTurn could ask to correct; set rewards.scale=unit"
    if isinstance(experiment, Experiment):
        for name in ("success_rate_above", "success_rate_below"):
            if (bound := getattr(experiment.rollout, name)) is not None:
                yield (
                    f"rollout.{name}={bound} counts correct answers, and rewards.scale=raw has "
                    f"none; set rollout.{name}=none"
                )


def tools_in_vain(experiment: AnyExperiment) -> Iterator[str]:
    """Tools that there are not, or that are never called."""
    chosen = experiment.workflow
    if not isinstance(chosen, ToolUse):
        return
    names = chosen.tools.names
    if not names or set(names) - TOOLS.keys():
        yield f"workflow.tools.names={','.join(names)}: expected some of {', '.join(TOOLS)}"
    if chosen.max_turns == 1:
        yield (
            "workflow.max_turns=1 leaves no turn in which a tool is called: raise it, or set "
            "workflow=SingleTurn"
        )
    if ("search" in names) != (chosen.tools.documents is not None):
        yield (
            f"workflow.tools.names={','.join(names)} with "
            f"workflow.tools.documents={chosen.tools.documents}: search and "
            "documents go together; name a file or folder of yours, or leave both out"
        )


def agent_without_program(experiment: AnyExperiment) -> Iterator[str]:
    """An agent is a function or a command."""
    chosen = experiment.workflow
    if isinstance(chosen, Agent) and (chosen.function is None) == (chosen.command is None):
        given = (
            f"workflow.function={as_text(chosen.function)} and "
            f"workflow.command={as_text(chosen.command)}"
        )
        yield f"{given}: an agent is a function of yours, or a command; set one of them"


def two_placements(experiment: AnyExperiment) -> Iterator[str]:
    """With Ray, how many devices train and decode is said once, by process."""
    if not isinstance(experiment.launch, Ray):
        return
    if not isinstance(experiment, Experiment):
        yield (
            f"launch=Ray is for reinforcement learning, which {experiment.name} is not; leave "
            "it out"
        )
    placement, default = experiment.placement, PlacementConfig()
    for name, used in (
        ("train_devices", "launch.trainer_hosts and launch.trainer_devices"),
        ("rollout_devices", "launch.rollout_engines and launch.engine_devices"),
        ("rollout_share", "launch.rollout_engines and launch.engine_devices"),
        ("simulated_devices", "launch.accelerator=none"),
        ("engines", "launch.rollout_engines"),
    ):
        if (value := getattr(placement, name)) != getattr(default, name):
            yield (
                f"placement.{name}={value} says nothing under launch=Ray; leave it out, and "
                f"set {used}"
            )


def idle_critic(experiment: Experiment) -> Iterator[str]:
    """Settings of a critic that nothing asks."""
    advantages = type(experiment.trainer.advantages)
    given, default = settings(experiment.trainer.critic), settings(Critic())
    changed = {
        key.partition(".")[0]
        for key in given
        if key not in default or given[key].value != default[key].value
    }
    if changed and advantages is not GAE:
        yield (
            f"{', '.join(f'trainer.critic.{key}' for key in sorted(changed))}: without meaning "
            "under "
            f"trainer.advantages={advantages.__name__}, which asks no critic; leave it out, or "
            "set trainer.advantages=GAE"
        )


def idle(experiment: FineTuning) -> Iterator[str]:
    """Settings that learning from examples does not read, changed nevertheless."""
    given = settings(experiment.trainer)
    unread = [
        "loss",
        "entropy_coef",
        "shaping",
        "advantages",
        "critic",
        "num_mini_batches",
        "teacher",
    ]
    compares = isinstance(experiment, PreferenceExperiment) and experiment.reference is not None
    unread.append("reference.kl" if compares else "reference")
    default = settings(TrainerConfig(reference=Reference() if compares else None))
    for key in given:
        is_idle = key.startswith(tuple(unread))
        if is_idle and given[key].value != default.get(key, given[key]).value:
            yield (
                f"trainer.{key}={given[key].text()} has no meaning in learning from examples; "
                "leave it out"
            )


def answers_of_a_reward_model(experiment: PreferenceExperiment) -> Iterator[str]:
    """A reward model has given up the head that answers."""
    if experiment.trains_reward_model and experiment.evaluation.every_steps:
        yield (
            f"evaluation.every_steps={experiment.evaluation.every_steps} asks a reward model "
            "(loss=BradleyTerry) for answers, "
            "of which it gives none; set it to 0"
        )
