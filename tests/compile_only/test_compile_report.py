"""`areal-train --compile-for`: the programs of a run, compiled for a TPU slice that is not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from areal_jax.data.policy_files import EMBEDDED, EMBEDDED_VISION

KV_TOKENS = 400_000_000
"""More than fits a slice."""
QUICKLY = {**os.environ, "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1"}
"""The environment of a command whose programs need not be fast."""


def copy_policy(embedded: Path, folder: Path) -> dict[str, Any]:
    """Copy the files of an embedded policy, without weights; its configuration."""
    shutil.copytree(embedded, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return json.loads((folder / "config.json").read_text())


def write_reward_model(folder: Path) -> Path:
    """The embedded policy's files as those of a reward model of one layer."""
    config = copy_policy(EMBEDDED, folder)
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    config |= {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_vision_policy(folder: Path) -> Path:
    """The files of the embedded policy that reads images, with one layer of each kind."""
    config = copy_policy(EMBEDDED_VISION, folder)
    config["text_config"]["num_hidden_layers"] = config["vision_config"]["depth"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_compile_for_prints_programs_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    command = ["--exp=count_shapes", "--compile-for=v5e:2x2", "placement.rollout_devices=2"]
    command += ["trainer.rows_per_micro_batch=2", "engine.num_slots=8"]
    command += [f"policy.path={write_vision_policy(tmp_path / 'policy')}"]
    model = write_reward_model(tmp_path / "reward")
    command += [f"rewards.model.path={model}", "rewards.model.max_tokens=160"]
    done = subprocess.run(
        [sys.executable, "-m", "areal_jax.train", *command, f"engine.kv_tokens={KV_TOKENS}"],
        env=QUICKLY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    out = done.stdout
    assert done.returncode == 1, done.stderr
    # Training fits, and is bound by the data sheet.
    assert re.search(r"trainer accumulate +\d+:\d\d +0\.\d\d +0\.\d\d +14\.90", out)
    (mfu,) = re.findall(r"training: at most (\d+)% MFU \(compiled", out)
    assert 0 < int(mfu) < 100
    assert re.search(r"trainer accumulate +all-gather +fsdp", out)
    # What reads images and scores answers is compiled too.
    for program in ("engine encode 64", "engine prefill_images 8 96", "reward_model score 160"):
        assert re.search(rf"^ {program} +\d+:\d\d", out, re.MULTILINE), program
    # The engine's caches do not, and the message names the setting.
    (line,) = (each for each in out.splitlines() if each.startswith("engine generate 0 0 does not"))
    assert "of 15.75G by XLA" in line
    assert "lower engine.num_slots, engine.max_new_tokens or engine.kv_tokens" in line
    assert "programs do not fit" in done.stderr


def test_plan_compiles_a_shape_without_weights_and_tokenizer(tmp_path: Path) -> None:
    shape = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    command = [f"model={tmp_path}", "devices=4", "context=256", "prompt_tokens=128", "slots=8"]
    done = subprocess.run(
        [sys.executable, "-m", "areal_jax.plan", *command, "--compile-for=v5e:2x2"],
        env=QUICKLY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"trainer accumulate +\d+:\d\d +0\.\d\d +0\.\d\d +14\.90", done.stdout)
    assert re.search(r"engine generate \d+ 0 +\d+:\d\d", done.stdout)
    # Half of the devices train.
    assert "train mesh: data 1 x fsdp 2" in done.stdout
    assert "each of 1 engines: data 2 x tensor 1" in done.stdout
