"""Reward functions of three frameworks, recognized by the names of their parameters:

- areal_jax: `(task, answer)`, which returns a bool, a number, or a dict of named components;
- TRL: `(prompts, completions, **kwargs)`, a list of numbers
  (https://huggingface.co/docs/trl/grpo_trainer);
- verl: `(data_source, solution_str, ground_truth, extra_info=None)`, a number, or a dict with
  "score"
  (https://verl.readthedocs.io/en/latest/preparation/reward_function.html).
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.records import Task
from areal_jax.rewards.functions import shown

EXPECTED = (
    "expected (task, answer), TRL's (prompts, completions, **kwargs), or verl's "
    "(data_source, solution_str, ground_truth, extra_info=None)"
)

_ELSEWHERE = {
    *(
        "completion",
        "response",
        "solution",
        "prompt",
        "prompts",
        "reference",
        "label",
        "target",
        "state",
        "info",
    ),
    *("data_source", "solution_str", "ground_truth", "extra_info"),
    *("data_sources", "solution_strs", "ground_truths", "extra_infos"),
}
"""Parameter names of other frameworks: a function that requires one of these expects something else
than (task, answer).
"""

RewardFunction = Callable[[Task, str], object]
Finish = Callable[[object], object]
"""Await a value if it is awaitable."""


_NOTHING = Task("", (), "")


def adapt(function: Callable[..., Any], finish: Finish) -> RewardFunction:
    """Convert a reward function of any known signature to (task, answer).

    Args:
        finish: Awaits the result of an async function.

    Raises:
        TypeError: The signature is unknown.
    """
    if not callable(function):
        raise TypeError(f"{EXPECTED}; found {type(function).__name__}, which cannot be called")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return lambda task, answer: finish(function(task, answer))
    named = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(
        parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )

    def chosen(given: Mapping[str, object]) -> dict[str, object]:
        return {name: value for name, value in given.items() if takes_any or name in named}

    def require(known: Mapping[str, object], signature_of: str) -> None:
        required = [
            name for name, parameter in named.items() if parameter.default is parameter.empty
        ]
        if unknown := [name for name in required if name not in known]:
            raise TypeError(
                f"{signature_of} is called with {', '.join(known)}, and {', '.join(unknown)} is "
                "not among them; "
                "give the parameter a default value, or write the function as (task, answer)"
            )

    if "completions" in named or ("prompts" in named and takes_any):
        require(_trl_arguments(_NOTHING, "", False), "TRL's signature")
        return _TRL(function, chosen, finish)
    if {"solution_str", "ground_truth"} <= named.keys():
        require(_verl_arguments(_NOTHING, ""), "verl's signature")
        return lambda task, answer: _verl_score(
            finish(function(**chosen(_verl_arguments(task, answer))))
        )
    if {"task", "answer"} <= named.keys():
        require({"task": None, "answer": None}, "a reward function of (task, answer)")
        return lambda task, answer: finish(function(task=task, answer=answer))
    try:
        signature.bind(_NOTHING, "")
        is_foreign = bool(
            _ELSEWHERE & {name for name in named if named[name].default is inspect.Parameter.empty}
        )
    except TypeError:
        is_foreign = True
    if is_foreign:
        raise TypeError(f"{EXPECTED}; found {signature}")
    return lambda task, answer: finish(function(task, answer))


class _TRL:
    """Convert a batched function to a function of one answer, called with a batch of one.

    TRL passes strings if prompts are strings, and lists of messages if they are conversations.
    Tasks do not say which their rows were: the function gets strings, and if it fails on these,
    messages, and from then on the form on which it succeeded.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        chosen: Callable[[Mapping[str, object]], dict[str, object]],
        finish: Finish,
    ):
        self._function, self._chosen, self._finish = function, chosen, finish
        self._forms = (False, True)

    def __call__(self, task: Task, answer: str) -> object:
        first_error = None
        for in_messages in self._forms:
            try:
                found = self._finish(
                    self._function(**self._chosen(_trl_arguments(task, answer, in_messages)))
                )
            except (
                Exception
            ) as error:  # the user's code; raised below, unless messages are what it reads
                first_error = first_error or error
                continue
            self._forms = (in_messages,)
            return _only(found)
        assert first_error is not None
        raise first_error


def _trl_arguments(task: Task, answer: str, in_messages: bool) -> dict[str, object]:
    """Return one-row columns. The reference answer has the names that data sets use."""
    prompt: object = "\n\n".join(message.content for message in task.prompt)
    completion: object = answer
    if in_messages:
        prompt = [{"role": message.role, "content": message.content} for message in task.prompt]
        completion = [{"role": "assistant", "content": answer}]
    reference = {name: [task.answer] for name in ("answer", "solution", "ground_truth")}
    return {
        "prompts": [prompt],
        "completions": [completion],
        **reference,
        "task_id": [task.id],
        "family": [task.family],
    }


def _only(found: object) -> object:
    """Return the only number of a list."""
    if (
        isinstance(found, str)
        or not (hasattr(found, "__len__") and hasattr(found, "__getitem__"))
        or len(found) != 1  # pyright: ignore[reportArgumentType]
    ):
        raise TypeError(
            f"expected a list of 1 number, one for each completion, found {shown(found)}"
        )
    return found[0]  # pyright: ignore[reportIndexIssue]


def _verl_arguments(task: Task, answer: str) -> dict[str, object]:
    prompt = [{"role": message.role, "content": message.content} for message in task.prompt]
    extra = {"index": task.id, "kind": task.kind, "prompt": prompt}
    return {
        "data_source": task.family,
        "solution_str": answer,
        "ground_truth": task.answer,
        "extra_info": extra,
    }


def _verl_score(found: object) -> object:
    if isinstance(found, dict):
        if "score" not in found:
            raise TypeError(f'expected a number, or a dict with "score", found {shown(found)}')
        # The others are for verl's logs. Finite numbers among them are components of the reward.
        return {
            name: part
            for name, part in found.items()
            if name == "score" or (isinstance(part, numbers.Real) and math.isfinite(part))
        }
    return found
