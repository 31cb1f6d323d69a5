"""planner= of the strategies of (torch_dist, 1): a planner of the caller's own plans saves and loads."""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.compat.megatron.dist_checkpointing.strategies import torch as megatron
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    DtypeMismatchError,
    PluginError,
    ShardingError,
    UnsafePickleError,
)
from shardckpt.maintenance import verify_checkpoint
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.parallel import FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper
from shardckpt_torch_dist import (
    CheckpointStorageReader,
    ShardedLoadPlanner,
    ShardedSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from tests.tables import table
from tests.torch_dist.te_stand_in import MXFP8StandIn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

ROWS = torch.arange(96.0).reshape(12, 8)


def _here() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _state(*, filled: bool = True) -> dict[str, Any]:
    """Rows of each rank, two boxes of one key, what all ranks have, objects and common state."""
    rank, world = _here()
    flat = ROWS.chunk(world)[rank].clone()
    halves = torch.arange(float(world * 4)).reshape(world * 2, 2)
    state: dict[str, Any] = {
        "rows": ShardedTensor.from_rank_offsets("rows", flat, (0, rank, world)),
        "halves": [
            ShardedTensor.from_rank_offsets("halves", halves[row : row + 1].clone(), (0, row, world * 2))
            for row in (2 * rank, 2 * rank + 1)
        ],
        "norm": ShardedTensor.from_rank_offsets("norm", torch.arange(3.0), replica_id=rank),
        "empty": ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 4), replica_id=rank),
        "rng": ShardedObject("rng", {"seed": rank}, (world,), (rank,)),
        "iteration": 7,
    }
    if not filled:
        state = {key: value for key, value in state.items() if key != "iteration"}
        for shard in (state["rows"], *state["halves"], state["norm"], state["empty"], state["rng"]):
            shard.data = None
    return state


def _check(found: dict[str, Any]) -> None:
    rank, world = _here()
    assert torch.equal(found["rows"], ROWS.chunk(world)[rank])
    assert [part.tolist() for part in found["halves"]] == [
        [[4 * rank, 4 * rank + 1.0]],
        [[4 * rank + 2, 4 * rank + 3.0]],
    ]
    assert found["norm"].tolist() == [0, 1, 2]
    assert found["empty"].shape == (0, 4)
    assert found["rng"] == {"seed": rank}
    assert found["iteration"] == 7


def _data_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.suffix == ".distcp"}


class _Counting:
    """Notes the calls of a planner's methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []


def _counting(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        return getattr(super(_Counting, self), name)(*args, **kwargs)

    return call


for _name in (
    *("set_up_planner", "create_local_plan", "create_global_plan", "create_decentralized_global_plan", "finish_plan"),
    *("resolve_data", "load_bytes", "resolve_tensor", "commit_tensor"),
):
    setattr(_Counting, _name, _counting(_name))


class _CountingSave(_Counting, ShardedSavePlanner):
    """Counts a save's calls."""


class _CountingMegatron(_Counting, megatron.MCoreSavePlanner):
    """Counts a save's calls; it needs no plan of all ranks."""


class _CountingLoad(_Counting, ShardedLoadPlanner):
    """Counts a load's calls."""


def _save(path: str, planner: Any = None, **options: Any) -> Any:
    dc.save(_state(), path, TorchDistSaveShardedStrategy(planner=planner, **options))
    return getattr(planner, "calls", None)


def _load(path: str, planner: Any = None) -> Any:
    _check(dc.load(_state(filled=False), path, TorchDistLoadShardedStrategy(planner=planner)))
    return getattr(planner, "calls", None)


def _count(path: str) -> tuple[list[str], list[str], list[str]]:
    megatrons = _save(f"{path}/m", _CountingMegatron(flatten_state_dict=False))
    return _save(f"{path}/c", _CountingSave()), _load(f"{path}/c", _CountingLoad()), megatrons


@table("world", [1, 3])
def test_the_planners_methods_are_called_in_order(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Set up, local plan, global plan on the main rank, finish, then an item after the other, on every rank."""
    found = ranks.run(world, _count, str(tmp_path))
    for rank, (saved, loaded, megatrons) in enumerate(found):
        plans = ["set_up_planner", "create_local_plan", *(["create_global_plan"] if rank == 0 else []), "finish_plan"]
        tensors = 3 + 2 * (rank == 0)  # norm and empty are the first rank's
        assert saved == [*plans, *["resolve_data"] * (tensors + 1)]
        alone = ["set_up_planner", "create_local_plan", "create_decentralized_global_plan", "finish_plan"]
        assert megatrons == [*alone, *["resolve_data"] * (tensors + 1)]
        assert loaded[: len(plans)] == plans
        assert loaded.count("load_bytes") == 1
        assert loaded.count("resolve_tensor") == loaded.count("commit_tensor") >= 4
        assert set(loaded[len(plans) :]) == {"load_bytes", "resolve_tensor", "commit_tensor"}


@table(
    ("saver", "loader"),
    [
        (ShardedSavePlanner, ShardedLoadPlanner),
        (ShardedSavePlanner(), ShardedLoadPlanner()),
        (megatron.MCoreSavePlanner, megatron.MCoreLoadPlanner),
        (megatron.MCoreSavePlanner(can_run_decentralized_global_plan=False), megatron.MCoreLoadPlanner()),
    ],
    ids=["classes", "instances", "Megatron's classes", "Megatron's instances"],
)
def test_the_files_are_the_same_as_without(tmp_path: Path, saver: Any, loader: Any) -> None:
    """A planner that changes nothing writes the same bytes into the same files, with digests, and reads ours."""
    _save(str(tmp_path / "ours"))
    _save(str(tmp_path / "planned"), saver)
    assert _data_files(tmp_path / "ours") == _data_files(tmp_path / "planned")
    assert {file.name for file in (tmp_path / "ours").iterdir()} == {
        file.name for file in (tmp_path / "planned").iterdir()
    }
    assert not [result for result in verify_checkpoint(tmp_path / "planned") if result.fault or result.foreign]
    _load(str(tmp_path / "planned"))
    _load(str(tmp_path / "ours"), loader)


def _save_both_ways(path: str, options: dict[str, Any]) -> None:
    _save(f"{path}/ours", **options)
    planner = ShardedSavePlanner()
    _save(f"{path}/planned", planner, **options)
    _save(f"{path}/again", planner, **options)
    _load(f"{path}/planned", ShardedLoadPlanner)
    _load(f"{path}/ours", ShardedLoadPlanner())


@table("options", [{}, {"thread_count": 2}, {"separation_hint": "rows"}, {"keep_only_main_replica": False}])
def test_ranks_write_the_same_files_as_without(ranks: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    """On ranks, and with each option of the strategy, the files are those that the strategy plans itself."""
    ranks.run(3, _save_both_ways, str(tmp_path), options)
    expected = _data_files(tmp_path / "ours")
    assert len(expected) >= 3
    assert _data_files(tmp_path / "planned") == _data_files(tmp_path / "again") == expected


class _Halved(ShardedSavePlanner):
    """Stores floats in bfloat16, and each box of several rows as two boxes."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[part for item in plan.items for part in self._halves(item)])
        return self.plan

    def _halves(self, item: Any) -> list[Any]:
        if item.type == WriteItemType.BYTE_IO:
            return [item]
        data = item.tensor_data
        properties = dataclasses.replace(data.properties, dtype=torch.bfloat16)
        chunk, cut = data.chunk, data.chunk.sizes[0] // 2
        found = []
        for start, rows in ((0, cut), (cut, chunk.sizes[0] - cut)) if cut else ((0, chunk.sizes[0]),):
            offsets = torch.Size((chunk.offsets[0] + start, *chunk.offsets[1:]))
            box = dataclasses.replace(chunk, offsets=offsets, sizes=torch.Size((rows, *chunk.sizes[1:])))
            new = dataclasses.replace(data, chunk=box, properties=properties)
            found.append(dataclasses.replace(item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=new))
            self._from = {**getattr(self, "_from", {}), found[-1].index: (item, start)}
        return found

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        whole, start = self._from[write_item.index]
        rows = write_item.tensor_data.chunk.sizes[0]
        return super().resolve_data(whole)[start : start + rows].bfloat16()


def _save_halves(path: str) -> None:
    _save(path, _Halved)
    _load(path)
    _load(path, ShardedLoadPlanner)


def test_a_planner_casts_values_and_cuts_boxes(ranks: Ranks, tmp_path: Path) -> None:
    """What resolve_data gives is stored, with digests, in the boxes that were planned, and loads into the caller's."""
    ranks.run(2, _save_halves, str(tmp_path / "c"))
    assert not [result for result in verify_checkpoint(tmp_path / "c") if result.fault or result.foreign]
    with dc.open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint["rows"].dtype == torch.bfloat16
        assert torch.equal(checkpoint["rows"][4:9].float(), ROWS[4:9])


class _Forgetful(ShardedSavePlanner):
    """Plans no item of one key."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn != "norm"])


class _Renaming(ShardedSavePlanner):
    """Adds an object that nobody gave."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        (item, *_) = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        return dataclasses.replace(plan, items=[*plan.items, dataclasses.replace(item, index=MetadataIndex("more"))])


class _Lying(ShardedSavePlanner):
    """Gives values of another dtype than it planned."""

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found.double() if isinstance(found, torch.Tensor) else found


class _Unsafe(ShardedSavePlanner):
    """Stores a class that no load accepts."""

    def lookup_object(self, index: Any) -> Any:
        found = super().lookup_object(index)
        return found if isinstance(found, torch.Tensor) else _archive(_Unsafe)


class _Short(ShardedSavePlanner):
    """Makes a plan too few."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        return plans[:-1], metadata


class _Broken(ShardedSavePlanner):
    """Fails on one rank alone."""

    def finish_plan(self, new_plan: Any) -> Any:
        if _here()[0] == _here()[1] - 1:
            raise ZeroDivisionError("the last rank")
        return super().finish_plan(new_plan)


def _archive(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    return file


def _fail_to_save(path: str, planner: Any) -> Exception:
    with pytest.raises(CheckpointingException) as caught:
        _save(path, planner)
    return caught.value


@table(
    ("planner", "error", "text"),
    [
        (_Forgetful, PluginError, "'norm'"),
        (_Renaming, ShardingError, "object 'more': the planner plans it"),
        (_Lying, ShardingError, r"planned as torch.float32 .* is torch.float64"),
        (_Unsafe, UnsafePickleError, "a load would refuse"),
        (_Short, CheckpointingException, "create_global_plan returned 2 plans for 3 ranks"),
        (_Broken, CheckpointingException, "ZeroDivisionError: the last rank"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planners_fault_is_the_same_error_on_all_ranks(
    ranks: Ranks, tmp_path: Path, planner: Any, error: type[Exception], text: str
) -> None:
    """A shard that is left out, a value that is not as planned, a failure of one rank: all raise it, none saves."""
    found = ranks.run(3, _fail_to_save, str(tmp_path / "c"), planner)
    for each in found:
        assert isinstance(each, error)
        assert each.__class__ is found[0].__class__
        with pytest.raises(error, match=text):
            raise each
    assert not [*tmp_path.iterdir()]


def test_a_planner_on_one_rank_alone_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks that plan in different ways would call different collectives: all raise an error instead."""
    for number in range(2):
        for planner in (None, _CountingSave):
            first, second = ranks.run(2, _fail_apart, str(tmp_path / "c"), number, planner)
            assert str(first) == str(second)
            assert "ranks disagree on planner" in str(first)
    assert not [*tmp_path.iterdir()]
    ranks.run(2, _save, str(tmp_path / "c"))
    for number in range(2):
        for each in ranks.run(2, _fail_to_load, str(tmp_path / "c"), {number: ShardedLoadPlanner}):
            assert "ranks disagree on planner" in str(each)


def _fail_apart(path: str, number: int, planner: Any) -> Exception:
    return _fail_to_save(path, ShardedSavePlanner if _here()[0] == number else planner)


def _fail_to_load(path: str, planners: dict[int, Any]) -> Exception:
    wanted = _state(filled=False)
    wanted["rows"].data = torch.full((12 // _here()[1], 8), -1.0)
    with pytest.raises(CheckpointingException) as caught:
        dc.load(wanted, path, TorchDistLoadShardedStrategy(planner=planners.get(_here()[0])))
    assert (wanted["rows"].data == -1).all()
    return caught.value


class _Skipping(ShardedLoadPlanner):
    """Plans nothing for one key."""

    def finish_plan(self, new_plan: Any) -> Any:
        return dataclasses.replace(new_plan, items=[item for item in new_plan.items if item.dest_index.fqn != "norm"])


class _SkippingShard(ShardedLoadPlanner):
    """Plans one of two shards of a key."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        second = next(item for item in reversed(plan.items) if item.dest_index.fqn == "halves")
        return dataclasses.replace(plan, items=[item for item in plan.items if item is not second])


class _SkippingRows(ShardedLoadPlanner):
    """Plans fewer rows of a shard than it has."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [
            dataclasses.replace(item, lengths=torch.Size((1, 8))) if item.dest_index.fqn == "rows" else item
            for item in plan.items
        ]
        return dataclasses.replace(plan, items=items)


class _BrokenLoad(ShardedLoadPlanner):
    """Fails on one rank alone."""

    def create_local_plan(self) -> Any:
        if _here()[0] == _here()[1] - 1:
            raise ZeroDivisionError("the last rank")
        return super().create_local_plan()


class _BrokenForAll(ShardedLoadPlanner):
    """Fails where the plans of all ranks are joined."""

    def create_global_plan(self, global_plan: Any) -> Any:
        raise ZeroDivisionError(f"{len(global_plan)} plans")


@table(
    ("planner", "text"),
    [
        (_Skipping, "_Skipping leaves out all or a part of 'norm'"),
        (_SkippingShard, "_SkippingShard leaves out all or a part of 'halves'"),
        (_SkippingRows, "_SkippingRows leaves out all or a part of 'rows'"),
        (_BrokenLoad, "ZeroDivisionError: the last rank"),
        (_BrokenForAll, "ZeroDivisionError: 3 plans"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planner_that_cannot_load_fails_on_all_ranks(ranks: Ranks, tmp_path: Path, planner: Any, text: str) -> None:
    """A shard that is not all planned, or a failure on one rank, is one error on all, and no destination changes."""
    ranks.run(3, _save, str(tmp_path / "c"))
    found = ranks.run(3, _fail_to_load, str(tmp_path / "c"), dict.fromkeys(range(3), planner))
    for each in found:
        assert each.__class__ is found[0].__class__
        with pytest.raises(CheckpointingException, match=text):
            raise each


def test_a_damaged_file_is_found_under_a_planner(tmp_path: Path) -> None:
    """Digests are checked whoever plans."""
    _save(str(tmp_path / "c"), ShardedSavePlanner)
    (file,) = [file for file in (tmp_path / "c").iterdir() if file.suffix == ".distcp"]
    data = file.read_bytes()
    start = data.index(ROWS.numpy().tobytes())
    file.write_bytes(data[:start] + b"?" + data[start + 1 :])
    with pytest.raises(CorruptCheckpointError, match="rows"):
        _load(str(tmp_path / "c"), ShardedLoadPlanner)


class _Doubling(ShardedLoadPlanner):
    """Doubles what it has read."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(2)
        super().commit_tensor(read_item, tensor)


def test_a_planner_changes_values_when_they_are_read(tmp_path: Path) -> None:
    """commit_tensor gets each filled tensor once, in the caller's memory."""
    _save(str(tmp_path / "c"))
    wanted = {"rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(12, 8))}
    loaded = dc.load(wanted, tmp_path / "c", TorchDistLoadShardedStrategy(planner=_Doubling), strict=False)
    assert torch.equal(loaded["rows"], 2 * ROWS)


class _Other(ShardedLoadPlanner):
    """Reads the mirrored rows: it redirects items to other stored boxes."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = [dataclasses.replace(item, storage_index=MetadataIndex("mirror", (0, 0))) for item in plan.items]
        return dataclasses.replace(plan, items=items)


def test_a_planner_reads_from_elsewhere(tmp_path: Path) -> None:
    """The metadata that a planner gets lists everything that is stored, not only what is asked for."""
    state = {key: ShardedTensor.from_rank_offsets(key, ROWS * sign) for key, sign in (("rows", 1), ("mirror", -1))}
    dc.save(state, tmp_path / "c")
    wanted = {"rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(12, 8))}
    loaded = dc.load(wanted, tmp_path / "c", TorchDistLoadShardedStrategy(planner=_Other), strict=False)
    assert torch.equal(loaded["rows"], -ROWS)


def test_a_rank_may_have_two_copies_of_a_shard(tmp_path: Path) -> None:
    """A planner fills two shards of one place of a tensor, as tied weights are, and what it leaves out is noticed."""
    _save(str(tmp_path / "c"))

    def load(planner: Any) -> list[torch.Tensor]:
        copies = [ShardedTensor.from_rank_offsets("rows", torch.zeros(12, 8), replica_id=n) for n in (0, 1)]
        strategy = TorchDistLoadShardedStrategy(planner=planner)
        return dc.load({"copies": copies}, tmp_path / "c", strategy, strict=False)["copies"]  # type: ignore[no-any-return]

    assert all(torch.equal(found, ROWS) for found in load(ShardedLoadPlanner))
    with pytest.raises(ShardingError, match="leaves out all or a part of 'rows'"):
        load(_SkippingRows)


class _Repeating(ShardedLoadPlanner):
    """Plans the first half of the rows twice, with and without its number, and the second half not at all."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        first = next(item for item in plan.items if item.dest_index.offset == torch.Size((0, 0)))
        again = dataclasses.replace(first, dest_index=dataclasses.replace(first.dest_index, index=1))
        return dataclasses.replace(plan, items=[first, again])


def test_a_part_that_is_planned_twice_hides_no_other(tmp_path: Path) -> None:
    """Of two halves one is planned twice, under two numbers: the other is left out, and noticed."""
    _save(str(tmp_path / "c"))
    halves = [ShardedTensor.from_rank_offsets("rows", torch.zeros(6, 8), (0, n, 2)) for n in (0, 1)]
    with pytest.raises(ShardingError, match="leaves out all or a part of 'rows'"):
        dc.load({"halves": halves}, tmp_path / "c", TorchDistLoadShardedStrategy(planner=_Repeating), strict=False)


def _planner_of(key: str, **changes: Any) -> type[ShardedLoadPlanner]:
    """Return a planner that changes the item of a key."""

    class Planner(ShardedLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = [
                dataclasses.replace(item, **changes) if item.dest_index.fqn.startswith(key) else item
                for item in plan.items
            ]
            return dataclasses.replace(plan, items=items)

    return Planner


@table(
    ("planner", "text"),
    [
        (_planner_of("rows", storage_index=MetadataIndex("none")), "Planner plans to read the tensor 'none', which"),
        (_planner_of("rng", storage_index=MetadataIndex("none")), "Planner plans to read the object 'none', which"),
        (
            _planner_of("rows", storage_offsets=torch.Size((1, 0))),
            r"elements at \(1, 0\) of a chunk of 'rows'",
        ),
        (_planner_of("rows", storage_offsets=torch.Size((0, -1))), r"at \(0, -1\) of a chunk of 'rows'"),
        (_planner_of("rows", storage_offsets=torch.Size((0,))), r"at \(0,\) of a chunk of 'rows' .* shape \(12, 8\)"),
    ],
    ids=lambda value: "",
)
def test_items_that_are_not_stored_are_the_planners_fault(tmp_path: Path, planner: Any, text: str) -> None:
    """An item of a key or of elements that are not stored is an error that names the planner, before any read."""
    _save(str(tmp_path / "c"))
    given = torch.zeros(12, 8)
    wanted = {
        "rows": ShardedTensor.from_rank_offsets("rows", given),
        "rng": ShardedObject("rng", None, (1,), (0,)),
    }
    with pytest.raises(ShardingError, match=text):
        dc.load(wanted, tmp_path / "c", TorchDistLoadShardedStrategy(planner=planner), strict=False)
    assert not given.any()


def test_a_cached_plan_is_never_a_planners(tmp_path: Path) -> None:
    """Each save with a planner is planned anew, and does not use the plans of others, nor they its own."""
    planner = _CountingSave()
    for step in range(3):
        _save(str(tmp_path / f"plain{step}"))
        calls = len(planner.calls)
        _save(str(tmp_path / f"planned{step}"), planner)
        assert planner.calls[calls:].count("create_global_plan") == 1
        _save(str(tmp_path / f"cast{step}"), _Halved)
        _load(str(tmp_path / f"plain{step}"))
    with dc.open_checkpoint(tmp_path / "plain2") as checkpoint:
        assert checkpoint["rows"].dtype == torch.float32
    assert TorchDistSaveShardedStrategy(planner=planner).plan_cache_key is None


def test_a_background_save_has_the_values_of_its_moment(tmp_path: Path) -> None:
    """resolve_data is called when the save is planned; what it gave is what is written later."""
    queue, state = AsyncCallsQueue(), _state()
    request = dc.save(
        state, tmp_path / "c", TorchDistSaveShardedStrategy(planner=ShardedSavePlanner), async_sharded_save=True
    )
    queue.schedule_async_request(request)
    state["rows"].data.zero_()
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    _load(str(tmp_path / "c"))


def _save_in_parallel(path: str) -> None:
    saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(planner=ShardedSavePlanner))
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(planner=ShardedLoadPlanner))
    for step in range(2):
        dc.save(_state(), f"{path}{step}", saver)
        _check(dc.load(_state(filled=False), f"{path}{step}", loader))


def test_planners_below_the_fully_parallel_wrappers(ranks: Ranks, tmp_path: Path) -> None:
    """The wrappers divide the work, and the planner plans what falls to its rank."""
    ranks.run(3, _save_in_parallel, str(tmp_path / "c"))


class _Setting:
    """A class of the caller's own."""


def test_what_the_caller_allows_holds_for_the_planner(tmp_path: Path) -> None:
    """allow_globals and allow_dtype_cast of save and load need not be said twice; without them the planner refuses."""
    state = {
        "w": ShardedTensor.from_rank_offsets("w", torch.tensor([1.5])),
        "o": ShardedObject("o", _Setting(), (1,), (0,)),
    }
    strategy = TorchDistSaveShardedStrategy(planner=ShardedSavePlanner())
    with pytest.raises(UnsafePickleError, match="_Setting"):
        dc.save(state, tmp_path / "c", strategy)
    dc.save(state, tmp_path / "c", strategy, allow_globals=[_Setting])
    planner = ShardedLoadPlanner()
    loader = TorchDistLoadShardedStrategy(planner=planner)

    def wanted() -> dict[str, Any]:
        tensor = torch.zeros(1, dtype=torch.int64)
        return {"w": ShardedTensor.from_rank_offsets("w", tensor), "o": ShardedObject("o", None, (1,), (0,))}

    with pytest.raises(DtypeMismatchError):
        dc.load(wanted(), tmp_path / "c", loader, allow_globals=[_Setting])
    with pytest.raises(UnsafePickleError, match="_Setting"):
        dc.load(wanted(), tmp_path / "c", loader, allow_dtype_cast=True)
    loaded = dc.load(wanted(), tmp_path / "c", loader, allow_globals=[_Setting], allow_dtype_cast=True)
    assert loaded["w"].tolist() == [1]
    assert isinstance(loaded["o"], _Setting)
    assert not planner.allow_dtype_cast


@table(
    ("strategy", "planner", "text"),
    [
        (TorchDistSaveShardedStrategy, DefaultSavePlanner(), "DefaultSavePlanner: expected .*ShardedSavePlanner"),
        (TorchDistSaveShardedStrategy, DefaultSavePlanner, "subclass of ShardedSavePlanner"),
        (TorchDistSaveShardedStrategy, ShardedLoadPlanner(), "subclass of ShardedSavePlanner"),
        (TorchDistLoadShardedStrategy, DefaultLoadPlanner, "subclass of ShardedLoadPlanner"),
        (TorchDistSaveShardedStrategy, ShardedSavePlanner(enable_plan_caching=True), "leave it out"),
    ],
    ids=map(str, range(5)),
)
def test_what_is_no_planner_of_ours_is_refused(strategy: Any, planner: Any, text: str) -> None:
    """DCP's own planners know no ShardedTensors, and its plan cache misses changes: refused at the constructor."""
    with pytest.raises(CheckpointingException, match=text):
        strategy(planner=planner)


def test_objects_under_plain_keys_are_listed_by_all_of_them(tmp_path: Path) -> None:
    """What is stored for other readers has the same keys whoever plans."""
    state = {
        "a": PlainObject("first", {"lr": 1.0}, keys=("opt.0.lr", "opt.1.lr")),
        "b": PlainObject("second", {"lr": 2.0}, keys=("opt.0.lr", "opt.2.lr")),
        "w": ShardedTensor.from_rank_offsets("w", ROWS),
    }
    for name, planner in (("ours", None), ("planned", ShardedSavePlanner)):
        dc.save(state, tmp_path / name, TorchDistSaveShardedStrategy(planner=planner))
    assert _data_files(tmp_path / "ours") == _data_files(tmp_path / "planned")
    first, second = (CheckpointStorageReader(tmp_path / name).read_metadata() for name in ("ours", "planned"))
    assert first.state_dict_metadata == second.state_dict_metadata
    assert {"opt.0.lr", "opt.1.lr", "opt.2.lr"} < set(first.state_dict_metadata)


def test_megatrons_strategies_take_planners_too(tmp_path: Path) -> None:
    """planner= of the classes under Megatron's path."""
    saver = megatron.TorchDistSaveShardedStrategy("torch_dist", 1, planner=megatron.MCoreSavePlanner)
    saver.save(_state(), tmp_path / "c")
    planner = _CountingLoad()
    loader = megatron.TorchDistLoadShardedStrategy(planner=planner)
    assert torch.equal(loader.load({"rows": _state(filled=False)["rows"]}, tmp_path / "c")["rows"], ROWS)
    assert "commit_tensor" in planner.calls


def test_an_object_that_plain_dcp_stored_value_by_value(tmp_path: Path) -> None:
    """Beside what the planner plans, the strategy builds such objects, as without it."""
    dcp.save({"w": ROWS, "opt": {"lr": 0.5, "exp": torch.ones(2)}}, checkpoint_id=tmp_path / "c")
    wanted = {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(12, 8)),
        "opt": ShardedObject("opt", None, (1,), (0,)),
    }
    loaded = dc.load(wanted, tmp_path / "c", TorchDistLoadShardedStrategy(planner=ShardedLoadPlanner()))
    assert torch.equal(loaded["w"], ROWS)
    assert loaded["opt"]["lr"] == 0.5
    assert loaded["opt"]["exp"].tolist() == [1, 1]


def test_a_quantized_destination_is_committed_by_the_planner(tmp_path: Path) -> None:
    """Quantized tensors go through resolve_tensor and commit_tensor, and are quantized once."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", ROWS.repeat(8, 4))}, tmp_path / "c")
    found = MXFP8StandIn.quantized(torch.zeros(96, 32))
    planner = _CountingLoad()
    wanted = {"w": ShardedTensor.from_rank_offsets("w", found)}
    dc.load(wanted, tmp_path / "c", TorchDistLoadShardedStrategy(planner=planner))
    assert found.bits() == MXFP8StandIn.quantized(ROWS.repeat(8, 4)).bits()
    assert planner.calls.count("resolve_tensor") == planner.calls.count("commit_tensor") == 1
