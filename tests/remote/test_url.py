from __future__ import annotations

import threading
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, NotACheckpointError, StorageError
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manager import list_checkpoints
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins.hookspecs import hookimpl
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from tests import backends
from tests.damage import flip
from tests.plugged import registered
from tests.remote import jobs
from tests.remote.url import memory
from tests.states import entire
from tests.tables import in_proof, table
from tests.trees import SaveTree

if TYPE_CHECKING:
    from tests.backends import Backend
    from tests.ranks import Ranks
    from tests.remote.store import Store

__all__ = ["memory"]  # fixtures


def _is_data(name: str) -> bool:
    """Whether an object is a data file."""
    return fnmatch(name.rpartition("/")[2], backends.current().data_files)


@backends.both
@pytest.mark.parametrize("world_size", [0, 2, *in_proof(4)])
def test_a_save_to_a_url_loads_with_any_number_of_ranks(
    ranks: Ranks, store: Store, backend: Backend, world_size: int
) -> None:
    """What 0, 2 or 4 ranks save to a URL, 3 ranks and this process alone load, bit for bit, queries included."""
    if world_size:
        ranks.run(world_size, jobs.save, store.url, 2.0)
    else:
        jobs.save(store.url, 2.0)
    assert store.names() == backend.shared | {backend.data_file(rank) for rank in range(max(1, world_size))}
    assert store.requests("put")[-1].name == "metadata.json"
    ranks.run(3, jobs.check, store.url, 2.0)
    jobs.check(store.url, 2.0)
    assert torch.equal(dc.load_plain_tensors(store.url)["weight"], jobs.whole(2.0))
    assert dc.load_common_state_dict(store.url)["iteration"] == 2
    assert dc.load_content_metadata(store.url) == {"value": 2.0}
    assert set(dc.load_tensors_metadata(store.url)) == {"weight", "bias"}
    assert dc.check_is_distributed_checkpoint(store.url)
    assert not dc.check_is_distributed_checkpoint(f"{store.url}/d")


@backends.both_in_proof
def test_a_process_without_a_group_saves_to_memory(memory: str, backend: Backend) -> None:
    """``memory://`` works as any other protocol; a slash at the end changes nothing."""
    jobs.save(f"{memory}/", 5.0)
    jobs.check(memory, 5.0)
    names = fsspec.filesystem("memory").ls("/bucket/folder/c", detail=False)
    assert {name.rpartition("/")[2] for name in names} == backend.shared | {backend.data_file(0)}


@backends.both_in_proof
def test_an_asynchronous_filesystem_is_used_like_any_other(tmp_path: Path, backend: Backend) -> None:
    """Fsspec's asynchronous filesystems, which have an event loop in a thread of theirs, serve too."""
    jobs.save(f"looped://{tmp_path}/c", 5.0)
    jobs.check(f"looped://{tmp_path}/c", 5.0)
    (tmp_path / "c" / backend.common).unlink()
    with pytest.raises(StorageError, match=rf"cannot open looped:.*{backend.common}"):
        jobs.check(f"looped://{tmp_path}/c", 5.0)
    assert "fsspecIO" in {thread.name for thread in threading.enumerate()}


@backends.both
def test_a_slice_is_read_by_ranges(store: Store) -> None:
    """A load of an eighth of a tensor takes about an eighth of its bytes out of the store, and no file as a whole."""
    rows, columns = 64, 128 << 10
    values = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", values)}, store.url)
    nbytes = values.numel() * 4
    assert max(request.nbytes for request in store.requests("put")) > nbytes
    store.forget()
    wanted = ShardedTensor("w", None, values.dtype, (8, columns), (rows, columns), (16, 0), None)
    assert torch.equal(dc.load({"w": wanted}, store.url, validate_access_integrity=False)["w"], values[16:24])
    data = [request for request in store.requests("read") if _is_data(request.name)]
    assert nbytes // 8 <= sum(request.nbytes for request in data) < nbytes // 8 + nbytes // 16
    assert len(store.requests("list")) == 1


@backends.both_in_proof
def test_requests_are_few(store: Store) -> None:
    """Small tensors that lie side by side are one request, a large one a request for every 16 MiB."""

    def state(fill: float) -> dict[str, ShardedTensor]:
        tensors = {f"small{number}": torch.full((100,), fill) for number in range(200)}
        tensors["large"] = torch.full((8 << 20,), fill)
        return entire(tensors)

    dc.save(state(3.0), store.url)
    store.forget()
    loaded = dc.load(state(0.0), store.url)
    assert all(bool((tensor == 3.0).all()) for tensor in loaded.values())
    assert sum(_is_data(request.name) for request in store.requests("read")) <= 5


@backends.both_in_proof
def test_shards_are_read_at_the_same_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads from several files go on in as many threads as SHARDCKPT_REMOTE_THREADS says, small ones too."""
    keys = "abcd"
    saver = backends.current().save_strategy(thread_count=len(keys))
    dc.save({key: ShardedTensor.from_rank_offsets(key, torch.ones(9)) for key in keys}, store.url, saver)
    monkeypatch.setenv(settings.REMOTE_THREADS, "4")
    together = threading.Barrier(len(keys), timeout=20)
    original = jobs.store.FaultyFileSystem.cat_file

    def waiting(self: Any, path: str, **span: int) -> bytes:
        if _is_data(path):
            together.wait()
        return original(self, path, **span)

    monkeypatch.setattr(jobs.store.FaultyFileSystem, "cat_file", waiting)
    loaded = dc.load({key: ShardedTensor.from_rank_offsets(key, torch.zeros(9)) for key in keys}, store.url)
    assert all(torch.equal(loaded[key], torch.ones(9)) for key in keys)


@table("version", ["0.9.0", "0.20.0"])
def test_foreign_checkpoints_load_from_a_url(version: str) -> None:
    """What Megatron saved, in any dialect, loads from a URL as it does from a directory."""
    directory = Path(__file__).parents[1] / "golden" / f"mcore-{version}"
    found, expected = dc.load_plain_tensors(f"local://{directory}"), dc.load_plain_tensors(directory)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert dc.load_common_state_dict(f"local://{directory}") == dc.load_common_state_dict(directory)


def test_plain_dcp_is_recognised_at_a_url(store: Store) -> None:
    """A directory of torch.distributed.checkpoint, which has no metadata.json, is recognised by its objects."""
    torch.distributed.checkpoint.save({"w": torch.arange(5)}, checkpoint_id=store.objects)
    assert torch.equal(dc.load_plain_tensors(store.url)["w"], torch.arange(5))
    assert not dc.check_is_distributed_checkpoint(store.url)


@backends.both_in_proof
def test_verify_reads_a_url(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """``shardckpt verify URL`` says as written, or names the object that is damaged, cut or missing."""
    jobs.save(store.url, 2.0, verify_integrity=True)
    assert main(["verify", store.url]) == 0
    assert "as written" in capsys.readouterr().out
    data = store.objects / backends.data_file(0)
    original = data.read_bytes()
    for spoilt in (original[:5000] + bytes([original[5000] ^ 1]) + original[5001:], original[:-1], None):
        data.write_bytes(spoilt) if spoilt is not None else data.unlink()
        assert main(["verify", store.url]) == 1
        said = capsys.readouterr().out
        assert backends.data_file(0) in said
        assert f"{store.url}: damaged: 1 of " in said
        faults = {result.name for result in verify_checkpoint(store.url) if result.fault}
        assert faults == {backends.data_file(0)}


@backends.both_in_proof
def test_a_load_with_verify_integrity_checks_a_url(ranks: Ranks, store: Store, backend: Backend) -> None:
    """``load(..., verify_integrity=True)`` reads and checks every object, and raises the same on all ranks."""
    jobs.save(store.url, 2.0, verify_integrity=True)
    ranks.run(2, partial(jobs.check, verify_integrity=True), store.url, 2.0)
    name = min(backend.for_others, default=backend.index)  # also what a load does not read
    flip(store.objects / name)
    errors = ranks.run(2, partial(jobs.error_of, verify_integrity=True), jobs.check, store.url, 2.0)
    assert len(set(errors)) == 1
    assert errors[0][0] == "CorruptCheckpointError"
    assert f"{store.url}/{name}" in errors[0][1]


@backends.both
def test_damage_at_a_url_is_found_by_every_load(store: Store) -> None:
    """Changed bytes, a cut object and a missing one are errors that name the object, as they are for files."""
    jobs.save(store.url, 2.0)
    name = backends.data_file(0)
    original = (store.objects / name).read_bytes()
    flip(store.objects / name)
    with pytest.raises(CorruptCheckpointError, match=rf"{name} are not those that were written"):
        jobs.check(store.url, 2.0)
    (store.objects / name).write_bytes(original[:-9])
    with pytest.raises(CorruptCheckpointError, match=rf"{name}: it has {len(original) - 9} bytes"):
        jobs.check(store.url, 2.0)
    (store.objects / name).unlink()
    with pytest.raises(StorageError, match=rf"cannot open faulty:.*{name}: No such file or directory \(ENOENT\)"):
        jobs.check(store.url, 2.0)
    (store.objects / "shardckpt.json").write_bytes(b"{")
    with pytest.raises(CorruptCheckpointError, match=r"faulty:.*shardckpt\.json is damaged"):
        jobs.check(store.url, 2.0)


@backends.both_in_proof
def test_an_object_that_ends_early_is_a_short_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no digests to tell, an object that is shorter than its listing says is an error."""
    jobs.save(store.url, 2.0)
    (store.objects / "shardckpt.json").unlink()
    whole = jobs.store.FaultyFileSystem.cat_file
    monkeypatch.setattr(
        jobs.store.FaultyFileSystem, "cat_file", lambda *a, **k: b"" if k["start"] > 9000 else whole(*a, **k)
    )
    with pytest.raises(
        CorruptCheckpointError, match=rf"{backends.data_file(0)} ends at offset \d+: \d+ bytes are missing"
    ):
        jobs.check(store.url, 2.0)


@backends.both_in_proof
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_url_that_has_objects_is_refused(ranks: Ranks, store: Store, overwrite: bool) -> None:
    """A checkpoint is replaced with overwrite=True alone, and objects that are no checkpoint never."""
    jobs.save(store.url, 1.0)
    if overwrite:  # of another library: nothing says which objects are its own
        (store.objects / "shardckpt.json").unlink()
    before = {path.name: path.read_bytes() for path in store.objects.iterdir()}
    error_of = partial(jobs.error_of, overwrite=overwrite)
    errors = ranks.run(2, error_of, jobs.save, store.url, 2.0)
    assert len(set(errors)) == 1
    assert errors[0][0] == "StorageError"
    assert f"{store.url} {'has a checkpoint of another' if overwrite else 'is not empty'}" in errors[0][1]
    assert "give another URL" in errors[0][1]
    assert {path.name: path.read_bytes() for path in store.objects.iterdir()} == before
    (store.objects / "metadata.json").unlink()
    errors = ranks.run(2, error_of, jobs.save, store.url, 2.0)
    assert len(set(errors)) == 1
    assert f"{store.url} is not empty" in errors[0][1]
    assert store.names() == set(before) - {"metadata.json"}


@backends.both_in_proof
def test_what_a_store_cannot_do_is_refused(store: Store) -> None:
    """Removing keys at a URL is refused with the reason, and a migration of what is the newest; nothing changes."""
    jobs.save(store.url, 1.0)
    with pytest.raises(CheckpointingException, match=r"cannot take keys out of faulty:.*several objects in one step"):
        dc.remove_sharded_tensors(store.url, "weight")
    assert main(["migrate", store.url, f"{store.url}-new"]) == 2
    jobs.check(store.url, 1.0)


@table(
    "call",
    [
        *("ls {0}", "inspect {0}", "diff {0} {0}", "verify {0}", "export {0} new", "convert {0} new", "pin {0}"),
        *("merge {0} {0} new", "migrate {0} new", "prune {0}", "prune {0} --keep-latest 2"),
    ],
)
def test_a_url_without_objects_names_the_nearest(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step and a run that are misspelt are asked about by every verb, as on a disk."""
    monkeypatch.chdir(tmp_path)
    root = f"memory://{tmp_path.name}"
    jobs.save(f"{root}/run/step-10", 1.0)
    for url, near in ((f"{root}/run/step-11", "step-10"), (f"{root}/rum", "run")):
        assert main(call.format(url).split()) == 2
        assert f"{url} does not exist, or has no objects (did you mean {near}? in {root}" in capsys.readouterr().err


def test_an_unknown_scheme_names_what_to_install(tmp_path: Path) -> None:
    """A URL that nobody serves names the scheme, the plugins that are there and what to install."""
    with pytest.raises(StorageError, match=r"serves nowhere:// \(plugins that serve URLs: fsspec") as caught:
        dc.load({}, "nowhere://bucket/c")
    assert "pip install 'shardckpt[fsspec]'" in str(caught.value)
    assert "'shardckpt[msc]'" in str(caught.value)
    with pytest.raises(StorageError, match="serves nowhere://"):
        dc.check_is_distributed_checkpoint("nowhere://bucket/c")
    with pytest.raises(StorageError, match=r"gdrive://bucket/c: fsspec has no package for gdrive:// \(.*gdrive"):
        jobs.save("gdrive://bucket/c", 1.0)
    with pytest.raises(NotACheckpointError, match="memory://nobody/c does not exist"):
        dc.load({}, "memory://nobody/c")


@backends.both_in_proof
def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    """``file://`` URLs name local directories, escapes included, with all that those can do."""
    path = tmp_path / "with space"
    jobs.save(path.as_uri(), 1.0)
    assert (path / "metadata.json").is_file()
    jobs.save(f"file://localhost{path.as_uri().removeprefix('file://')}", 2.0, overwrite=True)
    jobs.check(str(path), 2.0)
    with pytest.raises(StorageError, match="another machine, elsewhere"):
        dc.load({}, "file://elsewhere/c")


def test_passwords_are_not_shown() -> None:
    """A URL's password stands in no error."""
    with pytest.raises(StorageError, match=r"cannot open nowhere://user:\*\*\*@host/c") as caught:
        dc.load({}, "nowhere://user:secret@host/c")
    assert "secret" not in str(caught.value)


def test_a_url_that_pathlib_has_cut_is_no_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Path("s3://bucket/c")`` is an error, not a local directory ``s3:``; one that is there is used."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageError, match="s3:/bucket/c looks like a URL that lacks a slash: give s3://bucket/c,"):
        jobs.save(Path("s3://bucket/c"), 1.0)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    (tmp_path / "s3:").mkdir()
    jobs.save("s3:/bucket/c", 1.0)
    jobs.check("./s3:/bucket/c", 1.0)


class _Dictionary:
    """A RemoteFolder that is no fsspec."""

    def __init__(self, url: str, objects: dict[str, bytes]) -> None:
        self.url = url
        self._objects = objects

    def files(self) -> dict[str, int]:
        return {name: len(data) for name, data in self._objects.items()}

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self._objects[name][offset : offset + nbytes]

    def upload(self, name: str, path: Path) -> None:
        self._objects[name] = path.read_bytes()

    def delete(self, name: str) -> None:
        del self._objects[name]


class _Plugin:
    """Serves dict://."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    @hookimpl
    def shardckpt_filesystem(self, url: str) -> _Dictionary | None:
        return _Dictionary(url, self.objects) if url.startswith(("dict://", "memory://")) else None


@backends.both_in_proof
def test_another_plugin_serves_urls_by_the_same_door(backend: Backend) -> None:
    """A plugin with four methods serves a scheme, also one that the built-in plugin serves too."""
    with registered(_Plugin()) as plugin:
        jobs.save("dict://user:secret@here/c", 3.0)
        jobs.check("memory://bucket/elsewhere", 3.0)
        del plugin.objects[backend.common]
        with pytest.raises(CheckpointingException, match=rf"dict://user:\*\*\*@here/c/{backend.common}"):
            jobs.check("dict://user:secret@here/c", 3.0)
    assert set(plugin.objects) == (backend.shared | {backend.data_file(0)}) - {backend.common}


def _save_tree_in_background(url: str, value: float) -> None:
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(dc.save(jobs.state(value), url, SaveTree(), async_sharded_save=True))


@table("save", [partial(jobs.save, sharded_strategy=SaveTree()), _save_tree_in_background])
def test_a_plugin_that_knows_no_folders_refuses_a_tree(save: Any) -> None:
    """A store whose plugin lists no objects in folders is not given any: the error says so, and nothing is left."""
    with registered(_Plugin()) as plugin:
        kind, text = jobs.error_of(save, "dict://c", 1.0)
    assert kind == "StorageError"
    assert "dict://c cannot have 'arrays/bias/c/0/0'" in text
    assert "_Dictionary lacks the method of shardckpt.storage.HasFolders" in text
    assert plugin.objects == {}


def test_schemes_are_equal_in_any_case(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``MEMORY://`` is ``memory://``, and ``File://`` a path: for saves, loads, the manager and the command."""
    upper = memory.replace("memory", "MEMORY")
    jobs.save(upper, 5.0)
    jobs.check(memory, 5.0)
    jobs.check(upper.replace("MEMORY", "Memory"), 5.0)
    folder = upper.rpartition("/")[0]
    assert main(["ls", folder]) == 0
    assert "1 checkpoint, 1 whole" in capsys.readouterr().out
    assert [each.path for each in list_checkpoints(folder)] == [memory]
    assert main(["verify", upper]) == 0
    jobs.save(f"FILE://{tmp_path}/c", 5.0)
    jobs.check(str(tmp_path / "c"), 5.0)


def test_a_plugin_gets_the_scheme_in_lower_case() -> None:
    """Of each part of a URL that chains two, and of nothing else in it."""

    class Plugin:
        asked: ClassVar[list[str]] = []

        @hookimpl(tryfirst=True)
        def shardckpt_filesystem(self, url: str) -> None:
            self.asked.append(url)

    with registered(Plugin()) as plugin:
        for url in ("S3A://Bucket/Path://C", "SimpleCache::MEMORY://A::B", "zip://In/Side::Memory://A"):
            with suppress(CheckpointingException):
                open_folder(url, get_plugin_manager())
    assert plugin.asked == ["s3a://Bucket/Path://C", "simplecache::memory://A::B", "zip://In/Side::memory://A"]
