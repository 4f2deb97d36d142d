"""Data-sheet peaks of devices; `costs.Efficiency` has the shares that programs reach.

Sources: NVIDIA's data sheets of A100, H100, H200 and B200 (dense, without sparsity; NVLink one
way); cloud.google.com/tpu/docs, pages v4, v5e, v5p and v6e (ICI one way: half of what a chip has).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Data sheet of one accelerator."""

    memory_bytes: float
    bytes_per_s: float
    """Memory bandwidth."""
    flops_per_s: float
    """Dense bfloat16 products."""
    link_bytes_per_s: float
    """Bandwidth to neighbours in a host or slice, one way."""
    network_bytes_per_s: float
    """Share of the host's network bandwidth."""
    per_host: int
    """Devices joined by fast links: the largest engine."""
    kind: str = ""
    """Beginning of the name that jax gives it."""


DEVICES: dict[str, Device] = {
    "A100": Device(80e9, 2.039e12, 312e12, 300e9, 25e9, 8, "NVIDIA A100"),
    "H100": Device(80e9, 3.35e12, 989e12, 450e9, 50e9, 8, "NVIDIA H100"),
    "H200": Device(141e9, 4.8e12, 989e12, 450e9, 50e9, 8, "NVIDIA H200"),
    "B200": Device(180e9, 7.7e12, 2.25e15, 900e9, 50e9, 8, "NVIDIA B200"),
    # An H100 with narrower links; the paper's hosts have 3.2 Tb/s of network for 8 of them.
    "H800": Device(80e9, 3.35e12, 989e12, 200e9, 50e9, 8, "NVIDIA H800"),
    "TPU v4": Device(32e9, 1.228e12, 275e12, 150e9, 6.25e9, 64, "TPU v4"),
    "TPU v5e": Device(16e9, 0.819e12, 197e12, 100e9, 6.25e9, 8, "TPU v5 lite"),
    "TPU v5p": Device(95e9, 2.765e12, 459e12, 300e9, 12.5e9, 64, "TPU v5"),
    "TPU v6e": Device(32e9, 1.64e12, 918e12, 224e9, 12.5e9, 8, "TPU v6 lite"),
}


def known_device(name: str) -> Device:
    """Return the device called `name`, case-insensitively.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise ValueError(f"expected a device of {', '.join(DEVICES)}, found {name!r}")


def device_of_kind(kind: str) -> tuple[str, Device]:
    """Return name and data sheet of the device that jax calls `kind`.

    Raises:
        ValueError: the kind is unknown.
    """
    known = [
        (name, device)
        for name, device in DEVICES.items()
        if device.kind and kind.startswith(device.kind)
    ]
    if not known:
        raise ValueError(f"expected a device of {', '.join(DEVICES)}, found {kind!r}")
    return max(known, key=lambda each: len(each[1].kind))
