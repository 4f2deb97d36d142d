"""`areal-serve [a.b=c ...]`: serve a policy with OpenAI's protocol."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
from collections.abc import Sequence

from areal_jax.api.server import listening_server, read_config
from areal_jax.cli.arguments import answer, config_parser, fail
from areal_jax.cluster.signals import SIGNALS, Interruption, interruptible, save_handlers
from areal_jax.errors import ConfigError
from areal_jax.serve.config import ServeConfig

logger = logging.getLogger("areal_jax.serve")

USAGE = """\
usage: areal-serve [a.b=c ...] [options]

Answer requests in OpenAI's protocol (/v1/chat/completions, /v1/completions, /v1/models) until
Ctrl-C or SIGTERM.

  a.b=c                 change a setting, such as model=runs/NAME or engine.num_slots=32
"""

END_S = 2.0
"""Longest wait for threads that load or compile."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 where SIGINT or SIGTERM ended the server and running requests ended or timed
        out; 1 where the engine stops; 2 for invalid input; 130 and 143 where SIGINT or SIGTERM came
        before the server answered, or came twice.
    """
    try:
        command = config_parser(ServeConfig).parse(argv)
        if answer(command, USAGE, ServeConfig):
            return 0
    except ConfigError as error:
        return fail(f"{error}", 2)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(
        logging.WARNING
    )  # jax logs every kind of device that is absent
    with interruptible(END_S) as interruption:
        interruption.advice = lambda: "no request was running"
        try:
            config = read_config(command.overrides)
            logger.info("loading %s", config.model)
            return asyncio.run(serve(config, interruption))
        except ConfigError as error:
            return fail(f"{error}", 2)
        except KeyboardInterrupt as interrupt:
            return interruption.refused(interrupt)


async def serve(config: ServeConfig, interruption: Interruption) -> int:
    """Serve until a signal, or until the engine stops; the exit status."""
    stop, loop, restore = asyncio.Event(), asyncio.get_running_loop(), save_handlers()

    def request_stop() -> None:
        interruption.advice = lambda: "running requests are cut off"
        stop.set()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        restore()

    api_key = config.api_key or secrets.token_urlsafe(24)
    async with listening_server(config, api_key) as (app, model, base_url):
        for number in SIGNALS:
            loop.add_signal_handler(number, request_stop)
        # Without this, a large answer makes the garbage collector walk all objects of jax, while
        # all threads wait.
        gc.collect()
        gc.freeze()
        print(f"{model} answers at {base_url}", flush=True)
        if config.api_key is None:
            print(f"bearer token: {api_key}", flush=True)
        ends = [loop.create_task(event.wait()) for event in (stop, app.stopped)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        return 1 if app.stopped.is_set() else 0
