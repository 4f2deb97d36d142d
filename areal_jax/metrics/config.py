"""What a run writes besides metrics.jsonl, which it always writes."""

from __future__ import annotations

import chz

METRICS = "metrics.jsonl"
"""Name under which a run folder keeps a row of numbers for every step and evaluation."""


@chz.chz
class MetricsConfig:
    tensorboard: bool = chz.field(default=True, doc="write TensorBoard events")
    samples: bool = chz.field(default=True, doc="write samples.jsonl: every trained sample, token by token")
    trace: bool = chz.field(default=True, doc="write trace.json: who did what when, for Perfetto")
    progress: bool = chz.field(default=True, doc="show a progress line on the terminal")
