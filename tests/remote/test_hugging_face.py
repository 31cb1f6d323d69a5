"""Exports to a URL: what `export_to_huggingface` and a manager's last save write on a store is a folder that loads."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

from shardckpt import CheckpointingException, dist_checkpointing
from shardckpt.errors import NotACheckpointError
from shardckpt.huggingface import export_to_huggingface, huggingface_index, load_from_huggingface
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import RemotePath
from tests.manager.jobs import Training, weights
from tests.remote.servers import BUCKET
from tests.states import entire

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

_numbers = count()


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.ci)])
def url(request: pytest.FixtureRequest) -> str:
    """A URL without objects: of fsspec, where files are spooled, and of obstore, where they are streamed."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    return f"{request.param}://{BUCKET}/hub-{next(_numbers)}"


def _open(url: str) -> Any:
    return RemotePath(open_folder(url, get_plugin_manager()))  # type: ignore[arg-type]


def _save(path: Path, fill: float = 1.0) -> dict[str, torch.Tensor]:
    tensors = {f"layer.{n}.weight": torch.full((64, 128), fill + n) for n in range(4)}
    state = entire(tensors)
    dist_checkpointing.save(state, path)
    return tensors


def _load(url: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(tensor)) for key, tensor in tensors.items()}
    return load_from_huggingface(state, url)  # type: ignore[no-any-return]


def test_the_last_step_is_exported_on_a_store(url: str) -> None:
    """`last_save_in_hf` with a folder on a store writes `step-<n>-hf` there, with the assets of another URL."""
    assets = _open(f"{url}/model")
    (assets / "config.json").write(b'{"dtype": "float32", "model_type": "some"}')
    (assets / "tokenizer.json").write(b"{}")
    (assets / "model.safetensors").write(b"weights are no assets")
    options = {"last_save_in_hf": True, "export_dtype": "bfloat16", "hf_assets_path": f"{url}/model"}
    training = Training(f"{url}/run", interval=2, **options)
    with training.manager as manager:
        training.run(3)
        assert manager.save(3, last_step=True)
        assert manager.steps() == [2, 3]
        folder = f"{url}/run/step-3-hf"
        assert sorted(path.name for path in _open(folder).iterdir()) == [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        config = _open(folder) / "config.json"
        assert json.loads(config.read_range(0, config.size))["dtype"] == "bfloat16"
        assert {dtype for dtype, _ in huggingface_index(folder).values()} == {torch.bfloat16}
    fresh = Training(f"{url}/other", initial_load_path=folder, initial_load_in_hf=True)
    with fresh.manager as manager:
        manager.load()
    assert all(map(torch.equal, weights(fresh), [each.bfloat16().float() for each in weights(training)]))


def test_an_export_to_a_url_has_the_bytes_of_one_to_a_directory(url: str, tmp_path: Path) -> None:
    """Several files and their index are the same bytes on a store; a second export replaces weights alone."""
    tensors = _save(tmp_path / "step")
    local, remote = tmp_path / "hf", f"{url}/hf"
    for target in (local, remote):
        export_to_huggingface(tmp_path / "step", target, max_shard_size=64 << 10)
    there = {path.name: path.read_range(0, path.size) for path in _open(remote).iterdir()}
    assert there == {path.name: path.read_bytes() for path in local.iterdir()}
    assert len(there) == 3
    assert all(torch.equal(value, tensors[key]) for key, value in _load(remote, tensors).items())
    (_open(remote) / "README.md").write(b"kept")
    with pytest.raises(CheckpointingException, match="is not empty"):
        export_to_huggingface(tmp_path / "step", remote)
    newer = _save(tmp_path / "newer", 10.0)
    export_to_huggingface(tmp_path / "newer", remote, overwrite=True)
    assert sorted(path.name for path in _open(remote).iterdir()) == ["README.md", "model.safetensors"]
    assert all(torch.equal(value, newer[key]) for key, value in _load(remote, newer).items())
    data = _open(remote) / "model.safetensors"
    assert safetensors.torch.load(data.read_range(0, data.size)).keys() == newer.keys()


def test_an_export_to_a_url_that_fails_leaves_no_folder(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a file cannot be written, nothing loads, and the files that were written are deleted."""
    _save(tmp_path / "step")
    folder = type(open_folder(url, get_plugin_manager()))
    method = "open_write" if folder is ObstoreFolder else "upload"
    call = getattr(folder, method)

    def fail_at_the_second(self: Any, name: str, *args: Any) -> Any:
        if name.startswith("model-00002"):
            raise PermissionError("no more files")
        return call(self, name, *args)

    monkeypatch.setattr(folder, method, fail_at_the_second)
    with pytest.raises(CheckpointingException, match="no more files"):
        export_to_huggingface(tmp_path / "step", f"{url}/hf", max_shard_size=64 << 10)
    with pytest.raises(NotACheckpointError):
        huggingface_index(f"{url}/hf")
    assert not [path.name for path in _open(f"{url}/hf").iterdir()]


def test_an_export_without_a_spool_directory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has taken the URL is deleted, so that the next export finds it free."""
    _save(tmp_path / "step")
    url = f"memory://{BUCKET}/hub-{next(_numbers)}"
    with monkeypatch.context() as patch:
        patch.setenv("SHARDCKPT_SPOOL_DIR", str(tmp_path / "absent"))
        with pytest.raises(CheckpointingException, match="cannot make a spool directory"):
            export_to_huggingface(tmp_path / "step", url)
    assert not [*_open(url).iterdir()]


def test_a_folder_among_the_assets_is_refused(tmp_path: Path) -> None:
    """Its files would not be copied; nothing is written."""
    _save(tmp_path / "step")
    (tmp_path / "model").mkdir()
    url = f"memory://{BUCKET}/hub-{next(_numbers)}"
    with pytest.raises(CheckpointingException, match="model is a folder: give it alone"):
        export_to_huggingface(tmp_path / "step", url, assets=[tmp_path / "model"])  # type: ignore[arg-type]
    assert not [*_open(url).iterdir()]


def _overwrite(path: Path, url: str) -> str:
    try:
        export_to_huggingface(path, url, max_shard_size=64 << 10, overwrite=True)
    except CheckpointingException as exc:
        return str(exc)
    return ""


def test_an_index_that_cannot_be_written_leaves_no_weights_of_any_rank(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a URL has files of others, the main rank deletes the files of all ranks, and those alone."""
    _save(tmp_path / "step")
    url = f"memory://{BUCKET}/hub-{next(_numbers)}"
    (_open(url) / "README.md").write(b"x")
    write = RemotePath.write

    def fail_at_the_index(self: RemotePath, data: bytes) -> None:
        if self.name.endswith(".index.json"):
            raise PermissionError("no index")
        write(self, data)

    monkeypatch.setattr(RemotePath, "write", fail_at_the_index)
    assert all("no index" in error for error in ranks.run(2, _overwrite, tmp_path / "step", url))
    assert [path.name for path in _open(url).iterdir()] == ["README.md"]
