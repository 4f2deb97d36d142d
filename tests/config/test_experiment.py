"""Settings: listed, overridden, refused, kept and read again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_args

import chz
import numpy as np
import pytest

import areal_jax
from areal_jax.config import load
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.config.load import experiment_names, load_experiment, read_config, write_config
from areal_jax.config.overrides import assign, build, from_text, settings
from areal_jax.data.config import Files, Synthetic
from areal_jax.errors import ConfigError
from areal_jax.models.config import LoRA
from areal_jax.rl.config import (
    GAE,
    PPO,
    BatchNormalized,
    DecoupledPPO,
    KLInReward,
    Masked,
    Reference,
    Teacher,
)
from areal_jax.rl.presets import PRESETS
from areal_jax.rollout.config import RolloutConfig
from areal_jax.serve.config import ServeConfig
from areal_jax.trainer.config import Critic, OptimizerConfig
from areal_jax.workflows.config import MultiTurn

SHIPPED = experiment_names()

SMALL = """
from areal_jax.config.experiment import Experiment
experiment = Experiment(name="small", num_steps=3)
"""


@chz.chz
class PrefillChunk:
    """Fill of a shape."""


@chz.chz
class Solid(PrefillChunk):
    """One color."""


@chz.chz
class Striped(PrefillChunk):
    """Two colors."""

    width: int = chz.field(default=1, doc="of a stripe")


@chz.chz
class Shape:
    """Base class of a choice."""


@chz.chz
class Point(Shape):
    """A shape without fill."""


@chz.chz
class Square(Shape):
    """A shape with fill."""

    fill: PrefillChunk = chz.field(default_factory=Solid, doc="inside")


@chz.chz
class SamplingMode:
    shape: Shape = chz.field(default_factory=Point, doc="the only one")


def refusal(*overrides: str, of: str = "aime") -> str:
    with pytest.raises(ConfigError) as raised:
        load_experiment(of, *overrides)
    return str(raised.value)


def written(experiment: AnyExperiment, folder: Path) -> Path:
    write_config(experiment, folder / "config.json")
    return folder / "config.json"


def test_documented_experiments_exist() -> None:
    assert {"aime", "aime_1p5b", "dpo", "gsm8k", "reward_model", "sft", "tiny_sft"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_run_can_be_repeated_from_its_config_json(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name)
    assert experiment.name == name
    again = read_config(written(experiment, tmp_path))
    assert again == experiment
    assert type(again) is type(experiment)


def test_config_json_keeps_overrides_and_accepts_more(tmp_path: Path) -> None:
    overrides = [
        "tasks=Files",
        "tasks.path=a,b.jsonl",
        "trainer.loss=PPO",
        "rollout.max_staleness=none",
        "description=two words",
    ]
    path = written(load_experiment("aime", *overrides), tmp_path)
    again = read_config(path, ["trainer.loss.clip_eps=0.1"])
    assert isinstance(again, Experiment)
    assert again.tasks == Files(path="a,b.jsonl")
    assert again.trainer.loss == PPO(clip_eps=0.1)
    assert again.rollout.max_staleness is None
    assert again.description == "two words"


def test_config_json_is_flat_and_readable(tmp_path: Path) -> None:
    content = json.loads(
        written(load_experiment("aime", "rollout.max_staleness=7"), tmp_path).read_text()
    )
    assert content["areal_jax.version"] == areal_jax.__version__
    assert content["areal_jax.experiment"] == "Experiment"
    assert content["tasks"] == "Synthetic"
    assert content["trainer.loss"] == "DecoupledPPO"
    assert content["rollout.max_staleness"] == 7
    assert content["placement.train_devices"] is None
    assert content["tasks.families"] == []
    assert not any(isinstance(value, dict) for value in content.values())


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("rollout.max_staleness=8", 8),
        ("rollout.max_staleness=none", None),
        ("rollout.max_staleness_of_code=same", "same"),
        ("rollout.max_staleness_of_code=16", 16),
        ("rollout.max_staleness_of_code=none", None),
        ("trainer.optimizer.learning_rate=1e-3", 1e-3),
        ("trainer.optimizer.learning_rate=1", 1.0),
        ("trainer.remat=none", "none"),
        ("trainer.optimizer.offload=True", True),
        ("engine.on_update=keep", "keep"),
        ("tasks.families=gcd, lcm", ("gcd", "lcm")),
        ("tasks.families=", ()),
        ("prompt.suffix= a=b, c", " a=b, c"),
    ],
)
def test_an_override_is_read_as_its_settings_type(override: str, value: object) -> None:
    key = override.partition("=")[0]
    assert settings(load_experiment("aime", override))[key].value == value


def test_the_last_override_of_a_key_wins() -> None:
    assert load_experiment("aime", "seed=2", "seed=3").seed == 3


def test_chosen_class_has_its_own_defaults_in_any_order() -> None:
    capped = load_experiment(
        "aime",
        "trainer.loss.importance_weighting=Masked",
        "trainer.loss.importance_weighting.cap=5",
    )
    assert capped.trainer.loss == DecoupledPPO(importance_weighting=Masked(cap=5))
    for overrides in (
        ["trainer.loss=PPO", "trainer.loss.clip_eps=0.3"],
        ["trainer.loss.clip_eps=0.3", "trainer.loss=PPO"],
    ):
        assert load_experiment("aime", *overrides).trainer.loss == PPO(clip_eps=0.3)


@pytest.mark.parametrize("name", PRESETS)
def test_algorithm_sets_only_the_settings_of_its_preset(name: str) -> None:
    # Accepted by every estimator.
    overrides = ["rewards.correct=1", "rewards.wrong=0", "rewards.function=own.py:reward"]
    plain, preset = settings(load_experiment("aime", *overrides)), PRESETS[name]
    experiment = load_experiment("gsm8k", f"algorithm={name}", *overrides)
    assert isinstance(experiment, Experiment)
    trainer = experiment.trainer
    assert (
        trainer.loss,
        trainer.loss_mean,
        trainer.advantages,
        trainer.shaping,
        trainer.reference,
    ) == (*(preset.loss, preset.loss_mean, preset.advantages, preset.shaping, preset.reference),)
    changed = {
        key
        for key, setting in settings(
            load_experiment("aime", f"algorithm={name}", *overrides)
        ).items()
        if plain.get(key) != setting
    }
    rooms = tuple(
        f"trainer.{name}"
        for name in ("loss", "advantages", "shaping", "reference", "positive_nll_coef")
    )
    others = {key for key in changed if not key.startswith(rooms)}
    bounds = {"success_rate_above", "success_rate_below", "min_sequence_ess"}
    followed = {f"rollout.{bound}" for bound in bounds} | {"trainer.optimizer.ess_exponent"}
    assert others <= followed
    assert experiment.rollout.min_sequence_ess == preset.min_sequence_ess
    assert experiment.trainer.optimizer.ess_exponent == preset.ess_exponent


def test_reference_has_a_kl_penalty_with_a_gradient(
    tmp_path: Path,
) -> None:
    experiment = load_experiment(
        "aime", "trainer.reference.kl=KLInReward", "trainer.reference.kl.coefficient=0.01"
    )
    assert experiment.trainer.reference == Reference(
        path="initial", kl=KLInReward(coefficient=0.01, estimator="k1")
    )
    assert read_config(written(experiment, tmp_path)) == experiment
    assert load_experiment("aime").trainer.reference is None
    with pytest.raises(
        ConfigError, match=r"trainer\.reference\.kl\.estimator=k1: expected one of k2, k3"
    ):
        load_experiment("aime", "trainer.reference.kl.estimator=k1")
    # The coefficient belongs to the reference.
    with pytest.raises(ConfigError, match=r"unknown setting trainer\.kl"):
        load_experiment("aime", "trainer.kl=0.1")
    with pytest.raises(ConfigError, match="expected 0 or more"):
        load_experiment("aime", "trainer.reference.kl.coefficient=-1")
    assert (
        load_experiment("aime", "algorithm=grpo", "trainer.reference=none").trainer.reference
        is None
    )
    with pytest.raises(ConfigError, match=r"trainer\.reference\.offload=true has no effect"):
        load_experiment("aime", "policy.lora.rank=2", "trainer.reference.offload=true")
    with pytest.raises(ConfigError, match="has no effect in fine-tuning"):
        load_experiment("tiny_sft", "trainer.reference.path=initial")


def test_teacher_needs_a_path_and_no_reward_signal() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.teacher\.path is required"):
        load_experiment("aime", "trainer.teacher.weight=2")
    lone = ["rollout.samples_per_group=1", "trainer.teacher.path=embedded"]
    assert load_experiment("aime", *lone).trainer.teacher == Teacher(path="embedded")


def test_overrides_win_over_a_preset(tmp_path: Path) -> None:
    experiment = load_experiment("aime", "trainer.loss.clip_eps_high=0.3", "algorithm=dapo")
    assert isinstance(experiment, Experiment)
    assert experiment.trainer.loss == DecoupledPPO(clip_eps_high=0.3)
    assert (experiment.rollout.success_rate_above, experiment.rollout.success_rate_below) == (
        0.0,
        1.0,
    )
    # It is stored as single settings, without the name of the preset.
    assert read_config(written(experiment, tmp_path)) == experiment


def test_critic_needs_gae() -> None:
    ppo = load_experiment(
        "aime",
        "algorithm=ppo",
        "trainer.critic.warmup_steps=5",
        "trainer.critic.optimizer.beta1=0.5",
    )
    assert isinstance(ppo, Experiment)
    assert isinstance(ppo.trainer.advantages, GAE)
    assert ppo.trainer.critic == Critic(warmup_steps=5, optimizer=OptimizerConfig(beta1=0.5))
    assert (
        "trainer.critic.optimizer, trainer.critic.path: no effect under "
        "trainer.advantages=GroupNormalized"
    ) in refusal("trainer.critic.path=x", "trainer.critic.optimizer.beta1=0.5")
    # An experiment with critic settings, trained without a critic.
    assert load._with_algorithm(ppo, "grpo").trainer.critic == Critic()
    assert load._with_algorithm(ppo, "ppo") == ppo


def test_unknown_algorithm_error_lists_known_ones() -> None:
    assert load_experiment("aime", "algorithm=GRPO") == load_experiment("aime", "algorithm=grpo")
    with pytest.raises(ConfigError, match=r"expected an algorithm of areal, grpo.*, found 'grppo'"):
        load_experiment("aime", "algorithm=grppo")
    with pytest.raises(
        ConfigError, match="needs reinforcement learning, and tiny_sft is fine-tuning"
    ):
        load_experiment("tiny_sft", "algorithm=grpo")
    with pytest.raises(
        ConfigError, match=r"rollout\.success_rate_above=0\.5 and rollout\.success_rate_below=0\.5"
    ):
        load_experiment("aime", "rollout.success_rate_above=0.5", "rollout.success_rate_below=0.5")
    with pytest.raises(
        ConfigError, match=r"tasks\.success_rate_above=0\.9 and tasks\.success_rate_below=0\.2"
    ):
        load_experiment("gsm8k", "tasks.success_rate_above=0.9", "tasks.success_rate_below=0.2")


def test_a_choice_inside_a_choice_may_be_given_in_any_order() -> None:
    given = {"shape.fill.width": "3", "shape.fill": "Striped", "shape": "Square"}
    assert build(SamplingMode, assign(given, settings(SamplingMode), from_text)) == SamplingMode(
        shape=Square(fill=Striped(width=3))
    )


def test_optional_record_is_created_by_a_setting_inside(tmp_path: Path) -> None:
    assert load_experiment("aime").policy.lora is None
    for overrides in (["policy.lora=LoRA", "policy.lora.rank=4"], ["policy.lora.rank=4"]):
        experiment = load_experiment("aime", *overrides)
        assert experiment.policy.lora == LoRA(rank=4)
    assert load_experiment("aime", "policy.lora=LoRA").policy.lora == LoRA()
    path = written(experiment, tmp_path)
    assert json.loads(path.read_text())["policy.lora"] == "LoRA"
    assert read_config(path) == experiment
    assert read_config(path, ["policy.lora=none"]) == load_experiment("aime")
    assert "set policy.lora=LoRA" in refusal("policy.lora=none", "policy.lora.rank=4")


def test_choosing_the_same_class_keeps_its_settings() -> None:
    assert isinstance(
        loaded := load_experiment("aime", "eval_tasks=Synthetic", "eval_tasks.seed=7"), Experiment
    )
    assert isinstance(before := load_experiment("aime"), Experiment)
    assert isinstance(before.eval_tasks, Synthetic)
    assert loaded.eval_tasks == chz.replace(before.eval_tasks, seed=7)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "rollout.group_per_batch=3",
            ["unknown setting rollout.group_per_batch", "rollout.groups_per_batch"],
        ),
        ("groups_per_batch=3", ["rollout.groups_per_batch"]),
        ("qqq=3", ["unknown setting qqq", "--help"]),
        ("tasks.path=x", ["not a setting of tasks=Synthetic", "tasks=Files"]),
        ("engine=3", ["group of settings", "engine.num_slots"]),
        (
            "tasks=File",
            [
                "tasks=File",
                "one of Synthetic, Exercises, ReasoningGym, Seeds, Repositories, Files, Hub",
            ],
        ),
        (
            "tasks=TaskSource",
            ["one of Synthetic, Exercises, ReasoningGym, Seeds, Repositories, Files, Hub"],
        ),
        ("tasks=Files", ["tasks.path is required", "str"]),
        ("seed=ten", ["seed=ten", "expected int", "'ten'"]),
        ("seed=1.5", ["seed=1.5", "expected int"]),
        ("seed=none", ["seed=none", "expected int"]),
        ("seed=lambda: 3", ["seed=lambda: 3", "expected int"]),
        ("trainer.remat=some", ["trainer.remat=some", "one of none, dots, attention, full"]),
        ("trainer.optimizer.offload=maybe", ["trainer.optimizer.offload=maybe", "expected bool"]),
        ("policy.lora=Adapter", ["policy.lora=Adapter", "LoRA or none"]),
        ("policy.lora.rnk=3", ["unknown setting policy.lora.rnk", "policy.lora.rank"]),
        ("policy.lora.targets=q", ["policy.lora.targets=q", "comma-separated one of q_proj"]),
        ("engine.on_update=drop", ["engine.on_update=drop", "one of recompute, keep"]),
        ("trainer.optimizer.learning_rate=nan", ["expected float", "'nan'"]),
        ("seed", ["'seed'", "key=value"]),
    ],
)
def test_wrong_overrides_are_refused_with_a_hint(override: str, said: list[str]) -> None:
    message = refusal(override)
    assert [part for part in said if part not in message] == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["trainer.advantages=GAE", "trainer.advantages.lam=1.5"],
            ["trainer.advantages.lam=1.5", "from 0 to 1"],
        ),
        (
            ["trainer.advantages=GAE", "trainer.critic.value_clip_eps=0"],
            ["trainer.critic.value_clip_eps=0", "above 0"],
        ),
        (["engine.top_k=2147483648"], ["engine.top_k=2147483648", "0 to 2147483647"]),
        (["rollout.groups_per_batch=0"], ["rollout.groups_per_batch=0", "above 0"]),
        (["rollout.max_staleness=-1"], ["rollout.max_staleness=-1", "0 or more"]),
        (["engine.top_p=1.5"], ["engine.top_p=1.5", "from 0 to 1"]),
        (
            [
                "trainer.loss=DPPO",
                "trainer.loss.log_ratio_penalty=0.1",
                "trainer.loss_mean=sequences",
            ],
            ["trainer.loss.log_ratio_penalty=0.1", "trainer.loss_mean=tokens"],
        ),
        (["algorithm=maxrl"], ["rewards.wrong=-5.0", "MaxRL", "rewards.wrong=0"]),
        (["algorithm=spo"], ["rewards.correct=5.0", "SPO", "rewards.correct=1"]),
        (["algorithm=gdpo"], ["GDPO", "rewards.function", "a dict"]),
        (
            ["algorithm=gdpo", "rewards.function=own.py:reward", "workflow=MultiTurn"],
            ["workflow.turn_discount=0.9", "GDPO", "workflow.turn_discount=1"],
        ),
        (
            ["trainer.teacher.path=current"],
            ["trainer.teacher.path=current", "trainer.teacher.hint"],
        ),
        (
            ["trainer.teacher.path=initial", "trainer.teacher.distillation=CrossTokenizer"],
            ["the policy's own tokenizer", "JensenShannon"],
        ),
        (
            ["algorithm=maxrl", "rewards.wrong=0", "trainer.shaping.bias=1"],
            ["trainer.shaping", "MaxRL"],
        ),
        (["trainer.loss.dual_clip=0.5"], ["trainer.loss.dual_clip=0.5", "above 1"]),
        (
            ["trainer.row_tokens=100", "engine.max_prompt_tokens=64"],
            ["trainer.row_tokens=100", "engine.max_prompt_tokens + engine.max_new_tokens = 160"],
        ),
        (
            ["trainer.num_mini_batches=17"],
            ["trainer.num_mini_batches=17", "rollout.groups_per_batch=16"],
        ),
        (["rollout.samples_per_group=1"], ["rollout.samples_per_group=1", "BatchNormalized"]),
        (["engine.temperature=0"], ["engine.temperature=0"]),
        (
            ["policy.lora.rank=4", "policy.adapter=DIR"],
            ["policy.adapter=DIR", "leave out policy.lora"],
        ),
        (
            ["policy.adapter=DIR", "policy.random_init=true"],
            ["policy.adapter=DIR", "policy.random_init"],
        ),
        (["policy.lora.targets="], ["policy.lora.targets", "such as q_proj"]),
        (["policy.lora.alpha=0"], ["policy.lora.alpha=0", "above 0"]),
        (["rewards.correct=-5"], ["rewards.correct=-5", "rewards.wrong=-5"]),
        (["workflow=MultiTurn", "workflow.max_turns=0"], ["workflow.max_turns=0", "above 0"]),
        (
            ["workflow=MultiTurn", "workflow.turn_discount=1.5"],
            ["workflow.turn_discount=1.5", "from 0 to 1"],
        ),
        (
            ["workflow=ToolUse", "workflow.max_turns=1"],
            ["workflow.max_turns=1", "workflow=SingleTurn"],
        ),
        (
            ["workflow=ToolUse", "workflow.tools.names="],
            ["workflow.tools.names=", "calculator, python, shell, edit, search"],
        ),
        (
            ["workflow=ToolUse", "workflow.tools.names=calculater"],
            ["names=calculater", "calculator, python, shell, edit, search"],
        ),
        (
            ["workflow=ToolUse", "workflow.tools.names=search"],
            ["workflow.tools.documents=None", "search needs documents"],
        ),
        (
            ["workflow=ToolUse", "workflow.tools.documents=DIR"],
            ["workflow.tools.documents=DIR", "search needs documents"],
        ),
        (
            ["workflow=ToolUse", "workflow.tools.timeout_s=0"],
            ["workflow.tools.timeout_s=0", "above 0"],
        ),
        (["rewards.scale=raw"], ["rewards.scale=raw needs a reward function", "rewards.function"]),
        (
            ["rewards.scale=raw", "rewards.function=a:b", "workflow=MultiTurn"],
            ["workflow=MultiTurn", "rewards.scale=unit"],
        ),
        (
            ["rewards.scale=raw", "rewards.function=a:b", "algorithm=dapo"],
            ["rollout.success_rate_above", "=none"],
        ),
        (
            ["rewards.scale=raw", "rewards.function=a:b", "rewards.form=x"],
            ["rewards.form=x", "rewards.no_answer"],
        ),
        (["rewards.max_consecutive_failures=0"], ["rewards.max_consecutive_failures=0", "above 0"]),
        (
            ["workflow.max_turns=2"],
            ["workflow.max_turns is not a setting of workflow=SingleTurn", "workflow=MultiTurn"],
        ),
    ],
)
def test_violated_rules_name_their_settings(overrides: list[str], said: list[str]) -> None:
    message = refusal(*overrides)
    assert [part for part in said if part not in message] == []


def test_settings_that_supervised_fine_tuning_does_not_read_are_refused() -> None:
    message = refusal("trainer.loss=PPO", "trainer.num_mini_batches=2", of="tiny_sft")
    assert "trainer.loss=PPO has no effect" in message
    assert "trainer.num_mini_batches=2 has no effect" in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["loss.beta=0"], ["loss.beta=0", "above 0"]),
        (["loss.label_smoothing=0.5"], ["loss.label_smoothing=0.5", "less than 0.5"]),
        (
            ["loss=IPO", "loss.label_smoothing=0.1"],
            ["loss.label_smoothing is not a setting of loss=IPO; set loss=DPO"],
        ),
        (["loss=PPO"], ["loss=PPO", "one of DPO, IPO, BradleyTerry"]),
        (
            ["loss=BradleyTerry", "evaluation.every_steps=5"],
            ["evaluation.every_steps=5", "does not generate"],
        ),
        (["trainer.reference.kl=KLInReward"], ["trainer.reference.kl=KLInReward has no effect"]),
        (
            ["loss=BradleyTerry", "trainer.reference.offload=true"],
            ["trainer.reference=Reference has no effect"],
        ),
        (
            ["placement.rollout_share=auto"],
            ["placement.rollout_share=auto balances", "fine-tuning only trains"],
        ),
        (
            ["trainer.loss=PPO", "trainer.shaping.scale=2"],
            ["trainer.loss=PPO has no", "trainer.shaping.scale=2.0 has no"],
        ),
    ],
)
def test_invalid_preference_settings_are_refused(overrides: list[str], said: list[str]) -> None:
    message = refusal(*overrides, of="dpo")
    assert [part for part in said if part not in message] == []


def test_preference_loss_is_refused_for_reinforcement_learning() -> None:
    assert "trainer.loss=DPO: expected one of" in refusal("trainer.loss=DPO")


@pytest.mark.parametrize("base", ["ImportanceWeightedLoss", "ProximalLoss", "CustomLoss"])
def test_abstract_objectives_cannot_be_chosen(base: str) -> None:
    reported = re.search(
        r"trainer\.loss=\w+: expected one of (.*), found", refusal(f"trainer.loss={base}")
    )
    assert (
        reported
        and base not in reported[1].split(", ")
        and {"DecoupledPPO", "M2PO", "PPO"} <= set(reported[1].split(", "))
    )


def test_all_violations_are_reported_at_once() -> None:
    assert len(refusal("engine.num_slots=0", "engine.top_p=2").splitlines()) == 2
    assert len(refusal("engine.temperature=0", "trainer.num_mini_batches=99").splitlines()) == 2


def test_one_sample_per_group_is_valid_with_batch_advantages() -> None:
    experiment = load_experiment(
        "aime", "rollout.samples_per_group=1", "trainer.advantages=BatchNormalized"
    )
    assert isinstance(experiment, Experiment)
    assert experiment.trainer.advantages == BatchNormalized()


@pytest.mark.parametrize("cls", [*get_args(AnyExperiment), ServeConfig])
def test_every_number_has_bounds_and_every_setting_a_doc(cls: type[AnyExperiment]) -> None:
    listed = settings(cls)
    for setting in list(listed.values()):
        for choice in setting.choices:
            if not choice.__module__.startswith("areal_jax."):
                continue  # a user's class
            listed |= settings(choice, f"{setting.key}.")
    for setting in listed.values():
        assert setting.doc, setting.key
        numeric = False
        for text in ("1", "0.5"):
            with suppress(ValueError):
                is_text = isinstance(from_text(text, setting.kind), str | tuple)
                numeric |= not (setting.choices or is_text)
        assert len(setting.bounds) == numeric, f"{setting.key} needs one bound if it is a number"


def test_bounds_hold_in_python_and_ignore_other_values() -> None:
    with pytest.raises(ValueError, match=r"^max_staleness=-1: expected 0 or more$"):
        RolloutConfig(max_staleness=-1)
    assert RolloutConfig(max_staleness=None, max_staleness_of_code="same").max_staleness is None


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        (
            "trainer.loss.correction=NoCorrection",
            "set trainer.loss.importance_weighting=Unweighted",
        ),
        ("trainer.loss.correction.cap=2", "set trainer.loss.importance_weighting.cap=2"),
        (
            "trainer.loss.importance_weighting=NoCorrection",
            "set trainer.loss.importance_weighting=Unweighted",
        ),
    ],
)
def test_renamed_settings_are_refused_with_their_new_name(override: str, advice: str) -> None:
    assert refusal(override) == f"{override}: renamed in 0.2.0; {advice}"


def test_config_of_release_0_1_is_refused_with_its_release(tmp_path: Path) -> None:
    path = written(load_experiment("aime"), tmp_path)
    content = json.loads(path.read_text()) | {"areal_jax.version": "0.1.0"}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"written by areal_jax 0\.1\.0.*areal-jax==0\.1\.0'"):
        read_config(path)


def test_experiment_can_be_any_file(tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    assert load_experiment(str(path), "seed=9") == Experiment(name="small", num_steps=3, seed=9)


def test_experiment_file_can_define_task_classes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nimport chz\nfrom areal_jax.config.experiment import "
        "Experiment\nfrom areal_jax.data.config import TaskSource\n@chz.chz\nclass "
        "Riddles(TaskSource):\n    'My own.'\n    depth: int = chz.field(default=1, doc='how "
        "deep')\nexperiment = Experiment(name='mine', num_steps=1, tasks=Riddles())\n"
    )
    experiment = load_experiment(str(path), "tasks.depth=4")
    assert isinstance(experiment, Experiment)
    assert settings(experiment)["tasks.depth"].value == 4
    assert read_config(written(experiment, tmp_path)) == experiment


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("experiment = 3", "found int"),
        ("", "found NoneType"),
        (SMALL.replace("num_steps=3", "num_steps='3'"), "num_steps=3: expected int, found '3'"),
    ],
)
def test_file_without_an_experiment_is_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(content)
    assert said in refusal(of=str(path))


def test_unknown_experiment_error_lists_known_ones() -> None:
    message = refusal(of="aim")
    assert all(name in message for name in SHIPPED)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "found no JSON"),
        ("[1]", "expected the config.json of a run"),
        ('{"seed": 1}', "areal_jax.experiment"),
        (
            (
                '{"areal_jax.experiment": "Experiment", "areal_jax.version": "9.9", "name": "x", '
                '"sead": 1}'
            ),
            "areal_jax 9.9",
        ),
        (
            '{"areal_jax.experiment": "Experiment", "name": "x", "num_steps": 1, "seed": true}',
            "seed=true: expected int",
        ),
        ('{"areal_jax.experiment": "Experiment", "name": "x"}', "num_steps is required"),
    ],
)
def test_a_wrong_config_json_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json") as raised:
        read_config(path)
    assert said in str(raised.value)


def test_aime_1p5b_matches_the_paper() -> None:
    # AReaL, arXiv:2505.24298, table 3.
    recipe = settings(load_experiment("aime_1p5b"))
    table = {
        "rollout.groups_per_batch": 512,
        "rollout.samples_per_group": 16,
        "trainer.num_mini_batches": 4,
        "trainer.loss": DecoupledPPO,
        "trainer.loss.clip_eps": 0.2,
        "trainer.advantages": BatchNormalized,
        "trainer.optimizer.learning_rate": 2e-5,
        "trainer.optimizer.schedule": "constant",
        "trainer.optimizer.warmup_fraction": 0.001,
        "trainer.optimizer.beta1": 0.9,
        "trainer.optimizer.beta2": 0.95,
        "trainer.optimizer.eps": 1e-5,
        "trainer.optimizer.weight_decay": 0.05,
        "trainer.optimizer.max_grad_norm": 1.0,
        "engine.temperature": 1.0,
        "engine.top_p": 1.0,
        "engine.top_k": 0,
        "engine.max_prompt_tokens": 1024,
        "engine.max_new_tokens": 27648,
        "rewards.correct": 5.0,
        "rewards.wrong": -5.0,
        "rollout.max_staleness": 8,
        "evaluation.samples_per_task": 32,
        "seed": 1,
    }
    assert {key: recipe[key].value for key in table} == table


def in_fresh_python(code: str) -> None:
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2]
    )


def test_configuration_does_not_import_jax() -> None:
    in_fresh_python(
        "import sys, areal_jax, areal_jax.config.load, areal_jax.records, "
        "areal_jax.cluster.environment\n[areal_jax.load_experiment(name) for name in "
        "areal_jax.config.load.experiment_names()]\nassert 'jax' not in sys.modules"
    )


def test_public_names_are_the_defining_objects() -> None:
    from areal_jax.rl.losses import decoupled_ppo_loss

    assert areal_jax.decoupled_ppo_loss is decoupled_ppo_loss
    assert areal_jax.Experiment is Experiment
    assert set(areal_jax.__all__) <= set(dir(areal_jax))
    assert all(getattr(areal_jax, name) is not None for name in areal_jax.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        areal_jax.nothing  # noqa: B018


def test_public_loss_initializes_no_device() -> None:
    in_fresh_python(
        "from areal_jax import decoupled_ppo_loss\nfrom jax._src import xla_bridge\nassert "
        "callable(decoupled_ppo_loss) and not xla_bridge.backends_are_initialized()"
    )


def test_replace_takes_overrides_values_and_records() -> None:
    aime = load_experiment("aime")
    changed = aime.replace(
        "num_steps=7",
        seed=4,
        workflow=MultiTurn(max_turns=3),
        **{"trainer.optimizer.learning_rate": np.float64(1e-5), "trainer.loss": "PPO"},
    )
    assert (changed.num_steps, changed.seed) == (7, 4)
    assert changed.workflow == MultiTurn(max_turns=3)
    assert changed.trainer.optimizer == chz.replace(aime.trainer.optimizer, learning_rate=1e-5)
    assert changed.trainer.loss == PPO()
    assert isinstance(changed, Experiment) and isinstance(aime, Experiment)
    assert changed.rollout == aime.rollout
    assert aime.replace(**{"policy.lora": LoRA(rank=4)}).policy.lora == LoRA(rank=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sed": 3}, "unknown setting sed; did you mean seed"),
        ({"seed": 1.5}, "seed=1.5: expected int, found 1.5"),
        ({"num_steps": -1}, "num_steps=-1: expected 0 or more"),
        ({"trainer.loss": "PPPO"}, "trainer.loss=PPPO: expected one of"),
        ({"rollout.samples_per_group": 1}, "samples_per_group"),
    ],
)
def test_replace_refuses_as_overrides_do(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_experiment("aime").replace(**changes)
    assert message in str(refused.value)
