"""Serving and generation from Python; the command line uses the same functions."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_jax.api.background import call_beside_loop, in_own_thread
from areal_jax.cluster.environment import prepare
from areal_jax.config.overrides import (
    assign,
    build,
    flattened,
    from_object,
    from_text,
    parse_overrides,
    settings,
)
from areal_jax.errors import ConfigError
from areal_jax.parallel.config import PlacementConfig
from areal_jax.records import Message, Request, derive_seed
from areal_jax.run.callbacks import RunControl
from areal_jax.serve.config import ServeConfig

if TYPE_CHECKING:
    from areal_jax.serve.app import App
    from areal_jax.serve.engine_backend import EngineBackend

Prompt = str | Sequence[Mapping[str, str]]
"""A text, which a user says, or a conversation: messages with role and content."""


class Listening(NamedTuple):
    """A server that answers."""

    app: App
    model: str
    base_url: str


class Server:
    """A server in a thread of its own; it ends with `close`, or with its `with` block."""

    def __init__(self, config: ServeConfig) -> None:
        """Start the server, and wait until it answers.

        Raises:
            ConfigError: the policy is missing or does not fit, or the port is in use.
        """
        self.api_key = config.api_key or secrets.token_urlsafe(24)
        """Bearer token that clients send."""
        self._control = RunControl()
        started = Future[Listening]()
        self._thread, self._done = in_own_thread(
            lambda: asyncio.run(self._serve(config, started)), "serve"
        )
        self._done.add_done_callback(lambda done: _pass_on(done, started))
        try:
            found = started.result()
        except BaseException:
            self.close()
            raise
        self.model, self.base_url = found.model, found.base_url
        """Name that clients give as `model`, and URL of the API, http://HOST:PORT/v1."""

    async def _serve(self, config: ServeConfig, started: Future[Listening]) -> None:
        stop = asyncio.Event()
        with self._control.stopping(stop):
            async with listening_server(config, self.api_key) as found:
                started.set_result(found)
                ends = [asyncio.create_task(each.wait()) for each in (stop, found.app.stopped)]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.cancel()

    def close(self) -> None:
        """End the server; running requests may finish within limits.shutdown_timeout_s."""
        self._control.request_stop()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(model: str | Path, *overrides: str, **changes: Any) -> Server:
    """Serve a policy with OpenAI's protocol, as `python -m areal_jax.serve` does, in a thread.

    Example:
        with areal_jax.serve("runs/mine") as server:
            client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key)

    Args:
        model: run folder, Hugging Face folder or hub name, or PEFT folder.
        overrides: settings as on the command line, such as `"engine.num_slots=8"`.
        changes: settings as Python values; port=0, a free one, by default.

    Raises:
        ConfigError: a setting is invalid, or the policy is missing.
    """
    return Server(read_config(overrides, {"port": 0, **changes, "model": _name(model)}))


def generate(
    prompts: Prompt | Sequence[Prompt],
    model: str | Path,
    *overrides: str,
    num_samples: int = 1,
    **changes: Any,
) -> list[list[str]]:
    """Sample answers of a policy.

    Args:
        prompts: texts or conversations; a single text is one prompt.
        model: as in `serve`; so are overrides and changes, such as
            `**{"engine.temperature": 0.0}`.
        num_samples: answers to each prompt.

    Returns:
        The answers to each prompt.

    Raises:
        ConfigError: a setting is invalid, or the policy is missing.
        InvalidRequest: a prompt is longer than engine.max_prompt_tokens.
    """
    listed: Sequence[Any] = [prompts] if isinstance(prompts, str) else prompts
    config, control = read_config(overrides, {**changes, "model": _name(model)}), RunControl()
    return call_beside_loop(
        lambda: asyncio.run(_generate(config, listed, num_samples)),
        control.request_stop,
        "generate",
    )


def read_config(
    overrides: Sequence[str], changes: Mapping[str, Any] = MappingProxyType({})
) -> ServeConfig:
    """Read settings from `a.b=c` overrides, and from Python values by dotted key.

    Raises:
        ConfigError: a setting is unknown, of another type, or out of bounds.
    """
    listed = assign(parse_overrides(overrides), settings(ServeConfig), from_text)
    config = build(ServeConfig, assign(flattened(changes, listed), listed, from_object))
    if config.api_key == "":
        raise ConfigError("api_key= is empty: expected a token; leave api_key out to generate one")
    return config


@asynccontextmanager
async def listening_server(config: ServeConfig, api_key: str) -> AsyncIterator[Listening]:
    """Load and compile the policy, and answer requests until the block ends.

    Raises:
        ConfigError: the policy is missing or does not fit, or the port is in use.
    """
    async with _backend(config, api_key) as backend:
        from areal_jax.serve.app import App, listening

        app = App(backend, config.limits, backend.measure, config.images)
        address = config.host, config.port
        try:
            async with listening(app, *address, config.limits.shutdown_timeout_s) as port:
                yield Listening(app, backend.model, f"http://{config.host}:{port}/v1")
        except OSError as error:
            raise ConfigError(
                f"host={config.host} port={config.port}: cannot listen there "
                f"({error.strerror or error})"
            ) from error


@asynccontextmanager
async def _backend(config: ServeConfig, api_key: str) -> AsyncIterator[EngineBackend]:
    # jax reads its flags when it is first imported: imports of jax come after this.
    prepare(PlacementConfig(simulated_devices=config.simulated_devices))
    from areal_jax.run.serving import engine_backend

    async with engine_backend(config, api_key) as backend:
        yield backend


async def _generate(
    config: ServeConfig, prompts: Sequence[Prompt], num_samples: int
) -> list[list[str]]:
    async with _backend(config, "") as backend:
        tokenizer = backend.tokenizer

        async def answers(number: int, prompt: Prompt) -> list[str]:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            tokens = tokenizer.render([Message(turn["role"], turn["content"]) for turn in turns])
            name = f"prompt-{number}"
            completions = await backend.engine.submit(
                Request(
                    id=name,
                    prompt_tokens=tokens,
                    num_samples=num_samples,
                    sampling=backend.sampling,
                    seed=derive_seed(config.seed, name),
                )
            )
            return [tokenizer.decode(completion.tokens) for completion in completions]

        return await asyncio.gather(*(answers(*each) for each in enumerate(prompts)))


def _name(model: str | Path) -> str | Path:
    return str(model) if isinstance(model, Path) else model


def _pass_on(done: Future[None], started: Future[Listening]) -> None:
    """Hand the error of a server that never answered on to who waits for it."""
    if not started.done() and (error := done.exception()) is not None:
        started.set_exception(error)
