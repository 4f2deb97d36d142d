"""The agent of `workflow=Verifiers`: plays episodes of a taskset of verifiers
(https://github.com/PrimeIntellect-ai/verifiers), in the processes of agents.

The harness of the taskset calls the session of its episode, which records the tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from areal_jax.records import ENVIRONMENT, Task
from areal_jax.threads import log_failure

MAX_EPISODES = 256
"""Number of episodes for which an environment serves; it keeps an HTTP client for each of them."""

API_KEY = "AREAL_JAX_SESSION_KEY_"
"""Prefix of variables with the keys of sessions; verifiers takes keys from variables alone."""


class Player:
    """Plays episodes. Its environments are made and served in this process."""

    def __init__(
        self, environment: str, settings: Mapping[str, Any], renderer: str | None = None
    ) -> None:
        """Load the taskset.

        Args:
            environment: taskset of verifiers.
            settings: other settings of the environment.
            renderer: folder of the tokenizer with which prompts are rendered here; None: they are
                sent as messages.

        Raises:
            ValueError: the package is not installed.
        """
        try:
            import verifiers.v1 as package  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                f"expected the package verifiers ({error}); install it with "
                'pip install "areal-jax[verifiers]"'
            ) from error
        self._package, self._renderer = package, renderer
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        self._settings = {
            **settings,
            "taskset": {**settings.get("taskset", {}), "id": environment},
            "agent": {**agent, **settings.get("agent", {})},
        }
        self._serving: _Serving | None = None
        self._tasks = list[Any]()
        self._later = iter(self._make().taskset)

    def _make(self) -> Any:
        package = self._package
        return package.load_environment(package.SingleAgentEnvConfig(**self._settings))

    def _task(self, task: Task) -> Any:
        """Return the taskset's task of a number, which goes round."""
        if task.kind != ENVIRONMENT:
            raise ValueError(
                "workflow=Verifiers plays the tasks of its taskset by number; set tasks=Seeds and "
                "eval_tasks=Seeds"
            )
        number = int(task.answer)
        self._tasks += islice(self._later, max(0, number + 1 - len(self._tasks)))
        if not self._tasks:
            raise ValueError("expected a taskset with tasks, found none")
        return self._tasks[number % len(self._tasks)]

    async def __call__(self, task: Task, base_url: str, api_key: str) -> dict[str, float]:
        """Play an episode; the components of its reward.

        Raises:
            RuntimeError: it failed, or several agents played it.
        """
        package, variable = self._package, f"{API_KEY}{api_key}"
        endpoint = {"base_url": base_url, "api_key_var": variable}
        client = package.EvalClientConfig(**endpoint)
        if self._renderer is not None:
            client = package.TrainClientConfig(**endpoint, renderer_model_name=self._renderer)
        chosen = self._task(task)
        os.environ[variable] = api_key
        try:
            async with self._environment() as environment:
                context = package.ModelContext(model="policy", client=client)
                episode = await environment.run_episode(chosen, context)
        finally:
            del os.environ[variable]
        if not episode.ok or len(episode.traces) != 1:
            errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
            raise RuntimeError(
                f"expected an episode of one agent without errors, found {len(episode.traces)} "
                f"agents and errors {[f'{each.type}: {each.message}' for each in errors]}"
            )
        (trace,) = episode.traces
        return {name: each.value for name, each in trace.rewards.items() if each is not None}

    @asynccontextmanager
    async def _environment(self) -> AsyncIterator[Any]:
        """An environment that serves until the episode's end; a new one after one that failed."""
        serving = self._serving
        if serving is None or serving.num_episodes == MAX_EPISODES or serving.task.done():
            serving = self._serving = _Serving(self._make())
        serving.num_episodes += 1
        try:
            yield await serving.started()
        finally:
            serving.num_ended += 1
            if serving.num_ended == MAX_EPISODES:
                serving.ended.set()


class _Serving:
    """An environment that serves in a task of its own, since it must end in the one it began in."""

    def __init__(self, environment: Any) -> None:
        self.num_episodes = self.num_ended = 0
        self.ended = asyncio.Event()
        """Set by the last of the episodes."""
        self._environment = environment
        self._is_ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._serve(), name="environment of verifiers")
        self.task.add_done_callback(log_failure)

    async def started(self) -> Any:
        """Wait until it serves.

        Raises:
            Exception: that of its start.
        """
        return await asyncio.shield(self._is_ready)

    async def _serve(self) -> None:
        try:
            async with self._environment.serving():
                self._is_ready.set_result(self._environment)
                await self.ended.wait()
        except Exception as error:  # the user's environment; those that wait for it raise it
            if self._is_ready.done():
                raise
            self._is_ready.set_exception(error)
