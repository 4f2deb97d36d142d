"""Plan a cluster: `python -m areal_jax.plan`."""

from areal_jax.cli.plan import main
from areal_jax.cluster.signals import leave

if __name__ == "__main__":
    leave(main())
