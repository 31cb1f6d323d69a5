from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.chunks import contiguous, read_ahead
from shardckpt.errors import CorruptCheckpointError
from shardckpt.mapping import ShardedTensor
from tests import states
from tests.damage import flip
from tests.resources import watch_reads
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def _fresh(sizes: list[int], order: list[int], gap: int) -> dict[str, Any]:
    """Tensors of some sizes in one run of memory, in an order, with a gap between them."""
    memory = torch.zeros(sum(sizes) + gap * len(sizes))
    found: dict[str, Any] = {}
    first = 0
    for number in order:
        found[f"t{number}"] = memory[first : first + sizes[number]]
        first += sizes[number] + gap
    return found


@table("backend", ["safetensors", "torch_dist"])
@table("gap", [0, 16])
@table("seed", range(3))
def test_tensors_in_any_order_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, gap: int, backend: str
) -> None:
    """Tensors of any size have their values, wherever they lie in memory, and nothing between them is touched."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 16, 32, 1 << 10, 1 << 15]) for _ in range(120)]
    saved = {f"t{number}": torch.rand(size) for number, size in enumerate(sizes)}
    dc.save(states.entire(saved), tmp_path / "c", backend)
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 1 << 16)
    order = list(range(len(sizes)))
    if seed:
        rng.shuffle(order)
    tensors = _fresh(sizes, order, gap)
    wanted = {key: tensors[key] for key in saved if seed < 2 or rng.random() < 0.7}
    dc.load(states.entire(wanted), tmp_path / "c")
    assert all(torch.equal(tensor, saved[key]) for key, tensor in wanted.items())
    memory = next(iter(tensors.values()))._base
    assert memory is not None
    assert int((memory != 0).sum()) == sum(int((tensor != 0).sum()) for tensor in wanted.values())


@table("backend", ["safetensors", "torch_dist"])
def test_destinations_of_other_kinds(tmp_path: Path, backend: str) -> None:
    """Beside tensors that take bytes as they are, those with strides, another dtype or no memory have the values."""
    saved = {f"t{number}": torch.rand(8, 4) for number in range(6)}
    dc.save(states.entire(saved), tmp_path / "c", backend)
    wanted = states.entire({key: torch.zeros(8, 4) for key in saved})
    wanted["t1"].data = torch.zeros(4, 8).T
    wanted["t2"] = ShardedTensor.from_rank_offsets("t2", torch.zeros(8, 4, dtype=torch.float64))
    wanted["t3"].data = None
    wanted["t4"] = ShardedTensor.from_rank_offsets("t4", torch.nn.Parameter(torch.zeros(8, 4)))
    loaded = dc.load(wanted, tmp_path / "c")
    assert all(torch.equal(loaded[key].float(), tensor) for key, tensor in saved.items())


@table("backend", ["safetensors", "torch_dist"])
@table("size", [1 << 10, 1 << 16])
@table("gap", [0, 16])
def test_the_damaged_tensor_is_named(tmp_path: Path, gap: int, size: int, backend: str) -> None:
    """Of many tensors that are read at once, the error names the one whose bytes are not those that were written."""
    sizes = [size] * 40
    saved = {f"t{number}": torch.rand(size) for number, size in enumerate(sizes)}
    dc.save(states.entire(saved), tmp_path / "c", backend)
    data = max((tmp_path / "c").iterdir(), key=lambda path: path.stat().st_size)
    flip(data, saved["t33"].numpy().tobytes())
    with pytest.raises(CorruptCheckpointError, match=r"t3[0-9]\b.*digest differs"):
        dc.load(states.entire(_fresh(sizes, list(range(40)), gap)), tmp_path / "c")


@table("backend", ["safetensors", "torch_dist"])
@table("kib", [4, 64, 68])
@table("kind", ["plain", "cast", "strided"])
def test_small_tensors_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kib: int, backend: str
) -> None:
    """Whatever their destinations, what is under one digest is read with its neighbours, and not once more."""
    saved = {f"t{number}": torch.rand(kib << 8) for number in range(40)}
    dc.save(states.entire(saved), tmp_path / "c", backend)
    data = max((tmp_path / "c").iterdir(), key=lambda path: path.stat().st_size)
    wanted = {
        "plain": torch.zeros,
        "cast": lambda size: torch.zeros(size, dtype=torch.float64),
        "strided": lambda size: torch.zeros(size, 2)[:, 0],
    }[kind]
    state = states.entire({key: wanted(len(value)) for key, value in saved.items()})
    reads = watch_reads(monkeypatch)
    loaded = dc.load(state, tmp_path / "c", allow_dtype_cast=True)
    assert all(torch.equal(loaded[key].float(), value) for key, value in saved.items())
    assert sum(read.nbytes for read in reads if read.name == data.name) <= data.stat().st_size


def test_small_tensors_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of some KiB, anywhere in memory, are read into it, many by one call."""
    saved = {f"t{number}": torch.rand(2 << 10) for number in range(100)}
    dc.save(states.entire(saved), tmp_path / "c", "safetensors")
    data = max((tmp_path / "c").iterdir(), key=lambda path: path.stat().st_size)
    state = states.entire({key: torch.zeros(2 << 10) for key in saved})
    copies: list[object] = []
    monkeypatch.setattr(contiguous.ctypes, "memmove", lambda *args: copies.append(args))
    reads = watch_reads(monkeypatch)
    loaded = dc.load(state, tmp_path / "c")
    assert all(torch.equal(loaded[key], value) for key, value in saved.items())
    assert not copies
    assert len([read for read in reads if read.name == data.name]) <= 3


@table("backend", ["safetensors", "torch_dist"])
@table("seed", range(4))
def test_any_box_of_tensors_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, backend: str) -> None:
    """A box of rows, columns, or single elements has its values, whichever chunks have them."""
    rng = random.Random(seed)
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 1 << 16)
    full, saved, wanted = {}, {}, {}
    for number in range(90):  # more than few
        shape = [rng.choice([2, 4, 6]) * rng.choice([1, 1, 1, 40]) for _ in range(rng.randint(1, 3))]
        key = f"t{number}"
        full[key] = torch.randint(0, 1 << 30, shape, dtype=rng.choice([torch.int32, torch.int64]))
        halves = full[key].chunk(2, axis := rng.randrange(len(shape)))
        parts = [
            _box(full[key], key, [(0, half.shape[axis] * n)[i == axis] for i in range(len(shape))], half.shape)
            for n, half in enumerate(halves)
        ]
        saved.update({f"{key}/{n}": part for n, part in enumerate(parts)})
        corner = [rng.randrange(size) for size in shape]
        sizes = [
            rng.choice([1, size - low, rng.randint(1, size - low)]) for size, low in zip(shape, corner, strict=True)
        ]
        wanted[key] = _box(full[key], key, corner, sizes)
    expected = {key: box.data.clone() for key, box in wanted.items()}
    for box in wanted.values():
        box.data.zero_()
    dc.save(saved, tmp_path / "c", backend)
    loaded = dc.load(wanted, tmp_path / "c", validate_access_integrity=False)
    assert all(torch.equal(loaded[key], values) for key, values in expected.items())


@table("backend", ["safetensors", "torch_dist"])
def test_the_same_rows_for_several_shards(tmp_path: Path, backend: str) -> None:
    """Shards that ask for other rows of the same small tensors, some of them twice, all have theirs."""
    full = {f"t{number}": torch.rand(16, 8) for number in range(20)}
    dc.save(states.entire(full), tmp_path / "c", backend)
    lows = [8, 0, 3, 0, 12]
    wanted = {
        f"{key}/{n}": _box(value, key, [low, 0], [4, 8]) for key, value in full.items() for n, low in enumerate(lows)
    }
    for box in wanted.values():
        box.data.zero_()
    loaded = dc.load(wanted, tmp_path / "c", validate_access_integrity=False)
    assert all(
        torch.equal(loaded[f"{key}/{n}"], full[key][low : low + 4]) for key in full for n, low in enumerate(lows)
    )


def _box(full: torch.Tensor, key: str, corner: Sequence[int], sizes: Sequence[int]) -> Any:
    """A shard that is a box of a tensor, with a copy of its values."""
    data = full[tuple(slice(low, low + size) for low, size in zip(corner, sizes, strict=True))].clone()
    return ShardedTensor(key, data, data.dtype, tuple(sizes), tuple(full.shape), tuple(corner), None)


@table("backend", ["safetensors", "torch_dist"])
@table("kib", [4, 4096])
@table("kind", ["strided", "cast"])
def test_the_damaged_tensor_is_named_where_none_is_read_in_columns(
    tmp_path: Path, kind: str, kib: int, backend: str
) -> None:
    """Destinations that take no bytes as they are, as those on a device, get the same error."""
    saved = {f"t{number}": torch.rand(2, kib << 7) for number in range(3)}
    dc.save(states.entire(saved), tmp_path / "c", backend)
    data = max((tmp_path / "c").iterdir(), key=lambda path: path.stat().st_size)
    flip(data, saved["t1"].numpy().tobytes())
    wanted = states.entire({key: torch.zeros(2, kib << 7, dtype=torch.float64) for key in saved})
    if kind == "strided":
        wanted = states.entire({key: torch.zeros(kib << 7, 2).T for key in saved})
    with pytest.raises(CorruptCheckpointError, match=r"\bt1\b.*digest differs"):
        dc.load(wanted, tmp_path / "c", allow_dtype_cast=True)
