"""Games and environments of the real textarena, skyrl-gym and openenv, in their processes.

Needs these extras; elsewhere these tests are not collected.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_jax.errors import ConfigError
from areal_jax.records import Message, Task
from areal_jax.workflows.config import Environment
from areal_jax.workflows.environment import EnvironmentFailed, EnvironmentHost, Episode, Step

SEED = Task("seed", (), "3", "environment")

SERVER = """
import sys
from openenv.core.env_server import Action, Environment, Observation, State, create_app
import uvicorn


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed=None, episode_id=None, **options):
        self._goal = seed
        return Hint(hint=f"Name {seed}.", done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        hit = action.number == self._goal
        return Hint(hint="Yes." if hit else "No.", done=hit, reward=float(hit))

    @property
    def state(self):
        return self._state


app = create_app(Game, Guess, Hint, env_name="game", max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


def play(
    name: str, arguments: dict[str, Any], game: Callable[[EnvironmentHost], Awaitable[None]]
) -> None:
    """Run `game` with the host of an adapter."""

    async def main() -> None:
        host = EnvironmentHost(
            Environment(
                environment=f"areal_jax.workflows.packages:{name}", arguments=json.dumps(arguments)
            )
        )
        try:
            await host.start()
            await game(host)
        finally:
            await host.close()

    asyncio.run(main())


def seen(step: Step) -> dict[str, str]:
    """What each player that acts next sees."""
    return {
        player: "\n".join(each.content for each in step.messages[player])
        for player in step.messages
    }


async def guess(episode: Episode, high: int) -> tuple[float, list[str]]:
    """Find the number by halving; the reward, and what was seen."""
    low, views, reward = 1, list[str](), 0.0
    while low <= high:
        middle = (low + high) // 2
        step = await episode.step({"": f"I say [{middle}]."})
        reward += step.rewards[""]
        if step.is_over:
            break
        views.append(seen(step)[""])
        low, high = (middle + 1, high) if "higher" in views[-1] else (low, middle - 1)
    return reward, views


def test_textarena_game_of_one_player_is_replayed_from_its_seed() -> None:
    async def game(host: EnvironmentHost) -> None:
        found = list[Any]()
        for _ in range(2):
            async with host.episode() as episode:
                _, first = await episode.reset(3, SEED)
                assert "between 1 and 16" in seen(first)[""]
                found.append(await guess(episode, 16))
        assert found[0] == found[1] and found[0][0] == 1.0
        # Each observation is what is new: neither the rules nor the policy's own turns again.
        assert all("You are playing" not in each and "I say" not in each for each in found[0][1])

    play("TextArena", {"game": "GuessTheNumber-v0", "max_number": 16}, game)


def test_textarena_players_have_views_and_rewards_of_their_own() -> None:
    async def game(host: EnvironmentHost) -> None:
        async with host.episode() as episode:
            players, step = await episode.reset(3, SEED)
            assert players == ("Player 0", "Player 1") and list(seen(step)) == ["Player 0"]
            step = await episode.step({"Player 0": "[0 1]"})
            assert list(seen(step)) == ["Player 1"]
            assert "Player 0 removes 1 from pile 0" in seen(step)["Player 1"]
            step = await episode.step({"Player 1": "[1 2]"})
            assert step.is_over and step.rewards == {"Player 0": 0.0, "Player 1": 1.0}

    play("TextArena", {"game": "Nim-v0", "num_players": 2, "piles": [1, 2]}, game)


def test_skyrl_gym_grades_answers_to_rows() -> None:
    task = Task("row", (Message("user", "What is 6 times 7?"),), "42")

    async def game(host: EnvironmentHost) -> None:
        for text, reward in (("It is #### 42", 1.0), ("It is #### 41", 0.0)):
            async with host.episode() as episode:
                _, first = await episode.reset(0, task)
                assert seen(first) == {"": ""}
                step = await episode.step({"": text})
                assert step.is_over and step.rewards == {"": reward}

    play("SkyRLGym", {"name": "gsm8k"}, game)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, tmp_path / "server.py", str(port)])
    until = time.monotonic() + 120
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_openenv_sessions_are_episodes_of_their_own(server: str) -> None:
    async def game(host: EnvironmentHost) -> None:
        async with host.episode() as one, host.episode() as other:
            assert seen((await one.reset(3, SEED))[1]) == {"": "Name 3."}
            assert seen((await other.reset(4, SEED))[1]) == {"": "Name 4."}
            step = await one.step({"": "a word"})
            assert not step.is_over and "no action" in seen(step)[""]
            assert seen(await one.step({"": "4"})) == {"": "No."}
            for episode, text in ((one, "3"), (other, "4")):
                step = await episode.step({"": text})
                assert step.is_over and step.rewards == {"": 1.0}
        # Processes, and their sessions, are used again.
        async with host.episode() as again:
            assert seen((await again.reset(5, SEED))[1]) == {"": "Name 5."}

    play("OpenEnv", {"url": server}, game)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("TextArena", {"game": "Chess"}, "Chess not found in registry"),
        ("TextArena", {"game": "Nim-v0", "num_players": 3}, "has to be 2, received 3"),
        ("SkyRLGym", {"name": "chess"}, "chess"),
    ],
)
def test_unknown_games_and_numbers_of_players_are_refused(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    async def game(host: EnvironmentHost) -> None:
        async with host.episode() as episode:
            await episode.reset(0, SEED)

    with pytest.raises((ConfigError, EnvironmentFailed), match=re.escape(message)):
        play(name, arguments, game)
