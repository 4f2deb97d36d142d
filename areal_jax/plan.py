"""Plan a cluster: `python -m areal_jax.plan`."""

from areal_jax.cli.plan import main
from areal_jax.cluster.signals import exit_process

if __name__ == "__main__":
    exit_process(main())
