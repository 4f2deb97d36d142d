"""Serve a policy: `python -m areal_jax.serve`."""

from areal_jax.cli.serve import main
from areal_jax.cluster.signals import exit_process

if __name__ == "__main__":
    exit_process(main())
