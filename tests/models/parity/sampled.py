"""Compare policies of sampled shapes with transformers: every family, sizes drawn from seeds.

Needs torch beside areal_jax:

    pip install torch==2.13.0 transformers==5.23.0
    python tests/models/parity/sampled.py [--first=0] [--count=20] [--families=NAME,...] [--append]

For each seed and family: the logits of packed sequences and the gradient of their loss, the number
of parameters, and the exported folder, which transformers reads with the same logits. Of policies
with a vision tower also the embeddings of images. Prints the largest differences of each family, and
the configuration of each failure. `--append` also writes them to
benchmarks/results/model_parity.jsonl, for the table of families.
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
from make import gradient as file_gradient
from results import append

from areal_jax.models import hf
from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Policy
from areal_jax.models.vision.image_processor import ImageGrid
from areal_jax.models.vision.layout import patch_layout, rope_positions
from areal_jax.models.vision.tower import ImageInputs

LENGTHS = (13, 20)
TOLERANCE = 1e-4

Draw = Callable[..., Any]


class Differences(NamedTuple):
    """Largest absolute differences from transformers."""

    logits: float
    gradient: float
    """Of each parameter, by its largest number where that is above 1."""
    export: float
    """Of the logits of the exported folder."""
    embeddings: float
    """Of the tokens of images, by the largest number where that is above 1; 0 without images."""


def scaled_difference(ours: Any, theirs: torch.Tensor) -> float:
    """Return the largest difference, by the largest number where that is above 1."""
    theirs = theirs.detach()
    scale = max(1.0, float(theirs.abs().max()))
    return float(np.abs(np.asarray(ours) - theirs.numpy()).max()) / scale


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
    if name in VISION:
        rope["rope_parameters"]["mrope_section"] = mrope_section(draw, head // 2)
        return rope | (biased if name == "Qwen3VL" else {"head_dim": None})
    raise ValueError(f"unknown family {name}")


def mrope_section(draw: Draw, num_frequencies: int) -> list[int]:
    """Sample how many frequencies rotate by time, row and column."""
    first, second = sorted(draw(*range(num_frequencies + 1)) for _ in range(2))
    return [first, second - first, num_frequencies - second]


def tower_settings(name: str, draw: Draw, text: Mapping[str, Any]) -> dict[str, Any]:
    """Sample the settings of a vision tower."""
    heads, depth = draw(1, 2, 3), draw(2, 3, 5)
    merge, patch = draw(1, 2, 3), draw(2, 3, 4)
    blocks = [i for i in range(depth) if draw(True, False)]
    tower = {
        "depth": depth,
        "hidden_size": heads * draw(4, 8, 12),
        "num_heads": heads,
        "intermediate_size": draw(6, 20),
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": draw(1, 2),
        "in_channels": draw(1, 3),
        "out_hidden_size": text["hidden_size"],
    }
    if name == "Qwen3VL":
        return tower | {
            "num_position_embeddings": draw(1, 2, 5, 8) ** 2,
            "deepstack_visual_indexes": blocks[: text["num_hidden_layers"]],
        }
    window = merge * patch * draw(1, 2, 3) + draw(0, merge * patch - 1)
    return tower | {"window_size": window, "fullatt_block_indexes": blocks}


CONFIGS = {"Gemma3Text": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}
CONFIGS["Qwen3_5Moe"] = "Qwen3_5MoeTextConfig"
FAMILIES = (
    *("Qwen2", "Qwen3", "Qwen3Moe", "Qwen2Moe", "Llama", "Mistral", "Ministral", "Olmo2", "Olmo3"),
    *("Gemma3Text", "Phi3", "Glm4", "GptOss", "DeepseekV3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
    *("SeedOss", "Ernie4_5", "Olmoe", "Mixtral", "Glm4Moe", "Qwen2_5_VL", "Qwen3VL"),
)
VISION = ("Qwen2_5_VL", "Qwen3VL")


PARTIAL = ("Phi3", "Glm4", "Glm4Moe", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")


def sampled_config(name: str, seed: int) -> Any:
    """Draw the configuration of a family."""
    rng = random.Random(f"{name} {seed}")

    def draw(*choices: Any) -> Any:
        return rng.choice(choices)

    # Partial RoPE rotates an even number of dimensions; M-RoPE shares them among three axes.
    head_sizes = (8, 12, 20) if name in VISION else (4, 8) if name in PARTIAL else (4, 6, 8)
    kv_heads, head = draw(1, 2, 3), draw(*head_sizes)
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
    sizes |= {"bos_token_id": 1, "eos_token_id": draw(None, 2, [2, 3]), "pad_token_id": None}
    if name in VISION:
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        sizes = {
            "tie_word_embeddings": sizes.pop("tie_word_embeddings"),
            "text_config": sizes,
            "vision_config": tower_settings(name, draw, sizes),
            **{each: sizes["vocab_size"] - i for i, each in enumerate(names, 1)},
        }
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**sizes)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def sampled_inputs(config: Any, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sample sequences, as arguments of the model; with a tower, two with images and one without."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return [{"input_ids": torch.randint(config.vocab_size, (1, n))} for n in LENGTHS]
    rng, made = random.Random(seed), []
    others = [(1, 7), (6, 1), (2, 3), (5, 3), (4, 4)]
    for squares in ([(1, 1), *rng.sample(others, 2)], [rng.choice(others)], []):
        row = torch.randint(config.vision_end_token_id, (rng.choice((1, 3)),)).tolist()
        for height, width in squares:
            row += [config.vision_start_token_id, *[config.image_token_id] * (height * width)]
            text = torch.randint(config.vision_end_token_id, (rng.choice((0, 3)),)).tolist()
            row += [config.vision_end_token_id, *text]
        made.append({"input_ids": torch.tensor([row])})
        if squares:
            grids = torch.tensor([(1, *each) for each in squares])
            grids[:, 1:] *= vision.spatial_merge_size
            channels = vision.in_channels * vision.temporal_patch_size
            pixels = torch.randn(int(grids.prod(-1).sum()), channels * vision.patch_size**2)
            made[-1] |= {"pixel_values": pixels, "image_grid_thw": grids}
            made[-1]["mm_token_type_ids"] = (made[-1]["input_ids"] == config.image_token_id).int()
    return made


def joined(inputs: list[dict[str, torch.Tensor]], key: str) -> torch.Tensor:
    return torch.cat([each[key] for each in inputs if key in each])


def packed(policy: Policy, inputs: list[dict[str, torch.Tensor]]) -> tuple[Any, Any, Any, Any]:
    """Return tokens, positions, segments and images of the sequences in one row."""
    rows, vision = [each["input_ids"][0].numpy() for each in inputs], policy.config.vision
    segments = np.repeat(np.arange(1, len(rows) + 1), [len(row) for row in rows])
    if vision is None:
        positions, images = [np.arange(len(row)) for row in rows], None
    else:
        grids = [
            [ImageGrid(*grid[1:]) for grid in each.get("image_grid_thw", torch.zeros(0)).tolist()]
            for each in inputs
        ]
        merge, is_image = vision.spatial_merge_size, [row == vision.image_token_id for row in rows]
        positions = [rope_positions(*each, merge) for each in zip(is_image, grids, strict=True)]
        slots = np.concatenate(is_image)
        images = ImageInputs(
            joined(inputs, "pixel_values").numpy()[None],
            patch_layout([grid for row in grids for grid in row], merge)[None],
            (np.cumsum(slots) * slots)[None],
        )
    columns = (np.concatenate(rows)[None], np.concatenate(positions)[None], segments[None], images)
    return jax.tree.map(jnp.asarray, columns)


def compare(name: str, seed: int) -> Differences:
    """Compare one policy."""
    config = sampled_config(name, seed)
    torch.manual_seed(seed)
    auto = f"AutoModelFor{'ImageTextToText' if name in VISION else 'CausalLM'}"
    model = getattr(transformers, auto).from_config(config).float().eval()
    with torch.no_grad():
        for path, each in [*model.named_parameters(), *model.named_buffers()]:
            if not (isinstance(each, torch.nn.Parameter) or path.endswith("correction_bias")):
                continue
            fan_in = each.shape[-1] if each.ndim > 1 and "embed" not in path else 4
            each.copy_(torch.randn(each.shape) / fan_in**0.5 + ("norm" in path) * 0.5)
    inputs = sampled_inputs(config, seed)
    logits = [model(**each).logits for each in inputs]
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
        tokens, positions, segments, images = packed(policy, inputs)

        def loss_of(params: Any) -> Any:
            found = None
            if images is not None:
                found = policy.encode_images(params, images, compute_dtype=jnp.float32)
            hidden, _, _ = policy.hidden(
                params,
                tokens,
                positions,
                packed_attention(segments),
                compute_dtype=jnp.float32,
                images=found,
            )
            ours = hidden[0] @ policy.head(params)
            return jax.nn.log_softmax(ours)[:, 0].sum(), (ours, found)

        gradient, (ours, found) = jax.jit(jax.grad(loss_of, has_aux=True))(params)
        of_logits = float(np.abs(np.asarray(ours) - expected).max())
        ours, theirs = dict(hf._to_files(policy, gradient)), file_gradient(model)
        assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
        of_gradient = max(scaled_difference(ours[path], theirs[path]) for path in theirs)
        of_images = 0.0 if found is None else image_difference(model, inputs, found.features[0])
        hf.save(folder / "ours", policy, params)
        assert hf.read_config(folder / "ours") == policy.config
        copy = (
            getattr(transformers, auto)
            .from_pretrained(
                folder / "ours", attn_implementation="eager", experts_implementation="eager"
            )
            .float()
            .eval()
        )
        with torch.no_grad():
            again = np.concatenate([copy(**each).logits[0].numpy() for each in inputs])
        of_export = float(np.abs(again - expected).max())
    return Differences(of_logits, of_gradient, of_export, of_images)


def image_difference(model: Any, inputs: list[dict[str, torch.Tensor]], ours: Any) -> float:
    """Compare the embeddings of images, and what DeepStack adds."""
    pixels, grids = joined(inputs, "pixel_values"), joined(inputs, "image_grid_thw")
    with torch.no_grad():
        found = model.model.visual(pixels, grid_thw=grids)
    deep = getattr(found, "deepstack_features", None) or []
    return scaled_difference(ours, torch.stack([found.pooler_output, *deep], 1))


def main() -> int:
    parser = argparse.ArgumentParser(__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=20, help="seeds of each family")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, with commas")
    parser.add_argument("--append", action="store_true", help="write a row for each family")
    settings = parser.parse_args()
    worst: dict[str, Differences] = {}
    failures = 0
    for seed in range(settings.first, settings.first + settings.count):
        for name in settings.families.split(","):
            try:
                found = compare(name, seed)
            except Exception:  # any failure is reported with its configuration
                traceback.print_exc()
                found = Differences(*[np.inf] * len(Differences._fields))
            worst[name] = Differences(*map(max, found, worst.get(name, found)))
            if not max(found) < TOLERANCE:
                failures += 1
                shown = json.dumps(sampled_config(name, seed).to_diff_dict(), default=str)
                print(f"FAILED {name} seed {seed}: {found} {shown}", flush=True)
        shown = ", ".join(f"{name} {max(value):.1e}" for name, value in worst.items())
        print(f"seed {seed}: {shown}", flush=True)
    for name, value in worst.items() if settings.append else ():
        head = "ForConditionalGeneration" if name in VISION else "ForCausalLM"
        row = {"architecture": f"{name.removesuffix('Text')}{head}", "difference": max(value)}
        row |= value._asdict() | {"seeds": settings.count, "first_seed": settings.first}
        append("model_parity", row)
    return failures > 0


if __name__ == "__main__":
    sys.exit(main())
