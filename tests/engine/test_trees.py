"""Checkpoints whose files are in folders: saved, loaded, replaced, checked, rewritten and removed like flat ones."""

from __future__ import annotations

import json
import shutil
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.cli import main
from shardckpt.dist_checkpointing import ShardedTensor
from shardckpt.engine.integrity import save_integrity_manifest
from shardckpt.engine.transaction import check_records
from shardckpt.errors import CorruptCheckpointError, PluginError, StorageError
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manager import CheckpointConfig, CheckpointManager, KeepLatest
from shardckpt.manifest import FileRecord
from tests import trees
from tests.damage import flip
from tests.plugged import registered
from tests.remote import jobs
from tests.remote.store import Store
from tests.states import rank_and_size
from tests.tables import table
from tests.trees import LoadTree, LoadTree2, SaveTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ranks import Ranks

COMMITTED = {"metadata.json", "shardckpt.json", "integrity.json"}


@pytest.fixture(autouse=True)
def _plugin() -> Iterator[None]:
    """The strategy is installed."""
    with registered(trees.Plugin()):
        yield


def _save(path: str, value: float, how: str = "", sha256: bool = False, **options: Any) -> None:
    """Save in the caller's thread, in a thread, or in the worker process."""
    options["verify_integrity"] = sha256
    if not how:
        jobs.save(path, value, sharded_strategy=SaveTree(), **options)
        return
    with AsyncCallsQueue(persistent=how == "process") as queue:
        state = jobs.state(value)
        queue.schedule_async_request(dc.save(state, path, SaveTree(), async_sharded_save=True, **options))
        state["weight"].data.fill_(-3.0)


def _load(path: str, value: float) -> None:
    jobs.check(path, value, sharded_strategy=LoadTree())


def _names(world: int) -> set[str]:
    """All files of a save by so many ranks."""
    rows = {f"arrays/weight/c/{jobs.ROWS // world * rank}/0/0" for rank in range(world)}
    return rows | {"arrays/bias/c/0/0", trees.INDEX, trees.COMMON} | COMMITTED


def _found(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}


_CASES = [*product((1, 2), ("", "thread", "process"), ("path", "url"))]
_TIERS = {
    **dict.fromkeys([(1, "", "path"), (2, "", "url"), (2, "thread", "path"), (2, "thread", "url")], ()),
    (2, "process", "url"): pytest.mark.ci,
}


@pytest.mark.parametrize(
    ("world", "how", "where"),
    [pytest.param(*case, marks=_TIERS.get(case, pytest.mark.proof)) for case in _CASES],
)
def test_a_tree_is_saved_and_loaded(ranks: Ranks, tmp_path: Path, world: int, how: str, where: str) -> None:
    """What 1 or 2 ranks save, in front of the training or behind it, 1 and 2 ranks load, from a path and a URL."""
    store = Store(tmp_path / "store")
    # the worker process has not imported what serves faulty://
    url = f"local://{store.objects}" if how == "process" else store.url
    target = str(tmp_path / "c") if where == "path" else url
    ranks.run(world, _save, target, 2.0, how, True)
    assert _found(tmp_path / "c" if where == "path" else store.objects) == _names(world)
    for readers in (1, 2):
        ranks.run(readers, _load, target, 2.0)
    jobs.check(target, 2.0)
    results = verify_checkpoint(target)
    assert {result.name for result in results} == _names(world) - {"integrity.json"}
    assert not [result for result in results if result.fault or result.foreign]
    with dc.open_checkpoint(target) as checkpoint:
        assert torch.equal(checkpoint["weight"][3:5], jobs.whole(2.0)[3:5])
        assert checkpoint.find_incomplete_files() == []


def test_a_tree_is_replaced_and_other_files_in_its_folders_are_kept(tmp_path: Path) -> None:
    """An overwrite takes the old files out of their folders, other people's files there stay; a flat save, too."""
    target = tmp_path / "c"
    _save(str(target), 1.0)
    (target / "arrays" / "weight" / "notes.txt").write_text("mine")
    (target / "arrays" / "old").mkdir()
    (target / "arrays" / "old" / "x").write_text("mine, too")
    _save(str(target), 2.0, overwrite=True)
    _load(str(target), 2.0)
    foreign = {"arrays/weight/notes.txt", "arrays/old/x"}
    assert _found(target) == _names(1) - {"integrity.json"} | foreign
    assert [found.name for found in verify_checkpoint(target) if found.foreign] == [
        "arrays/old",
        "arrays/weight/notes.txt",
    ]
    jobs.save(str(target), 3.0, overwrite=True)
    jobs.check(str(target), 3.0)
    assert {name for name in _found(target) if "/" in name} == foreign
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@table("damage", ["flip", "cut", "gone", "folder gone", "file for folder", "linked folder", "linked file"])
def test_damage_in_a_folder_is_found(tmp_path: Path, damage: str) -> None:
    """What is changed, missing or a link, at any level, fails load and verification by its path."""
    target = tmp_path / "c"
    _save(str(target), 2.0)
    name = "arrays/weight/c/0/0/0"
    file = target / name
    if damage == "flip":
        flip(file, 77)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage in ("folder gone", "file for folder"):
        shutil.rmtree(target / "arrays" / "weight")
        if damage == "file for folder":
            (target / "arrays" / "weight").touch()
    else:
        moved = target / "arrays" / "weight" if damage == "linked folder" else file
        moved.rename(tmp_path / "elsewhere")
        moved.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((CorruptCheckpointError, StorageError), match="arrays/weight"):
        _load(str(target), 2.0)
    assert [result.name for result in verify_checkpoint(target) if result.fault] == [name]
    with dc.open_checkpoint(target) as checkpoint:
        incomplete = [found.name for found in checkpoint.find_incomplete_files()]
    assert incomplete == ([] if damage == "flip" else [name])
    assert main(["verify", str(target)]) == 1


def test_keys_are_removed_from_a_tree(tmp_path: Path) -> None:
    """A removal drops the files in the folders of a key, and the folders; all others are the same files as before."""
    target = tmp_path / "c"
    _save(str(target), 2.0, sha256=True)
    kept = (target / "arrays/bias/c/0/0").stat().st_ino
    dc.remove_sharded_tensors(str(target), "weight")
    assert _found(target) == {name for name in _names(1) if "weight" not in name}
    assert not (target / "arrays" / "weight").exists()
    assert (target / "arrays/bias/c/0/0").stat().st_ino == kept
    assert not [result for result in verify_checkpoint(target) if result.fault or result.foreign]
    assert dc.load({"bias": jobs.state(-1.0)["bias"]}, str(target))["bias"].tolist() == [2.0] * 7


@table("where", ["path", "url"])
def test_a_tree_is_migrated(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command rewrites a tree as another one, from a path to a path and from a URL to a URL, and inspects it."""
    old, new = (str(tmp_path / name) for name in ("old", "new"))
    if where == "url":
        store = Store(tmp_path / "store")
        old, new = store.url, f"{store.url}-new"
    _save(old, 2.0)
    assert main(["migrate", old, new]) == 0
    jobs.check(new, 2.0, sharded_strategy=LoadTree2())
    assert main(["verify", new]) == 0
    assert main(["inspect", new]) == 0
    out = capsys.readouterr().out
    assert "v2/arrays/weight/c/0/0/0" in out
    assert "weight" in out


def test_integrity_is_written_for_a_tree(tmp_path: Path) -> None:
    """Megatron's integrity.json, written later, has the files in folders by their paths."""
    _save(str(tmp_path / "c"), 2.0)
    save_integrity_manifest(tmp_path / "c")
    assert set(json.loads((tmp_path / "c" / "integrity.json").read_text())["files"]) == _names(1) - {"integrity.json"}
    jobs.check(str(tmp_path / "c"), 2.0, verify_integrity=True)


@table("where", ["path", "url"])
def test_a_manager_keeps_and_removes_trees(tmp_path: Path, where: str) -> None:
    """Steps that are trees are found, loaded and removed with all their folders."""
    store = Store(tmp_path / "store")
    folder = str(tmp_path / "run") if where == "path" else store.url
    place = tmp_path / "run" if where == "path" else store.objects
    config = CheckpointConfig(
        folder=folder,
        interval=1,
        retention=[KeepLatest(2)],
        strategy="tree",
        save_rng=False,
        last_save_model_only=False,
    )
    model = torch.nn.Linear(2, 2)
    with CheckpointManager(config, {"model": model}) as manager:
        for step in (1, 2, 3):
            torch.nn.init.constant_(model.weight, step)
            manager.save(step)
        torch.nn.init.zeros_(model.weight)
        assert manager.load()
    assert model.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert {path.name for path in place.iterdir()} - {".shardckpt-holds"} == {"step-2", "step-3"}
    assert any(name.startswith("arrays/") for name in _found(place / "step-3"))


def test_a_bad_name_of_a_strategy_is_named(ranks: Ranks, tmp_path: Path) -> None:
    """The error names the strategy's class, the file and the rule, in front of the training and behind it."""
    for number, how in enumerate(("", "thread")):
        first, second = ranks.run(2, jobs.error_of, _save_badly, str(tmp_path / str(number)), how)
        assert first == second
        assert first[0] == "PluginError"
        assert "('tree', 1) tests.trees.SaveTree gives a file the name 'arrays/../weight'" in first[1]
        assert "letters, digits" in first[1]
    assert not list(tmp_path.iterdir())


def _save_badly(path: str, how: str) -> None:
    saver = SaveTree("arrays/../{key}")
    if not how:
        jobs.save(path, 1.0, sharded_strategy=saver)
        return
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(dc.save(jobs.state(1.0), path, saver, async_sharded_save=True))


def test_a_file_and_a_folder_of_one_name_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks that write ``x`` and ``x/0`` get an error that names the place, and nothing is left."""
    store = Store(tmp_path / "store")
    for target, action in ((str(tmp_path / "c"), "create"), (store.url, "upload")):
        errors = ranks.run(2, jobs.error_of, _clash, target)
        assert len(set(errors)) == 1
        assert errors[0][0] == "StorageError"
        assert f"cannot {action} " in errors[0][1]
        assert "/x" in errors[0][1]
    assert not (tmp_path / "c").exists()
    assert not store.objects.exists() or not _found(store.objects)


def test_files_that_are_folders_of_others_are_not_committed() -> None:
    """A store without folders takes ``x`` and ``x/0`` of two ranks: the commit finds it in their records."""
    found = [
        FileRecord(name=n, size=0, rank=r, keys=0, digest="0" * 64, segments="x") for r, n in enumerate(["x/0", "x"])
    ]
    with pytest.raises(
        StorageError, match=r"files have the names of folders that other files are in: 'x' by rank 1; ren"
    ):
        check_records(found)


def _clash(path: str) -> None:
    rank, _ = rank_and_size()
    dc.save({f"w{rank}": ShardedTensor.from_rank_offsets(f"w{rank}", torch.ones(2))}, path, _Clashing())


class _Clashing(SaveTree):
    def prepare(self, shards: Any, common: Any, context: Any) -> Any:
        """Name the file of rank 1 as the folder of rank 0."""
        self.name = "x" if context.comm.rank else "x/0"
        return super().prepare(shards, common, context)


def test_a_reserved_name_is_refused(tmp_path: Path) -> None:
    """A folder with the name of a file that the commit writes fails the save by name and class."""
    with pytest.raises(
        PluginError, match=r"SaveTree has written 'metadata.json/weight', .*'integrity.json', 'metadata.json'"
    ):
        dc.save(jobs.state(1.0), tmp_path / "c", SaveTree("metadata.json/{key}"))
    assert not list(tmp_path.iterdir())
