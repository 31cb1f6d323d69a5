from __future__ import annotations

import io
import os
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt.archive.reader import Archive, load_bytes
from shardckpt.archive.writer import make_frame, make_frame_of_length
from shardckpt.errors import CannotLoadError, CorruptCheckpointError
from shardckpt.tensors.memory import tensor_bytes
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
SHAPES = [
    (),
    (0,),
    (1,),
    (5,),
    (2, 0, 3),
    (3, 4),
    (2, 3, 4),
    (700, 500),
    (0, 256, 65536),
    (1 << 33, 0),
    (1, 2, 1, 2, 1, 2, 1),
]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(tensor_bytes(a)) == bytes(tensor_bytes(b.contiguous()))


def _sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@table("dtype", DTYPES, ids=str)
def test_what_we_write_torch_reads(dtype: torch.dtype) -> None:
    """Our archive around a tensor's memory is one that torch.load(weights_only=True) and our reader understand."""
    for shape in SHAPES:
        tensor = _sample(dtype, shape)
        for position, address in ((0, 0), (13, 4160), (4095, 64 << 10), (64, 128)):
            head, tail = make_frame(dtype, shape, position, address)
            data = head + bytes(tensor_bytes(tensor)) + tail
            loaded = torch.load(io.BytesIO(data), weights_only=True)
            assert _same(loaded, tensor)
            assert loaded.stride() == tensor.stride()
            assert _same(load_bytes(data, "ours"), tensor)
            payload = Archive(lambda o, n, data=data: data[o : o + n], len(data), "ours").payload()
            assert payload.is_contiguous
            assert (payload.dtype, payload.shape) == (dtype, shape)
            place = position + payload.offset
            assert (place - address) % 4096 == 0 if tensor.nbytes >= 1 << 20 else place % 64 == 0
            assert make_frame_of_length(dtype, shape, len(data)) == (head, tail)


@table("dtype", DTYPES, ids=str)
def test_what_torch_writes_we_read(dtype: torch.dtype) -> None:
    """Archives of torch.save, strided and offset views and shared storages included, give the same tensors."""
    base = _sample(dtype, (6, 4))
    state = {"view": base[1:, ::2], "same": base, "list": [base[0], {"x": 1}], "scalar": base[0, 0]}
    file = io.BytesIO()
    torch.save(state, file)
    loaded = load_bytes(file.getvalue(), "torch")
    assert _same(loaded["view"].contiguous(), base[1:, ::2])
    assert _same(loaded["list"][0], base[0])
    assert loaded["list"][1] == {"x": 1}
    assert loaded["view"].untyped_storage().data_ptr() == loaded["same"].untyped_storage().data_ptr()
    file = io.BytesIO()
    torch.save(base.T, file)
    payload = Archive(lambda o, n: file.getvalue()[o : o + n], len(file.getvalue()), "torch").payload()
    assert (payload.shape, payload.stride, payload.is_contiguous) == ((4, 6), (1, 4), False)


def test_parameters_and_subclasses_come_as_tensors() -> None:
    """Parameters stay parameters with their requires_grad; attributes on tensors are left behind."""
    file = io.BytesIO()
    plain = torch.ones(2)
    plain.note = "x"  # type: ignore[attr-defined]
    torch.save(
        [torch.nn.Parameter(torch.ones(2), requires_grad=False), plain, torch.zeros(1, requires_grad=True)], file
    )
    parameter, tensor, grad = load_bytes(file.getvalue(), "torch")
    assert isinstance(parameter, torch.nn.Parameter)
    assert not parameter.requires_grad
    assert torch.equal(tensor, plain)
    assert grad.requires_grad


@table("cut", [0, 1, 40, -1])
def test_a_cut_archive_is_an_error(cut: int) -> None:
    """An archive that ends early is named as damaged, whatever is missing."""
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    with pytest.raises(CorruptCheckpointError, match="it"):
        load_bytes(file.getvalue()[:cut], "it")


def test_a_compressed_archive_is_refused() -> None:
    """Nothing is inflated: no zip bomb is opened. It is not called damaged, since torch.load reads it."""
    file = io.BytesIO()
    torch.save(torch.zeros(1000), file)
    packed = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CannotLoadError, match=r"^it is a zip archive that torch\.save did not write: .* is compressed"):
        load_bytes(packed.getvalue(), "it")
    flipped = bytearray(file.getvalue())
    flipped[flipped.index(b"PK\x01\x02") + 10] ^= 8  # the directory alone says that a member is compressed
    with pytest.raises(CorruptCheckpointError, match="directory"):
        load_bytes(bytes(flipped), "it")


def test_four_gibibytes_need_zip64(tmp_path: Path) -> None:
    """A payload above 4 GiB is written with zip64 fields that torch and our reader follow (a sparse file here)."""
    count = (1 << 32) + 64
    head, tail = make_frame(torch.uint8, (count,), 0)
    path, size = tmp_path / "big", len(head) + count + len(tail)
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + count - 1)
        file.write(b"\x07" + tail)
    with path.open("rb") as file:
        payload = Archive(lambda o, n: os.pread(file.fileno(), n, o), size, "big").payload()
    assert (payload.shape, payload.offset) == ((count,), len(head))
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == (count,)
    assert loaded[-1] == 7
