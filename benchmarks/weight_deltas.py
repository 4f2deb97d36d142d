"""Do weight updates that carry only what has changed pay? Share of weights that a step changes.

    python benchmarks/weight_deltas.py FOLDER [--steps=8]

Trains the embedded policy by `aime` (Adam, two updates a step) at several constant learning rates,
with a checkpoint of every version, and compares the weights of consecutive versions bit by bit: in
float32, as the trainer holds them, and rounded to bfloat16, as engines receive them with
`policy.compute_dtype=bfloat16`. Bytes of an update as a delta: the smaller of a bitmap and of
32-bit positions, and the changed values. `encode_s` and `copy_s` are seconds of one core to find
and gather the changes of the bfloat16 weights, and to copy all of them; both for as many bytes as
the embedded policy has, and for 256 MiB of a large matrix.

Appends to results/weight_deltas.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp
from results import append

import areal_jax
from areal_jax.checkpoint.folders import find_checkpoints

LEARNING_RATES = (3e-6, 1e-5, 3e-5, 4e-4)
LARGE = 256 * 2**20
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    command = parser.parse_args()
    for rate in LEARNING_RATES:
        experiment = areal_jax.load_experiment(
            "aime",
            f"num_steps={command.steps}",
            "evaluation.every_steps=0",
            "checkpoint.every_steps=1",
            f"checkpoint.keep={command.steps}",
            f"trainer.optimizer.learning_rate={rate}",
            "trainer.optimizer.schedule=constant",
            "trainer.optimizer.warmup_fraction=0",
        )
        folder = command.folder / f"{rate:g}"
        areal_jax.train(experiment, folder)
        # Checkpoints that were saved during training: the first is of version 1.
        found = sorted(find_checkpoints(folder / "checkpoints").items())
        versions = [read_weights(path) for _, path in found]
        row: dict[str, object] = {"learning_rate": rate, "compared_steps": len(versions) - 1}
        for name, dtype in (("float32", jnp.float32), ("bfloat16", jnp.bfloat16)):
            shares = [share_changed(old, new, np.dtype(dtype)) for old, new in pairwise(versions)]
            size = np.dtype(dtype).itemsize
            row[name] = {
                "share_changed": fmean(shares),
                "share_changed_max": max(shares),
                "delta_share_of_bytes": fmean(delta_bytes(share, size) / size for share in shares),
            }
        row["num_weights"] = sum(leaf.size for leaf in versions[0].values())
        row["large_matrix"] = measure_encoding(fmean(shares))
        append("weight_deltas", row)


def read_weights(checkpoint: Path) -> Mapping[str, np.ndarray]:
    state = ocp.load(str(checkpoint))["train_state"]
    return {name: np.asarray(leaf) for name, leaf in state.items() if name.startswith("params.")}


def share_changed(
    old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray], dtype: np.dtype
) -> float:
    changed = sum(
        int(np.count_nonzero(bits(old[name].astype(dtype)) != bits(new[name].astype(dtype))))
        for name in old
    )
    return changed / sum(leaf.size for leaf in old.values())


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint16 if values.itemsize == 2 else np.uint32)


def delta_bytes(share: float, size: int) -> float:
    """Bytes of a delta per weight."""
    return min(1 / 8, 4 * share) + size * share


def measure_encoding(share: float) -> Mapping[str, float]:
    """Median seconds for a matrix of bfloat16, of which `share` differs, on one core."""
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, LARGE // 2, dtype=np.uint16)
    new = old ^ (random.random(old.size, np.float32) < share)
    into = np.empty_like(new)

    def encode() -> None:
        mask = old != new
        np.packbits(mask)
        new[mask]

    def copy() -> None:
        np.copyto(into, new)

    def seconds(work: Callable[[], None]) -> float:
        found = []
        for _ in range(ROUNDS):
            start_s = time.thread_time()
            work()
            found.append(time.thread_time() - start_s)
        return median(found)

    return {"megabytes": LARGE / 2**20, "encode_s": seconds(encode), "copy_s": seconds(copy)}


if __name__ == "__main__":
    main()
