"""Background saves of the same shards, again and again: planned once, and never with a plan that is not theirs."""

from __future__ import annotations

import copy
import json
import logging
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, release_memory
from shardckpt.background.saving import recall
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.parallel import FullyParallelSaveStrategyWrapper
from shardckpt.planning.boxes import Box
from shardckpt.recall import describe
from shardckpt.strategy import AsyncSaveStrategy, PreparedSave, SaveStrategy
from shardckpt_ep import EPSaveStrategy, ExpertLayout
from shardckpt_torch_dist import save as torch_dist
from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from tests.ranks import RankPool


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    release_memory()
    yield
    release_memory()


class _Plans:
    """Counts how often this process prepares a save in the long way."""

    def __init__(self) -> None:
        self.count = 0
        self._local_items = torch_dist.local_items

    def __enter__(self) -> Self:
        torch_dist.local_items = self._counted  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        torch_dist.local_items = self._local_items  # type: ignore[attr-defined]

    def _counted(self, shards: Sequence[Any]) -> Any:
        self.count += 1
        return self._local_items(shards)


def _save(state: dict[str, Any], path: object, strategy: Any = None, **options: Any) -> None:
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(dc.save(state, str(path), strategy, async_sharded_save=True, **options))  # type: ignore[arg-type]


def _tensor(key: str, data: torch.Tensor, *offsets: tuple[int, int, int], **fields: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, *offsets, **fields)


def _check(path: object, expected: dict[str, torch.Tensor]) -> None:
    found = dc.load_plain_tensors(str(path))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value.detach()), key


def _state(rank: int, world: int, step: int) -> dict[str, Any]:
    """Every kind of shard: rows, layers before them, flattened ones, replicas, copies, objects, common state."""
    rows = torch.arange(12.0).view(3, 4) + 100 * rank + step
    flat = torch.arange(5.0) + step
    return {
        "rows": _tensor("rows", rows, (0, rank, world)),
        "layers": [_tensor("layers", rows[0] * 2, (0, rank, world), prepend_axis_num=1)],
        "columns": _tensor("columns", rows.t(), (1, rank, world)),
        "flat": ShardedTensor.from_rank_offsets_flat(
            "flat", flat[:2] if rank else flat[2:], (5,), flattened_range=slice(0, 2) if rank else slice(2, 5)
        )
        if world == 2
        else _tensor("flat", flat),
        "half": _tensor("half", torch.full((2, 3), step, dtype=torch.bfloat16), replica_id=rank),
        "copy": _tensor("copy", torch.tensor(float(step)), replicated=True),
        "none": _tensor("none", torch.zeros(0, 3), replica_id=rank),
        "big": _tensor("big", torch.full((300_000,), float(step)), (0, rank, world)),
        "rng": ShardedObject("rng", {"seed": step, "rank": rank}, (world,), (rank,)),
        "step": step,
    }


def _saved_each_way(folder: str, way: str, persistent: bool) -> int:
    """Four saves in flight; how many of them were planned in the long way."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    release_memory()
    with _Plans() as plans, AsyncCallsQueue(persistent=persistent) as queue:
        for step in range(4):
            request = dc.save(_state(rank, world, step), f"{folder}/{step}", WAYS[way](), async_sharded_save=True)
            queue.schedule_async_request(request)  # type: ignore[arg-type]
    for step in range(4):
        wanted = _state(rank, world, -1)
        expected = _state(rank, world, step)
        loaded = dc.load(wanted, f"{folder}/{step}")
        assert loaded["step"] == step
        assert loaded["rng"] == expected["rng"].data
        for key in ("rows", "columns", "flat", "half", "copy", "none", "big"):
            assert torch.equal(loaded[key], expected[key].data), (key, step)
        assert torch.equal(loaded["layers"][0], expected["layers"][0].data)
    return plans.count


WAYS: dict[str, Callable[[], Any]] = {
    "default": lambda: None,
    "several files": lambda: TorchDistSaveShardedStrategy(thread_count=2, separation_hint="rows"),
    "any replica": lambda: TorchDistSaveShardedStrategy(keep_only_main_replica=False),
    "fully parallel": lambda: FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()),
    "ep": lambda: "ep",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_saved_again_is_planned_once(ranks: RankPool, tmp_path: Path, way: str, world: int) -> None:
    """Saves of the same shards with other values, by strategies made anew each time: one plan, four right contents."""
    assert ranks.run(world, _saved_each_way, str(tmp_path), way, False) == [1] * world


def test_another_process_writes_what_is_saved_again(ranks: RankPool, tmp_path: Path) -> None:
    """A plan that is used again serves the process that writes behind the training, too."""
    assert ranks.run(2, _saved_each_way, str(tmp_path), "default", True) == [1] * 2


def _first() -> ShardedTensor:
    return _tensor("w", torch.arange(16.0).view(4, 4))


def _in_place(change: Callable[[torch.Tensor], object]) -> Callable[[ShardedTensor], Any]:
    def changed(shard: ShardedTensor) -> ShardedTensor:
        change(shard.data)  # type: ignore[arg-type]
        return shard

    return changed


CHANGES: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda shard: _tensor("w", shard.data.to(torch.bfloat16)),
    "shape": lambda _: _tensor("w", torch.ones(5, 4)),
    "key": lambda shard: _tensor("v", shard.data),
    "pieces": lambda shard: [_tensor("w", shard.data[:2], (0, 0, 2)), _tensor("w", shard.data[2:], (0, 1, 2))],
    "replicas": lambda shard: [_tensor("w", shard.data, replica_id=1), _tensor("w", shard.data + 1)],
    "an axis before": lambda shard: _tensor("w", shard.data, prepend_axis_num=1),
    "one more": lambda shard: [shard, _tensor("more", torch.ones(3))],
    "none": lambda _: {},
    "values": _in_place(lambda data: data.add_(1)),
    "transposed": _in_place(lambda data: data.t_()),
    "other memory": _in_place(lambda data: data.set_(torch.ones(4, 4))),
    "strides": lambda _: _tensor("w", torch.arange(32.0).view(4, 8)[:, ::2]),
    "conj": lambda _: _tensor("w", torch.complex(torch.ones(4, 4), torch.ones(4, 4)).conj()),
    "neg": lambda _: _tensor("w", torch._neg_view(torch.ones(4, 4))),
    "parameter": lambda shard: _tensor("w", torch.nn.Parameter(shard.data + 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_is_saved(tmp_path: Path, change: str) -> None:
    """Whatever changes between two background saves, the second one has what a foreground save of it has."""
    first = _first()
    _save({"w": first}, tmp_path / "a")
    second = {"w": CHANGES[change](first)}
    _save(second, tmp_path / "b")
    dc.save(second, tmp_path / "c")
    _check(tmp_path / "b", dc.load_plain_tensors(tmp_path / "c"))


@pytest.mark.parametrize("values", [("short", "short"), ("short", "a" * 1000), (1, None)])
def test_objects_are_taken_anew(tmp_path: Path, values: tuple[Any, Any]) -> None:
    """Objects may become longer or shorter between saves of one plan, and so may the common state."""
    for step, value in enumerate((*values, values[0])):
        state = {"w": _first(), "o": ShardedObject("o", [value, step], (1,), (0,)), "common": [value] * (step + 1)}
        _save(state, tmp_path / str(step))
        wanted = {"w": _first(), "o": ShardedObject("o", None, (1,), (0,))}
        loaded = dc.load(wanted, tmp_path / str(step))
        assert loaded["o"] == [value, step]
        assert loaded["common"] == [value] * (step + 1)


def test_a_description_that_is_changed_in_place_is_seen(tmp_path: Path) -> None:
    """Lists and tensors in a description are the caller's to change: such shards are planned every time."""
    for kind in (list, tuple, torch.tensor):
        halves = [_tensor("w", torch.full((2, 4), float(n)), (0, n, 2)) for n in (0, 1)]
        for half in halves:
            half.global_offset = kind(half.global_offset)  # type: ignore[assignment]
        _save({"w": halves}, tmp_path / f"{kind.__name__}0")
        offsets = [half.global_offset for half in halves]
        if kind is not tuple:
            offsets[0][0], offsets[1][0] = 2, 0  # type: ignore[index]
        else:
            halves[0].global_offset, halves[1].global_offset = offsets[1], offsets[0]
        _save({"w": halves}, tmp_path / f"{kind.__name__}1")
        _check(tmp_path / f"{kind.__name__}1", {"w": torch.tensor([1.0, 1, 0, 0]).view(4, 1).expand(4, 4)})


def test_memory_that_was_freed_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """A tensor whose storage FSDP has freed since the last save is refused by its key; the next save is whole."""
    state = {"w": _first(), "v": _tensor("v", torch.ones(3))}
    _save(state, tmp_path / "a")
    state["w"].data.untyped_storage().resize_(0)  # type: ignore[union-attr]
    with pytest.raises(CheckpointingException, match=r"'w'.*no memory"):
        _save(state, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    _save({"w": _first(), "v": state["v"]}, tmp_path / "b")
    _check(tmp_path / "b", {"w": _first().data, "v": torch.ones(3)})  # type: ignore[dict-item]


def test_no_data_is_an_error_as_ever(tmp_path: Path) -> None:
    """A shard that has lost its data, or has other data than it says, is refused as in a first save."""
    _save({"w": _first()}, tmp_path / "a")
    empty, other = _first(), _first()
    empty.data, other.data = None, torch.ones(4, 4, dtype=torch.float64)
    for shard, words in ((empty, "has no data"), (other, "float64")):
        with pytest.raises(ShardingError, match=words):
            _save({"w": shard}, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def _swapped_halves(folder: str) -> list[str]:
    """Both ranks know their shards, from different saves: together they do not fit."""
    rank = dist.get_rank()
    errors = []
    for step, place in enumerate((rank, 1 - rank, 0, rank)):
        half = _tensor("w", torch.full((2,), float(place)), (0, place, 2))
        try:
            _save({"w": half}, f"{folder}/{step}")
        except ShardingError as exc:
            errors.append(f"{step}: {exc}")
        else:
            _check(f"{folder}/{step}", {"w": torch.tensor([0.0, 0, 1, 1])})
    return errors


def test_plans_of_different_saves_are_not_mixed(ranks: RankPool, tmp_path: Path) -> None:
    """What each rank has saved before, but never all in the same save, is checked across ranks like anything new."""
    found = ranks.run(2, _swapped_halves, str(tmp_path))
    assert found[0] == found[1]
    assert len(found[0]) == 1
    assert "main replica twice" in found[0][0]
    assert found[0][0].startswith("2:")


def _grown_on_one(folder: str) -> list[int]:
    rank = dist.get_rank()
    release_memory()
    counts = []
    with _Plans() as plans:
        for step, grown in enumerate((False, False, True, True, False, True)):
            state = {"w": _tensor("w", torch.full((2,), 10.0 * step + rank), (0, rank, 2))}
            if grown and rank == 1:
                state["more"] = _tensor("more", torch.full((3,), float(step)))
            _save(state, f"{folder}/{step}")
            counts.append(plans.count)
            expected = {"w": torch.tensor([0.0, 0, 1, 1]) + 10 * step}
            _check(f"{folder}/{step}", expected | ({"more": torch.full((3,), float(step))} if grown else {}))
    return counts


def test_a_change_on_one_rank_is_a_change_for_all(ranks: RankPool, tmp_path: Path) -> None:
    """A key that one rank alone adds, or leaves out, makes all ranks plan anew."""
    assert ranks.run(2, _grown_on_one, str(tmp_path)) == [[1, 1, 2, 2, 3, 4]] * 2


def test_two_states_may_be_saved_in_turn(tmp_path: Path) -> None:
    """A job that saves a model and an optimizer by turns plans each of them once."""
    with _Plans() as plans:
        for step in range(3):
            for key in ("model", "optimizer"):
                _save({key: _tensor(key, torch.full((3,), float(step)))}, tmp_path / f"{key}{step}")
                _check(tmp_path / f"{key}{step}", {key: torch.full((3,), float(step))})
    assert plans.count == 2


def _different_copies(folder: str) -> str:
    for step, value in enumerate((1.0, 1.0, float(dist.get_rank()))):
        state = {"c": _tensor("c", torch.full((3,), value), replicated=True)}
        if step < 2:
            _save(state, f"{folder}/{step}")
            continue
        with pytest.raises(ShardingError) as raised:
            _save(state, f"{folder}/{step}")
    return str(raised.value)


def test_copies_are_compared_every_time(ranks: RankPool, tmp_path: Path) -> None:
    """Replicas that have begun to differ are found, though their descriptions are those of the last save."""
    for found in ranks.run(2, _different_copies, str(tmp_path)):
        assert "should be the same on all ranks" in found


def _common_differs(folder: str) -> bool:
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardckpt").addHandler(handler)
    try:
        for step in range(2):
            rank = dist.get_rank()
            _save({"w": _tensor("w", torch.ones(1), replica_id=rank), "lr": rank * step}, f"{folder}/{step}")
    finally:
        logging.getLogger("shardckpt").removeHandler(handler)
    return any("common state differs" in text for text in heard)


def test_common_state_is_compared_every_time(ranks: RankPool, tmp_path: Path) -> None:
    """A common state that has begun to differ is warned of, though the shards are those of the last save."""
    assert ranks.run(2, _common_differs, str(tmp_path)) == [False, True]


def test_what_was_not_validated_is_validated_when_asked(tmp_path: Path) -> None:
    """A save without validation is no leave to skip it in the next one that wants it."""
    holey = {"w": [_tensor("w", torch.ones(2), (0, 0, 3), replica_id=1), _first_part()]}
    for _ in range(2):
        with pytest.raises(ShardingError, match="do not fill"):
            _save(holey, tmp_path / "a", validate_access_integrity=False)
    whole = {"w": _first()}
    for step, validate in enumerate((False, False, True, True)):
        _save(whole, tmp_path / f"w{step}", validate_access_integrity=validate)
    assert next(known.validated for known in recall._kept)


def _first_part() -> ShardedTensor:
    return _tensor("w", torch.ones(2), (0, 1, 3))


class _Doubling(TorchDistSaveShardedStrategy):
    """A third party's: it changes the shards in a ``prepare`` of its own."""

    def prepare(self, shards: Any, common: Any, context: Any) -> Any:
        return super().prepare(_doubled(shards), common, context)


class _Delegating(AsyncSaveStrategy):
    """A third party's: it hands changed shards to another strategy."""

    backend = "torch_dist"
    version = 1

    def prepare(self, shards: Any, common: Any, context: Any) -> Any:
        return TorchDistSaveShardedStrategy().prepare(_doubled(shards), common, context)


def _patched() -> TorchDistSaveShardedStrategy:
    strategy = TorchDistSaveShardedStrategy()
    prepare = strategy.prepare
    strategy.prepare = lambda shards, *rest: prepare(_doubled(shards), *rest)  # type: ignore[method-assign]
    return strategy


def _doubled(shards: Any) -> Any:
    for shard in shards:
        shard.data = shard.data * 2
    return shards


DOUBLING: list[Callable[[], Any]] = [
    _Doubling,
    _Delegating,
    _patched,
    lambda: FullyParallelSaveStrategyWrapper(_Doubling()),
    lambda: FullyParallelSaveStrategyWrapper(_Delegating()),
]


@pytest.mark.parametrize("make", DOUBLING)
def test_a_prepare_that_was_overridden_is_called_every_time(tmp_path: Path, make: Callable[[], Any]) -> None:
    """A strategy with a ``prepare`` of its own is asked for every save, and the caller's shards stay as they are."""
    strategy = make()
    for step in range(3):
        shard = _tensor("w", torch.full((3,), float(step)))
        _save({"w": shard}, tmp_path / str(step), strategy)
        _check(tmp_path / str(step), {"w": torch.full((3,), 2.0 * step)})
        assert torch.equal(shard.data, torch.full((3,), float(step)))  # type: ignore[arg-type]


class _Work:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.keys = ["w"] * len(tensors)

    def write(self, writer: Any) -> list[float]:
        found = [float(self.tensors.pop().sum()) for _ in range(len(self.tensors))]
        writer.write("sums", json.dumps(found).encode(), keys=0)
        return found


class _Popping(AsyncSaveStrategy):
    """A third party's that may be recalled, and uses up its list of tensors while it writes."""

    backend = "torch_dist"
    version = 1
    recalled = True

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        work = _Work([shard.data.detach() for shard in shards])
        return PreparedSave(work, again=self.prepare)


def test_a_strategy_of_ones_own_may_be_recalled(tmp_path: Path) -> None:
    """Another's ``again`` is asked, and what its work does to its list of tensors is not seen by the next save."""
    strategy = _Popping()
    for step in range(4):
        shards = {f"w{n}": _tensor(f"w{n}", torch.full((3,), float(step + n))) for n in range(2)}
        _save(shards, tmp_path / str(step), strategy)
        assert json.loads((tmp_path / str(step) / "sums").read_text()) == [3.0 * step + 3, 3.0 * step]
    assert recall._kept[0].layout is not None


def test_another_form_after_the_request_is_never_written(tmp_path: Path) -> None:
    """Parameters that get other memory between the request and its schedule are saved as the request has them."""
    for size in (16, 400_000):
        parameter = torch.nn.Parameter(torch.ones(size))
        with AsyncCallsQueue() as queue:
            for step in range(3):
                path = tmp_path / f"{size}-{step}"
                request = dc.save({"w": _tensor("w", parameter)}, path, async_sharded_save=True)
                before, parameter.data = parameter.data, torch.zeros(1, dtype=torch.float64)
                queue.schedule_async_request(request)  # type: ignore[arg-type]
                parameter.data = before
        for step in range(3):
            _check(tmp_path / f"{size}-{step}", {"w": torch.ones(size)})


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
@pytest.mark.parametrize("size", [100, 400_000])
def test_saves_in_any_mode(tmp_path: Path, mode: Callable[[], Any], size: int) -> None:
    """A save in a mode of torch's leaves nothing that stops the next one, outside of it, or threads."""
    values = [torch.full((size,), float(n)) for n in range(3)]
    for step, inside in enumerate((True, False, True, False)):
        state = {f"w{n}": _tensor(f"w{n}", value + step) for n, value in enumerate(values)}
        with mode() if inside else nullcontext():
            _save(state, tmp_path / str(step))
        _check(tmp_path / str(step), {f"w{n}": value + step for n, value in enumerate(values)})


SHARDS = {
    ShardedTensor: ShardedTensor(
        "w", torch.ones(4), torch.float32, (4,), (8,), (4,), (2,), flattened_range=slice(0, 4)
    ),
    ShardedObject: ShardedObject("w", None, (2,), (0,)),
}
OTHERS: dict[str, Any] = {
    "key": "v",
    "data": torch.ones(5),
    "dtype": torch.int32,
    "replica_id": 1,
    "replicated": True,
    "prepend_axis_num": 1,
    "allow_shape_mismatch": True,
    "flattened_range": slice(0, 3),
}


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, field.name) for kind in SHARDS for field in fields(kind) if (kind, field.name) != (ShardedObject, "data")],
)
def test_every_field_is_in_the_description(kind: type[Any], field: str) -> None:
    """Two shards that differ in any field are never taken for each other; new fields of the classes come here, too."""
    shard = SHARDS[kind]
    other = copy.copy(shard)
    setattr(other, field, OTHERS.get(field, (7,)))
    assert describe([shard]) == describe([copy.copy(shard)])
    assert describe([shard]) != describe([other])


def test_the_order_of_shards_and_their_kinds_are_in_the_description() -> None:
    """Shards that change places, and an object that becomes a tensor, are other shards."""
    tensor, shard = SHARDS.values()
    assert describe([tensor, shard]) != describe([shard, tensor])
    assert describe([tensor]) != describe([shard])
    assert describe([tensor, tensor]) != describe([tensor])


def test_strategies_that_write_other_files_share_no_plan(tmp_path: Path) -> None:
    """The same shards saved by strategies with other options in turn have the files that each makes."""
    options: list[dict[str, Any]] = [
        {},
        {"thread_count": 2},
        {"separation_hint": "w"},
        {"keep_only_main_replica": False},
    ]
    made = []
    for turn in range(2):
        for number, option in enumerate(options):
            path = tmp_path / f"{turn}-{number}"
            _save({"w": _first(), "v": _tensor("v", torch.ones(2))}, path, TorchDistSaveShardedStrategy(**option))
            made.append(sorted(file.name for file in path.glob("*.distcp")))
    assert made[:4] == made[4:]
    assert made[0] == made[3] == ["__0_0.distcp"]
    assert made[1] == ["__0_0.distcp", "__0_1.distcp"]
    assert made[2] == ["__0_0.distcp", "w__0_0.distcp"]
    keys = {TorchDistSaveShardedStrategy(**option).plans_like for option in options}
    assert len(keys) == 4


class _ForegroundOnly(SaveStrategy):
    backend = "torch_dist"
    version = 1

    def save(self, shards: Any, common: Any, context: Any) -> None:
        raise AssertionError


def _one_saves_in_the_foreground_only(folder: str) -> str:
    rank = dist.get_rank()
    with pytest.raises(CheckpointingException) as raised:
        _save({"w": _tensor("w", torch.ones(2), replica_id=rank)}, folder, _ForegroundOnly() if rank else None)
    return str(raised.value)


def test_ranks_with_different_classes_keep_in_step(ranks: RankPool, tmp_path: Path) -> None:
    """Where one rank's strategy cannot save in the background, all ranks hear that."""
    first, second = ranks.run(2, _one_saves_in_the_foreground_only, str(tmp_path / "c"))
    assert first == second
    assert "saves in the foreground only" in first


def test_experts_are_compared_with_the_layouts_of_their_strategy() -> None:
    """Strategies of (ep, 1) with layouts share no plans: another's have not been compared with these shards."""
    assert EPSaveStrategy().plans_like == EPSaveStrategy().plans_like
    assert EPSaveStrategy(sections=("x",)).plans_like != EPSaveStrategy().plans_like
    layouts = {"experts.w1": ExpertLayout((4, 4), Box((2, 0), (2, 4)))}
    assert EPSaveStrategy(layouts).plans_like != EPSaveStrategy(layouts).plans_like
    assert EPSaveStrategy().plans_like != TorchDistSaveShardedStrategy().plans_like


def test_release_memory_forgets(tmp_path: Path) -> None:
    """After release_memory the next save is a first one, and nothing of the last one's shards is held."""
    with _Plans() as plans:
        for step in range(3):
            _save({"w": _first()}, tmp_path / str(step))
            if step:
                release_memory()
    assert plans.count == 2
    assert not recall._kept
