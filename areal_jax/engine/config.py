"""Size and habits of the decode engine."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import FRACTION, NOT_NEGATIVE, POSITIVE, at_most

MAX_TOP_K = 2**31 - 1
"""It travels to the device as a 32-bit integer; beyond the vocabulary it keeps all of it."""


@chz.chz
class EngineConfig:
    num_slots: int = chz.field(
        validator=POSITIVE,
        default=64,
        doc="sequences decoded at the same time, over all rollout devices",
    )
    max_prompt_tokens: int = chz.field(
        validator=NOT_NEGATIVE,
        default=0,
        doc="longest prompt, in tokens, later turns of a conversation included; a task with a "
        "longer one is skipped and counted. 0: what tasks and workflow need, found when the run "
        "is planned and written to config.json",
    )
    max_new_tokens: int = chz.field(
        validator=POSITIVE,
        default=1024,
        doc="tokens after which an answer is cut and counted as truncated",
    )
    steps_per_dispatch: int = chz.field(
        validator=POSITIVE,
        default=8,
        doc="decode steps between two looks at the queue and at newer weights",
    )
    draft_tokens: int = chz.field(
        validator=NOT_NEGATIVE,
        default=0,
        doc="speculative decoding: drafts that a decode step verifies after each sequence's last "
        "token, from draft_policy, or from what followed its last tokens before, there or in "
        "another sample of the prompt; the samples stay those of the policy. 0: off. It pays where "
        "a step reads memory most of its time, which is on accelerators with few slots",
    )
    draft_policy: str = chz.field(
        default="",
        doc="policy that proposes the draft_tokens: a smaller one with the same tokenizer, named "
        "as in policy.path, whose weights never change. Empty: drafts come from the sequences",
    )
    page_tokens: int = chz.field(
        validator=POSITIVE,
        default=16,
        doc="tokens of one page of KV memory: what samples share and what they take at a time",
    )
    kv_tokens: int = chz.field(
        validator=NOT_NEGATIVE,
        default=0,
        doc=(
            "tokens whose keys and values there is memory for, over all rollout devices; 0: "
            "every slot at its longest"
        ),
    )
    kv_dtype: Literal["compute", "int8", "float8_e4m3fn"] = chz.field(
        default="compute",
        doc=(
            "type of keys and values in KV memory; a narrow one takes half of it or less, and "
            "log-probs drift"
        ),
    )
    prefill_chunk_tokens: int = chz.field(
        validator=POSITIVE,
        default=2048,
        doc=(
            "of a longer prompt so many tokens are prefilled between two dispatches, so that the "
            "others decode on"
        ),
    )
    weights_dtype: Literal["compute", "int8", "float8_e4m3fn"] = chz.field(
        default="compute",
        doc="matrices of the layers: the compute dtype, or 8 bits with a scale for each output, "
        "rounded when weights are published",
    )
    on_update: Literal["recompute", "keep"] = chz.field(
        default="recompute",
        doc="KV caches of live sequences when weights arrive: rebuilt (the paper), or kept "
        "(cheaper, drifts); sequences that begin later find nothing of older weights",
    )
    batch_invariant: Literal["off", "equal_views", "full"] = chz.field(
        default="off",
        doc="the bits of a request do not depend on the others in its batch. equal_views: prompts "
        "are prefilled in programs of one number of rows, and cached prefixes are reused at "
        "multiples of prefill_chunk_tokens only. full: on CPUs, sequences of all lengths are also "
        "decoded by one program, which is slower for short ones",
    )
    router_replay: bool = chz.field(
        default=False,
        doc="record the experts of every token in the engine, and train with them instead of the "
        "router's own choice (R3, arXiv:2510.11370); mixtures of experts only",
    )
    replayed_experts: Literal["first", "rebuilt"] = chz.field(
        default="first",
        doc="with router_replay, the experts of a token whose KV cache was rebuilt with newer "
        "weights: those of when it was first fed, or those of the rebuilt cache",
    )
    temperature: float = chz.field(
        validator=NOT_NEGATIVE, default=1.0, doc="1: the policy itself; 0: the most likely token"
    )
    top_k: int = chz.field(
        validator=at_most(MAX_TOP_K), default=0, doc="draw among the k most likely tokens; 0: all"
    )
    top_p: float = chz.field(
        validator=FRACTION,
        default=1.0,
        doc="draw among the most likely tokens that hold this much probability",
    )
    admission_wait_s: float = chz.field(
        validator=NOT_NEGATIVE,
        default=0.0,
        doc="an idle engine starts when no request has come for so long, and after 8 times as long "
        "at the latest: requests that arrive one by one are decoded in the same dispatches",
    )
    request_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=3600.0,
        doc="a request not answered by then is an error that names it",
    )

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def tokens_per_dispatch(self) -> int:
        """Most tokens that a sequence samples in a dispatch."""
        return self.steps_per_dispatch * (1 + self.draft_tokens)
