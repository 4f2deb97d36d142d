"""An experiment: the rooms' own settings, composed; where experiments are found, overridden, checked, kept and read again.

experiment = load_experiment("aime", ["rollout.max_staleness=8", "tasks=Files", "tasks.path=problems.jsonl"])
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import chz

from areal_jax import __version__
from areal_jax.checkpoint.config import CheckpointConfig
from areal_jax.data.config import Files, HeldOut, Hub, PromptConfig, Synthetic, TaskSource
from areal_jax.engine.config import MAX_TOP_K, EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.launch.config import LaunchConfig, Local, Ray
from areal_jax.metrics.config import HealthConfig, MetricsConfig
from areal_jax.metrics.files import write_whole
from areal_jax.models.config import PolicyConfig
from areal_jax.parallel.config import PlacementConfig
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.tools import TOOLS
from areal_jax.rl.config import DPO, GAE, BradleyTerry, GroupNormalized, LeaveOneOut, Preference, Reference
from areal_jax.rl.presets import PRESETS
from areal_jax.rollout.config import RolloutConfig
from areal_jax.settings import (
    ConfigError,
    Settings,
    as_text,
    assign,
    build,
    from_json,
    from_text,
    parse_overrides,
    settings,
    to_json,
)
from areal_jax.trainer.config import Critic, TrainerConfig
from areal_jax.workflows.config import Agent, MultiTurn, SingleTurn, ToolUse, WorkflowConfig

CONFIG_FILE = "config.json"
"""Name under which a run folder keeps its resolved configuration."""

_VERSION_KEY = "areal_jax.version"
_CLASS_KEY = "areal_jax.experiment"
_RUN_KEY = "areal_jax.run"


@chz.chz
class Setup:
    """What every experiment settles, whatever it trains on."""

    name: str = chz.field(doc="names the run folder")
    description: str = chz.field(default="", doc="one line about what is tried")
    seed: int = chz.field(default=1, doc="of fresh weights, of the order of the data and of every draw")
    num_steps: int = chz.field(doc="trainer steps; 0: only evaluate")
    policy: PolicyConfig = chz.field(default_factory=PolicyConfig, doc="what is trained")
    eval_tasks: TaskSource = chz.field(default_factory=lambda: Synthetic(split="heldout"), doc="what it is evaluated on")
    prompt: PromptConfig = chz.field(default_factory=PromptConfig, doc="what is put around every problem")
    placement: PlacementConfig = chz.field(default_factory=PlacementConfig, doc="which devices train and which decode")
    launch: LaunchConfig = chz.field(
        default_factory=Local, doc="in which processes: Local, all in this one; Ray, on this machine or on many"
    )
    engine: EngineConfig = chz.field(default_factory=EngineConfig, doc="decoding")
    trainer: TrainerConfig = chz.field(default_factory=TrainerConfig, doc="how a batch becomes a version")
    workflow: WorkflowConfig = chz.field(
        default_factory=SingleTurn,
        doc="how a task becomes samples, in training and evaluation: SingleTurn, MultiTurn, ToolUse or Agent",
    )
    rewards: RewardConfig = chz.field(default_factory=RewardConfig, doc="judging")
    evaluation: EvaluationConfig = chz.field(default_factory=EvaluationConfig, doc="evaluation while training goes on")
    checkpoint: CheckpointConfig = chz.field(default_factory=CheckpointConfig, doc="what survives")
    metrics: MetricsConfig = chz.field(default_factory=MetricsConfig, doc="what is written beside metrics.jsonl")
    health: HealthConfig = chz.field(default_factory=HealthConfig, doc="checks for a run that cannot learn")


@chz.chz
class Experiment(Setup):
    """Reinforcement learning: everything that decides a run, and nothing that it finds out."""

    tasks: TaskSource = chz.field(default_factory=Synthetic, doc="what it is trained on")
    rollout: RolloutConfig = chz.field(default_factory=RolloutConfig, doc="batch shape and staleness")


@chz.chz
class FineTuning(Setup):
    """Learning from examples that are there before the run begins."""

    examples: TaskSource = chz.field(
        default_factory=Synthetic,
        doc="what it is trained on: conversations, or prompts with their answers; for preferences, pairs of answers",
    )
    examples_per_batch: int = chz.field(default=64, doc="examples, or pairs, in one update")
    eval_examples: TaskSource = chz.field(default_factory=HeldOut, doc="what is measured on examples is measured on these")
    heldout_every_steps: int = chz.field(
        default=50,
        doc="updates between two measurements of loss and perplexity (for preferences, of accuracy) on eval_examples, one "
        "before the first and one after the last; 0: none",
    )


@chz.chz
class SFTExperiment(FineTuning):
    """Supervised fine-tuning: how a policy comes to be that reinforcement learning can start from."""


@chz.chz
class PreferenceExperiment(FineTuning):
    """Training on pairs of a chosen and a rejected answer, of a policy or of a reward model."""

    loss: Preference = chz.field(
        default_factory=DPO, doc="what is learnt from a pair: by a policy DPO or IPO, by a reward model BradleyTerry"
    )

    @property
    def trains_reward_model(self) -> bool:
        """Whether the outcome scores answers, instead of giving them."""
        return isinstance(self.loss, BradleyTerry)

    @property
    def reference(self) -> Reference | None:
        """What the policy is compared with, by default the weights that training starts from; a reward model with nothing."""
        return None if self.trains_reward_model else self.trainer.reference or Reference()


AnyExperiment = Experiment | SFTExperiment | PreferenceExperiment


def load_experiment(name_or_path: str, overrides: Sequence[str] = ()) -> AnyExperiment:
    """The experiment of experiments/NAME.py, or of the Python file at a path, with `a.b=c` overrides applied.

    Raises ConfigError where there is no such experiment, an override fits no setting, or settings contradict."""
    experiment = _experiment_in(find_experiment(name_or_path))
    return _resolved(type(experiment), settings(experiment), overrides)


def read_config(path: Path, overrides: Sequence[str] = ()) -> AnyExperiment:
    """The experiment that a run wrote to its config.json, with overrides. A setting the file lacks takes its default.

    Raises ConfigError where the file is none, or names a setting that this version does not know."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected the {CONFIG_FILE} of a run") from None
    except ValueError as error:
        raise ConfigError(f"{path}: expected the {CONFIG_FILE} of a run, came no text ({error})") from None
    return _read(text, str(path), overrides)


def read_settings(text: str, source: str | None) -> AnyExperiment:
    """The experiment that another process of this run wrote down with `written_settings`.

    Args: source: name or file of the experiment, which may define classes that the settings name. Raises as `read_config`."""
    if source is not None:
        load_experiment(source)
    return _read(text, "the settings of the run", ())


def written_settings(experiment: AnyExperiment) -> str:
    """Every setting, flat and readable, as config.json holds them."""
    header = {_VERSION_KEY: __version__, _CLASS_KEY: type(experiment).__name__}
    return json.dumps(header | to_json(experiment), indent=2, allow_nan=False) + "\n"


def _read(text: str, path: str, overrides: Sequence[str]) -> AnyExperiment:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: expected the {CONFIG_FILE} of a run, came no JSON ({error})") from None
    classes = {cls.__name__: cls for cls in get_args(AnyExperiment)}
    cls = classes.get(str(given.pop(_CLASS_KEY, ""))) if isinstance(given, dict) else None
    if cls is None:
        raise ConfigError(f"{path}: expected the {CONFIG_FILE} of a run, with {_CLASS_KEY} one of {', '.join(classes)}")
    given.pop(_RUN_KEY, None)
    version = given.pop(_VERSION_KEY, "an unknown version")
    try:
        return _resolved(cls, assign(given, settings(cls), from_json), overrides)
    except ConfigError as error:
        raise ConfigError(f"{path} (written by areal_jax {version}, this is {__version__}): {error}") from None


def holds_run(folder: Path) -> bool:
    """Whether a folder has the config.json of a run; that of a policy is another."""
    try:
        return _CLASS_KEY in json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def write_config(experiment: AnyExperiment, path: Path, run_id: str | None = None) -> None:
    """Write every setting, flat and readable; `--config=PATH` runs it again. Args: run_id: identifies the run."""
    written = written_settings(experiment)
    if run_id is not None:
        written = json.dumps({_RUN_KEY: run_id} | json.loads(written), indent=2) + "\n"
    write_whole(path, written)


def read_plainly(path: Path) -> tuple[str | None, Mapping[str, Any]]:
    """The run's id, None where it has none, and its settings as they stand in a config.json, which may be missing."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, {}
    return given.get(_RUN_KEY), given


def experiment_names() -> list[str]:
    """Names that `--exp` knows."""
    return sorted(path.stem for path in _experiments_folder().glob("*.py"))


def find_experiment(name_or_path: str) -> Path:
    """The file of an experiment given by name or by path. ConfigError lists the names where there is none."""
    if name_or_path.endswith(".py"):
        path = Path(name_or_path)
        hint = "give the path of an existing file, or a name"
    else:
        path = _experiments_folder() / f"{name_or_path}.py"
        hint = f"known names: {', '.join(experiment_names())}; or give the path of a .py file"
    if not path.is_file():
        raise ConfigError(f"no experiment {name_or_path!r}; {hint}")
    return path


def _experiments_folder() -> Path:
    """experiments/ lies inside the package once installed, and beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "experiments"


def _experiment_in(path: Path) -> AnyExperiment:
    module_name = f"experiment {path.resolve()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    # chz looks the module up when it reads the annotations of classes that the file defines.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a stranger's code, who needs the trace from where it begins
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != spec.origin:
            trace = trace.tb_next
        told = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        raise ConfigError(f"{path}: {type(error).__name__}: {error}\n{told}") from error
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, AnyExperiment):
        names = ", ".join(cls.__name__ for cls in get_args(AnyExperiment))
        raise ConfigError(f"{path}: expected `experiment` to be one of {names}, came {type(experiment).__name__}")
    return experiment


def _resolved(cls: type[AnyExperiment], flat: Settings, overrides: Sequence[str]) -> AnyExperiment:
    given = parse_overrides(overrides)
    if name := given.pop("algorithm", None):
        flat = settings(_with_algorithm(build(cls, flat), name))
    experiment = build(cls, assign(given, flat, from_text))
    if problems := list(contradictions(experiment)):
        raise ConfigError("\n".join(problems))
    return experiment


def _with_algorithm(experiment: AnyExperiment, name: str) -> Experiment:
    """The experiment with the switches of a preset. ConfigError names the presets where there is none of this name."""
    preset = PRESETS.get(name.lower())
    if preset is None:
        raise ConfigError(f"no algorithm {name!r}; known are {', '.join(PRESETS)}")
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"algorithm={name} is for reinforcement learning, which {experiment.name} is not")
    trainer = chz.replace(
        experiment.trainer,
        loss=preset.loss,
        loss_mean=preset.loss_mean,
        advantages=preset.advantages,
        shaping=preset.shaping,
        critic=experiment.trainer.critic if isinstance(preset.advantages, GAE) else Critic(),
        reference=preset.reference,
    )
    rollout = chz.replace(
        experiment.rollout, success_rate_above=preset.success_rate_above, success_rate_below=preset.success_rate_below
    )
    return chz.replace(experiment, trainer=trainer, rollout=rollout)


# What a number may be, by the last part of its key. Zero is allowed where it means none or off.
_POSITIVE = (
    *(
        "num_tasks",
        "max_tasks",
        "max_examples",
        "examples_per_batch",
        "groups_per_batch",
        "samples_per_group",
        "max_running_groups",
        "max_running",
    ),
    *("num_slots", "max_new_tokens", "steps_per_dispatch", "num_mini_batches", "rows_per_micro_batch"),
    *("page_tokens", "prefill_chunk_tokens"),
    *("logp_chunk_tokens", "learning_rate", "eps", "max_grad_norm", "clip_eps", "clip_eps_high", "cap"),
    *("value_clip_eps", "beta"),
    *("clip", "max_second_moment", "temperature_positive", "temperature_negative", "clip_eps_low"),
    *("num_workers", "samples_per_task", "keep", "batch_timeout_s", "request_timeout_s", "timeout_s"),
    *("max_consecutive_failures",),
    *("rank", "alpha", "train_devices", "rollout_devices", "train_fsdp", "train_expert", "train_context", "train_tensor"),
    *("rollout_tensor", "engines", "simulated_devices"),
    *("patience_s", "test_timeout_s", "total_timeout_s", "memory_bytes", "max_processes", "max_file_bytes", "tmp_bytes"),
    *("max_turns", "expected_calls", "max_output_chars", "num_results"),
    *("max_body_bytes", "max_requests", "max_samples", "body_timeout_s", "shutdown_timeout_s", "devices", "tensor"),
    *("max_body_values", "max_messages", "max_connections"),
    *("trainer_hosts", "trainer_devices", "rollout_engines", "engine_devices", "reward_workers", "cpus_per_process"),
    *("stall_warning_s", "stall_timeout_s", "silence_timeout_s", "start_timeout_s", "report_every_s", "window_steps"),
)
_NOT_NEGATIVE = (
    *(
        "seed",
        "num_steps",
        "max_staleness",
        "max_staleness_of_code",
        "every_steps",
        "heldout_every_steps",
        "max_prompt_tokens",
        "row_tokens",
        "warmup_steps",
    ),
    *("temperature", "top_k", "weight_decay", "overlong_penalty", "router_aux_loss_coef", "entropy_coef"),
    *("weight", "reward_weight", "coefficient", "kv_tokens", "port", "attempts", "min_entropy"),
)
_FRACTION = (
    *("share", "overlong_share", "max_lost_share", "rollout_share", "success_rate_above", "success_rate_below"),
    *("top_p", "warmup_fraction", "beta1", "beta2", "gamma", "lam", "turn_discount"),
)
_BELOW_HALF = ("label_smoothing",)
_ABOVE_ONE = ("dual_clip", "max_ratio")
_ANY_NUMBER = ("correct", "wrong", "no_answer", "bias", "scale")


def contradictions(experiment: AnyExperiment) -> Iterator[str]:
    """What cannot be in an experiment's settings, each in a sentence that names the knobs; nothing where all is well."""
    yield from out_of_range(experiment)
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
    share, rollout, train = placement.rollout_share, placement.rollout_devices, placement.train_devices
    if share is not None and (rollout is not None or (share == "auto" and train is not None)):
        yield (
            f"placement.rollout_share={share} with placement.rollout_devices={as_text(rollout)} and placement.train_devices="
            f"{as_text(train)}: each says how devices are split; set one of them"
        )
    if share == "auto" and not isinstance(experiment, Experiment):
        yield "placement.rollout_share=auto balances decoding with training, and learning from examples only trains"


def nothing_in_bounds(experiment: Experiment) -> Iterator[str]:
    """Success rates between which there is no room."""
    for name, bounds in (("rollout", experiment.rollout), ("tasks", experiment.tasks), ("eval_tasks", experiment.eval_tasks)):
        if not isinstance(bounds, RolloutConfig | Files | Hub) or bounds.success_rate_above is None:
            continue
        above, below = bounds.success_rate_above, 1.0 if bounds.success_rate_below is None else bounds.success_rate_below
        if above >= below:
            yield (
                f"{name}.success_rate_above={above} and {name}.success_rate_below={below}: nothing lies between them; "
                "lower the first or raise the second"
            )


def out_of_range(config: object) -> Iterator[str]:
    """Numbers that count, time or divide nothing."""
    for setting in settings(config).values():
        value, name = setting.value, setting.key.rpartition(".")[2]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if name in _POSITIVE and value <= 0:
            yield f"{setting.key}={value}: expected a number above 0 ({setting.doc})"
        if name in _NOT_NEGATIVE and value < 0:
            yield f"{setting.key}={value}: expected 0 or more ({setting.doc})"
        if name in _FRACTION and not 0 <= value <= 1:
            yield f"{setting.key}={value}: expected a number from 0 to 1 ({setting.doc})"
        if name in _BELOW_HALF and not 0 <= value < 0.5:
            yield f"{setting.key}={value}: expected a number from 0 to less than 0.5 ({setting.doc})"
        if name == "top_k" and value > MAX_TOP_K:
            yield f"{setting.key}={value}: expected at most {MAX_TOP_K} ({setting.doc})"
        if name in _ABOVE_ONE and value <= 1:
            yield f"{setting.key}={value}: expected a number above 1 ({setting.doc})"


def row_too_short(experiment: Experiment) -> Iterator[str]:
    """A sequence is never cut to fit a row, so the longest one must fit."""
    longest, row_tokens = experiment.engine.max_tokens, experiment.trainer.row_tokens
    if 0 < row_tokens < longest:
        yield (
            f"trainer.row_tokens={row_tokens} is shorter than the longest sequence, engine.max_prompt_tokens + "
            f"engine.max_new_tokens = {longest}; raise it, or set it to 0"
        )


def two_adapters(experiment: AnyExperiment) -> Iterator[str]:
    """There is one adapter, and it belongs to the weights it was trained beside."""
    policy = experiment.policy
    if policy.lora is not None and policy.adapter is not None:
        yield f"policy.adapter={policy.adapter} brings its own rank, alpha and targets; leave out policy.lora"
    if policy.adapter is not None and policy.random_init:
        yield f"policy.adapter={policy.adapter} was not trained beside fresh weights; leave out policy.random_init"
    if policy.lora is not None and not policy.lora.targets:
        yield "policy.lora.targets is empty, which leaves nothing to train: name at least one, such as q_proj"


def two_homes(experiment: AnyExperiment) -> Iterator[str]:
    """Weights that an adapter is trained beside are needed on the device all the time, whoever else reads them."""
    policy, reference = experiment.policy, experiment.trainer.reference
    has_adapter = policy.lora is not None or policy.adapter is not None
    if has_adapter and reference is not None and reference.path == "initial" and reference.offload:
        yield (
            "trainer.reference.offload=true would save nothing: beside an adapter, the initial policy is the frozen weights "
            "themselves; leave it out"
        )


def too_many_mini_batches(experiment: Experiment) -> Iterator[str]:
    """A group is never split over two updates."""
    groups, mini_batches = experiment.rollout.groups_per_batch, experiment.trainer.num_mini_batches
    if mini_batches > groups:
        yield (
            f"trainer.num_mini_batches={mini_batches} is more than rollout.groups_per_batch={groups}: "
            "each update needs a group of its own"
        )


def no_signal(experiment: Experiment) -> Iterator[str]:
    """Mixtures under which every advantage is zero."""
    advantages, is_taught = experiment.trainer.advantages, experiment.trainer.teacher is not None
    alone = experiment.rollout.samples_per_group == 1 and not is_taught
    if alone and isinstance(advantages, GroupNormalized | LeaveOneOut):
        yield (
            f"rollout.samples_per_group=1 leaves nothing to compare with under trainer.advantages={type(advantages).__name__}: "
            "draw at least 2, or set trainer.advantages=BatchNormalized"
        )
    if experiment.engine.temperature == 0:
        yield "engine.temperature=0 draws the same answer again and again: training needs a temperature above 0"
    if experiment.rewards.correct <= experiment.rewards.wrong:
        yield f"rewards.correct={experiment.rewards.correct} is not above rewards.wrong={experiment.rewards.wrong}"


def raw_without_meaning(experiment: AnyExperiment) -> Iterator[str]:
    """Settings that need a right and a wrong answer, where rewards are plain numbers."""
    rewards, chosen = experiment.rewards, experiment.workflow
    if rewards.scale != "raw":
        return
    if rewards.function is None and not isinstance(chosen, Agent):
        yield "rewards.scale=raw needs a reward function of yours: set rewards.function, or leave it out"
    if rewards.form is not None and rewards.no_answer is None:
        yield f"rewards.scale=raw with rewards.form={rewards.form}: set rewards.no_answer, the reward of a text in no such form"
    if isinstance(chosen, MultiTurn):
        yield "rewards.scale=raw has no wrong answer that workflow=MultiTurn could ask to correct; set rewards.scale=unit"
    if isinstance(experiment, Experiment):
        for name in ("success_rate_above", "success_rate_below"):
            if (bound := getattr(experiment.rollout, name)) is not None:
                yield f"rollout.{name}={bound} counts correct answers, and rewards.scale=raw has none; set rollout.{name}=none"


def tools_in_vain(experiment: AnyExperiment) -> Iterator[str]:
    """Tools that there are not, or that are never called."""
    chosen = experiment.workflow
    if not isinstance(chosen, ToolUse):
        return
    names = chosen.tools.names
    if not names or set(names) - TOOLS.keys():
        yield f"workflow.tools.names={','.join(names)}: expected some of {', '.join(TOOLS)}"
    if chosen.max_turns == 1:
        yield "workflow.max_turns=1 leaves no turn in which a tool is called: raise it, or set workflow=SingleTurn"
    if ("search" in names) != (chosen.tools.documents is not None):
        yield (
            f"workflow.tools.names={','.join(names)} with workflow.tools.documents={chosen.tools.documents}: search and "
            "documents go together; name a file or folder of yours, or leave both out"
        )


def agent_without_program(experiment: AnyExperiment) -> Iterator[str]:
    """An agent is a function or a command."""
    chosen = experiment.workflow
    if isinstance(chosen, Agent) and (chosen.function is None) == (chosen.command is None):
        given = f"workflow.function={as_text(chosen.function)} and workflow.command={as_text(chosen.command)}"
        yield f"{given}: an agent is a function of yours, or a command; set one of them"


def two_placements(experiment: AnyExperiment) -> Iterator[str]:
    """With Ray, how many devices train and decode is said once, by process."""
    if not isinstance(experiment.launch, Ray):
        return
    if not isinstance(experiment, Experiment):
        yield f"launch=Ray is for reinforcement learning, which {experiment.name} is not; leave it out"
    placement, default = experiment.placement, PlacementConfig()
    for name, used in (
        ("train_devices", "launch.trainer_hosts and launch.trainer_devices"),
        ("rollout_devices", "launch.rollout_engines and launch.engine_devices"),
        ("rollout_share", "launch.rollout_engines and launch.engine_devices"),
        ("simulated_devices", "launch.accelerator=none"),
        ("engines", "launch.rollout_engines"),
    ):
        if (value := getattr(placement, name)) != getattr(default, name):
            yield f"placement.{name}={value} says nothing under launch=Ray; leave it out, and set {used}"


def idle_critic(experiment: Experiment) -> Iterator[str]:
    """Settings of a critic that nothing asks."""
    advantages = type(experiment.trainer.advantages)
    given, default = settings(experiment.trainer.critic), settings(Critic())
    changed = {key.partition(".")[0] for key in given if key not in default or given[key].value != default[key].value}
    if changed and advantages is not GAE:
        yield (
            f"{', '.join(f'trainer.critic.{key}' for key in sorted(changed))}: without meaning under "
            f"trainer.advantages={advantages.__name__}, which asks no critic; leave it out, or set trainer.advantages=GAE"
        )


def idle(experiment: FineTuning) -> Iterator[str]:
    """Settings that learning from examples does not read, changed nevertheless."""
    given = settings(experiment.trainer)
    unread = ["loss", "entropy_coef", "shaping", "advantages", "critic", "num_mini_batches", "teacher"]
    compares = isinstance(experiment, PreferenceExperiment) and experiment.reference is not None
    unread.append("reference.kl" if compares else "reference")
    default = settings(TrainerConfig(reference=Reference() if compares else None))
    for key in given:
        is_idle = key.startswith(tuple(unread))
        if is_idle and given[key].value != default.get(key, given[key]).value:
            yield f"trainer.{key}={given[key].text()} has no meaning in learning from examples; leave it out"


def answers_of_a_reward_model(experiment: PreferenceExperiment) -> Iterator[str]:
    """A reward model has given up the head that answers."""
    if experiment.trains_reward_model and experiment.evaluation.every_steps:
        yield (
            f"evaluation.every_steps={experiment.evaluation.every_steps} asks a reward model (loss=BradleyTerry) for answers, "
            "of which it gives none; set it to 0"
        )
