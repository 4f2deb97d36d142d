"""Role of a reward worker of a run on a cluster, which needs no jax, and releases of all roles."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from areal_jax import __version__
from areal_jax.cluster.config import Ray
from areal_jax.cluster.worker import Emit
from areal_jax.config.load import read_settings
from areal_jax.records import task_from_json
from areal_jax.rewards.service import RewardService
from areal_jax.workflows.from_config import find_tools_config

Facts = dict[str, Any]


def releases() -> Facts:
    """Versions that must be equal in all processes of a run."""
    return {
        "areal_jax": __version__,
        "jax": version("jax"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


class RewardWorker:
    """A reward service, with its own grading processes."""

    def __init__(self, emit: Emit, settings: str, source: str | None, kinds: Sequence[str]) -> None:
        """
        Args:
            emit: as of `TrainerHost`; so are settings and source.
            kinds: of tasks that will be graded.
        """
        experiment = read_settings(settings, source)
        assert isinstance(experiment.launch, Ray)
        self._emit, self._report_every_s = emit, experiment.launch.report_every_s
        self._service = RewardService(
            experiment.rewards, kinds, find_tools_config(experiment.workflow), logs_failures=False
        )
        self._reporter: asyncio.Task[None] | None = None

    async def begin(self) -> Facts:
        """Start the grading processes, and reporting."""
        await self._service.start()
        self._reporter = asyncio.create_task(self._report(), name="reporter")
        return releases()

    async def grade_answer(self, task: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Grade an answer, as `RewardService.__call__`."""
        return asdict(await self._service(task_from_json(task), answer))

    async def grade(self, task: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Grade an answer without counting it, as `RewardService.grade`."""
        return asdict(await self._service.grade(task_from_json(task), answer))

    async def use(self, tool: str, argument: str) -> dict[str, Any]:
        """Execute a tool call, as `RewardService.use`."""
        return asdict(await self._service.use(tool, argument))

    async def end(self) -> None:
        """End all grading processes."""
        if self._reporter is not None:
            self._reporter.cancel()
        await self._service.close()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._report_every_s)
            self._emit("counts", self._service.counters())
