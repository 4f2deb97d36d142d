"""Engines with matrices in 8 bits: how far they drift from the trainer, and what they save.

    python benchmarks/quantized_weights.py FOLDER [--steps=4]
    python benchmarks/quantized_weights.py --compile=v5e:2x2    (extra `tpu`; no TPU is needed)

The first command trains the embedded policy by `aime` without staleness, so that the importance
weight proximal/behave differs from 1 by rounding alone: `log_ratio_rms` is the root mean square of
its logarithm over tokens, `sequence_ess` the effective share of the samples; means over steps.

The second one compiles `generate` of Qwen2.5-1.5B, 16 slots of 2048 tokens and 8 steps per
dispatch, on all chips with two shards of heads: bytes of the weights, and peak memory and bytes
read and written on each chip.

Appends to results/quantized_weights.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

import chz

from areal_jax.cluster.environment import prepare_compile_only
from areal_jax.parallel.config import PlacementConfig

DTYPES = ("compute", "int8", "float8_e4m3fn")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compile", metavar="TOPOLOGY")
    command = parser.parse_args()
    if command.compile:
        measure_bytes(command.compile)
    elif command.folder:
        measure_drift(command.folder, command.steps)
    else:
        parser.error("expected FOLDER or --compile=TOPOLOGY")


def measure_drift(folder: Path, num_steps: int) -> None:
    from results import append

    import areal_jax

    for dtype in DTYPES:
        experiment = areal_jax.load_experiment(
            "aime",
            f"num_steps={num_steps}",
            "evaluation.every_steps=0",
            "rollout.max_staleness=0",
            f"engine.weights_dtype={dtype}",
        )
        table = areal_jax.train(experiment, folder / dtype).metrics()
        measured = {
            name: fmean(each for each in table[f"trainer/{name}"] if each == each)
            for name in ("log_ratio_rms", "sequence_ess")
        }
        append("quantized_weights", {"weights_dtype": dtype, "num_steps": num_steps, **measured})


def measure_bytes(topology: str) -> None:
    prepare_compile_only(topology)
    import jax
    from results import append

    from areal_jax.engine.batch import SamplingMode
    from areal_jax.engine.config import EngineConfig
    from areal_jax.engine.decode import DecodeEngine
    from areal_jax.models.decoder import Policy
    from areal_jax.models.known import known_shape
    from areal_jax.parallel.compilation import compile_lowered, peak_bytes
    from areal_jax.parallel.hlo import Program
    from areal_jax.parallel.mesh import make_rollout_mesh
    from areal_jax.parallel.topologies import compile_only_devices

    policy, config = (
        Policy(known_shape("qwen2.5-1.5b")),
        EngineConfig(
            num_slots=16, max_prompt_tokens=1024, max_new_tokens=1024, steps_per_dispatch=8
        ),
    )
    mesh = make_rollout_mesh(PlacementConfig(rollout_tensor=2), compile_only_devices(topology))
    for dtype in DTYPES:
        engine = DecodeEngine(policy, mesh, chz.replace(config, weights_dtype=dtype), "bfloat16")
        # The view of length 0 is that of engines whose attention reads pages.
        compiled = compile_lowered(engine.programs.lower("generate", 0, SamplingMode.PLAIN), mesh)
        weights = jax.tree.leaves(engine.shapes.params)
        append(
            "quantized_weights",
            {
                "weights_dtype": dtype,
                "topology": topology,
                "weights_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in weights),
                "peak_bytes": peak_bytes(compiled),
                "moved_bytes": int(Program(compiled.as_text() or "").work().num_bytes),
            },
        )


if __name__ == "__main__":
    main()
