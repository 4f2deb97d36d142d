"""What benchmarks/decode.py and benchmarks/interruption_measured.py count."""

from __future__ import annotations

import decode
import interruption_measured
import jax
import numpy as np
import pytest
from interruption_measured import NUM_VERSIONS, TOKENS_PER_VERSION, Arrivals, Fresh, Shelf

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.models import hf
from areal_jax.models.decoder import Policy
from areal_jax.records import Completion, Request, Sampling


def test_a_stream_is_measured_until_its_tail() -> None:
    events = decode.Events()
    for start_s, tokens in enumerate((16, 14, 12, 2)):
        events("dispatch", start_s, start_s + 1, {"tokens": tokens})
    # Of 6 requests in 2 slots 4 were finished when the third dispatch ended: 42 tokens of 3 x 2 x 8
    # in 3 seconds.
    measured = decode.stream(
        decode.Decoded(events, 0.0, [1.0, 2.0, 2.0, 2.5, 3.0, 4.0]), slots=2, steps=8
    )
    assert measured == {"occupancy": 42 / 48, "tokens_per_s": 14.0}


def test_weight_updates_arrive_by_token_count() -> None:
    arrivals = Arrivals([list(range(NUM_VERSIONS))])
    shelf = Shelf(arrivals, 0)
    assert shelf.newest(0) is None
    for end_s in range(3):
        arrivals.record("dispatch", 0.0, end_s, {"tokens": TOKENS_PER_VERSION // 2})
    newest = shelf.newest(0)
    assert (
        newest is not None
        and (newest.version, newest.params) == (1, 1)
        and arrivals.arrived_s[1:] == [1]
    )
    there_and_back = [interruption_measured.turn(version) for version in range(2 * NUM_VERSIONS)]
    assert there_and_back == [*range(NUM_VERSIONS), *range(NUM_VERSIONS - 2, -1, -1), 1]


@pytest.mark.slow
def test_drift_covers_tokens_after_a_swap() -> None:
    policy = Policy(hf.read_config(EMBEDDED))
    request, tokens = (
        Request("a", np.arange(16, dtype=np.int32), 1, Sampling(4), seed=0),
        np.array([3, 1, 4, 1], np.int32),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interruption_measured, "MOST_TOKENS", 16)
        versions = [policy.init(jax.random.key(seed)) for seed in range(2)]
        fresh = Fresh(policy, versions)
        whole = np.zeros((1, 32), np.int32)
        whole[0, :20] = [*request.prompt_tokens, *tokens]
        old, new = (np.asarray(fresh._logprobs(params, whole))[0, 16:20] for params in versions)
        # The first two were sampled by version 0, the others by version 1, of which the last is
        # reported 0.25 too high.
        logp = np.array([old[0] + 1, old[1], new[2], new[3] + 0.25], np.float32)
        answer = Completion(tokens, logp, np.array([0, 0, 1, 1], np.int32), "length")
        assert fresh.drift([request], {0: answer}) == pytest.approx(0.125, abs=1e-5)
