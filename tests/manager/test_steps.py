from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.commit.commit import create_staging
from shardckpt.commit.staging_names import new_save_id
from shardckpt.errors import CheckpointingException, StorageError, UnknownBackendError, VersionTooNewError
from shardckpt.manager import KeepBest, KeepRecent
from shardckpt.manager.garbage_collection import collect_garbage
from shardckpt.manager.step_names import STEPS, StepNames
from shardckpt.manifest.names import CONTENT_KEY
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins.hookspecs import hookimpl
from shardckpt.plugins.manager import get_plugin_manager
from tests import backends
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manager.retention import RetentionPolicy
    from tests.remote.store import Store


@given(st.integers(min_value=0), st.sampled_from(["step-", "iter_", ""]), st.integers(min_value=1, max_value=9))
def test_a_name_says_its_step(step: int, prefix: str, width: int) -> None:
    """Every step has one name, which says it, in every naming."""
    names = StepNames(prefix, width)
    assert names.parse(names.name(step)) == step


@given(st.text(alphabet="step-0123456789_ \n"))
def test_a_step_has_one_name(text: str) -> None:
    """What is read as a step is the very name that the step has."""
    step = STEPS.parse(text)
    assert step is None or STEPS.name(step) == text


def test_a_step_below_zero_is_an_error() -> None:
    """A negative step has no directory."""
    with pytest.raises(CheckpointingException, match="step -1: steps are counted from 0"):
        STEPS.name(-1)


def test_foreign_names_are_no_steps(tmp_path: Path) -> None:
    """Whatever else is in the folder, directories, files and links to nowhere, the steps are the steps."""
    folders.save_all(tmp_path, 20, 3, 100)
    for name in folders.FOREIGN:
        (tmp_path / name).mkdir()
    (tmp_path / "step-55").write_text("a file")
    (tmp_path / "step-56").symlink_to(tmp_path / "nowhere")
    create_staging(tmp_path / "step-57", new_save_id())
    folder = folders.steps_of(tmp_path)
    assert folder.steps() == [3, 20, 100]
    assert [found.step for found in folder.committed()] == [3, 20, 100]


def test_a_folder_that_is_not_there_has_no_steps(tmp_path: Path) -> None:
    """The first run finds nothing, and no error; a file in the folder's place is one."""
    assert folders.steps_of(tmp_path / "new").steps() == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot list .*file: Not a directory"):
        folders.steps_of(tmp_path / "file").steps()


def test_what_was_saved_with_it_is_known(tmp_path: Path) -> None:
    """A look gives the content metadata and the metrics; of another library's checkpoint there are none."""
    folders.save(tmp_path, 5, loss=0.25)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-6")
    folder = folders.steps_of(str(tmp_path))
    ours, plain = folder.inspect_step(5), folder.inspect_step(6)
    assert ours.content["shardckpt_manager"]["step"] == 5
    assert ours.metrics == {"loss": 0.25}
    assert ours.is_loadable
    assert plain.is_loadable
    assert (plain.content, plain.metrics) == ({}, {})


@backends.both_in_proof
def test_numbers_of_another_program_raise_nothing(tmp_path: Path) -> None:
    """Metrics and times that no finite float is count as unknown: the step is kept or ranked without them."""
    huge = 10**400
    for step, saved_at in enumerate((huge, -huge, True, "1", None), 1):
        managed = {"metrics": {"loss": [huge, 0.5, True, "low", {}][step - 1]}, "saved_at": saved_at}
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1))}
        dc.save(state, f"{tmp_path}/step-{step}", content_metadata={CONTENT_KEY: managed})
    folder = folders.steps_of(tmp_path)
    found = {each.step: each for each in folder.committed()}
    assert [each.metrics["loss"] for each in found.values()] == [None, 0.5, None, None, None]
    assert all(each.metrics.saved_at == each.changed_at for each in found.values())
    policies: list[RetentionPolicy] = [KeepBest("loss"), KeepRecent(hours=1)]
    assert policies[0]({step: each.metrics for step, each in found.items()}) == [2]
    assert policies[0]({1: {"loss": huge}, 2: {"loss": 0.5}}) == [2]
    assert collect_garbage(folder, policies) == []


@backends.both_in_proof
def test_incomplete_and_damaged_steps_do_not_count(tmp_path: Path) -> None:
    """An unfinished save, a cut or missing file and damaged JSON each have a fault that says so."""
    folders.save_all(tmp_path, 1, 2, 3, 4, 5, 6)
    folders.lose_marker(tmp_path / "step-2")
    folders.damage(tmp_path / "step-3")
    (tmp_path / "step-4" / backends.current().common).unlink()
    (tmp_path / "step-5/metadata.json").write_text("{")
    (tmp_path / "step-6/shardckpt.json").write_text("{}")
    (tmp_path / "step-7").mkdir()
    folder = folders.steps_of(tmp_path)
    assert [found.step for found in folder.committed()] == [1]
    expected = {
        2: "has no metadata.json",
        3: f"{backends.data_file(0)} has",
        4: f"{backends.current().common} is missing",
        5: "metadata.json is damaged",
        6: "shardckpt.json is damaged",
        7: "is an empty directory",
        8: "does not exist",
    }
    for step, text in expected.items():
        found = folder.inspect_step(step)
        assert text in str(found.error)
        assert f"step-{step}" in str(found.error)
        assert found.refusal is None
        assert found.is_damaged == (step in (3, 4, 5, 6))


@backends.both_in_proof
def test_files_of_a_record_that_is_not_ours_are_looked_for(tmp_path: Path) -> None:
    """A checkpoint with Megatron's integrity.json alone is damaged where it names a file that is gone."""
    folders.save(tmp_path, 1)
    (tmp_path / "step-1/shardckpt.json").unlink()
    common = backends.current().common
    digests = {"files": {common: "00", backends.data_file(0): "00"}}
    (tmp_path / "step-1/integrity.json").write_text(json.dumps(digests))
    assert folders.steps_of(tmp_path).inspect_step(1).is_loadable
    (tmp_path / "step-1" / common).unlink()
    assert f"{common} is missing" in str(folders.steps_of(tmp_path).inspect_step(1).error)


@backends.both_in_proof
def test_what_nothing_installed_reads_is_no_damage(tmp_path: Path) -> None:
    """A checkpoint of an unknown backend, or of a newer version, is refused, and has no fault."""
    folders.save_all(tmp_path, 1, 2, 3)
    folders.say_backend(tmp_path / "step-2", "nobodys", 1)
    folders.say_backend(tmp_path / "step-3", "torch_dist", 99)
    folder = folders.steps_of(tmp_path)
    assert [found.step for found in folder.committed()] == [1]
    assert isinstance(folder.inspect_step(2).refusal, UnknownBackendError)
    assert isinstance(folder.inspect_step(3).refusal, VersionTooNewError)
    assert folder.inspect_step(2).error is folder.inspect_step(3).error is None


def test_a_link_to_a_checkpoint_is_read(tmp_path: Path) -> None:
    """A step that someone moved to another disk, with a link in its place, can be loaded; a linked folder too."""
    folders.save(tmp_path / "elsewhere", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/step-1").symlink_to(tmp_path / "elsewhere/step-1")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    folder = folders.steps_of(tmp_path / "link")
    assert [found.step for found in folder.committed()] == [1]
    assert folders.is_intact(folder.path(1), 1)


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    """``file://`` is the same folder."""
    folders.save(tmp_path, 1)
    folder = folders.steps_of(f"file://{tmp_path}")
    assert folder.steps() == [1]
    assert folder.location(1) == os.path.realpath(tmp_path / "step-1")


@backends.both_in_proof
def test_a_url_in_memory(memory: str) -> None:
    """On a store the same steps are found, counted and located, damaged ones and objects of other names left out."""
    folder = folders.steps_of(f"{memory}/")
    assert folder.steps() == []
    folders.save_all(memory, 3, 20, 100)
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/run/backup-step-100.old/x", b"x")
    files.pipe_file("/bucket/run/step-55", b"x")
    files.rm_file(f"/bucket/run/step-100/{backends.current().common}")
    assert folder.steps() == [3, 20, 100]
    assert [found.step for found in folder.committed()] == [3, 20]
    assert f"{backends.current().common} is missing" in str(folder.inspect_step(100).error)
    assert folder.location(3) == "memory://bucket/run/step-3"
    assert folders.is_intact(folder.location(3), 3)


@table("protocol", ["local", "looped", "faulty"])
def test_stores_of_several_kinds_list_their_steps(tmp_path: Path, protocol: str) -> None:
    """Stores with real folders, with an event loop and listings that are kept, and of another make, all work."""
    url = f"{protocol}://{tmp_path}/run"
    (tmp_path / "run").mkdir()
    folder = folders.steps_of(url)
    assert folder.steps() == []
    folders.save_all(url, 2, 11)
    assert folder.steps() == [2, 11]
    assert [found.step for found in folder.committed()] == [2, 11]


@backends.both_in_proof
def test_an_upload_under_way_does_not_count(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save to a store whose marker is not there yet is no checkpoint, and no damaged one."""
    url = f"faulty://{tmp_path}/store"
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "1")
    folders.save(url, 1)
    (tmp_path / "store/step-2").mkdir()
    (tmp_path / "store/step-2/.shardckpt-uploading-0").touch()
    (tmp_path / "store/step-2/__0_0.distcp").write_bytes(b"1234")
    folder = folders.steps_of(url)
    assert folder.steps() == [1, 2]
    found = folder.inspect_step(2)
    assert "is in progress or was interrupted" in str(found.error)
    assert not found.is_damaged


def test_a_store_that_does_not_answer_is_no_damage(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a store fails, nothing is said about its checkpoints: looking and listing raise."""
    url = f"faulty://{tmp_path}/store"
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "1")
    folders.save(url, 1)
    folder = folders.steps_of(url)
    store.forget()
    store.fails("read", 1)
    with pytest.raises(StorageError, match="does not answer"):
        folder.inspect_step(1)
    (tmp_path / "faults").write_text('["list", 1, 999, "before"]\n')  # listings of the folder are noted beside it
    with pytest.raises(StorageError, match=r"cannot list the folders of faulty://.*does not answer"):
        folder.steps()


def test_a_plugin_that_cannot_list_folders_is_named() -> None:
    """A store whose plugin has no more than a checkpoint takes says what it lacks."""

    class Bare:
        """What RemoteFolder asks for."""

        def __init__(self, url: str) -> None:
            self.url = url

        def files(self) -> dict[str, int]:
            return {}

        def read(self, name: str, offset: int, nbytes: int) -> bytes:
            return b""

        def upload(self, name: str, path: Path) -> None: ...

        def delete(self, name: str) -> None: ...

    class Plugin:
        @hookimpl(tryfirst=True)
        def shardckpt_filesystem(self, url: str) -> Bare | None:
            return Bare(url) if url.startswith("bare://") else None

    plugin = Plugin()
    get_plugin_manager().register(plugin)
    try:
        with pytest.raises(StorageError, match=r"in bare://x/run: the plugin .* \(Bare lacks .*ListsFolders"):
            folders.steps_of("bare://x/run").steps()
    finally:
        get_plugin_manager().unregister(plugin)


def test_another_librarys_step_without_its_data_is_damaged(tmp_path: Path) -> None:
    """Plain DCP's checkpoint has no record of its files: its index says which are gone or too short."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    data = tmp_path / "step-1" / "__0_0.distcp"
    assert folders.steps_of(tmp_path).inspect_step(1).is_loadable
    data.write_bytes(data.read_bytes()[:9])
    assert "__0_0.distcp has 9 bytes" in str(folders.steps_of(tmp_path).inspect_step(1).error)
    data.unlink()
    found = folders.steps_of(tmp_path).inspect_step(1)
    assert found.is_damaged
    assert "__0_0.distcp is missing" in str(found.error)
