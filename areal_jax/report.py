"""Write the report of a run: `python -m areal_jax.report`."""

from areal_jax.cli.report import main
from areal_jax.cluster.signals import exit_process

if __name__ == "__main__":
    exit_process(main())
