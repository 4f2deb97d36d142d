"""Rules between settings; each violation is one sentence that names the settings.

The file has more than 400 lines because it lists every rule, a few lines each.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_jax.cluster.config import Ray
from areal_jax.config.experiment import AnyExperiment, Experiment, FineTuning, PreferenceExperiment
from areal_jax.config.overrides import (
    as_text,
    settings,
)
from areal_jax.data.config import Files, Hub, Seeds
from areal_jax.errors import ConfigError
from areal_jax.parallel.config import PlacementConfig
from areal_jax.python_objects import PREFIX, PythonObject, is_missing
from areal_jax.rewards.tools import TOOLS
from areal_jax.rl.config import (
    DPPO,
    GAE,
    GDPO,
    SPO,
    VCPO,
    CrossTokenizer,
    GroupNormalized,
    LeaveOneOut,
    MaxRL,
    Reference,
    Shaping,
)
from areal_jax.rollout.config import RolloutConfig
from areal_jax.trainer.config import Critic, TrainerConfig
from areal_jax.workflows.config import (
    Agent,
    CustomWorkflow,
    Environment,
    MultiTurn,
    SingleTurn,
    ToolUse,
    Verifiers,
)


def contradictions(experiment: AnyExperiment) -> Iterator[str]:
    """Find violated rules between settings, each as a sentence that names the settings."""
    yield from _one_adapter(experiment)
    yield from _no_offload_with_adapter(experiment)
    yield from _raw_rewards(experiment)
    yield from _reward_model(experiment)
    yield from _python_objects(experiment)
    yield from _known_workflow(experiment)
    yield from _usable_tools(experiment)
    yield from _agent_program(experiment)
    yield from _environment(experiment)
    yield from _placement_under_ray(experiment)
    yield from _one_split(experiment)
    if isinstance(experiment, Experiment):
        yield from _row_length(experiment)
        yield from _mini_batches(experiment)
        yield from _signal(experiment)
        yield from _teacher(experiment)
        yield from _named_components(experiment)
        yield from _used_critic(experiment)
        yield from _success_rates(experiment)
        yield from _weighted_penalty(experiment)
        yield from _unshaped_rewards(experiment)
        yield from _rewards_between_0_and_1(experiment)
    else:
        yield from _used_trainer_settings(experiment)
    if isinstance(experiment, PreferenceExperiment):
        yield from _no_reward_model_answers(experiment)


def _unmovable(experiment: AnyExperiment) -> Iterator[str]:
    """Devices move only where training and decoding overlap, and engines have no weights beside
    the policy's.
    """
    if not isinstance(experiment, Experiment):
        yield (
            "placement.adaptive=true balances decoding with training, and fine-tuning only trains; "
            "set it to false"
        )
    elif experiment.rollout.max_staleness == 0:
        yield (
            "placement.adaptive=true with rollout.max_staleness=0: training and decoding take "
            "turns, so that neither is the bottleneck; raise rollout.max_staleness, or set "
            "placement.adaptive=false"
        )
    chosen = experiment.workflow
    if isinstance(chosen, Environment) and chosen.opponents:
        yield (
            f"placement.adaptive=true with workflow.opponents={','.join(chosen.opponents)}, whose "
            "engines stay on their devices; leave out one of them"
        )


def _one_split(experiment: AnyExperiment) -> Iterator[str]:
    """Only one setting splits the devices, and only reinforcement learning can be balanced."""
    placement = experiment.placement
    share, rollout, train = (
        placement.rollout_share,
        placement.rollout_devices,
        placement.train_devices,
    )
    if share is not None and (rollout is not None or (share == "auto" and train is not None)):
        yield (
            f"placement.rollout_share={share} with placement.rollout_devices={as_text(rollout)} "
            f"and placement.train_devices={as_text(train)}: both split the devices; set one of them"
        )
    if placement.adaptive:
        yield from _unmovable(experiment)
    if share == "auto" and not isinstance(experiment, Experiment):
        yield (
            "placement.rollout_share=auto balances decoding with training, and fine-tuning only "
            "trains; leave it out"
        )


def _success_rates(experiment: Experiment) -> Iterator[str]:
    """Bounds on success rates leave values between them."""
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
                "expected the first below the second; lower the first or raise the second"
            )


def _row_length(experiment: Experiment) -> Iterator[str]:
    """A row holds the longest sequence: no sequence is cut to fit a row."""
    longest, row_tokens = experiment.engine.max_tokens, experiment.trainer.row_tokens
    if 0 < row_tokens < longest:
        yield (
            f"trainer.row_tokens={row_tokens} is below the maximum sequence length, "
            f"engine.max_prompt_tokens + engine.max_new_tokens = {longest}; raise it, or set 0"
        )


def _one_adapter(experiment: AnyExperiment) -> Iterator[str]:
    """There is one adapter, and it is used with the weights that it was trained with."""
    policy = experiment.policy
    if policy.lora is not None and policy.adapter is not None:
        yield (
            f"policy.adapter={policy.adapter} has its own rank, alpha and targets; leave "
            "out policy.lora"
        )
    if policy.adapter is not None and policy.random_init:
        yield (
            f"policy.adapter={policy.adapter} was not trained with fresh weights; leave out "
            "policy.random_init"
        )
    if policy.lora is not None and not policy.lora.targets:
        yield (
            "policy.lora.targets is empty, so no parameter is trained; set at least one target, "
            "such as q_proj"
        )


def _no_offload_with_adapter(experiment: AnyExperiment) -> Iterator[str]:
    """The frozen weights of an adapter stay on the device, also as a reference."""
    policy, reference = experiment.policy, experiment.trainer.reference
    has_adapter = policy.lora is not None or policy.adapter is not None
    if has_adapter and reference is not None and reference.path == "initial" and reference.offload:
        yield (
            "trainer.reference.offload=true has no effect with an adapter, whose initial policy is "
            "the frozen weights themselves; leave it out"
        )


def _mini_batches(experiment: Experiment) -> Iterator[str]:
    """Every update has a group of its own."""
    groups, mini_batches = experiment.rollout.groups_per_batch, experiment.trainer.num_mini_batches
    if mini_batches > groups:
        yield (
            f"trainer.num_mini_batches={mini_batches} is more than "
            f"rollout.groups_per_batch={groups}, and each update needs a group of its own; lower it"
        )


def _signal(experiment: Experiment) -> Iterator[str]:
    """Advantages are not always zero."""
    advantages, is_distilled = experiment.trainer.advantages, experiment.trainer.teacher is not None
    alone = experiment.rollout.samples_per_group == 1 and not is_distilled
    if alone and isinstance(advantages, GroupNormalized | LeaveOneOut | MaxRL | VCPO):
        yield (
            "rollout.samples_per_group=1 makes all advantages zero under "
            f"trainer.advantages={type(advantages).__name__}; set it to at least 2, or set "
            "trainer.advantages=BatchNormalized"
        )
    if experiment.engine.temperature == 0:
        yield (
            "engine.temperature=0 gives identical samples; set engine.temperature above 0 for "
            "training"
        )
    if experiment.rewards.correct <= experiment.rewards.wrong:
        yield (
            f"rewards.correct={experiment.rewards.correct} is not above "
            f"rewards.wrong={experiment.rewards.wrong}; raise the first or lower the second"
        )


def _teacher(experiment: Experiment) -> Iterator[str]:
    """A teacher predicts something else than the policy, of text that it can read."""
    teacher = experiment.trainer.teacher
    if teacher is None:
        return
    is_policy = teacher.path in ("initial", "current")
    if teacher.path == "current" and teacher.hint is None:
        yield (
            "trainer.teacher.path=current without a hint predicts what the policy predicts; set "
            "trainer.teacher.hint, such as 'The answer is {answer}.'"
        )
    if teacher.path == "current" and teacher.offload:
        yield "trainer.teacher.offload=true has no effect with path=current; leave it out"
    if not isinstance(teacher.distillation, CrossTokenizer):
        return
    if is_policy:
        yield (
            f"trainer.teacher.path={teacher.path} has the policy's own tokenizer; use "
            "trainer.teacher.distillation=JensenShannon"
        )
    if not isinstance(experiment.workflow, SingleTurn):
        yield (
            "trainer.teacher.distillation=CrossTokenizer reads samples of one turn, not of "
            f"workflow={type(experiment.workflow).__name__}; use workflow=SingleTurn or a teacher "
            "with the policy's tokenizer"
        )


def _unshaped_rewards(experiment: Experiment) -> Iterator[str]:
    """MaxRL divides by the mean of rewards of 0 or more."""
    if not isinstance(experiment.trainer.advantages, MaxRL):
        return
    rewards = experiment.rewards
    for name in ("wrong", "no_answer"):
        reward = getattr(rewards, name)
        if rewards.scale == "unit" and reward is not None and reward < 0.0:
            yield (
                f"rewards.{name}={reward} with trainer.advantages=MaxRL, which needs rewards of 0 "
                f"or more; set rewards.{name}=0"
            )
    if experiment.trainer.shaping != Shaping():
        yield (
            "trainer.shaping with trainer.advantages=MaxRL, which needs rewards as they are; leave "
            "out trainer.shaping"
        )


def _rewards_between_0_and_1(experiment: Experiment) -> Iterator[str]:
    """SPO counts successes: rewards between 0 and 1, as they are."""
    if not isinstance(experiment.trainer.advantages, SPO):
        return
    rewards = experiment.rewards
    for name in ("correct", "wrong", "no_answer"):
        reward = getattr(rewards, name)
        if rewards.scale == "unit" and reward is not None and not 0.0 <= reward <= 1.0:
            yield (
                f"rewards.{name}={reward} with trainer.advantages=SPO, which needs rewards between "
                "0 and 1; set rewards.correct=1 and rewards.wrong=0"
            )
    if experiment.trainer.shaping != Shaping():
        yield (
            "trainer.shaping with trainer.advantages=SPO, which needs rewards as they are; leave "
            "out trainer.shaping"
        )
    if experiment.engine.router_replay:
        yield (
            "engine.router_replay=true with trainer.advantages=SPO, which scores earlier answers "
            "without their experts; leave out one of them"
        )


def _named_components(experiment: Experiment) -> Iterator[str]:
    """GDPO reads components of rewards that something names, as they are."""
    if not isinstance(experiment.trainer.advantages, GDPO):
        return
    rewards = experiment.rewards
    names_them = any((rewards.function, rewards.judge, rewards.model))
    if not names_them and not isinstance(experiment.workflow, Agent | CustomWorkflow):
        yield (
            "trainer.advantages=GDPO needs rewards with named components; set rewards.function to "
            "a function that returns a dict of them"
        )
    if isinstance(experiment.workflow, MultiTurn) and experiment.workflow.turn_discount != 1.0:
        yield (
            f"workflow.turn_discount={experiment.workflow.turn_discount} discounts the reward, and "
            "trainer.advantages=GDPO reads its components; set workflow.turn_discount=1"
        )
    if experiment.trainer.shaping != Shaping():
        yield (
            "trainer.shaping with trainer.advantages=GDPO, which reads the components of rewards; "
            "leave out trainer.shaping"
        )


def _weighted_penalty(experiment: Experiment) -> Iterator[str]:
    """Means of the loss are factors of the advantage, which a penalty beside it does not have."""
    loss, mean = experiment.trainer.loss, experiment.trainer.loss_mean
    if isinstance(loss, DPPO) and loss.log_ratio_penalty and mean != "tokens":
        yield (
            f"trainer.loss.log_ratio_penalty={loss.log_ratio_penalty} needs "
            f"trainer.loss_mean=tokens, found {mean}; set it, or set the penalty to 0"
        )


def _python_objects(experiment: AnyExperiment) -> Iterator[str]:
    """Objects without import path stay in this process."""
    for setting in settings(experiment).values() if isinstance(experiment.launch, Ray) else ():
        if isinstance(setting.value, str) and setting.value.startswith(PREFIX):
            yield (
                f"{setting.key}={setting.value} is a Python object without import path, which "
                f"other "
                "processes cannot import; define it in a file, or set launch=Local"
            )


def require_objects(experiment: AnyExperiment, *, unused: tuple[str, ...] = ()) -> None:
    """Require the Python objects that settings read from a config.json only name.

    Args:
        unused: beginnings of the keys that are not used.

    Raises:
        ConfigError: one is missing.
    """
    for setting in settings(experiment).values():
        is_text = isinstance(setting.value, str) and not setting.key.startswith(unused)
        if is_text and is_missing(setting.value):
            raise ConfigError(
                f"{setting.key}={setting.value} is a Python object without import path; pass the "
                "experiment with it again, from Python: areal_jax.train(experiment, "
                "run_folder=..., resume=True)"
            )


def _known_workflow(experiment: AnyExperiment) -> Iterator[str]:
    """The workflow is one of the package's, or a CustomWorkflow."""
    known = (SingleTurn, MultiTurn, ToolUse, Agent, Environment, CustomWorkflow)
    if not isinstance(experiment.workflow, known):
        yield (
            f"workflow={type(experiment.workflow).__name__} is no workflow of the package; derive "
            "it from areal_jax.workflows.config.CustomWorkflow, and define its method run"
        )


def _environment(experiment: AnyExperiment) -> Iterator[str]:
    """Environments and seeds come together, and reward episodes themselves."""
    chosen, sources = experiment.workflow, {"eval_tasks": experiment.eval_tasks}
    if isinstance(experiment, Experiment):
        sources["tasks"] = experiment.tasks
    for name, source in sources.items():
        if isinstance(source, Seeds) and not isinstance(chosen, Environment | Verifiers):
            yield (
                f"{name}=Seeds has seeds of an environment; set workflow=Environment and "
                "workflow.environment"
            )
    if not isinstance(chosen, Environment):
        return
    if isinstance(chosen.environment, PythonObject) and not chosen.environment.has_import_path:
        yield (
            f"workflow.environment={chosen.environment} runs in a process of its own, which must "
            "import it; define it at the top of a file or module"
        )
    if chosen.opponents and isinstance(experiment.launch, Ray):
        yield (
            f"workflow.opponents={','.join(chosen.opponents)} with launch=Ray: opponents are "
            "decoded in the process of the run; set launch=Local, or leave them out"
        )
    if experiment.rewards.function is not None:
        yield (
            "rewards.function with workflow=Environment, whose steps have the rewards; leave it out"
        )


def _raw_rewards(experiment: AnyExperiment) -> Iterator[str]:
    """With raw rewards, no setting needs correct and wrong answers."""
    rewards, chosen = experiment.rewards, experiment.workflow
    if rewards.scale != "raw":
        return
    names_reward = rewards.function is not None or rewards.model is not None
    if not names_reward and not isinstance(chosen, Agent | Environment):
        yield (
            "rewards.scale=raw needs a reward function or a reward model; set rewards.function or "
            "rewards.model.path, or leave it out"
        )
    if rewards.judge is not None:
        yield "rewards.scale=raw with rewards.judge, whose scores are from 0 to 1; leave out one"
    if rewards.form is not None and rewards.no_answer is None:
        yield (
            f"rewards.scale=raw with rewards.form={rewards.form} needs the reward of a text in "
            "another form; set rewards.no_answer"
        )
    if isinstance(chosen, MultiTurn):
        yield (
            "rewards.scale=raw has no wrong answers, which workflow=MultiTurn asks to correct; "
            "set rewards.scale=unit"
        )
    if isinstance(experiment, Experiment):
        for name in ("success_rate_above", "success_rate_below"):
            if (bound := getattr(experiment.rollout, name)) is not None:
                yield (
                    f"rollout.{name}={bound} counts correct answers, and rewards.scale=raw has "
                    f"none; set rollout.{name}=none"
                )


def _reward_model(experiment: AnyExperiment) -> Iterator[str]:
    """A reward model is in one place, and scores what nothing else scores."""
    model = experiment.rewards.model
    if model is None:
        return
    if (model.path is None) == (model.url is None):
        yield (
            f"rewards.model.path={model.path} and rewards.model.url={model.url}: a reward model is "
            "a folder or behind a URL; set one of them"
        )
    if experiment.rewards.judge is not None:
        yield "rewards.model with rewards.judge, which both score answers; leave out one"
    if model.path is not None and isinstance(experiment.launch, Ray):
        yield (
            f"rewards.model.path={model.path} with launch=Ray, whose reward workers have no "
            "devices; serve it with areal-serve, and set rewards.model.url"
        )
    if isinstance(experiment.workflow, Environment):
        yield "rewards.model with workflow=Environment, whose steps have the rewards; leave it out"


def _usable_tools(experiment: AnyExperiment) -> Iterator[str]:
    """Tools exist and can be called."""
    chosen = experiment.workflow
    if not isinstance(chosen, ToolUse):
        return
    names = chosen.tools.names
    if not names or set(names) - TOOLS.keys():
        yield f"workflow.tools.names={','.join(names)}: expected some of {', '.join(TOOLS)}"
    if chosen.max_turns == 1:
        yield (
            "workflow.max_turns=1 leaves no turn in which a tool is called; raise it, or set "
            "workflow=SingleTurn"
        )
    if ("search" in names) != (chosen.tools.documents is not None):
        yield (
            f"workflow.tools.names={','.join(names)} with "
            f"workflow.tools.documents={chosen.tools.documents}: search needs documents, and "
            "documents need search; set both or leave both out"
        )


def _agent_program(experiment: AnyExperiment) -> Iterator[str]:
    """An agent is a function or a command."""
    chosen = experiment.workflow
    if isinstance(chosen, Agent) and (chosen.function is None) == (chosen.command is None):
        given = (
            f"workflow.function={as_text(chosen.function)} and "
            f"workflow.command={as_text(chosen.command)}"
        )
        yield f"{given}: an agent is a function or a command; set one of them"


def _placement_under_ray(experiment: AnyExperiment) -> Iterator[str]:
    """With Ray, the launch settings give the devices."""
    if not isinstance(experiment.launch, Ray):
        return
    if not isinstance(experiment, Experiment):
        yield (
            f"launch=Ray is for reinforcement learning, which {experiment.name} is not; leave "
            "it out"
        )
    launch = experiment.launch
    if 0 < launch.max_engines < launch.rollout_engines:
        yield (
            f"launch.max_engines={launch.max_engines} is less than "
            f"launch.rollout_engines={launch.rollout_engines}, with which the run starts; raise "
            "the first, or lower the second"
        )
    placement, default = experiment.placement, PlacementConfig()
    if placement.adaptive and launch.trainer_devices % launch.engine_devices:
        yield (
            "placement.adaptive=true makes trainer hosts into whole engines, and "
            f"launch.trainer_devices={launch.trainer_devices} is not divisible by "
            f"launch.engine_devices={launch.engine_devices}; set the first to a multiple of the "
            "second, with more or fewer trainer hosts"
        )
    for name, used in (
        ("train_devices", "launch.trainer_hosts and launch.trainer_devices"),
        ("rollout_devices", "launch.rollout_engines and launch.engine_devices"),
        ("rollout_share", "launch.rollout_engines and launch.engine_devices"),
        ("simulated_devices", "launch.accelerator=none"),
        ("engines", "launch.rollout_engines"),
    ):
        if (value := getattr(placement, name)) != getattr(default, name):
            yield (
                f"placement.{name}={value} has no effect under launch=Ray; leave it out, and set "
                f"{used}"
            )


def _used_critic(experiment: Experiment) -> Iterator[str]:
    """Only advantages=GAE has critic settings."""
    advantages = type(experiment.trainer.advantages)
    given, default = settings(experiment.trainer.critic), settings(Critic())
    changed = {
        key.partition(".")[0]
        for key in given
        if key not in default or given[key].value != default[key].value
    }
    if changed and advantages is not GAE:
        yield (
            f"{', '.join(f'trainer.critic.{key}' for key in sorted(changed))}: no effect under "
            f"trainer.advantages={advantages.__name__}, which has no critic; leave it out, or set "
            "trainer.advantages=GAE"
        )


def _used_trainer_settings(experiment: FineTuning) -> Iterator[str]:
    """Fine-tuning leaves trainer settings of reinforcement learning at their defaults."""
    given = settings(experiment.trainer)
    unread = [
        "loss",
        "positive_nll_coef",
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
            yield (f"trainer.{key}={given[key].text()} has no effect in fine-tuning; leave it out")


def _no_reward_model_answers(experiment: PreferenceExperiment) -> Iterator[str]:
    """A reward model, which has no head that generates, is not evaluated on answers."""
    if experiment.trains_reward_model and experiment.evaluation.every_steps:
        yield (
            f"evaluation.every_steps={experiment.evaluation.every_steps} needs answers, which a "
            "reward model (loss=BradleyTerry) does not generate; set it to 0"
        )
