"""A prefix on a store that is removed and written anew while it is read."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import dist_checkpointing
from shardckpt.engine import locate
from shardckpt.maintenance import convert_checkpoint
from shardckpt.plugins import get_plugin_manager, hold_checkpoint
from shardckpt.storage.identity import is_of_save
from tests import backends
from tests.faults import samples
from tests.faults.replacing import NEW, OLD, version_of
from tests.remote.store import FaultyFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.remote.store import Store


def _load(url: str, _: Path) -> Any:
    return dist_checkpointing.load(samples.template(), url)


def _convert(url: str, folder: Path) -> Any:
    convert_checkpoint(url, folder / "converted", "ep", overwrite=True)
    return dist_checkpointing.load(samples.template(), folder / "converted")


@backends.both_in_proof
@pytest.mark.parametrize(
    ("take", "verify"), [(_load, "1"), (_load, "0"), (_convert, "1")], ids=["verified", "unverified", "converted"]
)
def test_a_prefix_written_anew_at_every_moment(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[[str, Path], Any], verify: str
) -> None:
    """Whenever another save takes the place of the objects, what is read is one save, whole, and not refused."""
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", verify)
    saves = store.objects.parent / "saves"
    for version in (OLD, NEW):
        dist_checkpointing.save(samples.state_dict(version), store.url)
        shutil.move(store.objects, saves / str(version))
    read = FaultyFileSystem.cat_file
    count, at = 0, 0
    one_at_a_time = threading.Lock()  # a save takes the other's place between two reads of a load's threads, not in one

    def watched(self: Any, *args: Any, **kwargs: Any) -> bytes:
        nonlocal count
        with one_at_a_time:
            count += 1
            if count == at:
                shutil.rmtree(store.objects)
                shutil.copytree(saves / str(NEW), store.objects)
            return read(self, *args, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "cat_file", watched)
    found = []
    while not found or count >= at:
        at, count = at + 1, 0
        shutil.rmtree(store.objects, ignore_errors=True)
        shutil.copytree(saves / str(OLD), store.objects)
        found.append(version_of(take(store.url, tmp_path)))
    assert len(found) > len(list((saves / str(OLD)).iterdir()))
    assert set(found) <= {OLD, NEW}
    assert found[-1] == OLD
    assert NEW in found


def test_a_record_that_became_shorter_is_another_saves(store: Store) -> None:
    """A record of another save that took the place between listing and reading is no damage, whatever its length."""
    dist_checkpointing.save(samples.state_dict(OLD), store.url)
    place, manifest = hold_checkpoint(locate(store.url, get_plugin_manager()), get_plugin_manager())
    assert manifest.record is not None
    assert is_of_save(place, manifest.record)  # which lists the folder
    file = store.objects / "shardckpt.json"
    file.write_bytes(file.read_bytes()[:-200])
    assert not is_of_save(place, manifest.record)
    file.write_bytes(b"{}")
    assert not is_of_save(place, manifest.record)
