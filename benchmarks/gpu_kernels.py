r"""Registers, spills and shared memory of the project's GPU kernels, on GPUs that are not there.

    XLA_FLAGS='--xla_dump_to=FOLDER --xla_gpu_autotune_level=0' \
        python benchmarks/gpu_kernels.py [--only=TEXT]

Needs jax's CUDA plugin and ptxas (extra `gpu`) and jax 0.10: later releases of XLA do not write the
PTX of these kernels. Compiles the kernels for A100 (sm_80), H100 (sm_90) and B200 (sm_100): of
paged attention with bfloat16 and int8 KV caches, the head sizes of published policies and groups of
1 to 8 query heads, of packed attention, forward and backward, for each head size and with a window,
and of products of experts with their gradients. XLA writes their PTX to FOLDER (an empty one), and
ptxas says what they need. Figures are compiled, not measured. Appends a row for each GPU to
results/gpu_kernels.jsonl.

Expected: no kernel spills registers, but those of the gradients at heads of 128 for A100 and H100,
at most 28 bytes. A second of one CPU core for each case of paged attention and of experts, and five
of packed attention.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from collections.abc import Iterator
from functools import partial
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
from jaxtyping import Array
from results import append

from areal_jax.models.attention import packed_attention
from areal_jax.models.gpu_grouped_products import gpu_grouped_gradient, gpu_grouped_product
from areal_jax.models.paged_attention import choose_paged_kernel
from areal_jax.models.paged_kernels import gpu_paged_attention
from areal_jax.parallel.topologies import compile_only_devices

GPUS = ("a100", "h100", "b200")
HEAD_SIZES, GROUPS, PAGE_TOKENS = (64, 80, 96, 128), (1, 2, 4, 8), 16
PACKED_HEAD_SIZES, WINDOW = (64, 128, 256), 1024
NUM_EXPERTS, WIDTH, INNER = 32, 2048, 768

KERNELS = r"(p\w+_attention|grouped_)"
"""Beginnings of the names of kernels."""

Kernels = dict[str, dict[str, int]]
"""What kernels need, by name."""


class Case(NamedTuple):
    """Kernels to compile."""

    gpu: str
    dtype: str
    head_dim: int
    group: int
    window: int | None = None
    is_packed: bool = False
    block: int | None = None
    """Rows of a block of experts; None: the case is one of attention."""

    @property
    def text(self) -> str:
        if self.block is not None:
            return f"{self.gpu}, experts, matrices {self.dtype}, blocks of {self.block} rows"
        if self.is_packed:
            return f"{self.gpu}, packed, head {self.head_dim}, window {self.window}"
        return f"{self.gpu}, KV {self.dtype}, head {self.head_dim}, group {self.group}"


def cases() -> Iterator[Case]:
    for gpu in GPUS:
        for head_dim in HEAD_SIZES:
            yield from (Case(gpu, "bfloat16", head_dim, group) for group in GROUPS)
            yield Case(gpu, "int8", head_dim, 8)
        for head_dim in PACKED_HEAD_SIZES:
            for window in (None, WINDOW):
                yield Case(gpu, "bfloat16", head_dim, 4, window, is_packed=True)
        yield from (Case(gpu, "bfloat16", 0, 1, block=block) for block in (16, 64, 128))
        yield Case(gpu, "int8", 0, 1, block=16)


def compile_kernels(case: Case) -> None:
    """Compile the kernel of paged attention for 64 rows of up to 4096 tokens with four key-value
    heads, those of packed attention for a row of 8192 tokens with two, or those of experts, by the
    widths of Qwen3-30B-A3B.
    """
    mesh = Mesh(np.array(compile_only_devices(f"{case.gpu}:1")), "x")
    everywhere = NamedSharding(mesh, PartitionSpec())

    def shape(dtype: str, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=everywhere)

    if (block := case.block) is not None:
        x, y = (shape("bfloat16", 64 * block, size) for size in (WIDTH, INNER))
        w, sizes = shape(case.dtype, NUM_EXPERTS, WIDTH, INNER), shape("int32", NUM_EXPERTS)

        def products(x: Array, y: Array, w: Array, sizes: Array) -> tuple[Array, ...]:
            product = partial(gpu_grouped_product, w=w, sizes=sizes, block=block)
            found = (product(x), product(y, is_transposed=True))
            if case.dtype != "bfloat16":
                return found
            return *found, gpu_grouped_gradient(x, y, sizes, block, jnp.float32)

        jax.jit(products).lower(x, y, w, sizes).compile()
        return
    if case.is_packed:
        heads = (2 * case.group, 2, 2)
        qkv = [shape(case.dtype, 1, 8192, each, case.head_dim) for each in heads]

        def loss(q: Array, k: Array, v: Array, segment_ids: Array) -> Array:
            attend = packed_attention(segment_ids, "gpu")
            return attend(q, k, v, None, case.window)[0].astype(jnp.float32).sum()

        jax.jit(jax.grad(loss, (0, 1, 2))).lower(*qkv, shape("int32", 1, 8192)).compile()
        return
    assert choose_paged_kernel("gpu", case.head_dim, PAGE_TOKENS) == "gpu"
    rows, heads, pages = 64, 4, 4096 // PAGE_TOKENS
    page = heads, rows * pages, PAGE_TOKENS
    keys = shape(case.dtype, *page, case.head_dim)
    scales = None if case.dtype == "bfloat16" else shape("float32", *page)
    jax.jit(gpu_paged_attention).lower(
        *(shape("bfloat16", rows, heads * case.group, case.head_dim), keys, keys, scales, scales),
        *(shape("int32", rows, pages), shape("int32", rows)),
    ).compile()


def read_resources(folder: Path) -> Kernels:
    """Return what each kernel needs by ptxas and XLA: registers of a thread, bytes of spills, and
    bytes of shared memory of a block.
    """
    found = find_spec("nvidia")
    roots = (found and found.submodule_search_locations) or []
    ptxas = next(path for root in roots for path in Path(root).glob("*/bin/ptxas"))
    (launches,) = (path.read_text() for path in folder.glob("*thunk_sequence.txt"))

    def number(pattern: str, text: str) -> int:
        (match,) = set(re.findall(pattern, text))
        return int(match)

    kernels = Kernels()
    for source in folder.glob("*.ptx"):
        text = source.read_text()
        if not re.search(rf"\.entry {KERNELS}", text):
            continue
        (target,) = re.findall(r"^\.target (\w+)", text, re.M)
        command = [ptxas, "-v", f"-arch={target}", source, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        # ptxas speaks of one kernel after the other.
        for said in done.stderr.split("Compiling entry function")[1:]:
            name = re.findall(r"'(\w+)'", said)[0]
            if re.match(KERNELS, name):
                kernels[name] = {
                    "registers": number(r"Used (\d+) registers", said),
                    "spilled_bytes": number(r"(\d+) bytes spill stores", said),
                    "shared_bytes": number(rf"\b{name} .* shared_memory: (\d+)", launches),
                }
    return kernels


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
    found: dict[str, dict[str, Kernels]] = {}
    for case in cases():
        if only in case.text:
            for path in folder.glob("module_*"):
                path.unlink()
            compile_kernels(case)
            needs = read_resources(folder)
            found.setdefault(case.gpu, {})[case.text] = needs
            print(case.text, needs, flush=True)
    for gpu, kernels in found.items():
        append("gpu_kernels", {"gpu": gpu, "kernels": kernels})


if __name__ == "__main__":
    main()
