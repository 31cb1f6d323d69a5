"""File system calls with whole results: short writes and reads are gone on with, errors name file and offset."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import dist_checkpointing
from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.storage import filesystem
from shardckpt.storage.directory import open_directory
from shardckpt.storage.input_file import open_existing, read_file, read_joined
from tests.resources import list_open
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def limit_bytes(monkeypatch: pytest.MonkeyPatch, name: str, limit: int) -> None:
    """Let ``os.pwritev`` or ``os.preadv`` do at most ``limit`` bytes a call, as the system may."""
    call = getattr(os, name)

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        left, allowed = limit, []
        for buffer in buffers:
            allowed.append(buffer[: min(left, buffer.nbytes)])
            left -= allowed[-1].nbytes
        return call(fd, allowed, offset)

    monkeypatch.setattr(os, name, short)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A new file, open for writing."""
    path = tmp_path / "file"
    fd = filesystem.open_new(path)
    yield fd, path
    os.close(fd)


@given(content=st.binary(max_size=300), limit=st.integers(1, 20), offset=st.integers(0, 5))
def test_short_writes_are_gone_on_with(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, limit: int, offset: int
) -> None:
    """Whatever number of bytes a call writes, all bytes are in the file from the offset on."""
    path = tmp_path_factory.mktemp("short") / "file"
    with pytest.MonkeyPatch.context() as patch:
        limit_bytes(patch, "pwritev", limit)
        fd = filesystem.open_new(path)
        filesystem.write_all(fd, path, memoryview(content), offset)
        os.close(fd)
    assert path.read_bytes() == (bytes(offset) + content if content else b"")


@given(content=st.binary(min_size=1, max_size=60), limit=st.integers(1, 20), data=st.data())
def test_short_reads_into_several_buffers_are_gone_on_with(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, limit: int, data: st.DataObject
) -> None:
    """Whatever number of bytes a call reads, all buffers hold the file's bytes; if it ends before, an error says so."""
    sizes = data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=4))
    start = data.draw(st.integers(0, len(content)))
    path = tmp_path_factory.mktemp("short") / "file"
    path.write_bytes(content)
    buffers = [bytearray(size) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        limit_bytes(patch, "preadv", limit)
        ends_before = start + sum(sizes) > len(content)
        ending = pytest.raises(
            CorruptCheckpointError, match=rf"{path} ends at offset {len(content)}: \d+ bytes are missing"
        )
        with ending if ends_before else nullcontext(), open_existing(path) as file:
            read_joined(file, [*map(memoryview, buffers)], start)
    assert ends_before or b"".join(buffers) == content[start : start + sum(sizes)]


def test_no_progress(tmp_path: Path) -> None:
    """A write that makes no progress is an error, not an endless loop."""
    path = tmp_path / "file"
    fd = filesystem.open_new(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(StorageError, match=f"cannot write at offset 7 of {path}: .*nothing"):
            filesystem.write_all(fd, path, memoryview(b"abc"), 7)
    os.close(fd)


def failing_after(call: Any, times: int, code: int) -> Any:
    """The call, which fails from the given time on."""
    count = [0]

    def wrapped(*args: Any) -> Any:
        count[0] += 1
        if count[0] > times:
            raise OSError(code, os.strerror(code))
        return call(*args)

    return wrapped


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_write_error(opened: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A failed write names the file, the offset that was reached, and the system's reason."""
    fd, path = opened
    limit_bytes(monkeypatch, "pwritev", 4)
    monkeypatch.setattr(os, "pwritev", failing_after(os.pwritev, 2, code))
    name = errno.errorcode[code]
    with pytest.raises(StorageError, match=rf"cannot write at offset 18 of {path}: .* \({name}\)"):
        filesystem.write_all(fd, path, memoryview(bytes(100)), 10)


def test_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed read names the file, the offset that was reached, and the system's reason."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    limit_bytes(monkeypatch, "preadv", 4)
    monkeypatch.setattr(os, "preadv", failing_after(os.preadv, 2, errno.EIO))
    with (
        open_existing(path) as file,
        pytest.raises(StorageError, match=rf"cannot read at offset 18 of {path}: Input/output error \(EIO\)"),
    ):
        file.read_into(memoryview(bytearray(50)), 10)


def test_new_files_are_new(tmp_path: Path) -> None:
    """A file that is there is never opened for writing, not even through a link; modes follow the umask."""
    path, link = tmp_path / "file", tmp_path / "link"
    before = os.umask(0o027)
    os.close(filesystem.open_new(path))
    os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    link.symlink_to(tmp_path / "elsewhere")
    for taken in (path, link):
        with pytest.raises(StorageError, match=rf"cannot create {taken}: .* \(EEXIST\)"):
            filesystem.open_new(taken)
    assert not (tmp_path / "elsewhere").exists()


@table("kind", ["link", "pipe", "directory", "device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """Links, pipes, directories and devices are refused by name, at once."""
    path = tmp_path / "file"
    if kind == "link":
        (tmp_path / "real").write_bytes(b"x")
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = Path("/dev/null")
    with pytest.raises((CorruptCheckpointError, StorageError), match=str(path)):
        open_existing(path)


def test_a_link_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """A file behind a symbolic link is refused with the cause and what to do, not with the system's ELOOP."""
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "file").symlink_to("real")
    with pytest.raises(StorageError, match=rf"{tmp_path / 'file'}: it is a symbolic link, .* outside .* `cp -rL`"):
        read_file(tmp_path / "file", 10)


def test_descriptors_are_closed(tmp_path: Path) -> None:
    """Refused files leave no descriptor open."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    for _ in range(20):
        with pytest.raises(CorruptCheckpointError):
            open_existing(tmp_path)
        with pytest.raises(CorruptCheckpointError, match=f"{path} has 100 bytes, more than the 99"):
            read_file(path, 99)
        assert read_file(path, 100) == bytes(100)
    assert list_open(tmp_path) == []


@given(st.text(max_size=300))
def test_names_stay_inside(name: str) -> None:
    """A name is refused or is a path of letters, digits and a few signs that stays below any directory."""
    try:
        filesystem.check_file_name(name)
    except CorruptCheckpointError:
        return
    assert name.isascii()
    assert os.path.normpath(f"/root/dir/{name}") == f"/root/dir/{name}"
    assert name


_REFUSED = ["", ".", "..", "/a", "a\\b", "a\n", "a\0", "ä", "a b", "x" * 256, "~", "C:x"]
_PATHS = ["a/", "/", "a//b", "./a", "a/.", "a/..", "../a", "a/../b", "a/..\n", "a/x y/b", "C:/x", "a/\\b", "a/\0"]
_LONG = [f"a/{'x' * 256}/b", "/".join("a" * 33), "/".join(["x" * 255] * 4 + ["y"])]


@table("name", [*_REFUSED, *_PATHS, *_LONG])
def test_names_that_are_refused(name: str) -> None:
    """Paths that lead elsewhere, control signs, blanks, foreign letters, and names too long or deep are refused."""
    with pytest.raises(CorruptCheckpointError, match="is not allowed in a checkpoint"):
        filesystem.check_file_name(name)


_TREES = ["c/0/0", "layers.0.weight/zarr.json", "d/...", "/".join("a" * 32), "/".join(["x" * 255] * 4)]


@table("name", [".metadata", "__0_0.distcp", "common.pt", "x" * 255, "...", "-", *_TREES])
def test_names_that_are_allowed(name: str) -> None:
    """Every name that a known format uses is allowed."""
    assert filesystem.check_file_name(name) == name


def test_folders_are_made_and_none_is_a_link(tmp_path: Path) -> None:
    """Folders on the way to a file are made, also twice; in the place of one stands no link and no file."""
    filesystem.make_folders(tmp_path / "staging", "file")
    assert not (tmp_path / "staging").exists()
    for _ in range(2):
        filesystem.make_folders(tmp_path, "a/b/c")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").touch()
    (tmp_path / "a" / "link").symlink_to(tmp_path)
    for folder in ("file", "a/link"):
        with pytest.raises(StorageError, match=rf"cannot create the folder {tmp_path / folder}: .* \(EEXIST\)"):
            filesystem.make_folders(tmp_path, f"{folder}/inner/x")
    assert not (tmp_path / "inner").exists()


def test_a_close_that_fails_takes_no_bytes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of a file is what it has, whatever its close says."""
    (tmp_path / "file").write_bytes(b"all")

    def fail(fd: int, close: Callable[[int], None] = os.close) -> None:
        close(fd)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", fail)
        content = read_file(tmp_path / "file", 10)
    assert content == b"all"
    assert list_open(tmp_path) == []


def test_a_tree_is_synced_from_its_innermost_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is durable before the name of it, and links to folders are not followed."""
    synced: list[str] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path)))
        fsync(fd)

    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path.parent)
    monkeypatch.setattr(os, "fsync", watched)
    filesystem.sync_tree(tmp_path)
    assert sorted(synced) == sorted([".", "a", "a/b", "a/b/c", "d"])
    assert synced[-1] == "."
    assert synced.index("a/b/c") < synced.index("a/b") < synced.index("a")
    with pytest.raises(StorageError, match=r"cannot list .*gone: .* \(ENOENT\)"):
        filesystem.sync_tree(tmp_path / "gone")


def test_sync_directory(tmp_path: Path) -> None:
    """Syncing a directory that is none is an error that names it; descriptors are closed."""
    filesystem.sync_directory(tmp_path)
    with pytest.raises(StorageError, match=rf"cannot sync the directory {tmp_path / 'gone'}: .* \(ENOENT\)"):
        filesystem.sync_directory(tmp_path / "gone")
    assert list_open(tmp_path) == []


def test_a_file_system_that_cannot_fsync_directories_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where fsync of a directory is EINVAL, a save commits, and one warning says what a power cut may do."""
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr("shardckpt.errors._warned", set())
    dist_checkpointing.save({"a": 1}, tmp_path / "checkpoint")
    assert dist_checkpointing.load({}, tmp_path / "checkpoint") == {"a": 1}
    assert caplog.text.count("cannot fsync directories") == 1


def test_what_cannot_be_looked_at_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without a name or a folder is absent, a link to nowhere is there; any other error of a look is raised."""
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()
    opened = open_directory(tmp_path)
    for folder in (tmp_path, opened):
        assert filesystem.is_there(folder / "link")
        assert not any(filesystem.is_there(folder / name) for name in ("gone", "gone/file", "file/below"))
    with pytest.raises(StorageError, match="ENAMETOOLONG"):
        filesystem.is_there(tmp_path / ("x" * 300))

    for code in (errno.EIO, errno.EACCES, errno.ESTALE):

        def fail(_: Path, code: int = code) -> NoReturn:
            raise OSError(code, os.strerror(code))

        for folder in (tmp_path, opened):
            monkeypatch.setattr(type(folder), "lstat", fail)
            with pytest.raises(StorageError, match=rf"cannot access {tmp_path}/file: .*\({errno.errorcode[code]}\)"):
                filesystem.is_there(folder / "file")
