"""How answers are judged and what verdicts are worth."""

from __future__ import annotations

import chz


@chz.chz
class RewardConfig:
    num_workers: int = chz.field(default=1, doc="judging processes")
    timeout_s: float = chz.field(
        default=10.0, doc="a verdict not reached by then is `timeout`, and the process is killed with its children"
    )
    correct: float = chz.field(default=5.0, doc="reward of a correct answer")
    wrong: float = chz.field(default=-5.0, doc="reward of any other answer")
    accept_plain: bool = chz.field(
        default=False, doc="the last number counts as the answer where nothing is boxed or after '####'"
    )
    function: str | None = chz.field(
        default=None,
        doc="your own judge, FILE.py:NAME or PACKAGE.MODULE:NAME, called as NAME(task, answer) -> bool in the judging process; "
        "none: mathematics",
    )
