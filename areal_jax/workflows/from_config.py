"""Construction of the configured workflow."""

from __future__ import annotations

import asyncio

from areal_jax.protocols import Tokenizer, Tools, Workflow
from areal_jax.rewards.config import RewardConfig, ToolsConfig
from areal_jax.rewards.tools import has_workspace
from areal_jax.rewards.workspace import Workspaces
from areal_jax.workflows import config, custom, single_turn
from areal_jax.workflows.agent import Agents, Runner
from areal_jax.workflows.environment import EnvironmentHost, Episodes
from areal_jax.workflows.turns import Feedback, ToolReply, Turns


def make_workflow(
    chosen: config.WorkflowConfig,
    tokenizer: Tokenizer,
    num_samples: int,
    rewards: RewardConfig,
    *,
    max_prompt_tokens: int,
    tools: Tools,
    host: Runner | EnvironmentHost | Workspaces | None = None,
) -> Workflow:
    """Create the workflow of an experiment, for training or evaluation.

    The function has more than 60 lines because it lists every workflow.

    Args:
        chosen: settings of the workflow.
        tokenizer: the policy's tokenizer.
        num_samples: samples per task.
        rewards: rewards of correct and wrong answers.
        max_prompt_tokens: the engine's limit.
        tools: runs tools.
        host: runs agents or environments, or opens workspaces; needed for `Agent` and
            `Environment`.

    Raises:
        ValueError: the workflow is unknown, or its host is missing.
    """
    match chosen:
        case config.SingleTurn():
            return single_turn.SingleTurn(tokenizer, num_samples, rewards)
        case config.MultiTurn(max_turns=max_turns, turn_discount=discount, feedback=feedback):
            return Turns(
                tokenizer,
                num_samples,
                rewards,
                Feedback(feedback),
                max_turns,
                max_prompt_tokens,
                turn_discount=discount,
            )
        case config.ToolUse(max_turns=max_turns):
            names = chosen.tools.names
            workspaces = host if isinstance(host, Workspaces) else None
            if workspaces is None and has_workspace(names):
                workspaces = Workspaces(rewards.sandbox, chosen.tools)
            reply = ToolReply(
                tools,
                names,
                chosen.call_format,
                workspaces,
                grades_files=isinstance(chosen, config.CodingAgent),
            )
            announcement = reply.announcement if chosen.announce else ""
            return Turns(
                tokenizer,
                num_samples,
                rewards,
                reply,
                max_turns,
                max_prompt_tokens,
                announcement=announcement,
            )
        case config.Environment() if isinstance(host, EnvironmentHost):
            return Episodes(chosen, tokenizer, num_samples, rewards, max_prompt_tokens, host)
        case config.Agent() if isinstance(host, Runner):
            return Agents(
                tokenizer,
                num_samples,
                rewards,
                host,
                asyncio.Semaphore(chosen.max_running),
                chosen.export,
            )
        case config.CustomWorkflow():
            return custom.Custom(chosen, tokenizer, num_samples, rewards, max_prompt_tokens)
        case _:
            raise ValueError(
                "expected SingleTurn, MultiTurn, ToolUse, Agent or Environment with host=, found "
                f"{type(chosen).__name__}"
            )


def find_tools_config(chosen: config.WorkflowConfig) -> ToolsConfig | None:
    """Return the settings of a workflow's tools; None if it has none."""
    return chosen.tools if isinstance(chosen, config.ToolUse) else None
