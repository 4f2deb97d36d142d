"""Engines and reward workers of a run on a cluster: each is replaced when it dies, and engines join
and leave while the run goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from areal_jax.cluster.config import Ray
from areal_jax.cluster.connection import Connection
from areal_jax.cluster.engines import Engines
from areal_jax.cluster.graders import Graders
from areal_jax.cluster.placement import Cluster, InsufficientResources, Kind
from areal_jax.errors import ConfigError, WorkerDied
from areal_jax.protocols import Grader
from areal_jax.records import RewardResult, Task, task_to_json
from areal_jax.run.reward_worker import releases
from areal_jax.threads import log_failure

logger = logging.getLogger(__name__)

ENGINE = "areal_jax.run.worker_roles:EngineHost"
REWARDS = "areal_jax.run.reward_worker:RewardWorker"

REPLACEMENT_ATTEMPTS = 3
"""Failed attempts to start a worker after which it is given up."""

ENGINES_FILE = "engines"
"""File in the run folder with the number of engines that the run should have."""

RESIZE_EVERY_S = 1.0
"""Interval at which the number of engines is compared with the wanted one, in seconds."""


class EngineCount:
    """The wanted number of engines: what the file `engines` in the run folder says, else the most.

    The file is written while the run goes on, as by `echo 4 > RUN/engines`.
    """

    def __init__(self, folder: Path, config: Ray) -> None:
        self._file, self._config = folder / ENGINES_FILE, config
        self._refused: str | None = None

    def read(self) -> int | None:
        """Return the wanted number; None, with one log line for each text, if it cannot be read."""
        most = self._config.most_engines
        try:
            text = self._file.read_text(encoding="utf-8", errors="replace").strip()[:80]
        except FileNotFoundError:
            return most
        except OSError as error:
            text, number = str(error), 0
        else:
            number = int(text) if text.isascii() and text.isdigit() else 0
        if 1 <= number <= most:
            self._refused = None
            return number
        if text != self._refused:
            self._refused = text
            logger.error(
                "%s: expected a number of engines from 1 to %d (launch.max_engines), found %r; "
                "the number stays as it is",
                self._file,
                most,
                text,
            )
        return None


class WorkerPool:
    """Engines and reward workers, each replaced when it dies; as many engines as are wanted."""

    def __init__(
        self,
        cluster: Cluster,
        arguments: tuple[Any, ...],
        kinds: list[str],
        probe: Callable[[Grader], Coroutine[Any, Any, None]],
        wanted: Callable[[], int | None],
    ) -> None:
        """
        Args:
            arguments: settings and source, as roles get them.
            kinds: of tasks to grade.
            probe: raises ConfigError where a reward worker cannot grade.
            wanted: returns the wanted number of engines; None: the number stays as it is.
        """
        self._probe, self._read_wanted = probe, wanted
        self._cluster, self._arguments, self._kinds = cluster, arguments, kinds
        wait_s = cluster.config.start_timeout_s
        self.engines, self.graders = Engines(wait_s=wait_s), Graders(wait_s=wait_s)
        self._numbers = {"engine": itertools.count(), "reward worker": itertools.count()}
        self._policy: str | None = None
        self._wanted = cluster.config.rollout_engines
        self._num_given_up = 0
        """Engines that could not be started since the wanted number changed."""
        # Owned by this object, cancelled by `close`: workers being started, engines that leave, and
        # the task that keeps the number of engines.
        self._starting_engines: list[asyncio.Task[None]] = []
        self._others: set[asyncio.Task[None]] = set()
        self._closing = False
        self._is_held = False
        """Whether no engine is started or replaced, so that trainer hosts get what is free."""
        self._nodes = dict[int, str]()
        """Node of each engine that has run."""

    @property
    def is_complete(self) -> bool:
        """Whether all engines of the settings run, and no other one is leaving."""
        count = self._cluster.config.rollout_engines
        return len(self.engines.connections) == len(self.engines.staying) == count

    async def start(self) -> None:
        """Start all workers concurrently."""
        config = self._cluster.config
        await all_or_none(
            *(self._start_engine() for _ in range(config.rollout_engines)),
            *(self._start_grader() for _ in range(config.reward_workers)),
        )
        self._keep(self._follow_wanted(), "number of engines")

    async def close(self) -> None:
        """End all workers."""
        self._closing = True
        own = [*self._starting_engines, *self._others]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
        await asyncio.gather(self.engines.close(), self.graders.close())

    @asynccontextmanager
    async def without(self, leaving: Sequence[int]) -> AsyncIterator[None]:
        """Let engines leave before the block; start none until its end."""
        self._is_held = True
        try:
            await asyncio.gather(*map(self.engines.leave, leaving))
            yield
        finally:
            self._is_held = False

    def choose_leaving(self, num_hosts: int) -> list[int]:
        """As `choose_leaving`, of the engines that run, the least loaded first."""
        config = self._cluster.config
        of_nodes = [(number, self._nodes[number]) for number in self.engines.staying]
        return choose_leaving(of_nodes, num_hosts, config.trainer_devices // config.engine_devices)

    async def _follow_wanted(self) -> None:
        """Start engines, or let them leave, until there are as many as wanted."""
        while True:
            wanted = await asyncio.to_thread(self._read_wanted)
            if wanted is not None and wanted != self._wanted:
                logger.warning("engines: %d wanted, after %d", wanted, self._wanted)
                self._wanted, self._num_given_up = wanted, 0
            self._resize()
            await asyncio.sleep(RESIZE_EVERY_S)

    def _resize(self) -> None:
        """Start the engines that are missing, or let one of those that are too many leave."""
        if self._closing or self._is_held:
            return
        starting = [task for task in self._starting_engines if not task.cancelling()]
        staying = self.engines.staying
        missing = self._wanted - self._num_given_up - len(starting) - len(staying)
        for _ in range(missing):
            task = asyncio.create_task(self._try_to_start_engine(), name="start of an engine")
            self._starting_engines.append(task)
            task.add_done_callback(self._starting_engines.remove)
            task.add_done_callback(log_failure)
        if missing < 0 and starting:
            # Nothing of its work is lost.
            starting[-1].cancel()
        elif missing < 0 and len(staying) > 1:
            self._keep(self.engines.leave(staying[0]), "an engine leaves")

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        task.add_done_callback(log_failure)

    async def _try_to_start_engine(self) -> None:
        if not await self._try_to_start(self._start_engine):
            self._num_given_up += 1

    async def _start_engine(self) -> None:
        number = next(self._numbers["engine"])
        connection, facts = await start_worker(
            self._cluster, "engine", number, ENGINE, *self._arguments
        )
        self._policy = expected = self._policy or facts["policy"]
        try:
            require_same_policy(connection.name, facts, expected)
        except ConfigError:
            await connection.close()
            raise
        self._nodes[number] = connection.node
        self.engines.join(number, connection, facts["num_slots"], self._resize)

    async def _start_grader(self) -> None:
        number = next(self._numbers["reward worker"])
        connection, _ = await start_worker(
            self._cluster, "reward worker", number, REWARDS, *self._arguments, self._kinds
        )

        async def grade(task: Task, answer: str) -> RewardResult:
            return RewardResult(**await connection.call("grade", task_to_json(task), answer))

        try:
            await self._probe(grade)
        except ConfigError:
            await connection.close()
            raise
        self.graders.join(number, connection, self._replace_grader)

    def _replace_grader(self) -> None:
        async def replace() -> None:
            await self._try_to_start(self._start_grader)

        if not self._closing:
            self._keep(replace(), "replacement")

    async def _try_to_start(self, start: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Start a worker; return whether it runs after at most REPLACEMENT_ATTEMPTS failures."""
        attempt = 1
        while attempt <= REPLACEMENT_ATTEMPTS:
            try:
                await start()
                return True
            except InsufficientResources as error:
                logger.error("%s; continuing without it until there are resources", error)
            except (WorkerDied, ConfigError) as error:
                logger.error(
                    "starting a worker failed, attempt %d of %d: %s",
                    attempt,
                    REPLACEMENT_ATTEMPTS,
                    error,
                )
                attempt += 1
        logger.error(
            ("worker given up: continuing with %d engines and %d reward workers"),
            *(len(self.engines.connections), len(self.graders.connections)),
        )
        return False


def choose_leaving(engines: Iterable[tuple[int, str]], num_hosts: int, per_host: int) -> list[int]:
    """Choose the engines whose devices become those of further trainer hosts, each on one node.

    Args:
        engines: Number and node of each engine; the first ones of a node are chosen.
        num_hosts: Number of further trainer hosts.
        per_host: Number of engines with as many devices as a trainer host.

    Raises:
        ConfigError: No node has enough engines.
    """
    of_nodes = defaultdict[str, list[int]](list)
    for number, node in engines:
        of_nodes[node].append(number)
    leaving = list[int]()
    for _ in range(num_hosts):
        # From the node with the fewest: the others may have enough for another host.
        fitting = [numbers for numbers in of_nodes.values() if len(numbers) >= per_host]
        if not fitting:
            raise ConfigError(
                f"expected a node with {per_host} engines, whose devices a trainer host takes, "
                f"found nodes with {', '.join(str(len(each)) for each in of_nodes.values())}"
            )
        numbers = min(fitting, key=len)
        leaving += numbers[:per_host]
        del numbers[:per_host]
    return leaving


async def all_or_none(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run work concurrently; all results. Where one fails, the others are cancelled and awaited
    before its error is raised.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def start_worker(
    cluster: Cluster, kind: Kind, number: int, role: str, *arguments: Any
) -> tuple[Connection, dict[str, Any]]:
    """Start a worker; its connection, and the facts that its role reports. Raises as
    `Cluster.start` and `require_same_releases`.
    """
    connection, facts = await cluster.start(kind, number, role, *arguments)
    try:
        require_same_releases(connection.name, facts)
    except ConfigError:
        await connection.close()
        raise
    return connection, facts


def require_same_policy(name: str, facts: dict[str, Any], expected: str) -> None:
    """Require that an engine has the same policy files as the first one.

    Raises:
        ConfigError: it has others.
    """
    if facts["policy"] != expected:
        raise ConfigError(
            f"{name} ({facts['devices']}) found another policy than the other engines: expected "
            f"fingerprint {expected}, found {facts['policy']}; policy.path must name the same "
            "files on every host"
        )


def require_same_releases(name: str, facts: dict[str, Any]) -> None:
    """Require that a worker runs the same releases as this process.

    Raises:
        ConfigError: it runs others.
    """
    if different := [
        f"{what} {facts[what]}, expected {here}"
        for what, here in releases().items()
        if facts[what] != here
    ]:
        raise ConfigError(f"{name} has {' and '.join(different)}: install the same on every host")
