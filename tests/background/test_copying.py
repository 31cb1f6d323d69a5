"""Copying tensors into staging memory: any tensor, right, by threads where that pays."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from shardckpt.background import copying
from shardckpt.background.copying import Copies
from shardckpt.errors import ShardingError
from tests.tables import table


def _copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = Copies([f"key{n}" for n in range(len(tensors))], tensors)
    memory = torch.full((copies.layout.nbytes,), 255, dtype=torch.uint8)
    views = copies.layout.views(memory)
    copies.run(views)
    return views


@table("threads", ["1", "2", "4"])
@table("large", [1 << 20, 1])
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


@table(("place", "first"), [(0, 4096), (64, 64), (4032, 4032), (1, 4096), (8, 4096), (100, 4096)])
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
            Copies(["a", "b", "c"], [plain[0], wrong, plain[2]], layout).run(copies)


@table("gap", [0, 15, 16, 500])
@table("run", [64, 4096, 1 << 20])
def test_neighbours_are_copied_bit_for_bit(monkeypatch: pytest.MonkeyPatch, gap: int, run: int) -> None:
    """Small tensors side by side in one memory, with gaps, strangers and others between: the same bytes, no more."""
    monkeypatch.setattr(copying, "_RUN", run)
    monkeypatch.setattr(copying, "_PIECE", 1000)
    memory = torch.randint(256, (200_000,), dtype=torch.uint8)
    stranger = memory.repeat(6)[: 1 << 20]
    tensors: list[torch.Tensor] = []
    place = 0
    for number in range(100):
        count = (number * 37) % 300
        tensors.append(memory[place : place + 4 * count].view(torch.int32))
        place += -(-4 * count // 64) * 64 + gap // 4 * 4 * (number % 7 == 0)
        if number % 20 == 5:
            tensors += [torch.ones(3), torch.zeros(2, 0), stranger.clone()]
    tensors += [tensors[4], tensors[3]]
    turned = [tensor.view(2, -1).t() if number == 4 else tensor for number, tensor in enumerate(tensors)]
    for some in (tensors, turned, [*tensors, torch.ones(3, 4).t()]):
        copies = _copied(some)
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, some, strict=True))


def test_neighbours_that_change_between_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one save has found out of its tensors' memory is not believed of those of the next."""
    monkeypatch.setattr(copying, "_RUN", 4096)
    memory = torch.randint(256, (40 * 4096,), dtype=torch.uint8).view(torch.int32)
    tensors = list(memory.view(40, 32, 32))
    keys = [f"key{n}" for n in range(40)]
    layout = Copies(keys, tensors).layout
    for change in ("none", "none", "turned in place", "elsewhere", "expanded", "none"):
        some = list(tensors)
        if change == "turned in place":  # the same address
            some[7] = tensors[7].t()
        elif change == "elsewhere":
            some[7] = tensors[7].clone()
        elif change == "expanded":
            some[7] = tensors[7].as_strided((32, 32), (0, 1))
        views = layout.views(torch.full((layout.nbytes,), 255, dtype=torch.uint8))
        Copies(keys, some, layout).run(views)
        assert all(torch.equal(copy, tensor) for copy, tensor in zip(views, some, strict=True)), change
        assert layout.run_finder.has_found


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


@table("count", [1, 40, 33_000])
def test_every_dtype_is_copied_bit_for_bit(count: int) -> None:
    """All dtypes that torch has names for, few elements or many, bools of odd bytes too: the same bytes."""
    memory = torch.randint(256, (16 * count,), dtype=torch.uint8)
    tensors = [memory[: dtype.itemsize * count].clone().view(dtype) for dtype in DTYPES if "torch.q" not in str(dtype)]
    for tensor, copy in zip(tensors, _copied(tensors), strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy.view(torch.uint8), tensor.view(torch.uint8)), tensor.dtype


@table("size", [5, 300_000])
def test_a_layout_is_for_tensors_of_its_form(size: int) -> None:
    """Tensors of another size or dtype than a layout was made for are refused by key, and not copied past their end."""
    layout = Copies(["a", "b"], [torch.ones(3), torch.ones(size)]).layout
    assert Copies(["a", "b"], [torch.zeros(3), torch.zeros(size)], layout).layout is layout
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(memory)
    for other in (torch.ones(1), torch.ones(size, dtype=torch.int32), torch.ones(size, dtype=torch.bfloat16)):
        with pytest.raises(ShardingError, match="'b'"):
            Copies(["a", "b"], [torch.zeros(3), other], layout).run(views)
        assert not memory.any()


def test_what_cannot_be_copied_is_named() -> None:
    """A tensor that torch refuses to copy among many small ones is an error with its key."""
    torch.vmap(_refused)(torch.ones(2, 3))
    with pytest.raises(ShardingError, match=r"'key0'.*no memory"):
        _copied([torch.ones(3, device="meta"), torch.ones(2)])


def _refused(row: torch.Tensor) -> torch.Tensor:
    with pytest.raises(ShardingError, match="'key1'"):
        _copied([torch.ones(2), row])
    return row


def test_tensors_that_are_alike_are_copied_as_any_others() -> None:
    """Tensors of one shape, whose copies are joined, with any strides and bits; others among them; a changed one."""
    plain = [torch.full((8, 4), float(n)) for n in range(600)]
    layout = Copies([str(n) for n in range(600)], plain).layout
    assert all(isinstance(batch, range) for batch in layout.batches)
    assert sorted(number for batch in layout.batches for number in batch) == list(range(600))
    mixed = list(plain)
    mixed[3] = torch.arange(32.0).view(4, 8).t()
    mixed[300] = torch._neg_view(torch.ones(8, 4))
    mixed[301] = torch.nn.Parameter(torch.ones(8, 4))
    mixed[302] = torch.arange(64.0).view(8, 8)[:, ::2]
    for tensors in (plain, mixed, mixed[::-1]):
        views = layout.views(torch.full((layout.nbytes,), 255, dtype=torch.uint8))
        Copies([str(n) for n in range(600)], tensors, layout).run(views)
        assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    between = [*plain[:20], torch.ones(3), *plain[20:40], torch.ones((8, 4), dtype=torch.int32), *plain[40:]]
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(_copied(between), between, strict=True))
    for places in ((0,), (7,), range(600)):
        turned = list(plain)
        for place in places:
            turned[place] = torch.ones(4, 8)
        with pytest.raises(RuntimeError, match="size"):
            Copies([str(n) for n in range(600)], turned, layout).run(views)


def test_a_layout_is_pickled_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process gets the layout of a save as it is, and the second save with it does not pickle it again."""
    layout = Copies(["a", "b"], [torch.ones(5), torch.ones(600, 600)]).layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    monkeypatch.setattr(copying, "pickle_value", lambda _: pytest.fail("it is pickled again"))
    assert pickle.loads(pickle.dumps(layout)) == layout
