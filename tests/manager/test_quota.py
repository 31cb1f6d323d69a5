"""A quota of the folder: the space that a team has, where the file system or the store has more."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch

from shardckpt.engine import locate
from shardckpt.engine.locations import measure
from shardckpt.engine.space import Room, refuse_full
from shardckpt.errors import ConfigurationError, NotEnoughSpaceError
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage.remote import RemotePath
from tests.tables import table
from tests.testing.own_store import Folder

if TYPE_CHECKING:
    from pathlib import Path


def _make_manager(folder: str, **options: Any) -> CheckpointManager:
    """A manager whose steps have 1 MiB."""
    model = torch.nn.Linear(512, 512, bias=False)
    return CheckpointManager(CheckpointConfig(folder=folder, interval=1, **options), {"model": model})


def _name_folder(kind: str, tmp_path: Path) -> str:
    return str(tmp_path / "run") if kind == "local" else f"memory://{tmp_path.parent.name}-{tmp_path.name}/run"


@table("kind", ["local", "store"])
def test_a_step_beyond_the_quota_is_refused(tmp_path: Path, kind: str) -> None:
    """By the quota's name, before a byte of it is written; what is there stays."""
    folder = _name_folder(kind, tmp_path)
    with _make_manager(folder, quota="2.5MB") as manager:
        assert manager.save(1)
        assert manager.save(2)
        with pytest.raises(NotEnoughSpaceError, match=r"quota=2,500,000 of .*run leaves .* too little. No file was"):
            manager.save(3)
        assert manager.steps() == [1, 2]
    if kind == "store":
        left = [
            path.partition("/run/")[2]
            for path in fsspec.filesystem("memory").find(f"/{tmp_path.parent.name}-{tmp_path.name}/run")
        ]
        assert {name.partition("/")[0] for name in left if not name.startswith(".")} == {"step-1", "step-2"}


def test_a_quota_below_one_step_says_that_it_must_grow(tmp_path: Path) -> None:
    """To remove steps would not help, and the error says so; a folder that is full of steps does not say it."""
    run = tmp_path / "run"
    full = (
        f"cannot save to {run}/step-3: it does not fit into quota=500,000 of {run}, whatever is removed: raise the "
        "quota. "
    )
    with _make_manager(str(run)) as manager:
        assert manager.save(1)
        assert manager.save(2)
    with _make_manager(str(run), quota="500kB", keep_latest_k=1) as manager:
        with pytest.raises(NotEnoughSpaceError) as caught:
            manager.save(3)
        assert re.fullmatch(
            re.escape(full) + "The tensors take 1.0 MB, and with all else, as in an earlier save, it is 1.1 MB, .* too "
            r"much\. No file was written\.",
            str(caught.value),
        )
        assert not caught.value.advice
    with _make_manager(str(run), quota="500kB", keep_latest_k=1, on_full="prune") as manager:
        with pytest.raises(NotEnoughSpaceError, match="whatever is removed"):
            manager.save(3)
        assert manager.steps() == [1, 2]  # nothing is removed for a step that never fits
    with _make_manager(str(tmp_path / "other"), quota="1.5MB") as manager:
        assert manager.save(1)
        with pytest.raises(NotEnoughSpaceError) as caught:
            manager.save(2)
        assert "whatever is removed" not in str(caught.value)


def test_what_is_too_large_for_a_place_is_said_in_any_place(tmp_path: Path) -> None:
    """The error of a file that is replaced says what is missing; that of a URL has no password."""
    (tmp_path / "old.pt").write_bytes(b"old")
    with pytest.raises(NotEnoughSpaceError, match=r"too little\. .*The old checkpoint stays until"):
        refuse_full(tmp_path / "old.pt", 100, "write", 10)
    target = RemotePath(Folder("s3://user:sEcret@host/bucket/run/step-1"))
    for room in (Room(), Room(quota=50), Room(quota=500)):
        with pytest.raises(NotEnoughSpaceError) as caught:
            refuse_full(target, 100, "save to", 10, room)
        assert "user:***@" in str(caught.value)
        assert "sEcret" not in f"{caught.value}{caught.value.advice}"


@table("kind", ["local", "store"])
@table("strategy", ["torch_dist", "safetensors"])
def test_a_step_counts_with_all_that_it_has_beside_its_tensors(tmp_path: Path, kind: str, strategy: str) -> None:
    """Headers, index, record and common state, as an earlier step took them: a new manager keeps the quota, too."""
    folder, model = _name_folder(kind, tmp_path / strategy), torch.nn.Linear(8, 8)
    config = CheckpointConfig(folder=folder, interval=1, strategy=strategy, quota=100_000)

    def save_until_full() -> None:
        for step in range(1, 40):
            with CheckpointManager(config, {"model": model}) as manager:
                manager.save(step)

    text = r"take 288 B, and with all else, as in an earlier save, it is .* too little\. No file was written\.$"
    with pytest.raises(NotEnoughSpaceError, match=text):
        save_until_full()
    place = locate(folder, get_plugin_manager())
    assert 100_000 - 1.1 * measure(place / "step-1") < measure(place) <= 100_000


class _Numbers:
    """A state of many bytes that is no tensor."""

    def state_dict(self) -> dict[str, Any]:
        return {"read": "x" * 300_000}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def test_the_model_alone_is_not_forecast_by_what_whole_steps_have(tmp_path: Path) -> None:
    """The last save has its place where no whole step would have any."""
    config = CheckpointConfig(folder=str(tmp_path / "run"), interval=1, quota=1_500_000)
    with CheckpointManager(config, {"model": torch.nn.Linear(8, 8), "data": _Numbers()}) as manager:
        assert manager.save(1)
        assert manager.save(2)
        with pytest.raises(NotEnoughSpaceError):
            manager.save(3)
        assert manager.save(4, last_step=True)


def test_a_full_folder_is_said_once_and_what_to_do_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The steps that the retention will not keep take the place of general advice; a traceback has the text once."""
    run = tmp_path / "run"
    with _make_manager(str(run), quota="1.5MB", keep_latest_k=1) as manager:
        assert manager.save(1)
        with pytest.raises(NotEnoughSpaceError) as caught:
            manager.save(2)
    assert re.fullmatch(
        f"cannot save to {run}/step-2: remove step 1 \\(1.1 MB\\), which the retention policies will no longer keep "
        "once step 2 is complete; on_full='prune' removes all such but the newest. The tensors take 1.0 MB, and with "
        f"all else, as in an earlier save, it is 1.1 MB, and quota=1,500,000 of {run} leaves .* free, .* too little. "
        "No file was written.",
        str(caught.value),
    )
    assert "".join(traceback.format_exception(caught.value)).count("cannot save to") == 1
    assert caplog.text.count("cannot save to") == 1


@table("kind", ["local", "store"])
def test_a_quota_makes_room_as_a_full_disk_does(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """With on_full="prune" the step that the policies will not keep goes first; the log names the quota."""
    caplog.clear()  # of the row before
    folder = _name_folder(kind, tmp_path)
    with _make_manager(folder, quota="2.5MB", on_full="prune", keep_latest_k=2) as manager:
        for step in range(1, 5):
            assert manager.save(step)
        manager.wait()
        assert manager.steps() == [3, 4]
    assert f"quota=2,500,000 of {folder} leaves no space for step 3: removed before it, as" in caplog.text


def test_a_quota_that_is_no_size_is_refused() -> None:
    """At the start, not at the first save."""
    with pytest.raises(ConfigurationError, match="quota='much'"):
        CheckpointConfig(folder="run", quota="much")
