"""What a run writes besides metrics.jsonl, which it always writes."""

from __future__ import annotations

import chz


@chz.chz
class MetricsConfig:
    tensorboard: bool = chz.field(default=True, doc="write TensorBoard events")
    samples: bool = chz.field(default=True, doc="write samples.jsonl: every trained sample, token by token")
    trace: bool = chz.field(default=True, doc="write trace.json: who did what when, for Perfetto")
    progress: bool = chz.field(default=True, doc="show a progress line on the terminal")
