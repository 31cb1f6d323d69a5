from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import PluginError, UnknownBackendError, VersionTooOldError
from shardckpt.maintenance import migrate_checkpoint
from shardckpt.manifest import MARKER_NAME, RECORD_NAME, Record
from shardckpt.mapping import ShardedTensor
from tests.maintenance.migrate import LoadText, ToTwo, content, loaded, old, state

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt import CheckpointWriter

__all__ = ["old"]  # fixtures


def test_fingerprints_come_along(old: Path) -> None:
    """The values stay, and so do their stored fingerprints: a migrated checkpoint is compared without reading it."""
    migrate_checkpoint(old, old.with_name("new"))
    with dc.open_checkpoint(old.with_name("new")) as checkpoint:
        assert (checkpoint.version, checkpoint.fingerprints) == (2, checkpoint.compute_fingerprints())
        assert list(checkpoint.fingerprints) == ["w"]


def test_a_migration_that_changes_values_is_not_committed(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values other than those of the stored fingerprints are refused by name: diff would take them for the old ones."""

    def migrate(_self: ToTwo, _reader: object, writer: CheckpointWriter) -> None:
        writer.write("w.txt", json.dumps([[1.0, 2.0, 1.0], 2, {}]).encode())

    monkeypatch.setattr(ToTwo, "migrate", migrate)
    with pytest.raises(PluginError, match=r"does not keep .*: w: other values than its stored fingerprint says"):
        migrate_checkpoint(old, old.with_name("new"))
    assert not old.with_name("new").exists()


def test_a_migration_may_rename_what_no_installed_strategy_lists(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reader of the old version a stored fingerprint whose key is gone may be that of another key."""
    named = [ShardedTensor.from_global_shape("model.w", torch.float32, (3,))]
    monkeypatch.setattr(LoadText, "load_index", lambda _self, _context: named)
    assert migrate_checkpoint(old, old.with_name("new")) == ("migrated-text", 1, 2)


def test_a_migration_that_loses_what_only_a_fingerprint_names_is_not_committed(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing lists the old version: a stored fingerprint that no tensor of the new one has is a loss, by its name."""

    def migrate(_self: ToTwo, _reader: object, writer: CheckpointWriter) -> None:
        writer.write("w.txt", json.dumps([[2.0, 2.0, 2.0], 2, {}]).encode())

    named = [ShardedTensor.from_global_shape("model.other", torch.float32, (3,))]
    monkeypatch.setattr(LoadText, "load_index", lambda _self, _context: named)
    monkeypatch.setattr(ToTwo, "migrate", migrate)
    with pytest.raises(PluginError, match=r"does not keep .*: w: no tensor has its values"):
        migrate_checkpoint(old, old.with_name("new"))
    assert not old.with_name("new").exists()


@pytest.mark.parametrize("name", ["old", "new"])
def test_overwrite_replaces_in_one_step(old: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`migrate --overwrite` replaces what is at NEW, also where that is OLD; without it, nothing is replaced."""
    target = old.with_name(name)
    if name == "new":
        dc.save(state(7.0), target)
    before = content(target)
    assert main(["migrate", str(old), str(target)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert content(target) == before
    assert main(["migrate", "--overwrite", str(old), str(target)]) == 0
    assert loaded(target) == (3.0, 1)
    assert (target / "notes.md").exists() is (name == "old")  # a file of someone else stays
    assert sorted(path.name for path in old.parent.iterdir()) == sorted({"old", name})


@pytest.mark.parametrize("name", ["old", "new"])
def test_a_failure_leaves_what_was_there(old: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that fails half-way has changed neither checkpoint, and names its class."""
    target = old.with_name(name)
    if name == "new":
        dc.save(state(7.0), target)
    before = content(old), content(target)
    monkeypatch.setenv("MIGRATION", "fail")
    with pytest.raises(Exception, match=rf"in {ToTwo.__module__}\.ToTwo of this process, .*: KeyError: 'half-way'"):
        migrate_checkpoint(old, target, overwrite=True)
    assert (content(old), content(target)) == before
    assert sorted(path.name for path in old.parent.iterdir()) == sorted({"old", name})


def test_a_migration_that_does_not_fit_is_refused_before_it_writes(
    old: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says what it takes, what is free, and, beside runs, the call that looks into each."""
    for run in ("a", "b"):
        dc.save(state(7.0), old.parent / "runs" / run / "step-1")
    new = old.parent / "runs" / "new"
    free = SimpleNamespace(f_blocks=9, f_frsize=1, f_bfree=8, f_bavail=8)
    monkeypatch.setattr("shardckpt.engine.space.os.statvfs", lambda _: free)
    monkeypatch.setattr(ToTwo, "migrate", lambda *_: pytest.fail("it has begun to write"))
    assert main(["migrate", str(old), str(new)]) == 2
    said = capsys.readouterr().err
    assert f"cannot migrate to {new}: `shardckpt prune" in said, "what nothing installed reads, by its files"
    monkeypatch.setattr(LoadText, "same_files", (("migrated-text", 1),), raising=False)
    assert main(["migrate", str(old), str(new)]) == 2
    said = capsys.readouterr().err
    assert f"The tensors take 12 B, and the file system of {new.parent} has 8 B free" in said
    assert f"`shardckpt prune -r {new.parent} --keep-latest N --dry-run`" in said
    assert not new.exists()


def test_a_migration_that_loses_a_tensor_is_not_committed(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the old version can still be read, a migration that drops what it lists is refused, by name."""
    before = content(old)
    monkeypatch.setattr(LoadText, "same_files", (("migrated-text", 1),), raising=False)
    monkeypatch.setattr(ToTwo, "migrate", lambda _self, _reader, writer: writer.write("w.txt", b"[[], 2, {}]"))
    with pytest.raises(PluginError, match=r"ToTwo .* nothing was committed: w: torch\.float32 \(3,\), now .*\(0,\)"):
        migrate_checkpoint(old, old, overwrite=True)
    assert content(old) == before


def test_a_migration_to_what_nothing_reads_is_not_committed(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version without an installed reader replaces no checkpoint."""
    before = content(old)
    monkeypatch.setattr(LoadText, "cannot_load", lambda _self, _manifest: "reads nothing")
    with pytest.raises(PluginError, match="no installed plugin reads; nothing was committed"):
        migrate_checkpoint(old, old, overwrite=True)
    assert content(old) == before


def test_what_has_no_migration_says_which_there_are(old: Path, tmp_path: Path) -> None:
    """From the newest version there is none: the error names those of the backend, and nothing is written."""
    assert main(["migrate", str(old), str(tmp_path / "new")]) == 0
    with pytest.raises(
        VersionTooOldError, match=r"of version 2; .* from version 2 to 9 \(installed .*'migrated-text': 1 to 2\)"
    ):
        migrate_checkpoint(tmp_path / "new", tmp_path / "newer", to=9)
    assert not (tmp_path / "newer").exists()


def test_a_backend_that_is_not_installed(old: Path) -> None:
    """Without any plugin of the backend, the error says what to install, as that of a load does."""
    for file, name in ((MARKER_NAME, "sharded_backend"), (RECORD_NAME, "backend")):
        fields = json.loads((old / file).read_bytes())
        (old / file).write_text(json.dumps({**fields, name: "nobodys"}))
    record = Record.model_validate_json((old / RECORD_NAME).read_bytes())
    (old / RECORD_NAME).write_bytes(record.model_copy(update={"reader": "shardckpt-nobody 1.0"}).dump())
    with pytest.raises(UnknownBackendError, match=r"provides it: shardckpt-nobody 1\.0 or newer"):
        migrate_checkpoint(old, old.with_name("new"))
    assert not old.with_name("new").exists()
