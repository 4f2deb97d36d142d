"""Train a policy: `python -m areal_jax.train`."""

from areal_jax.cli.train import main
from areal_jax.cluster.signals import leave

if __name__ == "__main__":
    leave(main())
