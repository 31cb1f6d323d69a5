"""``shardckpt prune URL`` and a manager on S3: what a killed save has left goes, what lives or is whole stays."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from s3fs import S3FileSystem

from shardckpt import errors, settings
from shardckpt.cli import main
from shardckpt.integrations import multipart
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import RemotePath
from shardckpt.storage.remote import list_objects
from tests import programs
from tests.commit import owners
from tests.remote import jobs
from tests.remote.servers import BUCKET, request
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

#: A save that stops when all its files are there, and the marker is to be written.
_SAVE = """
import sys, time
from shardckpt.commit.upload import Upload
from tests.remote import jobs

def stop(upload, *args, **options):
    stream = upload.target.folder.open_write("large", 5 << 20)
    for _ in range(5):  # at least one is on its way then
        stream.write(memoryview(bytes(5 << 20)))
    while not upload.target.folder.uploads():
        time.sleep(0.1)
    print("stopped", flush=True)
    time.sleep(600)

Upload.commit = stop
jobs.save(sys.argv[1], 2.0)
"""


def _list(url: str) -> dict[str, int]:
    return list_objects(open_folder(url, get_plugin_manager()))  # type: ignore[arg-type]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("by", ["prune", *in_proof("manager")])
def test_only_what_a_killed_save_left_is_removed(
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    by: str,
) -> None:
    """A save that stands keeps its objects while its process lives; once it is killed all of them go, nothing else."""
    root = f"s3://{BUCKET}/{by}"
    jobs.save(f"{root}/step-1", 1.0)
    whole = _list(root)
    # the killed save's directory on this machine
    save = programs.start(_SAVE, f"{root}/step-2", environment={settings.SPOOL_DIR: str(tmp_path)})
    try:
        assert os.read(save._outputs[0], 100).startswith(b"stopped"), os.read(save._outputs[1], 10_000)
        assert len(_list(root)) > len(whole) + 3
        _clear(root, by, 3)
        standing = {name: size for name, size in _list(root).items() if name.startswith("step-2/")}
        assert len(standing) > 3
        assert _count_uploads(s3) == 1
        if by == "prune":
            assert f"kept: process {save.pid} of this host is alive" in capsys.readouterr().out
    finally:
        os.kill(save.pid, signal.SIGKILL)
        save.communicate(60)
    if by == "prune":
        assert main(["prune", root, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "step-2 " in said
        assert said.endswith(f"{sum(standing.values()):,} bytes would be freed in {root}\n")
    _clear(root, by, 4)
    left = _list(root)
    assert not [name for name in left if name.startswith("step-2/")]
    assert whole.items() <= left.items()
    assert _count_uploads(s3) == 0
    jobs.check(f"{root}/step-1", 1.0)


def _count_uploads(endpoint: str) -> int:
    return request(endpoint, "GET", f"{BUCKET}?uploads").count("<UploadId>")


def test_an_upload_of_nobody_goes_by_its_age(
    s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts whose save has left nothing else stay for SHARDCKPT_LEFTOVER_HOURS; without s3fs prune says what to do."""
    root = f"s3://{BUCKET}/nobody"
    jobs.save(f"{root}/step-1", 1.0)
    begun = S3FileSystem(skip_instance_cache=True)
    for key in ("nobody/step-1/generation-x/data", "other/data"):
        begun.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
    # moto says of each upload that it began in 2010
    found = multipart.list_uploads
    monkeypatch.setattr(
        multipart, "list_uploads", lambda *place: [u._replace(begun=time.time()) for u in found(*place) or ()]
    )
    assert main(["prune", root]) == 0
    said = capsys.readouterr().out
    assert "step-1/generation-x/data" in said
    assert "kept: an upload that began 0.0 hours ago: it is removed after 24" in said
    assert main(["prune", root, "--older-than", "0", "--dry-run"]) == 0
    assert _count_uploads(s3) == 2
    assert main(["prune", root, "--older-than", "0"]) == 0
    assert _count_uploads(s3) == 1  # below another URL
    monkeypatch.setattr(multipart, "list_uploads", found)
    monkeypatch.setattr(multipart, "_make_client", lambda *_: None)
    capsys.readouterr()
    assert main(["prune", root]) == 0
    assert "AbortIncompleteMultipartUpload" in capsys.readouterr().out
    jobs.check(f"{root}/step-1", 1.0)


def _clear(root: str, by: str, step: int) -> None:
    if by == "prune":
        assert main(["prune", root]) == 0
        return
    with CheckpointManager(CheckpointConfig(folder=root), {}) as manager:
        manager.save(step, force=True)
        manager.wait()


def test_who_may_not_list_uploads_still_prunes(
    s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Listing uploads is a permission of its own: without it, of which one warning says, objects of dead saves go."""

    def refuse(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(multipart, "list_uploads", refuse)
    monkeypatch.setattr(errors, "_warned", set())
    root, save = f"s3://{BUCKET}/refused", "5" * 32
    jobs.save(f"{root}/step-1", 1.0)
    said = f"save {save} of process 1 on host, begun 2026-01-01 00:00:00 UTC\nowner {owners.dead().text}\n"
    left = RemotePath(open_folder(f"{root}/step-2", get_plugin_manager()))
    for name, data in ((f".shardckpt-uploading-{save}", said.encode()), ("data", b"12345")):
        (left / name).write(data)
    assert main(["prune", root]) == 0
    assert not list_objects(left.folder)
    assert [record.levelname for record in caplog.records if "cannot list the uploads to" in record.message] == [
        "WARNING"
    ]
    assert "s3:ListBucketMultipartUploads" in capsys.readouterr().out
    jobs.check(f"{root}/step-1", 1.0)
