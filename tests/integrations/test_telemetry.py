"""Listeners of ``shardckpt_event``: OpenTelemetry and Prometheus."""

from __future__ import annotations

import gc
import json
import re
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import shardckpt.errors
from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.background import saving
from shardckpt.background.saving import wait_for_dropped
from shardckpt.engine import long_phase, operation
from shardckpt.engine.operation import report_event
from shardckpt.errors import CheckpointingException, StorageError, VersionTooNewError
from shardckpt.maintenance import convert_checkpoint
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.manager.marks import identify_save, mark_checkpoint
from shardckpt.manager.parts import Retention
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import Event, hookimpl
from tests.plugged import registered
from tests.plugins.manager import Recorder
from tests.readmes import READMES
from tests.resources import list_threads
from tests.tables import table
from tests.testing.own_store import Folder
from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from shardckpt.async_save import AsyncRequest


def _save_twice(path: Path) -> None:
    """Save, load, and fail to save to the same place."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
    dc.save(state, path)
    dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000))}, path)
    with pytest.raises(CheckpointingException):
        dc.save(state, path)


def test_prometheus_counts_saves_loads_bytes_and_failures(tmp_path: Path) -> None:
    """The registry has the number and the seconds of operations by result, of phases, and the bytes of both."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    with registered(PrometheusListener(registry)):
        _save_twice(tmp_path / "c")

    def value(name: str, **labels: str) -> float:
        return float(registry.get_sample_value(name, labels) or 0)

    assert value("shardckpt_operation_seconds_count", operation="save", result="end") == 1
    assert value("shardckpt_operation_seconds_count", operation="save", result="failure") == 1
    assert value("shardckpt_operation_seconds_count", operation="load", result="end") == 1
    assert value("shardckpt_operation_seconds_sum", operation="save", result="end") > 0
    assert value("shardckpt_bytes_total", operation="save") >= 4000
    assert value("shardckpt_bytes_total", operation="load") == 4000
    assert value("shardckpt_last_success_timestamp_seconds", operation="save") > 1e9
    phases = [s for metric in registry.collect() for s in metric.samples if s.name == "shardckpt_phase_seconds_count"]
    assert {"writing", "committing"} <= {sample.labels["phase"] for sample in phases}


def test_a_registry_has_one_prometheus_listener() -> None:
    """A second listener of a registry would count all twice: the error says so, and how to have another."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    with pytest.raises(StorageError, match="no installed plugin serves"):
        PrometheusListener(registry, folder="nowhere://runs")
    PrometheusListener(registry)  # the one that failed has left no metrics
    with pytest.raises(CheckpointingException, match=r"has the metrics of a PrometheusListener.*registry=Collector"):
        PrometheusListener(registry)
    PrometheusListener(prometheus_client.CollectorRegistry())


def _read_points(reader: Any) -> dict[str, Any]:
    data = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    return {metric.name: metric.data.data_points for metric in data}


def test_opentelemetry_has_spans_of_operations_and_phases(tmp_path: Path) -> None:
    """A save is a span with its phases as children, within its times; a failure has its text; metrics beside them."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from shardckpt.integrations.opentelemetry import OpenTelemetryListener

    spans, tracers, reader = InMemorySpanExporter(), TracerProvider(), InMemoryMetricReader()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider([reader])
    with registered(OpenTelemetryListener(tracers, meters)):
        _save_twice(tmp_path / "c")
    found = spans.get_finished_spans()
    saves = [span for span in found if span.name == "shardckpt.save"]
    good, bad = sorted(saves, key=lambda span: span.start_time)
    assert good.status.is_ok
    assert good.attributes["shardckpt.bytes"] >= 4000
    assert good.attributes["shardckpt.directory"] == str(tmp_path / "c")
    assert not bad.status.is_ok
    assert str(tmp_path / "c") in bad.status.description
    assert (bad.attributes["error.type"], bad.attributes["shardckpt.failed_phase"]) == ("StorageError", "staging")
    phases = [span for span in found if span.parent is not None and span.parent.span_id == good.context.span_id]
    assert {"shardckpt.save: writing", "shardckpt.save: committing"} <= {span.name for span in phases}
    assert all(span.start_time < span.end_time <= good.end_time for span in phases)
    points = _read_points(reader)
    assert set(points) == {"shardckpt.duration", "shardckpt.blocked", "shardckpt.bytes", "shardckpt.in_flight"}
    assert {point.value for point in points["shardckpt.in_flight"]} == {0}
    (written,) = [point for point in points["shardckpt.bytes"] if point.attributes["operation"] == "save"]
    assert written.value >= 4000
    (loaded,) = [point for point in points["shardckpt.bytes"] if point.attributes["operation"] == "load"]
    assert loaded.value == 4000
    tracers.shutdown()
    meters.shutdown()


def test_a_background_save_says_when_it_writes_and_what_the_training_waited(tmp_path: Path) -> None:
    """The phase ``writing`` has its bytes and ends in its thread; the wait is without it; one save is in flight."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry, recorder = prometheus_client.CollectorRegistry(), Recorder()
    with registered(PrometheusListener(registry, folder=tmp_path)), registered(recorder):
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
        request = dc.save(state, tmp_path / "c", async_sharded_save=True)
        in_flight = registry.get_sample_value("shardckpt_in_flight", {"operation": "save"})
        since = registry.get_sample_value("shardckpt_in_flight_since_timestamp_seconds", {"operation": "save"})
        assert request is not None
        request.execute_sync()
    (writing,), (whole,) = recorder.find("end", "writing"), recorder.find("end")
    assert writing.nbytes >= 4000
    assert 0 < whole.blocked <= whole.seconds - writing.seconds
    assert in_flight == 1
    assert since is not None
    assert registry.get_sample_value("shardckpt_in_flight_since_timestamp_seconds", {"operation": "save"}) is None
    assert registry.get_sample_value("shardckpt_in_flight", {"operation": "save"}) == 0
    assert registry.get_sample_value("shardckpt_blocked_seconds_count", {"operation": "save"}) == 1
    assert registry.get_sample_value("shardckpt_written_bytes_per_second", {"operation": "save"}) > 0


def test_the_training_waits_for_slow_listeners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a listener takes in the program's thread is waited for: of the last event the log has it alone."""
    clock = SimpleNamespace(now=1000.0, perf_counter=lambda: clock.now)

    class Slow(Recorder):
        @hookimpl
        def shardckpt_event(self, event: Event) -> None:
            super().shardckpt_event(event)
            clock.now += 8

    monkeypatch.setattr(operation, "time", clock)
    monkeypatch.setattr(long_phase, "_clock", clock.perf_counter)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
    for background in (False, True):
        caplog.clear()
        with registered(Slow()) as listener, caplog.at_level("INFO"):
            request = dc.save(state, tmp_path / str(background), async_sharded_save=background)
            if request is not None:
                request.execute_sync()
        (whole,) = listener.find("end")
        # the end of what is written in the background is told by the thread that writes
        waited = 8 * (len(listener.events) - 1 - background)
        assert whole.blocked == waited
        assert f"of which the program waited {waited + 8:.2f} s" in caplog.messages[-1]


def test_a_release_of_prometheus_that_removes_no_absent_label_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases before 0.22 raise where a label is removed that is not there: the listener is made all the same."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    def remove(_: object, label: str) -> None:
        raise KeyError(label)

    monkeypatch.setattr(prometheus_client.Gauge, "remove", remove)
    registry = prometheus_client.CollectorRegistry()
    PrometheusListener(registry)
    assert registry.get_sample_value("shardckpt_in_flight", {"operation": "save"}) == 0


def test_an_interrupted_save_is_not_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program goes on after Ctrl-C, as trainers do, nothing counts as begun and not ended."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardckpt.engine.transaction.Transaction.commit", interrupt)
    registry = prometheus_client.CollectorRegistry()
    with registered(PrometheusListener(registry)), pytest.raises(KeyboardInterrupt):
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(10))}, tmp_path / "c")
    assert registry.get_sample_value("shardckpt_in_flight", {"operation": "save"}) == 0


def _save_behind(path: Path) -> AsyncRequest:
    request = dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(10))}, path, async_sharded_save=True)
    assert request is not None
    return request


def test_a_save_and_a_load_are_a_line_of_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At INFO each has a line on the main rank: what, where, bytes, seconds, and how long the program waited."""
    caplog.set_level("INFO", "shardckpt.engine.operation")
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, tmp_path / "c")
    dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000))}, tmp_path / "c")
    said = [record.getMessage() for record in caplog.records]  # of a thread of an earlier test, too
    save, load = [line for line in said if str(tmp_path) in line]
    timing = r"in \d+\.\d\d s, of which the program waited \d+\.\d\d s$"
    assert re.match(rf"save of {re.escape(str(tmp_path))}/c: [\d.]+ kB on this rank {timing}", save)
    assert re.match(rf"load of {re.escape(str(tmp_path))}/c: 4.0 kB on this rank {timing}", load)


def test_a_dropped_request_is_not_in_flight(tmp_path: Path) -> None:
    """A background save that nobody schedules ends, as a failure that says so, and leaves no files."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry, recorder = prometheus_client.CollectorRegistry(), Recorder()
    with registered(PrometheusListener(registry)), registered(recorder):
        _save_behind(tmp_path / "c")
        wait_for_dropped()
    assert registry.get_sample_value("shardckpt_in_flight", {"operation": "save"}) == 0
    assert "its request was dropped before it was finalized" in recorder.find("failure")[0].error
    assert not [*tmp_path.iterdir()]


class _Locks:
    """Takes a lock at the end of a save, as the metrics of Prometheus do."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended_by = ""

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        if event.state == "failure" and threading.current_thread() is threading.main_thread():
            self.ended_by = "the thread that has the lock"
        elif event.state == "failure":
            with self.lock:
                self.ended_by = "another thread"


def test_the_garbage_collector_waits_for_no_lock(tmp_path: Path) -> None:
    """A dropped save may be collected in a thread that has a listener's lock: it does not wait there for that lock."""
    listener = _Locks()
    with registered(listener):
        cycle: list[Any] = [_save_behind(tmp_path / "c")]
        cycle.append(cycle)
        with listener.lock:
            del cycle
            gc.collect()
        wait_for_dropped()
    assert listener.ended_by == "another thread"
    assert not [*tmp_path.iterdir()]


@table(
    ("options", "match"),
    [
        ({"memory_budget": "8MiB"}, "memory_budget"),
        ({"content_metadata": {1: object()}}, "content_metadata"),
        ({"sharded_strategy": "nothing"}, "nothing"),
    ],
)
def test_a_refused_request_is_not_in_flight(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    """A background save that is refused while it is planned has failed."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3_000_000))}
    with registered(PrometheusListener(registry)), pytest.raises(CheckpointingException, match=match):
        dc.save(state, tmp_path / "c", async_sharded_save=True, **options)
    assert registry.get_sample_value("shardckpt_in_flight", {"operation": "save"}) == 0
    assert not [*tmp_path.iterdir()]


def test_a_request_that_is_scheduled_twice_counts_once(tmp_path: Path) -> None:
    """The second schedule is refused, and the save is in flight until the first has ended."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    with registered(PrometheusListener(registry)):
        queue, request = AsyncCallsQueue(), _save_behind(tmp_path / "c")
        queue.schedule_async_request(request)
        queue.schedule_async_request(request)
        with pytest.raises(CheckpointingException, match="has been scheduled before"):
            queue.close()
    assert registry.get_sample_value("shardckpt_in_flight", {"operation": "save"}) == 0
    labels = {"operation": "save", "result": "end"}
    assert registry.get_sample_value("shardckpt_operation_seconds_count", labels) == 1
    assert registry.get_sample_value("shardckpt_operation_seconds_count", labels | {"result": "failure"}) is None


def test_loads_of_one_directory_count_each(tmp_path: Path) -> None:
    """Two loads of one checkpoint at a time are two in flight, and two spans."""
    prometheus_client = pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from shardckpt.integrations.opentelemetry import OpenTelemetryListener
    from shardckpt.integrations.prometheus import PrometheusListener

    spans, tracers, registry = InMemorySpanExporter(), TracerProvider(), prometheus_client.CollectorRegistry()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(10))}, tmp_path / "c")

    def in_flight() -> float | None:
        return registry.get_sample_value("shardckpt_in_flight", {"operation": "load"})  # type: ignore[no-any-return]

    with registered(PrometheusListener(registry)), registered(OpenTelemetryListener(tracers)):
        with dc.open_checkpoint(tmp_path / "c"):
            with dc.open_checkpoint(tmp_path / "c"):
                assert in_flight() == 2
            assert in_flight() == 1
        assert in_flight() == 0
    inner, outer = [span for span in spans.get_finished_spans() if span.name == "shardckpt.load"]
    assert outer.start_time < inner.start_time
    assert inner.end_time < outer.end_time
    tracers.shutdown()


def _count_failures(operation: str, registry: Any) -> float:
    return float(registry.get_sample_value("shardckpt_failures_total", {"operation": operation}))


def _fail_to_list(path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError(f"{path} does not answer")

    config = CheckpointConfig(folder=str(path), interval=1)
    with CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager:
        monkeypatch.setattr("shardckpt.manager.steps.StepFolder.steps", refuse)
        getattr(manager, method)(1)


def _fail_for_space(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a second step, for which the retention has something to free, to a disk that is full by then."""
    config = CheckpointConfig(folder=str(path), interval=1, keep_latest_k=1)
    with CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager:
        manager.save(1)
        monkeypatch.setattr("shardckpt.engine.committers.find_free_bytes", lambda _: 0)
        manager.save(2)


def _fail_to_read(path: Path, _: pytest.MonkeyPatch) -> None:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, path)
    _flip(path)
    dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000))}, path)


def _cut(step: Path) -> None:
    (file,) = step.glob("__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-1])


def _flip(step: Path) -> None:
    (file,) = step.glob("__0_0.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _fail_to_begin(path: Path, **settings: Any) -> None:
    """Make a manager whose folder would be below a file."""
    (path / "file").touch()
    CheckpointManager(CheckpointConfig(folder=str(path / "file" / "x"), links=True, **settings), {})


@table(
    ("operation", "fail", "phase"),
    [
        ("setup", lambda path, _: _fail_to_begin(path), "beginning to save checkpoints"),
        ("setup", lambda path, _: _fail_to_begin(path, strategy="nothing"), "checking the configuration"),
        ("setup", lambda path, _: _fail_to_begin(path, hf_mapping="x", load_only=True), "checking the configuration"),
        ("save", lambda path, patch: _fail_to_list(path, patch, "save"), "reading the folder"),
        ("load", lambda path, patch: _fail_to_list(path, patch, "load"), "choosing the step"),
        ("save", lambda *_: dc.save({}, "nobody://serves/this"), "reading the arguments"),
        ("load", lambda *_: dc.load({}, "nobody://serves/this"), "reading the arguments"),
        ("save", lambda path, _: dc.save({"a": 1}, path / "c", "nothing"), "preparing the state dict"),
        ("load", lambda path, _: dc.load({"a": 1}, path / "c"), "reading the manifest"),
        ("save", lambda path, _: [dc.save({"a": 1}, path / "c") for _ in "ab"], "staging"),
        ("save", _fail_for_space, "forecasting the space"),
        ("load", _fail_to_read, "reading shards"),
    ],
)
def test_each_failure_is_one_event_one_count_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
    fail: Any,
    phase: str,
) -> None:
    """Wherever a save, a load or a manager's constructor fails, one failure has phase and error, and one ERROR line."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    caplog.clear()
    registry, recorder = prometheus_client.CollectorRegistry(), Recorder()
    with registered(PrometheusListener(registry)), registered(recorder):
        assert (_count_failures("save", registry), _count_failures("load", registry)) == (0, 0)
        with pytest.raises(CheckpointingException) as caught:
            fail(tmp_path, monkeypatch)
    assert _count_failures(operation, registry) == 1
    # a manager that cannot be made has saved and loaded nothing
    assert _count_failures("save", registry) + _count_failures("load", registry) == (operation != "setup")
    (failed,) = recorder.find("failure")
    assert (failed.operation, failed.failed_phase) == (operation, phase)
    assert {event.phase for event in recorder.events if event.state == "failure"} <= {"", phase}
    assert failed.error_type == type(caught.value).__name__
    labels = {"operation": operation, "phase": phase, "error": failed.error_type}
    assert registry.get_sample_value("shardckpt_last_failure_timestamp_seconds", labels) > 1e9
    assert not registry.get_sample_value("shardckpt_in_flight", {"operation": operation})
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert re.match(rf"{operation} of .* failed in '{phase}' after .* s: {failed.error_type}: ", line)
    assert "\n" not in line


@table("error", [StorageError("the disk is gone"), CheckpointingException("a shard is lost")])
def test_a_failed_save_of_a_manager_names_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: CheckpointingException
) -> None:
    """The ERROR line has the step's path, of the last save, too, whatever the error is."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("shardckpt.engine.transaction.Transaction.commit", refuse)
    config = CheckpointConfig(folder=str(tmp_path), max_failed_saves=3)
    caplog.clear()
    with CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager, pytest.raises(type(error)):
        manager.save(7, last_step=True)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith(f"save of {tmp_path}/step-7 failed ")


@pytest.mark.parametrize("is_ring", [False, True], ids=["another", "ring"])
def test_a_failure_while_another_is_handled_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ring: bool
) -> None:
    """Who loads an older step after a failure, and fails again, has two failures; so has a ring of causes."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    def refuse(*_: Any, **__: Any) -> None:
        error, other = StorageError("no disk"), OSError("no host")
        error.__cause__, other.__cause__ = other, error
        raise error

    def load_either() -> None:
        try:
            dc.load({}, tmp_path / "newer")
        except CheckpointingException:
            dc.load({}, tmp_path / "older")

    if is_ring:
        dc.save({"a": 1}, tmp_path / "older")
        monkeypatch.setattr("shardckpt.dist_checkpointing.load_checkpoint", refuse)
    registry = prometheus_client.CollectorRegistry()
    with registered(PrometheusListener(registry)), pytest.raises(CheckpointingException):
        load_either()
    assert _count_failures("load", registry) == 2


def test_a_background_save_that_fails_is_one_event_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call meets its error: the next save of a manager, or the end of the queue."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr("shardckpt.engine.transaction.Transaction.commit", refuse)
    registry = prometheus_client.CollectorRegistry()
    config = CheckpointConfig(folder=str(tmp_path), interval=1, async_mode="async")
    manager = CheckpointManager(config, {"model": torch.nn.Linear(2, 2)})
    with registered(PrometheusListener(registry)):
        manager.save(1)
        with pytest.raises(StorageError):
            manager.wait()
        manager.save(2)
        manager._writer._queue._calls[0].future.exception()
        with pytest.raises(StorageError):
            manager.save(3)
        manager.close()
    assert _count_failures("save", registry) == 2
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2


def _mark(step: Path) -> None:
    mark_checkpoint(step, identify_save(step), "failed", checked="digests", files=1)


@pytest.mark.parametrize("damage", [_cut, _flip, _mark], ids=["cut", "flipped", "marked"])
def test_a_damaged_step_that_a_load_does_without_counts(tmp_path: Path, damage: Any) -> None:
    """However the damage of the newest step is known, taking the one before is a load of it that failed, and counts."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry, recorder = prometheus_client.CollectorRegistry(), Recorder()
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path)), {"model": torch.nn.Linear(64, 64)}) as manager:
        for step in (1, 2):
            manager.save(step, force=True)
        damage(tmp_path / "step-2")
        with registered(PrometheusListener(registry)), registered(recorder):
            assert manager.load()
    assert manager.loaded_step == 1
    assert _count_failures("load", registry) == 1
    (failed,) = recorder.find("failure")
    assert failed.error_type == "CorruptCheckpointError"
    assert "step-2" in failed.directory


def _damage(checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        if file.name not in ("metadata.json", "shardckpt.json", ".metadata"):
            file.write_bytes(b"x" * (file.stat().st_size - 1))


def _set_version(checkpoint: Path, version: int) -> None:
    marker = checkpoint / "metadata.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"sharded_backend_version": version}))
    (checkpoint / "shardckpt.json").unlink()


def _meet_each_alert(folder: Path) -> None:
    """Save, load, and fail in the ways that the alerts of the README are about."""
    _save_twice(folder / "step-1")
    report_event("save", "other_job", folder, 0)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000))}
    for name in ("step-2", "step-3"):
        dc.save(wanted, folder / name)
    _set_version(folder / "step-2", 99)
    _damage(folder / "step-1")
    for name in ("step-1", "step-2"):
        with pytest.raises(CheckpointingException):
            dc.load(wanted, folder / name)


def test_one_failure_is_one_alert() -> None:
    """The rules about failures divide them by operation and error: each meets one, that of another job its own."""
    rules = re.findall(
        r"{alert: (\w+), expr: '([^']*failure\w*{.*?}.*?)'}", READMES["shardckpt/integrations/README.md"]
    )
    for kind, error, expected in (
        ("save", "StorageError", "SaveFailed"),
        ("setup", "ConfigurationError", "SaveFailed"),
        ("setup", "OtherJobError", ""),  # TwoJobsInOneFolder has its time
        ("save", "OtherJobError", ""),
        ("load", "KeyMismatchError", "CheckpointFailure"),
        ("export", "StorageError", "CheckpointFailure"),
        ("load", "CorruptCheckpointError", "LoadMetDamage"),
        ("convert", "CorruptCheckpointError", "LoadMetDamage"),
        ("load", "VersionTooNewError", "NoReaderOfVersion"),
        ("convert", "PluginError", "NoReaderOfVersion"),
        ("save", "UnknownBackendError", "NoReaderOfVersion"),
        ("prune", "StorageError", "CleanUpFailed"),
    ):
        labels = {"operation": kind, "error": error}
        found = []
        for name, rule in rules:
            matchers = re.findall(r'(\w+)(!?)=?(~?)"([^"]*)"', re.findall("{(.*)}", rule)[0])
            if all(
                bool(re.fullmatch(value if sign else re.escape(value), labels[key])) is not bool(negated)
                for key, negated, sign, value in matchers
            ):
                found.append(name)
        assert found == [expected] * bool(expected), labels


def test_the_alerts_ask_for_what_is_exported(tmp_path: Path) -> None:
    """Each selector of each rule finds samples after what it is about; the README has all metrics, and no others."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    with registered(PrometheusListener(registry, folder=tmp_path, quota="1GB")) as listener:
        _meet_each_alert(tmp_path)
    listener.shardckpt_event(Event("save", "", "start", str(tmp_path), 0, number=-1))  # which hangs
    _measure(registry)
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    text = READMES["shardckpt/integrations/README.md"]
    rules = re.findall(
        r"^  - {alert: \w+, (?:for: \w+, )?expr: '([^']*shardckpt_[^']*[<>] [\d.]+)'}$", text, re.MULTILINE
    )
    assert len(rules) == 13
    for rule in rules:
        assert rule.count("(") == rule.count(")")
        for name, matchers in re.findall(r"(shardckpt_\w+)(?:{([^}]*)})?", rule):
            wanted = re.findall(r'(\w+)=(~?)"([^"]*)"', matchers)
            assert any(
                sample.name == name
                and all(
                    re.fullmatch(value if sign else re.escape(value), sample.labels[key]) for key, sign, value in wanted
                )
                for sample in samples
            ), f"no sample for {name} of {rule}"
    names = {metric.name + "_total" * (metric.type == "counter") for metric in registry.collect()}
    _wait_for_measures()
    for readme in ("shardckpt/integrations/README.md", "shardckpt/manager/README.md"):
        named = set(re.findall(r"`(shardckpt_\w+)`", READMES[readme])) - {"shardckpt_event"}
        assert named == names, readme


def test_an_alert_about_readers_is_not_of_loads_alone(tmp_path: Path) -> None:
    """A conversion that no reader is installed for meets it, as a load does."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    with registered(PrometheusListener(registry)):
        _save_twice(tmp_path / "step-1")
        _set_version(tmp_path / "step-1", 99)
        with pytest.raises(VersionTooNewError):
            convert_checkpoint(tmp_path / "step-1", tmp_path / "new", "safetensors")
    (rule,) = re.findall(r"alert: NoReaderOfVersion, expr: '(.*)'}", READMES["shardckpt/integrations/README.md"])
    (matcher,) = re.findall("{(.*)}", rule)
    errors = matcher.removeprefix('error=~"').removesuffix('"')
    labels = [sample.labels for metric in registry.collect() for sample in metric.samples if sample.labels.get("error")]
    assert [each["operation"] for each in labels if re.fullmatch(errors, each["error"])] == ["convert"]


def test_the_runbook_has_each_alert_and_its_log_line() -> None:
    """Each alert is a row; each line of the log is one that the sources have; each class of error is in a row."""
    text = READMES["shardckpt/integrations/README.md"]
    alerts, errors = text.partition("### Runbook")[2].split("### Errors that end a job")
    rows = [line.split(" | ") for line in alerts.splitlines() if line.startswith("| ")][1:]
    assert {name for row in rows for name in row[0][2:].split(", ")} == set(re.findall(r"alert: (\w+)", text))
    sources = "".join(path.read_text() for path in (ROOT / "shardckpt").rglob("*.py"))
    texts = [text for row in rows for text in re.findall("`([^`]*)`", row[2]) if "ERROR" not in row[2]]
    parts = [part for text in texts for part in text.split(" ... ")]
    assert len(parts) >= 8
    assert [part for part in parts if part not in sources] == []
    names = [name for line in errors.splitlines() for name in re.findall(r"`(\w+Error|\w+Exception)`", line)]
    classes = [each for each in vars(shardckpt.errors).values() if isinstance(each, type)]
    assert sorted(names) == sorted(each.__name__ for each in classes if issubclass(each, CheckpointingException))


def _measure(registry: Any) -> None:
    """Have folders measured, and wait for it: the next scrape has it."""
    list(registry.collect())
    _wait_for_measures()


def test_a_look_at_a_folder_that_hangs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a manager looks at its folder a save is in flight; what the training waited for it counts as blocked."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry, seen, look = prometheus_client.CollectorRegistry(), [], Retention.before_save
    recorder = Recorder()

    def read(name: str) -> float | None:
        value: float | None = registry.get_sample_value(name, {"operation": "save"})
        return value

    def look_long(*args: Any) -> None:
        seen.append(read("shardckpt_in_flight"))
        if len(seen) > 2:
            raise StorageError("no answer")
        look(*args)

    monkeypatch.setattr(Retention, "before_save", look_long)
    config = CheckpointConfig(folder=str(tmp_path), interval=1, max_failed_saves=1)
    with (
        registered(PrometheusListener(registry)),
        registered(recorder),
        CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager,
    ):
        assert [manager.save(step) for step in (1, 2, 3)] == [True, True, False]
    assert seen == [1, 1, 1]
    assert read("shardckpt_in_flight") == 0
    looks = [each for each in recorder.events if each.phase == "reading the folder" and each.state != "start"]
    ends = [each for each in recorder.events if each.operation == "save" and not each.phase and each.state != "start"]
    assert [each.state for each in ends] == ["end", "end", "failure"]
    for whole, part in zip(ends, looks, strict=True):
        assert whole.number == part.number
        assert whole.seconds >= whole.blocked > part.seconds > 0
    assert read("shardckpt_blocked_seconds_sum") == pytest.approx(sum(each.blocked for each in ends))


def test_skipped_saves_count_and_other_jobs_have_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that a busy manager leaves out, and a job that it meets, are events, and no operations nor phases."""
    prometheus_client = pytest.importorskip("prometheus_client")
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from shardckpt.integrations.opentelemetry import OpenTelemetryListener
    from shardckpt.integrations.prometheus import PrometheusListener

    registry, may_write, write = prometheus_client.CollectorRegistry(), threading.Event(), saving._write
    metrics = InMemoryMetricReader()
    monkeypatch.setattr(saving, "_write", lambda *args: may_write.wait() and write(*args))
    config = CheckpointConfig(folder=str(tmp_path), interval=1, async_mode="async", on_busy="skip")
    with (
        registered(PrometheusListener(registry)),
        registered(OpenTelemetryListener(meter_provider=MeterProvider([metrics]))),
        registered(Recorder()) as recorder,
        CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager,
    ):
        try:
            assert [manager.save(step) for step in (1, 2, 3)] == [True, False, False]
        finally:
            may_write.set()
        report_event("save", "other_job", tmp_path, 0)
    assert [event.directory[-6:] for event in recorder.find("skipped")] == ["step-2", "step-3"]
    for phase in {event.phase for event in recorder.events} - {""}:
        assert recorder.states(phase) == ["start", "end"]
    assert registry.get_sample_value("shardckpt_skipped_saves_total") == 2
    other_job = registry.get_sample_value("shardckpt_last_other_job_timestamp_seconds", {"folder": str(tmp_path)})
    assert other_job > registry.get_sample_value("shardckpt_start_timestamp_seconds")
    points = _read_points(metrics)["shardckpt.incidents"]
    assert {point.attributes["incident"]: point.value for point in points} == {"skipped": 2, "other_job": 1}
    assert registry.get_sample_value("shardckpt_operation_seconds_count", {"operation": "save", "result": "end"}) == 1
    assert registry.get_sample_value("shardckpt_in_flight", {"operation": "save"}) == 0


def test_a_job_that_never_saves_meets_its_alert() -> None:
    """The rule about the age of the last save has a sample before the first save: when the listener began."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    PrometheusListener(registry)
    rule = re.search(r"alert: NoSaveFor2Hours, expr: '(.*)'}", READMES["shardckpt/integrations/README.md"])
    assert rule
    found = [registry.get_sample_value(name) for name in re.findall(r"shardckpt_\w+", rule[1])]
    assert [each for each in found if each is not None and each > 1e9]


class _Samples(list[float]):
    """The values of a PromQL expression that has one set of labels: none, or one; of a range, several."""

    def __rsub__(self, time: float) -> _Samples:
        return _Samples(time - value for value in self)

    def __gt__(self, limit: Any) -> Any:
        return _Samples(value for value in self if value > limit)


def _evaluate(rule: str, now: float, scrapes: Mapping[float, Mapping[str, float]]) -> bool:
    """Return whether a rule about one job and folder holds, by what was scraped when."""

    def find(name: str, hours: int, offset: int) -> _Samples:
        end = now - 3600 * offset
        found = [
            values[name]
            for at, values in sorted(scrapes.items())
            if end - (3600 * hours or 300) < at <= end and name in values
        ]
        return _Samples(found if hours else found[-1:])  # of the last 5 minutes, where no range is given

    calls = re.sub(
        r"(shardckpt_\w+)(?:{.*?})?(?:\[(\d)h\])?(?: offset (\d)h)?",
        lambda match: f'find("{match[1]}", {match[2] or 0}, {match[3] or 0})',
        re.sub(r" by \(.*?\)", "", rule),
    )
    names = {
        "find": find,
        "time": lambda: now,
        "max": lambda found: _Samples([max(found)] if found else []),
        "max_over_time": lambda found: _Samples([max(found)] if found else []),
    }
    return bool(eval(calls, names))


def _run(hours: float, every: float, save_after: float, newest: float) -> dict[float, dict[str, float]]:
    """Return what is scraped each minute of a job that is started again and again, by its hours; the last ends it.

    Args:
        hours: How long.
        every: After how many hours it is started again; before that it is down for 6 minutes.
        save_after: How long after each start it saves.
        newest: When the newest step of the folder was saved before.
    """
    scrapes = {}
    for minute in range(round(60 * hours) + 1):
        at = 60.0 * minute
        start = at // (3600 * every) * 3600 * every
        saved = start + 3600 * save_after
        newest = max(newest, saved) if at >= saved else newest
        if at - start < 3600 * (every - 0.1):
            scrapes[at] = {
                "shardckpt_start_timestamp_seconds": start,
                "shardckpt_newest_step_timestamp_seconds": newest,
                **({"shardckpt_last_success_timestamp_seconds": saved} if at >= saved else {}),
            }
    return scrapes


@table(
    "hours, every, save_after, newest, expected",
    [
        (3.3, 0.5, 9, -1e9, True),  # it never saves, nor did another
        (3.3, 0.5, 9, -9e4, True),  # nor since yesterday
        (3.3, 0.5, 0.3, -9e4, False),
        (3.3, 99, 9, -9e4, True),  # it hangs
        (1.9, 0.5, 9, -1e9, False),  # it may yet save
        (0.4, 99, 0.5, -9e4, False),  # it goes on where another ended yesterday
    ],
)
def test_a_job_that_is_started_again_and_again_meets_the_alert_of_saves(
    hours: float, every: float, save_after: float, newest: float, expected: bool
) -> None:
    """A restart begins no new count where no step was saved; a new job, and one that saves after each, meet none."""
    (rule,) = re.findall("alert: NoSaveFor2Hours, expr: '(.*)'}", READMES["shardckpt/integrations/README.md"])
    assert _evaluate(rule, 3600 * hours, _run(hours, every, save_after, newest)) is expected


def _wait_for_measures() -> None:
    for thread in list_threads("shardckpt-measure"):
        thread.join()


def _fail_to_look(_: Path) -> None:
    raise OSError("stale file handle")


def test_what_is_measured_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes, free space and damaged checkpoints, by its whole path; what cannot be measured has no sample."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    monkeypatch.chdir(tmp_path)
    PrometheusListener(registry, folder="runs", quota="1GB")

    def measure(name: str) -> Any:
        _measure(registry)
        value = registry.get_sample_value(f"shardckpt_{name}", {"folder": str(tmp_path / "runs")})
        _wait_for_measures()
        return value

    assert measure("free_bytes") > 0
    assert measure("quota_bytes") == 1e9
    assert measure("newest_step_bytes") is None
    assert measure("newest_step_timestamp_seconds") == 0
    assert measure("damaged_checkpoints") == 0
    for step in (1, 2):
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, f"runs/step-{step}")
    assert measure("folder_bytes") > measure("newest_step_bytes") >= 4000
    saved_at = (tmp_path / "runs" / "step-2" / "metadata.json").stat().st_mtime
    assert measure("newest_step_timestamp_seconds") == pytest.approx(saved_at, abs=60)
    assert measure("damaged_checkpoints") == 0
    _damage(tmp_path / "runs" / "step-2")
    assert measure("damaged_checkpoints") == 1
    monkeypatch.setattr("shardckpt.integrations.prometheus.measure", lambda _: 1 / 0)
    assert measure("folder_bytes") is None
    assert measure("free_bytes") > 0
    monkeypatch.setattr("shardckpt.integrations.prometheus.shutil.disk_usage", _fail_to_look)
    assert measure("free_bytes") is None


def test_a_phase_has_few_time_series(tmp_path: Path) -> None:
    """Each bucket is one for each phase and rank; the alert about slow saves has one at its limit."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    registry = prometheus_client.CollectorRegistry()
    with registered(PrometheusListener(registry)):
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(10))}, tmp_path / "c")
    limits = {
        sample.labels["le"]
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "shardckpt_phase_seconds_bucket"
    }
    assert len(limits) <= 8
    assert limits >= {"0.1", "600.0", "3600.0"}


class _Gated(Folder):
    """Answers when its gate is open, and then fails where it is told to."""

    def __init__(self, url: str, plugin: _Gates) -> None:
        super().__init__(url)
        self._plugin = plugin

    def tree(self) -> dict[str, int]:
        self._plugin.gate.wait()
        if self._plugin.is_down:
            raise ConnectionError("no route to the store")
        return super().tree()


class _Gates:
    """Serves gated:///PATH."""

    def __init__(self) -> None:
        self.gate, self.is_down = threading.Event(), False

    @hookimpl
    def shardckpt_filesystem(self, url: str) -> _Gated | None:
        return _Gated(url.rstrip("/"), self) if url.startswith("gated://") else None


def test_no_scrape_waits_for_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A scrape gives what was measured last, if that did not fail; an outage is one warning, and so is its end."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from shardckpt.integrations.prometheus import PrometheusListener

    monkeypatch.setenv("SHARDCKPT_REMOTE_ATTEMPTS", "3")
    monkeypatch.setattr("shardckpt.storage.remote._FIRST_DELAY", 0)
    registry, store = prometheus_client.CollectorRegistry(), _Gates()
    (tmp_path / "file").write_bytes(b"12345")
    url = f"gated://{tmp_path}"

    def scrape() -> Any:
        return registry.get_sample_value("shardckpt_folder_bytes", {"folder": url})

    with registered(store):
        PrometheusListener(registry, folder=url)
        try:
            assert [scrape() for _ in range(2)] == [None, None]
            assert len(list_threads("shardckpt-measure")) == 1
        finally:
            store.gate.set()
            _wait_for_measures()
        found = []
        for store.is_down in (False, True, True, False, False):
            found.append(scrape())
            _wait_for_measures()
    assert found == [5.0, 5.0, None, None, 5.0]
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 2, lines
    assert re.search(r"cannot be measured, and are absent until they can: .*no route to the store", lines[0])
    assert lines[1].endswith(f"of {url} are measured again")
    with registered(store), monkeypatch.context() as ending:
        # the program ends: what a scrape has begun then is no failure of the store
        store.is_down = True
        ending.setattr(threading.main_thread(), "is_alive", lambda: False)
        scrape()
        _wait_for_measures()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 2
