"""Metrics of the server for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the latency histogram."""

_PREFIX = "areal_jax"


class ServerMetrics:
    """Metrics of one app, in a registry of its own. Label values are never text of a client."""

    def __init__(
        self, num_running: Callable[[], int], measure_engine: Callable[[], Mapping[str, float]]
    ) -> None:
        """Create the metrics.

        Args:
            num_running: Requests in progress.
            measure_engine: Totals of the engine since it started; called once for each scrape.
        """
        self.registry = CollectorRegistry()
        self._measure_engine = measure_engine
        running = Gauge(
            "requests_running", "Requests in progress", namespace=_PREFIX, registry=self.registry
        )
        running.set_function(num_running)
        self.requests = Counter(
            "requests",
            "Finished requests",
            ("endpoint", "status"),
            namespace=_PREFIX,
            registry=self.registry,
        )
        self.failed_streams = Counter(
            "failed_streams",
            "Streams that ended with an error after their status was sent",
            ("endpoint",),
            namespace=_PREFIX,
            registry=self.registry,
        )
        self.unparsed_calls = Counter(
            "unparsed_tool_calls",
            "Answers without a tool call that look like one of this dialect",
            ("dialect",),
            namespace=_PREFIX,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "request_seconds",
            "Request latency",
            namespace=_PREFIX,
            registry=self.registry,
            buckets=BUCKETS_S,
        )
        self.prompt_tokens = Counter(
            "prompt_tokens",
            "Prompt tokens of completed requests",
            namespace=_PREFIX,
            registry=self.registry,
        )
        self.completion_tokens = Counter(
            "completion_tokens",
            "Sampled tokens of completed requests",
            namespace=_PREFIX,
            registry=self.registry,
        )
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's totals as counters."""
        for name, total in self._measure_engine().items():
            yield CounterMetricFamily(
                f"{_PREFIX}_engine_{name}", f"Engine total of {name}", value=total
            )
