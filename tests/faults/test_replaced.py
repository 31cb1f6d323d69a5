"""Reading while another job overwrites: one save, whole, on all ranks; or an error that says what happens."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

from shardckpt import dist_checkpointing
from shardckpt.cli import main
from shardckpt.engine.integrity import verify_integrity_manifest
from shardckpt.errors import (
    CannotLoadError,
    CheckpointReplacedError,
    IncompleteCheckpointError,
    NotACheckpointError,
    StorageError,
)
from shardckpt.huggingface import export_to_huggingface, folder_export, load_from_huggingface
from shardckpt.huggingface.folder import check_same_folder, read_folder
from shardckpt.maintenance import remove as removing
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manager import steps
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.resolver import read_manifest
from shardckpt.storage.directory import open_directory
from shardckpt_torch_dist import CheckpointStorageReader
from tests import backends
from tests.faults import samples
from tests.faults.replaced import foreign, plain, verified, verify
from tests.faults.replacing import (
    NEW,
    OLD,
    At,
    Scene,
    load_plain_dcp,
    save_both,
    version_of,
)
from tests.resources import list_open
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.backends import Backend

__all__ = ["foreign", "verify"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled:UserWarning")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Two saves."""
    save_both(str(tmp_path))
    return Scene(tmp_path)


def at_every_open(scene: Scene, read: Callable[[Path], Any]) -> list[Any]:
    """What is read when the checkpoint is replaced just before each of the opens, one after the other."""
    found = []
    while True:
        scene.reset()
        with At(scene, len(found) + 1) as at:
            value = read(scene.target)
        if at.opened <= len(found):
            return found
        found.append(value)


def lazily(path: Path) -> int | list[str]:
    """The same through the lazy handle, which is opened again where it says so."""
    for _ in range(3):
        try:
            with dist_checkpointing.open_checkpoint(path) as checkpoint:
                found = {int(checkpoint[key].read().view(-1)[0]) for key in ("split", "big", "uneven")}
                found.add(1000 * int(checkpoint.common["iteration"]))
                found.add(1000 * int(checkpoint.read_object(checkpoint.objects[0])["version"]))
        except CheckpointReplacedError:
            continue
        return found.pop() // 1000 if len(found) == 1 else sorted(map(str, found))
    return ["refused"]


def by_dcp(path: Path) -> int | list[str]:
    """The same by plain dcp.load."""
    state = {"split": torch.zeros(samples.ROWS, 8), "big": torch.zeros(samples.BIG)}
    dcp.load(state, storage_reader=CheckpointStorageReader(path), no_dist=True)
    found = {int(tensor.view(-1)[0]) // 1000 for tensor in state.values()}
    return found.pop() if len(found) == 1 else sorted(map(str, found))


READERS = {
    "load": lambda path: version_of(samples.load(path)),
    "load, files verified before": lambda path: version_of(samples.load(path, verify_integrity=True)),
    "plain state dict": plain,
    "common state": lambda path: dist_checkpointing.load_common_state_dict(path)["iteration"],
    "tensors": lambda path: int(dist_checkpointing.load_plain_tensors(path)["big"][0]) // 1000,
    "lazily": lazily,
    "dcp.load": by_dcp,
    "verify": verified,
}


#: Every reader of each format: plain DCP reads that of torch_dist alone.
EACH_READER = pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "torch_dist") for name in sorted(READERS)),
        *(pytest.param(name, "safetensors", marks=pytest.mark.ci) for name in sorted(READERS.keys() - {"dcp.load"})),
    ],
    indirect=["backend"],
    scope="module",
)


@EACH_READER
def test_replaced_at_every_moment(scene: Scene, verify: str, name: str) -> None:
    """Whenever another save replaces the checkpoint while it is read, what is read is one save, and never refused."""
    found = at_every_open(scene, READERS[name])
    assert len(found) >= len(("metadata.json", "shardckpt.json", "the directory"))
    assert set(found) <= {OLD, NEW}, verify


@backends.both
def test_an_open_checkpoint_keeps_its_save(scene: Scene) -> None:
    """A lazy handle reads the save that it opened; if that is gone, it says so; the save is not hindered."""
    scene.reset()
    with dist_checkpointing.open_checkpoint(scene.target) as checkpoint:
        big = checkpoint["big"]  # its file is open from here on
        assert big[0] == 1000 * OLD
        scene.replace()
        assert list(scene.place.glob(".*")) == []
        assert big[:3].tolist() == [1000.0, 1001.0, 1002.0]
        with pytest.raises(
            CheckpointReplacedError,
            match=rf"{scene.target}: since it was opened, another save has replaced it.*open it again",
        ):
            _ = checkpoint.common
    with dist_checkpointing.open_checkpoint(scene.target) as checkpoint:
        assert checkpoint["big"][0] == 1000 * NEW


@backends.both_in_proof
def test_no_descriptor_is_left(scene: Scene, backend: Backend) -> None:
    """What a load has opened, the directory, too, is closed when it ends, before Python's collector comes."""
    scene.reset()
    foreign = set() if backend.name == "torch_dist" else {"dcp.load"}
    gc.disable()
    try:
        for name in READERS.keys() - foreign:
            READERS[name](scene.target)
            assert list_open(scene.place) == [], name
    finally:
        gc.enable()


def test_between_two_renames(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an overwrite takes two renames, a load between them waits for the second."""
    monkeypatch.setattr("shardckpt.commit.commit.exchange", lambda *_: False)
    waits, renamed = threading.Event(), threading.Event()
    clock = SimpleNamespace(sleep=lambda _: waits.set() or renamed.wait(60))
    monkeypatch.setattr("shardckpt.plugins.resolver.time", clock)
    scene.reset()
    found: list[Any] = []
    rename = os.rename
    load = threading.Thread(target=lambda: found.append(version_of(samples.load(scene.target))))

    def between(source: Any, target: Any) -> None:
        if Path(target) == scene.target:
            load.start()
            assert waits.wait(60)
        rename(source, target)

    monkeypatch.setattr("shardckpt.commit.commit.os.rename", between)
    scene.replace()
    renamed.set()
    load.join(60)
    assert found == [NEW]


@pytest.mark.usefixtures("no_pauses")
def test_an_interrupted_overwrite_is_still_said(scene: Scene) -> None:
    """What was interrupted between its two renames is not waited for without end: it is the error that it was."""
    scene.reset()
    scene.target.rename(scene.place / f".target.shardckpt-replaced-{'0' * 32}")
    with pytest.raises(IncompleteCheckpointError, match="an overwrite was interrupted; a complete checkpoint is at"):
        samples.load(scene.target)


def inspected(path: Path) -> int | list[str]:
    """Whether inspect finds that something is missing."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["inspect", str(path)]) == 0
    return ["faults"] if "damaged: " in out.getvalue() or "cannot be read" in out.getvalue() else NEW


@pytest.mark.parametrize("read", [load_plain_dcp, verified, inspected])
def test_a_foreign_checkpoint_is_replaced_at_every_moment(
    foreign: Scene, verify: str, read: Callable[[Path], int | list[str]]
) -> None:
    """Another library's checkpoint, in whose place another one is put, is read as a whole, too."""
    found = at_every_open(foreign, read)
    assert set(found) <= {OLD, NEW}, verify


def test_a_foreign_checkpoint_that_is_written_in_place(foreign: Scene) -> None:
    """Another library that saves into the directory while it is read: the values of two saves are never given out."""
    foreign.reset()
    with At(foreign, 0) as at:
        assert load_plain_dcp(foreign.target) == OLD
    said = []
    for number in range(1, at.opened + 1):
        foreign.reset()

        def rewrite() -> None:
            for name in foreign.names:  # in place: the files stay the same ones
                (foreign.target / name).write_bytes((foreign.place / "new" / name).read_bytes())

        (foreign.place / "new").touch()
        with At(foreign, number, rewrite):
            try:
                assert load_plain_dcp(foreign.target) in (OLD, NEW)
            except StorageError as exc:
                said.append(str(exc))
    assert said
    assert all("was written to, or removed, while the checkpoint was read" in text for text in said)


def test_dcp_plans_of_two_saves_are_refused(scene: Scene) -> None:
    """Ranks of a plain dcp.load that have opened different saves are told, before anything is read."""
    scene.reset()
    one = CheckpointStorageReader(scene.target)
    one.read_metadata()
    scene.replace()
    other = CheckpointStorageReader(scene.target)
    other.read_metadata()
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in (one, other)]
    assert one.prepare_global_plan(plans[:1]) == plans[:1]
    with pytest.raises(CheckpointReplacedError, match="is being overwritten: the ranks have opened 2 different saves"):
        one.prepare_global_plan(plans)


# Hugging Face folders.


def weights(version: int) -> dict[str, Any]:
    """What is exported."""
    return {key: ShardedTensor.from_rank_offsets(key, torch.full((300,), float(version))) for key in ("a", "b", "c")}


@pytest.fixture
def folders(tmp_path: Path) -> Scene:
    """Two exports, of three files each."""
    for name, version in (("old", OLD), ("new", NEW)):
        dist_checkpointing.save(weights(version), tmp_path / "checkpoints" / name)
        export_to_huggingface(tmp_path / "checkpoints" / name, tmp_path / name, max_shard_size=1200)
    return Scene(tmp_path)


def load_folder(path: Path) -> int | list[str]:
    """Which export it is of."""
    found = {value for tensor in load_from_huggingface(weights(0), path).values() for value in tensor.tolist()}
    return int(found.pop()) if len(found) == 1 else sorted(map(str, found))


def test_an_exported_folder_is_replaced_at_every_moment(folders: Scene) -> None:
    """A Hugging Face folder that is exported anew while it is loaded gives the weights of one export."""
    assert set(at_every_open(folders, load_folder)) <= {OLD, NEW}


def test_ranks_find_out_that_a_folder_was_exported_anew(folders: Scene) -> None:
    """A rank that opens the folder after another export does not read it by the headers of the one before."""
    folders.reset()
    found = read_folder(open_directory(folders.target))
    check_same_folder(open_directory(folders.target), found)
    folders.replace()
    with pytest.raises(CheckpointReplacedError, match="this rank finds another folder there than the main rank"):
        check_same_folder(open_directory(folders.target), found)


@backends.both_in_proof
def test_the_source_of_an_export_is_replaced_at_every_moment(folders: Scene, tmp_path: Path) -> None:
    """An export of a checkpoint that is overwritten meanwhile is of one save, and its folder is whole."""
    source = Scene(tmp_path / "checkpoints")

    def export(path: Path) -> int | list[str]:
        export_to_huggingface(path, tmp_path / "exported", max_shard_size=1200, overwrite=True)
        return load_folder(tmp_path / "exported")

    assert set(at_every_open(source, export)) <= {OLD, NEW}
    assert not list(tmp_path.glob(".*"))


@backends.both_in_proof
def test_integrity_is_of_one_save(scene: Scene) -> None:
    """A check by integrity.json of a checkpoint that is overwritten meanwhile finds no fault in either save."""
    for name, version in (("old", OLD), ("new", NEW)):
        dist_checkpointing.save(samples.state_dict(version), scene.place / name, overwrite=True, verify_integrity=True)
    scene = Scene(scene.place)
    assert set(at_every_open(scene, verify_integrity_manifest)) == {None}


@backends.both_in_proof
def test_a_removal_spares_a_save_that_came_while_it_wrote(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are taken out of the save that is there at the end; none is lost to one that was there before."""
    scene.reset()
    rewrite, overwritten = removing.rewrite_file, []

    def rewrite_while_overwritten(*args: Any) -> None:
        rewrite(*args)
        if not overwritten:
            overwritten.append(scene.replace())

    monkeypatch.setattr(removing, "rewrite_file", rewrite_while_overwritten)
    report = dist_checkpointing.remove_sharded_tensors(scene.target, "uneven")
    assert overwritten
    assert report.keys == ("uneven",)
    with dist_checkpointing.open_checkpoint(scene.target) as checkpoint:
        assert "uneven" not in checkpoint
        assert int(checkpoint["big"].read()[0]) // 1000 == NEW
        assert checkpoint.common["iteration"] == samples.state_dict(NEW)["iteration"]
    assert not [result for result in verify_checkpoint(scene.target) if result.fault]


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
def test_an_export_of_two_saves_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where plain DCP writes into the source meanwhile, the error comes before there is a folder."""
    source, folder = tmp_path / "source", tmp_path / "folder"

    def save(value: float) -> None:
        dcp.save({"w": torch.full((4, 4), value)}, checkpoint_id=str(source), no_dist=True)

    save(1.0)
    write = folder_export.FolderExport._write

    def write_while_saved(*args: Any) -> None:
        write(*args)
        save(2.0)

    monkeypatch.setattr(folder_export.FolderExport, "_write", write_while_saved)
    with pytest.raises(StorageError, match="source"):
        export_to_huggingface(source, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@backends.both_in_proof
def test_a_step_removed_while_it_is_looked_at_is_no_refusal(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that another process removes is not there: a restart takes the one before it."""
    scene.reset()
    scene.target.rename(scene.place / "step-1")
    check = steps._check_files

    def check_what_is_removed(place: Path, manifest: Any) -> None:
        shutil.rmtree(scene.place / "step-1", ignore_errors=True)
        check(place, manifest)

    monkeypatch.setattr(steps, "_check_files", check_what_is_removed)
    found = steps.StepFolder(scene.place, get_plugin_manager()).inspect_step(1)
    assert (found.refusal, type(found.error)) == (None, NotACheckpointError)


@table("read", [read_manifest, lambda path, _: verify_checkpoint(path)], ids=["gate", "verify"])
def test_links_that_lead_nowhere_are_no_checkpoint(tmp_path: Path, read: Callable[..., Any]) -> None:
    """A marker that is a link to itself is an error of the family, as one that is not there."""
    (tmp_path / "metadata.json").symlink_to("metadata.json")
    with pytest.raises(CannotLoadError, match=re.escape("has no metadata.json")):
        read(tmp_path, get_plugin_manager())
