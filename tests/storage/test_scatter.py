"""Boxes of stored tensors, read into tensors of any strides and dtype: right, checked, and no byte twice."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import Manifest
from shardckpt.storage import buffers, scatter
from shardckpt.storage import reader as reader_module
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.scatter import StoredArray, read_box
from shardckpt.storage.spans import ElementRange, Pieces
from shardckpt.tensors.memory import tensor_bytes
from tests.damage import flip
from tests.resources import watch_reads
from tests.storage.files import manifest, write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FOREIGN = Manifest(backend="b", version=1)
DTYPES = [
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
HEAD = b"head!"


def _random(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Any bits that are values of the dtype; no NaN, which is not equal to itself."""
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,)).bool().view(tuple(shape))
    bits = torch.randint(0, 56, (count * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).view(tuple(shape))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.itemsize == 1:
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return torch.equal(a, b)


def _store(directory: Path, whole: torch.Tensor, cuts: Sequence[int]) -> Manifest:
    """The tensor's bytes behind a head and before a tail, in records (and so segments) that end at the cuts."""
    raw = HEAD + bytes(tensor_bytes(whole)) + b"tail"
    ends = sorted({min(cut, len(raw)) for cut in cuts} | {len(raw)})
    return manifest(write(directory, "data", [[raw[a:b]] for a, b in zip([0, *ends], ends, strict=False) if a < b]))


def _strided(shape: Sequence[int], dtype: torch.dtype, order: Sequence[int], margin: int) -> torch.Tensor:
    """A tensor of the shape inside a larger one, its axes in another order in memory."""
    outer = torch.zeros([shape[axis] + margin for axis in order], dtype=dtype)
    for position, axis in enumerate(order):
        outer = outer.narrow(position, margin, shape[axis])
    return outer.permute([list(order).index(axis) for axis in range(len(shape))])


@given(data=st.data())
@settings(deadline=None, max_examples=120)
def test_any_box_into_any_strides(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Boxes of tensors of any dtype arrive as slicing the tensor gives them, wherever segments and pieces end."""
    shape = data.draw(st.lists(st.integers(1, 7), max_size=4))
    dtype = data.draw(st.sampled_from(DTYPES))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(data.draw(st.integers(1, size - low)) for size, low in zip(shape, start, strict=True))
    whole = _random(dtype, shape)
    directory = tmp_path_factory.mktemp("box")
    found = _store(directory, whole, data.draw(st.lists(st.integers(1, 3000), max_size=12)))
    into = data.draw(st.sampled_from([dtype, torch.float64 if not dtype.is_complex else torch.complex128]))
    target = _strided(extent, into, data.draw(st.permutations(range(len(shape)))), data.draw(st.integers(0, 2)))
    stored = StoredArray("data", len(HEAD), dtype, tuple(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "_READ_BYTES", data.draw(st.sampled_from([16, 48, 400, 1 << 20])))
        patch.setattr(reader_module, "_BATCH_BYTES", data.draw(st.sampled_from([32, 8 << 20])))
        patch.setattr(scatter, "_GAP", data.draw(st.sampled_from([1, 24, 64 << 10])))
        for kind in (found, FOREIGN):
            target.zero_()
            with CheckpointReader(directory, kind, verify=True) as reader:
                read_box(reader, stored, start, target, "key")
            box = whole[tuple(slice(low, low + size) for low, size in zip(start, extent, strict=True))]
            assert _same(target, box.to(into))


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_no_byte_is_read_twice(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the box: no byte twice, with digests the touched segments alone, without them next to nothing more."""
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40)))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(data.draw(st.integers(1, size - low)) for size, low in zip(shape, start, strict=True))
    whole = _random(torch.float32, shape)
    directory = tmp_path_factory.mktemp("once")
    cuts = [len(HEAD), *range(len(HEAD) + 64, 20000, 64)]
    found = _store(directory, whole, cuts)
    target = torch.zeros(*extent, dtype=torch.float64)
    wanted = torch.zeros(*shape, dtype=torch.bool)
    wanted[tuple(slice(low, low + size) for low, size in zip(start, extent, strict=True))] = True
    elements = wanted.flatten().nonzero().flatten().tolist()
    touched = {(4 * element) // 64 for element in elements}
    for kind, most in ((found, 64 * len(touched)), (FOREIGN, 4 * len(elements))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reader_module, "_READ_BYTES", 256)
            patch.setattr(scatter, "_GAP", 1)
            reads = watch_reads(patch)
            with CheckpointReader(directory, kind, verify=True) as reader:
                read_box(reader, StoredArray("data", len(HEAD), torch.float32, shape), start, target, "key")
        assert sum(read.nbytes for read in reads) <= most
        assert all(a + n <= b for (_, a, n), (_, b, _) in pairwise(sorted(reads)))
        assert torch.equal(target[0, 0, 0], whole[start].double())


def test_columns_are_one_pass_over_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the columns is one sequential pass, not a request a row; rows far apart are read one by one."""
    whole = _random(torch.float32, (1024, 1024))
    found = _store(tmp_path, whole, [len(HEAD)])
    for kind in (found, FOREIGN):
        with pytest.MonkeyPatch.context() as patch, CheckpointReader(tmp_path, kind, verify=True) as reader:
            reads = watch_reads(patch)
            target = torch.zeros(1024, 512)
            read_box(reader, StoredArray("data", len(HEAD), torch.float32, (1024, 1024)), (0, 512), target, "key")
            assert torch.equal(target, whole[:, 512:])
            assert sum(read.nbytes for read in reads) <= whole.nbytes
            assert len(reads) <= 5
    with CheckpointReader(tmp_path, FOREIGN) as reader:
        reads = watch_reads(monkeypatch)
        target = torch.zeros(8, 100)
        read_box(reader, StoredArray("data", len(HEAD), torch.float32, (8, 128 << 10)), (0, 7), target, "key")
        assert torch.equal(target, whole.view(8, -1)[:, 7:107])
        assert [read.nbytes for read in reads] == [400] * 8


def test_buffers_are_small_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast of a large tensor goes through two buffers a thread at most, each of about 2 MiB."""
    made: list[int] = []

    class Counted(buffers.Buffer):
        def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
            made.append(nbytes)
            super().__init__(nbytes, pinned=pinned)

    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "2")
    whole = _random(torch.int16, (4096, 4096))
    found = _store(tmp_path, whole, [len(HEAD)])
    target = torch.zeros(4096, 4096)
    monkeypatch.setattr(buffers, "Buffer", Counted)
    with CheckpointReader(tmp_path, found, verify=True) as reader:
        read_box(reader, StoredArray("data", len(HEAD), torch.int16, (4096, 4096)), (0, 0), target, "key")
    assert torch.equal(target, whole.float())
    assert 0 < sum(made) <= 2 * 2 * ((2 << 20) + 64)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_damage_is_found_and_named_on_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    """A flipped bit stops a whole read, a strided one and a casting one, and is named; a part without it is read."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", threads)
    whole = _random(torch.float32, (1024, 1500))
    found = _store(tmp_path, whole, [len(HEAD)])
    place = len(HEAD) + 4 * (500 * 1500 + 1499)
    flip(tmp_path / "data", place)
    stored = StoredArray("data", len(HEAD), torch.float32, (1024, 1500))
    text = rf"layer\.weight: bytes \d+ to \d+ of {tmp_path / 'data'} are not those that were written"
    with CheckpointReader(tmp_path, found, verify=True) as reader:
        for start, target in (
            ((0, 0), torch.zeros(1024, 1500)),
            ((0, 0), torch.zeros(1500, 1024).t()),
            ((0, 0), torch.zeros(1024, 1500, dtype=torch.float64)),
            ((0, 750), torch.zeros(1024, 750)),
            ((500, 1490), torch.zeros(1, 10)),
        ):
            with pytest.raises(CorruptCheckpointError, match=text):
                read_box(reader, stored, start, target, "layer.weight")
        target = torch.zeros(250, 750)
        read_box(reader, stored, (0, 750), target, "layer.weight")
        assert torch.equal(target, whole[:250, 750:])


def test_what_takes_pieces_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a piece that is still copied from is not read into: two buffers take turns, and all is awaited."""
    monkeypatch.setattr(reader_module, "_READ_BYTES", 64)
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "1")
    content = bytes(range(256)) * 2
    found = manifest(write(tmp_path, "data", [[content[a : a + 32]] for a in range(0, 512, 32)]))
    late: list[tuple[int, memoryview]] = []
    seen: dict[int, bytes] = {}

    def take(position: int, memory: memoryview) -> Any:
        late.append((position, memory))

        def wait() -> None:
            place, view = late.pop(0)
            seen[place] = bytes(view)

        return wait

    with CheckpointReader(tmp_path, found, verify=True) as reader:
        reader.read_pieces(Pieces("data", ElementRange(0, 512, 4), [(0, 512)], "key"), take)
    assert not late
    assert b"".join(seen[place] for place in sorted(seen)) == content


def test_a_tensor_that_lies_across_all_segments(tmp_path: Path) -> None:
    """A large tensor behind a head of odd length, both one part of a record, is read right and in little memory."""
    whole = _random(torch.float32, (5 << 20,))
    raw = HEAD + bytes(tensor_bytes(whole))
    found = manifest(write(tmp_path, "data", [[raw]]))
    target = torch.zeros(5 << 20, dtype=torch.float64)
    with CheckpointReader(tmp_path, found, verify=True) as reader:
        read_box(reader, StoredArray("data", len(HEAD), torch.float32, (5 << 20,)), (0,), target, "key")
        assert torch.equal(target, whole.double())
        assert max(buffer.view.nbytes for buffer in reader._buffers._free[False]) < 12 << 20


def test_copies_that_nobody_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what goes to a CUDA device is copied behind the host's back: other copies have happened on return."""
    later: list[bool] = []
    call = scatter.copy_values

    def noting(target: torch.Tensor, values: torch.Tensor, *, non_blocking: bool = False) -> None:
        later.append(non_blocking)
        call(target, values, non_blocking=non_blocking)

    monkeypatch.setattr(scatter, "copy_values", noting)
    whole = _random(torch.float32, (30, 10))
    found = _store(tmp_path, whole, [len(HEAD)])
    with CheckpointReader(tmp_path, found, verify=True) as reader:
        stored = StoredArray("data", len(HEAD), torch.float32, (30, 10))
        read_box(reader, stored, (0, 0), torch.zeros(30, 10, dtype=torch.float64), "key")
        read_box(reader, stored, (0, 0), torch.zeros(30, 10, device="meta"), "key")
    assert later
    assert not any(later)


@given(data=st.data())
@settings(deadline=None)
def test_a_range_is_found_where_the_bytes_of_a_box_are_one(data: st.DataObject) -> None:
    """The range of a box is that of its first to its last element, and there is none where others lie between."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = tuple(data.draw(st.integers(1, size - low)) for size, low in zip(shape, start, strict=True))
    numbers = torch.arange(math.prod(shape)).view(shape)
    for axis, (low, length) in enumerate(zip(start, box, strict=True)):
        numbers = numbers.narrow(axis, low, length)
    places = numbers.reshape(-1).tolist()
    stored = StoredArray("data", 7, torch.int16, shape)
    expected = 7 + 2 * places[0] if places == list(range(places[0], places[0] + len(places))) else None
    assert scatter.find_range(stored, start, torch.zeros(box, dtype=torch.int16)) == expected
    assert scatter.find_range(stored, start, torch.zeros(box, dtype=torch.int32)) is None
    assert scatter.find_range(stored, start, torch.zeros(box, dtype=torch.int16, device="meta")) is None
