"""Compare policies of sampled shapes with transformers: every family, sizes drawn from seeds.

Needs torch beside areal_jax:

    pip install torch==2.13.0 transformers==5.23.0
    python tests/models/parity/sampled.py [--first=0] [--count=20] [--families=NAME,...] [--append]

For each seed and family: the logits of two packed sequences and the gradient of their loss, the
number of parameters, and the exported folder, which transformers reads with the same logits. Prints
the largest difference of each family, and the configuration of each failure. `--append` also writes it
to benchmarks/results/model_parity.jsonl, for the table of families.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax.sharding import SingleDeviceSharding

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from results import append

from areal_jax.models import hf
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Policy

LENGTHS = (13, 20)
TOLERANCE = 1e-4

Draw = Callable[..., Any]


class Differences(NamedTuple):
    """Largest absolute differences from transformers."""

    logits: float
    gradient: float
    """Of the embedding, by its largest number where that is above 1."""
    export: float
    """Of the logits of the exported folder."""


def scaling(draw: Draw, *types: str) -> dict[str, Any]:
    """Draw a RoPE scaling, or none."""
    kind = draw("default", *types)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(100.0, 1e4, 1e6)}
    if kind != "default":
        rope["factor"] = draw(1.5, 4.0)
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = draw(8, 32)
    if kind == "yarn":
        rope |= draw({}, {"attention_factor": 1.2}, {"beta_fast": 16.0, "beta_slow": 2.0})
        rope |= draw({}, {"truncate": False})
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw(2.0, 4.0)}
    return rope


def kinds(draw: Draw, num_layers: int, local: str) -> list[str]:
    """Draw the kinds of the layers, of which both occur."""
    while True:
        found = [draw(local, "full_attention") for _ in range(num_layers)]
        if len(set(found)) == 2:
            return found


def experts(draw: Draw) -> dict[str, Any]:
    count = draw(3, 4, 7)
    return {
        "num_experts": count,
        "num_experts_per_tok": draw(1, 2, count),
        "moe_intermediate_size": draw(4, 12),
        "router_aux_loss_coef": 0.1,
    }


def grouped_experts(draw: Draw, groups: int) -> dict[str, Any]:
    """Draw the settings of experts in groups, as DeepSeek-V3 has them."""
    return {
        "n_routed_experts": 4 * groups,
        "num_experts_per_tok": draw(1, 2),
        "moe_intermediate_size": draw(4, 12),
        "n_shared_experts": draw(1, 2),
        "n_group": groups,
        "topk_group": draw(1, groups),
        "first_k_dense_replace": draw(0, 1),
        "norm_topk_prob": draw(True, False),
        "routed_scaling_factor": draw(1.0, 2.5),
    }


def windows(draw: Draw, layers: int) -> dict[str, Any]:
    if draw(True, False):
        return {}
    size = {"use_sliding_window": True, "sliding_window": draw(1, 3, 8)}
    return size | draw(
        {"max_window_layers": draw(0, 1, layers)},
        {"layer_types": kinds(draw, layers, "sliding_attention")},
    )


def linear(draw: Draw, layers: int) -> dict[str, Any]:
    heads = draw(1, 2)
    return {
        "linear_conv_kernel_dim": draw(2, 3, 4),
        "linear_key_head_dim": draw(4, 6),
        "linear_value_head_dim": draw(4, 8),
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * draw(1, 2, 3),
        "layer_types": kinds(draw, layers, "linear_attention"),
        # Otherwise the norm of small results amplifies the rounding of float32.
        "rms_norm_eps": 1e-2,
    }


def partial_rope(draw: Draw, shares: tuple[float, ...]) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": draw(100.0, 1e4),
        "partial_rotary_factor": draw(*shares),
    }


ALL = ("linear", "yarn", "llama3")


def family_settings(name: str, draw: Draw, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the settings of a family beside its sizes."""
    layers, head = sizes["num_hidden_layers"], sizes["head_dim"]
    biased = {"attention_bias": draw(True, False)}
    rope = {"rope_parameters": scaling(draw, *ALL)}
    if name == "Qwen2":
        return rope | windows(draw, layers) | {"head_dim": None}
    if name == "Qwen3":
        return rope | windows(draw, layers) | biased
    if name == "Qwen3Moe":
        dense = draw({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]})
        local = draw({}, {"use_sliding_window": True, "sliding_window": draw(2, 5)})
        return rope | experts(draw) | dense | biased | local | {"norm_topk_prob": draw(True, False)}
    if name == "Qwen2Moe":
        shared = {"shared_expert_intermediate_size": draw(4, 20)}
        own = {"norm_topk_prob": draw(True, False), "head_dim": None}
        dense = draw({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]})
        return rope | windows(draw, layers) | experts(draw) | shared | own | dense
    if name == "Llama":
        return rope | biased | {"mlp_bias": draw(True, False)}
    if name == "SeedOss":
        return rope | biased | {"mlp_bias": draw(True, False)}
    if name == "Ernie4_5":
        return rope
    if name == "Olmoe":
        found = experts(draw) | {"norm_topk_prob": draw(True, False)}
        del found["moe_intermediate_size"]
        return rope | biased | found | {"head_dim": None}
    if name == "Mixtral":
        found = experts(draw)
        del found["moe_intermediate_size"]
        found["num_local_experts"] = found.pop("num_experts")
        return rope | found | {"sliding_window": draw(None, 4)}
    if name == "Mistral":
        return rope | {"sliding_window": draw(None, 1, 4)}
    if name == "Ministral":
        return rope | {"sliding_window": 3, "layer_types": kinds(draw, layers, "sliding_attention")}
    if name == "Olmo2":
        return rope | biased | {"head_dim": None}
    if name in ("Olmo3", "Gemma3Text"):
        by_window = {
            "full_attention": scaling(draw, "linear", "yarn"),
            "sliding_attention": {"rope_type": "default", "rope_theta": draw(100.0, 1e4)},
        }
        if name == "Olmo3":
            by_window["sliding_attention"]["rope_theta"] = by_window["full_attention"]["rope_theta"]
        own = {"rope_parameters": by_window, "sliding_window": draw(2, 6)}
        own["layer_types"] = kinds(draw, layers, "sliding_attention")
        if name == "Gemma3Text":
            own["query_pre_attn_scalar"] = draw(head, 12)
        return own | biased | ({"head_dim": None} if name == "Olmo3" else {})
    if name == "Phi3":
        share = partial_rope(draw, (0.5, 1.0))
        return {"rope_parameters": share, "sliding_window": draw(None, 4), "head_dim": None}
    if name == "Glm4":
        return {"rope_parameters": partial_rope(draw, (0.5, 1.0))} | biased
    if name == "GptOss":
        return {
            "num_local_experts": draw(3, 5),
            "num_experts_per_tok": draw(1, 2),
            "sliding_window": draw(2, 6),
            "layer_types": kinds(draw, layers, "sliding_attention"),
            "rope_parameters": scaling(draw, "yarn"),
            "router_aux_loss_coef": 0.1,
        }
    if name == "DeepseekV3":
        groups = draw(1, 2)
        return {
            "num_key_value_heads": sizes["num_attention_heads"],
            "q_lora_rank": draw(None, 6),
            "kv_lora_rank": draw(6, 8),
            "qk_nope_head_dim": draw(4, 6),
            "qk_rope_head_dim": draw(2, 4),
            "v_head_dim": draw(4, 6),
            **grouped_experts(draw, groups),
            "rope_interleave": draw(True, False),
            "rope_parameters": scaling(draw, "yarn"),
            "head_dim": None,
        } | biased
    if name == "Glm4Moe":
        groups = draw(1, 2)
        return {
            "rope_parameters": partial_rope(draw, (0.5, 1.0)),
            "use_qk_norm": draw(True, False),
            **grouped_experts(draw, groups),
        } | biased
    if name in ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe"):
        share = {"rope_parameters": partial_rope(draw, (0.5, 1.0))}
        own = linear(draw, layers) | share
        if name != "Qwen3_5":
            own |= experts(draw) | {"shared_expert_intermediate_size": draw(4, 12)}
        if name == "Qwen3Next":
            own |= {"norm_topk_prob": draw(True, False)}
            own |= draw({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]})
        return own
    raise ValueError(f"unknown family {name}")


CONFIGS = {"Gemma3Text": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}
CONFIGS["Qwen3_5Moe"] = "Qwen3_5MoeTextConfig"
FAMILIES = (
    *("Qwen2", "Qwen3", "Qwen3Moe", "Qwen2Moe", "Llama", "Mistral", "Ministral", "Olmo2", "Olmo3"),
    *("Gemma3Text", "Phi3", "Glm4", "GptOss", "DeepseekV3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
    *("SeedOss", "Ernie4_5", "Olmoe", "Mixtral", "Glm4Moe"),
)


PARTIAL = ("Phi3", "Glm4", "Glm4Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")


def sampled_config(name: str, seed: int) -> Any:
    """Draw the configuration of a family."""
    rng = random.Random(f"{name} {seed}")

    def draw(*choices: Any) -> Any:
        return rng.choice(choices)

    # Partial RoPE rotates an even number of dimensions.
    kv_heads, head = draw(1, 2, 3), draw(*((4, 8) if name in PARTIAL else (4, 6, 8)))
    heads = kv_heads * draw(1, 2, 4)
    sizes = {
        "vocab_size": draw(31, 40, 64),
        # Without head_dim this is the width of all heads.
        "hidden_size": heads * head,
        "intermediate_size": draw(10, 20, 44),
        "num_hidden_layers": draw(2, 3, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "max_position_embeddings": draw(64, 256),
        "tie_word_embeddings": draw(True, False),
        "rms_norm_eps": draw(1e-6, 1e-3),
        "initializer_range": 0.02,
    }
    sizes |= family_settings(name, draw, sizes)
    if sizes["head_dim"] is None:
        del sizes["head_dim"]
    elif draw(True, False):
        # Heads that are not hidden_size / num_attention_heads wide.
        sizes["hidden_size"] = heads * draw(3, 5, 12)
    tokens = {"bos_token_id": 1, "eos_token_id": draw(None, 2, [2, 3]), "pad_token_id": None}
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**sizes, **tokens)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def compare(name: str, seed: int) -> Differences:
    """Compare one policy."""
    config = sampled_config(name, seed)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for path, each in [*model.named_parameters(), *model.named_buffers()]:
            if not (isinstance(each, torch.nn.Parameter) or path.endswith("correction_bias")):
                continue
            fan_in = each.shape[-1] if each.ndim > 1 and "embed" not in path else 4
            each.copy_(torch.randn(each.shape) / fan_in**0.5 + ("norm" in path) * 0.5)
    sequences = [torch.randint(config.vocab_size, (1, length)) for length in LENGTHS]
    logits = [model(each).logits for each in sequences]
    torch.cat([x.log_softmax(-1)[0, :, 0] for x in logits]).sum().backward()
    expected = torch.cat([each[0] for each in logits]).detach().numpy()
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        model.save_pretrained(folder / "theirs")
        policy = Policy(hf.read_config(folder / "theirs"))
        one = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), policy.abstract())
        params = hf.load(folder / "theirs", policy, one)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert policy.config.num_params == count, (policy.config.num_params, count)
        tokens = jnp.asarray(torch.cat(sequences, 1).numpy().astype(np.int32))
        segments = jnp.concatenate([jnp.full(n, i + 1) for i, n in enumerate(LENGTHS)])[None]
        positions = jnp.concatenate([jnp.arange(n) for n in LENGTHS])[None]

        def loss_of(params: Any) -> Any:
            hidden, _, _ = policy.hidden(
                params, tokens, positions, packed_attention(segments), compute_dtype=jnp.float32
            )
            ours = hidden[0] @ policy.head(params)
            return jax.nn.log_softmax(ours)[:, 0].sum(), ours

        gradient, ours = jax.jit(jax.grad(loss_of, has_aux=True))(params)
        of_logits = float(np.abs(np.asarray(ours) - expected).max())
        embedded = model.get_input_embeddings().weight.grad.numpy()
        scale = max(1.0, float(np.abs(embedded).max()))
        of_gradient = float(np.abs(np.asarray(gradient["embed"]) - embedded).max()) / scale
        hf.save(folder / "ours", policy, params)
        copy = (
            transformers.AutoModelForCausalLM.from_pretrained(
                folder / "ours", attn_implementation="eager", experts_implementation="eager"
            )
            .float()
            .eval()
        )
        with torch.no_grad():
            again = np.concatenate([copy(each).logits[0].numpy() for each in sequences])
        of_export = float(np.abs(again - expected).max())
    return Differences(of_logits, of_gradient, of_export)


def main() -> int:
    parser = argparse.ArgumentParser(__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=20, help="seeds of each family")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, with commas")
    parser.add_argument("--append", action="store_true", help="write a row for each family")
    settings = parser.parse_args()
    worst: dict[str, float] = {}
    failures = 0
    for seed in range(settings.first, settings.first + settings.count):
        for name in settings.families.split(","):
            try:
                found = compare(name, seed)
            except Exception:  # any failure is reported with its configuration
                traceback.print_exc()
                found = Differences(np.inf, np.inf, np.inf)
            worst[name] = max(worst.get(name, 0.0), *found)
            if not max(found) < TOLERANCE:
                failures += 1
                shown = json.dumps(sampled_config(name, seed).to_diff_dict(), default=str)
                print(f"FAILED {name} seed {seed}: {found} {shown}", flush=True)
        shown = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
        print(f"seed {seed}: {shown}", flush=True)
    for name, value in worst.items() if settings.append else ():
        architecture = f"{name.removesuffix('Text')}ForCausalLM"
        row = {"architecture": architecture, "difference": value, "seeds": settings.count}
        append("model_parity", row | {"first_seed": settings.first})
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
