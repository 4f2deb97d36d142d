r"""Registers, spills and shared memory of the GPU kernel of paged attention, for GPUs that are not
there.

    XLA_FLAGS='--xla_dump_to=FOLDER --xla_gpu_autotune_level=0' \
        python benchmarks/gpu_kernels.py [--only=TEXT]

Needs jax's CUDA plugin and ptxas (extra `gpu`). Compiles the kernel for A100 (sm_80), H100 (sm_90)
and B200 (sm_100) with bfloat16 and int8 KV caches, the head sizes of published policies and groups
of 1 to 8 query heads; XLA writes its PTX to FOLDER (an empty one), and ptxas says what it
needs. Figures are compiled, not measured. Appends a row for each GPU to results/gpu_kernels.jsonl.

Expected: no kernel spills registers. A second of one CPU core for each case.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from areal_jax.cluster.environment import COMPILE_ONLY, set_variables

if __name__ == "__main__":
    # jax reads its flags when it is first imported.
    set_variables(COMPILE_ONLY, "jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from results import append

from areal_jax.models.paged_attention import choose_paged_kernel
from areal_jax.models.paged_kernels import gpu_paged_attention
from areal_jax.parallel.topologies import compile_only_devices

GPUS = ("a100", "h100", "b200")
HEAD_SIZES, GROUPS, PAGE_TOKENS = (64, 80, 96, 128), (1, 2, 4, 8), 16


class Case(NamedTuple):
    """A kernel to compile."""

    gpu: str
    dtype: str
    head_dim: int
    group: int

    @property
    def text(self) -> str:
        return f"{self.gpu}, KV {self.dtype}, head {self.head_dim}, group {self.group}"


def cases() -> Iterator[Case]:
    for gpu in GPUS:
        for head_dim in HEAD_SIZES:
            yield from (Case(gpu, "bfloat16", head_dim, group) for group in GROUPS)
            yield Case(gpu, "int8", head_dim, 8)


def compile_kernel(case: Case) -> None:
    """Compile the kernel, for 64 rows of up to 4096 tokens with four key-value heads."""
    assert choose_paged_kernel("gpu", case.head_dim, PAGE_TOKENS) == "gpu"
    mesh = Mesh(np.array(compile_only_devices(f"{case.gpu}:1")), "x")
    everywhere = NamedSharding(mesh, PartitionSpec())
    rows, heads, pages = 64, 4, 4096 // PAGE_TOKENS

    def shape(dtype: str, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=everywhere)

    page = heads, rows * pages, PAGE_TOKENS
    keys = shape(case.dtype, *page, case.head_dim)
    scales = None if case.dtype == "bfloat16" else shape("float32", *page)
    jax.jit(gpu_paged_attention).lower(
        *(shape("bfloat16", rows, heads * case.group, case.head_dim), keys, keys, scales, scales),
        *(shape("int32", rows, pages), shape("int32", rows)),
    ).compile()


def read_resources(folder: Path) -> dict[str, int]:
    """Return what the kernel needs by ptxas and XLA: registers of a thread, bytes of spills, and
    bytes of shared memory of a block.
    """
    (source,) = (
        path for path in folder.glob("*.ptx") if ".entry paged_attention(" in path.read_text()
    )
    (target,) = re.findall(r"^\.target (\w+)", source.read_text(), re.M)
    found = find_spec("nvidia")
    roots = (found and found.submodule_search_locations) or []
    ptxas = next(path for root in roots for path in Path(root).glob("*/bin/ptxas"))
    command = [ptxas, "-v", f"-arch={target}", source, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    (launches,) = (path.read_text() for path in folder.glob("*thunk_sequence.txt"))

    def number(pattern: str, text: str) -> int:
        (match,) = re.findall(pattern, text)
        return int(match)

    return {
        "registers": number(r"Used (\d+) registers", said),
        "spilled_bytes": number(r"(\d+) bytes spill stores", said),
        "shared_bytes": number(r"paged_attention .* shared_memory: (\d+)", launches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of the text of a case")
    only = parser.parse_args().only
    dump = re.search(r"--xla_dump_to=(\S+)", os.environ.get("XLA_FLAGS", ""))
    if dump is None:
        parser.error("expected XLA_FLAGS with --xla_dump_to=FOLDER, found none")
    folder = Path(dump[1])
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for case in cases():
        if only in case.text:
            for path in folder.glob("module_*"):
                path.unlink()
            compile_kernel(case)
            needs = read_resources(folder)
            found.setdefault(case.gpu, {})[case.text] = needs
            print(case.text, needs, flush=True)
    for gpu, kernels in found.items():
        append("gpu_kernels", {"gpu": gpu, "kernels": kernels})


if __name__ == "__main__":
    main()
