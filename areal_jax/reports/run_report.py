"""What the report says about one run, read from its folder and kept up to date while it grows."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import chz

from areal_jax.metrics import description, health
from areal_jax.metrics.config import METRICS, HealthConfig
from areal_jax.metrics.sinks import SAMPLES
from areal_jax.metrics.table import describe
from areal_jax.reports.lines import Lines
from areal_jax.reports.sample_index import STALENESS_BINS, SampleIndex, compact_group
from areal_jax.reports.series import MAX_POINTS, MetricSeries, is_step
from areal_jax.reports.summary import bottleneck, summarize

State = Literal["running", "finished", "stopped"]

MAX_SAMPLE_BYTES = 600_000
"""Size of the samples in a page, of which half are the newest."""
MAX_READ_BYTES = 4_000_000
"""Rows of samples.jsonl that one update reads for either half, if they have several groups."""
MAX_NEWEST = 256
"""Newest groups that a page may show."""
MAX_WINDOWS = 32
"""Parts of a run of which the page shows a group each, beside the newest groups."""
MAX_TOKENS = 600
"""Tokens of an answer in a page."""
MAX_CONFIGURATION_CHARS = 60_000

STATUSES = ("finding", "ended", "healthy")
"""States of a health check, in the order of the page."""

RECENT_STEPS = 20
"""Number of last steps from which the time left is estimated."""


class RunReport:
    """The contents of a run's report. For one thread."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: the run's folder.
        """
        self.folder = folder
        self._lines = Lines(folder / METRICS)
        self.samples = SampleIndex(folder / SAMPLES)
        self._encoded: dict[tuple[int, int], str] = {}
        self._clear()

    def _clear(self) -> None:
        self.metrics = MetricSeries()
        self._window = deque[dict[str, float]](maxlen=1)

    def update(self) -> None:
        """Read what the run has written since the last call.

        Raises:
            ValueError: a row is not JSON.
            KeyError: a row has no version.
        """
        if self._lines.is_replaced():
            self._clear()
        for _, line in self._lines.read():
            row = json.loads(line)
            self.metrics.add(row)
            if is_step(row):
                known = {name: float(value) for name, value in row.items() if value is not None}
                if not self._window:
                    self._window = deque(maxlen=1 + self._health_config().window_steps)
                    self._window.append({} if row["version"] == 0 else known)
                self._window.append(known)
        if self.samples.update():
            self._encoded = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of metrics.jsonl that were read."""
        return self._lines.offset

    def description(self) -> dict[str, Any]:
        """Return the contents of run.json; empty if there is none."""
        path = self.folder / description.FILE
        return json.loads(path.read_text()) if path.exists() else {}

    def _health_config(self) -> HealthConfig:
        settings = self.description().get("configuration", {})
        fields = {name: settings.get(f"health.{name}") for name in chz.asdict(HealthConfig())}
        return HealthConfig(**{name: value for name, value in fields.items() if value is not None})

    def encode(self, state: State, max_points: int = MAX_POINTS, *, samples: bool = True) -> str:
        """Return the run as JSON for the page.

        Args:
            state: whether the run goes on.
            max_points: points of a line.
            samples: whether to contain samples.
        """
        run = self.description()
        environment, settings = run.get("environment", {}), run.get("configuration", {})
        facts = {
            "name": self.folder.resolve().name,
            "folder": str(self.folder),
            "headline": run.get("headline", "areal_jax run"),
            "started_s": run.get("started_s"),
            "command": run.get("command", ""),
            "environment": environment,
            "configuration": shorten(settings),
            "updated_s": time.time(),
            **self._progress(state, settings.get("num_steps")),
            "summary": summarize(self.metrics),
            "bottleneck": bottleneck(self.metrics),
            "health": sorted(
                self._health(settings), key=lambda check: STATUSES.index(check["status"])
            ),
            "frames": self.metrics.encode(max_points),
            "ranges": self.metrics.ranges(),
            "metrics": describe(self.metrics.names()),
            "staleness": self._staleness(max_points),
            "samples": {
                "groups": len(self.samples),
                "bytes": self.samples.num_bytes,
                "grades": dict(self.samples.grades),
                "stop_reasons": dict(self.samples.stop_reasons),
            },
        }
        text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False)
        groups = self._groups() if samples else []
        return f'{text[:-1]},"groups":[{",".join(groups)}]}}'

    def _progress(self, state: State, num_steps: int | None) -> dict[str, Any]:
        done, times = self.metrics.last_version + 1, self.metrics.step_times
        if state == "stopped" and num_steps is not None and done >= num_steps:
            state = "finished"
        recent = list(times.items())[-RECENT_STEPS - 1 :]
        left_s = pace_s = None
        if len(recent) > 1:
            (first, first_s), (last, last_s) = recent[0], recent[-1]
            pace_s = (last_s - first_s) / max(1, last - first)
            if state == "running" and num_steps is not None:
                left_s = pace_s * max(0, num_steps - done)
        return {
            "state": state,
            "num_steps": num_steps,
            "steps_done": done,
            "step_s": pace_s,
            "left_s": left_s,
        }

    def _health(self, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield every check that applies: value, healthy range, findings and what to do."""
        config, window = self._health_config(), list(self._window)
        if len(window) < 2:
            return
        workflow = str(settings.get("workflow", ""))
        for name in health.find(window, config, workflow):
            check = health.check_named(name)
            history = self.metrics.series(health.PREFIX + name)
            held = [version for version, value in zip(*(history or ((), ())), strict=True) if value]
            is_active = history is not None and bool(history.values[-1])
            value = check.measure(window, config)
            yield {
                "name": name,
                "value": format(value, check.form),
                "healthy": check.healthy.format(**chz.asdict(config)),
                "status": "finding" if is_active else "ended" if held else "healthy",
                "first": held[0] if held else None,
                "steps": len(held),
                "meaning": check.meaning,
                "remedy": check.remedy,
            }

    def _staleness(self, max_points: int) -> dict[str, Any]:
        versions, counts = self.samples.staleness(max_points)
        return {"bins": STALENESS_BINS, "versions": versions, "counts": counts}

    def _groups(self) -> list[str]:
        """Return the groups in the page as JSON, oldest first: the newest ones, and one of each
        part of the run.
        """
        last = len(self.samples) - 1
        newest = range(last, max(-1, last - MAX_NEWEST), -1)
        spread = self.samples.representative(MAX_WINDOWS)
        # Of parts the newest and the oldest first, so that what fits covers the run.
        spread = [place for k, _ in enumerate(spread) for place in (spread[-1 - k], spread[k])]
        chosen: dict[tuple[int, int], str] = {}
        for places in (newest, spread):
            left_bytes, num_read = MAX_SAMPLE_BYTES // 2, 0
            for place in places:
                key = place, (size := self.samples.size(place))
                if key in chosen:
                    continue
                if key not in self._encoded:
                    # Groups of long samples enter the page one by one.
                    if num_read and num_read + size > MAX_READ_BYTES:
                        continue
                    num_read += size
                    self._encoded[key] = self._encode_group(place)
                left_bytes -= len(self._encoded[key].encode())
                if left_bytes < 0:
                    break
                chosen[key] = self._encoded[key]
        self._encoded = chosen
        return [chosen[key] for key in sorted(chosen)]

    def _encode_group(self, place: int) -> str:
        (rows,) = self.samples.rows([place])
        return json.dumps(
            compact_group(rows, MAX_TOKENS), separators=(",", ":"), ensure_ascii=False
        )


def shorten(settings: dict[str, Any]) -> dict[str, Any]:
    """Shorten long values, such as lists of files, so that all settings fit into a page."""
    limit = MAX_CONFIGURATION_CHARS // max(1, len(settings))
    return {
        name: value if len(text := str(value)) <= max(200, limit) else f"{text[:limit]} ..."
        for name, value in settings.items()
    }
