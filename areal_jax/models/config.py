"""Which policy to load, and in which precision to compute."""

from __future__ import annotations

from typing import Literal

import chz

Remat = Literal["none", "dots", "attention", "full"]
"""What the forward pass of a layer keeps for the backward pass, from all to nothing but its input. dots: products with weights,
and what attention gave. attention: what attention gave, so that long rows are not attended to twice."""


@chz.chz
class PolicyConfig:
    path: str = chz.field(
        default="embedded",
        doc="'embedded' (the tiny policy inside the package), a Hugging Face folder, or a hub name such as "
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    )
    random_init: bool = chz.field(default=False, doc="take only config.json from `path` and draw fresh weights")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = chz.field(
        default="auto", doc="dtype of activations and of the engine's weights; auto: float32 on CPU, bfloat16 elsewhere"
    )
