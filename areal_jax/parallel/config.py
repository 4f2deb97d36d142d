"""Which devices train, which decode, and how each mesh is cut."""

from __future__ import annotations

from typing import Literal

import chz


@chz.chz
class PlacementConfig:
    rollout_devices: int | None = chz.field(
        default=None, doc="devices that decode; none: their share, or the only one, shared"
    )
    rollout_share: float | Literal["auto"] | None = chz.field(
        default=None,
        doc="share of several devices that decode, such as 0.5; auto: what a few trial steps "
        "show to be balanced, each device "
        "keeping its number of slots; none: all that do not train, or 0.75 (the paper's split)",
    )
    train_devices: int | None = chz.field(
        default=None, doc="devices that train; none: the rest, or the only one, shared"
    )
    train_fsdp: int | None = chz.field(
        default=None,
        doc=(
            "train mesh: shards of parameters and batch; none: all that expert, context and "
            "tensor leave"
        ),
    )
    train_expert: int = chz.field(
        default=1,
        doc=(
            "train mesh: shards of experts, which cut batch and all other parameters as "
            "train_fsdp does"
        ),
    )
    train_context: int = chz.field(
        default=1,
        doc=(
            "train mesh: shards of a row's tokens, for rows too long for one device; times "
            "tensor it divides the heads"
        ),
    )
    train_tensor: int = chz.field(default=1, doc="train mesh: shards of heads, MLP and vocabulary")
    rollout_tensor: int = chz.field(
        default=1, doc="rollout mesh: shards of heads, MLP and vocabulary; the rest shards slots"
    )
    engines: int = chz.field(
        default=1,
        doc=(
            "decode engines, each with an equal share of rollout devices and slots; they take "
            "new weights one after another"
        ),
    )
    simulated_devices: int | None = chz.field(
        default=None, doc="CPU only: pretend to have this many devices"
    )
