"""Evaluate a policy: `python -m areal_jax.evaluate`."""

from areal_jax.cli.evaluate import main
from areal_jax.cluster.signals import exit_process

if __name__ == "__main__":
    exit_process(main())
