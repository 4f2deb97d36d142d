"""The controller's end of a part: questions out, answers in, and the moment at which it is lost."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from areal_jax.cluster.worker import CPU_S, Event, Message, Worker
from areal_jax.errors import (
    ConfigError,
    CorruptedState,
    EngineStopped,
    InvalidRequest,
    NotStarted,
    WorkerDied,
)

logger = logging.getLogger(__name__)

LISTEN_S = 2.0
"""A part answers a listener after so long even where it has nothing to say: it lives."""

END_TIMEOUT_S = 20.0

MAX_REASON_CHARS = 300
"""Of why a process is gone."""

ERRORS: Mapping[str, type[Exception]] = {
    error.__name__: error for error in (InvalidRequest, EngineStopped, ConfigError, CorruptedState)
}
"""That keep their class on the way, beside Python's own."""


class Connection:
    """Use it from the asyncio thread. What is asked within one turn of the event loop travels
    together."""

    def __init__(
        self, name: str, actor: Any, *, silence_timeout_s: float, on_end: Callable[[], None]
    ) -> None:
        """Args: actor: of class `Part`; killed when it is silent too long, and on `close`. on_end:
        done after that."""
        self.name, self._actor, self.silence_timeout_s, self._on_end = (
            name,
            actor,
            silence_timeout_s,
            on_end,
        )
        self.process_id = 0
        """On its host."""
        self.cpu_s = 0.0
        """Processor time that it has used, by its last report."""
        self._reported: Callable[[str, Any], None] = lambda _topic, _what: None
        self._tickets = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        # Put by `ask` and `tell`, taken whole by `_send`: one task, owned by this object, which
        # ends when nothing is left. One batch is under way at a time, because Ray begins concurrent
        # calls of an actor in any order.
        self._outbox: list[Message] = []
        self._sender: asyncio.Task[None] | None = None
        self._loss: WorkerDied | None = None
        self._on_loss: Callable[[WorkerDied], None] = lambda _loss: None
        # Owned by this object; ends with the part, or with `close`.
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def opened(
        cls,
        name: str,
        role: str,
        arguments: tuple[Any, ...],
        *,
        options: Mapping[str, Any],
        simulated_devices: int | None,
        start_timeout_s: float,
        silence_timeout_s: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> tuple[Connection, Any]:
        """Start a part, and wait until it is ready to work; the connection, and what its role's
        `begin` says.

        WorkerDied where it dies before, or is not ready in time; NotStarted where its role fails;
        what is wrong with the settings, as ConfigError."""
        # Reached by its name on the other side, where the package is installed too.
        actor_class: Any = ray.remote(Worker)
        actor = actor_class.options(max_concurrency=1000, max_restarts=0, **options).remote(
            name, simulated_devices
        )
        connection = cls(name, actor, silence_timeout_s=silence_timeout_s, on_end=on_end)
        try:
            async with asyncio.timeout(start_timeout_s):
                connection.process_id, facts = await actor.begin.remote(role, *arguments)
        except TimeoutError:
            connection._kill()
            raise WorkerDied(
                f"{name} was not ready within launch.start_timeout_s={start_timeout_s:g}"
            ) from None
        except RayActorError as error:
            raise WorkerDied(f"{name} ended before it was ready: {_reason(error)}") from error
        except RayError as error:
            connection._kill()
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ConfigError):
                raise _error(name, type(cause).__name__, str(cause)) from error
            text = " ".join(str(cause).split())[:MAX_REASON_CHARS]
            raise NotStarted(f"{name} could not start: {type(cause).__name__}: {text}") from error
        except BaseException:
            connection._kill()
            raise
        connection._listener = asyncio.create_task(
            connection._listen(), name=f"listening to {name}"
        )
        return connection, facts

    def listen(
        self, reported: Callable[[str, Any], None], on_loss: Callable[[WorkerDied], None]
    ) -> None:
        """Whom to tell what the part tells unasked, and that it is lost."""
        self._reported, self._on_loss = reported, on_loss
        if self._loss is not None:
            on_loss(self._loss)

    def ask(self, verb: str, *arguments: Any) -> asyncio.Future[Any]:
        """What the part's role answers; cancelled here, it is cancelled there. WorkerDied where the
        part is lost before."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._loss is not None:
            future.set_exception(self._loss)
            return future
        ticket = next(self._tickets)
        self._asked[ticket] = future
        future.add_done_callback(lambda _: self._cancel(ticket) if future.cancelled() else None)
        self._put((ticket, verb, arguments))
        return future

    def tell(self, verb: str, *arguments: Any) -> None:
        """Ask for no answer."""
        if self._loss is None:
            self._put((0, verb, arguments))

    async def address(self) -> str:
        """Where a server of the part can listen, HOST:PORT."""
        return await self._actor.address.remote()

    def give_up(self, why: str, *, tell: bool = True) -> None:
        """Take the part for lost, and kill it. Args: tell: whoever listens for its loss."""
        self._lose(WorkerDied(f"{self.name} is given up: {why}"), tell=tell)

    async def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """End the part: it may finish what it has begun, but not for ever."""
        own = [task for task in (self._listener, self._sender) if task is not None]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
        if self._loss is None:
            self._fail(WorkerDied(f"{self.name} is closed"))
            try:
                async with asyncio.timeout(timeout_s):
                    await self._actor.end.remote()
            except TimeoutError:
                logger.warning("%s did not end within %g s, and is killed", self.name, timeout_s)
            except RayError as error:
                logger.warning("%s did not end well: %s", self.name, _reason(error))
        self._kill()

    def _cancel(self, ticket: int) -> None:
        if self._asked.pop(ticket, None) is not None and self._loss is None:
            self._put((ticket, "", ()))

    def _put(self, message: Message) -> None:
        self._outbox.append(message)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name=f"sending to {self.name}")

    async def _send(self) -> None:
        """Send all there is, in order; what is not taken is a loss of the part, never of a
        message."""
        try:
            while self._outbox and self._loss is None:
                messages, self._outbox = self._outbox, []
                async with asyncio.timeout(self.silence_timeout_s):
                    await self._actor.tell.remote(messages)
        except TimeoutError:
            self._lose(
                WorkerDied(
                    f"{self.name} took no message for "
                    f"launch.silence_timeout_s={self.silence_timeout_s:g}"
                )
            )
        except RayError as error:
            self._lose(WorkerDied(f"{self.name} was lost: {_reason(error)}"))
        finally:
            self._sender = None

    async def _listen(self) -> None:
        try:
            while self._loss is None:
                async with asyncio.timeout(self.silence_timeout_s):
                    events = await self._actor.hear.remote(LISTEN_S)
                for event in events:
                    if self._loss is None:  # It was not given up meanwhile.
                        self._heard(Event(*event))
        except TimeoutError:
            self._lose(
                WorkerDied(
                    f"{self.name} said nothing for "
                    f"launch.silence_timeout_s={self.silence_timeout_s:g}"
                )
            )
        except RayError as error:
            self._lose(WorkerDied(f"{self.name} was lost: {_reason(error)}"))

    def _heard(self, event: Event) -> None:
        if event.kind == "reported" and event.name == CPU_S:
            self.cpu_s = event.what
        elif event.kind == "reported":
            self._reported(event.name, event.what)
        elif (future := self._asked.pop(event.ticket, None)) is None:
            if event.kind == "failed":
                logger.warning("%s: %s: %s", self.name, event.name, event.what)
        elif not future.done():
            if event.kind == "done":
                future.set_result(event.what)
            else:
                future.set_exception(_error(self.name, event.name, event.what))

    def _lose(self, loss: WorkerDied, *, tell: bool = True) -> None:
        if self._loss is not None:
            return  # What was given up is heard to have ended a little later.
        self._kill()
        self._fail(loss)
        if tell:
            self._on_loss(loss)

    def _fail(self, loss: WorkerDied) -> None:
        """From now on there are no answers any more."""
        self._loss = loss
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(loss)

    def _kill(self) -> None:
        ray.kill(self._actor, no_restart=True)
        self._on_end()


def _error(name: str, kind: str, text: str) -> Exception:
    """What a part failed with, as the class that it was where that says something here."""
    own = ERRORS.get(kind) or getattr(builtins, kind, None)
    if isinstance(own, type) and issubclass(own, Exception):
        return own(
            text
            if own in (InvalidRequest, ConfigError, FloatingPointError, CorruptedState)
            else f"{name}: {text}"
        )
    return RuntimeError(f"{name}: {kind}: {text}")


def _reason(error: RayError) -> str:
    """What Ray knows, without its advice."""
    reported = " ".join(str(error).split())
    for start in ("Worker exit detail: ", "The actor is dead because ", "The actor died because "):
        if start in reported:
            reported = reported.partition(start)[2]
            break
    return reported.partition(" Some common causes")[0][:MAX_REASON_CHARS]
