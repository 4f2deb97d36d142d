"""Names of slices and nodes for which programs can be compiled."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from areal_jax.parallel.topologies import compile_only_devices


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h200:9", "nodes of 1 to 8 GPUs, found h200:9; .* 2xh200:8"),
        ("0xh200:8", "nodes of 1 to 8 GPUs, found 0xh200:8"),
        ("h300:8", "one of a100, h100, h200, b200, found 'h300'"),
        ("h200", "GPU nodes such as h200:8 .*, found 'h200'"),
        ("v5e", "TPU slice such as v5e:4x4, .*, found 'v5e'"),
        ("v4:2x2x1", "TPU slice such as v5e:4x4, .*, found 'v4:2x2x1'"),
        ("v6e:4x4x4", "TPU slice such as v5e:4x4, .*, found 'v6e:4x4x4'"),
        ("v6e:0x4", "found 'v6e:0x4'"),
        ("v5p:3x3x3", "of sizes that are 1 or even, .*, found 'v5p:3x3x3'"),
        ("0xv5p:2x2x1", "found '0xv5p:2x2x1'"),
    ],
)
def test_topologies_that_do_not_exist_are_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compile_only_devices(name)


@pytest.mark.skipif(find_spec("jax_plugins") is not None, reason="the compiler is installed")
def test_gpus_without_their_compiler_say_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"pip install 'areal-jax\[gpu\]'"):
        compile_only_devices("2xh200:8")
