"""Copying tensors into staging memory: any tensor, right, by threads where that pays."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from shardckpt.background import copying
from shardckpt.background.copying import Copies
from shardckpt.errors import ShardingError


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = Copies([f"key{n}" for n in range(len(tensors))], tensors)
    memory = torch.full((copies.layout.nbytes,), 255, dtype=torch.uint8)
    views = copies.layout.views(memory)
    copies.run(views)
    return views


@pytest.mark.parametrize("threads", ["1", "2", "4"])
@pytest.mark.parametrize("large", [1 << 20, 1])
def test_any_tensor_is_copied_as_it_shows(monkeypatch: pytest.MonkeyPatch, threads: str, large: int) -> None:
    """Views, strides, conj and neg bits, parameters, 0-D and empty ones: the copies are equal and their own."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", threads)
    monkeypatch.setattr(copying, "_LARGE", large)
    monkeypatch.setattr(copying, "_PIECE", 1000)
    values = torch.randn(40, 50)
    tensors = [
        values,
        values.t(),
        values[3:7],
        values[:, 5:9],
        torch.complex(values, values + 1).conj(),
        torch._neg_view(values),
        torch.nn.Parameter(values + 2),
        torch.tensor(3.5),
        torch.zeros(0, 7),
        torch.tensor([True, False, True]),
        values.to(torch.float8_e4m3fn),
        values.to(torch.bfloat16)[::2],
        torch.arange(5).expand(3, 5),
        values + 1j,
    ]
    copies = _copied(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy.to(torch.complex64), tensor.detach().to(torch.complex64))
    values.zero_()
    assert copies[0].ne(0).all()
    assert copies[2].ne(0).all()


def _large_at(place: int) -> torch.Tensor:
    """1 MiB that begins so many bytes behind a page boundary."""
    memory = torch.randint(256, ((1 << 20) + 8192,), dtype=torch.uint8)
    start = (place - memory.data_ptr()) % 4096
    return memory[start : start + (1 << 20)]


@pytest.mark.parametrize(("place", "first"), [(0, 4096), (64, 64), (4032, 4032), (1, 4096), (8, 4096), (100, 4096)])
def test_large_ones_keep_their_place_in_the_page(place: int, first: int) -> None:
    """Large copies are where their tensors are in a page, for writes past the page cache; all are at 64s."""
    tensors = [torch.ones(5), _large_at(place), torch.ones(3, dtype=torch.complex128)]
    layout = Copies(["a", "b", "c"], tensors).layout
    assert list(layout.offsets) == [0, first, first + (1 << 20)]
    assert layout.nbytes == first + (1 << 20) + 64
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(_copied(tensors), tensors, strict=True))


def test_a_layout_serves_tensors_of_any_kind() -> None:
    """A layout of plain tensors is reused for views of the same shapes, and refuses others with their key."""
    plain = [torch.randn(3, 4), torch.ones(5, dtype=torch.int64), torch.randn(200, 200)]
    layout = Copies(["a", "b", "c"], plain).layout
    views = [torch.randn(4, 3).t(), torch.arange(10)[::2], torch.randn(200, 200).t()]
    for tensors in (plain, views, [plain[0], views[1], plain[2]], [views[0], plain[1], views[2]]):
        copies = layout.views(torch.full((layout.nbytes,), 255, dtype=torch.uint8))
        Copies(["a", "b", "c"], tensors, layout).run(copies)
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    for wrong in (torch.ones(5, dtype=torch.int32), torch.ones(4, dtype=torch.int64)):
        with pytest.raises(ShardingError, match=r"'b': [45] of torch\.int"):
            Copies(["a", "b", "c"], [plain[0], wrong, plain[2]], layout)


@pytest.mark.parametrize("gap", [0, 1, 15, 16, 500])
@pytest.mark.parametrize("run", [64, 4096, 1 << 20])
def test_neighbours_are_copied_bit_for_bit(monkeypatch: pytest.MonkeyPatch, gap: int, run: int) -> None:
    """Small tensors side by side in one memory, with gaps, strangers and others between: the same bytes, no more."""
    monkeypatch.setattr(copying, "_RUN", run)
    monkeypatch.setattr(copying, "_PIECE", 1000)
    memory = torch.randint(256, (200_000,), dtype=torch.uint8)
    tensors: list[torch.Tensor] = []
    place = 0
    for number in range(100):
        count = (number * 37) % 300
        tensors.append(memory[place : place + 4 * count].view(torch.int32))
        place += -(-4 * count // 64) * 64 + gap // 4 * 4 * (number % 7 == 0)
        if number % 20 == 5:
            tensors += [torch.ones(3), torch.zeros(2, 0), torch.randint(256, (1 << 20,), dtype=torch.uint8)]
    tensors += [tensors[4], tensors[3]]
    for some in (tensors, [*tensors, torch.ones(3, 4).t()]):
        copies = _copied(some)
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, some, strict=True))


def test_freed_memory_is_refused() -> None:
    """A tensor whose storage was freed, as FSDP does, is an error with its key and not a crash, views of it as well."""
    for low in (0, 7):
        tensor = torch.ones(100)
        part = tensor[low:]
        tensor.untyped_storage().resize_(0)
        with pytest.raises(ShardingError, match=r"'key1'.*no memory"):
            _copied([torch.ones(3), part])


def test_wrappers_are_refused_with_their_key() -> None:
    """A tensor that wraps others has no memory of its own: it is not taken for its address."""
    with pytest.raises(ShardingError, match="'key0'"):
        _copied([TwoTensor(torch.ones(3), torch.ones(3))])


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("count", [1, 40, 33_000])
def test_every_dtype_is_copied_bit_for_bit(count: int) -> None:
    """All dtypes that torch has names for, few elements or many, bools of odd bytes too: the same bytes."""
    memory = torch.randint(256, (16 * count,), dtype=torch.uint8)
    tensors = [memory[: dtype.itemsize * count].clone().view(dtype) for dtype in DTYPES if "torch.q" not in str(dtype)]
    for tensor, copy in zip(tensors, _copied(tensors), strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8)), tensor.dtype


@pytest.mark.parametrize("size", [5, 300_000])
def test_a_layout_is_for_tensors_of_its_form(size: int) -> None:
    """Tensors of another size or dtype than a layout was made for are refused by key, and not copied past their end."""
    layout = Copies(["a", "b"], [torch.ones(3), torch.ones(size)]).layout
    assert Copies(["a", "b"], [torch.zeros(3), torch.zeros(size)], layout).layout is layout
    for other in (torch.ones(1), torch.ones(size, dtype=torch.int32), torch.ones(size, dtype=torch.bfloat16)):
        with pytest.raises(ShardingError, match="'b'"):
            Copies(["a", "b"], [torch.ones(3), other], layout)


def test_what_cannot_be_copied_is_named() -> None:
    """A tensor that torch refuses to copy among many small ones is an error with its key."""
    torch.vmap(_refused)(torch.ones(2, 3))
    with pytest.raises(ShardingError, match=r"'key0'.*no memory"):
        _copied([torch.ones(3, device="meta"), torch.ones(2)])


def _refused(row: torch.Tensor) -> torch.Tensor:
    with pytest.raises(ShardingError, match="'key1'"):
        _copied([torch.ones(2), row])
    return row
