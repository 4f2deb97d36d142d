"""Which families compile for a TPU slice or a node of GPUs that is not there.

    python benchmarks/model_families.py [--compile-for=v5e:2x2] [--only=NAME,...]

Needs the extra `tpu`, or `gpu` for GPUs. A family has a few layers of each of its kinds, in widths
that the kernels take; `areal-plan --compile-for` compiles training (accumulate, apply, log-probs)
and decoding (generate, prefill, extend) of it on 4 devices. Appends a row for each family to
results/model_families.jsonl: the peak of every program in GiB, or the last line of the error.
Figures are compiled, not measured. One to two minutes of a CPU core for each family on a TPU slice.
`--table` prints the families of the last rows instead.

Expected: every family compiles. Those with a vision tower are left out: `areal-plan` has no images.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from areal_jax.cluster.environment import COMPILE_ONLY, set_variables

if __name__ == "__main__":
    # jax reads its flags when it is first imported.
    set_variables(COMPILE_ONLY, "jax")

from results import FOLDER, append

from areal_jax.models.traits import TRAITS

NAME = "model_families"
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
HEAD = {"head_dim": 128}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 128}
LOCAL = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": HEAD,
    "Qwen3MoeForCausalLM": HEAD | EXPERTS,
    "MistralForCausalLM": {"sliding_window": 128},
    "MinistralForCausalLM": HEAD | LOCAL,
    "Olmo3ForCausalLM": LOCAL,
    "Glm4ForCausalLM": HEAD,
    "Gemma3ForCausalLM": LOCAL,
    "Qwen2MoeForCausalLM": SHARED,
    "OlmoeForCausalLM": {"num_experts": 8, "num_experts_per_tok": 2},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "GptOssForCausalLM": LOCAL | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
    },
    "Qwen3NextForCausalLM": LINEAR | SHARED,
    "Qwen3_5ForCausalLM": LINEAR,
    "Qwen3_5MoeForCausalLM": LINEAR | SHARED,
}
"""Settings of families beside the sizes; others have none."""

TEXT = tuple(name for name, traits in TRAITS.items() if traits.vision is None)
PROGRAM = re.compile(r"^ *((?:trainer|engine|weights) [a-z_]+(?: \d+)*) +\d+:\d\d +(\d+\.\d+) ")
REQUIRED = ("trainer accumulate", "engine generate", "engine prefill")


def compile_family(name: str, topology: str) -> dict[str, Any]:
    """Compile the programs of a family; return their peaks in GiB, or the error."""
    question = ("devices=4", "context=256", "prompt_tokens=64", "slots=8")
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": [name]} | SIZES | SETTINGS.get(name, {})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = ["-m", "areal_jax.plan", f"model={folder}", *question]
        done = subprocess.run(
            [sys.executable, *command, f"--compile-for={topology}"],
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
    found = (PROGRAM.match(line) for line in done.stdout.splitlines())
    peaks = {each[1]: float(each[2]) for each in found if each}
    missing = [each for each in REQUIRED if not any(key.startswith(each) for key in peaks)]
    row: dict[str, Any] = {"architecture": name, "topology": topology, "peak_gib": peaks}
    if done.returncode or missing:
        row["error"] = (done.stderr or "no programs").strip().splitlines()[-1]
    return row


def stored() -> dict[tuple[str, str], dict[str, Any]]:
    """The last row of each family and topology."""
    lines = (FOLDER / f"{NAME}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {(row["architecture"], row["topology"]): row for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-for", default="v5e:2x2")
    parser.add_argument("--only", default=",".join(TEXT), help="architectures, with commas")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        for (name, topology), row in sorted(stored().items()):
            print(f"| {name} | {topology} | {'no' if 'error' in row else 'yes'} |")
        return 0
    failed = 0
    for name in given.only.split(","):
        row = compile_family(name, given.compile_for)
        append(NAME, row)
        failed += "error" in row
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
