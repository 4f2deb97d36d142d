"""The controller's connection to one worker: calls, replies, reports and detection of its death."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from areal_jax.checkpoint.checksums import CheckpointError
from areal_jax.cluster.worker import CPU_S, ClusterWorker, Event, Message
from areal_jax.errors import (
    ClaimLost,
    ConfigError,
    CorruptedState,
    EngineStopped,
    InvalidRequest,
    NotStarted,
    WorkerDied,
)

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Maximum time until a worker answers a poll for events, in seconds; an empty answer is its
heartbeat."""

END_TIMEOUT_S = 20.0
"""Time for a worker to end by itself before it is killed, in seconds."""

MAX_REASON_CHARS = 300
"""Maximum length of the reason of a death in messages."""

ERRORS: Mapping[str, type[Exception]] = {
    error.__name__: error
    for error in (
        InvalidRequest,
        EngineStopped,
        CheckpointError,
        ClaimLost,
        ConfigError,
        CorruptedState,
    )
}
"""Exceptions that keep their class between processes, besides Python's own."""

UNPREFIXED = (
    InvalidRequest,
    CheckpointError,
    ClaimLost,
    ConfigError,
    FloatingPointError,
    CorruptedState,
)
"""Exceptions whose message is complete without the worker's name."""


class Connection:
    """Calls to one worker and its replies; use it from the asyncio thread.

    Messages of one iteration of the event loop are sent together.

    It has more than 200 lines because every way in which a worker can die ends the same calls.
    """

    def __init__(
        self, name: str, actor: Any, *, silence_timeout_s: float, on_end: Callable[[], None]
    ) -> None:
        """Wrap a running actor.

        Args:
            name: Name of the worker in messages and logs.
            actor: Ray handle of a `ClusterWorker`.
            silence_timeout_s: Time without a reply after which the worker counts as dead.
            on_end: Callback after the actor is killed.
        """
        self.name, self._actor, self._on_end = name, actor, on_end
        self.silence_timeout_s = silence_timeout_s
        self.node = ""
        """Id of the worker's Ray node."""
        self.process_id = 0
        """Process id on the worker's host."""
        self.cpu_s = 0.0
        """Processor time of the worker by its last report, in seconds."""
        self._on_report: Callable[[str, Any], None] = lambda _topic, _payload: None
        self._tickets = itertools.count(1)
        self._pending_calls: dict[int, asyncio.Future[Any]] = {}
        # `_post` appends, `_send` takes the whole list. `_send` is one task, owned by this object,
        # which ends when the list is empty. One batch is in flight at a time, because Ray starts
        # concurrent calls of an actor in any order.
        self._outbox: list[Message] = []
        self._sender: asyncio.Task[None] | None = None
        self._death: WorkerDied | None = None
        self._on_death: Callable[[WorkerDied], None] = lambda _death: None
        # Owned by this object; ends with the worker or with `close`.
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def open(
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
        """Start a worker and wait until it is ready.

        Args:
            name: Name of the worker in messages and logs.
            role: Class of the role, PACKAGE.MODULE:CLASS.
            arguments: Arguments of the role's constructor.
            options: Ray options of the actor, such as num_cpus.
            simulated_devices: Number of simulated CPU devices; None uses those that Ray assigns.
            start_timeout_s: Time until the worker must be ready.
            silence_timeout_s: Time without a reply after which the worker counts as dead.
            on_end: Callback after the actor is killed.

        Returns:
            The connection and the return value of the role's `begin`.

        Raises:
            WorkerDied: The worker dies first or is not ready in time.
            NotStarted: The role raises an error.
            ConfigError: The role rejects the settings.
        """
        # Ray pickles the class by name: the package is installed on the other side too.
        actor_class: Any = ray.remote(ClusterWorker)
        actor = actor_class.options(max_concurrency=1000, max_restarts=0, **options).remote(
            name, simulated_devices
        )
        connection = cls(name, actor, silence_timeout_s=silence_timeout_s, on_end=on_end)
        with ExitStack() as on_failure:  # also on cancellation: no actor may survive
            on_failure.callback(connection._kill)
            try:
                async with asyncio.timeout(start_timeout_s):
                    connection.process_id, facts = await actor.begin.remote(role, *arguments)
            except TimeoutError:
                raise WorkerDied(
                    f"{name} was not ready within launch.start_timeout_s={start_timeout_s:g}"
                ) from None
            except RayActorError as error:
                raise WorkerDied(f"{name} ended before it was ready: {_reason(error)}") from error
            except RayError as error:
                cause = getattr(error, "cause", None) or error
                if isinstance(cause, ConfigError):
                    raise _error(name, type(cause).__name__, str(cause)) from error
                text = " ".join(str(cause).split())[:MAX_REASON_CHARS]
                raise NotStarted(
                    f"{name} could not start: {type(cause).__name__}: {text}"
                ) from error
            on_failure.pop_all()
        connection._listener = asyncio.create_task(
            connection._poll(), name=f"poll events of {name}"
        )
        return connection, facts

    def subscribe(
        self, on_report: Callable[[str, Any], None], on_death: Callable[[WorkerDied], None]
    ) -> None:
        """Set the callbacks for reports and for the worker's death.

        A death that already happened is reported at once.
        """
        self._on_report, self._on_death = on_report, on_death
        if self._death is not None:
            on_death(self._death)

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the role and return a future of its result.

        Cancelling the future cancels the call in the worker. If the worker dies first, the future
        raises WorkerDied.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._death is not None:
            future.set_exception(self._death)
            return future
        ticket = next(self._tickets)
        self._pending_calls[ticket] = future
        future.add_done_callback(lambda _: self._cancel(ticket) if future.cancelled() else None)
        self._post((ticket, method, arguments))
        return future

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method of the role without waiting for a result."""
        if self._death is None:
            self._post((0, method, arguments))

    async def address(self) -> str:
        """Return an address at which a server of the worker can listen, HOST:PORT.

        Raises:
            WorkerDied: The worker died.
        """
        try:
            return await self._actor.address.remote()
        except RayActorError as error:
            raise WorkerDied(f"{self.name} died: {_reason(error)}") from error

    def mark_dead(self, why: str, *, report: bool = True) -> None:
        """Count the worker as dead and kill it.

        Args:
            why: Reason, for the message.
            report: Whether to call the death callback.
        """
        self._fail_with(WorkerDied(f"{self.name} died: it was killed: {why}"), report=report)

    async def close(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """End the worker; it may finish its work within `timeout_s`."""
        own = [task for task in (self._listener, self._sender) if task is not None]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
        if self._death is None:
            self._fail_calls(WorkerDied(f"{self.name} is closed"))
            try:
                async with asyncio.timeout(timeout_s):
                    await self._actor.end.remote()
            except TimeoutError:
                logger.warning("%s did not end within %g s: killing it", self.name, timeout_s)
            except RayError as error:
                logger.warning("%s failed at its end: %s", self.name, _reason(error))
        self._kill()

    def _cancel(self, ticket: int) -> None:
        if self._pending_calls.pop(ticket, None) is not None and self._death is None:
            self._post((ticket, "", ()))

    def _post(self, message: Message) -> None:
        self._outbox.append(message)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name=f"send to {self.name}")

    async def _send(self) -> None:
        """Send all messages in order. A message that cannot be delivered means a dead worker."""
        try:
            while self._outbox and self._death is None:
                messages, self._outbox = self._outbox, []
                async with asyncio.timeout(self.silence_timeout_s):
                    await self._actor.receive.remote(messages)
        except TimeoutError:
            self._fail_with(
                WorkerDied(
                    f"{self.name} died: it accepted no message for "
                    f"launch.silence_timeout_s={self.silence_timeout_s:g}"
                )
            )
        except RayError as error:
            self._fail_with(WorkerDied(f"{self.name} died: {_reason(error)}"))
        finally:
            self._sender = None

    async def _poll(self) -> None:
        try:
            while self._death is None:
                async with asyncio.timeout(self.silence_timeout_s):
                    events = await self._actor.poll_events.remote(POLL_S)
                for event in events:
                    if self._death is None:  # `mark_dead` may have been called meanwhile.
                        self._handle(Event(*event))
        except TimeoutError:
            self._fail_with(
                WorkerDied(
                    f"{self.name} died: it sent no heartbeat for "
                    f"launch.silence_timeout_s={self.silence_timeout_s:g}"
                )
            )
        except RayError as error:
            self._fail_with(WorkerDied(f"{self.name} died: {_reason(error)}"))

    def _handle(self, event: Event) -> None:
        if event.kind == "reported" and event.name == CPU_S:
            self.cpu_s = event.payload
        elif event.kind == "reported":
            self._on_report(event.name, event.payload)
        elif (future := self._pending_calls.pop(event.ticket, None)) is None:
            if event.kind == "failed":
                logger.warning("%s: %s: %s", self.name, event.name, event.payload)
        elif not future.done():
            if event.kind == "done":
                future.set_result(event.payload)
            else:
                future.set_exception(_error(self.name, event.name, event.payload))

    def _fail_with(self, death: WorkerDied, *, report: bool = True) -> None:
        if self._death is not None:
            return  # Polling notices the end of a killed process a little later.
        self._kill()
        self._fail_calls(death)
        if report:
            self._on_death(death)

    def _fail_calls(self, death: WorkerDied) -> None:
        """Fail all pending and future calls."""
        self._death = death
        pending, self._pending_calls = self._pending_calls, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(death)

    def _kill(self) -> None:
        ray.kill(self._actor, no_restart=True)
        self._on_end()


def _error(name: str, kind: str, text: str) -> Exception:
    """Return a worker's error as its own class if this process knows the class."""
    own = ERRORS.get(kind) or getattr(builtins, kind, None)
    if isinstance(own, type) and issubclass(own, Exception):
        return own(text if own in UNPREFIXED else f"{name}: {text}")
    return RuntimeError(f"{name}: {kind}: {text}")


def _reason(error: RayError) -> str:
    """Return the cause that Ray reports, without its advice."""
    text = " ".join(str(error).split())
    for start in ("Worker exit detail: ", "The actor is dead because ", "The actor died because "):
        if start in text:
            text = text.partition(start)[2]
            break
    return text.partition(" Some common causes")[0][:MAX_REASON_CHARS]
