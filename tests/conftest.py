"""Every test sees eight simulated CPU devices, and a thread pool large enough that two meshes of them run at once."""

import os

# Set before jax loads: simulated devices deadlock in XLA's collectives when the pool has fewer threads than they need.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["NPROC"] = "16"
