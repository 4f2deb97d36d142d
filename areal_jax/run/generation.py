"""How a run generates: its workflow with agents or environments, and how it samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TypeAlias

from areal_jax.config.experiment import AnyExperiment
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import ConfigError
from areal_jax.protocols import Tokenizer, Tools, Workflow
from areal_jax.records import Sampling
from areal_jax.rewards.tools import has_workspace
from areal_jax.rewards.workspace import Workspaces
from areal_jax.workflows.agent import AgentHost, Runner
from areal_jax.workflows.config import Agent, Environment, ToolUse
from areal_jax.workflows.environment import EnvironmentHost, Opponent
from areal_jax.workflows.from_config import make_workflow

WorkflowHost: TypeAlias = AgentHost | EnvironmentHost | Workspaces
"""Runs the agents or environments of a run, or opens the workspaces of its tools."""


def workflow_of(
    experiment: AnyExperiment,
    tokenizer: Tokenizer,
    num_samples: int,
    tools: Tools,
    host: Runner | EnvironmentHost | Workspaces | None,
) -> Workflow:
    """The experiment's workflow, with `num_samples` samples of each task."""
    return make_workflow(
        experiment.workflow,
        tokenizer,
        num_samples,
        experiment.rewards,
        max_prompt_tokens=experiment.engine.max_prompt_tokens,
        tools=tools,
        host=host,
    )


def training_sampling(experiment: AnyExperiment, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How training samples."""
    engine = experiment.engine
    return Sampling(
        engine.max_new_tokens, engine.temperature, engine.top_k, engine.top_p, stop_token_ids
    )


def evaluation_sampling(experiment: AnyExperiment, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How an evaluation samples."""
    return Sampling(
        experiment.engine.max_new_tokens,
        experiment.evaluation.temperature,
        stop_token_ids=stop_token_ids,
    )


async def start_host(
    stack: AsyncExitStack,
    experiment: AnyExperiment,
    tokenizer: HFTokenizer,
    opponents: Mapping[str, Opponent] | None,
) -> WorkflowHost | None:
    """Start the processes of environments, or those of agents and the server that they call, until
    the stack ends; None where the workflow has neither, and no workspaces.

    Args:
        stack: ends them.
        experiment: names them.
        tokenizer: the policy's tokenizer.
        opponents: those of `workflow.opponents`; None: the policy takes their place.

    Raises:
        ConfigError: the agent or environment cannot be loaded.
    """
    config = experiment.workflow
    if isinstance(config, Environment):
        environments = EnvironmentHost(config, opponents)
        stack.push_async_callback(environments.close)
        await environments.start()
        return environments
    if isinstance(config, ToolUse) and has_workspace(config.tools.names):
        return Workspaces(experiment.rewards.sandbox, config.tools)
    if not isinstance(config, Agent):
        return None
    # Imported where it is used: HTTP servers are for runs with agents.
    from areal_jax.serve.sessions import AgentServer

    # No timeout of its own: the end of an agent's session ends its calls.
    server = AgentServer(tokenizer, experiment.engine.max_new_tokens, math.inf)
    sessions = await stack.enter_async_context(server.listening())
    setting = "" if config.function is None else f"workflow.function={config.function}: "
    try:
        host = AgentHost(config, sessions)
        stack.push_async_callback(host.close)
        await host.start()
    except ValueError as error:
        raise ConfigError(f"{setting}{error}") from error
    return host
