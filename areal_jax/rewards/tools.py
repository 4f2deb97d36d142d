"""Tools that a policy may call, and their execution in grading processes. Standard library only
until a tool is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from areal_jax.rewards.config import SandboxConfig

Use: TypeAlias = Callable[[str], tuple[str, str]]
"""Execution of a tool call: returns a ToolOutcome, and the text for the policy."""


class Tool(NamedTuple):
    description: str
    """Description for the policy."""
    parameter: str
    """Name of its only argument, a string."""


TOOLS: Mapping[str, Tool] = {
    "calculator": Tool(
        "The value of an arithmetic expression with + - * / // % ** and brackets, exact.",
        "expression",
    ),
    "python": Tool(
        "What a Python program prints. Each program runs by itself, without network.", "code"
    ),
    "shell": Tool(
        "What a command of bash prints. Files, directory, variables and background processes stay.",
        "command",
    ),
    "edit": Tool(
        "Writes a file: its path on the first line, then its text, or blocks of the lines "
        "<<<<<<< SEARCH, text that occurs once, =======, its replacement, >>>>>>> REPLACE.",
        "change",
    ),
    "search": Tool("The passages of a collection of documents that fit a query best.", "query"),
}


WORKSPACE_TOOLS = ("shell", "edit", "python")
"""Tools that run in a workspace, where shell or edit is one of the tools."""


def has_workspace(names: Sequence[str]) -> bool:
    """Return whether conversations with these tools have a workspace."""
    return "shell" in names or "edit" in names


def make_tools(
    names: Sequence[str],
    documents: str | None,
    num_results: int,
    sandbox: SandboxConfig,
    timeout_s: float,
) -> dict[str, Use]:
    """Make the tools of these names.

    Args:
        timeout_s: Time limit of one call of `python`.

    Raises:
        ValueError: A name is unknown, or documents are missing.
        OSError: Documents cannot be read.
        SandboxUnavailable: Programs cannot be isolated.
    """
    if unknown := [name for name in names if name not in TOOLS]:
        raise ValueError(f"no tool {', '.join(unknown)}; known are {', '.join(TOOLS)}")
    made = dict[str, Use]()
    if has_workspace(names):
        from areal_jax.rewards.sandbox import find_sandbox_command

        # Their calls run in workspaces, which the workflow opens; here it is found that they can.
        if find_sandbox_command(sandbox) is None:
            raise ValueError("shell and edit need rewards.sandbox.isolation=bubblewrap")
        names = [name for name in names if name not in WORKSPACE_TOOLS]
    if "calculator" in names:
        made["calculator"] = use_calculator
    if "python" in names:
        made["python"] = _python(sandbox, timeout_s)
    if "search" in names:
        made["search"] = _search(documents, num_results)
    return made


def use_calculator(expression: str) -> tuple[str, str]:
    from areal_jax.rewards.calculator import NotArithmetic, calculate

    try:
        return "done", calculate(expression)
    except NotArithmetic as error:
        return "error", f"Error: {error}"


def _python(config: SandboxConfig, timeout_s: float) -> Use:
    from areal_jax.rewards.sandbox import Ended, Sandboxes, SandboxUnavailable, find_sandbox_command

    bwrap = find_sandbox_command(config)
    made = list[Sandboxes]()

    def use(program: str) -> tuple[str, str]:
        # One in each grading process.
        sandboxes = made[0] if made else made.append(Sandboxes(config, bwrap)) or made[0]
        try:
            sandbox = sandboxes.take()
            try:
                with sandbox.start({"kind": "run", "program": program}) as job:
                    ended = sandbox.wait(min(config.test_timeout_s, timeout_s))
                    output, error = job.output(), job.last_error()
            finally:
                sandbox.close()
        except (SandboxUnavailable, OSError) as failure:
            return "infrastructure", f"sandbox: {failure}"
        match ended:
            case Ended("exit", 0):
                return "done", output
            case Ended("timeout"):
                return "timeout", f"{output}\nError: no end in time"
            case Ended("memory" | "output" as what):
                return "crashed", f"{output}\nError: too much {what}"
            case _:
                return "crashed", f"{output}\nError: {error or 'the program was killed'}"

    return use


def _search(documents: str | None, num_results: int) -> Use:
    from areal_jax.data.documents import read_passages
    from areal_jax.rewards.search import Index

    if documents is None:
        raise ValueError(
            "search has nothing to look in: set workflow.tools.documents to a file or folder of "
            "yours"
        )
    index = Index(read_passages(Path(documents).expanduser()) if documents != "facts" else _facts())

    def use(query: str) -> tuple[str, str]:
        found = index.search(query, num_results)
        return "done", "\n".join(found) or "Nothing was found."

    return use


def _facts() -> list[str]:
    from areal_jax.data.facts import all_facts

    return all_facts()
