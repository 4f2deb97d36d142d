"""How answers are judged and what verdicts are worth."""

from __future__ import annotations

import chz


@chz.chz
class RewardConfig:
    num_workers: int = chz.field(default=1, doc="judging processes")
    timeout_s: float = chz.field(default=10.0, doc="a verdict not reached by then is `timeout`, and the process is killed with its children")
    correct: float = chz.field(default=5.0, doc="reward of a correct answer")
    wrong: float = chz.field(default=-5.0, doc="reward of any other answer")
