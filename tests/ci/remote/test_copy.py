"""Copies within a store: by the store itself where it can, and part by part where it cannot."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from shardckpt.integrations.fsspec import folder as fsspec_folder
from shardckpt.integrations.obstore import folder as obstore_folder
from shardckpt.storage import CopiesObjects, RemotePath
from tests.remote.servers import BUCKET, moto_server, request, variables
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MIB = 1 << 20
_numbers = count()
_CLIENTS = {"obstore": obstore_folder.open_folder, "s3fs": fsspec_folder.open_folder}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A real S3 server, with a second bucket."""
    with moto_server() as found:
        request(found, "PUT", "other")
        yield found


@pytest.fixture(params=_CLIENTS)
def open_url(
    request: pytest.FixtureRequest, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], RemotePath]]:
    """Opens URLs on the server by a client."""
    # fsspec keeps a client for the endpoint that it was made with: other tests have other servers
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for name, value in {**variables(endpoint), "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}.items():
        monkeypatch.setenv(name, value)
    client = _CLIENTS[request.param]
    yield lambda url: RemotePath(client(url))  # type: ignore[operator]
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def _refuse(*_: Any) -> Any:
    raise AssertionError("the bytes of the object came here")


@pytest.mark.parametrize("size", [11, 6 * _MIB + 5, *in_proof(0)])
def test_a_store_copies_within_itself(
    open_url: Callable[[str], RemotePath], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A copy in one bucket has the bytes of the object, in place of what was there, and none of them comes here."""
    where = f"s3://{BUCKET}/copies-{next(_numbers)}"
    data = bytes(range(251)) * (size // 251) + bytes(size % 251)
    (open_url(f"{where}/from") / "a").write(data)
    target = open_url(f"{where}/to/deeper")
    (target / "b").write(b"what was there")
    source = open_url(f"{where}/from")
    assert isinstance(target.folder, CopiesObjects)
    with monkeypatch.context() as patch:
        for method in ("read", "read_into"):
            if hasattr(source.folder, method):
                patch.setattr(source.folder, method, _refuse)
        (target / "b").copy_from(source / "a")
    copied = open_url(f"{where}/to/deeper") / "b"
    assert copied.size == size
    assert copied.read_range(0, size) == data


def test_a_copy_from_another_store(
    open_url: Callable[[str], RemotePath], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store cannot copy by itself comes here part by part: from another client's store, of several parts."""
    monkeypatch.setenv("SHARDCKPT_REMOTE_PART_MIB", "5")
    data = bytes(range(256)) * (11 * _MIB >> 8) + b"end"
    (tmp_path / "a").write_bytes(data)
    source = RemotePath(fsspec_folder.open_folder(f"local://{tmp_path}"))  # type: ignore[arg-type]
    where = f"s3://{BUCKET}/copies-{next(_numbers)}"
    (open_url(where) / "b").copy_from(source / "a")
    assert (open_url(where) / "b").read_range(0, len(data)) == data


def test_a_copy_from_another_bucket(open_url: Callable[[str], RemotePath]) -> None:
    """An object of another bucket is copied, too, whether or not the client asks the store to."""
    name = f"copies-{next(_numbers)}"
    (open_url(f"s3://other/{name}") / "a").write(b"in the other bucket")
    (open_url(f"s3://{BUCKET}/{name}") / "a").copy_from(open_url(f"s3://other/{name}") / "a")
    assert (open_url(f"s3://{BUCKET}/{name}") / "a").read_range(0, 100) == b"in the other bucket"


def test_an_object_that_is_not_there(open_url: Callable[[str], RemotePath]) -> None:
    """A copy of nothing is an error, and no object appears."""
    where = f"s3://{BUCKET}/copies-{next(_numbers)}"
    with pytest.raises(FileNotFoundError):
        (open_url(f"{where}/to") / "b").copy_from(open_url(f"{where}/from") / "a")
    assert not open_url(f"{where}/to").exists()
