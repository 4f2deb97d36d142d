"""The progress line, on terminals and in files."""

import io
from contextlib import suppress

from rich.console import Console

from areal_jax.metrics import names
from areal_jax.metrics.progress import ProgressDisplay, facts_of_evaluation

METRICS = {
    names.REWARD: -1.234,
    names.STALENESS_MEAN: 1.26,
    names.STALENESS_MAX: 4.0,
    names.ROLLOUT_TOKENS_PER_S: 11_500.0,
    names.TRAIN_TOKENS_PER_S: 2_310_000.0,
}


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def shown(
    num_steps: int, steps, *, first_step: int = 0, terminal: bool = False, show_steps: bool = True
) -> list[str]:
    """Return the lines shown for steps of (seconds since the start, step, metrics)."""
    file, clock = io.StringIO(), Clock()
    console = Console(
        file=file, force_terminal=terminal, width=200, soft_wrap=True, color_system=None
    )
    progress = ProgressDisplay(
        "policy tiny, 4 tasks, 1 cpu",
        num_steps,
        first_step,
        show_steps=show_steps,
        console=console,
        clock=clock,
    )
    for since_s, step, metrics in steps:
        clock.now_s = 100.0 + since_s
        progress.update(step, metrics)
    progress.say("done [not markup]")
    progress.close()
    return file.getvalue().splitlines()


def test_progress_prints_the_headline_and_each_step(tmp_path):
    steps = [(10.0, 1, METRICS | {names.PASS_AT_1: 0.125}), (20.0, 2, METRICS), (3600.0, 3, {})]
    headline, first, second, third, last = shown(200, steps)
    assert headline == "policy tiny, 4 tasks, 1 cpu"
    # The first step includes compilation. 10 s for the second: 198 more take 1980 s =
    # 33 min.
    facts = "reward -1.23  pass@1 12.5%  staleness 1.3/4  rollout 12k tok/s  train 2.3M tok/s"
    assert first == f"step 1/200  {facts}  0:10 elapsed  - left"
    assert second == f"step 2/200  {facts}  0:20 elapsed  33:00 left"
    # The last evaluation stays; what was not measured is a dash. 3590 s for two steps: 197 more
    # take 353615 s = 98 h 13 min 35 s.
    assert third == (
        "step 3/200  reward -  pass@1 12.5%  staleness -/-  rollout - tok/s  train - tok/s  "
        "1:00:00 elapsed  98:13:35 left"
    )
    assert last == "done [not markup]"


def test_live_line_shows_the_newest_score():
    shown = io.StringIO()
    progress = ProgressDisplay(
        "headline", 10, console=Console(file=shown, force_terminal=True, width=200)
    )
    progress.update(10, METRICS | {names.PASS_AT_1: 0.125})
    progress.evaluated(7, {names.PASS_AT_1: 0.75})
    progress.close()
    assert "pass@1 75.0% of version 7" in shown.getvalue().rpartition("step 10/10")[2]


def test_empty_live_line_is_removed():
    shown = io.StringIO()
    progress = ProgressDisplay(
        "headline", 10, 10, console=Console(file=shown, force_terminal=True, width=200), unit="task"
    )
    progress.say("pass@1 50.0%")
    progress.close()
    # The last frame erases the line before it.
    assert "waiting" not in shown.getvalue().rpartition("\x1b[2K")[2]


def test_plain_lines_have_an_interval_and_include_the_last_step():
    lines = shown(100, [(0.5 * step, step, METRICS) for step in range(1, 101)])
    # Steps follow every 0.5 s and lines every 5 s: steps 1, 11, ... 91, and the last.
    assert [line.split()[1] for line in lines[1:-1]] == [
        f"{step}/100" for step in (*range(1, 100, 10), 100)
    ]


def test_time_left_counts_steps_of_this_process_only():
    # 90 of 100 steps were done before; after the first one, which waited for the compiler, one took
    # 7 s, so 8 take 56 s.
    _, first, second, _ = shown(100, [(600.0, 91, METRICS), (607.0, 92, METRICS)], first_step=90)
    assert first.endswith("10:00 elapsed  - left")
    assert second.endswith("10:07 elapsed  0:56 left")


def test_supervised_step_shows_loss_and_scores():
    metrics = {names.LOSS: 1.25, names.TRAIN_TOKENS_PER_S: float("nan")}
    scores = {names.PERPLEXITY: 7.25, names.PASS_AT_1: 0.5}
    _, first, last, _ = shown(2, [(1.0, 1, metrics), (2.0, 2, metrics | scores)])
    assert first == "step 1/2  loss 1.2500  perplexity -  train - tok/s  0:01 elapsed  - left"
    assert last == (
        "step 2/2  loss 1.2500  perplexity 7.25  pass@1 50.0%  train - tok/s  0:02 elapsed  "
        "0:00 left"
    )


def test_evaluation_score_is_shown_from_then_on():
    file = io.StringIO()
    progress = ProgressDisplay("policy", 2, console=Console(file=file, width=200, soft_wrap=True))
    progress.evaluated(0, {names.PASS_AT_1: 0.25})
    progress.update(2, METRICS)
    assert "pass@1 25.0% of version 0" in file.getvalue()


def test_evaluation_progress_shows_the_score_so_far():
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, width=200, soft_wrap=True)
    progress = ProgressDisplay(
        "policy", 64, 32, unit="task", facts=facts_of_evaluation, console=console, clock=clock
    )
    progress.update(32, {})
    clock.now_s += 16.0
    progress.update(40, {names.PASS_AT_1: 0.25, names.ROLLOUT_TOKENS_PER_S: 1234.0})
    # 8 tasks took 16 s, so 24 more take 48 s.
    assert (
        file.getvalue().splitlines()[2]
        == "task 40/64  pass@1 25.0%  rollout 1234 tok/s  0:16 elapsed  0:48 left"
    )


def test_terminal_shows_the_same_facts_on_a_live_line():
    lines = shown(200, [(10.0, 1, METRICS)], terminal=True)
    assert lines[0] == "policy tiny, 4 tasks, 1 cpu"
    assert (
        "step 1/200 reward -1.23  pass@1 -  staleness 1.3/4  rollout 12k tok/s  train 2.3M tok/s"
        in "".join(lines)
    )
    assert any("done [not markup]" in line for line in lines)


def test_progress_can_be_disabled_but_not_the_headline():
    assert shown(2, [(1.0, 1, METRICS)], show_steps=False) == [
        "policy tiny, 4 tasks, 1 cpu",
        "done [not markup]",
    ]


def plain(clock: Clock) -> tuple[ProgressDisplay, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=200, soft_wrap=True)
    return ProgressDisplay("policy", 10, console=console, clock=clock), file


def test_stages_are_shown_with_their_time():
    clock = Clock()
    progress, file = plain(clock)
    with progress.stage("loading"):
        clock.now_s += 2.5
    for seconds in (4.0, 1.0):
        with progress.stage("evaluation", announce=False):
            clock.now_s += seconds
    with progress.stage("compiling") as stage:
        stage.compiles("trainer", "zeros", 1, 3)
        stage.compiles("engine 1", "generate 64 0", 5, 8)
        assert stage.describe() == "compiling 6 of 11: trainer zeros, engine 1 generate 64 0"
        stage.compiles("trainer", "apply", 3, 3)
        assert stage.describe() == "compiling 8 of 11: engine 1 generate 64 0"
        clock.now_s += 7.0
    progress.close()
    assert file.getvalue().splitlines()[1:] == ["loading: 2.5 s", "compiling 11 programs: 7.0 s"]
    assert progress.stage_s == {"loading": 2.5, "evaluation": 5.0, "compiling": 7.0}


def test_without_terminal_a_line_comes_every_30_seconds():
    clock = Clock()
    progress, file = plain(clock)
    with progress.stage("compiling", announce=False) as stage:
        stage.compiles("trainer", "accumulate", 2, 4)
        for _ in range(70):
            clock.now_s += 1.0
            progress.tick()
    clock.now_s += 20.0
    progress.tick()
    progress.update(1, METRICS)
    clock.now_s += 30.0
    progress.tick()
    progress.close()
    lines = file.getvalue().splitlines()[1:]
    assert lines[0] == "compiling 2 of 4: trainer accumulate  0:30, 0:30 elapsed"
    assert lines[1] == "compiling 2 of 4: trainer accumulate  1:00, 1:00 elapsed"
    assert lines[2] == "waiting for the first step, 1:30 elapsed"
    assert lines[3].startswith("step 1/10  reward -1.23")
    assert lines[4] == "step 1/10 ended 0:30 ago, 2:00 elapsed"
    assert len(lines) == 5


def test_failed_stage_is_not_announced():
    progress, file = plain(Clock())
    with suppress(KeyError), progress.stage("loading"):
        raise KeyError
    progress.tick()
    progress.close()
    assert file.getvalue().splitlines() == ["policy"]


def test_terminal_shows_stages_until_the_first_step():
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=True, width=200, color_system=None)
    progress = ProgressDisplay("policy", 10, console=console, clock=clock)
    with progress.stage("compiling") as stage:
        stage.compiles("trainer", "accumulate", 2, 4)
        clock.now_s += 5.0
        assert progress._bar is not None
        progress._bar.refresh()
        shown = file.getvalue()
        assert "compiling 2 of 4: trainer accumulate  0:05" in shown
        last = shown.rpartition("compiling 2 of 4")[2]
        assert "step" not in last
    progress.update(1, METRICS)
    progress.close()
    assert "step 1/10 reward -1.23" in file.getvalue().rpartition("compiling 4 programs")[2]
