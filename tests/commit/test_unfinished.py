"""What killed saves and removals leave on a store: judged by their process and times, and removed whole."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from obstore.store import MemoryStore

from shardckpt.commit import Owner
from shardckpt.commit.removal import remove_checkpoint
from shardckpt.commit.unfinished import explain_unfinished_kept, find_unfinished, remove_unfinished
from shardckpt.commit.upload import Upload
from shardckpt.integrations.fsspec.folder import open_folder
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.manifest import MARKER_NAME
from shardckpt.storage import RemotePath
from shardckpt.storage.remote import list_objects
from tests.commit import owners

if TYPE_CHECKING:
    from shardckpt.commit.unfinished import Unfinished
    from tests.clock import Clock

SAVE_ID = "7" * 32
_numbers = count()


class _Timeless:
    """A folder that does not say when objects were written."""

    def __init__(self, folder: Any) -> None:
        self.url, self.files, self.read = folder.url, folder.files, folder.read
        self.upload, self.delete, self.tree = folder.upload, folder.delete, folder.tree


@pytest.fixture(params=["obstore", "fsspec"])
def place(request: pytest.FixtureRequest) -> RemotePath:
    """A folder without objects."""
    if request.param == "fsspec":
        found = open_folder(f"memory://unfinished-{next(_numbers)}/step-1")
        assert found is not None
        return RemotePath(found)
    return RemotePath(ObstoreFolder("objects://bucket/step-1", MemoryStore(), "step-1"))


def _leave(place: RemotePath, owner: Owner) -> None:
    """What a save of a process has when it is killed; beside it a checkpoint, and a save that has just begun."""
    upload = Upload(place.folder)
    upload.begin(SAVE_ID, overwrite=False)
    upload.close()
    for name in [name for name in place.folder.files() if name.startswith(".shardckpt")]:
        said = (place / name).read_range(0, 1000)
        (place / name).write(said.replace(Owner.current().text.encode(), owner.text.encode()))
    for name in (
        "data",
        "folder/data",
        "other/metadata.json",
        "other/data",
        "more/.shardckpt-uploading-claim",
        "more/d",
    ):
        (place / name).write(b"12345")


def _find(place: RemotePath) -> Unfinished:
    found = find_unfinished(RemotePath(place.folder))
    assert found is not None
    return found


def test_what_a_dead_process_left_is_removed_whole(place: RemotePath) -> None:
    """All objects of the save go; those of checkpoints and saves in folders below stay."""
    _leave(place, owners.dead())
    found = _find(place)
    assert explain_unfinished_kept(found) == ""
    assert sum(size for name, size in found.objects.items() if name not in found.marks) == 10
    remove_unfinished(found)
    left = {"other/metadata.json", "other/data", "more/.shardckpt-uploading-claim", "more/d"}
    assert list_objects(place.folder).keys() == left
    assert find_unfinished(RemotePath(place.folder)) is None


def test_what_a_living_process_writes_stays_at_any_age(place: RemotePath, clock: Clock) -> None:
    """A process of this host that lives keeps its objects, however old they are."""
    _leave(place, Owner.current())
    clock.advance(hours=3000)
    assert explain_unfinished_kept(_find(place), 0.0) == f"process {Owner.current().pid} of this host is alive"


@pytest.mark.parametrize("tells_times", [True, False])
def test_what_another_host_left_goes_by_its_age(place: RemotePath, clock: Clock, tells_times: bool) -> None:
    """It stays until nothing was written for so long; where a store tells no times, since the save began."""
    _leave(place, owners.elsewhere())
    found = _find(place if tells_times else RemotePath(_Timeless(place.folder)))  # type: ignore[arg-type]
    assert explain_unfinished_kept(found).endswith("written to 0.0 hours ago: it is removed after 24")
    assert explain_unfinished_kept(found, 0.0) == ""
    if tells_times:  # the last write counts, not the begin
        found = found._replace(begun=1.0)
        assert explain_unfinished_kept(found)
    clock.advance(hours=25)
    assert explain_unfinished_kept(found) == ""
    assert explain_unfinished_kept(found, 26.0)


def test_a_save_that_took_the_place_since_keeps_its_objects(place: RemotePath) -> None:
    """What was found is looked at again before anything is deleted."""
    _leave(place, owners.dead())
    found = _find(place)
    for name in list_objects(place.folder):
        (place / name).delete()
    upload = Upload(place.folder)
    upload.begin("8" * 32, overwrite=False)
    (place / "data").write(b"new")
    before = list_objects(place.folder)
    remove_unfinished(found)
    assert list_objects(place.folder) == before
    upload.abort(main=True)


def test_beside_a_marker_only_what_the_save_would_have_deleted_goes(place: RemotePath) -> None:
    """A save killed right after its commit is whole: its claim and in-progress object are removed, nothing else."""
    _leave(place, owners.dead())
    (place / MARKER_NAME).write(b"{}")
    found = _find(place)
    assert found.objects.keys() == found.marks
    remove_unfinished(found)
    left = {"data", "folder/data", MARKER_NAME, "other/metadata.json", "other/data"}
    assert list_objects(place.folder).keys() == left | {"more/.shardckpt-uploading-claim", "more/d"}


def test_a_killed_removal_is_continued(place: RemotePath) -> None:
    """Once its marker is gone a checkpoint is removed, whoever began it; before, time decides."""
    (place / ".shardckpt-uploading-removal").write(b"The checkpoint in this place is being removed.\n")
    for name in (MARKER_NAME, "data"):
        (place / name).write(b"12345")
    assert explain_unfinished_kept(_find(place)).startswith("of an unknown process, written to 0.0 hours ago")
    (place / MARKER_NAME).delete()
    found = _find(place)
    assert explain_unfinished_kept(found) == ""
    remove_unfinished(found)
    assert not list_objects(place.folder)


def test_a_removal_of_another_librarys_checkpoint_is_continued_in_its_folders(
    place: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a record nothing but the mark says that the files in folders were to go; checkpoints in these stay."""
    for name in (MARKER_NAME, "data", "folder/data", "other/metadata.json", "other/data"):
        (place / name).write(b"12345")

    def fail(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "delete_all", fail)
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoint(RemotePath(place.folder))
    remove_unfinished(_find(place))
    assert list_objects(place.folder).keys() == {"other/metadata.json", "other/data"}
