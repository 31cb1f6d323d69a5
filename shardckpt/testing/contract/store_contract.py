"""The contract of an object store that a plugin serves: its promises to saves, loads and managers, method by method."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.distributed.pickling import pickle_value, unpickle_trusted
from shardckpt.errors import CheckpointingException
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.settings import PLUGINS
from shardckpt.storage.remote import HasFolders, ListsFolders
from shardckpt.storage.store_abilities import (
    CopiesObjects,
    CreatesObjects,
    DeletesMany,
    ReadsInto,
    ReplacesObjects,
    StreamsWrites,
    TellsTimes,
)
from shardckpt.testing.checks import check, check_equal, check_same, expect_error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
#: Seconds that a process has for an upload before it is killed, in turn: some end before, some after.
_DELAYS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1)
#: Uploads a large object, and says when it begins.
_UPLOAD = """
import sys
from pathlib import Path
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
folder = open_folder(sys.argv[1], get_plugin_manager())
print("begin", flush=True)
folder.upload("large", Path(sys.argv[2]))
"""


def _can(folder: Any, ability: type) -> bool:
    return isinstance(folder, ability)


class StoreContract:
    """The contract of a store, to be subclassed by its author: each test is a promise that checkpoints at URLs rely on.

    A test of an ability that the folder does not have (its methods) is skipped.

    Example::

        import my_store  # has shardckpt_filesystem

        class TestMyStore(StoreContract):
            plugin = my_store
            url = "mine://bucket/contract"

    Attributes:
        plugin: The module, or an object, with the hook; None if it is installed. It is registered for each test.
        url: Under which each test has a folder of its own. A test deletes the objects that it has written, if it can.
        outlives_processes: Whether another process finds the objects. Then the folder is pickled, and uploads are
            killed, of a process that imports ``plugin`` by its module's name.
    """

    plugin: ClassVar[Any] = None
    url: ClassVar[str] = ""
    outlives_processes: ClassVar[bool] = True

    #: Where the promises are documented.
    contract_page: ClassVar[str] = (
        "shardckpt/storage/README.md, 'A store of your own'; shardckpt/testing/README.md, 'A contract for your store'"
    )

    def describe_subject(self) -> str:
        """Return the store as the report of a failure names it."""
        return f"the store of {self.url!r}"

    @pytest.fixture
    def folder(self) -> Iterator[Any]:
        """A folder that has no objects."""
        plugins = get_plugin_manager()
        is_own = self.plugin is not None and self.plugin not in plugins.registered
        if is_own:
            plugins.register(self.plugin, f"{type(self).__name__}.plugin")
        folder: Any = open_folder(f"{self.url.rstrip('/')}/{uuid.uuid4().hex}", plugins)
        try:
            yield folder
            for name in folder.tree() if _can(folder, HasFolders) else folder.files():
                folder.delete(name)
        finally:
            if is_own:
                plugins.unregister(self.plugin)

    @staticmethod
    def _put(folder: Any, tmp_path: Path, name: str, data: bytes) -> None:
        path = tmp_path / "source"
        path.write_bytes(data)
        folder.upload(name, path)

    @staticmethod
    def _again(folder: Any) -> Any:
        """Return the folder as another process opens it: caches of the first one are not its own."""
        return open_folder(folder.url, get_plugin_manager())

    @staticmethod
    def _require(folder: Any, *abilities: type) -> None:
        for ability in abilities:
            if not _can(folder, ability):
                pytest.skip(f"the folder is none that {ability.__name__}")

    def test_a_folder_without_objects(self, folder: Any) -> None:
        """It can be opened and listed, and reading from it, or deleting, is FileNotFoundError."""
        check_equal(folder.files(), {}, "files() of a URL without objects")
        with expect_error(FileNotFoundError, "read of an object that is not there"):
            folder.read("absent", 0, 1)
        if _can(folder, HasFolders):
            check_equal(folder.tree(), {}, "tree() of a URL without objects")
        if _can(folder, ListsFolders):
            check_equal(folder.folders(), [], "folders() of a URL without objects")

    def test_ranges(self, folder: Any, tmp_path: Path) -> None:
        """An object is read whole, in part, and up to its end; an empty one has no bytes."""
        data = bytes(range(256)) * 41
        self._put(folder, tmp_path, "numbers", data)
        self._put(folder, tmp_path, "empty", b"")
        check_equal(
            self._again(folder).files(), {"numbers": len(data), "empty": 0}, "files(), names and sizes in bytes"
        )
        for offset, nbytes in ((0, len(data)), (0, 1), (255, 3), (len(data) - 1, 1), (7, len(data) - 7)):
            found = bytes(folder.read("numbers", offset, nbytes))
            check_equal(len(found), nbytes, f"number of bytes of read(name, {offset}, {nbytes})")
            check(found == data[offset : offset + nbytes], f"read(name, {offset}, {nbytes}): other bytes")
        check_equal(bytes(folder.read("numbers", len(data) - 5, 100)), data[-5:], "read beyond the end of an object")

    def test_an_upload_replaces_and_is_seen_at_once(self, folder: Any, tmp_path: Path) -> None:
        """Another opening of the folder, and this one, have the new object, and no cache of the old."""
        for data in (b"first", b"the second", b"3"):
            self._put(folder, tmp_path, "object", data)
            for each in (folder, self._again(folder)):
                check_equal(
                    each.files(), {"object": len(data)}, "files() after an upload in the place of another object"
                )
                check_equal(bytes(each.read("object", 0, len(data))), data, "read after an upload in its place")
        folder.delete("object")
        for each in (folder, self._again(folder)):
            check_equal(each.files(), {}, "files() after a delete")
            with expect_error(FileNotFoundError, "read of an object that was deleted"):
                each.read("object", 0, 1)

    def test_names(self, folder: Any, tmp_path: Path) -> None:
        """Names of checkpoints' files: with dots, at the beginning, too, underscores, signs that URLs escape."""
        names = [".metadata", "__0_1.distcp", "metadata.json", "a b+c%20d~e", "shardckpt.json"]
        for number, name in enumerate(names):
            self._put(folder, tmp_path, name, bytes([number]))
        check_equal(self._again(folder).files(), dict.fromkeys(names, 1), "files(), names as they were given to upload")
        found = [bytes(folder.read(name, 0, 1)) for name in names]
        check_equal(found, [bytes([number]) for number in range(len(names))], "read of each of these names")

    def test_folders(self, folder: Any, tmp_path: Path) -> None:
        """Objects in folders have paths for names; ``files`` has those directly below, ``tree`` all."""
        self._require(folder, HasFolders)
        for name in ("top", "a/one", "a/b/two", "c/three"):
            self._put(folder, tmp_path, name, name.encode())
        check_equal(folder.files(), {"top": 3}, "files(), only objects directly below the URL")
        check_equal(folder.tree(), {"top": 3, "a/one": 5, "a/b/two": 7, "c/three": 7}, "tree(), all, by path")
        check_equal(bytes(folder.read("a/b/two", 0, 7)), b"a/b/two", "read of a path")
        below: Any = open_folder(f"{folder.url}/a", get_plugin_manager())
        check_equal(below.files(), {"one": 5}, "files() of a folder below the URL, opened by its own URL")
        if _can(folder, ListsFolders):
            check_equal(sorted(folder.folders()), ["a", "c"], "folders(), those directly below")
        for name in ("a/one", "a/b/two"):
            folder.delete(name)
        if _can(folder, ListsFolders):
            for name in ("b", ""):
                (below if name else folder).remove_folder(name or "a")
            check_equal(folder.folders(), ["c"], "folders() after remove_folder")

    def test_threads(self, folder: Any, tmp_path: Path) -> None:
        """Eight threads upload, read and list at a time."""

        def work(number: int) -> bytes:
            path = tmp_path / str(number)
            path.write_bytes(bytes([number]) * 1000)
            folder.upload(f"object-{number}", path)
            folder.files()
            return bytes(folder.read(f"object-{number}", 10, 100))

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(work, range(32)))
        check(found == [bytes([number]) * 100 for number in range(32)], "read: bytes of another thread's object")

    def test_an_object_appears_whole(self, folder: Any, tmp_path: Path) -> None:
        """Who lists and reads while an object is replaced sees the old one or the new one, and no other size."""
        sizes = {4 * MIB, 5 * MIB}
        self._put(folder, tmp_path, "object", b"a" * (4 * MIB))
        is_done = threading.Event()

        def look() -> set[int]:
            other: Any = self._again(folder)
            seen: set[int] = set()
            while not is_done.is_set() or not seen:
                seen.add(other.files().get("object", -1))
            return seen

        with ThreadPoolExecutor(1) as thread:
            watcher = thread.submit(look)
            try:
                for size in (5, 4) * 5:
                    self._put(folder, tmp_path, "object", bytes([64 + size]) * (size * MIB))
            finally:
                is_done.set()
        seen = watcher.result()
        wrong = sorted(seen - sizes)
        check(not wrong, f"files(): sizes {wrong[:3]} while an object of {sorted(sizes)} bytes was replaced")

    def test_a_killed_upload(self, folder: Any, tmp_path: Path) -> None:
        """After a kill at any moment of an upload, the object is absent or whole."""
        if not self.outlives_processes:
            pytest.skip("outlives_processes is not claimed")
        path = tmp_path / "large"
        path.write_bytes(b"x" * (32 * MIB))
        name = "" if self.plugin is None else getattr(self.plugin, "__name__", type(self.plugin).__module__)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), PLUGINS: name}
        for delay in _DELAYS:
            child = subprocess.Popen(
                [sys.executable, "-c", _UPLOAD, folder.url, str(path)], stdout=subprocess.PIPE, env=environment
            )
            with child:
                said = b"" if child.stdout is None else child.stdout.readline()
                check(said == b"begin\n", "a process that imports the plugin cannot open the URL")
                time.sleep(delay)
                child.kill()
            sizes = self._again(folder).files()
            check(sizes.get("large") in (None, 32 * MIB), f"{sizes.get('large')} of {32 * MIB} bytes after a kill")

    def test_pickles(self, folder: Any, tmp_path: Path) -> None:
        """The folder can be pickled: background saves and loaders send it to other processes."""
        if not self.outlives_processes:
            pytest.skip("outlives_processes is not claimed")
        self._put(folder, tmp_path, "object", b"123")
        copied: Any = unpickle_trusted(pickle_value(folder))
        check_equal(copied.files(), {"object": 3}, "files() of a copy by pickle")

    def test_streamed_writes(self, folder: Any) -> None:
        """``open_write``: the object appears with ``close``, whole; after ``abort`` there is none."""
        self._require(folder, StreamsWrites)
        parts = [bytes([number]) * (5 * MIB) for number in range(3)] + [b"end"]
        for is_closed in (False, True):
            writer = folder.open_write("streamed", 5 * MIB)
            for part in parts:
                writer.write(part)
            check_equal(self._again(folder).files(), {}, "files() while an object is being written, or after abort()")
            (writer.close if is_closed else writer.abort)()
        whole = b"".join(parts)
        check_equal(self._again(folder).files(), {"streamed": len(whole)}, "files() after close() of a writer")
        check(bytes(folder.read("streamed", 0, len(whole))) == whole, "the object's bytes are not those of the parts")

    def test_conditional_writes(self, folder: Any) -> None:
        """``create`` and ``replace`` write if no other has, and else raise FileExistsError and change nothing."""
        self._require(folder, CreatesObjects)
        folder.create("claim", b"first")
        with expect_error(FileExistsError, "create of an object that is there"):
            folder.create("claim", b"second")
        check_equal(bytes(folder.read("claim", 0, 9)), b"first", "read after a create that was refused")
        self._require(folder, ReplacesObjects)
        data, tag = folder.read_tagged("claim")
        check_equal(bytes(data), b"first", "bytes of read_tagged")
        folder.replace("claim", b"third", tag)
        with expect_error(FileExistsError, "replace of an object that has changed since its tag"):
            folder.replace("claim", b"fourth", tag)
        check_equal(bytes(folder.read("claim", 0, 9)), b"third", "read after a replace that was refused")

    def test_fewer_requests(self, folder: Any, tmp_path: Path) -> None:
        """``delete_many``, ``read_into``, ``copy`` and ``times`` do the same as single requests."""
        self._put(folder, tmp_path, "one", b"0123456789")
        self._put(folder, tmp_path, "two", b"two")
        if _can(folder, ReadsInto):
            buffer = bytearray(4)
            check(folder.read_into("one", 3, memoryview(buffer)) == 4 and buffer == b"3456", "read_into: other bytes")
            check_equal(folder.read_into("one", 8, memoryview(buffer)), 2, "read_into, bytes up to the end")
        if _can(folder, TellsTimes):
            ages = [time.time() - written for written in folder.times().values()]
            check(all(abs(age) < 3600 for age in ages), f"times(): objects of now are {ages} seconds old")
        if _can(folder, CopiesObjects) and folder.copy(f"{folder.url}/one", "copied", 10):
            check_equal(bytes(folder.read("copied", 0, 10)), b"0123456789", "read after copy")
        if _can(folder, DeletesMany):
            folder.delete_many([*folder.files(), "absent"])
            check_equal(folder.files(), {}, "files() after delete_many")

    def test_a_checkpoint(self, folder: Any) -> None:
        """A save, a refused one, an overwrite, a load and an opening: only the newest values, whole."""
        url = f"{folder.url}/checkpoint" if _can(folder, HasFolders) else folder.url
        state: dict[str, Any] = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(1000.0)), "step": 1}
        dist_checkpointing.save(state, url)
        with expect_error(CheckpointingException, "a save over a checkpoint"):
            dist_checkpointing.save(state, url)
        loaded = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000))}, url)
        check_same(loaded["w"], torch.arange(1000.0), "the tensor")
        if not _can(folder, HasFolders):
            return
        state["w"].data.mul_(2)
        dist_checkpointing.save({**state, "step": 2}, url, overwrite=True)
        with dist_checkpointing.open_checkpoint(url) as checkpoint:
            check_same(checkpoint["w"][10:12], torch.tensor([20.0, 22.0]), "a slice of the tensor")
        check(dist_checkpointing.load_common_state_dict(url)["step"] == 2, "the common state is that of the first save")
