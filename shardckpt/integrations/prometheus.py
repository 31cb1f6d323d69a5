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

from shardckpt.engine import locate, measure
from shardckpt.errors import CheckpointingException
from shardckpt.plugins import get_plugin_manager, hookimpl

if TYPE_CHECKING:
    import os

    from prometheus_client import CollectorRegistry

    from shardckpt.plugins import Event

#: Seconds: from a small local file to an hour of a slow store.
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class PrometheusListener:
    """Fills these metrics; ``operation`` is ``save``, ``load`` or another that :class:`shardckpt.Event` names.

    - ``shardckpt_operation_seconds{operation, result}``, a histogram; ``result`` is ``end`` or ``failure``.
    - ``shardckpt_phase_seconds{operation, phase, result}``, a histogram: writing, the commit and others.
    - ``shardckpt_bytes_total{operation}``: bytes that this rank has written, or loaded, by operations that have ended.
    - ``shardckpt_last_success_timestamp_seconds{operation}``: when one last ended well; for an alert on its age.
    - ``shardckpt_failures_total{operation}``: operations that failed, before they began, too, as a manager's save that
      cannot list its folder; 0 of saves and loads from the start, so that ``increase`` sees the first.
    - ``shardckpt_last_failure_timestamp_seconds{operation, phase, error}``: when one last failed, in which phase
      (``""`` for none), and with which class of error, ``StorageError``.
    - ``shardckpt_in_flight{operation}``: operations that have begun and not ended, saves in the background among them.
    - ``shardckpt_blocked_seconds{operation}``, a histogram: what the training waited for each.
    - ``shardckpt_written_bytes_per_second{operation}``: of the last phase ``writing``.
    - ``shardckpt_folder_bytes{folder}``: the size of ``folder``, measured at each scrape.

    Args:
        registry: Has the metrics; by default that of the process.
        folder: A directory or URL of checkpoints, whose size the main rank may give; by default none.

    Raises:
        CheckpointingException: The registry has the metrics of another listener.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY, *, folder: str | os.PathLike[str] | None = None) -> None:
        try:
            self._seconds = Histogram(
                "shardckpt_operation_seconds",
                "Seconds that operations on checkpoints took on this rank",
                ("operation", "result"),
                registry=registry,
                buckets=_BUCKETS,
            )
        except ValueError as exc:
            raise CheckpointingException(
                "this registry has the metrics of a PrometheusListener already: make and register one a process, which "
                "counts every save and load, or give this one a registry of its own: "
                "PrometheusListener(registry=CollectorRegistry())"
            ) from exc
        self._phases = Histogram(
            "shardckpt_phase_seconds",
            "Seconds that phases of operations on checkpoints took on this rank",
            ("operation", "phase", "result"),
            registry=registry,
            buckets=_BUCKETS,
        )
        self._bytes = Counter(
            "shardckpt_bytes", "Bytes that this rank has written, or loaded", ("operation",), registry=registry
        )
        self._success = Gauge(
            "shardckpt_last_success_timestamp_seconds",
            "When an operation last ended without an error",
            ("operation",),
            registry=registry,
        )
        self._failures = Counter(
            "shardckpt_failures", "Operations on checkpoints that failed", ("operation",), registry=registry
        )
        for operation in ("save", "load"):
            self._failures.labels(operation)
        self._failure = Gauge(
            "shardckpt_last_failure_timestamp_seconds",
            "When an operation last failed, where, and with which error",
            ("operation", "phase", "error"),
            registry=registry,
        )
        self._in_flight = Gauge(
            "shardckpt_in_flight", "Operations that have begun and not ended", ("operation",), registry=registry
        )
        self._blocked = Histogram(
            "shardckpt_blocked_seconds",
            "Seconds that the training waited for operations on checkpoints",
            ("operation",),
            registry=registry,
            buckets=_BUCKETS,
        )
        self._rate = Gauge(
            "shardckpt_written_bytes_per_second",
            "Bytes a second that this rank has written last",
            ("operation",),
            registry=registry,
        )
        #: The operations in flight by their numbers: one that began before this listener was there does not count.
        self._open: dict[str, set[int]] = {}
        if folder is not None:
            size = Gauge("shardckpt_folder_bytes", "Bytes in a folder of checkpoints", ("folder",), registry=registry)
            size.labels(str(folder)).set_function(lambda: measure(locate(folder, get_plugin_manager())))

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        """Count the end or failure of an operation or phase."""
        if event.state == "start" and not event.phase:
            self._open.setdefault(event.operation, set()).add(event.number)
            self._show_in_flight(event.operation)
        if event.state not in ("end", "failure"):
            return
        if event.phase == "writing" and event.nbytes and event.seconds:
            self._rate.labels(event.operation).set(event.nbytes / event.seconds)
        if event.phase:
            self._phases.labels(event.operation, event.phase, event.state).observe(event.seconds)
            return
        self._open.get(event.operation, set()).discard(event.number)
        self._show_in_flight(event.operation)
        self._blocked.labels(event.operation).observe(event.blocked)
        self._seconds.labels(event.operation, event.state).observe(event.seconds)
        if event.state == "end":
            self._bytes.labels(event.operation).inc(event.nbytes)
            self._success.labels(event.operation).set_to_current_time()
        else:
            self._failures.labels(event.operation).inc()
            failure = self._failure.labels(event.operation, event.failed_phase, event.error_type)
            failure.set_to_current_time()

    def _show_in_flight(self, operation: str) -> None:
        self._in_flight.labels(operation).set(len(self._open.get(operation, ())))
