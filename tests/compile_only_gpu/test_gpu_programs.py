"""`--compile-for` of GPU nodes: programs of real widths and few layers, by XLA's GPU compiler."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Policy
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.topologies import compile_only_devices
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.step import TrainableModel

# Qwen2.5-1.5B but for the number of layers.
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def compile_for(topology: str, *question: str) -> str:
    """What `areal-plan` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "areal_jax.plan", *question, f"--compile-for={topology}"],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("topology", ["2xh200:8", "b200:8"])
def test_gathers_and_scatters_of_training_overlap_with_compute(
    topology: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    num_devices = 16 if topology.startswith("2x") else 8
    question = [f"model={tmp_path}", f"devices={num_devices}", "context=8192", "slots=64"]
    out = compile_for(topology, *question)
    for name in ("init", "accumulate", "apply", "logprobs"):
        assert re.search(rf"trainer {name} +\d+:\d\d +\d", out)
    for name in ("generate", "prefill", "extend", "copy"):
        assert re.search(rf"engine {name}", out)
    assert "not counted" not in out
    rows = re.findall(r"trainer (\w+) +([\w-]+) +(fsdp) +([\d,]+) +(\S+) +\S+ +(yes|no)", out)
    num_bytes: dict[tuple[str, str, str], float] = {}
    for program, kind, _, _, size, overlaps in rows:
        num_bytes[program, kind, overlaps] = 0.0 if size == "<0.01" else float(size)
    # 0.327 G weights (151936 x 1536, and 2 x 46.8 M) in bfloat16, forward and backward; the output
    # head's gradient and those of layers in float32, reduced while something else runs.
    assert num_bytes["accumulate", "all-gather", "yes"] == pytest.approx(1.31, rel=0.1)
    assert num_bytes["accumulate", "reduce-scatter", "yes"] == pytest.approx(1.31, rel=0.1)
    # What does not overlap, or is reduced on every device, is small.
    for (_, kind, overlaps), size in num_bytes.items():
        if kind == "all-reduce" or overlaps == "no":
            assert size < 0.02
    # The update needs the norm of the gradient only.
    assert {kind for program, kind, _ in num_bytes if program == "apply"} == {"all-reduce"}
    mfu = re.search(r"training: at most (\d+)% MFU \(compiled", out)
    assert mfu and 30 < int(mfu[1]) < 100


def test_an_update_changes_parameters_and_moments_in_place() -> None:
    mesh = make_train_mesh(PlacementConfig(train_fsdp=2), compile_only_devices("h200:2"))
    policy = Policy(ModelConfig.from_hf(SHAPE, source="test"))
    model = TrainableModel(
        policy=policy,
        params=policy.abstract(),
        mesh=mesh,
        compute_dtype=jnp.dtype(jnp.bfloat16),
        row_tokens=8192,
    )
    learner = policy_learner(TrainerConfig(), model, num_updates=10)
    memory = learner.programs.compiled("apply").memory_analysis()
    assert memory is not None
    # Parameters, two moments and gradients in float32, a half on each device.
    state = 4 * 4 * policy.config.num_params // 2
    assert memory.argument_size_in_bytes == pytest.approx(state, rel=0.01)
    assert memory.temp_size_in_bytes < 0.01 * state


def test_prefill_of_latent_attention_fits_shared_memory(tmp_path: Path) -> None:
    shape = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    question = [f"model={tmp_path}", "devices=2", "context=256", "prompt_tokens=64", "slots=8"]
    out = compile_for("h200:2", *question)
    assert re.search(r"engine prefill 8 256 +\d+:\d\d +\d", out)
