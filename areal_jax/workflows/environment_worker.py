"""Processes of environments, forked by `rewards.fork_worker`:
`python -m areal_jax.workflows.environment_worker PARENT_PID SETTINGS`.

Requests: {"number", "make"}, {"number", "reset": {"seed", "task"}}, {"number", "step": TEXT}.
Replies: {"number"}, {"number", "messages"}, {"number", "messages", "reward", "terminated",
"truncated"}, or {"number", "error", "trace"}.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from areal_jax.records import task_from_json
from areal_jax.rewards.fork_worker import send, serve_forks
from areal_jax.rewards.functions import load_function, reward_number, shown, traceback_of

MEMORY_BYTES = 8 << 30
"""Largest address space of a process."""

Make = Callable[[], Any]


def main() -> None:
    settings = json.loads(sys.argv[2])
    name = f"workflow.environment={settings['environment']}"
    serve_forks(load=lambda: _load(settings), serve=_serve, what=name, memory_bytes=MEMORY_BYTES)


def _load(settings: Mapping[str, Any]) -> Make:
    factory, arguments = load_function(settings["environment"]), settings["arguments"]
    if isinstance(factory, type):
        missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
        if missing:
            raise TypeError(f"expected a class with reset and step, found none of {missing}")
    return lambda: factory(**arguments)


def _serve(connection: socket.socket, make: Make) -> None:
    """Play one episode after another until the connection ends."""
    environments = list[Any]()
    with (
        asyncio.Runner() as runner,
        connection,
        connection.makefile("r", encoding="utf-8") as requests,
    ):

        def finished(found: object) -> Any:
            return runner.run(_awaited(found)) if inspect.isawaitable(found) else found

        for line in requests:
            request = json.loads(line)
            try:
                if not environments:
                    environments.append(finished(make()))
                reply = _answer(environments[0], request, finished)
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                # The user's code; the episode fails, and is counted.
                text = f"{type(error).__name__}: {error}"
                reply = {"error": text, "trace": traceback_of(error)}
            send(connection, {"number": request["number"], **reply})


def _answer(
    environment: Any, request: Mapping[str, Any], finished: Callable[[object], Any]
) -> dict[str, Any]:
    if "step" in request:
        found = finished(environment.step(request["step"]))
        if not isinstance(found, tuple) or len(found) != 5:
            raise TypeError(
                "expected step to return observation, reward, terminated, truncated and info, "
                f"found {shown(found)}"
            )
        observation, reward, terminated, truncated, _ = found
        return {
            "messages": _messages(observation),
            "reward": reward_number(reward),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }
    if "reset" not in request:
        return {}
    seed, task = request["reset"]["seed"], task_from_json(request["reset"]["task"])
    options: dict[str, Any] = {}
    if "options" in inspect.signature(environment.reset).parameters:
        options["options"] = {"task": task}
    found = finished(environment.reset(seed=seed, **options))
    return {"messages": _messages(found[0] if isinstance(found, tuple) else found)}


def _messages(observation: object) -> list[dict[str, str]]:
    """An observation as messages; a text is one of the user.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    listed: list[Any] = list(observation) if isinstance(observation, Sequence) else [observation]
    if not all(isinstance(each, Mapping) and _is_message(each) for each in listed):
        raise TypeError(
            "expected an observation to be text, or messages with role and content, found "
            f"{shown(observation)} of type {type(observation).__name__}"
        )
    return [{"role": each["role"], "content": each["content"]} for each in listed]


def _is_message(found: Mapping[Any, Any]) -> bool:
    return all(isinstance(found.get(name), str) for name in ("role", "content"))


async def _awaited(found: Awaitable[object]) -> object:
    return await found


if __name__ == "__main__":
    main()
