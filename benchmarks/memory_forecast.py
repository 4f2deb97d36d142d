"""Forecast of the memory of training (`predicted_bytes`) against XLA's own TPU and GPU compilers.

    python benchmarks/memory_forecast.py --only=topology=v
    XLA_FLAGS=--xla_gpu_autotune_level=0 python benchmarks/memory_forecast.py --only=00:

Needs libtpu or jax's CUDA plugin (extras `tpu`, `gpu`) and no device: the programs `accumulate`
and `apply` of each configuration are compiled, a whole model with all its layers, for devices that
are not there. The need of a configuration is the larger one of two: the peak of `accumulate` by
XLA, which includes parameters and gradients, with the optimizer state that is held beside it, and
the peak of `apply`. Figures are compiled, not measured. Appends a row for each configuration to
results/memory_forecast.jsonl.

Expected: the forecast is 0 to 10 % above the need at all 50 points for TPUs, which take some
minutes of one CPU core each, and at the 31 for GPUs, which take half a minute. For TPUs, 49 are
stored with jax 0.10 and 18 with jax 0.12; most of these rows hold peaks that were computed from the
buffer assignment that XLA:TPU writes before it generates code, without waiting for the code. The
last row of a point with a version of jax is that of the newest program.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

from areal_jax.cluster.environment import COMPILE_ONLY, set_variables

if __name__ == "__main__":
    # jax reads its flags when it is first imported.
    set_variables(COMPILE_ONLY, "jax")

import jax
import jax.numpy as jnp
from results import append

from areal_jax.models import lora
from areal_jax.models.config import LoRA, Remat
from areal_jax.models.decoder import Policy
from areal_jax.models.known import known_shape
from areal_jax.parallel.compilation import peak_bytes
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import abstract, bytes_per_device
from areal_jax.parallel.topologies import compile_only_devices
from areal_jax.run.compiled_programs import exceeded_memory
from areal_jax.trainer.config import OptimizerConfig, TrainerConfig
from areal_jax.trainer.memory_estimate import predicted_bytes
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.state import frozen, frozen_shardings, trained
from areal_jax.trainer.step import Learner, TrainableModel

NAME = "memory_forecast"


@dataclass(frozen=True)
class Point:
    """A configuration. Axes are those of the train mesh; the rest of the devices are `data`."""

    model: str
    topology: str
    row_tokens: int
    remat: Remat
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    rows: int = 1
    chunk_tokens: int = 2048
    rank: int = 0
    """Of an adapter of all matrices that may have one, also those of experts; 0: none."""
    offload: bool = False
    """Whether the optimizer state is in the host's memory."""

    @property
    def text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


SMALL, MEDIUM, LARGE = "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-32b"
MIXTURE = "qwen3-30b-a3b"
GRID = (
    Point(SMALL, "v5e:2x2", 8192, "attention", fsdp=4),
    Point(SMALL, "v5p:2x2x1", 8192, "attention", fsdp=4),
    Point(SMALL, "v5p:2x2x1", 8192, "attention"),
    Point(SMALL, "v5p:2x2x1", 8192, "dots", fsdp=4),
    Point(SMALL, "v5p:2x2x1", 8192, "full", fsdp=2, tensor=2),
    Point(SMALL, "v5p:2x2x1", 8192, "full"),
    Point(SMALL, "v5p:2x2x1", 8192, "full", fsdp=4),
    Point(SMALL, "v5p:2x2x1", 8192, "full", fsdp=2),
    Point(SMALL, "v5p:2x2x1", 8192, "full", fsdp=4, offload=True),
    Point(SMALL, "v5p:2x2x1", 8192, "full", fsdp=4, rank=16),
    Point(SMALL, "v5p:2x2x1", 8192, "full", fsdp=4, rows=2),
    Point(SMALL, "v5p:2x2x1", 32768, "attention", fsdp=2, context=2),
    Point(SMALL, "v5p:2x2x1", 32768, "full", fsdp=4),
    Point(SMALL, "v6e:2x2", 8192, "none", fsdp=2, tensor=2),
    Point(SMALL, "v6e:2x2", 32768, "dots", context=4),
    Point(MEDIUM, "v5e:4x4", 8192, "dots", fsdp=16),
    Point(MEDIUM, "v5p:2x2x1", 8192, "attention", fsdp=2, context=2),
    Point(MEDIUM, "v5p:2x2x1", 8192, "attention", fsdp=4, rank=16),
    Point(MEDIUM, "v5p:2x2x1", 8192, "dots", fsdp=4, rank=32),
    Point(MEDIUM, "v5p:2x2x1", 8192, "full", fsdp=4),
    Point(MEDIUM, "v5p:2x2x1", 8192, "full", fsdp=4, offload=True),
    Point(MEDIUM, "v5p:2x2x1", 8192, "none", fsdp=2, tensor=2, rank=16),
    Point(MEDIUM, "v5p:2x2x2", 8192, "dots", fsdp=4, tensor=2),
    Point(MEDIUM, "v5p:2x2x2", 8192, "full", fsdp=8),
    Point(MEDIUM, "v5p:2x2x2", 8192, "none", fsdp=8),
    Point(MEDIUM, "v5p:2x2x2", 32768, "attention", fsdp=8),
    Point(MEDIUM, "v5p:2x2x2", 32768, "attention", fsdp=4, tensor=2, offload=True),
    Point(MEDIUM, "v5p:2x2x2", 32768, "dots", fsdp=8, offload=True),
    Point(MEDIUM, "v5p:2x2x2", 32768, "full", fsdp=8),
    Point(MEDIUM, "v5p:2x2x2", 32768, "full", fsdp=8, rank=16),
    Point(MEDIUM, "v6e:2x4", 8192, "full", fsdp=4, tensor=2),
    Point(LARGE, "v5p:2x2x4", 8192, "attention", fsdp=16, rank=32),
    Point(LARGE, "v5p:2x2x4", 8192, "dots", fsdp=4, tensor=4),
    Point(LARGE, "v5p:2x2x4", 32768, "attention", fsdp=8, context=2),
    Point(LARGE, "v5p:2x2x4", 32768, "full", fsdp=16, rank=16),
    Point(LARGE, "v5p:2x2x4", 32768, "full", fsdp=4, context=4),
    Point(LARGE, "v5p:2x2x4", 32768, "full", fsdp=8, tensor=2),
    Point(LARGE, "v6e:4x4", 8192, "attention", fsdp=8, tensor=2),
    Point(MIXTURE, "v5p:2x2x4", 8192, "attention", fsdp=2, expert=8),
    Point(MIXTURE, "v5p:2x2x4", 8192, "attention", fsdp=8, context=2),
    Point(MIXTURE, "v5p:2x2x4", 8192, "dots", fsdp=16),
    Point(MIXTURE, "v5p:2x2x4", 8192, "full", fsdp=4, tensor=2, expert=2),
    Point(MIXTURE, "v5p:2x2x4", 8192, "full", fsdp=4, expert=4),
    Point(MIXTURE, "v5p:2x2x4", 32768, "attention", fsdp=2, expert=8),
    Point(MIXTURE, "v5p:2x2x4", 32768, "full", fsdp=16),
    Point(MIXTURE, "v5p:2x2x4", 32768, "full", fsdp=4, tensor=2, expert=2),
    Point(MIXTURE, "v6e:4x4", 32768, "full", fsdp=4, context=2, expert=2),
    Point(MIXTURE, "v6e:4x4", 8192, "full", fsdp=4, tensor=2, expert=2),
    Point(MIXTURE, "v5p:2x2x1", 8192, "full", fsdp=2, expert=2, rank=16),
    Point(MIXTURE, "v5p:2x2x1", 8192, "attention", fsdp=4, rank=16),
    Point(SMALL, "h100:1", 8192, "attention"),
    Point(SMALL, "h100:1", 32768, "full"),
    Point(SMALL, "h100:1", 8192, "full", rank=16),
    Point(SMALL, "h100:4", 8192, "attention"),
    Point(SMALL, "h100:4", 8192, "attention", fsdp=4),
    Point(SMALL, "h100:4", 8192, "dots", fsdp=4),
    Point(SMALL, "h100:4", 8192, "full", fsdp=2, tensor=2),
    Point(SMALL, "h100:4", 8192, "full", fsdp=4, rank=16),
    Point(SMALL, "h100:4", 8192, "none", fsdp=2, tensor=2),
    Point(SMALL, "h100:4", 32768, "attention", fsdp=4),
    Point(SMALL, "h100:4", 32768, "dots", context=4),
    Point(SMALL, "2xh200:8", 32768, "attention", fsdp=8),
    Point(SMALL, "b200:4", 8192, "attention", fsdp=4),
    Point(MEDIUM, "h200:8", 8192, "full", fsdp=8),
    Point(MEDIUM, "h200:8", 16384, "attention", fsdp=8),
    Point(MEDIUM, "h200:8", 32768, "attention", fsdp=8),
    Point(MEDIUM, "h200:8", 32768, "full", fsdp=4, tensor=2),
    Point(MEDIUM, "h200:8", 32768, "full", fsdp=8, rank=16),
    Point(MEDIUM, "2xh200:8", 8192, "attention", fsdp=8),
    Point(MEDIUM, "2xh200:8", 8192, "attention", fsdp=8, rank=16),
    Point(MEDIUM, "2xh200:8", 32768, "attention", fsdp=8),
    Point(LARGE, "2xh200:8", 8192, "dots", fsdp=8, tensor=2),
    Point(LARGE, "2xh200:8", 32768, "full", fsdp=16),
    Point(MIXTURE, "2xh200:8", 8192, "attention", fsdp=16),
    Point(MIXTURE, "2xh200:8", 8192, "full", fsdp=4, expert=4),
    Point(MIXTURE, "2xh200:8", 32768, "full", fsdp=2, expert=8),
    Point(MIXTURE, "h200:4", 8192, "full", fsdp=2, expert=2, rank=16),
    Point(MIXTURE, "h200:4", 8192, "attention", fsdp=4, rank=16),
    Point(MIXTURE, "h200:8", 32768, "full", fsdp=8, rank=16),
    Point(MIXTURE, "2xh200:8", 8192, "full", fsdp=4, expert=4, rank=16),
    Point(MIXTURE, "2xh200:8", 32768, "full", fsdp=2, expert=8, rank=16),
)


def measure(point: Point) -> dict[str, object]:
    """Compile a configuration, and compare."""
    policy = Policy(known_shape(point.model))
    if point.rank:
        adapter = LoRA(rank=point.rank, targets=lora.find_targets(policy))
        policy = Policy(policy.config, adapter)
    placement = PlacementConfig(
        train_fsdp=point.fsdp,
        train_context=point.context,
        train_tensor=point.tensor,
        train_expert=point.expert,
    )
    mesh = make_train_mesh(placement, compile_only_devices(point.topology))
    config = TrainerConfig(
        rows_per_micro_batch=point.rows,
        logp_chunk_tokens=point.chunk_tokens,
        remat=point.remat,
        optimizer=OptimizerConfig(offload=point.offload),
    )
    dtype = jnp.bfloat16
    of_model = trained(policy).abstract
    forecast = predicted_bytes(config, policy, mesh, dtype, row_tokens=point.row_tokens)
    model = TrainableModel(
        policy=policy,
        params=of_model,
        base=abstract(frozen(policy, dtype), frozen_shardings(policy, mesh)),
        mesh=mesh,
        compute_dtype=dtype,
        row_tokens=point.row_tokens,
    )
    learner = policy_learner(config, model, num_updates=10)
    start_s = time.perf_counter()
    held = bytes_of(learner.opt_state)
    peaks = {name: peak_of(learner, name) for name in ("accumulate", "apply")}
    need = max(peaks["accumulate"] + held, peaks["apply"])
    return {
        **asdict(point),
        "mesh": dict(mesh.shape),
        **{f"{name}_peak": peak for name, peak in peaks.items()},
        "optimizer_bytes": held,
        "need_bytes": need,
        "forecast_bytes": dict(forecast),
        "ratio": sum(forecast.values()) / need,
        "compile_s": time.perf_counter() - start_s,
    }


def peak_of(learner: Learner, program: str) -> int:
    """Return the peak of a program; where it does not fit, the one that the compiler's message
    has, of three or more digits.
    """
    try:
        return peak_bytes(learner.programs.compiled(program))
    except jax.errors.JaxRuntimeError as error:
        used = re.match(r"(\d[\d.]*)G of", exceeded_memory(error) or "")
        if used is None:
            raise
        return int(float(used[1]) * 2**30)


def bytes_of(tree: Any) -> int:
    """Return the bytes of arrays in the device's memory."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind != "pinned_host"]
    return bytes_per_device(leaves, [leaf.sharding for leaf in leaves])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the text of a configuration")
    only = parser.parse_args().only
    for point in GRID:
        if only in point.text:
            append(NAME, measure(point))


if __name__ == "__main__":
    main()
