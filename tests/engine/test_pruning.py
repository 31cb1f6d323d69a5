"""What killed saves leave: gone with the next save or by ``shardckpt prune``, but never what lives or the only copy."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.cli import main
from shardckpt.commit.owner import Owner
from shardckpt.commit.staging_names import REMOVED, REPLACED, STAGING, new_save_id, stem, temporary_name
from shardckpt.engine.pruning import prune_leftovers, prune_spools
from shardckpt.errors import CheckpointingException, IncompleteCheckpointError, StorageError
from shardckpt.huggingface import dcp_to_torch_save, export_to_huggingface
from shardckpt.maintenance.migrate import migrate_checkpoint
from shardckpt.manifest import MARKER_NAME
from tests import backends
from tests.commit import owners
from tests.engine.pruning import NEW, OLD, list_names, save_version
from tests.faults import samples
from tests.faults.overwrite import Interruption, add_foreign, die_between_renames
from tests.states import error_of
from tests.tables import table

if TYPE_CHECKING:
    from tests.ranks import Ranks

#: Names of 201 and 255 bytes, of characters with one byte and with several.
LONG = ("x" * 201, "x" * 255, "é" * 127, "字" * 85)
_IDS = [f"{len(os.fsencode(name))} {name[0]!a}" for name in LONG]


def _set_aside(target: Path, owner: Owner) -> Path:
    """What an overwrite that died in its swap has moved aside: a copy of the checkpoint at the target."""
    aside = target.with_name(temporary_name(target.name, REPLACED, new_save_id(), owner))
    shutil.copytree(target, aside)
    return aside


@table("before", [False, True])
def test_the_next_save_leaves_nothing_but_the_checkpoint(tmp_path: Path, before: bool) -> None:
    """What dead processes of this host have left of the target goes; with the parent, nothing else is touched."""
    target, dead = tmp_path / "ckpt", owners.dead()
    if before:
        save_version(target, OLD)
        _set_aside(target, dead)
    owners.leave(target, dead)
    owners.leave(target, dead, REMOVED)
    owners.leave(target, dead, discarded=True)
    owners.leave(target, None, discarded=True)
    others = [owners.leave(tmp_path / "other", dead), owners.leave(tmp_path / "ckpt2", dead)]
    save_version(target)
    assert list_names(tmp_path) == sorted(["ckpt", *(path.name for path in others)])
    assert samples.differences(samples.load(target), NEW) == []


@table("exchanges", [True, False])
@table("error", [KeyboardInterrupt, StorageError])
@table("after", [False, True])
def test_the_save_after_one_that_failed_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, error: type[BaseException], after: bool
) -> None:
    """Whatever call of an overwrite fails, the next one in the same process leaves the checkpoint and others' files."""
    left = 0
    for number in range(1, 20):
        target = tmp_path / str(number) / "ckpt"
        save_version(target, OLD)
        foreign = add_foreign(target)
        stop = Interruption(error("stop"), number, after)
        with stop.in_overwrites(monkeypatch, target, exchanges=exchanges), suppress(error, CheckpointingException):
            save_version(target)
        if len(stop.calls) < number:
            break
        left += len(list_names(target.parent)) > 1
        save_version(target)
        assert list_names(target.parent) == ["ckpt"]
        assert samples.differences(samples.load(target), NEW) == []
        assert {name: samples.listing(target)[name] for name in foreign} == foreign
    assert left


def _dying_overwrite(target: Path) -> Path:
    """Let a process die between the two renames of an overwrite, where there is no exchange; what it moved aside."""
    die_between_renames(target, save_version)
    for path in target.parent.iterdir():  # the owner's name is that of this process, which lives
        path.rename(path.with_name(path.name.replace(Owner.current().text, owners.dead().text)))
    (aside,) = target.parent.glob("*shardckpt-replaced*")
    return aside


@pytest.mark.usefixtures("no_pauses")
def test_the_only_copy_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies between the renames of an overwrite: prune keeps the old checkpoint, the next one restores it."""
    target = tmp_path / "ckpt"
    save_version(target, OLD)
    foreign = add_foreign(target)
    aside = _dying_overwrite(target)
    assert not target.exists()
    results = {result.path: result for result in prune_leftovers(tmp_path, 0)}
    assert "rename it to ckpt" in results[aside].kept
    assert list_names(tmp_path) == [aside.name]  # the new one, which was not committed, is gone
    with pytest.raises(IncompleteCheckpointError, match=f"a complete checkpoint is at {aside}"):
        samples.load(target)

    def fail(*_: Any) -> None:
        raise StorageError("full")

    with monkeypatch.context() as patched:
        patched.setattr("shardckpt.engine.pruning.create_staging", fail)
        with pytest.raises(StorageError, match="full"):
            save_version(target)
    assert samples.differences(samples.load(target), OLD) == []
    save_version(target)
    assert list_names(tmp_path) == ["ckpt"]
    assert samples.differences(samples.load(target), NEW) == []
    assert {name: samples.listing(target)[name] for name in foreign} == foreign


@table("name, is_said", [("data.distcp", True), (MARKER_NAME, False)])
def test_an_overwrite_says_which_files_of_an_unreadable_checkpoint_stay(
    tmp_path: Path, name: str, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing tells them from the user's own; where the new checkpoint has a file of each name, none stays."""
    caplog.clear()  # of the row before
    target = tmp_path / "ckpt"
    save_version(target, OLD)
    for each in (MARKER_NAME, name):
        (target / each).write_text("{")
    save_version(target)
    assert samples.differences(samples.load(target), NEW) == []
    said = [each.getMessage() for each in caplog.records if "readable" in each.getMessage()]
    assert len(said) == is_said
    for line in said:
        assert re.match(f"{target} is no readable checkpoint \\(.*: those that the new one does .* stay: {name}$", line)
    assert (target / "data.distcp").exists() == is_said


@pytest.mark.usefixtures("no_pauses")
def test_a_save_that_may_not_overwrite_restores_nothing(tmp_path: Path) -> None:
    """It goes to the free path, as before; what lies aside goes when it has no file that the new checkpoint lacks."""
    target = tmp_path / "ckpt"
    save_version(target, OLD)
    (target / "notes.txt").write_text("mine")
    aside = _dying_overwrite(target)
    save_version(target, overwrite=False)
    assert samples.differences(samples.load(target), NEW) == []
    for _ in range(2):
        assert list_names(tmp_path) == [aside.name, "ckpt"]
        assert samples.differences(samples.load(aside.rename(tmp_path / "old")), OLD) == []
        (tmp_path / "old").rename(aside)
        save_version(target)
    (target / "notes.txt").write_text("mine again")
    save_version(target)
    assert list_names(tmp_path) == ["ckpt"]


@backends.both_in_proof
@table("how", ["cut", "missing", "not ours"])
def test_beside_a_damaged_checkpoint_the_older_one_stays(tmp_path: Path, how: str) -> None:
    """What was moved aside is kept as long as the one at the target is not whole, or cannot be judged."""
    target = tmp_path / "ckpt"
    save_version(target, OLD)
    aside = _set_aside(target, owners.dead())
    data = target / backends.data_file(0)
    if how == "cut":
        os.truncate(data, data.stat().st_size - 1)
    elif how == "missing":
        data.unlink()
    else:
        (target / "shardckpt.json").unlink()
    assert [bool(result.kept) for result in prune_leftovers(target, 0)] == [True]
    assert samples.differences(samples.load(aside.rename(tmp_path / "old")), OLD) == []


def _save_part(directory: str, version: int) -> None:
    dc.save(samples.state_dict(version, dist.get_rank(), dist.get_world_size()), directory, overwrite=True)


@backends.both_in_proof
def test_several_ranks_save_beside_what_is_left(ranks: Ranks, tmp_path: Path) -> None:
    """The main rank clears up for all, and every rank writes into the one directory that bears its process."""
    for _ in range(2):
        owners.leave(tmp_path / "ckpt", owners.dead())
    ranks.run(3, _save_part, str(tmp_path / "ckpt"), NEW)
    assert list_names(tmp_path) == ["ckpt"]
    assert samples.listing(tmp_path / "ckpt").keys() >= {backends.data_file(rank) for rank in range(3)}


def test_what_cannot_be_looked_at_or_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save goes on beside what it cannot clear away; the log has the reason."""
    target = tmp_path / "ckpt"
    left = owners.leave(target, owners.dead())
    rename = os.rename

    def refuse(source: Any, destination: Any) -> None:
        if Path(source) == left:
            raise OSError(5, "Input/output error")
        rename(source, destination)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        save_version(target, OLD)
    assert f"cannot remove {left}: Input/output error (EIO)" in caplog.text

    def fail(*_: Any) -> None:
        raise StorageError("the server does not answer")

    with monkeypatch.context() as patched:
        patched.setattr("shardckpt.engine.pruning.find_leftovers", fail)
        save_version(target)
    assert "the server does not answer" in caplog.text
    owners.leave(target, owners.elsewhere())
    monkeypatch.setenv(settings.LEFTOVER_HOURS, "soon")
    save_version(target)
    assert "SHARDCKPT_LEFTOVER_HOURS='soon': expected a whole number" in caplog.text
    assert samples.differences(samples.load(target), NEW) == []


def test_a_save_lists_its_parent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders may hold ten thousand names: looking for leftovers costs one listing, whether it overwrites or not."""
    listed: list[Path] = []

    def counted(call: Any) -> Any:
        def listing(path: Any = ".") -> Any:
            listed.append(Path() if isinstance(path, int) else Path(os.fsdecode(path)))
            return call(path)

        return listing

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for _ in range(2):
        listed.clear()
        save_version(tmp_path / "ckpt")
        assert listed.count(tmp_path) == 1


@pytest.mark.parametrize("name", LONG, ids=_IDS)
def test_names_of_up_to_255_bytes_work(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Save, overwrite, remove keys, migrate's and exports' targets: nothing is left, and kills are cleared up after."""
    target = tmp_path / name
    save_version(target, OLD)
    left = owners.leave(target, owners.dead())
    assert left.name.startswith(f".{name[:40]}")
    save_version(target)
    assert samples.differences(samples.load(target), NEW) == []
    state = {"a.w": dc.ShardedTensor.from_rank_offsets("a.w", torch.ones(9)), **samples.state_dict(NEW)}
    dc.save(state, target, overwrite=True, verify_integrity=True)
    owners.leave(target, owners.dead())
    dc.remove_sharded_tensors(target, "a.")
    assert list_names(tmp_path) == [name]
    ranks.run(2, _save_part, str(target), NEW)
    assert list_names(tmp_path) == [name]
    request = dc.save(samples.state_dict(NEW), target, async_sharded_save=True, overwrite=True)
    assert request is not None
    request.execute_sync()
    assert list_names(tmp_path) == [name]


@table("name", LONG, ids=_IDS)
def test_exports_to_names_of_up_to_255_bytes(tmp_path: Path, name: str) -> None:
    """A folder for Hugging Face and a file of torch.save: each replaces what was there, and what was killed there."""
    dc.save({"w": dc.ShardedTensor.from_rank_offsets("w", torch.ones(9))}, tmp_path / "ckpt")
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    for _ in range(2):
        owners.leave(tmp_path / "a" / name, owners.dead())
        export_to_huggingface(tmp_path / "ckpt", tmp_path / "a" / name, overwrite=True)
        left = tmp_path / "b" / temporary_name(name, STAGING, new_save_id(), owners.dead())
        left.write_bytes(b"so far")
        dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "b" / name)
    assert list_names(tmp_path / "a") == list_names(tmp_path / "b") == [name]


def test_what_an_export_moved_aside(tmp_path: Path) -> None:
    """The next export removes it if the folder is whole and has its other files; prune cannot tell, and keeps it."""
    dc.save({"w": dc.ShardedTensor.from_rank_offsets("w", torch.ones(9))}, tmp_path / "ckpt")
    folder = tmp_path / "hf"
    export_to_huggingface(tmp_path / "ckpt", folder)
    aside = _set_aside(folder, owners.dead())
    (aside / "model-00001-of-00002.safetensors").touch()
    assert prune_leftovers(folder)[0].kept
    (aside / "notes").touch()
    export_to_huggingface(tmp_path / "ckpt", folder, overwrite=True)
    assert aside.exists()
    (aside / "notes").unlink()
    export_to_huggingface(tmp_path / "ckpt", folder, overwrite=True)
    assert list_names(tmp_path) == ["ckpt", "hf"]
    folder.rename(aside)
    export_to_huggingface(tmp_path / "ckpt", folder, overwrite=True)
    assert list_names(tmp_path) == ["ckpt", "hf"]


@pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "x" * 256 + "/ckpt"])
def test_longer_names_are_refused_before_anything_is_written(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """The same error on every rank says which name is too long; not even a directory is made."""
    ((kind, text), *others) = ranks.run(2, error_of, _save_part, str(tmp_path / "new" / name), NEW)
    assert others == [(kind, text)]
    assert kind == "StorageError"
    assert "has 256 bytes, and file systems allow 255" in text
    for refused in (samples.load, prune_leftovers):
        with pytest.raises(StorageError, match="has 256 bytes"):
            refused(tmp_path / name)
    with pytest.raises(StorageError, match="has 256 bytes"):
        migrate_checkpoint(tmp_path / "ckpt", tmp_path / name)
    with pytest.raises(StorageError, match="has 256 bytes"):
        export_to_huggingface(tmp_path / "ckpt", tmp_path / name)
    assert list_names(tmp_path) == []
    save_version(tmp_path / "ckpt")
    with pytest.raises(StorageError, match="has 256 bytes"):
        dcp_to_torch_save(tmp_path / "ckpt", tmp_path / name)
    assert list_names(tmp_path) == ["ckpt"]


def _read_rows(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}


def test_the_command_prunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each leftover: what it frees, and whether it went, or why not; --dry-run removes nothing."""
    save_version(tmp_path / "ckpt", OLD)
    left, far = owners.leave(tmp_path / "ckpt", owners.dead()), owners.leave(tmp_path / "gone", owners.elsewhere())
    aside = _set_aside(tmp_path / "ckpt", owners.dead())
    before = samples.listing(tmp_path)
    assert main(["prune", str(tmp_path), "--dry-run"]) == 0
    rows = _read_rows(capsys)
    assert rows[left.name[:47] + "..."] == "6 B would be removed"
    assert samples.listing(tmp_path) == before
    assert main(["prune", str(tmp_path)]) == 0
    rows = _read_rows(capsys)
    assert rows[left.name[:47] + "..."] == "6 B removed"
    assert rows[aside.name[:47] + "..."].endswith(" removed")
    assert "kept: of a process of another host" in rows[far.name]
    assert list_names(tmp_path) == sorted(["ckpt", far.name])
    assert main(["prune", str(tmp_path / "gone"), "--older-than", "0"]) == 0
    assert capsys.readouterr().out.endswith(f"6 bytes freed in {tmp_path}/gone\n")
    assert list_names(tmp_path) == ["ckpt"]


def test_the_command_fails_with_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No such place, no place at all, an empty URL, and what cannot be removed: 2, and the reason."""
    assert main(["prune", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert main(["prune", "memory://bucket/run"]) == 2
    assert "memory://bucket/run does not exist, or has no objects" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["prune"])
    left = owners.leave(tmp_path / "ckpt", owners.dead())

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", refuse)
    assert main(["prune", str(tmp_path)]) == 2
    assert f"cannot remove {left}: Input/output error (EIO)" in capsys.readouterr().out


def test_the_command_prunes_spool_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where SHARDCKPT_SPOOL_DIR says, or in the directory that is given; those of living processes stay."""
    for owner in (owners.dead(), Owner.current()):
        (tmp_path / f"shardckpt-spool-{owner.text}-abcd_123").mkdir()
    monkeypatch.setenv(settings.SPOOL_DIR, str(tmp_path))
    assert [bool(result.kept) for result in prune_spools(dry_run=True)].count(False) == 1
    assert main(["prune", "--spool"]) == 0
    assert f"kept: process {os.getpid()} of this host is alive" in capsys.readouterr().out
    assert len(list_names(tmp_path)) == 1
    monkeypatch.delenv(settings.SPOOL_DIR)
    assert main(["prune", "--spool", str(tmp_path)]) == 0
    assert len(list_names(tmp_path)) == 1
    assert main(["prune", "--spool", str(tmp_path / "nowhere")]) == 2


def test_long_names_are_found_by_the_command(tmp_path: Path) -> None:
    """What an overwrite of a checkpoint with a long name has moved aside is judged by that checkpoint."""
    target = tmp_path / ("x" * 255)
    save_version(target, OLD)
    aside = _set_aside(target, owners.dead())
    assert stem(target.name) in aside.name
    assert [result.kept for result in prune_leftovers(tmp_path)] == [""]
    assert list_names(tmp_path) == [target.name]
