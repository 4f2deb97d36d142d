"""What makers say of their devices, as data: peaks, which nothing reaches (`costs.Reached` says
what is)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator of a data sheet."""

    memory_bytes: float
    bytes_per_s: float
    """To and from its own memory."""
    flops_per_s: float
    """Of dense products in bfloat16."""
    link_bytes_per_s: float
    """To its neighbours in a host or slice, one way."""
    network_bytes_per_s: float
    """Its share of its host's way to other hosts."""
    per_host: int
    """Devices that the fast links join; an engine is cut over no more."""


DEVICES: dict[str, Device] = {
    "A100": Device(80e9, 2.039e12, 312e12, 300e9, 25e9, 8),
    "H100": Device(80e9, 3.35e12, 989e12, 450e9, 50e9, 8),
    "H200": Device(141e9, 4.8e12, 989e12, 450e9, 50e9, 8),
    # An H100 with narrower links; the paper's hosts have 3.2 Tb/s of network for 8 of them.
    "H800": Device(80e9, 3.35e12, 989e12, 200e9, 50e9, 8),
    "TPU v4": Device(32e9, 1.228e12, 275e12, 150e9, 6.25e9, 64),
    "TPU v5e": Device(16e9, 0.819e12, 197e12, 100e9, 6.25e9, 8),
    "TPU v5p": Device(95e9, 2.765e12, 459e12, 300e9, 12.5e9, 64),
    "TPU v6e": Device(32e9, 1.64e12, 918e12, 224e9, 12.5e9, 8),
}


def known_device(name: str) -> Device:
    """The device called `name`, in any case. ValueError lists the names where it is none of
    them."""
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise ValueError(f"no device called {name!r} is known; known are {', '.join(DEVICES)}")
