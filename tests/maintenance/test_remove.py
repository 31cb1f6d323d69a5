from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.dist_checkpointing import ShardedObject, ShardedTensor
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, NotACheckpointError, StorageError
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest import RECORD_NAME, Record
from shardckpt.mapping import PlainObject
from shardckpt.plugins import get_plugin_manager
from shardckpt.strategy import LoadContext, LoadStrategy, RemovesKeys
from shardckpt_torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from tests import backends
from tests.names import INDEX, METADATA
from tests.tables import in_proof, table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends import Backend
    from tests.ranks import Ranks

#: What names the keys of a checkpoint of ours.
VERSIONS = ("0.9.0", "0.12.3", "0.13.1", "0.16.1", "0.17.0rc0", "0.20.0")
INDEXES = (METADATA, INDEX)
PREFIXES = ("grid", "rng_state", "decoder.layers.0", "optimizer.state", "d")
FLATTENED = "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"
#: Golden checkpoints in which two files hold nothing but the grid.
GRID_APART = ("0.9.0", "0.12.3", "0.13.1")


@dataclass
class Content:
    """All that a checkpoint stores."""

    tensors: dict[str, torch.Tensor]
    objects: set[str]
    common: dict[str, Any]

    def without(self, prefix: str) -> Content:
        """The same without the tensors and objects whose keys begin with the prefix."""
        tensors = {key: tensor for key, tensor in self.tensors.items() if not key.startswith(prefix)}
        return Content(tensors, {key for key in self.objects if not key.startswith(prefix)}, self.common)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Content)
            and self.tensors.keys() == other.tensors.keys()
            and all(same(tensor, other.tensors[key]) for key, tensor in self.tensors.items())
            and (self.objects, self.common) == (other.objects, other.common)
        )

    __hash__ = None  # type: ignore[assignment]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    return a.dtype == b.dtype and torch.equal(a, b)


def content(directory: Path) -> Content:
    """What our reader finds, whole, without a process group."""
    stored = dc.load_sharded_metadata(directory)
    objects = {key for key, shard in stored.items() if isinstance(shard, ShardedObject)}
    return Content(dc.load_plain_tensors(directory), objects, dc.load_common_state_dict(directory))


def files_of(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and bytes of every file below the directory, by its relative path."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): (path.stat().st_ino, path.read_bytes()) for path in paths}


def names(directory: Path) -> set[str]:
    """What lies in a directory."""
    return {path.name for path in directory.iterdir()}


def golden(version: str, to: Path) -> Path:
    """A copy of a golden checkpoint, with other people's files in it."""
    target = to / "ckpt"
    shutil.copytree(GOLDEN / f"mcore-{version}", target)
    (target / "tokenizer.json").write_text("{}")
    (target / "logs").mkdir()
    (target / "logs" / "run.log").write_text("kept")
    return target


def state(rank: int = 0, world: int = 1) -> dict[str, Any]:
    """This rank's part of a model, an optimizer whose tensors and objects are to go, and common values."""
    rows = torch.arange(24.0).view(8, 3)
    return {
        "w": ShardedTensor.from_rank_offsets("model.w", rows.chunk(world)[rank].clone(), (0, rank, world)),
        "m": ShardedTensor.from_rank_offsets("optim.m", rows.chunk(world)[rank] + 100, (0, rank, world)),
        "v": ShardedTensor.from_rank_offsets("optim.v", rows.bfloat16(), replica_id=rank),
        "group": ShardedObject("optim.group", {"rank": rank}, (world,), (rank,)),
        "rng": ShardedObject("rng", [rank, 2.5], (world,), (rank,)),
        "optim.lr": 0.25,
        "iteration": 7,
    }


def save(path: str, *, hint: bool = False) -> None:
    """Save on this rank of whatever group there is."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    strategy = TorchDistSaveShardedStrategy(separation_hint="optim") if hint else None
    dc.save(state(rank, world), path, strategy)


def load_by_others(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    """Readers that know nothing of us find these tensors: safetensors, or plain DCP, which Megatron's format is of."""
    if backends.current().name == "safetensors":
        found: dict[str, torch.Tensor] = {}
        for path in directory.glob(backends.current().data_files):
            found.update(load_file(path))
        for key, tensor in expected.items():
            pieces = [found[name] for name in sorted(found) if name == key or name.startswith(f"{key}[")]
            assert same(torch.cat(pieces), tensor)
        return
    wanted = {key: torch.full_like(tensor, -1) for key, tensor in expected.items()}
    dcp.load(wanted, checkpoint_id=directory, no_dist=True)
    assert all(same(wanted[key], tensor) for key, tensor in expected.items())


@table("prefix", PREFIXES)
@table("version", VERSIONS)
def test_every_dialect(tmp_path: Path, version: str, prefix: str) -> None:
    """What begins with the prefix is gone, all else is as it was, for us and for plain DCP; no removed byte is left."""
    path = golden(version, tmp_path)
    before, files = content(path), files_of(path)
    report = dc.remove_sharded_tensors(path, prefix)
    expected = before.without(prefix)
    assert content(path) == expected
    load_by_others(path, {key: tensor for key, tensor in expected.tensors.items() if key != FLATTENED})
    after = files_of(path)
    assert bool(report.keys) == (expected != before)
    if report.keys:
        assert files.pop(".metadata") != after.pop(".metadata")
        assert (prefix != "grid" or version not in GRID_APART) or set(report.dropped) == {
            "__2_1.distcp",
            "__3_1.distcp",
        }
        assert files.keys() - after.keys() == set(report.dropped)
        stored: dict[str, int] = {}
        for info in dcp.FileSystemReader(path).read_metadata().storage_data.values():
            stored[info.relative_path] = stored.get(info.relative_path, 0) + info.length
        for name in report.rewritten:
            assert len(after[name][1]) == stored[name] < len(files[name][1])
    same_as_before = files.keys() - {*report.dropped, *report.rewritten}
    assert {name: after.get(name) for name in same_as_before} == {name: files[name] for name in same_as_before}
    assert after.keys() == same_as_before | set(report.rewritten)
    assert main(["verify", str(path)]) == 0
    assert names(tmp_path) == {"ckpt"}


@table("version", VERSIONS)
def test_removing_everything_leaves_the_common_state(tmp_path: Path, version: str) -> None:
    """The common state stays, also where it is stored as an object among the tensors; so does the file that has it."""
    path = golden(version, tmp_path)
    common = dc.load_common_state_dict(path)
    for prefix in ("decoder", "grid", "optimizer", "rng", "common"):
        dc.remove_sharded_tensors(path, prefix)
    assert content(path) == Content({}, set(), common)
    kept = {"__0_0.distcp"} if version == "0.20.0" else set()
    assert {file.name for file in path.glob("*.distcp")} == kept


def test_flattened_shards_keep_their_true_shape(tmp_path: Path) -> None:
    """The shape that Megatron keeps beside the tensors goes on with them, and leaves with them."""
    path = golden("0.12.3", tmp_path)
    dc.remove_sharded_tensors(path, "grid")
    assert dc.load_tensors_metadata(path)[FLATTENED].global_shape == (8, 6)
    stored = dcp.FileSystemReader(path).read_metadata()
    assert stored.mcore_data[FLATTENED] == {"nd_reformulated_orig_global_shape": (8, 6)}
    assert "grid" not in stored.mcore_data
    assert stored.storage_meta.save_id == "54ab295a-c7ad-47fe-8064-3fe43d7ee2c2"
    assert not hasattr(stored, "all_local_plans")


def _remove(path: str) -> dict[str, Any]:
    """Remove on all ranks, load what is left under this rank's sharding."""
    rank, world = dist.get_rank(), dist.get_world_size()
    report = dc.remove_sharded_tensors(path, "optim")
    assert {"optim.m", "optim.v"} < set(report.keys)  # on every rank, though the main one works
    wanted = {key: value for key, value in state(rank, world).items() if key in ("w", "rng")}
    wanted["w"].data.fill_(-1)
    loaded = dc.load({**wanted, "rng": wanted["rng"].without_data()}, path, strict="raise_all")
    return {**loaded, "w": loaded["w"].tolist()}


@backends.both_in_proof
@pytest.mark.parametrize("world", [2, *in_proof(1, 4)])
def test_our_own_at_any_world_size(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """All ranks call; every digest in the renewed record holds, and nothing is missing or unexpected in a load."""
    ranks.run(world, save, str(tmp_path / "c"))
    rows = torch.arange(24.0).view(8, 3)
    expected = [
        {"w": rows.chunk(world)[rank].tolist(), "rng": [rank, 2.5], "optim.lr": 0.25, "iteration": 7}
        for rank in range(world)
    ]
    assert ranks.run(world, _remove, str(tmp_path / "c")) == expected
    results = verify_checkpoint(tmp_path / "c")
    assert all(not result.fault and not result.foreign for result in results)
    load_by_others(tmp_path / "c", {"model.w": rows})


@backends.both_in_proof
def test_without_a_process_group(tmp_path: Path) -> None:
    """One process alone removes too, again and again; the record keeps who saved it, who wrote what and when."""
    save(str(tmp_path / "c"))
    before = Record.parse((tmp_path / "c" / RECORD_NAME).read_bytes())
    for prefix, left in (("optim.m", {"model.w", "optim.v"}), ("optim", {"model.w"})):
        dc.remove_sharded_tensors(tmp_path / "c", prefix)
        assert dc.load_tensors_metadata(tmp_path / "c").keys() == left
    after = Record.parse((tmp_path / "c" / RECORD_NAME).read_bytes())
    assert after.model_copy(update={"files": before.files, "self_digest": before.self_digest}) == before
    assert [(file.name, file.rank) for file in after.files] == [(file.name, file.rank) for file in before.files]
    assert {file.name: file.keys for file in after.files}[backends.data_file(0)] == 2  # model.w and rng


def test_hinted_files_go_as_a_whole(ranks: Ranks, tmp_path: Path) -> None:
    """What was saved with a separation hint frees its bytes: the files of its own are gone, record and all."""
    path = tmp_path / "c"
    ranks.run(2, save_hinted, str(path))
    hinted = {file.name for file in path.glob("optim__*.distcp")}
    kept = {name: file for name, file in files_of(path).items() if name not in {*hinted, *INDEXES, RECORD_NAME}}
    assert len(hinted) == 2
    dc.remove_sharded_tensors(path, "optim")
    after = files_of(path)
    assert after.keys() == {*kept, *INDEXES, RECORD_NAME}
    assert {name: after[name] for name in kept} == kept
    assert all(not result.fault and not result.foreign for result in verify_checkpoint(path))
    assert content(path).tensors.keys() == {"model.w"}


def save_hinted(path: str) -> None:
    """Save with a hint."""
    save(path, hint=True)


def test_plain_dcp_directory(tmp_path: Path) -> None:
    """A directory without ``metadata.json`` stays one: its tensors go, the values that are its common state stay."""
    path = tmp_path / "plain"
    kept = torch.arange(5)
    state_dict = {"model": {"w": kept}, "optim": {"m": torch.ones(3), "lr": 0.5, "steps": [1, 2]}}
    dcp.save(state_dict, checkpoint_id=path, no_dist=True)
    dc.remove_sharded_tensors(path, "optim.")
    found = content(path)
    assert found == Content({"model.w": kept}, set(), {"optim": {"lr": 0.5, "steps": [1, 2]}})
    wanted = {"model": {"w": torch.zeros_like(kept)}, "optim": {"lr": 0.0, "steps": [0, 0]}}
    dcp.load(wanted, checkpoint_id=path, no_dist=True)
    assert same(wanted["model"]["w"], kept)
    assert wanted["optim"] == {"lr": 0.5, "steps": [1, 2]}
    assert not (path / "metadata.json").exists()


@table("prefix", ["nothing", "common_state", "iteration", "ptim"])
def test_no_match_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, prefix: str) -> None:
    """A prefix of no key, or of common state, is a warning that names it, an empty one an error; no file is linked."""
    path = golden("0.20.0", tmp_path)
    before, listed = files_of(path), path.stat()
    with caplog.at_level(logging.WARNING):
        dc.remove_sharded_tensors(path, prefix)
    assert f"begins with {prefix!r}: nothing is removed" in caplog.text
    for wrong in (["model."], path / "model."):  # the checkpoint was called damaged
        with pytest.raises(CheckpointingException, match=r"^remove_sharded_tensors: key_prefix=.*: expected one text"):
            dc.remove_sharded_tensors(path, wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match=r"^the prefix is '': give the text"):
        dc.remove_sharded_tensors(path, "")
    with pytest.raises(CheckpointingException, match="None in the place of a checkpoint's path"):
        dc.remove_sharded_tensors(None, "model.")  # type: ignore[arg-type]
    assert files_of(path) == before
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (listed.st_ino, listed.st_mtime_ns)
    assert names(tmp_path) == {"ckpt"}


def _error_of_removal(path: str, *prefixes: str) -> tuple[str, str]:
    try:
        dc.remove_sharded_tensors(path, prefixes[dist.get_rank() % len(prefixes)])
    except CheckpointingException as exc:
        return type(exc).__name__, str(exc)
    return "", ""


@backends.both_in_proof
def test_errors_are_the_same_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """No checkpoint there, or prefixes that differ: every rank raises the same, and no rank is left behind."""
    path = golden("0.16.1", tmp_path)
    before = files_of(path)
    (first, second) = ranks.run(2, _error_of_removal, str(tmp_path / "none"), "a")
    assert first == second
    assert first[0] == NotACheckpointError.__name__
    (first, second) = ranks.run(2, _error_of_removal, str(path), "grid", "rng")
    assert first == second
    assert "ranks disagree on key_prefix: 'grid' on rank 0, 'rng' on rank 1" in first[1]
    assert files_of(path) == before


class CannotRemove(LoadStrategy):
    """A reader of a format of its own."""

    backend, version = "fixed", 1

    def load(self, wanted: Any, context: LoadContext) -> list[Any]:
        """Nothing."""
        return []

    def load_common(self, context: LoadContext) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_index(self, context: LoadContext) -> list[Any]:
        """Nothing."""
        return []


def test_a_strategy_without_the_ability(tmp_path: Path) -> None:
    """Removal is an optional ability; a checkpoint whose reader has it not is refused by the reader's name."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "metadata.json").write_text('{"sharded_backend": "fixed", "sharded_backend_version": 1}')
    assert isinstance(TorchDistLoadShardedStrategy(), RemovesKeys)
    assert not isinstance(CannotRemove(), RemovesKeys)
    with get_plugin_manager().registry.preserved():
        dc.register_default_strategy(dc.StrategyAction.LOAD_SHARDED, "fixed", 1, CannotRemove)
        with pytest.raises(CheckpointingException, match="'fixed' checkpoint, and its CannotRemove cannot remove keys"):
            dc.remove_sharded_tensors(tmp_path / "c", "w")


def _add_integrity(path: Path) -> None:
    """``integrity.json`` as Megatron makes it: every regular file that is there, in this order of fields."""
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (path / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": hashes}))


@backends.both_in_proof
@table("ours", [False, True])
def test_integrity_json_is_renewed(tmp_path: Path, backend: Backend, ours: bool) -> None:
    """It has the hashes of what is there now, and no entry of a file that was dropped."""
    path = tmp_path / "ckpt"
    if ours:
        save(str(path))
    else:
        golden("0.12.3", tmp_path)
    _add_integrity(path)
    before = json.loads((path / "integrity.json").read_text())["files"]
    report = dc.remove_sharded_tensors(path, "optim" if ours else "grid")
    after = json.loads((path / "integrity.json").read_text())
    (path / "integrity.json").unlink()
    _add_integrity(path)
    assert after == json.loads((path / "integrity.json").read_text())
    assert report.rewritten
    renewed = {backend.index, *backend.for_others, RECORD_NAME} if ours else {".metadata"}
    assert {name for name in after["files"] if after["files"][name] != before[name]} == renewed | set(report.rewritten)


@backends.both_in_proof
def test_damage_is_not_given_a_sound_digest(tmp_path: Path) -> None:
    """Where a digest of the index is known and is not its own, nothing is made from it."""
    foreign = golden("0.12.3", tmp_path)
    _add_integrity(foreign)
    save(str(tmp_path / "ours"))
    for path, index, key in ((foreign, ".metadata", b"grid"), (tmp_path / "ours", backends.current().index, b"model.")):
        damaged = bytearray((path / index).read_bytes())
        damaged[damaged.index(key)] ^= 1  # it can still be read
        (path / index).write_bytes(damaged)
        before = files_of(path)
        with pytest.raises(CorruptCheckpointError, match=re.escape(index)):
            dc.remove_sharded_tensors(path, "optim")
        assert files_of(path) == before
    assert names(tmp_path) == {"ckpt", "ours"}


@backends.both_in_proof
@table("call", ["fsync", "rename", "pwritev"])
def test_a_failing_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An error of the system names what failed, the checkpoint is as it was, and nothing lies beside it."""
    path = golden("0.12.3", tmp_path)
    before = files_of(path)

    def failing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(StorageError, match=r"\(ENOSPC\)"):
            dc.remove_sharded_tensors(path, "grid")
    assert files_of(path) == before
    assert names(tmp_path) == {"ckpt"}


@backends.both_in_proof
def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are copied where they cannot be linked."""
    path = golden("0.12.3", tmp_path)
    before = content(path)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    dc.remove_sharded_tensors(path, "grid")
    assert content(path) == before.without("grid")
    assert (path / "logs" / "run.log").read_text() == "kept"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``shardckpt remove`` says which keys are gone and what is free, and fails where none begins with the prefix."""
    path = golden("0.12.3", tmp_path)
    assert main(["remove", str(path), "optimizer"]) == 0
    out = capsys.readouterr().out
    assert "2 of 14 keys removed: optimizer.state" in out
    assert "rewritten files: __0_1.distcp, __1_1.distcp, __2_0.distcp, __3_0.distcp" in out
    assert main(["remove", str(path), "optimizer"]) == 2
    assert "0 of 12 keys removed: no tensor or object has a key that begins with 'optimizer'" in capsys.readouterr().err


def du(directory: Path) -> int:
    """Bytes on disk, as ``du`` counts them."""
    return 512 * sum(path.stat().st_blocks for path in (directory, *directory.rglob("*")))


def _save_large(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Save 8 MiB to keep and 16 MiB to remove, in one file, with small tensors between; those that are kept.

    A kept one has several segments of digests.
    """
    sizes = {f"model.{n}": 1 << 18 for n in range(3)} | {f"optim.{n}": 1 << 18 for n in range(16)}
    sizes |= {"model.3": 1_250_001}
    sizes |= {f"{name}.small{n}": 100 + n for n in range(50) for name in ("model", "optim")}
    random = torch.Generator().manual_seed(1)
    tensors = {key: torch.rand(size, generator=random) for key, size in sizes.items()}
    dc.save({key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}, path, **options)
    return {key: tensor for key, tensor in tensors.items() if key.startswith("model")}


@backends.both_in_proof
@table("hashed", [False, True])
def test_bytes_on_disk_are_freed(tmp_path: Path, hashed: bool) -> None:
    """Of 24 MiB in one file 16 are removed: the directory takes 8, says so, and is whole for us and for others."""
    path = tmp_path / "c"
    kept = _save_large(path, verify_integrity=hashed)
    before = du(path)
    assert before > 23 << 20
    report = dc.remove_sharded_tensors(path, "optim")
    assert (report.bytes_before, report.bytes_after) == (before, du(path))
    assert report.bytes_after < 8 << 20
    assert len(report.keys) == 66
    assert (report.dropped, report.rewritten) == ((), (backends.data_file(0),))
    assert main(["verify", str(path)]) == 0
    found = dc.load_plain_tensors(path)
    assert found.keys() == kept.keys()
    assert all(same(found[key], kept[key]) for key in kept)
    load_by_others(path, kept)
    with dc.open_checkpoint(path) as checkpoint:
        assert same(checkpoint["model.2"][1000:70_000], kept["model.2"][1000:70_000])


@backends.both_in_proof
def test_small_items_keep_digests_of_their_own(tmp_path: Path) -> None:
    """A tensor in a file that was written anew is checked by itself: damage beside it does not touch it."""
    path = tmp_path / "c"
    kept = _save_large(path)
    before = {file.name: file for file in Record.parse((path / RECORD_NAME).read_bytes()).files}[backends.data_file(0)]
    dc.remove_sharded_tensors(path, "optim.small")
    dc.remove_sharded_tensors(path, "optim.1")
    record = Record.parse((path / RECORD_NAME).read_bytes())
    after = {file.name: file for file in record.files}[backends.data_file(0)]
    assert after.keys == before.keys - 57
    data = bytearray((path / after.name).read_bytes())
    place = data.index(kept["model.small7"].numpy().tobytes())
    data[place] ^= 1
    (path / after.name).write_bytes(data)
    with dc.open_checkpoint(path) as checkpoint:
        assert same(checkpoint["model.small6"].read(), kept["model.small6"])
        assert same(checkpoint["model.small8"].read(), kept["model.small8"])
        with pytest.raises(CorruptCheckpointError, match=r"model\.small7: bytes .* \(digest differs\)"):
            checkpoint["model.small7"].read()


def test_objects_for_other_libraries_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of N keys no more than N are removed: values for readers of other libraries alone are no keys of ours."""
    tensors = {key: ShardedTensor.from_rank_offsets(key, torch.ones(3)) for key in ("model.w", "optim.w")}
    plain = PlainObject("optim.options", 0.5, keys=tuple(f"optim.groups.{n}.lr" for n in range(9)))
    dc.save({**tensors, "plain": plain}, tmp_path / "c", "torch_dist")
    for options in (["--dry-run"], []):
        assert main(["remove", str(tmp_path / "c"), "optim.", *options]) == 0
        said = f"1 of 2 keys {'would be ' * bool(options)}removed, and 9 objects for readers of other libraries alone: "
        assert capsys.readouterr().out.splitlines()[0].endswith(f"{said}optim.w")


@backends.both_in_proof
def test_a_dry_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what would go, and be free to some blocks; not a file or time of the directory changes."""
    path = tmp_path / "c"
    _save_large(path)
    before, listed = files_of(path), path.stat()
    planned = dc.remove_sharded_tensors(path, "optim", dry_run=True)
    assert main(["remove", str(path), "optim", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "66 of 120 keys would be removed" in out
    assert f"rewritten files: {backends.data_file(0)}" in out
    assert f"about {planned.bytes_after:,} after: {planned.bytes_before - planned.bytes_after:,} would be free" in out
    assert main(["remove", str(path), "nothing", "--dry-run"]) == 2
    assert files_of(path) == before
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (listed.st_ino, listed.st_mtime_ns)
    assert names(tmp_path) == {"c"}
    done = dc.remove_sharded_tensors(path, "optim")
    assert (planned.keys, planned.dropped, planned.rewritten) == (done.keys, done.dropped, done.rewritten)
    assert planned.bytes_before == done.bytes_before
    assert abs(planned.bytes_after - done.bytes_after) < 64 << 10


@backends.both
@table("key", ["model.1", "model.3", "model.small9", "optim.3", "optim.small3"])
def test_damage_in_a_file_that_is_written_anew(tmp_path: Path, key: str) -> None:
    """What is removed may be damaged; what is kept may not: the error names its key, and nothing has changed."""
    path = tmp_path / "c"
    _save_large(path)
    kept = {name for name in dc.load_tensors_metadata(path) if name.startswith("model")}
    data = bytearray((path / backends.data_file(0)).read_bytes())
    stored = dc.load_plain_tensors(path)[key].numpy().tobytes()
    data[data.index(stored) + len(stored) // 2] ^= 1
    (path / backends.data_file(0)).write_bytes(data)
    before = files_of(path)
    if key in kept:
        with pytest.raises(CorruptCheckpointError, match=rf"{re.escape(key)}: .*digest differs"):
            dc.remove_sharded_tensors(path, "optim")
        assert files_of(path) == before
    else:
        dc.remove_sharded_tensors(path, "optim")
        assert main(["verify", str(path)]) == 0
        assert dc.load_plain_tensors(path).keys() == kept
    assert names(tmp_path) == {"c"}
