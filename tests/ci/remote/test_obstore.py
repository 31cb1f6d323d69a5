from __future__ import annotations

import os
import pickle
import shutil
import socket
import sys
import threading
from contextlib import suppress
from subprocess import run
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.cli import main
from shardckpt.errors import StorageError
from shardckpt.integrations.fsspec.folder import FsspecFolder
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import CheckpointWriter, RemotePath
from shardckpt.storage.remote import attempt
from tests import backends, programs
from tests.remote import jobs
from tests.remote.obstore import MIB, folder, url
from tests.remote.servers import BUCKET, request, variables

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks

__all__ = ["folder", "url"]  # fixtures


def _on_server(endpoint: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a rank that knows of the server."""
    os.environ.update(variables(endpoint))
    return function(*args)


def _find(url: str) -> ObstoreFolder:
    return open_folder(url, get_plugin_manager())  # type: ignore[return-value]


def _uploads(endpoint: str) -> int:
    """How many multipart uploads have begun, and are neither complete nor aborted."""
    return request(endpoint, "GET", f"{BUCKET}?uploads").count("<Upload>")


@backends.both
def test_ranks_stream_to_s3(ranks: Ranks, url: str, endpoint: str, backend: backends.Backend) -> None:
    """What 2 ranks save to S3, 3 ranks and this process load, bit for bit; the marker makes it a checkpoint."""
    ranks.run(2, _on_server, endpoint, jobs.save, url, 2.0)
    assert set(_find(url).tree()) == backend.shared | {backend.data_file(rank) for rank in range(2)}
    ranks.run(3, _on_server, endpoint, jobs.check, url, 2.0)
    jobs.check(url, 2.0, verify_integrity=False)
    with pytest.raises(StorageError, match="is not empty"):
        jobs.save(url, 3.0)
    jobs.check(url, 2.0)


@backends.both
@pytest.mark.parametrize("persistent", [False, True])
def test_a_background_save_streams(ranks: Ranks, url: str, endpoint: str, persistent: bool) -> None:
    """A save behind the training, in a thread or a process of its own, streams as one in the foreground does."""
    ranks.run(2, _on_server, endpoint, jobs.save_in_background, url, 2.0, persistent)
    jobs.check(url, 2.0)


def test_large_objects_are_sent_in_parts(url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of more than one part is a multipart upload of parts as large as SHARDCKPT_REMOTE_PART_MIB says."""
    monkeypatch.setenv(settings.REMOTE_PART_MIB, "5")
    values = torch.arange(3 * MIB, dtype=torch.float32)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", values)}, url)
    key = f"{url.removeprefix('s3://')}/{backends.data_file(0)}"
    assert '-3"' in request(endpoint, "GET", f"{BUCKET}?prefix={key.partition('/')[2]}").replace("&quot;", '"')
    loaded = dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros_like(values))}, url)
    assert torch.equal(loaded["w"], values)
    assert _uploads(endpoint) == 0


def test_a_failed_save_leaves_no_object_and_no_parts(
    url: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that fails after its first parts were sent appears nowhere, and its parts are deleted."""
    monkeypatch.setenv(settings.REMOTE_PART_MIB, "5")

    def fail() -> list[memoryview]:
        raise ValueError("no more bytes")

    found = _find(url)
    with CheckpointWriter(tmp_path, 0, store=found) as writer:
        file = writer.create("data.bin")
        file.append(20 * MIB, lambda: [memoryview(bytearray(20 * MIB))], what="w")
        assert _uploads(endpoint) == 1
        with pytest.raises(ValueError, match="no more bytes"):
            file.append(9, fail, what="x")
    assert _uploads(endpoint) == 0
    assert found.tree() == {}
    assert not list(tmp_path.iterdir())


def test_the_pickle_of_a_folder_has_no_secret(url: str) -> None:
    """A pickled folder is its URL: credentials come from the environment of the process that opens it."""
    found = _find(url)
    assert b"a-secret" not in pickle.dumps(found)
    assert "a-secret" not in repr(vars(found))
    assert pickle.loads(pickle.dumps(found)).files() == {}


def test_a_fork_is_refused() -> None:
    """A child that was forked after obstore was used gets an error that says what to do, instead of hanging."""
    done = programs.run(
        """
import os
from obstore.store import MemoryStore
from shardckpt.integrations.obstore.folder import ObstoreFolder
folder = ObstoreFolder("objects://b", MemoryStore(), "")
folder.files()
if not (pid := os.fork()):
    try:
        folder.files()
    except Exception as exc:
        print(exc, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    )
    assert "in a fork of process" in done.stdout, done.stderr
    assert "spawn or forkserver" in done.stdout


def test_which_client_serves_a_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Obstore serves s3, gs and az where it is installed; fsspec all else, and those where obstore is switched off."""
    assert isinstance(_find(url), ObstoreFolder)
    assert isinstance(_find("memory://b/c"), FsspecFolder)
    program = "import sys\nfrom shardckpt import dist_checkpointing as dc\ndc.load({}, 's3://b/c')"
    done = programs.run(program, environment={settings.DISABLED_PLUGINS: "obstore"})
    assert "fsspec has no package for s3://" in done.stderr or "s3fs" in done.stderr


_SAVE = """
import sys
import torch
from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor
from shardckpt_ep import EPSaveStrategy
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from shardckpt_torch_dist import TorchDistSaveShardedStrategy
url, mib = sys.argv[1], int(sys.argv[2])
def state():
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(mib << 18)), "iteration": 7}
for kind in (TorchDistSaveShardedStrategy, SafetensorsSaveShardedStrategy, EPSaveStrategy):
    dc.save(state(), f"{url}-{kind.__name__}", kind())
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: it counts the writes to files")
def test_a_save_to_s3_writes_no_byte_to_local_disk(url: str, tmp_path: Path) -> None:
    """Saves of each built-in strategy to S3 write to sockets and pipes, and create no file."""
    trace = tmp_path / "trace"
    calls = "trace=write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,openat,open,creat"
    tracing = f"strace -f --seccomp-bpf -y -s 8 -o {trace} -e {calls}".split()
    command = [*tracing, sys.executable, "-c", _SAVE, url, "20"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", settings.REMOTE_PART_MIB: "5"}
    done = run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    # tempfile tries a directory by these bytes, and removes them, before it names the directory of the process
    lines = [line for line in trace.read_text().splitlines() if '"blat"' not in line and " resumed>" not in line]
    writes = [line for line in lines if "write" in line.partition("(")[0]]
    assert any("socket:" in line for line in writes)
    logs = ("<pipe:", "<socket:", "<TCP", "<anon_inode:", "<UNIX", "</dev/")
    assert not [line for line in writes if not any(kind in line for kind in logs)]
    created = [line for line in lines if "O_CREAT" in line and "= -1" not in line and '"/dev/' not in line]
    assert len(created) <= 1  # tempfile's


def test_objects_that_no_checkpoint_has_stop_nothing(
    url: str, endpoint: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """An object with an empty part or dots in its key, beside steps or in one, stops no save, load, prune or list."""
    folder = url.rpartition("/")[0]

    def train(step: int) -> tuple[bool, list[int]]:
        config = CheckpointConfig(folder=folder, interval=1)
        with CheckpointManager(config, {"model": torch.nn.Linear(2, 2)}) as manager:
            loaded = manager.load()
            manager.save(step)
            return loaded, manager.steps()

    assert train(1) == (False, [1])
    for key in ("/notes.txt", "/", "step-1//b", "step-1/../c", ".shardckpt-marks//d"):
        request(endpoint, "PUT", f"{folder.removeprefix('s3://')}/{key}")
    caplog.clear()
    assert train(2) == (True, [1, 2])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said))  # once for each folder
    assert any(folder in text and "remove the object" in text for text in said)
    assert dc.load_plain_tensors(f"{folder}/step-1").keys() == {"model.weight", "model.bias"}
    assert main(["ls", folder]) == 0
    assert "2 checkpoints, 2 whole" in capsys.readouterr().out
    assert main(["prune", folder]) == 0
    assert train(3) == (True, [1, 2, 3])


def test_a_request_that_hangs_is_not_repeated_by_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes connections and never answers gets as many as SHARDCKPT_REMOTE_ATTEMPTS says, not squared."""
    taken: list[socket.socket] = []
    monkeypatch.setenv(settings.REMOTE_TIMEOUT, "1")
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "2")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            with suppress(OSError):  # it is closed
                while True:
                    taken.append(server.accept()[0])

        for name, value in variables(f"http://127.0.0.1:{server.getsockname()[1]}").items():
            monkeypatch.setenv(name, value)
        thread = threading.Thread(target=take)
        thread.start()
        try:
            folder_there = open_folder(f"s3://{BUCKET}/hangs", get_plugin_manager())
            with pytest.raises(StorageError, match=r"in 2 attempts"):
                attempt("list", RemotePath(folder_there), folder_there.files)
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    for each in taken:
        each.close()
    assert len(taken) == 2
