"""Compile-only devices: XLA's own compilers for TPUs and their networks, on a machine without
them."""

from __future__ import annotations

import re
from importlib.util import find_spec

import jax
from jax.experimental.topologies import get_topology_desc

_FORM = re.compile(r"(?:(\d+)x)?(v\d[a-z]*:\d+(?:x\d+)+)")


def compile_only_devices(topology: str) -> list[jax.Device]:
    """Return the devices of TPU slices, for which programs can be compiled and not run.

    Args:
        topology: Slice as in `v5p:8x8x8`, or several of them as in `2xv5p:4x4x4`.

    Raises:
        ValueError: There is no such slice, or libtpu, which has the compiler, is not installed.
    """
    if not (found := _FORM.fullmatch(topology)):
        raise ValueError(
            f"expected a TPU slice such as v5e:4x4, v6e:4x4, v5p:4x4x8 or 2xv5p:4x4x4, found "
            f"{topology!r}"
        )
    if find_spec("libtpu") is None:
        raise ValueError(
            "compiling for TPUs needs libtpu: pip install 'areal-jax[tpu]', in an environment of "
            "its own if this one is for another accelerator"
        )
    num_slices = int(found[1] or 1)
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        described = get_topology_desc(platform="tpu", topology_name=found[2], **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"expected a TPU slice, found {topology}: {error}") from None
    return list(described.devices)
