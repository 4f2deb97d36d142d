"""What a run is made of: found, counted, and refused where it does not fit."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import psutil
import pytest

from areal_jax.config.load import load_experiment
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import ConfigError
from areal_jax.models import lora
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Policy
from areal_jax.run import checks
from areal_jax.run.compiled_programs import abstract_trainer, find_too_large
from areal_jax.run.make_plan import make_plan
from areal_jax.run.memory_checks import find_shortage
from areal_jax.run.plan import Plan
from areal_jax.run.plan_report import plan_text

# Parameters: embedding 768*8 = 6144; q 8*2*4, k and v 8*1*4 each, o 2*4*8: 192; their biases 8+4+4
# = 16; two norms of 8; MLP 3*8*16 = 384; last norm 8. Together 6144 + 192 + 16 + 16 + 384 + 8 =
# 6760.
MODEL = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=768,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    attention_bias=True,
    qk_norm=False,
)


SHORT = ["engine.max_prompt_tokens=64", "engine.max_new_tokens=96", "engine.num_slots=12"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    (folder / "config.json").write_text(json.dumps(MODEL.to_hf()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    return folder


def plan(policy: Path, *overrides: str) -> Plan:
    # Measuring the prompts of all tasks would take longer than the rest of a plan.
    few = () if "tasks=Files" in overrides else ("tasks.num_tasks=256",)
    # Eight devices, as conftest has it: two train, six decode.
    given = f"policy.path={policy}", "placement.train_fsdp=1", *few, *overrides
    return make_plan(load_experiment("aime", *given))


@pytest.mark.slow
def test_memory_estimate_equals_array_sizes(policy: Path) -> None:
    found = plan(policy, "engine.num_slots=12")
    exact = {
        name: size
        for name, size in found.train_bytes().items()
        if name in ("parameters", "gradients")
    }
    assert exact == {"parameters": 4 * 6760, "gradients": 4 * 6760}
    assert found.rollout_bytes() == {
        "weights": 2 * 4 * 6760,
        # Keys and values, 1 head of 4, float32: for 12 / 6 slots 10 pages of 16 each, and one;
        # their view, 8 columns wider.
        "KV caches": 2 * 4 * 4 * ((2 * 10 + 1) * 16 + 2 * (160 + 8)),
    }
    # Simulated devices share the machine: two that train and six that decode.
    assert find_shortage(found) == ""


@pytest.mark.slow
def test_adapter_memory_is_separate_from_frozen_weights(policy: Path) -> None:
    # Rank 2: q and o 2·(8 + 8) each, k and v 2·(8 + 4) each, three of the MLP 2·(8 + 16) each: 64 +
    # 48 + 144 = 256.
    found = plan(policy, "policy.lora.rank=2")
    train, rollout = found.train_bytes(), found.rollout_bytes()
    assert [train[name] for name in ("frozen", "parameters", "gradients", "optimizer")] == [
        4 * 6760,
        1024,
        1024,
        2048 + 4,
    ]
    assert rollout["weights"] == 4 * (6760 + 2 * 256)
    assert (
        "trained       0.000 M parameters of an adapter of rank 2 on q_proj,k_proj,v_proj,o_proj,"
        in plan_text(found)
    )
    assert "fresh; 0.0 M frozen" in plan_text(found)
    assert "trained       all parameters" in plan_text(plan(policy))


@pytest.mark.slow
def test_frozen_policy_is_found_and_counted_once(policy: Path, tmp_path: Path) -> None:
    found = plan(policy, "trainer.reference.path=initial")
    assert found.train_bytes()["reference"] == 4 * 6760
    assert (
        "reference     the weights that training starts from (Qwen2ForCausalLM, 0.0 M parameters)"
        in plan_text(found)
    )
    # Gradients, activations and logits leave more room than it takes.
    assert (
        plan(
            policy, "trainer.reference.path=initial", "trainer.reference.offload=true"
        ).train_bytes()["reference"]
        == 0
    )
    # With an adapter it is the frozen weights themselves.
    assert (
        "reference"
        not in plan(policy, "trainer.reference.path=initial", "policy.lora.rank=2").train_bytes()
    )
    # A teacher may be of another size: two layers have 6152 + 2 * 608 parameters (embedding and
    # last norm; each of the layers).
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_hf() | {"num_hidden_layers": 2}))
    with_teacher = plan(policy, f"trainer.teacher.path={tmp_path}")
    assert with_teacher.train_bytes()["teacher"] == 4 * (6152 + 2 * 608)
    assert f"teacher       {tmp_path} (Qwen2ForCausalLM" in plan_text(with_teacher)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 767}, "has vocab_size=767, fewer than the 768 tokens"),
        ({"max_position_embeddings": 100}, "made for 100 positions"),
    ],
)
@pytest.mark.slow
def test_frozen_policy_that_cannot_read_every_sample_is_refused(
    policy: Path, tmp_path: Path, changes: dict[str, int], said: str
) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_hf() | changes))
    with pytest.raises(ConfigError, match=rf"trainer\.teacher\.path=.*{said}"):
        plan(policy, f"trainer.teacher.path={tmp_path}")


@pytest.mark.slow
def test_frozen_policy_with_other_tokens_is_refused_by_its_setting(
    policy: Path, tmp_path: Path
) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((policy / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError,
        match=r"trainer\.reference\.path=.* has other tokens than policy.*2 tokens differ",
    ):
        plan(policy, f"trainer.reference.path={tmp_path}")
    with pytest.raises(ConfigError, match=r"trainer\.teacher\.path=\./missing"):
        plan(policy, "trainer.teacher.path=./missing")


@pytest.mark.parametrize(
    ("base", "rank", "said"),
    [
        ("another", 2, "expected an adapter of"),
        (
            None,
            3,
            (
                "expected shape (3, 8), found (2, 8): "
                "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
            ),
        ),
    ],
)
@pytest.mark.slow
def test_adapter_of_another_policy_is_refused(
    policy: Path, tmp_path: Path, base: str | None, rank: int, said: str
) -> None:
    adapted = Policy(MODEL, LoRA(rank=2, targets=("q_proj",)))
    adapter = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), lora.abstract(adapted))
    lora.save(tmp_path, adapted, adapter, base or str(policy))
    config = json.loads((tmp_path / lora.CONFIG).read_text())
    (tmp_path / lora.CONFIG).write_text(json.dumps(config | {"r": rank}))
    with pytest.raises(ConfigError) as raised:
        plan(policy, f"policy.adapter={tmp_path}")
    assert said in str(raised.value)
    lora.save(tmp_path, adapted, adapter, str(policy))
    assert plan(policy, f"policy.adapter={tmp_path}").policy == adapted


@pytest.mark.slow
def test_plan_lists_its_contents(policy: Path) -> None:
    text = plan_text(
        plan(policy, "num_steps=40", "trainer.num_mini_batches=4", "rollout.max_staleness=3")
    )
    assert f"{policy} (Qwen2ForCausalLM, 0.0 M parameters, float32)" in text
    assert "256 tasks from Synthetic problems" in text
    assert "40 steps of 16 groups x 8 samples, 4 updates each; max_staleness 3" in text
    assert "2 + 6 cpu" in text
    assert "data 2 x fsdp 1 x expert 1 x context 1 x tensor 1" in text
    assert "data 6 x tensor 1" in text


def test_supervised_fine_tuning_is_planned_from_its_examples(policy: Path) -> None:
    found = make_plan(
        load_experiment(
            "tiny_sft", f"policy.path={policy}", "examples.num_tasks=50", "examples_per_batch=4"
        )
    )
    assert "50 examples from Synthetic problems" in plan_text(found)
    assert "updates of 4 examples" in plan_text(found)
    assert len(found.examples.examples) == 50
    assert len(found.tasks.tasks) == 0


def test_all_devices_train_if_nothing_is_decoded(policy: Path) -> None:
    found = make_plan(load_experiment("sft", f"policy.path={policy}", "examples.num_tasks=50"))
    text = plan_text(found)
    assert found.devices == "8 cpu" and "fsdp 8" in text and "rollout" not in text
    assert found.rollout_bytes() == {}
    assert "loss and perplexity every 50 steps of 512 examples from those held out" in text
    assert len(found.eval_examples.examples) == 512
    shared = make_plan(
        load_experiment("sft", f"policy.path={policy}", "placement.rollout_share=0.5")
    )
    assert shared.train_mesh.size == found.train_mesh.size
    fewer = make_plan(load_experiment("sft", f"policy.path={policy}", "placement.train_devices=2"))
    assert fewer.devices == "2 cpu"
    decoding = make_plan(
        load_experiment("sft", f"policy.path={policy}", "evaluation.every_steps=5", *SHORT)
    )
    assert decoding.devices == "2 + 6 cpu"
    with pytest.raises(ConfigError, match="of 8 devices, found 9 to train and -1 to decode"):
        make_plan(load_experiment("sft", f"policy.path={policy}", "placement.train_devices=9"))


def test_preference_training_is_planned_from_its_pairs(policy: Path) -> None:
    few = [f"policy.path={policy}", "examples.num_tasks=50", "eval_examples.max_examples=8"]
    found = make_plan(load_experiment("dpo", *few, "trainer.row_tokens=0"))
    text = plan_text(found)
    assert "50 pairs from Synthetic problems" in text and "updates of 32 pairs" in text
    assert "loss and accuracy every 50 steps of 8 pairs from those held out" in text
    # Both sides of a pair, each as long as the engine's longest sequence.
    assert found.row_tokens == 2 * found.engine.max_tokens
    assert "reference     the weights that training starts from" in text
    assert found.train_bytes()["reference"] > 0
    scoring = make_plan(load_experiment("reward_model", *few))
    assert "read out as SequenceClassification" in plan_text(scoring) and not scoring.frozen_models
    with pytest.raises(ConfigError, match=r"scalar head.*leave out policy\.lora"):
        make_plan(load_experiment("reward_model", *few, "policy.lora.rank=4"))


def test_reward_model_continues_as_one_and_is_not_a_policy(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(
        json.dumps(replace(MODEL, readout="SequenceClassification").to_hf())
    )
    few = [f"policy.path={tmp_path}", "examples.num_tasks=50", "heldout_every_steps=0"]
    assert (
        make_plan(load_experiment("reward_model", *few)).policy.config.readout
        == "SequenceClassification"
    )
    with pytest.raises(
        ConfigError, match="is read out as SequenceClassification; expected CausalLM"
    ):
        make_plan(load_experiment("dpo", *few))


def test_a_new_reward_model_has_the_padding_token_of_its_tokenizer(policy: Path) -> None:
    few = [f"policy.path={policy}", "examples.num_tasks=50", "heldout_every_steps=0"]
    plan = make_plan(load_experiment("reward_model", *few))
    assert plan.policy.config.pad_token_id == plan.tokenizer.pad_token_id is not None
    assert make_plan(load_experiment("dpo", *few)).policy.config.pad_token_id is None


def test_new_reward_model_never_pads_with_its_last_token(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(settings | {"pad_token": settings["eos_token"]})
    )
    few = [f"policy.path={tmp_path}", "examples.num_tasks=50", "heldout_every_steps=0"]
    plan = make_plan(load_experiment("reward_model", *few))
    pad = plan.policy.config.pad_token_id
    assert pad is not None and pad not in plan.tokenizer.stop_token_ids
    # What transformers scores: of a padded text the last token that is not padding.
    texts = [
        np.concatenate([pair.chosen.tokens, np.full(3, pad)])
        for pair in itertools.islice(plan.examples.examples, 4)
    ]
    assert [text[np.flatnonzero(text != pad)[-1]] for text in texts] == [
        plan.tokenizer.stop_token_ids[0]
    ] * 4


def test_a_reward_model_that_pads_with_its_last_token_is_refused(
    policy: Path, tmp_path: Path
) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    eos = HFTokenizer.from_folder(policy).stop_token_ids[0]
    model = replace(MODEL, readout="SequenceClassification", pad_token_id=eos)
    (tmp_path / "config.json").write_text(json.dumps(model.to_hf()))
    few = [f"policy.path={tmp_path}", "examples.num_tasks=50", "heldout_every_steps=0"]
    with pytest.raises(
        ConfigError,
        match=(
            f"transformers scores the last token that is not padding; found {eos}, eos_token "
            f"is {eos}"
        ),
    ):
        make_plan(load_experiment("reward_model", *few))


def test_an_adapter_inside_the_policys_folder_is_refused_by_name(
    policy: Path, tmp_path: Path
) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text("{}")
    few = [f"policy.path={tmp_path}", "examples.num_tasks=50", "heldout_every_steps=0"]
    with pytest.raises(ConfigError, match=r"holds adapter_config\.json: .* set policy\.adapter="):
        make_plan(load_experiment("dpo", *few))


@pytest.mark.parametrize(
    "override",
    ["trainer.advantages=GAE", "trainer.reference.path=FOLDER", "trainer.teacher.path=FOLDER"],
)
@pytest.mark.slow
def test_adapter_in_the_policy_folder_loads_for_frozen_models(
    policy: Path, tmp_path: Path, override: str
) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    adapted = Policy(MODEL, LoRA(rank=2, targets=("q_proj",)))
    adapter = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), lora.abstract(adapted))
    lora.save(tmp_path, adapted, adapter, str(tmp_path))
    assert plan(tmp_path, f"policy.adapter={tmp_path}").policy == adapted
    found = plan(tmp_path, f"policy.adapter={tmp_path}", override.replace("FOLDER", str(tmp_path)))
    assert found.policy == adapted
    assert f"({MODEL.architecture}, 0.0 M parameters" in plan_text(found)


def test_ignored_config_keys_are_skipped(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_hf() | {"frobnicate": 2}))
    few = [f"policy.path={tmp_path}", "examples.num_tasks=50", "heldout_every_steps=0"]
    with pytest.raises(
        ConfigError, match=r"frobnicate=2 is not a known key.*policy\.ignore_config_keys=frobnicate"
    ):
        make_plan(load_experiment("dpo", *few))
    plan = make_plan(load_experiment("dpo", *few, "policy.ignore_config_keys=frobnicate"))
    assert plan.policy.config.ignored_keys == ("frobnicate",)
    assert "ignoring frobnicate" in plan_text(plan)


def test_no_examples_are_held_out_without_evaluation(policy: Path) -> None:
    off = [f"policy.path={policy}", "heldout_every_steps=0"]
    found = make_plan(load_experiment("sft", *off))
    assert len(found.eval_examples.examples) == 0
    assert "evaluation    none" in plan_text(found)


@pytest.mark.slow
def test_insufficient_memory_is_reported_before_it_fails(policy: Path) -> None:
    short = plan(policy, "engine.num_slots=6000000000")
    assert "are needed where there are" in find_shortage(short)
    assert "engine.num_slots" in find_shortage(short)
    assert find_shortage(short) in plan_text(short)
    for name, setting in {
        "trainer.rows_per_micro_batch=100000000": "trainer.rows_per_micro_batch",
        "trainer.remat=none trainer.rows_per_micro_batch=100000000": "trainer.remat=full",
        "trainer.logp_chunk_tokens=1000000000 trainer.rows_per_micro_batch=10000000": (
            "trainer.logp_chunk_tokens"
        ),
    }.items():
        assert setting in find_shortage(plan(policy, "trainer.remat=full", *name.split()))


@pytest.mark.slow
def test_a_split_that_cannot_hold_the_policy_is_refused_with_the_numbers(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parameters and two moments in float32 on the one that trains, weights twice on each of those
    # that decode: 3 + 2·2 times the policy, or 3 + 2·3.
    size = 4 * plan(policy).policy.config.num_params

    def has(num_bytes: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=num_bytes))

    has(int(size * 7.1))
    assert find_shortage(plan(policy, "placement.train_devices=1", "placement.rollout_devices=2"))
    with pytest.raises(
        ConfigError,
        match=r"1 \+ 3 cpu cannot hold the policy: .* needed where there are .* weights .* MiB",
    ):
        plan(policy, "placement.train_devices=1", "placement.rollout_devices=3")


@pytest.mark.slow
def test_cluster_plan_has_given_devices_and_needs_ray(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        f"policy.path={policy}",
        *SHORT,
        "launch=ray",
        "launch.trainer_hosts=2",
        "launch.trainer_devices=2",
    ]
    experiment = load_experiment(
        "aime", *asked, "launch.engine_devices=2", "launch.rollout_engines=30"
    )
    found = make_plan(experiment)
    # Of 30 engines, which are alike, one is planned; each has all the slots.
    assert (found.train_mesh.size, found.rollout_mesh.size, len(found.engines)) == (4, 2, 1)
    assert (found.engine.config.num_slots, found.num_slots) == (12, 30 * 12)
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "ray" else object())
    with pytest.raises(
        ConfigError, match=r"launch=Ray needs ray, which .* pip install 'areal-jax\[ray\]'"
    ):
        make_plan(experiment)


@pytest.mark.slow
def test_without_evaluation_its_tasks_need_not_exist(policy: Path) -> None:
    off = ["eval_tasks=Files", "eval_tasks.path=missing.jsonl", "evaluation.every_steps=0"]
    assert "evaluation    none" in plan_text(plan(policy, *off))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["engine.max_prompt_tokens=64", "engine.max_new_tokens=193"],
            ["= 257", "256 positions", "engine.max_prompt_tokens + engine.max_new_tokens"],
        ),
        (
            ["engine.max_prompt_tokens=8"],
            ["longer than engine.max_prompt_tokens=8", "set engine.max_prompt_tokens=64"],
        ),
        (
            ["engine.max_new_tokens=2"],
            ["engine.max_new_tokens=2 is shorter than every answer", "raise engine.max_new_tokens"],
        ),
        (
            ["workflow=MultiTurn", "engine.max_prompt_tokens=64"],
            [
                "is too small for a second turn",
                "prompt of tasks",
                "prompt of eval_tasks",
                "all turns need 192",
                "256 positions",
            ],
        ),
        (["engine.num_slots=13"], ["engine.num_slots=13", "6 rollout devices"]),
        (["placement.train_devices=9"], ["placement.train_devices", "8"]),
        (
            ["placement.train_context=2", "trainer.row_tokens=257"],
            ["257 tokens", "placement.train_context=2"],
        ),
        (
            ["placement.train_devices=4", "placement.train_context=4"],
            ["2 attention heads", "placement.train_context=4"],
        ),
        (["tasks=Files", "tasks.path=missing.jsonl"], ["missing.jsonl"]),
        (["policy.path=./missing"], ["policy.path=./missing", "embedded"]),
    ],
)
@pytest.mark.slow
def test_inconsistent_settings_are_refused(
    policy: Path, overrides: list[str], said: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        plan(policy, *overrides)
    assert [part for part in said if part not in str(raised.value)] == []


@pytest.mark.slow
def test_a_tokenizer_larger_than_the_vocabulary_is_refused(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_hf() | {"vocab_size": 100}))
    with pytest.raises(ConfigError, match=r"tokenizer.json of 768 tokens.*vocab_size=100"):
        plan(tmp_path)


@pytest.mark.slow
def test_tokenizer_without_chat_template_needs_plain_text(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": None}))
    with pytest.raises(
        ConfigError,
        match=r"a chat template: .*tokenizer_config\.json; found neither.*prompt\.plain_text",
    ):
        plan(tmp_path)
    assert not plan(tmp_path, "prompt.plain_text=true").tokenizer.has_template


@pytest.mark.parametrize("setting", ["tasks", "eval_tasks"])
def test_task_errors_name_their_setting(policy: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: families: expected .*, found 'chess'"):
        plan(policy, f"{setting}=Synthetic", f"{setting}.families=chess")


def test_chat_template_without_later_turns_is_refused_for_multi_turn(
    policy: Path, tmp_path: Path
) -> None:
    refusal = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    refusing = "{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}"
    for template, overrides, said in (
        (
            "{{ messages[0].content }}=",
            ["workflow=MultiTurn"],
            "it is for one turn only; set workflow=SingleTurn",
        ),
        (refusing, ["workflow=ToolUse"], "no tools; set workflow.call_format.result_role=user"),
        (
            refusing,
            [
                "workflow=ToolUse",
                "workflow.call_format.result_role=user",
                "workflow.announce=false",
            ],
            "",
        ),
        (refusing, ["workflow=MultiTurn"], ""),
    ):
        folder = tmp_path / f"policy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(policy, folder)
        (folder / "chat_template.jinja").write_text(template)
        if said:
            with pytest.raises(ConfigError, match=said):
                plan(folder, *SHORT[1:], *overrides)
        else:
            plan(folder, *SHORT[1:], *overrides)


def test_programs_that_need_more_than_a_device_has_are_refused(policy: Path) -> None:
    found = plan(policy, "engine.num_slots=12")
    size = 4 * found.policy.config.num_params

    def too_large(has_bytes: float) -> list[str]:
        # Beside parameters and two moments it returns gradients: three to four times the policy.
        is_wanted = "trainer zeros".__eq__
        trainer = abstract_trainer(found)
        return list(find_too_large(found, trainer, int(has_bytes), is_wanted=is_wanted))

    assert too_large(4.2 * size) == []
    (refusal,) = too_large(2.9 * size)
    assert refusal.startswith("trainer zeros needs ")
    assert "and the run 0.1 MiB beside it (compiled), expected at most 0.1 MiB" in refusal
    assert "raise placement.train_fsdp" in refusal
