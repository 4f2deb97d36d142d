"""Make the parity fixtures of vision-language policies, like parity/make.py.

Needs torch, which areal_jax itself does not:

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0
    python tests/models/parity_vision/make.py

expected.safetensors has, of two rows with two images and one,
- `tokens` [2, T], `patches` [P, C] of all images, `grids` [3, 2] (height, width) and `counts` [2],
  the number of images of each row,
- float32 `logits`, `positions` [2, T, 3] of M-RoPE, and `loss`: mean negative log-probability of
  all tokens that are not of an image,
- gradients as in parity/make.py,
- `greedy` [1, _]: the first row up to the end of its second image, and 24 tokens of `generate`.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "parity"))
from make import gradient

TEXT = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 20,
    "patch_size": 4,
    "out_hidden_size": 32,
}
TOKENS = {
    "image_token_id": 40,
    "video_token_id": 41,
    "vision_start_token_id": 42,
    "vision_end_token_id": 43,
}
GRIDS = ((6, 8), (4, 10), (2, 4))
COUNTS = (2, 1)


def families() -> dict[str, PreTrainedModel]:
    """Make one model per family."""
    return {
        "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config=TEXT
                | {
                    "num_hidden_layers": 2,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1000.0,
                        "mrope_section": [2, 1, 1],
                    },
                },
                vision_config=VISION
                | {"depth": 3, "window_size": 16, "fullatt_block_indexes": [1]},
                **TOKENS,
            )
        ),
        "qwen3_vl": Qwen3VLForConditionalGeneration(
            Qwen3VLConfig(
                text_config=TEXT
                | {
                    "num_hidden_layers": 3,
                    "head_dim": 12,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1000.0,
                        "mrope_section": [2, 2, 2],
                    },
                },
                vision_config=VISION
                | {"depth": 3, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
                **TOKENS,
            )
        ),
    }


def rows() -> torch.Tensor:
    """Sample text around the images; both rows have the same length."""
    made, grids = [], iter(GRIDS)
    for count in COUNTS:
        row = torch.randint(2, 40, (3,)).tolist()
        for _ in range(count):
            height, width = next(grids)
            row += [TOKENS["vision_start_token_id"]]
            row += [TOKENS["image_token_id"]] * (height * width // 4)
            row += [TOKENS["vision_end_token_id"], *torch.randint(2, 40, (2,)).tolist()]
        made.append(row)
    length = max(map(len, made)) + 3
    return torch.tensor([row + torch.randint(2, 40, (length - len(row),)).tolist() for row in made])


def main() -> None:
    torch.manual_seed(0)
    for name, model in families().items():
        for path, parameter in model.named_parameters():
            fan_in = (
                parameter[0].numel() if parameter.ndim > 1 and "embed_tokens" not in path else 4
            )
            sampled = torch.randn(parameter.shape) / fan_in**0.5
            is_scale = "norm" in path or "ln_q" in path
            sampled = 1 + sampled if is_scale and path.endswith("weight") else sampled
            parameter.data = sampled.to(torch.bfloat16).float()
        tokens = rows()
        grids = torch.tensor([(1, *grid) for grid in GRIDS])
        patches = torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4).to(torch.bfloat16).float()
        is_image = tokens == TOKENS["image_token_id"]
        inputs = {"pixel_values": patches, "image_grid_thw": grids}
        out = model.float().eval()(
            tokens,
            **inputs,
            mm_token_type_ids=is_image.int(),
            labels=torch.where(is_image, -100, tokens),
        )
        out.loss.backward()
        positions, _ = model.model.get_rope_index(tokens, is_image.int(), grids)
        expected = {
            "tokens": tokens.int(),
            "patches": patches,
            "grids": grids[:, 1:].int(),
            "counts": torch.tensor(COUNTS).int(),
            "positions": positions.permute(1, 2, 0).int(),
            "logits": out.logits,
            "loss": out.loss,
        }
        for path, grad in gradient(model).items():
            expected[f"rows.{path}"] = grad.sum(-1) if grad.ndim > 1 else grad
            if grad.ndim > 1:
                expected[f"columns.{path}"] = grad.sum(-2)
        model.zero_grad()
        model.generation_config.eos_token_id = None
        end = int(is_image[0].nonzero().max()) + 2
        count = int(grids[: COUNTS[0]].prod(-1).sum())
        expected["greedy"] = model.generate(
            tokens[:1, :end],
            pixel_values=patches[:count],
            image_grid_thw=grids[: COUNTS[0]],
            mm_token_type_ids=is_image[:1, :end].int(),
            do_sample=False,
            max_new_tokens=24,
        ).int()
        folder = Path(__file__).parent / name
        model.to(torch.bfloat16).save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        expected = {name: tensor.detach().contiguous() for name, tensor in expected.items()}
        save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
