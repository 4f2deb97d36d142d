"""A policy that says what a script says, and the scripts of a task, with which a preflight tries
the path from a prompt to a reward.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from areal_jax.config.experiment import Experiment
from areal_jax.data.code_tasks import Repository, RepositoryTests, parse_tests
from areal_jax.data.references import ReferenceAnswer
from areal_jax.data.repository_files import (
    RepositoryFiles,
    apply_diff,
    parse_diff,
)
from areal_jax.data.tool_calls import ToolCall
from areal_jax.protocols import Tokenizer
from areal_jax.records import Completion, OnProgress, Task, with_stop_token
from areal_jax.rewards.exploits import Exploit, find_exploits, write_program
from areal_jax.rewards.tools import TOOLS
from areal_jax.workflows.config import CallFormat, Hermes, MultiTurn, Tags, ToolUse
from areal_jax.workflows.tool_use import MAX_CALLS, parse_calls
from areal_jax.workflows.turns import read_files

FILLER = "Let me think about this step by step.\n"

FORMS = (
    "{boxed}",
    "{plain}",
    "#### {plain}",
    "<answer>{plain}</answer>",
    "<answer>{boxed}</answer>",
    "<think>\nIt follows.\n</think>\n{boxed}",
    "<think>\nIt follows.\n</think>\n{plain}",
    "<think>\nIt follows.\n</think>\n<answer>{plain}</answer>",
    "<think>\nIt follows.\n</think>\n<answer>{boxed}</answer>",
    "<reasoning>\nIt follows.\n</reasoning>\n<answer>\n{plain}\n</answer>\n",
)
"""Forms in which an answer is tried; {boxed} is in \\boxed{}, or in a ```python block."""

_ARGUMENTS = {"calculator": "2*(3+4)", "python": "print(2*(3+4))"}
"""Argument of a call by tool; other tools are asked for the task's question."""

MAX_QUERY_CHARS = 40


@dataclass(frozen=True, slots=True)
class Script:
    """What a policy says on one task."""

    name: str
    turns: tuple[str, ...]
    """Text of each call of the policy; the last one is repeated."""
    is_right: bool | None = None
    """Whether it must be rewarded like a right answer, or like a wrong one; None: neither."""
    is_cut: bool = False
    """Whether the last turn is truncated in the middle of its answer, at the token budget."""
    calls: tuple[str, ...] = ()
    """Tools that it calls."""


@dataclass(slots=True, eq=False)
class ScriptedPolicy:
    """The `Generate` of one script."""

    script: Script
    tokenizer: Tokenizer
    max_new_tokens: int
    num_calls: int = 0
    outputs: list[int] = field(default_factory=list)
    """Tokens of each call."""

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        grammar: str = "",
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        """Return the script's next turn. Only scripts that are to be truncated end at the budget.

        The behaviour policy is uniform over the vocabulary, as a random policy nearly is.
        """
        turn = min(self.num_calls, len(self.script.turns) - 1)
        self.num_calls += 1
        tokens = self.tokenizer.encode(self.script.turns[turn])
        is_cut = self.script.is_cut and turn == len(self.script.turns) - 1
        if is_cut:
            own = self.max_new_tokens
            tokens = self._fill(tokens, own if max_new_tokens is None else min(max_new_tokens, own))
        else:
            tokens = with_stop_token(tokens, self.tokenizer.stop_token_ids)
        self.outputs.append(len(tokens))
        logp = np.full(len(tokens), -math.log(self.tokenizer.vocab_size), np.float32)
        versions = np.zeros(len(tokens), np.int32)
        completion = Completion(tokens, logp, versions, "length" if is_cut else "stop")
        return [completion] * num_samples

    def _fill(self, tokens: Int32[np.ndarray, "T"], budget: int) -> Int32[np.ndarray, "_"]:
        """Put text before an answer, so that the budget ends in the middle of it."""
        kept = tokens[: min(len(tokens) // 2, budget)]
        filler = self.tokenizer.encode(FILLER)
        return np.concatenate([np.resize(filler, budget - len(kept)), kept])


def write_answer(form: str, task: Task, answer: str) -> str:
    """Write an answer in one of FORMS."""
    boxed = f"```python\n{answer}\n```" if task.kind == "code" else f"\\boxed{{{answer}}}"
    return form.replace("{boxed}", boxed).replace("{plain}", answer)


def _write_right(
    experiment: Experiment, task: Task, reference: ReferenceAnswer, form: str
) -> tuple[str, ...]:
    """Write the turns of the reference answer; for a repository, calls that apply its patch."""
    workflow, repository = experiment.workflow, _repository(task)
    if repository is None or not isinstance(workflow, ToolUse):
        return (write_answer(form, task, reference.right),)
    calls = [
        write_call(workflow.call_format, tool, argument)
        for tool, argument in _repair(
            read_files(repository), reference.right, edits="edit" in workflow.tools.names
        )
    ]
    turns = ("\n".join(calls[n : n + MAX_CALLS]) for n in range(0, len(calls), MAX_CALLS))
    return (*turns, "Done.")


def _repository(task: Task) -> Repository | RepositoryTests | None:
    """Return the repository that a task is about, if any."""
    tests = parse_tests(task.answer) if task.kind == "code" else None
    return tests if isinstance(tests, Repository | RepositoryTests) else None


def _repair(files: RepositoryFiles, patch: str, *, edits: bool) -> Iterator[tuple[str, str]]:
    """Yield tools and arguments of the calls that apply a patch, by `edit` or else by `shell`."""
    hunks = {each.new: each.hunks for each in parse_diff(patch)}
    for path, file in apply_diff(files, patch).items():
        if file is None:
            yield "shell", f"rm {shlex.quote(path)}"
            continue
        if not edits:
            content = shlex.quote(file.data.decode(errors="surrogateescape"))
            folder = os.path.dirname(path)
            made = f"mkdir -p {shlex.quote(folder)} && " if folder else ""
            yield "shell", f"{made}printf %s {content} > {shlex.quote(path)}"
            continue
        text = files[path].data if path in files else b""
        blocks = [(b"".join(old), b"".join(new)) for _, old, new in hunks[path]]
        for old, new in blocks:
            text = text.replace(old, new) if old and text.count(old) == 1 else b""
        change = file.data
        if (
            blocks
            and text == file.data
            and all(b"".join(block).endswith(b"\n") for block in blocks)
        ):
            change = b"".join(
                b"<<<<<<< SEARCH\n%b=======\n%b>>>>>>> REPLACE\n" % block for block in blocks
            )
        yield "edit", f"{path}\n{change.decode(errors='surrogateescape')}"


def write_candidates(
    experiment: Experiment, task: Task, reference: ReferenceAnswer
) -> Iterator[tuple[str, Script]]:
    """Write the reference answer in each of FORMS."""
    if _repository(task) is not None:
        yield FORMS[0], Script("reference", _write_right(experiment, task, reference, ""), True)
        return
    for form in FORMS:
        # A program without a block is also read, but only where nothing else is said.
        if task.kind != "code" or "{boxed}" in form:
            yield form, Script("reference", (write_answer(form, task, reference.right),), True)


def write_scripts(
    experiment: Experiment, task: Task, reference: ReferenceAnswer | None, form: str
) -> Iterator[Script]:
    """Write the scripts of a task, except its exploits.

    Args:
        experiment: its workflow decides which scripts apply.
        task: the task.
        reference: right and wrong answers; None leaves out the scripts that need them.
        form: form of an answer, one of FORMS.
    """
    workflow = experiment.workflow
    wrong = write_answer(form, task, _wrong_answer(task, reference))
    yield Script("empty", ("",), False)
    yield Script("wrong", (wrong,), False)
    right: tuple[str, ...] = ()
    if reference is not None:
        right = _write_right(experiment, task, reference, form)
        yield Script("reference", right, True)
        if _repository(task) is None:  # else the calls come before what is truncated
            yield Script("truncated", right, False, is_cut=True)
        if isinstance(workflow, MultiTurn) and workflow.max_turns > 1:
            yield Script("wrong, then reference", (wrong, *right))
        for turns, name, is_right in zip(
            reference.demonstrations,
            ("right demonstration", "wrong demonstration"),
            (True, False),
            strict=False,
        ):
            texts = tuple(turn.content for turn in turns if turn.role == "assistant")
            yield Script(name, texts, is_right, calls=tuple(_find_calls(texts)))
    if isinstance(workflow, ToolUse):
        for tool in workflow.tools.names:
            call = write_call(workflow.call_format, tool, _argument(tool, task, reference))
            turns, is_right = ((call, *right), True) if right else ((call,), None)
            yield Script(f"calls {tool}", turns, is_right, calls=(tool,))


def write_exploits(task: Task, reference: ReferenceAnswer | None, form: str) -> Iterator[Script]:
    """Write the exploits of a task, in the frame of a form."""
    frame = form.replace("{boxed}", "{}").replace("{plain}", "{}")
    for name, text in find_exploits(task, _wrong_answer(task, reference)).items():
        yield Script(f"exploit: {name}", (frame.replace("{}", text),), False)


def write_call(call_format: CallFormat, tool: str, argument: str) -> str:
    """Write a call as the format asks."""
    match call_format:
        case Hermes():
            call = {"name": tool, "arguments": {TOOLS[tool].parameter: argument}}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        case Tags():
            return f"<{tool}>{argument}</{tool}>"
        case _:
            raise ValueError(f"expected Hermes or Tags, found {type(call_format).__name__}")


def _find_calls(turns: Iterable[str]) -> dict[str, None]:
    """Tools that turns call in any format."""
    return {
        call.name: None
        for text in turns
        for call_format in (Hermes(), Tags())
        for call in parse_calls(call_format, text, tuple(TOOLS))
        if isinstance(call, ToolCall)
    }


def _wrong_answer(task: Task, reference: ReferenceAnswer | None) -> str:
    if reference is not None and reference.wrong:
        return reference.wrong
    if _repository(task) is not None:
        return ""
    if task.kind == "code":
        return write_program(Exploit("", "return 'wrong'"), parse_tests(task.answer))
    return "0" if reference is None else reference.wrong


def _argument(tool: str, task: Task, reference: ReferenceAnswer | None) -> str:
    """Argument of a call: a demonstration's, if one calls the tool."""
    for turns in () if reference is None else reference.demonstrations:
        for call in parse_calls(Tags(), turns[0].content, (tool,)):
            if isinstance(call, ToolCall):
                return next(iter(call.arguments.values()))
    return _ARGUMENTS.get(tool, task.prompt[-1].content[:MAX_QUERY_CHARS])
