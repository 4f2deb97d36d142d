"""Serve Tinker's API: `python -m areal_jax.tinker`."""

from areal_jax.cli.tinker import main
from areal_jax.cluster.signals import exit_process

if __name__ == "__main__":
    exit_process(main())
