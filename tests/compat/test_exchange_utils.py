from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.compat.megatron.dist_checkpointing import exchange_utils
from shardckpt.compat.megatron.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
    exchange_by_distribution,
)
from shardckpt.compat.megatron.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from shardckpt.compat.megatron.dist_checkpointing.utils import _sharded_tensor_shard_id
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor, is_main_replica

if TYPE_CHECKING:
    from tests.ranks import Ranks


def _state() -> dict[str, Any]:
    """Tensor parallel 2, data parallel 2, rank = dp * 2 + tp."""
    tp, dp = dist.get_rank() % 2, dist.get_rank() // 2
    return {
        "list": [
            ShardedTensor.from_rank_offsets(f"w{n}", torch.full((4, 8), n * 2.0 + tp), (0, tp, 2), replica_id=dp)
            for n in range(6)
        ],
        "plain": 7,
    }


def _distributed(grouped: bool, ignore_groups: bool) -> tuple[ShardDistribution, list[Any]]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[dist.get_rank() // 2] if grouped else None
    state = _state()
    distribution = determine_main_replica_uniform_distribution(state, group, ignore_groups)
    before = [shard.replica_id for shard in state["list"]]
    distribute_main_replicas_with_precomputed_distribution(state, group, distribution)
    return distribution, [before, [is_main_replica(shard.replica_id) for shard in state["list"]]]


def test_main_replicas_are_distributed_evenly(ranks: Ranks) -> None:
    """All ranks find the same distribution, each shard has one main rank, and bytes are even."""
    results = ranks.run(4, _distributed, False, False)
    first = results[0][0]
    assert all(distribution.main_rank_for_shard == first.main_rank_for_shard for distribution, _ in results)
    assert len(first.shards_in_this_group) == 12
    assert first.all_ranks_for_shard["w3", (4, 0), None] == [1, 3]
    assert first.shard_to_metadata["w3", (4, 0), None].data is None
    assert [sum(rank == r for rank in first.main_rank_for_shard.values()) for r in range(4)] == [3] * 4
    assert [ids[0] for _, ids in results] == [[rank // 2] * 6 for rank in range(4)]
    assert [sum(ids[1]) for _, ids in results] == [3] * 4


def test_a_group_distributes_what_is_its_own(ranks: Ranks) -> None:
    """A group without main replicas has nothing to save, and all to load."""
    results = ranks.run(4, _distributed, True, False)
    assert [len(distribution.shards_in_this_group) for distribution, _ in results] == [12, 12, 0, 0]
    assert not any(results[2][1][1])
    results = ranks.run(4, _distributed, True, True)
    assert [len(distribution.shards_in_this_group) for distribution, _ in results] == [12] * 4


def _exchanged(algorithm: str, spoil: str = "") -> tuple[list[str], bool]:
    state, rank = _state(), dist.get_rank()
    distribution = determine_main_replica_uniform_distribution(state, None, True)
    shards = {_sharded_tensor_shard_id(shard): shard for shard in state["list"]}
    loaded = {n: s.data for n, s in shards.items() if distribution.main_rank_for_shard[n] == rank}
    unloaded = {n: s for n, s in shards.items() if n not in loaded}
    expected = {n: s.data.clone() for n, s in shards.items()}
    for number, shard in enumerate(unloaded.values()):
        shard.data = None if number else torch.zeros(4, 8)
    if spoil and rank == 2:
        (loaded if spoil == "loaded" else unloaded).popitem()
    found = exchange_by_distribution(loaded, unloaded, distribution, None, algorithm)
    by_name = getattr(exchange_utils, f"exchange_loaded_tensors_{algorithm}")(loaded, unloaded, distribution, None)
    same = found.keys() == by_name.keys() == expected.keys()
    same = same and all(torch.equal(found[n], expected[n]) and torch.equal(by_name[n], expected[n]) for n in expected)
    return sorted(map(str, found)), same


@pytest.mark.parametrize("algorithm", ["broadcast", "gather_rounds", "gather_object"])
def test_shards_are_exchanged(ranks: Ranks, algorithm: str) -> None:
    """Every rank ends with its own shards, whoever has loaded them, and with no others; by Megatron's names, too."""
    results = ranks.run(4, _exchanged, algorithm)
    assert [same for _, same in results] == [True] * 4
    assert len(results[0][0]) == 6
    assert ranks.run(2, _exchange_objects) == [{0: "0", 1: "1"}] * 2


def _exchange_same() -> None:
    exchange_utils.exchange_loaded_objects_gather_object({"rng": dist.get_rank(), dist.get_rank(): 0})


def test_objects_of_one_key_are_not_dropped(ranks: Ranks) -> None:
    """Where two ranks have loaded an object, none of the two wins in silence: all ranks raise, and name it."""
    outcomes = ranks.outcomes(2, _exchange_same)
    assert {outcome.kind for outcome in outcomes} == {"CheckpointingException"}
    assert {outcome.message for outcome in outcomes} == {outcomes[0].message}
    assert "rank 1 and a rank before it have loaded the same objects: rng;" in outcomes[0].message


def _exchange_objects() -> dict[int, str]:
    return exchange_utils.exchange_loaded_objects_gather_object({dist.get_rank(): str(dist.get_rank())})


def _exchange_none_on_one_rank() -> None:
    loaded: Any = {"rng": 0} if dist.get_rank() else None
    exchange_utils.exchange_loaded_objects_gather_object(loaded)


def test_objects_that_are_no_dict_are_everyones_error(ranks: Ranks) -> None:
    """A rank that has loaded nothing, and says so by None, keeps no other waiting."""
    outcomes = ranks.outcomes(2, _exchange_none_on_one_rank)
    assert {outcome.kind for outcome in outcomes} == {"RankFailedError"}


@pytest.mark.parametrize("spoil", ["loaded", "unloaded"])
def test_what_a_rank_forgets_is_everyones_error(ranks: Ranks, spoil: str) -> None:
    """A rank that lacks what the distribution expects of it keeps no other waiting."""
    outcomes = ranks.outcomes(4, _exchanged, "broadcast", spoil)
    assert {outcome.kind for outcome in outcomes} == {"CheckpointingException"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert f"is not among the {spoil}" in outcomes[0].message


def test_nothing_to_exchange_directly() -> None:
    """Where every rank reads for itself there is no exchange to ask for."""
    empty = ShardDistribution({}, set(), {}, {})
    with pytest.raises(CheckpointingException, match="exchanges nothing"):
        exchange_by_distribution({}, {}, empty, None, "direct")


def test_another_dtype_than_the_distributions_is_refused() -> None:
    """A distribution of other state dicts gives no tensor in a dtype that the caller did not ask for."""
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    distribution = determine_main_replica_uniform_distribution({"w": shard})
    wanted = ShardedTensor.from_rank_offsets("w", torch.ones(3, dtype=torch.float64))
    with pytest.raises(CheckpointingException, match=r"torch.float64 here, the distribution says torch.float32"):
        exchange_by_distribution({}, {_sharded_tensor_shard_id(wanted): wanted}, distribution)


def test_a_shard_that_the_distribution_does_not_have_is_refused() -> None:
    """A requested shard that no rank sends is an error, not a result without it."""
    shard, other = (ShardedTensor.from_rank_offsets(key, torch.ones(3)) for key in ("w", "v"))
    distribution = determine_main_replica_uniform_distribution({"w": shard})
    number = _sharded_tensor_shard_id(shard)
    of_others = distribution._replace(main_rank_for_shard={number: 1}, all_ranks_for_shard={number: [1]})
    for given_one, loaded, wanted in ((distribution, {number: torch.ones(3)}, other), (of_others, {}, shard)):
        with pytest.raises(CheckpointingException, match=r"shard \('[vw]', .* is not in the state dict .* of rank 0"):
            exchange_by_distribution(loaded, {_sharded_tensor_shard_id(wanted): wanted}, given_one)


@given(st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 99)), max_size=30))
def test_every_shard_goes_to_one_of_its_ranks(shards: list[tuple[set[int], int]]) -> None:
    """The chosen rank holds the shard."""
    holders = {f"s{number}": list(ranks) for number, (ranks, _) in enumerate(shards)}
    sizes = {f"s{number}": size for number, (_, size) in enumerate(shards)}
    chosen = distribute_shards_to_ranks(holders, sizes, 4)
    assert chosen.keys() == holders.keys()
    assert all(rank in holders[shard] for shard, rank in chosen.items())


def test_shards_of_other_groups_come_last() -> None:
    """What is loaded for another group's sake fills up what is left, however scarce it is."""
    holders, sizes = {"a": [0], "b": [0, 1]}, {"a": 10, "b": 10}
    assert distribute_shards_to_ranks(holders, sizes, 2) == {"a": 0, "b": 1}
    assert distribute_shards_to_ranks(holders, sizes, 2, {"a"}) == {"a": 0, "b": 0}


def test_ranks_and_sizes_must_exist() -> None:
    """A shard that nobody in the group holds, or whose size is not given, is an error that names it."""
    with pytest.raises(CheckpointingException, match=r"'a' is held by ranks \[2\], in a group of 2"):
        distribute_shards_to_ranks({"a": [2]}, {"a": 1}, 2)
    with pytest.raises(CheckpointingException, match="'b' has no size in shard_to_size"):
        distribute_shards_to_ranks({"a": [0], "b": [0]}, {"a": 1}, 2)
