"""State dicts whose values tell which save they come from, for any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing
from shardckpt.dist_checkpointing import ShardedObject, ShardedTensor
from tests.states import rank_and_size

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 12  # divided by 1, 2, 3 and 4
UNEVEN = 11  # an irregular grid for every number of ranks but 1
BIG = 24_000  # elements: 96 kB are more than one small record, and too few for torch to use threads


def state_dict(version: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """A rank's part of save number ``version``: regular and irregular grids, copies, an object, common values."""
    shift = 1000 * version
    rows = torch.arange(ROWS * 8, dtype=torch.float32).view(ROWS, 8) + shift
    big = torch.arange(BIG, dtype=torch.float32) + shift
    low, high = UNEVEN * rank // world, UNEVEN * (rank + 1) // world
    uneven = (torch.arange(UNEVEN * 3) + shift).view(UNEVEN, 3)[low:high].clone()
    half = (torch.arange(33) + version).to(torch.bfloat16)
    return {
        "split": ShardedTensor.from_rank_offsets("split", rows.chunk(world)[rank].clone(), (0, rank, world)),
        "big": ShardedTensor.from_rank_offsets("big", big.chunk(world)[rank].clone(), (0, rank, world)),
        "uneven": ShardedTensor(
            "uneven", uneven, uneven.dtype, tuple(uneven.shape), (UNEVEN, 3), (low, 0), axis_fragmentations=None
        ),
        "half": ShardedTensor.from_rank_offsets("half", half, replica_id=rank),
        "layer": ShardedTensor.from_rank_offsets(
            "layer", rows[0].clone(), (0, 0, 1), replica_id=rank, prepend_axis_num=1
        ),
        **{
            f"bias.{n}": ShardedTensor.from_rank_offsets(f"bias.{n}", rows[n].clone(), replica_id=rank)
            for n in range(8)
        },
        "object": ShardedObject("object", {"version": version, "list": [1, 2.5]}, (1,), (0,), replica_id=rank),
        "iteration": version,
        "args": {"lr": 0.5 * version, "names": ["a", "b"]},
    }


def template(rank: int = 0, world: int = 1) -> dict[str, Any]:
    """The same descriptions with destinations whose values no save has."""
    wanted = state_dict(0, rank, world)
    for leaf in wanted.values():
        if isinstance(leaf, ShardedTensor) and leaf.data is not None:
            leaf.data.fill_(-7)
        if isinstance(leaf, ShardedObject):
            leaf.data = None
    return wanted


def differences(loaded: dict[str, Any], version: int, rank: int = 0, world: int = 1) -> list[str]:
    """Where a loaded state dict is not, bit for bit, what save number ``version`` had on this rank."""
    expected = state_dict(version, rank, world)
    found = [key for key in {*loaded, *expected} if (key in loaded) != (key in expected)]
    for key in expected.keys() & loaded.keys():
        leaf = expected[key]
        value = leaf.data if isinstance(leaf, ShardedTensor | ShardedObject) else leaf
        if not _same(loaded[key], value):
            found.append(key)
    return sorted(found)


def load(directory: Path, rank: int = 0, world: int = 1, **options: Any) -> dict[str, Any]:
    """This rank's part of what the checkpoint stores."""
    return dist_checkpointing.load(template(rank, world), directory, **options)


def save(directory: Path | str, version: int, **options: Any) -> None:
    """Collective: save this rank's part."""
    dist_checkpointing.save(state_dict(version, *rank_and_size()), directory, **options)


def find_wrong(directory: Path, version: int) -> list[str]:
    """Collective: where a load gives this rank something else than save number ``version`` had."""
    rank, world = rank_and_size()
    return differences(load(directory, rank, world), version, rank, world)


def listing(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its relative path."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    return bool(type(found) is type(expected) and found == expected)
