"""Forecast of the memory of training (`predicted_bytes`) against XLA's own TPU compiler.

    python benchmarks/memory_forecast.py [--only=TEXT]

Needs libtpu (extra `tpu`) and no TPU: the program `accumulate` of each configuration is compiled, a
whole model with all its layers, for devices that are not there. The need of a configuration is the
program's peak by XLA, which includes parameters and gradients, and the optimizer state that is held
beside it; `apply` needs less. Figures are compiled, not measured.
Appends a row for each configuration to results/memory_forecast.jsonl.

Expected: the forecast of dense policies is 0 to 10 % above the need. Some minutes of one CPU core
for each configuration.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass

from areal_jax.cluster.environment import COMPILE_ONLY, set_variables

if __name__ == "__main__":
    # jax reads its flags when it is first imported.
    set_variables(COMPILE_ONLY, "jax")

import jax
import jax.numpy as jnp
from results import append

from areal_jax.models.config import LoRA, Remat
from areal_jax.models.decoder import Policy
from areal_jax.models.known import known_shape
from areal_jax.parallel.compilation import peak_bytes
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.parallel.sharding import abstract, bytes_per_device
from areal_jax.parallel.topologies import compile_only_devices
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.memory_estimate import predicted_bytes
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.state import frozen, frozen_shardings, trained
from areal_jax.trainer.step import TrainableModel

NAME = "memory_forecast"


@dataclass(frozen=True)
class Point:
    """A configuration. Axes are those of the train mesh; the rest of the devices are `data`."""

    model: str
    topology: str
    row_tokens: int
    remat: Remat = "full"
    fsdp: int = 4
    context: int = 1
    tensor: int = 1
    expert: int = 1
    rows: int = 1
    chunk_tokens: int = 2048
    rank: int = 0
    """Of an adapter; 0: none."""

    @property
    def text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


SMALL, LARGE, MIXTURE = "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-30b-a3b"
CUBE = "v5p:2x2x2"
GRID = (
    Point(LARGE, CUBE, 8192, fsdp=8),
    Point(LARGE, CUBE, 32768, "attention", fsdp=8),
    Point(SMALL, "v5p:2x2x1", 32768),
    Point(SMALL, "v5p:2x2x1", 8192, fsdp=2, tensor=2),
    Point(SMALL, "v5p:2x2x1", 8192, "dots"),
    Point(SMALL, "v5p:2x2x1", 8192, fsdp=1),
    Point(SMALL, "v5p:2x2x1", 8192),
    Point(SMALL, "v5p:2x2x1", 8192, "attention"),
    Point(SMALL, "v5p:2x2x1", 8192, "none"),
    Point(SMALL, "v5p:2x2x1", 8192, rank=16),
    Point(MIXTURE, "v5p:4x4x4", 8192, fsdp=8, expert=8),
    Point("qwen2.5-32b", "v5p:4x4x4", 8192, fsdp=64),
    Point(SMALL, "v5p:2x2x1", 32768, "attention", context=2, fsdp=2),
    Point(LARGE, CUBE, 8192, fsdp=4, tensor=2),
    Point(SMALL, "v5p:2x2x1", 8192, rows=2, chunk_tokens=1024),
    Point(SMALL, "v6e:2x2", 8192),
    Point("qwen3-0.6b", "v5e:2x2", 8192, "attention"),
)


def measure(point: Point) -> dict[str, object]:
    """Compile a configuration, and compare."""
    policy = Policy(known_shape(point.model), LoRA(rank=point.rank) if point.rank else None)
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
    peak = peak_bytes(learner.programs.compiled("accumulate"))
    held = bytes_of(learner.opt_state)
    return {
        **asdict(point),
        "mesh": dict(mesh.shape),
        "peak_bytes": peak,
        "optimizer_bytes": held,
        "need_bytes": peak + held,
        "forecast_bytes": dict(forecast),
        "ratio": sum(forecast.values()) / (peak + held),
        "compile_s": time.perf_counter() - start_s,
    }


def bytes_of(tree: object) -> int:
    return bytes_per_device(tree, jax.tree.map(lambda leaf: leaf.sharding, tree))


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
