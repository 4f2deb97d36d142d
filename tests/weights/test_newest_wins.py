"""The weight channel that all ways of weights share."""

from __future__ import annotations

import threading
from contextlib import closing

from areal_jax.weights.channel import LatestWins, WeightUpdate


def test_an_older_version_never_replaces_a_newer_waiting_one() -> None:
    carried = list[int]()

    def carry(update: WeightUpdate[str]) -> None:
        carried.append(update.version)
        channel.deliver(update.version, update.content)

    def make_late() -> str:
        is_making.set()
        assert may_end.wait(60)
        return "older"

    is_making, may_end = threading.Event(), threading.Event()
    channel = LatestWins[str, str]("channel", carry)
    with closing(channel):
        with channel.paused():
            sending = threading.Thread(target=channel.publish, args=(1, make_late))
            sending.start()
            assert is_making.wait(60)
            # While the content of version 1 is made, another thread publishes version 2.
            channel.publish(2, lambda: "newer")
            may_end.set()
            sending.join(60)
        assert channel.wait(1, timeout_s=60.0) == "newer"
        assert carried == [2]
        assert channel.metrics("dropped")["dropped"] == (1.0, 1.0)
