"""Games and environments of other packages; each needs the extra of its name.

Used by `workflow.environment=areal_jax.workflows.packages:NAME` with `workflow.arguments`.
"""

from __future__ import annotations

import importlib
import json
import random
import urllib.request
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from areal_jax.records import Task

SCHEMA_TIMEOUT_S = 30.0


class TextArena:
    """A game of textarena (https://github.com/LeonGuertler/TextArena).

    A turn's observation is what the game and other players have said since the player's last one;
    the game's own memory of the conversation is not used. Wrappers of actions apply.
    """

    def __init__(self, game: str, num_players: int = 1, **settings: Any) -> None:
        """Make a game.

        Args:
            game: name in textarena's registry, such as GuessTheNumber-v0.
            num_players: number of players.
            settings: keyword arguments of the game.
        """
        self._package = _import("textarena", "textarena")
        self._game, self._settings, self._num_players = game, settings, num_players
        self.players = tuple(map(_seat, range(num_players))) if num_players > 1 else ()
        self._make()

    def _make(self) -> None:
        self._env = self._inner = self._package.make(self._game, **self._settings)
        while isinstance(self._inner, self._package.Wrapper):
            self._inner = self._inner.env

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Begin a game; what the player that acts first sees."""
        # Games draw from the state of both modules.
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._make()
        self._env.reset(num_players=self._num_players, seed=seed)
        return self._view(), {}

    def step(self, actions: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a turn; the next view. Rewards come with the end: 0 to 1, and for several players
        textarena's -1 to 1 halved and raised to 0 to 1, so that the winner has 1 and a draw 0.5.
        """
        (text,) = actions.values() if self.players else (actions,)
        is_over, _ = self._env.step(action=text)
        if not is_over:
            return self._view(), {} if self.players else 0.0, False, False, {}
        rewards, _ = self._env.close()
        if not self.players:
            return "", max(0.0, float(rewards[0])), True, False, {}
        return {}, {_seat(at): (1 + each) / 2 for at, each in rewards.items()}, True, False, {}

    def _view(self) -> Any:
        player, found = self._inner.get_observation()
        own = self._package.ObservationType.PLAYER_ACTION
        text = found
        if not isinstance(found, str):
            said = [
                each if sender == self._package.GAME_ID else f"{_seat(sender)}: {each}"
                for sender, each, kind in found
                if sender != player or kind != own
            ]
            text = "\n".join(said)
        return {_seat(player): text} if self.players else text


def _seat(player: int) -> str:
    return f"Player {player}"


class SkyRLGym:
    """An environment of skyrl-gym (https://github.com/NovaSky-AI/SkyRL).

    The row's prompt begins the conversation, and its answer is the ground truth.
    """

    def __init__(self, name: str, config: Any = None, **extras: Any) -> None:
        """Name an environment.

        Args:
            name: name in skyrl-gym's registry, such as gsm8k.
            config: its `env_config`.
            extras: its other `extras`, beside `reward_spec`.
        """
        self._package = _import("skyrl_gym", "skyrl-gym")
        self._name, self._extras = name, extras
        self._config = config
        if isinstance(config, Mapping):  # environments read settings as attributes
            self._config = importlib.import_module("omegaconf").OmegaConf.create(dict(config))

    def reset(
        self, seed: int, options: Mapping[str, Task]
    ) -> tuple[Sequence[Mapping[str, str]], dict[str, Any]]:
        """Begin an episode; what the environment adds to the row's prompt.

        Raises:
            ValueError: it changes the prompt itself.
        """
        random.seed(seed)
        task = options["task"]
        spec = {"method": "rule", "ground_truth": task.answer}
        self._env = self._package.make(
            self._name,
            env_config=self._config,
            extras={"reward_spec": spec, **self._extras},
        )
        prompt = [{"role": each.role, "content": each.content} for each in task.prompt]
        found, _ = self._env.init([*prompt])
        if found[: len(prompt)] != prompt:
            raise ValueError(
                f"{self._name} of skyrl-gym changes the prompt of task {task.id}; expected it to "
                "add messages alone"
            )
        return found[len(prompt) :], {}

    def step(
        self, text: str
    ) -> tuple[Sequence[Mapping[str, str]], float, bool, bool, dict[str, Any]]:
        """Take a turn."""
        found = self._env.step(text)
        if found["done"]:
            self._env.close()
        return found["observations"], float(found["reward"]), found["done"], False, {}


class OpenEnv:
    """An environment server of openenv (https://github.com/meta-pytorch/OpenEnv), a session of its
    own each.

    A turn is the text of the action's only field, or a JSON object where there are several. An
    observation of one text is shown as it is, others as JSON.
    """

    def __init__(self, url: str, action: str = "", observation: str = "") -> None:
        """Connect to a server.

        Args:
            url: its address.
            action: field of actions that takes the turn's text; empty: the only one, if so.
            observation: field of observations that is shown; empty: all.

        Raises:
            ValueError: the server's schema has no such field.
        """
        core = _import("openenv.core", "openenv")
        with urllib.request.urlopen(f"{url}/schema", timeout=SCHEMA_TIMEOUT_S) as reply:
            self._fields: dict[str, Any] = json.load(reply)["action"].get("properties", {})
        self._fields.pop("metadata", None)
        if action and action not in self._fields:
            raise ValueError(
                f"action={action}: expected a field of {url}'s actions: {', '.join(self._fields)}"
            )
        if not action and len(self._fields) == 1:
            (action,) = self._fields
        self._action, self._observation = action, observation
        self._client = core.GenericEnvClient(base_url=url).sync()

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode; its first observation."""
        return self._show(self._client.reset(seed=seed).observation), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn. A turn that is no action is answered with what was expected."""
        try:
            action = self._read(text)
        except ValueError as error:
            return f"This is no action: {error}", 0.0, False, False, {}
        found = self._client.step(action)
        return self._show(found.observation), float(found.reward or 0), found.done, False, {}

    def _read(self, text: str) -> dict[str, Any]:
        if self._action:
            kind = self._fields[self._action].get("type")
            return {self._action: text if kind == "string" else json.loads(text)}
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object with {', '.join(self._fields)}")
        return found

    def _show(self, observation: Mapping[str, Any]) -> str:
        if self._observation:
            return str(observation[self._observation])
        hidden = ("done", "reward", "metadata")
        shown = {name: each for name, each in observation.items() if name not in hidden}
        match list(shown.values()):
            case [str(text)]:
                return text
            case _:
                return json.dumps(shown)


def _import(name: str, extra: str) -> ModuleType:
    """Import a package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"expected the package {extra} ({error}); install it with "
            f'pip install "areal-jax[{extra}]"'
        ) from error
