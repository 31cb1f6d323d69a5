"""Prometheus: counts and times of saves, loads and their phases, from ``shardckpt_event`` (extra ``prometheus``).

Example::

    import prometheus_client
    from shardckpt.integrations.prometheus import PrometheusListener
    from shardckpt.plugins import get_plugin_manager

    prometheus_client.start_http_server(9000)
    get_plugin_manager().register(PrometheusListener())

Each rank has metrics of its own: the scraper's labels tell them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from shardckpt.plugins import hookimpl

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from shardckpt.plugins import Event

#: Seconds: from a small local file to an hour of a slow store.
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class PrometheusListener:
    """Fills these metrics; ``operation`` is ``save``, ``load`` or another that :class:`shardckpt.Event` names.

    - ``shardckpt_operation_seconds{operation, result}``, a histogram; ``result`` is ``end`` or ``failure``.
    - ``shardckpt_phase_seconds{operation, phase, result}``, a histogram: writing, the commit and others.
    - ``shardckpt_bytes_total{operation}``: bytes that this rank has written, by operations that have ended.
    - ``shardckpt_last_success_timestamp_seconds{operation}``: when one last ended well; for an alert on its age.

    Args:
        registry: Has the metrics; by default that of the process.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._seconds = Histogram(
            "shardckpt_operation_seconds",
            "Seconds that operations on checkpoints took on this rank",
            ("operation", "result"),
            registry=registry,
            buckets=_BUCKETS,
        )
        self._phases = Histogram(
            "shardckpt_phase_seconds",
            "Seconds that phases of operations on checkpoints took on this rank",
            ("operation", "phase", "result"),
            registry=registry,
            buckets=_BUCKETS,
        )
        self._bytes = Counter(
            "shardckpt_bytes", "Bytes that this rank has written into checkpoints", ("operation",), registry=registry
        )
        self._success = Gauge(
            "shardckpt_last_success_timestamp_seconds",
            "When an operation last ended without an error",
            ("operation",),
            registry=registry,
        )

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        """Count the end or failure of an operation or phase."""
        if event.state not in ("end", "failure"):
            return
        if event.phase:
            self._phases.labels(event.operation, event.phase, event.state).observe(event.seconds)
            return
        self._seconds.labels(event.operation, event.state).observe(event.seconds)
        if event.state == "end":
            self._bytes.labels(event.operation).inc(event.nbytes)
            self._success.labels(event.operation).set_to_current_time()
