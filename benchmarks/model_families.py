"""Which families compile for a TPU slice or a node of GPUs that is not there.

    python benchmarks/model_families.py [--compile-for=v5e:2x2] [--only=NAME,...]

Needs the extra `tpu`, or `gpu` for GPUs (h200:2: one trains and one decodes). A family has two
layers, of its two kinds if there are two, in the widths of a published policy, with few words and
experts; `areal-plan --compile-for` compiles training (accumulate, apply, log-probs) and decoding
(generate, prefill, extend) of it on all devices. Families with a vision tower, also of two layers,
train on the pictures of --exp=count_shapes with half of the devices and read them with the others
(encode, prefill_images, extend_images). Appends a row for each family to
results/model_families.jsonl: the peak of every program in GiB, or the last line of the error.
Figures are compiled, not measured. Two to five minutes of a CPU core for each family and topology.
`--table` prints the tables of families of docs/models.md and README instead, from the last rows and
those of results/model_parity.jsonl (tests/models/parity/sampled.py writes them).

Expected: every family compiles.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from areal_jax.cluster.environment import COMPILE_ONLY, set_variables

if __name__ == "__main__":
    # jax reads its flags when it is first imported.
    set_variables(COMPILE_ONLY, "jax")

from results import FOLDER, append

from areal_jax.data.policy_files import EMBEDDED_VISION
from areal_jax.models.known import KNOWN
from areal_jax.models.traits import TRAITS

NAME, PARITY = "model_families", "model_parity"
TOPOLOGIES = ("v5e:2x2", "h200:2")
SUFFIX = re.compile("For(CausalLM|ConditionalGeneration)$")
LAYERS = {"num_hidden_layers": 2, "vocab_size": 32768, "max_position_embeddings": 2048}
"""Real widths, and few layers, words and experts."""
NUM_EXPERTS = 16
KNOWN_NAMES = (
    *("qwen2.5-1.5b", "qwen3-4b", "qwen3-30b-a3b", "llama-3.1-8b", "mistral-7b-v0.3", "olmo-2-7b"),
    *("olmo-3-7b", "phi-4", "glm-4-9b", "gemma-3-1b", "qwen1.5-moe-a2.7b", "moonlight-16b-a3b"),
    *("gpt-oss-20b", "glm-4.5-air"),
)
LOCAL = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DEEPSEEK = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def widths(*numbers: int) -> dict[str, int]:
    """Widths of the residual stream and of MLPs, heads, and heads of keys and values."""
    columns = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip(columns, numbers, strict=True))


OTHERS: dict[str, dict[str, Any]] = {
    "SeedOssForCausalLM": widths(5120, 27648, 80, 8),
    "Ernie4_5ForCausalLM": widths(1024, 3072, 16, 2),
    "OlmoeForCausalLM": widths(2048, 1024, 16, 16),
    "MixtralForCausalLM": widths(4096, 14336, 32, 8) | {"num_local_experts": 4},
    "MinistralForCausalLM": widths(4096, 12288, 32, 8) | LOCAL | {"head_dim": 128},
    "Qwen3NextForCausalLM": widths(2048, 5120, 16, 2) | LINEAR,
    "Qwen3_5ForCausalLM": widths(2560, 9216, 16, 4) | LINEAR,
    "Qwen3_5MoeForCausalLM": widths(2048, 512, 16, 2) | LINEAR,
}
"""Widths of families of which `models/known.py` has no policy."""

VISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VLForConditionalGeneration": (
        widths(2048, 11008, 16, 2) | {"rope_parameters": {"mrope_section": [16, 24, 24]}},
        {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048}
        | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
    ),
    "Qwen3VLForConditionalGeneration": (
        widths(2560, 9728, 32, 8)
        | {"head_dim": 128, "rope_parameters": {"mrope_section": [24, 20, 20]}},
        {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560}
        | {"patch_size": 14, "num_position_embeddings": 2304, "deepstack_visual_indexes": [0, 1]},
    ),
}
"""Widths of the policy and of the tower. Patches are those of the embedded policy's processor."""
KINDS = {
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "silu"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "gelu_pytorch_tanh"),
}
"""`model_type`, and the activation of the tower."""


def settings() -> dict[str, dict[str, Any]]:
    """The config.json of each family."""
    found = {KNOWN[name]["architectures"][0]: dict(KNOWN[name]) for name in KNOWN_NAMES} | OTHERS
    found["DeepseekV3ForCausalLM"] |= DEEPSEEK
    for name in ("Olmo3ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"):
        found[name] |= LOCAL
    for name, values in found.items():
        traits = TRAITS[name]
        values |= LAYERS | {"architectures": [name]}
        key = traits.expert_keys.get("num_experts") or "num_experts"
        if traits.is_moe:
            values[key] = min(NUM_EXPERTS, values.get(key, NUM_EXPERTS))
    # Two layers of these do not fit the two v5e that train.
    for name in ("MixtralForCausalLM", "SeedOssForCausalLM"):
        found[name]["num_hidden_layers"] = 1
    return found


TEXT = tuple(name for name, traits in TRAITS.items() if traits.vision is None)
PROGRAM = re.compile(r"^ *((?:trainer|engine|weights) [a-z_]+(?: \d+)*) +\d+:\d\d +(\d+\.\d+) ")
REQUIRED = ("trainer accumulate", "engine generate", "engine prefill")
OF_IMAGES = ("engine prefill_images", "engine encode")


def text_plan(name: str, topology: str, folder: Path) -> tuple[str, ...]:
    """Write the policy; the command that plans with it."""
    (folder / "config.json").write_text(json.dumps(settings()[name]))
    devices = math.prod(int(size) for size in topology.partition(":")[2].split("x"))
    question = (f"devices={devices}", "context=256", "prompt_tokens=64", "slots=8")
    return "areal_jax.plan", f"model={folder}", *question


def vision_run(name: str, topology: str, folder: Path) -> tuple[str, ...]:
    """Write the policy with the tokenizer of the embedded one; the command that trains it."""
    without_weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(EMBEDDED_VISION, folder, dirs_exist_ok=True, ignore=without_weights)
    config = json.loads((folder / "config.json").read_text())
    text, tower = VISION[name]
    kind, activation = KINDS[name]
    rope = {"rope_type": "default", "rope_theta": 1e6, **text["rope_parameters"]}
    common = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": 2, **LAYERS}
    merged = {"depth": 2, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
    own = {"model_type": f"{kind}_vision", "hidden_act": activation}
    config |= {"architectures": [name], "model_type": kind, "vision_config": merged | own | tower}
    text = common | text | {"model_type": f"{kind}_text", "rope_parameters": rope}
    config["text_config"] = text
    (folder / "config.json").write_text(json.dumps(config))
    shares = ("placement.rollout_share=0.5", "engine.num_slots=8")
    return "areal_jax.train", "--exp=count_shapes", f"policy.path={folder}", *shares


def compile_family(name: str, topology: str) -> dict[str, Any]:
    """Compile the programs of a family; return their peaks in GiB, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (vision_run if name in VISION else text_plan)(name, topology, Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", *arguments, f"--compile-for={topology}"],
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
    found = (PROGRAM.match(line) for line in done.stdout.splitlines())
    peaks = {each[1]: float(each[2]) for each in found if each}
    required = (*REQUIRED, *OF_IMAGES) if name in VISION else REQUIRED
    missing = [each for each in required if not any(key.startswith(each) for key in peaks)]
    row: dict[str, Any] = {"architecture": name, "topology": topology, "peak_gib": peaks}
    if done.returncode or missing:
        row["error"] = (done.stderr or "no programs").strip().splitlines()[-1]
    return row


def last_rows(name: str, *keys: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """The last row of each combination of keys in a file of results."""
    lines = (FOLDER / f"{name}.jsonl").read_text().splitlines()
    return {tuple(row[key] for key in keys): row for row in map(json.loads, lines)}


def state(row: dict[str, Any] | None) -> str:
    """Whether the programs of a row compile."""
    return "not run" if row is None else "fails" if "error" in row else "yes"


class Family(NamedTuple):
    """Cells of a family in the table."""

    train: str
    decode: str
    lora: str
    axes: str
    tpu: str
    gpu: str

    @classmethod
    def of(cls, name: str, compiled: dict[tuple[str, ...], dict[str, Any]]) -> Family:
        """Cells of an architecture, given the last rows of compilations."""
        traits, is_moe = TRAITS[name], TRAITS[name].is_moe
        shared = {"shared_expert_intermediate_size", "n_shared_experts"} & traits.defaults.keys()
        return cls(
            "yes",
            "yes",
            f"attention{', MLP' if shared or not is_moe else ''}{', experts' if is_moe else ''}",
            f"data, FSDP, tensor, context{', expert' if is_moe else ''}",
            *(state(compiled.get((name, topology))) for topology in TOPOLOGIES),
        )


HEADER = (
    "| family | train | decode | LoRA | shard | TPU v5e compiles | H200 compiles | parity |",
    "|---|---|---|---|---|---|---|---|",
)


def table(*, is_short: bool = False) -> list[str]:
    """Lines of the table of families, in Markdown.

    Args:
        is_short: one line for all families with the same cells, and their largest difference.
    """
    compiled = last_rows(NAME, "architecture", "topology")
    parity = last_rows(PARITY, "architecture")
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in TRAITS:
        cells = Family.of(name, compiled)
        key = (*cells, TRAITS[name].vision is None if is_short else name)
        groups.setdefault(key, []).append(name)
    lines: list[str] = [*HEADER]
    for cells, names in groups.items():
        found = [parity[(name,)]["difference"] if (name,) in parity else None for name in names]
        differences = [each for each in found if each is not None]
        figure = f"{max(differences):.1e}" if len(differences) == len(found) else "not run"
        shown = ", ".join(f"`{name}`" if not is_short else SUFFIX.sub("", name) for name in names)
        lines.append(f"| {' | '.join((shown, *cells[: len(Family._fields)], figure))} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-for", default="v5e:2x2")
    parser.add_argument(
        "--only", default=",".join((*TEXT, *VISION)), help="architectures, with commas"
    )
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print("\n".join([*table(), "", *table(is_short=True)]))
        return 0
    failed = 0
    for name in given.only.split(","):
        row = compile_family(name, given.compile_for)
        append(NAME, row)
        failed += "error" in row
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
