"""Records that cross rooms; numpy only.

Per-token arrays are aligned with `tokens`: entry t belongs to token t. Axes: B rows, T tokens of a
row.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Int32

StopReason = Literal["stop", "length", "suspended"]
"""`stop`: a stop token was sampled. `length`: the budget ran out, so the answer is truncated.
`suspended`: to be resumed."""

ResultKind = Literal[
    "correct", "wrong", "no_answer", "timeout", "crashed", "infrastructure", "scored"
]
"""`scored`: a reward by itself (`rewards.scale=raw`), neither right nor wrong."""

NO_VERSION = -1
"""Version of a token that no policy drew: prompts, feedback, tool output."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with what grading it needs."""

    id: str
    """Stable over restarts and epochs: names the problem, not its place in the stream."""
    prompt: tuple[Message, ...]
    answer: str
    """What the grader compares with."""
    kind: str = "math"
    """Which grader reads the answer."""
    family: str = ""
    """Kind of problem, for metrics by family; empty where the source knows none."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request draws its tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    """Leaves out tokens below this share of the most likely one's probability."""
    min_new_tokens: int = 0
    """Before so many tokens no stop token is sampled."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer holds."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token as often as the answer holds it."""
    repetition_penalty: float = 1.0
    """Divides the logit of every token that prompt or answer hold, and multiplies it where it is
    below 0."""
    num_top_logprobs: int = 0
    """Most likely tokens to report at every place of the answer."""

    def within(self, max_new_tokens: int | None) -> Sampling:
        """The same with another budget; None: as it is."""
        return self if max_new_tokens is None else replace(self, max_new_tokens=max_new_tokens)


class TopLogprobs(NamedTuple):
    """The most likely tokens at every place of an answer, most likely first; log-prob -inf where
    fewer could be sampled."""

    tokens: Int32[np.ndarray, "T K"]
    logp: Float32[np.ndarray, "T K"]
    """Under the distribution that the token was sampled from."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the engine drew for one sample: new tokens only, the stop token included."""

    tokens: Int32[np.ndarray, "T"]
    logp: Float32[np.ndarray, "T"]
    """Log-probability of each token under the distribution it was sampled from."""
    versions: Int32[np.ndarray, "T"]
    """Version of the weights that drew each token."""
    stop_reason: StopReason
    top_logprobs: TopLogprobs | None = None
    """Where the request asked for them; a crash does not keep them."""

    def between(self, start: int, end: int | None = None) -> Completion:
        """The tokens from `start` up to, not with, `end`."""
        part, reported = slice(start, end), self.top_logprobs
        reported = reported and TopLogprobs(reported.tokens[part], reported.logp[part])
        return Completion(
            self.tokens[part], self.logp[part], self.versions[part], self.stop_reason, reported
        )

    def followed_by(self, more: Completion) -> Completion:
        """These tokens and those; ended as those have."""
        reported, other_reported = self.top_logprobs, more.top_logprobs
        if reported is not None and other_reported is not None:
            other_reported = TopLogprobs(
                _joined(reported.tokens, other_reported.tokens),
                _joined(reported.logp, other_reported.logp),
            )
        tokens, logp, versions = (
            _joined(getattr(self, name), getattr(more, name))
            for name in ("tokens", "logp", "versions")
        )
        return Completion(tokens, logp, versions, more.stop_reason, other_reported)


def _joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.concatenate([first, second])


def empty_completion() -> Completion:
    """The completion of a sample that has not been started."""
    return Completion(
        np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "suspended"
    )


class Progress(NamedTuple):
    """What one sample has sampled since the last time."""

    sample: int
    sampled: Completion
    """The new tokens alone; its stop_reason is `suspended` while the sample goes on."""


OnProgress: TypeAlias = Callable[[Sequence[Progress]], Iterable[int]]
"""Called in the asyncio thread while a request is sampled. Returns samples that shall end here with
`stop`; a few tokens more may have been sampled meanwhile, which whoever asked cuts off. An engine
may tell little or nothing: the completions hold all."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """`num_samples` continuations of one prompt. The token at position p of sample i is sampled
    with a key made of (seed, i, p) alone, so slot, batch, interruption and resumption change no
    draw."""

    id: str
    prompt_tokens: Int32[np.ndarray, "P"]
    num_samples: int
    sampling: Sampling
    seed: int
    min_version: int = 0
    """Oldest weights that may start it: what makes max_staleness=0 exactly synchronous."""
    resume: tuple[Completion, ...] = ()
    """One per sample: what was sampled before a suspension or crash. Finished ones come back as
    they are."""
    on_progress: OnProgress | None = None
    """Who wants to know before the answer is whole."""


class WorkerDied(RuntimeError):
    """A process of the run is gone, or does not answer any more; the message names it and says how
    that is known."""


class NotStarted(WorkerDied):
    """A process of the run failed before it was ready, and would fail again."""


class NotGraded(RuntimeError):
    """A reward or tool call failed through no fault of the answer: the group must not be trained
    on."""


def derive_seed(seed: int, name: str) -> int:
    """A seed below 2**31 for the thing called `name`, the same in every process and on every
    machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


class CallNames:
    """Names of the calls by which one task is worked on: after their prompts, and after how often
    the task had asked so before. So turns that go on side by side bear the same names whichever
    comes first."""

    def __init__(self, task: int) -> None:
        """Args: task: a number that no other task has."""
        self._task, self._asked = task, Counter[str]()

    def next(
        self, prompt_tokens: Int32[np.ndarray, "P"], num_samples: int, max_new_tokens: int | None
    ) -> str:
        """The name of the next call of this kind."""
        # A call with a budget of its own is named after that too: another one finds no answer of
        # another length.
        budget = b"" if max_new_tokens is None else f"/{num_samples}/{max_new_tokens}".encode()
        kind = hashlib.blake2b(prompt_tokens.tobytes() + budget, digest_size=6).hexdigest()
        self._asked[kind] += 1
        return f"{self._task}.{kind}.{self._asked[kind] - 1}"


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A grader's finding on one answer. `infrastructure` means the grader failed, not the
    answer."""

    kind: ResultKind
    detail: str = ""
    score: float | None = None
    """From 0 (wrong) to 1 (correct), from a grader that knows degrees; the reward itself where the
    kind is `scored`."""
    failed: bool = False
    """Whether the reward call failed: it raised, returned no reward, did not end, or never ran. It
    says nothing of the answer, and its group must not be trained on."""
    trace: str = ""
    """Traceback of a reward function that raised, from its own first frame on."""

    def __post_init__(self) -> None:
        if self.kind == "infrastructure":
            object.__setattr__(self, "failed", True)

    def worth(self, correct: float, wrong: float, no_answer: float | None = None) -> float:
        """The reward, where a correct answer, a wrong one and none have these; none at all is as a
        wrong one by default."""
        if self.kind == "no_answer" and no_answer is not None:
            return no_answer
        score = float(self.kind == "correct") if self.score is None else self.score
        if self.kind == "scored":
            return score
        return wrong + score * (correct - wrong)


ToolOutcome = Literal["done", "error", "timeout", "crashed", "infrastructure"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of calling a tool. `infrastructure` means that the tool failed, not the call."""

    kind: ToolOutcome
    text: str
    """For the policy to read: the result, or what was wrong with the call."""


def ended(sampled: Int32[np.ndarray, "T"], stop_token_ids: Sequence[int]) -> Int32[np.ndarray, "_"]:
    """An answer as it stands in a longer conversation: one that was cut, or ended by a stop string,
    lacks the token that ends a turn, and gets it."""
    lacks_its_end = len(sampled) == 0 or sampled[-1] not in stop_token_ids
    return np.concatenate(
        [sampled, np.array(stop_token_ids[:1] if lacks_its_end else (), np.int32)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One generated trajectory with all that training on it needs."""

    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    """True where the policy drew the token."""
    behave_logp: Float32[np.ndarray, "T"]
    """0 outside the loss mask."""
    versions: Int32[np.ndarray, "T"]
    """NO_VERSION outside the loss mask."""
    reward: float
    grade: ResultKind
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The samples of one task: the unit of the gate, the buffer and the batch."""

    id: int
    """Place in the order in which groups were started; never used twice in a run."""
    task: Task
    samples: tuple[Sample, ...]


class Weights(NamedTuple):
    """Parameters in the engine's layout, on its mesh, whole."""

    version: int
    params: Any


class PackedBatch(NamedTuple):
    """One micro-batch: sequences laid end to end in rows. Segment 0 is padding; segments of a row
    count from 1."""

    tokens: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    """Place of the token in its own sequence."""
    loss_mask: Bool[np.ndarray, "B T"]
    behave_logp: Float32[np.ndarray, "B T"]
    age: Int32[np.ndarray, "B T"]
    """Trainer steps since the token was sampled."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """A group under way when a checkpoint was taken: its task and what each generate call had
    sampled."""

    id: int
    task: Task
    calls: Mapping[str, tuple[Completion, ...]] = field(default_factory=dict)
    """Request id to completions, finished or `suspended`; the workflow is run again and these are
    not sampled again."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutState:
    """Everything between the task stream and the trainer, as of one moment: what a run resumes from
    after a crash."""

    tasks: Mapping[str, int]
    """Place in the task stream; all tasks before it have been trained on, or are below, or were
    rejected."""
    next_group_id: int
    """Also how many groups were ever started."""
    rejected: Mapping[str, int]
    """Groups given up so far, by reason."""
    buffered: tuple[Group, ...]
    """Finished, not yet trained on; oldest first."""
    suspended: tuple[Suspended, ...]
    """Under way, oldest first."""
