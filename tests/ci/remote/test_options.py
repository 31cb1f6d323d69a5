"""Two buckets of different stores, by the options of ``SHARDCKPT_STORES``."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.integrations.fsspec.folder import open_folder as open_by_fsspec
from shardckpt.maintenance import convert_checkpoint
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import RemotePath
from tests.remote.servers import BUCKET, KEY, SECRET, moto_server, request
from tests.states import entire

if TYPE_CHECKING:
    from pathlib import Path

OTHER = "other"


def test_two_stores_meet(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint goes from the environment's store to one with an endpoint and keys of its own, by each client."""
    assert s3
    with moto_server() as endpoint:
        request(endpoint, "PUT", OTHER)
        options = {"endpoint": endpoint, "region": "eu-west-1", "access_key_id": KEY, "secret_access_key": SECRET}
        (tmp_path / "stores.json").write_text(json.dumps({f"s3://{OTHER}": options}))
        monkeypatch.setenv("SHARDCKPT_STORES", str(tmp_path / "stores.json"))
        here, there = f"s3://{BUCKET}/options/step-1", f"s3://{OTHER}/step-1"
        dc.save(entire({"w": torch.arange(64.0)}), here)
        convert_checkpoint(here, there, "torch_dist")
        with dc.open_checkpoint(there) as found:
            assert torch.equal(found["w"].read(), torch.arange(64.0))
        folder = open_folder(there, get_plugin_manager())
        assert SECRET not in repr(pickle.dumps(folder))
        assert pickle.loads(pickle.dumps(folder)).files() == folder.files()
        by_fsspec = open_by_fsspec(there, options)
        assert by_fsspec is not None
        assert by_fsspec.files() == folder.files()
        copy = RemotePath(open_folder(f"s3://{BUCKET}/options", get_plugin_manager())) / "copy"
        copy.copy_from(RemotePath(folder) / "metadata.json")
        assert copy.read_range(0, 1 << 20) == folder.read("metadata.json", 0, 1 << 20)
        by_fsspec._filesystem.call_s3("create_multipart_upload", Bucket=OTHER, Key="step-1/begun")
        (upload,) = folder.uploads()  # type: ignore[attr-defined]
        assert upload.name == "begun"
        folder.abort_upload(upload)  # type: ignore[attr-defined]
        assert folder.uploads() == by_fsspec.uploads() == []  # type: ignore[attr-defined]


def test_a_profile_has_keys_and_region(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option names a profile of the AWS configuration, which is asked for keys and region."""
    (tmp_path / "credentials").write_text(f"[team]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n")
    (tmp_path / "config").write_text("[profile team]\nregion=eu-west-1\n")
    (tmp_path / "stores.json").write_text(json.dumps({f"s3://{BUCKET}": {"profile": "team", "endpoint": s3}}))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("SHARDCKPT_STORES", str(tmp_path / "stores.json"))
    url = f"s3://{BUCKET}/profile/step-1"
    dc.save(entire({"w": torch.arange(8.0)}), url)
    with dc.open_checkpoint(url) as found:
        assert found["w"].read().tolist() == list(range(8))


def test_wrong_options_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not there, or no such object, and an option that is not known are errors that show no key."""
    file = tmp_path / "stores.json"
    monkeypatch.setenv("SHARDCKPT_STORES", str(file))
    for text, match in (
        (None, r"SHARDCKPT_STORES=.*stores\.json: cannot read it: No such file"),
        ("[]", r"expected \{\"s3://bucket\""),
        ('{"s3://b/path": {}}', r"s3://b/path"),
        (
            '{"s3://b": {"endpoint": 7, "secret_access_key": "a-secret"}}',
            r"s3://b\.endpoint: Input should be a valid string",
        ),
        ('{"s3://b": {"endpiont": "http://x", "access_key_id": "a-secret"}}', "'endpiont'.*did you mean endpoint"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(CheckpointingException, match=match) as caught:
            open_folder("s3://b/path", get_plugin_manager())
        assert "a-secret" not in str(caught.value)
