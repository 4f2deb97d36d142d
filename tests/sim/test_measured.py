from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_jax.metrics.trace import Trace
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.lengths import Recorded
from areal_jax.sim.measured import MeasuredStages, StageTimes, stage_times
from areal_jax.sim.simulation import Workload, simulate

TIMES = StageTimes(
    decode_step_s=0.01,
    prefill_token_s=3e-4,
    recompute_token_s=1e-4,
    train_token_s=0.0015,
    train_step_s=0.3,
    grading_s=0.005,
    travel_s=0.05,
)


def write_run(folder: Path, engines: int = 1) -> Path:
    trace = Trace(folder / "trace.json")
    for engine in range(engines):

        def started(
            name: str, start_s: float, end_s: float, engine: int = engine, **args: int
        ) -> None:
            trace.span("rollout engine loop", name, start_s, end_s, {"engine": engine, **args})

        # 80 ms a dispatch: the first has 20 ms of a prefill in it, which was only enqueued in its
        # own 10 ms; the third was enqueued while the second was running.
        started("prefill", 0.00, 0.01, tokens=100)
        started("dispatch", 0.01, 0.11, tokens=32)
        started("dispatch", 0.112, 0.192, tokens=32)
        started("dispatch", 0.15, 0.272, tokens=32)
        started("swap", 0.272, 0.292, recompute_tokens=200)
    trace.span("trainer", "step 0", 0.3, 0.5)
    trace.span("trainer", "step 1", 0.6, 1.0)
    trace.span("rewards", "correct", 0.1, 0.104, {"task": "a"})
    trace.span("rewards", "wrong", 0.1, 0.106, {"task": "b"})
    trace.span("weight_channel", "weights", 0.3, 0.35, {"version": 1, "bytes": 8})
    trace.close()
    rows = [
        {"version": 0, "trainer/tokens_per_second": 1000.0},
        {"version": 1, "trainer/tokens_per_second": 500.0},
    ]
    rows.append({"version": 2, "evaluation/pass@1": 0.5})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize("engines", [1, 2])
def test_stage_times_are_read_from_a_run_folder(tmp_path: Path, engines: int) -> None:
    # A dispatch of 8 steps takes 80 ms and 2 ms of the host's. A prefill 10 + 100 - 80 ms for 100
    # tokens.
    expected = TIMES._replace(decode_step_s=0.082 / 8)
    found = stage_times(write_run(tmp_path, engines), steps_per_dispatch=8)
    assert found._asdict() == pytest.approx(expected._asdict())


def test_a_run_without_decoding_is_refused(tmp_path: Path) -> None:
    Trace(tmp_path / "trace.json").close()
    (tmp_path / "metrics.jsonl").write_text('{"version":0,"trainer/tokens_per_second":1000.0}\n')
    with pytest.raises(ValueError, match=r"has no record of decoding; set metrics\.trace=true"):
        stage_times(tmp_path, 8)


def test_a_simulated_step_is_the_sum_of_measured_times() -> None:
    # Two groups of two answers of 60 tokens, in dispatches of 8: 64 steps. Prompts of 10 tokens.
    behavior = EngineBehavior(num_slots=4, shares_prompts=False, steps_per_dispatch=8)
    workload = Workload(
        Recorded((60,)), 100, 10, groups_per_batch=2, samples_per_group=2, max_staleness=0
    )
    outcome = simulate(MeasuredStages(TIMES, behavior), workload, num_steps=4)
    step_s = 0.05 + 4 * 10 * 3e-4 + 64 * 0.01 + 0.005 + 4 * 70 * 0.0015
    assert outcome.step_s == pytest.approx(step_s)
    assert outcome.tokens_per_s == pytest.approx(4 * 60 / step_s)


def test_running_caches_are_rebuilt_at_the_measured_rate() -> None:
    # Answers of 60 and of 120 tokens: when weights arrive, some are running.
    workload = Workload(
        Recorded((60, 120)), 200, 10, groups_per_batch=1, samples_per_group=2, max_staleness=2
    )
    found = {
        rate: simulate(
            MeasuredStages(TIMES._replace(recompute_token_s=rate), EngineBehavior(num_slots=3)),
            workload,
            num_steps=6,
        )
        for rate in (0.0, 1e-2)
    }
    assert found[0.0].shares["recompute"] == 0.0 < found[1e-2].shares["recompute"]
