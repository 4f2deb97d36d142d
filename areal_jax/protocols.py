"""Protocols between rooms: engine, grader, workflow, tokenizer, weights, and the run around a loop.

Per-token arrays are aligned with `tokens`: entry t belongs to token t. Axes: B rows, T tokens of a
row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Sized
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Int32

from areal_jax.records import (
    Completion,
    Group,
    Message,
    OnProgress,
    Request,
    RewardResult,
    RolloutState,
    Sample,
    Sampling,
    StepResult,
    Task,
    ToolResult,
    Weights,
)

T = TypeVar("T")

StepMetrics: TypeAlias = Mapping[str, "tuple[float, float] | float"]
"""Metrics of one trainer step: a number, or a sum and the weight to divide it by."""


@runtime_checkable
class Engine(Protocol):
    """Generates completions: the local engine loop, remote engines, or the simulator."""

    def submit(self, request: Request) -> Awaitable[list[Completion]]:
        """Return one completion per sample, in order. Call it from the asyncio thread.

        Raises:
            InvalidRequest: no retry can satisfy the request.
            EngineStopped: the engine answers no more requests.
        """
        ...

    def snapshot(self) -> Awaitable[dict[str, tuple[Completion, ...]]]:
        """Return the tokens of every unfinished request so far, by request id.

        All are as of one moment between two dispatches. Requests that finished before that moment
        return before this call does.
        """
        ...


@runtime_checkable
class MeasuredEngine(Engine, Protocol):
    """An engine with metrics."""

    def on_assignment(self, callback: Callable[[str, int], None]) -> None:
        """Set the callback for the id of a request and the number of the decode engine that has
        it.
        """
        ...

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """Sum and weight of every metric since the last call."""
        ...


@runtime_checkable
class Generate(Protocol):
    """A workflow's view of the engine; the controller adds ids, seeds, versions and journals."""

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        grammar: str = "",
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        """Return `num_samples` completions of a prompt.

        Args:
            prompt_tokens: the rendered prompt.
            num_samples: number of completions.
            max_new_tokens: token budget of this call, below the run's; None: the run's.
            grammar: grammar that the completions match, as of `data/grammars.py`; empty: none.
                Log-probs remain those among all tokens.
            on_progress: as in `Request`.
        """
        ...


@runtime_checkable
class Session(Protocol):
    """One agent's access to the policy, and a record of its calls."""

    base_url: str
    """Base URL of the OpenAI-compatible server."""
    api_key: str

    def calls(self) -> tuple[tuple[Int32[np.ndarray, "_"], Completion], ...]:
        """Return prompt and completion of every finished call, in order of completion."""
        ...


@runtime_checkable
class Sessions(Protocol):
    """Serves the policy to agents over HTTP."""

    def open(self, generate: Generate) -> AbstractAsyncContextManager[Session]:
        """Open a session whose calls run `generate`; once closed it refuses further calls."""
        ...


@runtime_checkable
class Grader(Protocol):
    """Grades one answer to a task."""

    async def __call__(self, task: Task, answer: str) -> RewardResult: ...


@runtime_checkable
class Tools(Protocol):
    """Runs the tools that a policy calls."""

    async def __call__(self, tool: str, argument: str) -> ToolResult: ...


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer interface of rooms above `data`."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...
    def render(self, messages: Sequence[Message]) -> Int32[np.ndarray, "T"]:
        """Return the tokens of a conversation in the chat template, with the generation prompt."""
        ...

    def render_answer(self, prompt: Sequence[Message], answer: str) -> Int32[np.ndarray, "T"]:
        """Return the tokens of this answer to `render(prompt)`, including the end of the turn."""
        ...

    def render_next(self, messages: Sequence[Message]) -> Int32[np.ndarray, "T"]:
        """Return the tokens between the end of an answer and the next generation.

        They are these messages in the chat template, with its separators and the generation prompt,
        and do not depend on earlier turns.
        """
        ...

    def encode(self, text: str) -> Int32[np.ndarray, "T"]: ...
    def decode(self, tokens: Int32[np.ndarray, "T"]) -> str:
        """Return the text of the tokens without special tokens."""
        ...


@runtime_checkable
class Workflow(Protocol):
    """Turns one task into samples.

    It is deterministic given the results of `generate` and `grader`, so that it can be replayed
    after a crash.
    """

    async def __call__(
        self, task: Task, generate: Generate, grader: Grader
    ) -> tuple[Sample, ...]: ...


@runtime_checkable
class WeightSource(Protocol):
    """Source of weight updates for an engine."""

    def newest(self, after: int) -> Weights | None:
        """Return the newest complete version above `after`, or None, without waiting."""
        ...

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Wait for a version of at least `at_least`.

        Raises:
            TimeoutError: no such version arrived in time; the message names it.
        """
        ...


@runtime_checkable
class WeightPublisher(Protocol):
    """Delivers new versions of the weights to all engines."""

    def publish(self, version: int, params: Any) -> None:
        """Deliver a version; never waits. The latest version wins."""
        ...

    def wait_all_engines(self, at_least: int, timeout_s: float) -> None:
        """Wait until every engine has a version of at least `at_least`."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Keep all engines on their version until the block ends."""
        ...

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """Sum and weight of every metric since the last call."""
        ...


@runtime_checkable
class VersionedTrainer(Protocol):
    """A trainer whose parameters have a version."""

    @property
    def version(self) -> int: ...
    @property
    def params(self) -> Any: ...


@runtime_checkable
class GroupTrainer(VersionedTrainer, Protocol):
    """A trainer of reinforcement learning."""

    def step(self, groups: Sequence[Group]) -> StepResult: ...


@runtime_checkable
class ExampleTrainer(VersionedTrainer, Protocol):
    """A trainer that learns from examples."""

    def step(self, examples: Sequence[Any]) -> StepResult: ...
    def measure(self, examples: Sequence[Any]) -> Mapping[str, tuple[float, float]]: ...


@runtime_checkable
class Stream(Protocol):
    """Tasks or examples in training order."""

    def __next__(self) -> Any: ...
    def state(self) -> Mapping[str, int]:
        """Position in the stream."""
        ...


@runtime_checkable
class RunningRollouts(Protocol):
    """Groups under way, as the run around the loop sees them."""

    @property
    def next_group_id(self) -> int: ...
    @property
    def buffer(self) -> Sized: ...
    @property
    def gate(self) -> object: ...
    async def snapshot(self) -> RolloutState: ...


@runtime_checkable
class Recorder(Protocol):
    """Files and terminal output of a run."""

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Record the block as one span on a lane of the trace."""
        ...

    def record_samples(
        self, version: int, groups: Sequence[Group], stale: Sequence[Sequence[Any]]
    ) -> None:
        """Write the samples that `version` was trained on."""
        ...

    def record_evaluation(self, version: int, metrics: Mapping[str, float], line: str) -> None:
        """Write and show the metrics of an evaluation of `version`."""
        ...

    def say(self, line: str) -> None:
        """Show a line."""
        ...


@runtime_checkable
class Evaluator(Protocol):
    """Evaluates versions of the policy, where the experiment evaluates."""

    async def evaluate(self, version: int) -> None:
        """Evaluate now."""
        ...

    async def start(self, version: int) -> None:
        """Evaluate in the background, unless an evaluation is running."""
        ...


@runtime_checkable
class Stop(Protocol):
    """A request to stop after the current step."""

    def is_set(self) -> bool: ...
    async def unless_set(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None where the request comes first."""
        ...


@runtime_checkable
class TrainingRun(Protocol):
    """The run around a training loop: it records, evaluates, saves and stops."""

    @property
    def stream(self) -> Stream:
        """Tasks or examples, positioned where training continues."""
        ...

    @property
    def weight_channel(self) -> WeightPublisher: ...
    @property
    def recording(self) -> Recorder: ...
    @property
    def evaluation(self) -> Evaluator: ...
    @property
    def stop(self) -> Stop: ...
    def record(
        self, version: int, metrics: StepMetrics, counters: Mapping[str, float] | None = None
    ) -> None:
        """Record the metrics of the step that trained `version`."""
        ...

    async def save(self, version: int, state: RolloutState) -> None:
        """Save a checkpoint."""
        ...

    async def finish(self) -> None:
        """Write the results, evaluate the last version and write the report."""
        ...


@runtime_checkable
class ReinforcementRun(TrainingRun, Protocol):
    """The run around `loop.train`."""

    @property
    def trainer(self) -> GroupTrainer: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def grader(self) -> Grader: ...
    @property
    def workflow(self) -> Workflow: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def restored(self) -> RolloutState | None:
        """State of the rollouts in the checkpoint from which the run resumes."""
        ...

    async def adapt_split(self) -> None:
        """Move devices between training and decoding, with placement.adaptive."""
        ...

    async def adapt_hosts(self, save: Callable[[], Awaitable[None]]) -> None:
        """Move the devices of trainer hosts, with placement.adaptive, from the checkpoint of the
        present version that `save` writes.
        """
        ...

    def watched(self, rollouts: RunningRollouts | None = None) -> AbstractAsyncContextManager[None]:
        """Raise Stalled in the block where the run makes no progress. With rollouts, a run that
        stalls or rejects every group ends with a checkpoint.
        """
        ...


@runtime_checkable
class FineTuningRun(TrainingRun, Protocol):
    """The run around `finetune.fine_tune`."""

    @property
    def trainer(self) -> ExampleTrainer: ...
    @property
    def eval_examples(self) -> Sequence[Any]: ...
    @property
    def decodes(self) -> bool:
        """Whether the run has engines."""
        ...
