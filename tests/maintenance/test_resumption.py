"""Conversions to a store in memory that end at a request, as a kill ends them, and are run again."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from shardckpt.chunks import save
from shardckpt.commit.claim import Claim
from shardckpt.engine.pruning import prune_leftovers
from shardckpt.errors import StorageError
from shardckpt.maintenance import ConversionReport, conversion, convert_checkpoint, verify_checkpoint
from shardckpt.maintenance.sources import open_any
from shardckpt.maintenance.verify import get_exit_code
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import RemotePath
from tests.commit import owners
from tests.commit.replacement import Place
from tests.maintenance.resumption import MIB, make_source, replace_id
from tests.plugged import registered
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ID = re.compile("[0-9a-f]{32}")


class Target:
    """A URL to which a source is converted, on a store with conditions.

    Attributes:
        source: What is converted.
        begun: Names of the objects that the last conversion has begun to stream.
    """

    def __init__(self, source: Path, to: str) -> None:
        self.begun: list[str] = []
        self.to = to
        self.source = source
        self.place = Place("obstore")
        guard = self.place._guard

        def note(call: Any) -> Any:
            def begin(name: str, part_bytes: int) -> Any:
                self.begun.append(name)
                return guard(call)(name, part_bytes)

            return begin if call.__name__ == "open_write" else guard(call)

        self.place._guard = note  # type: ignore[method-assign]

    @property
    def folder(self) -> Any:
        """The folder."""
        return open_folder(self.place.url, get_plugin_manager())

    def convert(self, **options: Any) -> ConversionReport:
        """Convert, in objects of 2 MiB."""
        self.begun.clear()
        how = {"memory_budget": 64 * MIB, "max_shard_size": 2 * MIB} | options
        return convert_checkpoint(self.source, self.place.url, self.to, **how)

    def kill(self, at: int, **options: Any) -> bool:
        """Convert, and let no request through from one on; return whether that was before the end."""
        self.place.stopping.stop(at, is_answer_lost=False)
        with suppress(StorageError):
            self.convert(**options)
        was_killed = self.place.stopping.count >= at
        self.place.die()
        return was_killed

    def kill_in_the_middle(self, **options: Any) -> None:
        """Leave what a conversion has that is killed when two objects are complete."""
        for at in range(24, 100, 2):
            self.clear()
            if options.get("overwrite"):
                self.convert()
            self.kill(at, **options)
            if len(self.list_noted()) > 1:
                return
        raise AssertionError("no kill came in the middle")

    def list_noted(self) -> dict[str, int]:
        """Bytes of the objects that the journal has, by path."""
        found = {}
        folder = self.folder
        for name, size in folder.tree().items():
            within, is_line, number = name.rpartition(".journal-")
            if is_line and int(number):
                line = json.loads(folder.read(name, 9, size))
                found[within + line["file"]] = line["progress"][0]
        return found

    def read(self) -> dict[str, bytes]:
        """The objects that have no name of the save in them; those of a generation by their names in it."""
        folder = self.folder
        found = {name: folder.read(name, 0, size) for name, size in folder.tree().items()}
        said = _ID.search(found.get("metadata.json", found.get("shardckpt.json", b"")).decode())
        said = said or _ID.search(found.get("shardckpt.json", b"").decode())
        return {_ID.sub("", name): data for name, data in replace_id(found, said[0] if said else "").items()}

    def clear(self) -> None:
        """Delete all objects."""
        folder = self.folder
        RemotePath(folder).delete_all(set(folder.tree()))


@pytest.fixture
def make(tmp_path: Path, no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a URL without objects, for a conversion to a format."""
    make_source(tmp_path / "old", is_checkpoint=True)
    monkeypatch.setattr(conversion, "OBJECT_BYTES", 2 * MIB)
    target = Target(tmp_path / "old", "")
    with registered(target.place):

        def choose(to: str) -> Target:
            target.to = to
            return target

        yield choose


@pytest.mark.parametrize(
    ("to", "is_overwrite"),
    [
        ("safetensors", False),
        *in_proof(("torch_dist", True), ("hf", False), ("dcp", False)),
    ],
)
@pytest.mark.parametrize("step", [6, *in_proof(1)])
def test_a_killed_conversion_goes_on(make: Any, to: str, is_overwrite: bool, step: int) -> None:
    """Killed at any request, it sends no object again that the journal has, and the result is that without the kill."""
    target: Target = make(to)
    if is_overwrite:
        target.convert()
    target.convert(overwrite=is_overwrite)
    whole = target.read()
    most, at = 0, 1
    while True:
        target.clear()
        if is_overwrite:
            target.convert()
        was_killed = target.kill(at, overwrite=is_overwrite)
        if not is_overwrite and "metadata.json" in target.folder.tree():
            prune_leftovers(target.place.url)  # it had committed
        has_marker = any(name.endswith("/metadata.json") for name in target.folder.tree())
        noted = {} if has_marker else target.list_noted()  # it may be the checkpoint already
        if is_overwrite or target.read() != whole:
            report = target.convert(overwrite=is_overwrite)
            assert report.resumed == sum(noted.values())
            assert not {name.rpartition("/")[2] for name in noted} & set(target.begun)
            most = max(most, report.resumed)
        assert target.read() == whole
        if not was_killed:
            break
        at += step
    assert most > 8 * MIB


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_it_goes_on_after_each_kill(make: Any, to: str) -> None:
    """Killed again and again, a conversion has more each time, and ends."""
    target: Target = make(to)
    found = []
    for at in (18, 30):  # what goes on looks first at what there is
        assert target.kill(at)
        found.append(sum(target.list_noted().values()))
    assert found == sorted(found)
    assert target.convert().resumed == found[-1] > found[0]
    assert not [name for name in target.folder.tree() if ".journal" in name or ".shardckpt" in name]
    with open_any(target.source) as old, open_any(target.place.url) as new:
        assert all(new[key].read().equal(old[key].read()) for key in old)


@table(
    ("is_overwrite", "is_alive", "error"),
    [
        (False, True, "of a save that has not ended"),
        (False, None, "of a save that has not ended"),
        (True, True, "another save is under way"),
    ],
)
def test_a_conversion_that_may_live_is_not_taken_over(
    make: Any, monkeypatch: pytest.MonkeyPatch, is_overwrite: bool, is_alive: bool | None, error: str
) -> None:
    """While the process that has begun it lives, or is of another host, another run is refused, and changes nothing."""
    target: Target = make("safetensors")
    target.kill_in_the_middle(overwrite=is_overwrite)
    before = target.folder.tree()
    monkeypatch.setattr(owners.Owner, "is_alive", lambda _: is_alive)
    with pytest.raises(StorageError, match=error):
        target.convert(overwrite=is_overwrite)
    assert target.folder.tree() == before


def test_of_two_that_go_on_one_does(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another process takes over what a killed one has left at the same moment, this one ends with an error."""
    target: Target = make("safetensors")
    target.kill_in_the_middle()
    take_over, reports = Claim.take_over, []

    def be_late(self: Claim) -> None:
        if not reports:
            reports.append(None)
            reports.append(target.convert())
        take_over(self)

    monkeypatch.setattr(Claim, "take_over", be_late)
    with pytest.raises(StorageError, match=r"not found|another save has begun"):
        target.convert()
    assert reports[1].resumed > 2 * MIB
    assert get_exit_code(verify_checkpoint(target.place.url)) == 0


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_other_options_start_anew(make: Any, caplog: pytest.LogCaptureFixture, is_overwrite: bool) -> None:
    """With another option nothing is gone on with: what was left is removed, and a warning says so."""
    target: Target = make("safetensors")
    target.kill_in_the_middle(overwrite=is_overwrite)
    report = target.convert(leave_out=["w.0"], overwrite=is_overwrite)
    assert (report.resumed, report.tensors) == (0, 56)
    assert "starts anew: an interrupted run has left files from another source or other options" in caplog.text
    assert not [name for name in target.folder.tree() if ".journal" in name or ".shardckpt" in name]
    assert get_exit_code(verify_checkpoint(target.place.url)) == 0


@table("damage", ["cut", "bit"])
@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_damage_starts_anew(make: Any, caplog: pytest.LogCaptureFixture, to: str, damage: str) -> None:
    """If an object that a killed run has left is damaged, the conversion starts anew, with a warning."""
    target: Target = make(to)
    target.clear()
    target.convert()
    whole = target.read()
    target.clear()
    target.kill_in_the_middle()
    name, size = next(iter(target.list_noted().items()))
    data = bytearray(target.folder.read(name, 0, size))
    data[size // 2] ^= 1
    (RemotePath(target.folder) / name).write(bytes(data if damage == "bit" else data[:-1]))
    assert target.convert().resumed == 0
    assert "starts anew" in caplog.text
    assert target.read() == whole


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_a_prune_removes_what_was_left(make: Any, to: str) -> None:
    """What a killed conversion has left goes with a prune."""
    target: Target = make(to)
    target.kill_in_the_middle()
    assert len(target.folder.tree()) > 4
    prune_leftovers(target.place.url)
    assert target.folder.tree() == {}


def test_a_folder_with_files_of_others_is_not_pruned(make: Any) -> None:
    """A conversion over a Hugging Face folder starts anew after a kill; a prune removes none of what is there."""
    target: Target = make("hf")
    target.convert()
    (RemotePath(target.folder) / "notes.txt").write(b"mine")
    target.kill(40, overwrite=True)
    before = target.folder.tree()
    prune_leftovers(target.place.url)
    assert target.folder.tree() == before
    assert target.convert(overwrite=True).resumed == 0
    assert target.folder.read("notes.txt", 0, 9) == b"mine"


def test_assets_are_copied_after_a_kill(make: Any, tmp_path: Path) -> None:
    """The files beside the weights, which a killed conversion has copied in part, are copied when it goes on."""
    target: Target = make("hf")
    (tmp_path / "hub").mkdir()
    save_file({f"w.{n}": torch.rand(MIB // 2) for n in range(4)}, tmp_path / "hub" / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "hub" / name).write_text("{}")
    target.source = tmp_path / "hub"
    target.kill_in_the_middle()
    (RemotePath(target.folder) / "tokenizer.json").delete()
    report = target.convert()
    assert report.resumed > 4 * MIB
    assert {"config.json", "tokenizer.json"} < target.folder.tree().keys()


def test_a_store_gets_one_file_at_a_time(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the disk with the spool directory is like, no two data files are sent at a time."""
    target: Target = make("safetensors")
    monkeypatch.setattr(conversion, "OBJECT_BYTES", 1 << 30)
    monkeypatch.setattr(save, "_MIN_FILE_BYTES", MIB)
    monkeypatch.setattr(save, "count_parallel_files", lambda _: 4)
    target.convert()
    assert [name for name in target.begun if name.startswith("rank_")] == ["rank_0_0.safetensors"]
