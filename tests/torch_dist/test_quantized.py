"""Quantized wrappers as Transformer Engine makes them: saved as their values, loaded by quantizing as values arrive."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardckpt import adapters
from shardckpt import dist_checkpointing as dc
from shardckpt.chunks import StagedDestination
from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner
from tests.damage import flip
from tests.names import data_file
from tests.tables import in_proof, table
from tests.torch_dist.te_stand_in import (
    ClosedStandIn,
    FirstFloat8StandIn,
    Float8StandIn,
    MXFP8StandIn,
    QuantizedStandIn,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

KINDS = [Float8StandIn, MXFP8StandIn, FirstFloat8StandIn]
#: Exact in every process, whatever its threads and libraries are.
FULL = ((torch.arange(64 * 128) * 37 % 1001 - 500) / 128).reshape(64, 128).bfloat16()


def _empty(kind: Any, shape: Any) -> Any:
    return kind.quantized(torch.ones(shape, dtype=FULL.dtype))


def _part(kind: Any, axis: int) -> tuple[torch.Tensor, Any, tuple[int, int, int]]:
    """This rank's values along an axis, an empty wrapper for them, and their place."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = FULL.chunk(size, axis)[rank].contiguous()
    return values, _empty(kind, values.shape), (axis, rank, size)


def _save_rows(path: str) -> None:
    values, _, place = _part(Float8StandIn, 0)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", values, place)}, path)


def _load_into(path: str, axis: int) -> list[str]:
    """What is wrong after a load into every kind of wrapper."""
    faults = []
    for kind in KINDS:
        values, wrapper, place = _part(kind, axis)
        loaded = dc.load({"w": ShardedTensor.from_rank_offsets("w", wrapper, place)}, path)["w"]
        if loaded is not wrapper or wrapper.bits() != kind.quantized(values).bits() or wrapper.times != 1:
            faults.append(f"{kind.__name__} on {dist.get_rank()}: {wrapper.times}")
    return faults


@pytest.mark.parametrize("saved_by", [2, *in_proof(1, 4)])
def test_resharded_into_wrappers(ranks: Ranks, tmp_path: Path, saved_by: int) -> None:
    """High precision loads into quantized wrappers of any sharding: once, in place, as if quantized there."""
    ranks.run(saved_by, _save_rows, str(tmp_path / "c"))
    for size in (1, 2, 4):
        for axis in (0, 1):
            assert ranks.run(size, _load_into, str(tmp_path / "c"), axis) == [[]] * size


def _save_and_load_wrappers(path: str) -> list[str]:
    faults = []
    for kind in KINDS:
        values, empty, place = _part(kind, 0)
        wrapper = kind.quantized(values)
        bits = wrapper.bits()
        dc.save({"w": ShardedTensor.from_rank_offsets("w", wrapper, place)}, f"{path}-{kind.__name__}")
        dc.load({"w": ShardedTensor.from_rank_offsets("w", empty, place)}, f"{path}-{kind.__name__}")
        if wrapper.bits() != bits or not torch.equal(empty.dequantize(), wrapper.dequantize()):
            faults.append(kind.__name__)
    return faults


@pytest.mark.parametrize("size", [2, *in_proof(1, 4)])
def test_saved_wrappers(ranks: Ranks, tmp_path: Path, size: int) -> None:
    """A wrapper is stored as its values; the save leaves it alone; a load into another gives the same values."""
    assert ranks.run(size, _save_and_load_wrappers, str(tmp_path / "c")) == [[]] * size
    stored = dc.load_plain_tensors(tmp_path / "c-MXFP8StandIn")["w"]
    assert stored.dtype == torch.bfloat16


@table("kind", KINDS)
def test_prepended_axes_and_flattened_ranges(tmp_path: Path, kind: Any) -> None:
    """Wrappers that have no views are experts of a larger tensor, and slices of a flattened one, all the same."""
    experts = [kind.quantized(FULL), kind.quantized(-FULL)]
    flat = kind.quantized(FULL.reshape(-1)[128:4096].contiguous())
    rest = [FULL.reshape(-1)[:128], FULL.reshape(-1)[4096:]]

    def shards(experts: Any, flat: Any) -> dict[str, Any]:
        pieces = [(rest[0], slice(0, 128)), (flat, slice(128, 4096)), (rest[1], slice(4096, 8192))]
        return {
            "experts": [
                ShardedTensor.from_rank_offsets("e", data, (0, number, 2), prepend_axis_num=1)
                for number, data in enumerate(experts)
            ],
            "flat": [
                ShardedTensor.from_rank_offsets_flat("f", data, FULL.shape, flattened_range=part)
                for data, part in pieces
            ],
        }

    dc.save(shards(experts, flat), tmp_path / "c")
    others = [_empty(kind, FULL.shape) for _ in experts]
    other_flat = _empty(kind, flat.shape)
    dc.load(shards(others, other_flat), tmp_path / "c")
    for old, new in zip([*experts, flat], [*others, other_flat], strict=True):
        assert torch.equal(new.dequantize(), old.dequantize())
        assert new.times == 1


def test_shapes_that_may_mismatch(tmp_path: Path) -> None:
    """Where the checkpoint has less than a wrapper wants, the rest is zero; a wrapper of which it has nothing, too."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", FULL)}, tmp_path / "c")
    wrappers = [_empty(MXFP8StandIn, (96, 128)) for _ in range(2)]
    shards = [
        ShardedTensor("w", data, data.dtype, (96, 128), (192, 128), (96 * number, 0), None, allow_shape_mismatch=True)
        for number, data in enumerate(wrappers)
    ]
    dc.load({"w": shards}, tmp_path / "c")
    padded = torch.cat([FULL, torch.zeros(32, 128, dtype=FULL.dtype)])
    assert wrappers[0].bits() == MXFP8StandIn.quantized(padded).bits()
    assert torch.equal(wrappers[1].dequantize(), torch.zeros(96, 128, dtype=FULL.dtype))


def test_wrappers_without_elements(tmp_path: Path) -> None:
    """A rank's empty piece has nothing to load and is not touched."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", FULL)}, tmp_path / "c")
    empty = Float8StandIn(torch.empty(0, 128, dtype=torch.uint8), torch.ones(1), FULL.dtype)
    shards = [
        ShardedTensor("w", torch.empty_like(FULL), FULL.dtype, (64, 128), (64, 128), (0, 0), None),
        ShardedTensor("w", empty, FULL.dtype, (0, 128), (64, 128), (64, 0), None),
    ]
    dc.load({"w": shards}, tmp_path / "c")
    assert empty.times == 0


@table("kind", KINDS)
def test_parameters(tmp_path: Path, kind: Any) -> None:
    """A quantized parameter that needs gradients is filled, and stays a leaf."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", FULL)}, tmp_path / "c")
    parameter = torch.nn.Parameter(_empty(kind, FULL.shape))
    assert dc.load({"w": ShardedTensor.from_rank_offsets("w", parameter)}, tmp_path / "c")["w"] is parameter
    assert parameter.bits() == kind.quantized(FULL).bits()
    assert parameter.requires_grad
    assert parameter.is_leaf


def test_through_dcp(tmp_path: Path) -> None:
    """dcp.load with the planner quantizes too, beside DCP's own leaves."""
    dcp.save({"w": FULL, "plain": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    wrapper, plain = _empty(MXFP8StandIn, FULL.shape), torch.zeros(3)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", wrapper), "plain": plain}
    dcp.load(wanted, checkpoint_id=tmp_path / "c", planner=ShardedLoadPlanner())
    assert wrapper.bits() == MXFP8StandIn.quantized(FULL).bits()
    assert plain.tolist() == [1, 1, 1]


def test_items_in_any_order_and_thread(ranks: Ranks, tmp_path: Path) -> None:
    """Items resolved, filled and committed in parallel and in a mixed order quantize each destination once."""
    ranks.run(4, _save_rows, str(tmp_path / "c"))
    wrappers = [_empty(kind, FULL.shape) for kind in KINDS for _ in range(8)]
    planner = ShardedLoadPlanner(flatten_state_dict=False)
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    leaves = {str(number): ShardedTensor.from_rank_offsets("w", data) for number, data in enumerate(wrappers)}
    planner.set_up_planner(leaves, metadata, is_coordinator=True)
    items = planner.finish_plan(planner.create_local_plan()).items
    assert len(items) == 4 * len(wrappers)
    random.Random(3).shuffle(items)

    def read(item: Any) -> None:
        target = planner.resolve_tensor(item)
        start = item.storage_index.offset[0]
        target.copy_(FULL[start : start + 16])
        planner.commit_tensor(item, target)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, items))
    assert [data.times for data in wrappers] == [1] * len(wrappers)
    assert all(data.bits() == type(data).quantized(FULL).bits() for data in wrappers)


def _save_many(path: str, rows: int) -> None:
    """40 tensors, a row each on rank 1 and the others on rank 0: each has a small item and a large one."""
    rank = dist.get_rank()
    full = torch.ones(rows, 1024, dtype=torch.bfloat16)
    mine, start = (full[1:], 1) if rank == 0 else (full[:1], 0)
    shards = [
        ShardedTensor(f"w{number}", mine * number, full.dtype, tuple(mine.shape), (rows, 1024), (start, 0), None)
        for number in range(40)
    ]
    dc.save({"w": shards}, path)


@pytest.mark.parametrize("threads", [1, 3])
def test_few_plain_tensors_live_at_a_time(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """While 40 wrappers load from two files, a thread has one plain tensor at a time: no second copy of a model."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", str(threads))
    rows = 300  # 600 KiB, a row is 2 KiB
    ranks.run(2, _save_many, str(tmp_path / "c"), rows)
    counts: list[int] = []
    seen: dict[int, StagedDestination] = {}
    original = StagedDestination.view

    def counting(self: StagedDestination, *place: Any) -> torch.Tensor:
        view = original(self, *place)
        seen[id(self)] = self
        counts.append(sum(staged._plain is not None for staged in list(seen.values())))
        return view

    monkeypatch.setattr(StagedDestination, "view", counting)
    wrappers = [_empty(Float8StandIn, (rows, 1024)) for _ in range(40)]
    dc.load({"w": [ShardedTensor.from_rank_offsets(f"w{n}", data) for n, data in enumerate(wrappers)]}, tmp_path / "c")
    assert len(counts) == 80
    assert 1 <= max(counts) <= threads + 1
    assert [data.times for data in wrappers] == [1] * 40
    assert [data.dequantize().float().mean().round().item() for data in wrappers] == list(range(40))


def test_a_failed_read_changes_no_wrapper_halfway(ranks: Ranks, tmp_path: Path) -> None:
    """Where one of the files of a wrapper's values is damaged, the wrapper has every bit that it had."""
    ranks.run(2, _save_rows, str(tmp_path / "c"))
    assert torch.equal(dc.load_plain_tensors(tmp_path / "c")["w"], FULL)
    flip(tmp_path / "c" / data_file(1), FULL[32:].view(torch.uint8).numpy().tobytes())
    wrapper = _empty(Float8StandIn, FULL.shape)
    before = wrapper.bits()
    with pytest.raises(CorruptCheckpointError, match="w: bytes"):
        dc.load({"w": ShardedTensor.from_rank_offsets("w", wrapper)}, tmp_path / "c")
    assert wrapper.bits() == before
    assert wrapper.times == 0


def test_classes_that_take_no_values(tmp_path: Path) -> None:
    """A class that can only dequantize is saved, and refused as a destination with key, class and the way out."""
    wrapper = ClosedStandIn.quantized(FULL)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", wrapper)}, tmp_path / "c")
    before = wrapper.bits()
    with pytest.raises(
        ShardingError, match=r"'w': .*ClosedStandIn.*it is closed.*without data.*quantize that yourself"
    ):
        dc.load({"w": ShardedTensor.from_rank_offsets("w", wrapper)}, tmp_path / "c")
    assert wrapper.bits() == before
    plain = dc.load_plain_tensors(tmp_path / "c")["w"]
    assert torch.equal(plain, wrapper.dequantize())


def test_wrappers_that_show_8_bits(tmp_path: Path) -> None:
    """A destination whose outward dtype cannot hold high precision is refused before anything is filled."""
    dc.save({key: ShardedTensor.from_rank_offsets(key, FULL) for key in ("a", "w")}, tmp_path / "c")
    other, wrapper = torch.zeros_like(FULL), Float8StandIn(*Float8StandIn.encode(FULL), torch.float8_e4m3fn)
    wanted = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in (("a", other), ("w", wrapper))}
    with pytest.raises(ShardingError, match=r"'w'.*outward dtype torch\.float8_e4m3fn cannot hold"):
        dc.load(wanted, tmp_path / "c")
    assert not other.any()


def _rows_of(wrapper: QuantizedStandIn, rows: slice) -> ShardedTensor:
    """Some rows of a wrapper, as a wrapper that shares its memory."""
    data = type(wrapper)(wrapper._data[rows], wrapper._scale_inv, wrapper.dtype)
    return ShardedTensor("w", data, data.dtype, tuple(data.shape), (64, 128), (rows.start, 0), None)


def test_views_of_one_wrapper(tmp_path: Path) -> None:
    """Parts that share a scale are refused before anything is filled; the same wrapper twice is not."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", FULL)}, tmp_path / "c")
    wrapper = _empty(Float8StandIn, FULL.shape)
    before = wrapper.bits()
    halves = [_rows_of(wrapper, slice(0, 32)), _rows_of(wrapper, slice(32, 64))]
    with pytest.raises(ShardingError, match="'w' and 'w' would be loaded into views of one quantized tensor"):
        dc.load({"w": halves}, tmp_path / "c")
    whole = _rows_of(wrapper, slice(0, 64))
    with pytest.raises(ShardingError, match="views of one quantized tensor"):
        dc.load({"w": [whole, halves[0]]}, tmp_path / "c", validate_access_integrity=False)
    assert wrapper.bits() == before
    twice = [_rows_of(wrapper, slice(0, 64)), whole]
    twice[0].replica_id = 1
    dc.load({"w": twice}, tmp_path / "c")
    assert wrapper.bits() == Float8StandIn.quantized(FULL).bits()


def _through_dtensors(path: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for kind in (Float8StandIn, MXFP8StandIn):
        values, empty, _ = _part(kind, 0)
        made, other = (
            DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for local in (kind.quantized(values), empty)
        )
        dc.save(adapters.to_sharded_state_dict({"w": made}), f"{path}-{kind.__name__}")
        dc.load(adapters.to_sharded_state_dict({"w": other}), f"{path}-{kind.__name__}")
        results.append(torch.equal(empty.dequantize(), kind.quantized(values).dequantize()))
    return results


def test_wrappers_inside_dtensors(ranks: Ranks, tmp_path: Path) -> None:
    """A DTensor whose local tensor is quantized is saved as values and loaded in place."""
    assert ranks.run(2, _through_dtensors, str(tmp_path / "c")) == [[True, True]] * 2
