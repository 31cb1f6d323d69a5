from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    StorageError,
    UnknownBackendError,
    UnsafePickleError,
)
from shardckpt.integrations.fsspec.folder import FsspecFolder
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.plugins import get_plugin_manager, hookimpl
from shardckpt.strategy import LoadContext
from tests.golden.write_zarr import COMMON, TENSORS, global_tensor
from tests.tables import in_proof, table
from tests.tree import GOLDEN
from tests.zarr.load import EXTRA, RNG, WRITERS, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ranks import Ranks

FC1, FC2 = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a golden checkpoint, to be damaged."""
    return Path(shutil.copytree(GOLDEN / "zarr-mcore-0.7.0", tmp_path / "checkpoint"))


@pytest.mark.parametrize("world", [2, *in_proof(1, 4)])
@pytest.mark.parametrize("name", WRITERS)
def test_a_golden_checkpoint_loads_at_any_world_size(ranks: Ranks, name: str, world: int) -> None:
    """Every tensor, object and common value that old Megatrons wrote loads at 1, 2 and 4 ranks, bit for bit."""
    ranks.run(world, load, str(GOLDEN / name), WRITERS[name])


@table("name", WRITERS)
def test_the_queries_describe_a_golden_checkpoint(name: str) -> None:
    """What is stored, its common state and its values, without a description of it and without other ranks."""
    path, writers = GOLDEN / name, WRITERS[name]
    assert dc.check_is_distributed_checkpoint(path)
    assert dc.load_common_state_dict(path) == COMMON
    described = {key: (t.global_shape, t.dtype) for key, t in dc.load_tensors_metadata(path).items()}
    assert described == TENSORS
    objects = {f"{EXTRA}/shard_{n}_{writers}" for n in range(writers)}
    objects |= {f"{RNG}/shard_0.{n}_1.{writers}" for n in range(writers)}
    assert set(dc.load_sharded_metadata(path)) == set(TENSORS) | objects
    plain = dc.load_plain_tensors(path)
    assert all(torch.equal(plain[key], global_tensor(key)) for key in TENSORS)


def test_saves_of_one_layout_are_told_apart(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a training, whose tensors have the same descriptions, are two saves: no load mixes them."""
    identities: list[bytes] = []
    monkeypatch.setattr(LoadContext, "require_same_save", lambda _, identity, *args: identities.append(identity))
    for iteration in (7, 7, 8):
        torch.save({**COMMON, "iteration": iteration}, checkpoint / "common.pt")
        dc.load({}, checkpoint)
    one, same, other = identities
    assert one == same != other


def test_every_golden_checkpoint_is_read() -> None:
    """No golden zarr checkpoint lies there without a test that reads it."""
    assert {path.name for path in GOLDEN.glob("zarr-*")} == set(WRITERS)


def test_slices_need_only_their_chunks(checkpoint: Path) -> None:
    """A lazy slice and a shard are read although all chunks that they do not touch are gone."""
    for unused in (f"{FC1}/1.0", f"{FC2}/0.1", "grid/0.0", "phases/0.0"):
        (checkpoint / unused).unlink()
    with dc.open_checkpoint(checkpoint) as opened:
        assert torch.equal(opened[FC1][1:3, 2], global_tensor(FC1)[1:3, 2])
        assert torch.equal(opened[FC2][:, :4], global_tensor(FC2)[:, :4])
        assert torch.equal(opened["grid"][3, 4:], global_tensor("grid")[3, 4:])
        assert opened.read_object(f"{RNG}/shard_0.1_1.2") == [{"rank": 1, "state": [1, 2, 3]}]
        with pytest.raises(StorageError, match=f"{FC1}.*1.0"):
            opened[FC1][4:]
    rows = ShardedTensor.from_rank_offsets(FC1, torch.ones(4, 6), (0, 0, 2))
    loaded = dc.load({"w": rows}, checkpoint, validate_access_integrity=False)
    assert torch.equal(loaded["w"], global_tensor(FC1)[:4])


def test_a_tensor_of_another_shape_or_dtype(checkpoint: Path) -> None:
    """A padded tensor gets what is stored and zeros; a wider dtype gets the values."""
    padded = ShardedTensor.from_rank_offsets(FC1, torch.ones(9, 6), allow_shape_mismatch=True)
    wide = ShardedTensor.from_rank_offsets(FC2, torch.ones(4, 8, dtype=torch.float32))
    loaded = dc.load({"padded": padded, "wide": wide}, checkpoint)
    assert torch.equal(loaded["padded"], torch.cat([global_tensor(FC1), torch.zeros(1, 6)]))
    assert torch.equal(loaded["wide"], global_tensor(FC2).float())


def _write(folder: Path, values: torch.Tensor, chunks: tuple[int, ...], **fields: Any) -> None:
    """Write a tensor as the documents of zarr's format 2 say: chunks at the end of an axis are filled up."""
    folder.mkdir(parents=True)
    described = {"zarr_format": 2, "shape": list(values.shape), "chunks": list(chunks), "dtype": "<f4", "order": "C"}
    described |= {"compressor": None, "fill_value": None, "filters": None, **fields}
    (folder / ".zarray").write_text(json.dumps(described))
    counts = [-(-size // max(chunk, 1)) for size, chunk in zip(values.shape, chunks, strict=True)]
    full = torch.full([count * chunk for count, chunk in zip(counts, chunks, strict=True)], -7.0)
    full[tuple(slice(size) for size in values.shape)] = values
    for cell in torch.cartesian_prod(*map(torch.arange, counts)).view(-1, len(counts)).tolist() if counts else [[]]:
        chunk = full[tuple(slice(n * size, (n + 1) * size) for n, size in zip(cell, chunks, strict=True))]
        file = folder / (".".join(map(str, cell)) or "0")
        data = chunk.contiguous().numpy().tobytes()
        if described["compressor"]:
            import numcodecs

            data = numcodecs.get_codec(described["compressor"]).encode(data)
        file.write_bytes(data)


def test_other_grids_of_chunks(checkpoint: Path) -> None:
    """Uneven grids, tensors without axes or elements, and keys with slashes load, too."""
    values = torch.arange(28.0).view(4, 7)
    _write(checkpoint / "uneven", values, (3, 4))
    _write(checkpoint / "model" / "inner" / "weight", values, (2, 7))
    _write(checkpoint / "scale", torch.tensor(2.5), ())
    _write(checkpoint / "none", torch.zeros(0, 4), (0, 4))
    with dc.open_checkpoint(checkpoint) as opened:
        assert torch.equal(opened["uneven"].read(), values)
        assert torch.equal(opened["uneven"][2:, 3:6], values[2:, 3:6])
        assert torch.equal(opened["model/inner/weight"].read(), values)
        assert opened["scale"].read().item() == 2.5
        assert opened["none"].read().shape == (0, 4)


@pytest.mark.parametrize("compressor", ["blosc", "lz4", "zstd"])
def test_compressed_chunks(checkpoint: Path, compressor: str) -> None:
    """Chunks that a tool has compressed load; a cut or altered one is an error that names tensor and file."""
    pytest.importorskip("numcodecs")
    values = torch.arange(600.0).view(20, 30)
    _write(checkpoint / "packed", values, (8, 30), compressor={"id": compressor})
    with dc.open_checkpoint(checkpoint) as opened:
        assert torch.equal(opened["packed"][5:19, 3:], values[5:19, 3:])
        chunk = checkpoint / "packed" / "1.0"
        whole = chunk.read_bytes()
    for bad in (whole[: len(whole) // 2], b"", b"\0" * len(whole), whole[:4] + b"\xff\xff\xff\x7f" + whole[8:]):
        chunk.write_bytes(bad)
        with dc.open_checkpoint(checkpoint) as opened, pytest.raises(CorruptCheckpointError, match=r"'packed'.*1\.0"):
            opened["packed"].read()


def test_compressed_chunks_without_the_package(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without numcodecs the error names the extra; all that Megatron wrote loads without it."""
    monkeypatch.setitem(sys.modules, "numcodecs", None)
    shutil.copytree(checkpoint / "grid", checkpoint / "packed")
    described = json.loads((checkpoint / "packed" / ".zarray").read_text())
    (checkpoint / "packed" / ".zarray").write_text(json.dumps({**described, "compressor": {"id": "blosc"}}))
    with dc.open_checkpoint(checkpoint) as opened:
        assert torch.equal(opened["grid"].read(), global_tensor("grid"))
        with pytest.raises(CheckpointingException, match=r"'packed'.*pip install 'shardckpt\[zarr\]'"):
            opened["packed"].read()


DAMAGES: dict[str, tuple[str, Any]] = {
    "missing chunk": (f"{FC1}/1.0", None),
    "short chunk": (f"{FC1}/1.0", lambda data: data[:-1]),
    "long chunk": (f"{FC1}/1.0", lambda data: data + b"\0"),
    "empty description": (f"{FC1}/.zarray", lambda _: b""),
    "no JSON": (f"{FC1}/.zarray", lambda data: data[:-9]),
    "negative shape": (f"{FC1}/.zarray", lambda data: data.replace(b"8,", b"-8,")),
    "chunks of nothing": (f"{FC1}/.zarray", lambda data: data.replace(b"4,", b"0,")),
    "other axes": (f"{FC1}/.zarray", lambda data: data.replace(b"8,", b"8, 1,")),
    "unknown dtype": (f"{FC1}/.zarray", lambda data: data.replace(b"<f4", b">f4")),
    "a shape twice": (f"{FC1}/.zarray", lambda data: data.replace(b"{", b'{"shape": [8, 6], ', 1)),
    "a text for a size": (f"{FC1}/.zarray", lambda data: data.replace(b"8,", b'"8",')),
    "a truth for a format": (f"{FC1}/.zarray", lambda data: data.replace(b'"zarr_format": 2', b'"zarr_format": true')),
    "huge description": (f"{FC1}/.zarray", lambda data: data + b" " * (1 << 20)),
    "cut object": (f"{RNG}/shard_0.1_1.pt", lambda data: data[:-30]),
    "cut common state": ("common.pt", lambda data: data[:-30]),
    "no common state": ("common.pt", None),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_an_error_that_names_it(checkpoint: Path, kind: str) -> None:
    """A damaged or missing file is an error that names key and file, and no destination is changed; verify finds it."""
    name, change = DAMAGES[kind]
    if change is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(change((checkpoint / name).read_bytes()))
    other = ShardedTensor.from_rank_offsets("grid", torch.ones(4, 6, dtype=torch.float16))
    wanted = ShardedTensor.from_rank_offsets(FC1, torch.full((8, 6), -1.0))
    rng = ShardedObject(RNG, None, (1, 2), (0, 1))
    with pytest.raises(CheckpointingException) as caught:
        dc.load({"other": other, "w": wanted, "rng": rng}, checkpoint, validate_access_integrity=False)
    assert name.partition("/")[0] in str(caught.value)
    assert str(checkpoint / name) in str(caught.value)
    assert other.data is not None
    assert wanted.data is not None
    assert torch.equal(other.data, torch.ones(4, 6))
    assert torch.equal(wanted.data, torch.full((8, 6), -1.0))
    assert main(["verify", str(checkpoint)]) in (1, 2)


def _load_one(path: str, key: str) -> None:
    dc.load({"w": ShardedTensor.from_rank_offsets(key, torch.ones(4, 6), (0, dist.get_rank(), 2))}, path)


def test_damage_is_the_same_error_on_every_rank(ranks: Ranks, checkpoint: Path) -> None:
    """A chunk that only one rank needs fails the load of all."""
    (checkpoint / FC1 / "1.0").write_bytes(b"")
    failures = ranks.outcomes(2, _load_one, str(checkpoint), FC1)
    assert [failure.kind for failure in failures] == ["CorruptCheckpointError"] * 2
    assert failures[0].message == failures[1].message


@pytest.mark.parametrize("chunks", [[1 << 60, 1 << 60], [4, 6], [1, 1]])
@pytest.mark.timeout(30)
def test_sizes_are_checked_before_memory_is_taken(checkpoint: Path, chunks: list[int]) -> None:
    """An array that claims to have terabytes is refused by the sizes of its files."""
    path = checkpoint / FC1 / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shape": [1 << 60, 1 << 60], "chunks": chunks}))
    with dc.open_checkpoint(checkpoint) as opened, pytest.raises(CheckpointingException, match=FC1):
        opened[FC1].read()
    assert main(["verify", str(checkpoint)]) == 1
    assert main(["inspect", str(checkpoint)]) == 1


@pytest.mark.parametrize("name", [FC1, f"{FC1}/0.0", f"{FC1}/.zarray"])
def test_links_do_not_lead_out_of_the_directory(checkpoint: Path, tmp_path: Path, name: str) -> None:
    """A folder or a file in the place of which a link stands is refused by name."""
    (checkpoint / name).rename(tmp_path / "elsewhere")
    (checkpoint / name).symlink_to(tmp_path / "elsewhere")
    wanted = ShardedTensor.from_rank_offsets(FC1, torch.ones(8, 6))
    with pytest.raises(StorageError, match=f"{FC1}.*symbolic link"):
        dc.load({"w": wanted}, checkpoint)


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("name", ["common.pt", f"{RNG}/shard_0.1_1.pt"])
def test_a_hostile_pickle_runs_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Objects and the common state are read by the allow-list."""
    monkeypatch.chdir(checkpoint.parent)
    torch.save([_Runs()], checkpoint / name)
    wanted = {"rng": ShardedObject(RNG, None, (1, 2), (0, 1))}
    with pytest.raises(UnsafePickleError, match="mkdir"):
        dc.load(wanted, checkpoint, validate_access_integrity=False)
    assert not Path("ran").exists()


def test_inspect_and_verify(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command lists what is stored, checks every file by structure, and names keys that cannot be read."""
    assert main(["inspect", str(checkpoint)]) == 0
    shown = capsys.readouterr().out
    assert f"{RNG}/shard_0.1_1.2" in shown
    assert "10 tensors of 712 bytes, 159 parameters, 4 objects" in shown
    assert main(["verify", str(checkpoint)]) == 0  # intact, without digests
    assert f"{FC1}/1.0" in capsys.readouterr().out
    (checkpoint / FC1 / "1.0").unlink()
    assert main(["verify", str(checkpoint)]) == 1
    assert main(["inspect", str(checkpoint)]) == 1
    assert f"{FC1}/1.0 is missing; 1 key" in capsys.readouterr().out


def _upload(folder: Path, url: str) -> None:
    """Copy a directory to a URL."""
    files, root = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())


def _load_from_store(name: str, writers: int) -> None:
    url = f"memory://zarr/{name}"
    _upload(GOLDEN / name, url)  # a rank's own copy: the store is the process's memory
    load(url, writers)


@pytest.mark.parametrize("name", ["zarr-mcore-0.7.0", "zarr-mcore-0.15.3"])
def test_a_checkpoint_on_a_store_loads(ranks: Ranks, name: str) -> None:
    """Everything loads from a URL as from a directory, bit for bit, with locks and keys of any characters there."""
    ranks.run(2, _load_from_store, name, WRITERS[name])


@pytest.fixture
def url(checkpoint: Path) -> Iterator[str]:
    """A golden checkpoint on a store, with a tensor below a folder."""
    _write(checkpoint / "model" / "inner" / "weight", torch.arange(28.0).view(4, 7), (2, 7))
    _write(checkpoint / "grid" / "more", torch.arange(28.0).view(4, 7), (2, 7))  # below a tensor: none
    _upload(checkpoint, "memory://zarr/step")
    yield "memory://zarr/step"
    fsspec.filesystem("memory").store.clear()


def test_queries_and_the_command_take_a_url(url: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a directory and its copy on a store have is listed alike; a chunk that the store lacks is named."""
    assert dc.load_sharded_metadata(url).keys() == dc.load_sharded_metadata(checkpoint).keys()
    assert dc.load_tensors_metadata(url).keys() == {*TENSORS, "model/inner/weight"}
    assert dc.load_common_state_dict(url) == COMMON
    with dc.open_checkpoint(url) as opened:
        assert torch.equal(opened["model/inner/weight"][1:3, 5:], torch.arange(28.0).view(4, 7)[1:3, 5:])
        assert opened.read_object(f"{RNG}/shard_0.1_1.2") == [{"rank": 1, "state": [1, 2, 3]}]
    assert main(["inspect", url]) == 0
    assert "11 tensors of 824 bytes, 187 parameters, 4 objects" in capsys.readouterr().out
    assert main(["verify", url]) == 0  # intact, without digests
    fsspec.filesystem("memory").rm_file(f"/zarr/step/{FC1}/1.0")
    assert main(["verify", url]) == 1
    wanted = ShardedTensor.from_rank_offsets(FC1, torch.ones(8, 6))
    with pytest.raises(StorageError, match=rf"{FC1}.*memory://zarr/step/{FC1}/1\.0"):
        dc.load({"w": wanted}, url)


class _Flat:
    """A store whose plugin lists no folders."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._inner = FsspecFolder(url, *fsspec.core.url_to_fs(url.replace("flat://", "memory://")))
        self.files, self.read = self._inner.files, self._inner.read

    def upload(self, name: str, path: Path) -> None: ...

    def delete(self, name: str) -> None: ...


class _FlatPlugin:
    @hookimpl(tryfirst=True)
    def shardckpt_filesystem(self, url: str) -> _Flat | None:
        return _Flat(url) if url.startswith("flat://") else None


@pytest.mark.usefixtures("url")
def test_a_store_that_cannot_list_folders_is_an_error() -> None:
    """Where a plugin lists no folders, no tensor is found: that is said, and not that keys are missing."""
    plugin = _FlatPlugin()
    get_plugin_manager().register(plugin)
    try:
        for query in (dc.load_tensors_metadata, partial(dc.load, {}, strict="log_all")):
            with pytest.raises(StorageError, match=r"folders in flat://zarr/step: the plugin .*HasFolders.*directory"):
                query("flat://zarr/step")
    finally:
        get_plugin_manager().unregister(plugin)


def test_an_overwrite_replaces_it(checkpoint: Path) -> None:
    """A save over it, in the default format, leaves nothing of it, and keeps what is not its own."""
    (checkpoint / "tokenizer").mkdir()
    (checkpoint / "tokenizer" / "vocab.txt").write_text("a")
    before = {path.name for path in checkpoint.iterdir()}
    weight = torch.arange(4.0)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", weight)}, checkpoint, overwrite=True)
    assert {path.name for path in checkpoint.iterdir()} & before == {"tokenizer", "metadata.json", "common.pt"}
    assert torch.equal(dc.load_plain_tensors(checkpoint)["w"], weight)


def test_it_is_only_read(tmp_path: Path) -> None:
    """A save in this format is refused."""
    with pytest.raises(UnknownBackendError, match="zarr"):
        dc.save({}, tmp_path / "c", ("zarr", 1))
