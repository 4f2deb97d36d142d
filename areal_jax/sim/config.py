"""Settings of the cluster planner."""

from __future__ import annotations

from typing import Literal

import chz


@chz.chz
class ClusterQuestion:
    """A model, a cluster and a workload to plan for."""

    model: str = chz.field(doc="known model such as qwen2.5-7b, or folder with a config.json")
    ignore_config_keys: tuple[str, ...] = chz.field(
        default=(),
        doc="keys of the folder's config.json to ignore instead of refusing them",
    )
    devices: int = chz.field(doc="number of devices")
    context: int = chz.field(doc="maximum length of prompt and completion together, in tokens")
    device: str = chz.field(default="H100", doc="device type, such as H200 or TPU v5p")
    rollout_devices: int | None = chz.field(
        default=None, doc="number of rollout devices; none: the best split"
    )
    devices_per_engine: int | None = chz.field(
        default=None,
        doc=(
            "devices per engine; none: the fewest that hold weights and 8 sequences of maximum "
            "length, or more if faster"
        ),
    )
    steps: int = chz.field(default=250, doc="trainer steps of the run, for the total hours")
    groups_per_batch: int = chz.field(default=512, doc="groups (prompts) in one trainer step")
    samples_per_group: int = chz.field(default=16, doc="samples per prompt")
    prompt_tokens: int = chz.field(default=200, doc="typical prompt length, in tokens")
    median_length: int | None = chz.field(
        default=None, doc="median completion length, in tokens; none: a quarter of the context"
    )
    sigma: float = chz.field(
        default=0.8, doc="standard deviation of the log of completion lengths; 0: all are equal"
    )
    max_staleness: int | None = chz.field(
        default=4, doc="eta: maximum age of a trained token, in versions; 0: synchronous"
    )
    on_update: Literal["recompute", "keep"] = chz.field(
        default="recompute",
        doc="KV caches of running sequences at a weight update: recomputed or kept",
    )
    draft_tokens: int = chz.field(
        default=0, doc="engine.draft_tokens of the programs that --compile-for compiles"
    )
    draft_policy: str = chz.field(
        default="", doc="known model, or folder with a config.json, that proposes the drafts there"
    )
    slots: int = chz.field(
        default=256,
        doc="slots of the smallest engine, if its memory holds them",
    )
    train_share: float = chz.field(
        default=0.43,
        doc="MFU of training; benchmarks/train_mfu.py measures it",
    )
    decode_share: float = chz.field(
        default=0.75, doc="share of the memory bandwidth that decode steps reach"
    )
    decode_step_s: float = chz.field(
        default=0.003, doc="time of a decode step besides reading weights and caches, in seconds"
    )
    figure: str = chz.field(
        default="plan.png", doc="file of the plot of throughput by split; empty: no plot"
    )
