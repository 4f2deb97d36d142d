"""What the server counts, in the text form that Prometheus reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histogram of times."""


class Counts:
    """Counters, gauges and one histogram; counted in the asyncio thread."""

    def __init__(self) -> None:
        self.running = 0
        """Requests that are being answered."""
        self._totals = defaultdict[str, float](float)
        self._seconds = Counter[float]()

    def add(self, name: str, amount: int | float = 1, **labels: str) -> None:
        """Add to a counter; labels are names of our own, never a client's text."""
        reported = ",".join(f'{label}="{value}"' for label, value in labels.items())
        self._totals[f"areal_jax_{name}_total" + (f"{{{reported}}}" if reported else "")] += amount

    def time(self, seconds: float) -> None:
        """Add to the histogram of the time that requests take."""
        self._seconds[next((bound for bound in BUCKETS_S if seconds <= bound), float("inf"))] += 1
        self.add("request_seconds_sum", seconds)

    def text(self, engine: Mapping[str, float]) -> str:
        """All of it. Args: engine: what it has counted since it began."""
        for name, total in engine.items():
            self._totals[f"areal_jax_engine_{name}_total"] = total
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterable[str]:
        yield "# TYPE areal_jax_requests_running gauge"
        yield f"areal_jax_requests_running {self.running}"
        seen = ""
        for name, total in sorted(self._totals.items()):
            if name.startswith("areal_jax_request_seconds_sum"):
                continue
            family = name.partition("{")[0]
            if family != seen:
                yield f"# TYPE {family} counter"
            seen = family
            yield f"{name} {total:g}"
        yield "# TYPE areal_jax_request_seconds histogram"
        below = 0
        for bound in (*BUCKETS_S, float("inf")):
            below += self._seconds[bound]
            yield f'areal_jax_request_seconds_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {below}'
        yield (
            f"areal_jax_request_seconds_sum {self._totals['areal_jax_request_seconds_sum_total']:g}"
        )
        yield f"areal_jax_request_seconds_count {below}"
