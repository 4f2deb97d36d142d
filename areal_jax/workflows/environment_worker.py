"""Processes of environments, forked by `rewards.fork_worker`:
`python -m areal_jax.workflows.environment_worker PARENT_PID SETTINGS`.

Requests: {"number", "make"}, {"number", "reset": {"seed", "task"}}, {"number", "step": {PLAYER:
TEXT}}. Replies: {"number", "players"}, {"number", "players", "messages"}, {"number", "messages",
"rewards", "is_over"}, or {"number", "error", "trace"}. Messages and rewards are by player; the only
player of an environment without players is ALONE.
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

ALONE = ""
"""Name of the player of an environment that has no players."""

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
    named = tuple(getattr(environment, "players", ()))
    players = named or (ALONE,)
    if "step" in request:
        actions = request["step"]
        found = finished(environment.step(actions if named else actions[ALONE]))
        if not isinstance(found, tuple) or len(found) != 5:
            raise TypeError(
                "expected step to return observation, reward, terminated, truncated and info, "
                f"found {shown(found)}"
            )
        observation, reward, terminated, truncated, _ = found
        rewards = _by_player("rewards", reward, named)
        is_over = _holds_for_all(terminated) or _holds_for_all(truncated)
        return {
            "messages": {} if is_over and named else _views(observation, named),
            "rewards": {player: reward_number(each) for player, each in rewards.items()},
            "is_over": is_over,
        }
    if "reset" not in request:
        return {"players": players}
    seed, task = request["reset"]["seed"], task_from_json(request["reset"]["task"])
    options: dict[str, Any] = {}
    if "options" in inspect.signature(environment.reset).parameters:
        options["options"] = {"task": task}
    found = finished(environment.reset(seed=seed, **options))
    observation = found[0] if isinstance(found, tuple) else found
    # Players may differ from seed to seed.
    named = tuple(getattr(environment, "players", ()))
    return {"players": named or (ALONE,), "messages": _views(observation, named)}


def _views(observation: object, players: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """The observation of each player that acts next, as messages.

    Raises:
        TypeError: there is none, or one is no observation.
    """
    found = _by_player("observations", observation, players)
    if not found:
        raise TypeError("expected observations of the players that act next, found none")
    return {player: _messages(each) for player, each in found.items()}


def _by_player(what: str, found: object, players: Sequence[str]) -> Mapping[str, Any]:
    if not players:
        return {ALONE: found}
    if not isinstance(found, Mapping) or found.keys() - set(players):
        raise TypeError(
            f"expected a dict with {what} of some of the players {', '.join(players)}, found "
            f"{shown(found)}"
        )
    return found


def _holds_for_all(found: object) -> bool:
    """Whether an end is the end of every player."""
    return all(found.values()) if isinstance(found, Mapping) else bool(found)


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
