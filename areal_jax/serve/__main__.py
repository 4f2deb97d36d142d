"""python -m areal_jax.serve [a.b=c ...]: answer requests in OpenAI's protocol with a policy."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from areal_jax.command import settings_text, show
from areal_jax.config import out_of_range
from areal_jax.launch.local import prepare
from areal_jax.parallel.config import PlacementConfig
from areal_jax.serve.config import ServeConfig
from areal_jax.settings import ConfigError, assign, build, from_text, parse_overrides, settings

logger = logging.getLogger("areal_jax.serve")

USAGE = """\
usage: python -m areal_jax.serve [a.b=c ...]

Answer requests in OpenAI's protocol (/v1/chat/completions, /v1/completions, /v1/models) until Ctrl-C or SIGTERM.

"""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 when told to end, 1 where the engine stops, 2 where the input cannot be.

    Before it answers, a signal ends the process at once."""
    given = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & set(given):
        show(USAGE + settings_text(ServeConfig))
        return 0
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)  # it tells of every kind of device that is not there
    try:
        config = read_config(given)
        with ending_at_once():
            # jax reads its flags when it is first imported, so that everything that imports it comes after this.
            logger.info("loading %s", config.model)
            prepare(PlacementConfig(simulated_devices=config.simulated_devices))
            return asyncio.run(serve(config))
    except ConfigError as error:
        print(f"areal_jax: {error}", file=sys.stderr)
        return 2


def read_config(overrides: Sequence[str]) -> ServeConfig:
    """The settings with `a.b=c` overrides. ConfigError names what is unknown, of another kind, or cannot be."""
    config = build(ServeConfig, assign(parse_overrides(overrides), settings(ServeConfig), from_text))
    if problems := list(out_of_range(config)):
        raise ConfigError("\n".join(problems))
    if config.port > 65535:
        raise ConfigError(f"port={config.port}: expected 0 to 65535")
    if config.api_key == "":
        raise ConfigError("api_key= is empty: give one, or leave it out to have one made up")
    return config


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM do what they do to a program that has no handlers, until the body installs some: of threads that load
    and compile, Python would wait for the end."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def serve(config: ServeConfig) -> int:
    """Serve until a signal, or until the engine stops."""
    from areal_jax.serve.app import App, listening
    from areal_jax.serving import engine_source

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    api_key = config.api_key or secrets.token_urlsafe(24)
    async with engine_source(config, api_key) as source:
        for number in SIGNALS:
            loop.add_signal_handler(number, stop.set)
        # What there is now stays: without this a large answer makes the collector walk all of jax, for which all threads wait.
        gc.collect()
        gc.freeze()
        app = App(source, config.limits, source.measure)
        try:
            async with listening(app, config.host, config.port, config.limits.shutdown_timeout_s) as port:
                print(f"{source.model} answers at http://{config.host}:{port}/v1", flush=True)
                if config.api_key is None:
                    print(f"bearer token: {api_key}", flush=True)
                ends = [loop.create_task(event.wait()) for event in (stop, app.stopped)]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.cancel()
        except OSError as error:
            raise ConfigError(
                f"host={config.host} port={config.port}: cannot listen there ({error.strerror or error})"
            ) from error
        return 1 if app.stopped.is_set() else 0


if __name__ == "__main__":
    sys.exit(main())
