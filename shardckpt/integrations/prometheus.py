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

import logging
import shutil
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

from shardckpt.engine.locations import locate, measure
from shardckpt.errors import CheckpointingException
from shardckpt.manager.listing import list_checkpoints
from shardckpt.plugins.hookspecs import hookimpl
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.abilities import has_local_files, lacks_directory
from shardckpt.storage.memory_budget import parse_size
from shardckpt.storage.places import get_url
from shardckpt.storage.remote import quiet_attempts

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from pathlib import Path

    from prometheus_client import CollectorRegistry

    from shardckpt.plugins.hookspecs import Event

logger = logging.getLogger(__name__)

#: Seconds: from a small local file to an hour of a slow store. Few: each is a time series for each phase and rank. The
#: alert SlowSaves takes one at its 10 minutes.
_BUCKETS = (0.1, 1.0, 10.0, 60.0, 300.0, 600.0, 3600.0)


def _find_free(place: Path) -> float | None:
    """Return the bytes that a folder's file system has free; None on an error, which would cost the whole scrape."""
    try:
        return shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists())).free
    except OSError as exc:
        logger.warning("shardckpt_free_bytes of %s cannot be measured: %s: %s", place, type(exc).__name__, exc)
        return None


def _measure_checkpoints(place: Path) -> dict[str, float]:
    """Return the gauges of a folder's checkpoints; there are none before a save has made it."""
    found = [] if lacks_directory(place) else list_checkpoints(get_url(place))
    steps = [each for each in found if each.state == "whole" and each.step is not None]
    times = [each.saved_at for each in steps if each.saved_at is not None]
    return {
        "shardckpt_damaged_checkpoints": sum(each.state == "damaged" or each.has_failed for each in found),
        **({_STEP: steps[-1].nbytes} if steps else {}),
        # 0, and not absent, before the first: a job that never saves one meets its alert
        **({_SAVED: max(times, default=0.0)} if times or not steps else {}),
    }


#: The gauges of a folder that take a listing, for the log, and those that take none.
_STEP = "shardckpt_newest_step_bytes"
_SAVED = "shardckpt_newest_step_timestamp_seconds"
_LISTED = f"shardckpt_folder_bytes, {_STEP}, {_SAVED} and shardckpt_damaged_checkpoints"
_FREE = "shardckpt_free_bytes"
_QUOTA = "shardckpt_quota_bytes"


class _FolderCollector:
    """Gauges of a folder, most by listing it: each scrape gives the last values, and starts a new measurement.

    A store that does not answer keeps no scrape waiting: Prometheus would give up, and have no metric of this rank.
    What is not known has no sample: a NaN would be in every sum, and in a forecast for hours. ``quota`` is the bytes
    that the folder may hold; None for no such limit.
    """

    _TEXTS: ClassVar = {
        "shardckpt_folder_bytes": "Bytes in a folder of checkpoints",
        _STEP: "Bytes of the newest step of a folder that is whole",
        _SAVED: "When a step of a folder that is whole was last saved; 0 without one",
        "shardckpt_damaged_checkpoints": (
            "Checkpoints in a folder that are damaged, or that a verification has marked as failed"
        ),
        _FREE: "Bytes that the file system of a folder of checkpoints has free",
        _QUOTA: "Bytes that a folder of checkpoints may hold",
    }

    def __init__(self, place: Path, quota: int | None) -> None:
        self._place = place
        self._quota = quota
        self._listed: dict[str, float] = {}
        self._is_failing = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def describe(self) -> list[GaugeMetricFamily]:
        """Return the metrics without values: to register them takes no measurement."""
        absent = {_QUOTA: self._quota is None, _FREE: not has_local_files(self._place)}
        names = [name for name in self._TEXTS if not absent.get(name)]
        return [GaugeMetricFamily(name, self._TEXTS[name], labels=["folder"]) for name in names]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the metrics as they were measured last."""
        values = self._listed
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                # no daemon: it may be in torch when the program ends, which then waits for it
                self._thread = threading.Thread(target=self._measure, name="shardckpt-measure", daemon=False)
                self._thread.start()
        for family in self.describe():
            value = _find_free(self._place) if family.name == _FREE else values.get(family.name)
            if family.name == _QUOTA:
                value = self._quota
            if value is not None:
                family.add_metric([str(self._place)], value)
            yield family

    def _measure(self) -> None:
        try:
            with quiet_attempts():
                self._listed = {
                    "shardckpt_folder_bytes": measure(self._place),
                    **_measure_checkpoints(self._place),
                }
        except Exception as exc:  # noqa: BLE001 - of any store
            if not threading.main_thread().is_alive():  # the program ends, and no thread pool takes anything
                return
            self._listed = {}
            if not self._is_failing:
                logger.warning(
                    "%s of %s cannot be measured, and are absent until they can: %s: %s",
                    _LISTED,
                    self._place,
                    type(exc).__name__,
                    exc,
                )
            self._is_failing = True
            return
        if self._is_failing:
            logger.warning("%s of %s are measured again", _LISTED, self._place)
        self._is_failing = False


class PrometheusListener:
    """Fills these metrics; ``operation`` is ``save``, ``load`` or another that :class:`shardckpt.Event` names.

    - ``shardckpt_operation_seconds{operation, result}``, a histogram; ``result`` is ``end`` or ``failure``.
    - ``shardckpt_phase_seconds{operation, phase, result}``, a histogram: writing, the commit and others.
    - ``shardckpt_bytes_total{operation}``: bytes that this rank has written, or loaded, by operations that have ended.
    - ``shardckpt_last_success_timestamp_seconds{operation}``: when one last ended well; for an alert on its age.
    - ``shardckpt_start_timestamp_seconds``: when this listener was made; for an alert on a job that does not save.
    - ``shardckpt_failures_total{operation}``: operations that failed, also before they began, as a manager's save that
      cannot list its folder; loads of damaged steps that a manager did without; with ``prune``, old steps that it could
      not remove. Each of the three is 0 from the start, so that ``increase`` sees the first failure.
    - ``shardckpt_skipped_saves_total``: steps that ``on_busy="skip"`` left out, since a save was under way.
    - ``shardckpt_last_other_job_timestamp_seconds{folder}``: when a save of this job last found that another job saves
      to its folder, too; absent until one has. Each save looks, on a store at most once a minute.
    - ``shardckpt_last_failure_timestamp_seconds{operation, phase, error}``: when one last failed, in which phase
      (``""`` for none), and with which class of error, ``StorageError``.
    - ``shardckpt_in_flight{operation}``: operations that have begun and not ended, saves in the background among them.
    - ``shardckpt_in_flight_since_timestamp_seconds{operation}``: when the oldest of these began; absent without one.
    - ``shardckpt_blocked_seconds{operation}``, a histogram: what the training waited for each; old steps are removed
      behind the training.
    - ``shardckpt_written_bytes_per_second{operation}``: of the last phase ``writing``.
    - ``shardckpt_folder_bytes{folder}``: the size of ``folder``, by its whole path. A scrape does not wait for it: it
      gives the size at the previous scrape, and none at the first or while the folder cannot be listed.
    - ``shardckpt_damaged_checkpoints{folder}``: the checkpoints in it that are damaged as ``shardckpt ls`` sees it, or
      that ``shardckpt verify --mark`` has marked as failed; measured with its size.
    - ``shardckpt_newest_step_bytes{folder}``: the size of its newest whole step, as the next one may have; measured
      with its size.
    - ``shardckpt_newest_step_timestamp_seconds{folder}``: when a whole step of it was last saved, by this job or an
      earlier one, so that a restart does not change it; 0 without one, and absent on a store that does not say when;
      measured with its size.
    - ``shardckpt_free_bytes{folder}``: free space of its file system at the scrape; absent for a URL.
    - ``shardckpt_quota_bytes{folder}``: the limit of its size, if ``quota`` sets one:
      ``shardckpt_folder_bytes`` of it are used.

    ``operation`` is ``setup`` where a manager could not be made: a wrong setting is no failed save.

    Args:
        registry: Has the metrics; by default that of the process.
        folder: A directory or URL of checkpoints, which the main rank may give; by default none.
        quota: That of the manager's configuration, ``config.quota``, for the metric alone; None for none.

    Raises:
        CheckpointingException: The registry has the metrics of another listener, or the quota is no size.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        folder: str | os.PathLike[str] | None = None,
        quota: int | str | None = None,
    ) -> None:
        limit = None if quota is None else parse_size(quota, "quota")
        if limit is not None and folder is None:
            raise CheckpointingException("PrometheusListener: a quota is that of a folder: give folder=config.folder")
        # before any metric is registered: one call that fails must leave the registry to the next
        place = None if folder is None else locate(folder, get_plugin_manager())
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_BUCKETS)
        operation = ("operation",)
        try:
            self._seconds = histogram(
                "shardckpt_operation_seconds",
                "Seconds that operations on checkpoints took on this rank",
                ("operation", "result"),
            )
        except ValueError as exc:
            raise CheckpointingException(
                "this registry has the metrics of a PrometheusListener already: make and register one a process, which "
                "counts every save and load, or give this one a registry of its own: "
                "PrometheusListener(registry=CollectorRegistry())"
            ) from exc
        self._phases = histogram(
            "shardckpt_phase_seconds",
            "Seconds that phases of operations on checkpoints took on this rank",
            ("operation", "phase", "result"),
        )
        self._bytes = counter("shardckpt_bytes", "Bytes that this rank has written, or loaded", operation)
        self._success = gauge(
            "shardckpt_last_success_timestamp_seconds", "When an operation last ended without an error", operation
        )
        gauge("shardckpt_start_timestamp_seconds", "When this rank began to count operations").set_to_current_time()
        self._failures = counter("shardckpt_failures", "Operations on checkpoints that failed", operation)
        self._skipped = counter("shardckpt_skipped_saves", "Steps that were due, and left out while another was saved")
        self._other_job = gauge(
            "shardckpt_last_other_job_timestamp_seconds",
            "When another job was last seen to save to the folder of this one's saves",
            ("folder",),
        )
        self._failure = gauge(
            "shardckpt_last_failure_timestamp_seconds",
            "When an operation last failed, where, and with which error",
            ("operation", "phase", "error"),
        )
        self._in_flight = gauge("shardckpt_in_flight", "Operations that have begun and not ended", operation)
        self._since = gauge(
            "shardckpt_in_flight_since_timestamp_seconds",
            "When the oldest operation began that has not ended; absent without one",
            operation,
        )
        self._blocked = histogram(
            "shardckpt_blocked_seconds", "Seconds that the training waited for operations on checkpoints", operation
        )
        self._rate = gauge(
            "shardckpt_written_bytes_per_second", "Bytes a second that this rank has written last", operation
        )
        #: When the operations in flight began, by their numbers, oldest first: one that began before this listener was
        #: there does not count.
        self._open: dict[str, dict[int, float]] = {}
        for kind in ("setup", "save", "load", "prune"):
            self._failures.labels(kind)
            self._show_in_flight(kind)
        if place is not None:
            registry.register(_FolderCollector(place, limit))

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        """Count the end or failure of an operation or phase."""
        if event.state == "start" and not event.phase:
            self._open.setdefault(event.operation, {})[event.number] = time.time()
            self._show_in_flight(event.operation)
        if event.state == "skipped":
            self._skipped.inc()
        if event.state == "other_job":
            self._other_job.labels(event.directory).set_to_current_time()
        if event.state not in ("end", "failure"):
            return
        if event.phase == "writing" and event.nbytes and event.seconds:
            self._rate.labels(event.operation).set(event.nbytes / event.seconds)
        if event.phase:
            self._phases.labels(event.operation, event.phase, event.state).observe(event.seconds)
            return
        self._open.get(event.operation, {}).pop(event.number, None)
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
        begun = [*self._open.get(operation, {}).values()]
        self._in_flight.labels(operation).set(len(begun))
        if begun:
            self._since.labels(operation).set(begun[0])
        else:
            with suppress(KeyError):  # which releases before 0.22 raise where there is none
                self._since.remove(operation)
