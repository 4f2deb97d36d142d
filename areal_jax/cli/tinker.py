"""`areal-tinker [a.b=c ...]`: serve Tinker's training API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from areal_jax.api.training_server import listening_server, read_config
from areal_jax.cli.arguments import answer, config_parser, fail
from areal_jax.cluster.signals import SIGNALS, Interruption, interruptible, save_handlers
from areal_jax.errors import ConfigError
from areal_jax.tinker.config import TinkerConfig

logger = logging.getLogger("areal_jax.tinker")

USAGE = """\
usage: areal-tinker [a.b=c ...] [options]

Train adapters of one policy for clients of Tinker's API, until Ctrl-C or SIGTERM.

  a.b=c                 change a setting, such as model=DIR or engine.num_slots=32
"""

END_S = 2.0
"""Longest wait for threads that load or compile."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 where SIGINT or SIGTERM ended the server; 2 for invalid input; 130 and 143
        where SIGINT or SIGTERM came before the server answered, or came twice.
    """
    try:
        command = config_parser(TinkerConfig).parse(argv)
        if answer(command, USAGE, TinkerConfig):
            return 0
    except ConfigError as error:
        return fail(f"{error}", 2)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    with interruptible(END_S) as interruption:
        interruption.advice = lambda: "no request was running"
        try:
            config = read_config(command.overrides)
            logger.info("loading %s", config.model)
            return asyncio.run(_serve(config, interruption))
        except ConfigError as error:
            return fail(f"{error}", 2)
        except KeyboardInterrupt as interrupt:
            return interruption.refused(interrupt)


async def _serve(config: TinkerConfig, interruption: Interruption) -> int:
    """Serve until a signal."""
    stop, loop, restore = asyncio.Event(), asyncio.get_running_loop(), save_handlers()

    def request_stop() -> None:
        interruption.advice = lambda: "the next start resumes from the run folder"
        stop.set()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        restore()

    async with listening_server(config) as server:
        for number in SIGNALS:
            loop.add_signal_handler(number, request_stop)
        print(f"{server.model} trains at {server.base_url}", flush=True)
        print(f"TINKER_BASE_URL={server.base_url}", flush=True)
        # A given key is the user's own, and is not shown.
        if config.api_key is None and server.api_key is not None:
            print(f"TINKER_API_KEY={server.api_key}", flush=True)
        await stop.wait()
        return 0
