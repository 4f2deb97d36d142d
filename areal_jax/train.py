"""Train a policy: `python -m areal_jax.train`."""

from areal_jax.cluster.environment import use_huge_pages
from areal_jax.cluster.signals import exit_process


def main() -> int:
    """Run the command of this process, as `areal_jax.cli.train.main`."""
    use_huge_pages()
    # Not before the process starts again.
    from areal_jax.cli.train import main as run

    return run()


if __name__ == "__main__":
    exit_process(main())
