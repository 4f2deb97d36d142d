"""What is asked of the planner."""

from __future__ import annotations

from typing import Literal

import chz


@chz.chz
class ClusterQuestion:
    model: str = chz.field(
        doc="a policy known by name, such as qwen2.5-7b, or a folder with a config.json"
    )
    ignore_config_keys: tuple[str, ...] = chz.field(
        default=(),
        doc="keys of the folder's config.json that are ignored instead of refused, by name",
    )
    devices: int = chz.field(doc="how many there are")
    context: int = chz.field(doc="tokens of the longest prompt and answer together")
    device: str = chz.field(default="H100", doc="what they are, such as H200 or TPU v5p")
    rollout_devices: int | None = chz.field(
        default=None, doc="how many decode; none: the best split"
    )
    devices_per_engine: int | None = chz.field(
        default=None,
        doc=(
            "over how many an engine is cut; none: the fewest that hold weights and 8 longest "
            "sequences, or more if faster"
        ),
    )
    steps: int = chz.field(default=250, doc="trainer steps to tell the hours of")
    groups_per_batch: int = chz.field(default=512, doc="groups (prompts) in one trainer step")
    samples_per_group: int = chz.field(default=16, doc="answers sampled for each prompt")
    prompt_tokens: int = chz.field(default=200, doc="tokens of a usual prompt")
    median_length: int | None = chz.field(
        default=None, doc="tokens of half of the answers; none: a quarter of the context"
    )
    sigma: float = chz.field(
        default=0.8, doc="of the logarithm of lengths: how long their tail is; 0: all are equal"
    )
    max_staleness: int | None = chz.field(
        default=4, doc="eta: versions a trained token may lag behind; 0: synchronous"
    )
    on_update: Literal["recompute", "keep"] = chz.field(
        default="recompute", doc="KV caches of live sequences when weights arrive: rebuilt, or kept"
    )
    slots: int = chz.field(
        default=256,
        doc="sequences that the smallest engine decodes at the same time, if its memory holds them",
    )
    train_share: float = chz.field(
        default=0.43,
        doc="of the peak, reached by training (MFU); benchmarks/train_mfu.py measures it",
    )
    decode_share: float = chz.field(
        default=0.75, doc="of the memory bandwidth, reached by decode steps"
    )
    decode_step_s: float = chz.field(
        default=0.003, doc="what a decode step takes beside reading weights and caches"
    )
    figure: str = chz.field(
        default="plan.png", doc="where throughput by split is sampled; empty: nowhere"
    )
