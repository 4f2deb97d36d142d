"""Records that cross rooms; numpy only.

Per-token arrays are aligned with `tokens`: entry t belongs to token t. Axes: B rows, T tokens of a
row.

The file has more than 400 lines because every room reads these records from one place.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Int32, Shaped
from numpy.typing import DTypeLike

StopReason = Literal["stop", "length", "suspended"]
"""`stop`: a stop token was sampled. `length`: the budget ran out, so the answer is truncated.
`suspended`: to be resumed."""

ResultKind = Literal[
    "correct", "wrong", "no_answer", "timeout", "crashed", "infrastructure", "scored"
]
"""`scored`: a reward by itself (`rewards.scale=raw`), neither right nor wrong."""

NO_VERSION = -1
"""Version of a token that no policy sampled: prompts, feedback, tool output."""


ENVIRONMENT = "environment"
"""Kind of tasks that are seeds of an environment, which rewards its episodes itself."""

PUZZLE = "reasoning_gym"
"""Kind of tasks that are puzzles of reasoning-gym, which scores their answers."""

IMAGE = "<image>"
"""Place of an image in the text of a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    images: tuple[bytes, ...] = ()
    """Content of image files. They replace each IMAGE in `content` if there are as many, and
    otherwise precede it."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and what its grader needs."""

    id: str
    """Identifies the problem, not its position in the stream; stable over restarts and epochs."""
    prompt: tuple[Message, ...]
    answer: str
    """Reference answer, or the tests of a program."""
    kind: str = "math"
    """Grader that reads the answer: `math`, `code`, `countdown`, ..."""
    family: str = ""
    """Kind of problem, for metrics by family; empty if the source states none."""

    @property
    def images(self) -> tuple[bytes, ...]:
        """Images of the prompt, in order."""
        return tuple(image for message in self.prompt for image in message.images)


def task_to_json(task: Task) -> dict[str, Any]:
    """Encode a task as JSON values; messages without images have no field for them."""
    prompt = []
    for message in task.prompt:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.images:
            fields["images"] = [base64.b64encode(image).decode() for image in message.images]
        prompt.append(fields)
    return {**asdict(task), "prompt": prompt}


def task_from_json(fields: Mapping[str, Any]) -> Task:
    """Decode a task; the inverse of `task_to_json`."""
    prompt = tuple(
        Message(**{**message, "images": tuple(map(base64.b64decode, message.get("images", ())))})
        for message in fields["prompt"]
    )
    return Task(**{**fields, "prompt": prompt})


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one request."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 samples greedily."""
    top_k: int = 0
    """0 disables the filter."""
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    """Minimum probability of a token, as a fraction of the most likely token's."""
    min_new_tokens: int = 0
    """Number of tokens before which no stop token is sampled."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the completion contains."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once per occurrence in the completion."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or completion
    contain."""
    num_top_logprobs: int = 0
    """Number of most likely tokens to return at each position."""
    grammar: str = ""
    """Grammar that the completion matches, as of `data/grammars.py`; empty: none."""
    unmasked_logprobs: bool = False
    """Whether log-probs of a completion with a grammar are those among all tokens, as a trainer
    computes them, and not those among the tokens that may follow in the grammar."""

    def of_call(self, max_new_tokens: int | None, grammar: str) -> Sampling:
        """Return the same parameters for one call of a workflow.

        Args:
            max_new_tokens: token budget; None keeps the budget.
            grammar: grammar of the completions; empty: none.
        """
        budget = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        return replace(
            self, max_new_tokens=budget, grammar=grammar, unmasked_logprobs=bool(grammar)
        )


class TopLogprobs(NamedTuple):
    """Most likely tokens at each position of a completion, most likely first.

    The log-prob is -inf where fewer tokens could be sampled.
    """

    tokens: Int32[np.ndarray, "T K"]
    logp: Float32[np.ndarray, "T K"]
    """Log-probs under the sampling distribution."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Output of the engine for one sample: new tokens only, including the stop token."""

    tokens: Int32[np.ndarray, "T"]
    logp: Float32[np.ndarray, "T"]
    """Log-prob of each token under the distribution that it was sampled from."""
    versions: Int32[np.ndarray, "T"]
    """Version of the weights that sampled each token."""
    stop_reason: StopReason
    top_logprobs: TopLogprobs | None = None
    """Present if the request asked for them; not restored after a crash."""
    experts: Shaped[np.ndarray, "_ L k"] | None = None
    """With `engine.router_replay`, the experts of each token of the prompt and of `tokens`, in each
    layer, from when it was first fed to the policy; the last token never is. Of finished and
    suspended completions, and of their first tokens; a last part has those of the whole."""

    def slice(self, start: int, end: int | None = None) -> Completion:
        """Return the tokens in [start, end)."""
        span, top = slice(start, end), self.top_logprobs
        top = top and TopLogprobs(top.tokens[span], top.logp[span])
        tokens, experts = self.tokens[span], None
        if self.experts is not None and start == 0:
            experts = self.experts[: len(self.experts) + len(tokens) - len(self.tokens)]
        return Completion(
            tokens, self.logp[span], self.versions[span], self.stop_reason, top, experts
        )

    def concatenate(self, more: Completion) -> Completion:
        """Return these tokens followed by those of `more`, with the stop reason of `more`."""
        top, more_top = self.top_logprobs, more.top_logprobs
        if top is not None and more_top is not None:
            more_top = TopLogprobs(
                np.concatenate([top.tokens, more_top.tokens]),
                np.concatenate([top.logp, more_top.logp]),
            )
        tokens, logp, versions = (
            np.concatenate([getattr(self, name), getattr(more, name)])
            for name in ("tokens", "logp", "versions")
        )
        return Completion(tokens, logp, versions, more.stop_reason, more_top, more.experts)


def native_expert(dtype: DTypeLike) -> int:
    """Return the number, instead of an expert's, of a token whose experts the router chooses."""
    return int(np.iinfo(dtype).max)


def empty_completion() -> Completion:
    """Return the completion of a sample that has not started."""
    return Completion(
        np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "suspended"
    )


class Progress(NamedTuple):
    """New tokens of one sample since the last report."""

    sample: int
    sampled: Completion
    """The new tokens only; its stop_reason is `suspended` until the sample ends."""


OnProgress: TypeAlias = Callable[[Sequence[Progress]], Iterable[int]]
"""Callback in the asyncio thread with the new tokens of a request.

Returns the samples to end now with `stop`. The engine may have sampled a few more tokens by then;
the caller discards them. An engine may report rarely or never: the completions are complete.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for `num_samples` completions of one prompt.

    The token at position p of sample i is sampled with a key derived from (seed, i, p) only: slot,
    batch, interruption and resumption do not change it.
    """

    id: str
    prompt_tokens: Int32[np.ndarray, "P"]
    num_samples: int
    sampling: Sampling
    seed: int
    min_version: int = 0
    """Oldest version of the weights that may start the request; makes max_staleness=0 exactly
    synchronous."""
    resume: tuple[Completion, ...] = ()
    """One per sample: tokens sampled before a suspension or crash. Finished completions are
    returned unchanged."""
    on_progress: OnProgress | None = None
    """Receives tokens before the request is complete."""
    images: tuple[bytes, ...] = ()
    """Content of the image files of the prompt's image tokens, in order."""
    adapter: int = 0
    """Place of the adapter that samples, in an engine with several."""


def derive_seed(seed: int, name: str) -> int:
    """Return a seed below 2**31 derived from `seed` and `name`, equal in every process."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


class CallIds:
    """Ids for the generate calls of one task, derived from prompt and occurrence.

    Concurrent turns of a task get the same ids whichever turn runs first, so that a replay finds
    their journaled completions.
    """

    def __init__(self, task: int) -> None:
        """Start to count calls.

        Args:
            task: a number that no other task has.
        """
        self._task, self._num_calls = task, Counter[str]()

    def next(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        max_new_tokens: int | None,
        grammar: str,
    ) -> str:
        """Return the id of the next call with this prompt, budget and grammar."""
        # They are part of the id: a replay never returns a completion of another length or format.
        asked = "" if max_new_tokens is None else f"/{num_samples}/{max_new_tokens}"
        asked += grammar and f"/{grammar}"
        named = prompt_tokens.tobytes() + asked.encode()
        kind = hashlib.blake2b(named, digest_size=6).hexdigest()
        self._num_calls[kind] += 1
        return f"{self._task}.{kind}.{self._num_calls[kind] - 1}"


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Result of grading one answer."""

    kind: ResultKind
    """`infrastructure` means that the grader failed, not the answer."""
    detail: str = ""
    score: float | None = None
    """From 0 (wrong) to 1 (correct), if the grader gives partial credit; the reward itself if the
    kind is `scored`."""
    failed: bool = False
    """True if the reward call raised, returned no reward, did not end, or never ran. The group must
    not be trained on."""
    trace: str = ""
    """Traceback of a reward function that raised, from its own first frame."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, if the reward function returns them."""

    def __post_init__(self) -> None:
        if self.kind == "infrastructure":
            object.__setattr__(self, "failed", True)

    @property
    def credit(self) -> float:
        """The score; where there is none, 1 for a correct answer and 0 for any other."""
        return float(self.kind == "correct") if self.score is None else self.score

    def to_reward(self, correct: float, wrong: float, no_answer: float | None = None) -> float:
        """Return the reward.

        Args:
            correct: reward of a correct answer.
            wrong: reward of a wrong answer; partial credit interpolates between the two.
            no_answer: reward of a text without an answer; None: as a wrong answer.
        """
        if self.kind == "no_answer" and no_answer is not None:
            return no_answer
        score = self.credit
        if self.kind == "scored":
            return score
        return wrong + score * (correct - wrong)


ToolOutcome = Literal["done", "error", "timeout", "crashed", "infrastructure"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call. `infrastructure` means that the machine failed, not the call."""

    kind: ToolOutcome
    text: str
    """Text for the policy: the result, or the error of the call."""


def with_stop_token(
    sampled: Int32[np.ndarray, "T"], stop_token_ids: Sequence[int]
) -> Int32[np.ndarray, "_"]:
    """Return the answer with the token that ends a turn appended, if it lacks one.

    Truncated answers, and answers ended by a stop string, lack it.
    """
    lacks_its_end = len(sampled) == 0 or sampled[-1] not in stop_token_ids
    return np.concatenate(
        [sampled, np.array(stop_token_ids[:1] if lacks_its_end else (), np.int32)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One trajectory, with everything that training needs."""

    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    """True where the policy sampled the token."""
    behave_logp: Float32[np.ndarray, "T"]
    """0 outside the loss mask."""
    versions: Int32[np.ndarray, "T"]
    """NO_VERSION outside the loss mask."""
    reward: float
    grade: ResultKind
    stop_reason: StopReason
    experts: Shaped[np.ndarray, "T L k"] | None = None
    """Recorded experts of each token in each layer; `native_expert` where there are none."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, as the reward function returned them."""
    token_rewards: Float32[np.ndarray, "T"] | None = None
    """The parts of the reward that an environment gave for single turns, on the last token of each.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The samples of one task: the unit of gate, buffer and batch."""

    id: int
    """Start order of the group; unique in a run."""
    task: Task
    samples: tuple[Sample, ...]


class Weights(NamedTuple):
    """Complete parameters in the engine's layout, on its mesh."""

    version: int
    params: Any


class StepResult(NamedTuple):
    """Result of one trainer step."""

    metrics: Mapping[str, float | tuple[float, float]]
    """By name, a number, or a total and its weight."""
    stale: Sequence[Sequence[Bool[np.ndarray, "_"]]] = ()
    """By group and sample, true on the tokens that the loss excludes for their staleness."""
    advantages: Sequence[Sequence[Float32[np.ndarray, "_"]]] = ()
    """By group and sample, the advantage of every token. Empty from trainers in other processes."""


class SequenceImages(NamedTuple):
    """Preprocessed images of a sequence. Axes: P patches, C numbers of a patch."""

    patches: Float32[np.ndarray, "P C"]
    layout: Int32[np.ndarray, "P 5"]
    """Of each patch: number of its image, from 1; row and column; height and width of the image."""
    is_image: Bool[np.ndarray, "T"]
    """Tokens that stand for a part of an image."""
    positions: Int32[np.ndarray, "T 3"]
    """Time, row and column of each token, for RoPE."""


class PackedImages(NamedTuple):
    """Images of the rows of a micro-batch."""

    patches: Float32[np.ndarray, "B P C"]
    layout: Int32[np.ndarray, "B P 5"]
    """As in `SequenceImages`, with the images of a row counted together; 0 is padding."""
    slots: Int32[np.ndarray, "B T"]
    """Of each token of an image, 1 + its number in the row; 0 of text."""


class PackedBatch(NamedTuple):
    """One micro-batch of sequences packed into rows.

    Segment 0 is padding; the segments of a row count from 1.
    """

    tokens: Int32[np.ndarray, "B T"]
    segment_ids: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T ..."]
    """Position of the token in its own sequence; with images its time, row and column."""
    loss_mask: Bool[np.ndarray, "B T"]
    behave_logp: Float32[np.ndarray, "B T"]
    age: Int32[np.ndarray, "B T"]
    """Trainer steps since the token was sampled."""
    experts: Shaped[np.ndarray, "B T L k"] | None = None
    """Recorded experts; `native_expert` in padding."""
    images: PackedImages | None = None
    visible_until: Int32[np.ndarray, "B T"] | None = None
    """First place in its row that does not see a token, where sequences share tokens; 0 in
    padding."""


@dataclass(frozen=True, slots=True)
class SuspendedGroup:
    """A group that was running when a checkpoint was taken."""

    id: int
    task: Task
    calls: Mapping[str, tuple[Completion, ...]] = field(default_factory=dict)
    """Completions by request id, finished or `suspended`: a replay of the workflow continues from
    them."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutState:
    """State between task stream and trainer at one moment, for resuming after a crash."""

    tasks: Mapping[str, int]
    """Position in the task stream. Every earlier task was trained on, rejected, or is in the fields
    below."""
    next_group_id: int
    """Number of groups ever started."""
    rejected: Mapping[str, int]
    """Number of rejected groups by reason."""
    buffered: tuple[Group, ...]
    """Finished groups that are not trained on yet; oldest first."""
    suspended: tuple[SuspendedGroup, ...]
    """Running groups, oldest first."""
    staleness_limit: int | None = None
    """Limit to which the bound on staleness has adapted; None: no limit."""
