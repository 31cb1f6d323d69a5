from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CorruptCheckpointError
from shardckpt.mapping import ShardedTensor
from shardckpt.storage import reader as reader_module
from shardckpt.tensors import tensor_bytes
from shardckpt_torch_dist.plan import regions
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

FULL = torch.arange(40 * 30 * 20).reshape(40, 30, 20)


def _wanted(start: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> ShardedTensor:
    return ShardedTensor("w", torch.zeros(shape, dtype=dtype), dtype, shape, tuple(FULL.shape), start, None)


def _expected(start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    view = FULL
    for axis, (low, length) in enumerate(zip(start, shape, strict=True)):
        view = view.narrow(axis, low, length)
    return view


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor in three chunks: 192 kB in all, read in pieces of 8 kB in these tests."""
    path = tmp_path_factory.mktemp("regions") / "c"
    cuts = [(0, 7), (7, 22), (29, 11)]
    shards = [
        ShardedTensor("w", FULL[low : low + rows], FULL.dtype, (rows, 30, 20), tuple(FULL.shape), (low, 0, 0), None)
        for low, rows in cuts
    ]
    dc.save({"w": shards}, path)
    return path


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_in_small_pieces(stored: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """A box of any place and size, cast or not, is read right, however small the pieces that it is read in."""
    monkeypatch.setattr(reader_module, "_READ_BYTES", 8 << 10)
    start = tuple(data.draw(st.integers(0, size - 1)) for size in FULL.shape)
    shape = tuple(data.draw(st.integers(1, size - low)) for size, low in zip(FULL.shape, start, strict=True))
    dtype = data.draw(st.sampled_from([torch.int64, torch.float32]))
    loaded = dc.load({"w": _wanted(start, shape, dtype)}, stored, validate_access_integrity=False)
    assert torch.equal(loaded["w"], _expected(start, shape).to(dtype))


@table("rows", [40, 13])
@table("kind", ["conj", "neg"])
def test_conj_and_neg_destinations(tmp_path: Path, kind: str, rows: int) -> None:
    """A destination that shows its memory conjugated or negated has the stored values, whole or in part."""
    values = torch.complex(FULL.float(), -FULL.float() - 1) if kind == "conj" else FULL.float()
    dc.save({"w": ShardedTensor.from_rank_offsets("w", values)}, tmp_path / "c")
    memory = torch.zeros(rows, 30, 20, dtype=values.dtype)
    view = memory.conj() if kind == "conj" else torch._neg_view(memory)
    wanted = ShardedTensor("w", view, values.dtype, tuple(view.shape), tuple(FULL.shape), (0, 0, 0), None)
    loaded = dc.load({"w": wanted}, tmp_path / "c", validate_access_integrity=False)["w"]
    assert torch.equal(loaded, values[:rows])


def test_wrapper_destinations(stored: Path) -> None:
    """A destination that wraps other tensors is filled through its own copy_, not at address 0."""
    wrapper = TwoTensor(torch.zeros(FULL.shape).long(), torch.zeros(FULL.shape).long())
    wanted = ShardedTensor("w", wrapper, FULL.dtype, tuple(FULL.shape), tuple(FULL.shape), (0, 0, 0), None)
    dc.load({"w": wanted}, stored)
    assert torch.equal(wrapper.a, FULL)
    assert torch.equal(wrapper.b, FULL)


def test_under_another_default_device(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's default device is not where the bytes are read to."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "1")
    wanted = _wanted((0, 0, 0), tuple(FULL.shape), torch.float64)
    with torch.device("meta"):
        loaded = dc.load({"w": wanted}, stored)["w"]
    assert torch.equal(loaded, FULL.double())


def test_tensors_that_torch_stored_strided(tmp_path: Path) -> None:
    """DCP stores a view with its strides; every element arrives at its place all the same."""
    dcp.save({"w": FULL.permute(2, 0, 1), "v": FULL[:, :, ::3]}, checkpoint_id=tmp_path / "c")
    loaded = dc.load_plain_tensors(tmp_path / "c")
    assert torch.equal(loaded["w"], FULL.permute(2, 0, 1))
    assert torch.equal(loaded["v"], FULL[:, :, ::3])


def test_metadata_that_does_not_fit_the_archive_is_an_error(tmp_path: Path) -> None:
    """If the index says another dtype than the archive, nothing is loaded."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"holds torch\.float32"):
        dc.load_plain_tensors(tmp_path / "c")


def test_a_lost_chunk_is_an_error_that_names_the_hole(tmp_path: Path) -> None:
    """Where a save lost data (stock DCP's worker threads can), the load names key and region."""
    dcp.save({"w": torch.ones(4), "ok": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "w"}
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"'w'.*does not hold"):
        dc.load_plain_tensors(tmp_path / "c")
    ok = ShardedTensor.from_rank_offsets("ok", torch.zeros(2))
    assert dc.load({"ok": ok}, tmp_path / "c")["ok"].eq(1).all()


@table("rows", [slice(0, 100), slice(17, 60)])
@table("columns", [10, 1000])
def test_archives_of_others_among_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: slice, columns: int
) -> None:
    """Tensors come back right where their archives are not as we write them; the others are read as they are.

    Of small ones those that are wanted entirely are.
    """
    monkeypatch.setattr(regions, "_HEADS", 2)
    parsed: set[str] = set()
    original = regions.ArchiveReader.read_region

    def note(reader: Any, region: Any, dtype: Any, key: str, source: Any) -> None:
        parsed.add(key)
        original(reader, region, dtype, key, source)

    monkeypatch.setattr(regions.ArchiveReader, "read_region", note)
    saved = {f"w{n}": torch.arange(100.0 * columns).view(100, columns) + n for n in range(5)}
    dc.save(entire(saved), tmp_path / "c")
    (data,) = (tmp_path / "c").glob("*.distcp")
    content = bytearray(data.read_bytes())
    for key in ("w1", "w4"):
        payload = content.index(tensor_bytes(saved[key]))
        place = content.rindex(b"PK\x03\x04", 0, payload)
        content[place + 10] ^= 1  # the time of the member, which no reader looks at
    data.write_bytes(content)
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", "0")
    count = rows.stop - rows.start
    is_small_part = columns == 10 and count < 100
    for dtype, read_by_parts in (
        (torch.float32, set(saved) if is_small_part else {"w1", "w4"}),
        (torch.float64, set(saved)),
    ):
        parsed.clear()
        wanted = {
            key: ShardedTensor(
                key,
                torch.zeros(count, columns, dtype=dtype),
                dtype,
                (count, columns),
                (100, columns),
                (rows.start, 0),
                None,
            )
            for key in saved
        }
        loaded = dc.load(wanted, tmp_path / "c", validate_access_integrity=False)
        assert all(torch.equal(loaded[key], value[rows].to(dtype)) for key, value in saved.items())
        assert parsed == read_by_parts
