from __future__ import annotations

import enum
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.commit import commit
from shardckpt.commit.owner import claim_name, release_name
from shardckpt.distributed.comm import Comm
from shardckpt.engine.opening import LoadOptions, open_checkpoint
from shardckpt.engine.saving import SaveOptions, save_checkpoint
from shardckpt.errors import (
    BrokenPluginError,
    CannotLoadError,
    CheckpointingException,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NotACheckpointError,
    RefusedByPolicyError,
    StorageError,
    StrategyMismatchError,
    UnknownBackendError,
    VersionTooNewError,
    VersionTooOldError,
)
from shardckpt.manifest.names import MARKER_LIMIT
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins.hookspecs import hookimpl
from shardckpt.plugins.manager import PluginManager
from shardckpt.plugins.resolver import choose_reader, read_manifest
from shardckpt.strategy import LoadStrategy, Migration, SaveStrategy
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

DATA = "state.json"


class _Save(SaveStrategy):
    """Writes a format that holds common state only."""

    backend, version, reader = "toy", 1, "toys 1.0"

    def save(self, shards: Any, common: Any, context: Any) -> None:
        context.writer.write(DATA, json.dumps(common).encode())


class _Save2(_Save):
    version, reader = 2, "toys 2.0"


class _Save3(_Save):
    version, reader = 3, ""


class _Load(LoadStrategy):
    backend, version = "toy", 1

    def load(self, wanted: Any, context: Any) -> list[Any]:
        return []

    def load_common(self, context: Any) -> Any:
        return json.loads(context.reader.read(DATA))

    def load_index(self, context: Any) -> list[Any]:
        return []


class _Load2(_Load):
    version = 2


class _Load3(_Load):
    version = 3


class _LoadBoth(_Load2):
    """Reads two versions."""

    def cannot_load(self, manifest: Any) -> str | None:
        return None if manifest.version in (1, 2) else "reads versions 1 and 2"


class _Picky(_Load2):
    """Refuses a dialect of its own version."""

    def cannot_load(self, manifest: Any) -> str | None:
        return super().cannot_load(manifest) or "does not read what toys 2.0 to 2.2 wrote: their lists were cut"


class _LoadLoose(_Load):
    """Knows directories without metadata.json."""

    def recognises(self, directory: Path) -> int | None:
        return 1 if (directory / DATA).is_file() else None


class _OneToTwo(Migration):
    backend, from_version, to_version = "toy", 1, 2

    def migrate(self, reader: Any, writer: Any) -> None:
        writer.write(DATA, reader.read(DATA))


class _Toys:
    """A plugin that registers what it is given."""

    def __init__(self, *strategies: Any, migration: Any = None, broken: int = 0) -> None:
        self._strategies = strategies
        self._migration = migration
        self._broken = broken

    @hookimpl
    def shardckpt_register(self, registry: Any) -> None:
        for strategy in self._strategies:
            registry.add(strategy)
        if self._migration is not None:
            registry.add_migration(self._migration)
        if self._broken:
            registry.add_lazy("toy", self._broken, load="no_such_module_anywhere:Load")


def _host(*strategies: Any, migration: Any = None, broken: int = 0) -> PluginManager:
    """The installed plugins, and these strategies."""
    plugins = PluginManager()
    plugins.register(_Toys(*strategies, migration=migration, broken=broken))
    return plugins


def _saved(path: Path, saver: type[SaveStrategy] = _Save) -> Path:
    save_checkpoint(
        {"step": 3},
        path,
        saver(),
        Comm(alone=True),
        PluginManager(),
        SaveOptions(),
    )
    return path


def _opened(path: Path, plugins: PluginManager, strategy: Any = None, accept: Any = None) -> tuple[LoadStrategy, Any]:
    """The strategy that passes the gate, and the common state that it reads."""
    with open_checkpoint(path, Comm(alone=True), plugins, LoadOptions(strategy, accept)) as checkpoint:
        return checkpoint.strategy, checkpoint.common()


def _refusal(kind: type[CheckpointingException], path: Path, plugins: PluginManager, *arguments: Any) -> str:
    """The text of the gate's refusal, which must be of exactly this kind and name the checkpoint."""
    with pytest.raises(kind) as caught:
        _opened(path, plugins, *arguments)
    assert type(caught.value) is kind
    assert str(path) in str(caught.value)
    return str(caught.value)


def _builtin(path: Path) -> Path:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0))}, path)
    return path


# Directories that are no checkpoints


def test_what_does_not_exist_is_no_checkpoint(tmp_path: Path) -> None:
    """An absent path is told apart from a checkpoint by name; of a file, the error has the call that reads it."""
    text = _refusal(NotACheckpointError, tmp_path / "absent", PluginManager())
    assert "does not exist or is not a directory" in text
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "file.pt")
    _follow(_refusal(NotACheckpointError, tmp_path / "file.pt", PluginManager()), tmp_path / "new")


def test_a_legacy_checkpoint_of_megatron_is_said_with_what_reads_it(tmp_path: Path) -> None:
    """Of one rank, the error has the call that converts it, and what that writes loads; of several, that none joins."""
    for rank in range(2):
        (folder := tmp_path / "iter" / f"mp_rank_0{rank}").mkdir(parents=True)
        torch.save({"model": {"w": torch.ones(2)}, "iteration": 3}, folder / "model_optim_rng.pt")
        text = _refusal(IncompleteCheckpointError, tmp_path / "iter", PluginManager())
        assert ("nothing here joins the shards of ranks" in text) == bool(rank)
        _follow(text, tmp_path / f"new-{rank}")


def _follow(advice: str, target: Path) -> None:
    """Call what an error advises, and load what it has written."""
    call = advice.partition("`shardckpt ")[2].partition(" NEW`")[0]
    assert main([*call.split(), str(target)]) == 0
    loaded = dc.load({"w": ShardedTensor.from_rank_offsets("model.w", torch.zeros(2))}, target)
    assert torch.equal(loaded["w"], torch.ones(2))


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    """An empty directory is called that."""
    assert "is an empty directory" in _refusal(NotACheckpointError, tmp_path, PluginManager())


def test_other_files_are_no_checkpoint(tmp_path: Path) -> None:
    """Data without the file that names its strategy is refused; the error shows what is there and what is not."""
    for number in range(9):
        (tmp_path / f"weights-{number}.bin").write_bytes(b"data")
    text = _refusal(IncompleteCheckpointError, tmp_path, PluginManager())
    assert "has no metadata.json" in text
    assert "nor another library's index, such as DCP's .metadata" in text
    assert "weights-0.bin" in text
    assert "..." in text


def test_a_folder_of_checkpoints_names_one(tmp_path: Path) -> None:
    """The folder of a run, with Megatron's tracker file, is told from a save that did not end."""
    for step in (1, 2):
        _builtin(tmp_path / f"iter_000000{step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    text = _refusal(NotACheckpointError, tmp_path, PluginManager())
    assert text.endswith(f"it is a folder of 2 checkpoints: give one, such as {tmp_path / 'iter_0000002'}")


def test_of_a_folder_of_checkpoints_the_last_one_by_number_is_named(tmp_path: Path) -> None:
    """Step 1000 is later than step 9; a folder that may not be looked into is none, and does not replace the error."""
    for name in ("step-9", "step-1000", "zip"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").touch()
    (tmp_path / "zip" / "metadata.json").unlink()
    (tmp_path / "zip" / "metadata.json").symlink_to("metadata.json")
    (tmp_path / "loop").symlink_to("loop")
    text = _refusal(NotACheckpointError, tmp_path, PluginManager())
    assert text.endswith(f"it is a folder of 2 checkpoints: give one, such as {tmp_path / 'step-1000'}")


def test_a_folder_that_may_not_be_looked_into_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of the system for one folder of several leaves the error as it is; files are not asked about."""
    for name in ("step-1", "step-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").touch()
    (tmp_path / "notes.txt").touch()
    stat, asked = os.stat, []

    def refuse(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        asked.append(str(path))
        if str(path).endswith("step-2/metadata.json"):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    text = _refusal(NotACheckpointError, tmp_path, PluginManager())
    assert text.endswith(f"it is a folder of 1 checkpoint: give one, such as {tmp_path / 'step-1'}")
    assert not [path for path in asked if "notes.txt" in path]


def test_a_directory_that_may_not_be_listed_is_shown_to_no_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system's refusal is the error, and not a warning that a plugin has failed."""
    (tmp_path / "step-1").mkdir()
    listdir = os.listdir

    def refuse(path: Any = ".") -> list[Any]:
        if os.path.realpath(f"/proc/self/fd/{path}" if isinstance(path, int) else path) == str(tmp_path / "step-1"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(StorageError, match=r"cannot list .*Permission denied"):
        read_manifest(tmp_path / "step-1", PluginManager())
    assert not caplog.records


def test_a_checkpoint_that_lost_its_marker_is_incomplete(tmp_path: Path) -> None:
    """The files of a real save without those that name its strategy are not taken for a checkpoint."""
    path = _builtin(tmp_path / "checkpoint")
    (path / "metadata.json").unlink()
    assert "metadata.json was lost" in _refusal(CorruptCheckpointError, path, PluginManager())
    for name in ("shardckpt.json", ".metadata"):
        (path / name).unlink()
    assert "found __0_0.distcp, common.pt" in _refusal(IncompleteCheckpointError, path, PluginManager())


def test_a_folder_of_leftovers_alone_is_said_to_be_one(tmp_path: Path) -> None:
    """Where a folder has nothing but a killed save's staging, the error names it, and the call that removes it."""
    staging = commit.create_staging(tmp_path / "step-3", "1234" * 8)
    (tmp_path / ".shardckpt-marks").mkdir()
    text = _refusal(IncompleteCheckpointError, tmp_path, _host(_Load))
    assert f"leftovers of saves or removals that did not end ({staging.name}): `shardckpt prune {tmp_path}" in text
    assert "copy" not in text


def test_a_staging_directory_is_no_checkpoint(tmp_path: Path) -> None:
    """The directory of a save under way is refused even when all its files are there."""
    staging = commit.create_staging(tmp_path / "checkpoint", "1234")
    shutil.copytree(_saved(tmp_path / "other"), staging, dirs_exist_ok=True)
    text = _refusal(IncompleteCheckpointError, staging, _host(_Load))
    assert "staging directory of a save that was not committed" in text


def test_a_save_that_did_not_end_is_told_from_one_that_never_was(tmp_path: Path) -> None:
    """Where a save died, the error says so, where its remains lie, and what to do; where one runs, to wait."""
    staging = commit.create_staging(tmp_path / "checkpoint", "1234" * 8)
    claim_name(staging.name)
    text = _refusal(IncompleteCheckpointError, tmp_path / "checkpoint", PluginManager())
    assert f"a save to it is running (process {os.getpid()} of this host is alive)" in text
    assert str(staging) in text
    release_name(staging.name)
    text = _refusal(IncompleteCheckpointError, tmp_path / "checkpoint", PluginManager())
    assert "did not end" in text
    assert str(staging) in text
    assert "save again" in text


@pytest.mark.usefixtures("no_pauses")
def test_an_interrupted_overwrite_says_where_the_checkpoint_is(tmp_path: Path) -> None:
    """After a crash between two renames the previous checkpoint is named, and doing as told brings it back."""
    path = _saved(tmp_path / "checkpoint")
    aside = tmp_path / ".checkpoint.shardckpt-replaced-1234"  # as commit.replace_target names it
    path.rename(aside)
    commit.create_staging(path, "5678")
    text = _refusal(IncompleteCheckpointError, path, _host(_Load))
    assert "overwrite was interrupted" in text
    assert f"a complete checkpoint is at {aside}" in text
    assert "rename it to" in text
    assert commit.list_replaced_checkpoints(path) == [aside]
    aside.rename(path)
    assert _opened(path, _host(_Load))[1] == {"step": 3}


# Damaged JSON


@table(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"sharded_backend": 3}',
        b'{"sharded_backend": "toy", "sharded_backend_version": "one"}',
        b'{"sharded_backend": "toy", "sharded_backend_version": null}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_marker_is_named(tmp_path: Path, content: bytes) -> None:
    """A metadata.json that is not JSON, or not of the right form, is an error that names the file."""
    path = _saved(tmp_path / "checkpoint")
    (path / "metadata.json").write_bytes(content)
    text = _refusal(CorruptCheckpointError, path, _host(_Load))
    assert f"{path / 'metadata.json'} is damaged" in text
    assert not re.search("pydantic|Marker|\n", text)
    assert len(text) < 1000


def test_a_marker_that_is_no_small_file_is_refused_unread(tmp_path: Path) -> None:
    """A metadata.json of any size, a pipe or a directory costs neither memory nor a wait."""
    path = _saved(tmp_path / "checkpoint")
    marker = path / "metadata.json"
    os.truncate(marker, MARKER_LIMIT + 1)
    assert f"more than the {MARKER_LIMIT}" in _refusal(CorruptCheckpointError, path, _host(_Load))
    for make in (marker.mkdir, lambda: os.mkfifo(marker)):
        marker.unlink() if marker.is_file() else marker.rmdir()
        make()
        assert "is not a regular file" in _refusal(CorruptCheckpointError, path, _host(_Load))


@table("content", [b"[]", b'{"format": 1', b"{}"])
def test_a_damaged_record_is_named(tmp_path: Path, content: bytes) -> None:
    """A shardckpt.json of another form, or half of one, is damage, not an absent one (tests/test_manifest.py)."""
    path = _saved(tmp_path / "checkpoint")
    (path / "shardckpt.json").write_bytes(content)
    assert f"{path / 'shardckpt.json'} is damaged" in _refusal(CorruptCheckpointError, path, _host(_Load))


def test_files_that_disagree_are_refused(tmp_path: Path) -> None:
    """A metadata.json of one save beside the shardckpt.json of another is not loaded as either."""
    path = _saved(tmp_path / "checkpoint")
    shutil.copy(_saved(tmp_path / "other", _Save2) / "metadata.json", path)
    text = _refusal(CorruptCheckpointError, path, _host(_Load, _Load2))
    assert "metadata.json says 'toy' version 2" in text
    assert "shardckpt.json says 'toy' version 1" in text


def test_a_marker_alone_is_enough(tmp_path: Path) -> None:
    """What another library wrote has no shardckpt.json, and more fields than ours: it is read all the same."""
    path = _saved(tmp_path / "checkpoint")
    (path / "shardckpt.json").unlink()
    marker = {"sharded_backend": "toy", "sharded_backend_version": 1, "common_backend": "zip", "extra": [1]}
    (path / "metadata.json").write_text(json.dumps(marker))
    assert _opened(path, _host(_Load))[1] == {"step": 3}


# Which strategy reads it


def test_the_reader_of_the_version_is_chosen(tmp_path: Path) -> None:
    """The checkpoint's own backend and version decide, among several readers of the backend."""
    plugins = _host(_Load, _Load2, _Load3)
    for saver, loader in ((_Save, _Load), (_Save2, _Load2), (_Save3, _Load3)):
        strategy, common = _opened(_saved(tmp_path / str(saver.version), saver), plugins)
        assert type(strategy) is loader
        assert common == {"step": 3}


def test_a_newer_reader_may_read_an_older_version(tmp_path: Path) -> None:
    """cannot_load decides, not the number: a reader that says it reads version 1 does."""
    assert type(_opened(_saved(tmp_path / "old"), _host(_LoadBoth))[0]) is _LoadBoth


def test_an_unknown_backend_says_what_to_install(tmp_path: Path) -> None:
    """The error names backend and version, the release that reads it, and what is installed instead."""
    text = _refusal(UnknownBackendError, _saved(tmp_path / "checkpoint"), PluginManager())
    assert "'toy' checkpoint of version 1" in text
    assert "Install the distribution that provides it: toys 1.0 or newer, which reads or migrates it" in text
    assert "\ninstalled readers: " in text
    assert "torch_dist 1 (shardckpt " in text


def test_an_unknown_backend_of_another_library_has_no_hint(tmp_path: Path) -> None:
    """Without shardckpt.json there is nobody to name, and the error still names what there is."""
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "tensorstore", "sharded_backend_version": 1}')
    text = _refusal(UnknownBackendError, tmp_path, PluginManager())
    assert "'tensorstore' checkpoint of version 1; no plugin reads that backend any more: Megatron-Core 0.15" in text
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "others", "sharded_backend_version": 1}')
    text = _refusal(UnknownBackendError, tmp_path, PluginManager())
    assert "'others' checkpoint of version 1" in text
    assert "or by SHARDCKPT_PLUGINS=MODULE" in text
    assert "a strategy of your own is given as sharded_strategy=, or to dist_checkpointing.register_default" in text
    assert "or newer reads" not in text


def test_a_newer_version_names_the_release_that_reads_it(tmp_path: Path) -> None:
    """Too new: which version is installed, what reads the checkpoint, and every candidate's reason."""
    text = _refusal(VersionTooNewError, _saved(tmp_path / "checkpoint", _Save2), _host(_Load))
    assert "newer than the installed readers (version 1)" in text
    assert "Upgrade: toys 2.0 or newer reads it" in text
    assert "_Load of this process: reads version 1" in text


@table("has_record", [True, False])
def test_a_newer_version_without_a_hint_says_what_to_upgrade(tmp_path: Path, has_record: bool) -> None:
    """Where a strategy names no release, or the record is lost, what has the newest reader is named."""
    path = _saved(tmp_path / "checkpoint", _Save3)
    if not has_record:
        (path / "shardckpt.json").unlink()
    text = _refusal(VersionTooNewError, path, _host(_Load, _Load2))
    assert "newer than the installed readers (version 2). Upgrade this process, which is too old; " in text
    assert "; the checkpoint does not say which release reads it\n" in text
    assert "_Load of this process: reads version 1" in text
    assert "_Load2 of this process: reads version 2" in text


def test_an_older_version_names_the_migration(tmp_path: Path) -> None:
    """Too old, with a migration installed: the command that rewrites it."""
    path = _saved(tmp_path / "checkpoint")
    text = _refusal(VersionTooOldError, path, _host(_Load2, migration=_OneToTwo))
    assert f"Rewrite it as version 2: `shardckpt migrate {path} NEW`" in text
    assert "_Load2 of this process: reads version 2" in text


def test_an_older_version_without_migration_names_the_release(tmp_path: Path) -> None:
    """Too old, and no migration: which release is too new, and which one did read it."""
    text = _refusal(VersionTooOldError, _saved(tmp_path / "checkpoint"), _host(_Load2))
    assert "no migration" in text
    assert "toys 1.0 was the first to read it" in text
    assert "migrate" not in text.partition("\n")[0]


def test_a_version_between_two_readers_is_too_old(tmp_path: Path) -> None:
    """A gap between installed versions is not taken for something newer."""
    text = _refusal(VersionTooOldError, _saved(tmp_path / "checkpoint", _Save2), _host(_Load, _Load3))
    assert "reads version 1" in text
    assert "reads version 3" in text


def test_a_reader_may_refuse_its_own_version(tmp_path: Path) -> None:
    """A dialect that the reader refuses is neither too old nor too new: its reason is the error."""
    text = _refusal(CannotLoadError, _saved(tmp_path / "checkpoint", _Save2), _host(_Picky))
    assert "_Picky of this process: does not read what toys 2.0 to 2.2 wrote" in text


def test_a_reader_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """The plugin is there and its reader is broken: that is the error, with Python's reason."""
    text = _refusal(BrokenPluginError, _saved(tmp_path / "checkpoint"), _host(broken=1))
    assert "its plugin is installed and does not work" in text
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in text
    assert "installed readers: " in text


def test_a_plugin_that_is_disabled_is_not_called_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which variable leaves it out, and what to do."""
    save_checkpoint({"step": 3}, tmp_path / "c", "safetensors", Comm(alone=True), PluginManager(), SaveOptions())
    monkeypatch.setenv("SHARDCKPT_DISABLED_PLUGINS", "safetensors")
    text = _refusal(RefusedByPolicyError, tmp_path / "c", PluginManager())
    assert "its plugin is disabled: take 'safetensors' out of SHARDCKPT_DISABLED_PLUGINS" in text
    assert "broken" not in PluginManager().faults_text()


def test_a_broken_reader_does_not_hide_a_working_one(tmp_path: Path) -> None:
    """A broken reader of version 2 leaves version 1 readable, and directories recognisable."""
    path = _saved(tmp_path / "checkpoint")
    assert type(_opened(path, _host(_Load, broken=2))[0]) is _Load
    for name in ("metadata.json", "shardckpt.json"):
        (path / name).unlink()
    assert type(_opened(path, _host(_LoadLoose, broken=2))[0]) is _LoadLoose


def test_a_strategy_recognises_what_has_no_marker(tmp_path: Path) -> None:
    """A directory without metadata.json is read by the strategy that knows its content."""
    (tmp_path / DATA).write_text('{"step": 9}')
    strategy, common = _opened(tmp_path, _host(_LoadLoose))
    assert type(strategy) is _LoadLoose
    assert common == {"step": 9}
    assert read_manifest(tmp_path, _host(_LoadLoose)).recognised_as == "toy"
    _refusal(IncompleteCheckpointError, tmp_path, _host(_Load))


# What the caller says


@table(
    "accept",
    [
        "toy",
        "toy@1",
        ("toy", 1),
        ["toy"],
        [("toy", 1)],
        ["toy@1"],
        ("torch_dist", "toy"),
        {("toy", 2), ("toy", 1)},
        None,
    ],
)
def test_a_policy_lets_through_what_it_names(tmp_path: Path, accept: Any) -> None:
    """accept= takes a backend, 'backend@version' or a (backend, version) pair, or several."""
    assert _opened(_saved(tmp_path / "checkpoint"), _host(_Load), None, accept)[1] == {"step": 3}


@table(
    ("accept", "allowed"),
    [
        ([], "allows nothing"),
        (["torch_dist"], "allows 'torch_dist'"),
        ([("toy", 2)], "allows 'toy@2'"),
        (("toy", 2), "allows 'toy@2'"),
        ("toy@2", "allows 'toy@2'"),
        ("tooy", "allows 'tooy': did you mean toy?"),
    ],
)
def test_a_policy_refuses_everything_else(tmp_path: Path, accept: Any, allowed: str) -> None:
    """What accept= leaves out is refused with what it is and what is allowed, installed or not."""
    path = _saved(tmp_path / "checkpoint")
    for plugins in (_host(_Load), PluginManager()):
        text = _refusal(RefusedByPolicyError, path, plugins, None, accept)
        assert "'toy' checkpoint of version 1" in text
        assert allowed in text


def test_a_file_is_named_by_what_it_is(tmp_path: Path) -> None:
    """Of a file of torch.save a load names the command that makes a checkpoint of it; of a text, it says what it is."""
    (tmp_path / "README.md").write_text("# Weights")
    with pytest.raises(NotACheckpointError, match=r"neither torch\.save nor safetensors wrote; give the dir") as error:
        dc.load({}, tmp_path / "README.md")
    assert "convert" not in str(error.value)
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(NotACheckpointError, match=r"`shardckpt convert .*a\.pt NEW`"):
        dc.load({}, tmp_path / "a.pt")


class _Choice(enum.Enum):
    ONE = 1


@table("given", [_Choice, len, "len", ["len"]])
def test_globals_are_allowed_by_a_list(tmp_path: Path, given: Any) -> None:
    """A class, a function or a text in the place of a list of classes and functions is an error that shows the list."""
    with pytest.raises(CheckpointingException, match=r"^allow_globals: .* such as allow_globals=\[MyConfig\]$"):
        dc.load({}, _builtin(tmp_path / "checkpoint"), allow_globals=given)


def test_a_policy_reaches_the_front_door(tmp_path: Path) -> None:
    """dist_checkpointing.load(accept=...) asks the gate."""
    path = _builtin(tmp_path / "checkpoint")
    with pytest.raises(RefusedByPolicyError, match="allows 'toy'"):
        dc.load({}, path, accept=["toy"])
    assert dc.load({}, path, accept=["torch_dist"]) == {}


def test_the_job_says_what_may_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARDCKPT_ACCEPT refuses what it leaves out, by its name, whatever accept= says; what it names is loaded."""
    path = _builtin(tmp_path / "checkpoint")
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "safetensors, torch_dist@2")
    with pytest.raises(RefusedByPolicyError, match="; SHARDCKPT_ACCEPT allows 'safetensors', 'torch_dist@2'"):
        dc.load({}, path, accept="torch_dist")
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "safetensors,torch_dist@1")
    assert dc.load({}, path) == {}
    with pytest.raises(RefusedByPolicyError, match="the caller's accept= allows 'ep'"):
        dc.load({}, path, accept="ep")


@table("text", ["", " , ", "torch_dist@one", "torch dist"])
def test_a_wrong_list_of_what_may_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """An empty SHARDCKPT_ACCEPT, or one with what is no name, refuses all loads, and says what is expected."""
    path = _builtin(tmp_path / "checkpoint")
    monkeypatch.setenv("SHARDCKPT_ACCEPT", text)
    with pytest.raises(CheckpointingException, match=r"SHARDCKPT_ACCEPT=.* expected names as in 'safetensors,ep@1"):
        dc.load({}, path)


@table("strategy", ["toy", ("toy", 1), _Load()])
def test_a_strategy_that_fits_is_used(tmp_path: Path, strategy: Any) -> None:
    """sharded_strategy by name, by pair, or an instance, which serves the load itself."""
    used, common = _opened(_saved(tmp_path / "checkpoint"), _host(_Load), strategy)
    assert type(used) is _Load
    assert (used is strategy) == isinstance(strategy, LoadStrategy)
    assert common == {"step": 3}


@table(
    ("strategy", "reason"),
    [
        ("torch_dist", "not 'torch_dist' as sharded_strategy asks"),
        (("toy", 2), "not ('toy', 2) as sharded_strategy asks"),
        (("torch_dist", 1), "not ('torch_dist', 1) as sharded_strategy asks"),
        (_Load2(), "the given _Load2 reads version 2"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(tmp_path: Path, strategy: Any, reason: str) -> None:
    """What the caller names must be what the checkpoint is: the error says both."""
    text = _refusal(StrategyMismatchError, _saved(tmp_path / "checkpoint"), _host(_Load, _Load2), strategy)
    assert "'toy' checkpoint of version 1" in text
    assert reason in text


def test_an_instance_needs_no_plugin(tmp_path: Path) -> None:
    """A caller's own reader loads what nothing installed reads."""
    assert _opened(_saved(tmp_path / "checkpoint"), PluginManager(), _Load())[1] == {"step": 3}


@table("strategy", [3, ("toy",), ("toy", "1"), _Save()])
def test_a_strategy_of_a_wrong_kind_is_refused(tmp_path: Path, strategy: Any) -> None:
    """What names no strategy is told what does."""
    path = _saved(tmp_path / "checkpoint")
    manifest = read_manifest(path, PluginManager())
    with pytest.raises(
        CheckpointingException, match=r"named as 'backend', 'backend@version' or \('backend', version\)"
    ):
        choose_reader(path, manifest, _host(_Load), strategy)


# On every rank


def _refused_on_a_rank(path: str) -> tuple[str, str]:
    with pytest.raises(CannotLoadError) as caught:
        dc.load({}, path)
    return type(caught.value).__name__, str(caught.value)


def test_every_rank_gets_the_same_refusal(ranks: Ranks, tmp_path: Path) -> None:
    """The gate's verdict is one for all ranks, whether the main rank finds it or every rank does."""
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "metadata.json").write_text('{"sharded_backend": "tensorstore"}')
    for name, kind in (("absent", "NotACheckpointError"), ("unknown", "UnknownBackendError")):
        refusals = ranks.run(3, _refused_on_a_rank, str(tmp_path / name))
        assert len(set(refusals)) == 1
        assert refusals[0][0] == kind
        assert str(tmp_path / name) in refusals[0][1]
