"""Train a policy: `python -m areal_jax.train`."""

from areal_jax.cli.train import main
from areal_jax.cluster.signals import exit_process

if __name__ == "__main__":
    exit_process(main())
