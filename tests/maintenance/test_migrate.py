from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import CheckpointReader, CheckpointWriter, LoadStrategy, Migration, SaveStrategy, hookimpl
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import UnknownBackendError, VersionTooOldError
from shardckpt.maintenance import migrate_checkpoint
from shardckpt.manifest import MARKER_NAME, RECORD_NAME, Record
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager
from tests import programs

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt import LoadContext, SaveContext


class SaveText(SaveStrategy):
    """Writes a tensor as text."""

    backend, version = "migrated-text", 1

    def save(self, shards: Any, common: Any, context: SaveContext) -> None:
        """Save."""
        context.writer.write("w.txt", json.dumps([shards[0].data.tolist(), self.version, common]).encode())
        context.writer.record_shards(shards)
        context.writer.known_fingerprints["w"] = "7" * 32


class LoadText(LoadStrategy):
    """Reads version 2."""

    backend, version = "migrated-text", 2

    def _read(self, context: LoadContext) -> Any:
        return json.loads(context.reader.read("w.txt"))

    def load(self, wanted: Any, context: LoadContext) -> Any:
        """Load."""
        return [torch.tensor(self._read(context)[0]) for _ in wanted]

    def load_common(self, context: LoadContext) -> Any:
        """Load."""
        return self._read(context)[2]

    def load_index(self, context: LoadContext) -> Any:
        """List."""
        return [ShardedTensor.from_global_shape("w", torch.float32, (len(self._read(context)[0]),))]


class ToTwo(Migration):
    """Says version 2 in the file; fails, or dies, where an environment variable asks for it."""

    backend, from_version, to_version = "migrated-text", 1, 2

    def migrate(self, reader: CheckpointReader, writer: CheckpointWriter) -> None:
        """Migrate."""
        values, _, common = json.loads(reader.read("w.txt"))
        writer.write("w.txt", json.dumps([values, 2, common]).encode())
        if os.environ.get("MIGRATION") == "fail":
            raise KeyError("half-way")
        if os.environ.get("MIGRATION") == "die":
            os._exit(9)


class Plugin:
    """Brings them."""

    @hookimpl
    def shardckpt_register(self, registry: Any) -> None:
        """Register."""
        for one in (SaveText, LoadText, ToTwo):
            registry.add(one)


def register() -> None:
    """Register the plugin, once in a process."""
    if not get_plugin_manager().registry.migrations(ToTwo.backend):
        get_plugin_manager().register(Plugin(), "migrated-text")


def state(value: float) -> dict[str, Any]:
    """A tensor and common state."""
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value)), "step": int(value)}


def loaded(path: Path) -> tuple[float, int]:
    """What a checkpoint has: the sum, the step."""
    found = dc.load(state(0.0), path)
    return float(found["w"].sum()), found["step"]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint of version 1, with a foreign file beside its own."""
    register()
    dc.save(state(1.0), tmp_path / "old", (SaveText.backend, 1))
    (tmp_path / "old" / "notes.md").write_text("mine")
    return tmp_path / "old"


def content(path: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_fingerprints_come_along(old: Path) -> None:
    """The values stay, and so do their stored fingerprints: a migrated checkpoint is compared without reading it."""
    migrate_checkpoint(old, old.with_name("new"))
    with dc.open_checkpoint(old.with_name("new")) as checkpoint:
        assert (checkpoint.version, checkpoint.fingerprints) == (2, {"w": "7" * 32})


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
    with pytest.raises(Exception, match=rf"in {__name__}\.ToTwo of this process, .*: KeyError: 'half-way'"):
        migrate_checkpoint(old, target, overwrite=True)
    assert (content(old), content(target)) == before
    assert sorted(path.name for path in old.parent.iterdir()) == sorted({"old", name})


@pytest.mark.ci
def test_a_kill_leaves_what_was_there(old: Path) -> None:
    """A migration of a checkpoint in place that dies half-way leaves the old one; run again, it succeeds."""
    before = content(old)
    arguments = ["migrate", "--overwrite", str(old), str(old)]
    code = f"from {__name__} import main, register; register(); main({arguments!r})"
    assert programs.run(code, cwd=programs.ROOT, environment={"MIGRATION": "die"}).returncode == 9
    assert content(old) == before
    assert main(arguments) == 0
    assert loaded(old) == (3.0, 1)


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
