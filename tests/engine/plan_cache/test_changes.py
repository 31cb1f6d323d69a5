"""What changes between two saves is never saved by the plan of the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import release_memory
from shardckpt.engine.plan_cache import saved_plans
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.engine.plan_cache.saves import check, first, in_mode, save, tensor
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


pytestmark = pytest.mark.usefixtures("mode")


def _in_place(change: Callable[[torch.Tensor], object]) -> Callable[[ShardedTensor], Any]:
    def changed(shard: ShardedTensor) -> ShardedTensor:
        change(shard.data)  # type: ignore[arg-type]
        return shard

    return changed


CHANGES: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda shard: tensor("w", shard.data.to(torch.bfloat16)),
    "shape": lambda _: tensor("w", torch.ones(5, 4)),
    "key": lambda shard: tensor("v", shard.data),
    "pieces": lambda shard: [tensor("w", shard.data[:2], (0, 0, 2)), tensor("w", shard.data[2:], (0, 1, 2))],
    "replicas": lambda shard: [tensor("w", shard.data, replica_id=1), tensor("w", shard.data + 1)],
    "an axis before": lambda shard: tensor("w", shard.data, prepend_axis_num=1),
    "one more": lambda shard: [shard, tensor("more", torch.ones(3))],
    "none": lambda _: {},
    "values": _in_place(lambda data: data.add_(1)),
    "transposed": _in_place(lambda data: data.t_()),
    "other memory": _in_place(lambda data: data.set_(torch.ones(4, 4))),
    "strides": lambda _: tensor("w", torch.arange(32.0).view(4, 8)[:, ::2]),
    "conj": lambda _: tensor("w", torch.complex(torch.ones(4, 4), torch.ones(4, 4)).conj()),
    "neg": lambda _: tensor("w", torch._neg_view(torch.ones(4, 4))),
    "parameter": lambda shard: tensor("w", torch.nn.Parameter(shard.data + 2)),
}


@table("change", CHANGES)
def test_whatever_changes_is_saved(tmp_path: Path, change: str) -> None:
    """Whatever changes between two saves, the second one has what a first save of it has."""
    release_memory()
    before = first()
    save({"w": before}, tmp_path / "a")
    second = {"w": CHANGES[change](before)}
    save(second, tmp_path / "b")
    saved_plans.clear()
    dc.save(second, tmp_path / "c")
    check(tmp_path / "b", dc.load_plain_tensors(tmp_path / "c"))


@table("values", [("short", "short"), ("short", "a" * 1000), (1, None)])
def test_objects_are_taken_anew(tmp_path: Path, values: tuple[Any, Any]) -> None:
    """Objects may become longer or shorter between saves of one plan, and so may the common state."""
    release_memory()
    for step, value in enumerate((*values, values[0])):
        state = {"w": first(), "o": ShardedObject("o", [value, step], (1,), (0,)), "common": [value] * (step + 1)}
        save(state, tmp_path / str(step))
        wanted = {"w": first(), "o": ShardedObject("o", None, (1,), (0,))}
        loaded = dc.load(wanted, tmp_path / str(step))
        assert loaded["o"] == [value, step]
        assert loaded["common"] == [value] * (step + 1)


def test_a_description_that_is_changed_in_place_is_seen(tmp_path: Path) -> None:
    """Lists and tensors in a description are the caller's to change: such shards are planned every time."""
    for kind in (list, tuple, torch.tensor):
        halves = [tensor("w", torch.full((2, 4), float(n)), (0, n, 2)) for n in (0, 1)]
        for half in halves:
            half.global_offset = kind(half.global_offset)  # type: ignore[assignment]
        save({"w": halves}, tmp_path / f"{kind.__name__}0")
        offsets = [half.global_offset for half in halves]
        if kind is not tuple:
            offsets[0][0], offsets[1][0] = 2, 0  # type: ignore[index]
        else:
            halves[0].global_offset, halves[1].global_offset = offsets[1], offsets[0]
        save({"w": halves}, tmp_path / f"{kind.__name__}1")
        check(tmp_path / f"{kind.__name__}1", {"w": torch.tensor([1.0, 1, 0, 0]).view(4, 1).expand(4, 4)})


def test_memory_that_was_freed_is_an_error_not_a_crash(tmp_path: Path) -> None:
    """A tensor whose storage FSDP has freed since the last save is refused by its key; the next save is whole."""
    state = {"w": first(), "v": tensor("v", torch.ones(3))}
    save(state, tmp_path / "a")
    state["w"].data.untyped_storage().resize_(0)  # type: ignore[union-attr]
    with pytest.raises(CheckpointingException, match=r"'w'.*no memory"):
        save(state, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    save({"w": first(), "v": state["v"]}, tmp_path / "b")
    check(tmp_path / "b", {"w": first().data, "v": torch.ones(3)})  # type: ignore[dict-item]


def test_no_data_is_an_error_as_ever(tmp_path: Path) -> None:
    """A shard that has lost its data, or has other data than it says, is refused as in a first save."""
    save({"w": first()}, tmp_path / "a")
    empty, other = first(), first()
    empty.data, other.data = None, torch.ones(4, 4, dtype=torch.float64)
    for shard, words in ((empty, "has no data"), (other, "float64")):
        with pytest.raises(ShardingError, match=words):
            save({"w": shard}, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def _swapped_halves(folder: str) -> list[str]:
    """Both ranks know their shards, from different saves: together they do not fit."""
    rank = dist.get_rank()
    errors = []
    for step, place in enumerate((rank, 1 - rank, 0, rank)):
        half = tensor("w", torch.full((2,), float(place)), (0, place, 2))
        try:
            save({"w": half}, f"{folder}/{step}")
        except ShardingError as exc:
            errors.append(f"{step}: {exc}")
        else:
            check(f"{folder}/{step}", {"w": torch.tensor([0.0, 0, 1, 1])})
    return errors


def test_plans_of_different_saves_are_not_mixed(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """What each rank has saved before, but never all in the same save, is checked across ranks like anything new."""
    found = ranks.run(2, in_mode, mode, _swapped_halves, str(tmp_path))
    assert found[0] == found[1]
    assert len(found[0]) == 1
    assert "main replica twice" in found[0][0]
    assert found[0][0].startswith("2:")


def _different_copies(folder: str) -> str:
    for step, value in enumerate((1.0, 1.0, float(dist.get_rank()))):
        state = {"c": tensor("c", torch.full((3,), value), replicated=True)}
        if step < 2:
            save(state, f"{folder}/{step}")
            continue
        with pytest.raises(ShardingError) as raised:
            save(state, f"{folder}/{step}")
    return str(raised.value)


def test_copies_are_compared_every_time(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """Replicas that have begun to differ are found, though their descriptions are those of the last save."""
    for found in ranks.run(2, in_mode, mode, _different_copies, str(tmp_path)):
        assert "replicated values differ between ranks" in found


def test_what_was_not_validated_is_validated_when_asked(tmp_path: Path) -> None:
    """A save without validation is no leave to skip it in the next one that wants it."""
    holey = {"w": [tensor("w", torch.ones(2), (0, 0, 3), replica_id=1), _first_part()]}
    for _ in range(2):
        with pytest.raises(ShardingError, match="do not fill"):
            save(holey, tmp_path / "a", validate_access_integrity=False)
    whole = {"w": first()}
    for step, validate in enumerate((False, False, True, True)):
        save(whole, tmp_path / f"w{step}", validate_access_integrity=validate)
    assert saved_plans._entries[0][1].validated


def _first_part() -> ShardedTensor:
    return tensor("w", torch.ones(2), (0, 1, 3))
