"""What users read when a store refuses, through both clients."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.errors import StorageError
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import RemotePath
from shardckpt.storage.remote import list_objects
from tests.remote import jobs
from tests.remote.clients import served_by
from tests.remote.servers import BUCKET, SECRET, fault_proxy, moto_server, rclone_server, variables
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.remote.fault_proxy import FaultProxy


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    """A proxy before a real S3 server."""
    with moto_server() as endpoint, fault_proxy(endpoint) as found:
        yield found


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The odd server."""
    with rclone_server(tmp_path_factory.mktemp("rclone")) as found:
        yield found


@pytest.fixture(params=["obstore", "s3fs"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The client that serves s3:// URLs. It was not used before, and leaves other attempts to shardckpt."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # fsspec keeps a client for the endpoint it was made with
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with served_by(request.param):
        yield request.param


def _open(client: str, endpoint: str, url: str, monkeypatch: pytest.MonkeyPatch, **others: str) -> Any:
    for name, value in (variables(endpoint) | others).items():
        monkeypatch.setenv(name, value)
    folder = open_folder(url, get_plugin_manager())
    assert type(folder).__module__.split(".")[2] == ("fsspec" if client == "s3fs" else client)
    return folder


def _error(folder: Any, action: str, tmp_path: Path) -> str:
    """The error of a call, with all that a traceback would show."""
    file = tmp_path / "file"
    file.write_bytes(b"content")
    path = RemotePath(folder) / "object"
    calls = {
        "list": lambda: list_objects(folder),
        "read": lambda: path.read_range(0, 4),
        "upload": lambda: path.upload(file),
    }
    with pytest.raises(StorageError) as raised:
        calls[action]()
    assert str(path if action != "list" else RemotePath(folder)) in str(raised.value)
    shown = "".join(traceback.format_exception(raised.value))
    assert not [secret for secret in (SECRET, "the-key-id", "the-token") if secret in shown]
    return str(raised.value)


@pytest.mark.parametrize("action", ["list", *in_proof("upload")])
@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "RequestTimeTooSkewed", "the clock of this machine differs"),
        (403, "SignatureDoesNotMatch", "does not know the access key, or the secret does not match it"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (403, "AccessDenied", "s3:AbortMultipartUpload"),
        (400, "AuthorizationHeaderMalformed", "set AWS_REGION"),
        (404, "NoSuchBucket", "the bucket does not exist at this endpoint"),
    ],
)
def test_what_stays_wrong_is_said_at_once(
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    client: str,
    status: int,
    code: str,
    advice: str,
    action: str,
) -> None:
    """A wrong key, clock, region or bucket is an error after one attempt that says what to do, without secrets."""
    proxy.fail("answer", last=0, status=status, code=code)
    message = _error(_open(client, proxy.endpoint, f"s3://{BUCKET}/x", monkeypatch), action, tmp_path)
    assert advice in message
    assert "attempts: " not in message


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [(503, "SlowDown", "SHARDCKPT_REMOTE_THREADS"), (400, "ExpiredToken", "the session's credentials have ended")],
)
def test_what_may_end_is_tried_again_and_then_said(
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    client: str,
    caplog: pytest.LogCaptureFixture,
    status: int,
    code: str,
    advice: str,
) -> None:
    """Throttling, or credentials that a client may renew: after the set number of attempts an error says what to do."""
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "2")
    monkeypatch.setattr("time.sleep", lambda _: None)
    folder = _open(client, proxy.endpoint, f"s3://{BUCKET}/x", monkeypatch)
    proxy.fail("answer", last=0, status=status, code=code)
    with caplog.at_level(logging.WARNING):
        message = _error(folder, "upload", tmp_path)
    assert "in 2 attempts" in message
    assert advice in message
    assert "attempt 1 of 2" in caplog.text
    assert "the-token" not in caplog.text
    assert len(proxy.requests()) >= 2


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_nobody_at_the_endpoint_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str, endpoint: str
) -> None:
    """A refused connection and an unknown host are errors that name the variable of the endpoint."""
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "1")
    message = _error(_open(client, endpoint, f"s3://{BUCKET}/x", monkeypatch), "upload", tmp_path)
    assert "no store answers there" in message
    assert endpoint in message
    assert "AWS_ENDPOINT_URL" in message


@pytest.mark.parametrize("action", ["list", *in_proof("read", "upload")])
def test_a_missing_bucket_of_a_real_server_is_said(
    rclone: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str, action: str
) -> None:
    """A bucket that neither server has is no empty folder: a listing says so, too."""
    proxy.work()
    for endpoint in (rclone, proxy.endpoint):
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        message = _error(_open(client, endpoint, "s3://no-such-bucket/x", monkeypatch), action, tmp_path)
        assert "the bucket does not exist" in message


def test_a_wrong_key_of_a_real_server_is_said(
    rclone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    """A secret that the server does not take is an error that says where the client looks for it."""
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "1")
    folder = _open(client, rclone, f"s3://{BUCKET}/x", monkeypatch, AWS_SECRET_ACCESS_KEY="another-secret")
    assert "AWS_SECRET_ACCESS_KEY" in _error(folder, "upload", tmp_path)


def test_ranges_of_an_odd_server_are_never_mixed_in(rclone: str, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    """Of a server that answers ranges with 200 and the whole's checksum, a load is refused with the way out."""
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "1")
    url = _open(client, rclone, f"s3://{BUCKET}/{client}", monkeypatch).url
    jobs.save(url, 1.0)
    with pytest.raises(StorageError, match="AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"):
        jobs.check(url, 1.0)


@pytest.mark.parametrize("client", ["s3fs"], indirect=True)
def test_the_odd_server_is_used_by_s3fs_as_the_error_says(
    rclone: str, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    """With the setting that the error names, saves, loads and lazy slices through s3fs work on the odd server."""
    _open(client, rclone, f"s3://{BUCKET}/set", monkeypatch, AWS_RESPONSE_CHECKSUM_VALIDATION="when_required")
    jobs.save(f"s3://{BUCKET}/set", 1.0)
    jobs.check(f"s3://{BUCKET}/set", 1.0)
    with dc.open_checkpoint(f"s3://{BUCKET}/set") as checkpoint:
        assert torch.equal(checkpoint["weight"][3:5], jobs.whole(1.0)[3:5])
