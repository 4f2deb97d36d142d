"""Settings of the meshes: which devices train, which decode, and their shards."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import FRACTION, POSITIVE

GPU_MEMORY_SHARE = 0.92
"""Share of a GPU's memory that the run allocates (XLA_PYTHON_CLIENT_MEM_FRACTION; jax's default is
0.75). The CUDA context, the code of kernels and NCCL's buffers need the rest."""


@chz.chz
class PlacementConfig:
    """Split of the devices into a train mesh and a rollout mesh."""

    rollout_devices: int | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="number of rollout devices; none: by rollout_share; a single device is shared",
    )
    rollout_share: float | Literal["auto"] | None = chz.field(
        validator=FRACTION,
        default=None,
        doc="share of rollout devices, such as 0.5; auto: balanced by a few trial steps, with "
        "constant slots per device; none: all devices that do not train, or 0.75 (the paper's "
        "split)",
    )
    train_devices: int | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="number of train devices; none: the others; a single device is shared",
    )
    train_fsdp: int | None = chz.field(
        validator=POSITIVE,
        default=None,
        doc="train mesh: shards of parameters and batch (FSDP); other devices repeat the "
        "parameters; none: at most 16 of a TPU slice, all of a node of GPUs, more where the memory "
        "forecast does not fit",
    )
    train_expert: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="train mesh: shards of experts; for batch and other parameters like train_fsdp",
    )
    train_context: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="train mesh: shards of the tokens of a row, for rows too long for one device; the "
        "number of heads must be divisible by context x tensor",
    )
    train_tensor: int = chz.field(
        validator=POSITIVE, default=1, doc="train mesh: shards of heads, MLP and vocabulary"
    )
    rollout_tensor: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="rollout mesh: shards of heads, MLP and vocabulary; other devices shard slots",
    )
    engines: int = chz.field(
        validator=POSITIVE,
        default=1,
        doc="number of decode engines with equal shares of rollout devices and slots; updates "
        "are rolling; a single CPU device is shared, on which each engine keeps one core busy",
    )
    adaptive: bool = chz.field(
        default=False,
        doc="move the devices of whole engines (launch=Ray: of trainer hosts) between training "
        "and decoding during the run, when measured stage times forecast a gain",
    )
    simulated_devices: int | None = chz.field(
        validator=POSITIVE, default=None, doc="number of simulated devices, on CPU only"
    )
