"""Trials of a preflight: scripts of a few tasks, each through the experiment's workflow, tools and
verifier to a reward.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from areal_jax.config.experiment import Experiment
from areal_jax.data.references import ReferenceAnswer, find_references
from areal_jax.data.sources import TaskSet
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import ConfigError, first_error
from areal_jax.protocols import Tools
from areal_jax.records import ENVIRONMENT, Task, ToolResult
from areal_jax.rewards.service import RewardService
from areal_jax.rewards.workspace import Workspaces
from areal_jax.run.generation import WorkflowHost, start_host, workflow_of
from areal_jax.run.grading import probe_rewards, start_rewards
from areal_jax.run.preflight_findings import Finding, Trial
from areal_jax.run.reward_model import reward_model_of
from areal_jax.run.scripted_policy import (
    FORMS,
    Script,
    ScriptedPolicy,
    write_candidates,
    write_exploits,
    write_scripts,
)
from areal_jax.workflows.from_config import find_tools_config

NUM_SEARCHED = 64
"""First rows of a source, among which tasks of every kind and family are chosen."""

MIN_TASKS, MAX_TASKS = 3, 8
"""Tasks of each kind."""

MAX_CODE_TASKS = 3
"""The same for programs, which take longest."""

MAX_BUDGET = 512
"""Tokens after which an answer is truncated in the trials, if engine.max_new_tokens is higher."""

TRIAL_TIMEOUT_S = 120.0
"""Time limit of one script on one task, in seconds."""


@dataclass(slots=True, eq=False)
class CountedTools:
    """Tools that count their calls."""

    tools: Tools
    calls: Counter[str] = field(default_factory=Counter)

    async def __call__(self, tool: str, argument: str) -> ToolResult:
        self.calls[tool] += 1
        return await self.tools(tool, argument)


class Trials:
    """Scripts of the first tasks, each through the experiment's workflow to a reward."""

    def __init__(self, experiment: Experiment, tokenizer: HFTokenizer, notes: list[str]) -> None:
        self._experiment, self._tokenizer, self._notes = experiment, tokenizer, notes
        self.budget = min(experiment.engine.max_new_tokens, MAX_BUDGET)
        self.made: list[Trial] = []
        self.findings: list[Finding] = []

    async def run(self, tasks: TaskSet, eval_tasks: TaskSet) -> Trials:
        """Make all trials."""
        experiment = self._experiment
        service = RewardService(
            experiment.rewards,
            frozenset(tasks.kinds | eval_tasks.kinds) - {ENVIRONMENT},
            find_tools_config(experiment.workflow),
            scorer=reward_model_of(experiment),
            logs_failures=False,
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(service)
            host = await start_host(stack, experiment, self._tokenizer, opponents=None)
            await start_rewards(service, experiment, say=self._note)
            try:
                await probe_rewards(service.grade, experiment, eval_tasks.tasks, say=self._note)
            except ConfigError as error:
                remedy = "change eval_tasks or rewards"
                self.findings.append(Finding("eval_tasks", "graded answers", f"{error}", remedy))
            chosen = _choose(tasks.tasks)
            references = find_references(experiment.tasks, tasks.tasks, chosen)
            by_kind: dict[str, list[tuple[Task, ReferenceAnswer | None]]] = {}
            for index, reference in zip(chosen, references, strict=True):
                task = tasks.tasks[index]
                by_kind.setdefault(task.kind, []).append((task, reference))
            for kind, of_kind in by_kind.items():
                await self._try_kind(kind, of_kind, service, host)
        return self

    def _note(self, warning: str) -> None:
        self._notes.append(warning.removeprefix("warning: "))

    async def _try_kind(
        self,
        kind: str,
        of_kind: Sequence[tuple[Task, ReferenceAnswer | None]],
        service: RewardService,
        host: WorkflowHost | None,
    ) -> None:
        if missing := sum(reference is None for _, reference in of_kind):
            self._notes.append(
                f"{missing} of {len(of_kind)} tasks of kind {kind} have no reference answer in "
                "their source: no right answer is tried on them"
            )
        running = asyncio.Semaphore(self._experiment.rewards.num_workers)

        async def attempt(task: Task, script: Script) -> Trial:
            async with running:
                return await self._attempt(task, script, service, host)

        form = FORMS[0]
        solved = [(task, reference) for task, reference in of_kind if reference is not None]
        if solved:
            candidates = list(write_candidates(self._experiment, *solved[0]))
            tried = await asyncio.gather(
                *(attempt(solved[0][0], script) for _, script in candidates)
            )
            rewards = [trial.reward if trial.samples else -math.inf for trial in tried]
            best = int(np.argmax(rewards))
            form, longest = candidates[best][0], tried[best].num_tokens
            if best > 0:
                self._notes.append(f"answers of kind {kind} are rewarded in the form {form!r}")
            self.budget = min(self._experiment.engine.max_new_tokens, max(self.budget, 4 * longest))
        scripts = [
            (task, script)
            for task, reference in of_kind
            for script in write_scripts(self._experiment, task, reference, form)
        ]
        scripts += [(of_kind[0][0], script) for script in write_exploits(*of_kind[0], form)]
        # By task, so that the samples of a group lie together.
        self.made += await asyncio.gather(*(attempt(*each) for each in scripts))

    async def _attempt(
        self, task: Task, script: Script, service: RewardService, host: WorkflowHost | None
    ) -> Trial:
        tools = CountedTools(service.use)
        policy = ScriptedPolicy(script, self._tokenizer, self.budget)
        samples, failure = (), ""
        if isinstance(host, Workspaces):
            host = host.apart()
        try:
            workflow = workflow_of(self._experiment, self._tokenizer, 1, tools, host)
            async with asyncio.timeout(TRIAL_TIMEOUT_S):
                samples = await workflow(task, policy, service)
        except Exception as error:  # the user's reward function, agent or template
            cause = first_error(error)
            failure = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        if isinstance(host, Workspaces):
            tools.calls += host.calls
        return Trial(
            script=script,
            task=task,
            samples=samples,
            error=failure,
            tools=tools.calls,
            num_tokens=max(policy.outputs, default=0),
        )


def _choose(tasks: Sequence[Task]) -> list[int]:
    """Indices of a few tasks of every kind, and of every family if there is room."""
    first = list(islice(tasks, NUM_SEARCHED))
    chosen: dict[str, list[int]] = {}
    families = set[tuple[str, str]]()
    for is_filling in (False, True):
        for index, task in enumerate(first):
            of_kind = chosen.setdefault(task.kind, [])
            most = MAX_CODE_TASKS if task.kind == "code" else MAX_TASKS
            is_new = (task.kind, task.family) not in families
            is_wanted = len(of_kind) < MIN_TASKS if is_filling else is_new and len(of_kind) < most
            # A row may occur twice.
            if is_wanted and all(first[other].id != task.id for other in of_kind):
                families.add((task.kind, task.family))
                of_kind.append(index)
    return [index for of_kind in chosen.values() for index in sorted(of_kind)]
