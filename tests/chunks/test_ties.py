from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardckpt.chunks.ties import TieFinder, agree_on_aliases
from shardckpt.distributed import Comm
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from tests.ranks import Ranks

#: By rank, which keys are the same memory there.
CHAIN = ("ab", "bc", "a")
STAGES = ("ab,x", "ab,y", "ab,xy")
FAR = ("abc", "", "abc,d")


def _agree(by_rank: tuple[str, ...]) -> dict[str, str]:
    shards = []
    for keys in by_rank[dist.get_rank()].split(","):
        memory = torch.ones(3)
        shards += [ShardedTensor.from_rank_offsets(key, memory, replica_id=dist.get_rank()) for key in keys]
    comm = Comm()
    return agree_on_aliases(TieFinder().find(shards), shards, comm)


def test_no_rank_may_tell_them_apart(ranks: Ranks) -> None:
    """A rank that has one key without the other unties them; one that has neither does not, and all agree."""
    assert ranks.run(3, _agree, CHAIN) == [{}] * 3
    assert ranks.run(3, _agree, STAGES) == [{"b": "a"}] * 3
    assert ranks.run(3, _agree, FAR) == [{"b": "a", "c": "a"}] * 3


def test_shards_of_one_key_count_together() -> None:
    """Two keys of several boxes are tied only if each box is; swapped boxes are other values."""
    top, bottom = torch.zeros(2), torch.ones(2)

    def shards(key: str, first: torch.Tensor, second: torch.Tensor) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, data, (0, n, 2)) for n, data in enumerate((first, second))]

    assert TieFinder().find([*shards("a", top, bottom), *shards("b", top, bottom)]) == [("a", "b")]
    assert TieFinder().find([*shards("a", top, bottom), *shards("b", bottom, top)]) == []
    assert TieFinder().find([*shards("a", top, bottom), *shards("b", top, bottom.clone())]) == []
    assert TieFinder().find([*shards("a", top, bottom), *shards("b", top, bottom)[:1]]) == []


def test_ties_that_come_and_go_between_saves() -> None:
    """A finder that has seen the tensors of one save finds those that are tied in the next, and no others."""
    first, second = torch.zeros(2), torch.ones(2)

    def shards(*tensors: torch.Tensor) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, data) for key, data in zip("abc", tensors, strict=True)]

    finder = TieFinder()
    rest = torch.zeros(3)
    for tensors, ties in (
        ((first, second, rest), []),
        ((first, second, rest), []),
        ((first, first, rest), [("a", "b")]),
        ((first, second, rest), []),
        ((first, second, second), [("b", "c")]),
        ((first, second, second[:1]), []),
    ):
        assert finder.find(shards(*tensors)) == ties
