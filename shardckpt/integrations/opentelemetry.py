"""OpenTelemetry: a span for each save, load and phase, and metrics, from ``shardckpt_event`` (extra ``otel``).

Example::

    from shardckpt.integrations.opentelemetry import OpenTelemetryListener
    from shardckpt.plugins import get_plugin_manager

    get_plugin_manager().register(OpenTelemetryListener())

Where spans and metrics go, OpenTelemetry's SDK says: ``OTEL_EXPORTER_OTLP_ENDPOINT`` and its like, or the providers
that the program has set.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from opentelemetry import metrics, trace
from opentelemetry.trace import Status, StatusCode

from shardckpt import __version__
from shardckpt.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, TracerProvider

    from shardckpt.plugins.hookspecs import Event

_NAME = "shardckpt"
_NANO = 1_000_000_000


class OpenTelemetryListener:
    """Makes a span ``shardckpt.save`` for a save, with a child ``shardckpt.save: PHASE`` for each phase of it.

    A span has the attributes ``shardckpt.operation``, ``.directory``, ``.rank``, ``.strategy`` and, at its end,
    ``.bytes``; for a failure the status has the text, and ``error.type`` and ``.failed_phase`` have its class and
    phase. The metrics are the histogram ``shardckpt.duration`` (s) with ``operation``, ``phase`` and ``result``, the
    histogram ``shardckpt.blocked`` (s), the training's wait, the counter ``shardckpt.bytes`` (By), written or loaded,
    ``shardckpt.in_flight``, the number of operations that have not ended, with ``operation``, and the counter
    ``shardckpt.incidents`` with ``operation`` and ``incident``: ``skipped`` or, at each save that finds one,
    ``other_job``.

    Args:
        tracer_provider: Gets the spans; by default the process's provider.
        meter_provider: Gets the metrics; by default the process's provider.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer = trace.get_tracer(_NAME, __version__, tracer_provider)
        meter = metrics.get_meter(_NAME, __version__, meter_provider)
        self._duration = meter.create_histogram(
            "shardckpt.duration", unit="s", description="Time that operations on checkpoints and their phases took"
        )
        self._bytes = meter.create_counter(
            "shardckpt.bytes", unit="By", description="Bytes that this rank has written, or loaded"
        )
        self._blocked = meter.create_histogram(
            "shardckpt.blocked", unit="s", description="Time that the training waited for operations on checkpoints"
        )
        self._in_flight = meter.create_up_down_counter(
            "shardckpt.in_flight", description="Operations that have begun and not ended"
        )
        self._incidents = meter.create_counter(
            "shardckpt.incidents", description="Steps that were skipped, and saves that found another job in the folder"
        )
        #: The open spans by the operations' numbers. An operation may begin in one thread and end in another.
        self._open: dict[int, Span] = {}
        self._lock = threading.Lock()

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        """Open the span of an operation, or end it; make the span of a phase when it has ended."""
        if event.state in ("skipped", "other_job"):
            self._incidents.add(1, {"operation": event.operation, "incident": event.state})
        if event.state not in ("start", "end", "failure"):
            return
        if event.state == "start":
            if not event.phase:
                span = self._tracer.start_span(f"{_NAME}.{event.operation}", attributes=_describe(event))
                with self._lock:
                    self._open[event.number] = span
                self._in_flight.add(1, {"operation": event.operation})
            return
        labels = {"operation": event.operation, "phase": event.phase, "result": event.state}
        self._duration.record(event.seconds, labels)
        with self._lock:
            span_of_operation = self._open.get(event.number) if event.phase else self._open.pop(event.number, None)
        if event.phase:
            now = time.time_ns()
            context = None if span_of_operation is None else trace.set_span_in_context(span_of_operation)
            span = self._tracer.start_span(
                f"{_NAME}.{event.operation}: {event.phase}",
                context,
                attributes=_describe(event),
                start_time=now - int(event.seconds * _NANO),
            )
            _finish(span, event, now)
            return
        self._blocked.record(event.blocked, {"operation": event.operation})
        if event.state == "end":
            self._bytes.add(event.nbytes, {"operation": event.operation})
        if span_of_operation is not None:
            self._in_flight.add(-1, {"operation": event.operation})
            span_of_operation.set_attributes({**_describe(event), f"{_NAME}.bytes": event.nbytes})
            _finish(span_of_operation, event, time.time_ns())


def _describe(event: Event) -> dict[str, str | int]:
    return {
        f"{_NAME}.operation": event.operation,
        f"{_NAME}.directory": event.directory,
        f"{_NAME}.rank": event.rank,
        f"{_NAME}.strategy": event.strategy,
    }


def _finish(span: Span, event: Event, now: int) -> None:
    if event.state == "failure":
        span.set_attributes(
            {"error.type": event.error_type, f"{_NAME}.failed_phase": event.failed_phase or event.phase}
        )
        span.set_status(Status(StatusCode.ERROR, event.error))
    span.end(now)
