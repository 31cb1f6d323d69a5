from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import CheckpointingException, DtypeMismatchError, KeyMismatchError, ShardingError
from shardckpt.local.local_checkpoint import load_local, save_local
from shardckpt.local.tensor_aware import TensorAwareStateDict
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.local.shards import MODES, check_state, make_part, make_state, make_tensor
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Failure, Ranks


def _round_trip(algo: str, data: bool, exchange_algo: str) -> list[int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    part, _ = make_part(algo)
    wanted = make_state(rank, world, filled=False, data=data)
    destinations = [leaf.data for leaf in wanted["everywhere"]]
    loaded = part.to_state_dict(wanted, algo=algo, exchange_algo=exchange_algo)
    check_state(loaded, rank, world)
    if data:
        assert all(got is given for got, given in zip(loaded["everywhere"], destinations, strict=True))
    return [sum(tensor.nbytes for tensor in part.tensors), len(list(part.tensors))]


@pytest.mark.parametrize("world", [2, *in_proof(4)])
@pytest.mark.parametrize("algo", MODES)
def test_a_state_dict_comes_back_as_it_was(ranks: Ranks, world: int, algo: str) -> None:
    """Every leaf comes back on every rank, into the caller's tensors or into new ones; shares are about equal."""
    kept = ranks.run(world, _round_trip, algo, True, "broadcast")
    assert ranks.run(world, _round_trip, algo, False, "gather_rounds") == kept
    replicated = 4 * 96
    if algo == "fully_parallel":
        assert sum(nbytes for nbytes, _ in kept) < world * replicated
        assert max(nbytes for nbytes, _ in kept) - min(nbytes for nbytes, _ in kept) <= 96
    else:
        assert min(nbytes for nbytes, _ in kept) > replicated


def test_it_works_without_a_process_group() -> None:
    """One process without torch.distributed keeps all and gives it back."""
    state = {"w": ShardedTensor.from_rank_offsets("w", make_tensor(1)), "step": 3}
    for algo in MODES:
        part, _ = TensorAwareStateDict.from_state_dict(state, algo)
        loaded = part.to_state_dict({"w": state["w"].without_data(), "step": 0}, algo=algo)
        assert torch.equal(loaded["w"], make_tensor(1))
        assert loaded["step"] == 3
        for empty in ({}, None):
            assert part.to_state_dict(empty) == {"step": 3}
            assert part.to_state_dict(empty, return_mismatch_keys=True) == ({"step": 3}, set(), set())


def _cached() -> list[bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    _, first = make_part("fully_parallel")
    _, second = make_part("fully_parallel", cached_metadata=first)
    state = make_state(rank, world)
    if rank == 0:  # one rank of four has another shard than last time
        state["more"] = ShardedTensor.from_rank_offsets("more", make_tensor(9))
    part, third = TensorAwareStateDict.from_state_dict(state, cached_metadata=second)
    wanted = {"more": state["more"].without_data()} if rank == 0 else {"glu": state["glu"]}
    loaded = part.to_state_dict(wanted, algo="fully_parallel", validate_access_integrity=False)
    assert rank != 0 or torch.equal(loaded["more"], make_tensor(9))
    return [second is first, third is first]


def test_an_assignment_is_kept_while_no_rank_has_other_shards(ranks: Ranks) -> None:
    """What is passed back as cached_metadata is used again, and made anew on all ranks as soon as one differs."""
    assert ranks.run(4, _cached) == [[True, False]] * 4


def test_a_plain_tensor_that_nothing_fills_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A tensor of the state dict to restore that no shard describes is named, as a load does."""
    part, _ = TensorAwareStateDict.from_state_dict({"w": ShardedTensor.from_rank_offsets("w", make_tensor(1))})
    assert part.to_state_dict({"w": torch.zeros(3)}) == {}
    assert "no shard describes 1 tensor of the state dict to load" in caplog.text


@table("make", [lambda: torch.empty(8, 3, device="meta"), lambda: torch.zeros(3).expand(8, 3)])
def test_a_tensor_that_cannot_be_filled_is_named(make: Callable[[], torch.Tensor]) -> None:
    """A tensor of the state dict to restore that holds no values, or not as many, is refused as by a load."""
    part, _ = TensorAwareStateDict.from_state_dict({"w": ShardedTensor.from_rank_offsets("w", make_tensor(1))})
    with pytest.raises(ShardingError, match=r"'w': its data is (on the meta device|expanded)"):
        part.to_state_dict({"w": ShardedTensor.from_rank_offsets("w", make())})


def test_an_error_says_how_many_shards_nobody_keeps() -> None:
    """Of many shards that no rank keeps, as after another sharding, the first are named, and the others are counted."""
    part, _ = TensorAwareStateDict.from_state_dict({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(50))})
    wanted = {f"{n}": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, n, 25)) for n in range(25)}
    with pytest.raises(KeyMismatchError, match=r"no rank .* \('w', .*, \.\.\. and 5 more; if they were made"):
        part.to_state_dict(wanted)


def test_other_shards_than_the_cached_ones_are_validated() -> None:
    """What is passed back as cached_metadata lets no hole through, of a tensor that is cut, or has grown."""

    def describe(length: int, whole: int) -> dict[str, Any]:
        return {"w": ShardedTensor("w", torch.ones(length), torch.float32, (length,), (whole,), (0,), None)}

    _, cache = TensorAwareStateDict.from_state_dict(describe(8, 8))
    for length, whole in ((4, 8), (8, 16)):
        with pytest.raises(ShardingError, match="no shard describes"):
            TensorAwareStateDict.from_state_dict(describe(length, whole), cached_metadata=cache)


def _with_an_empty_shard() -> None:
    rows = 2 * dist.get_rank()
    shard = ShardedTensor("w", torch.full((rows, 3), 7.0), torch.float32, (rows, 3), (2, 3), (0, 0), None)
    part, _ = TensorAwareStateDict.from_state_dict({"w": shard})
    loaded = part.to_state_dict({"w": shard.without_data()}, algo="fully_parallel")
    assert loaded["w"].tolist() == [[7.0] * 3] * rows


def test_an_empty_shard_keeps_none_of_another(ranks: Ranks) -> None:
    """A rank without rows, whose shard has another one's offset, is not taken for a holder of that one's rows."""
    ranks.run(2, _with_an_empty_shard)


def _hollow_on_one_rank() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    part, _ = make_part("atomic")
    if rank == 1:
        part.pop_tensors()
    part.to_state_dict(make_state(rank, world, filled=False, data=False))


def test_tensors_that_one_rank_has_taken_out_are_an_error_on_all(ranks: Ranks) -> None:
    """No rank waits for one whose tensors are out."""
    found: list[Failure] = ranks.outcomes(2, _hollow_on_one_rank)
    assert [failure.kind for failure in found] == ["CheckpointingException"] * 2
    assert all("rank 1" in failure.message and "the tensors are out" in failure.message for failure in found)


def _hollow() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    part, _ = make_part("atomic")
    part.copy_tensors_to_cpu()
    taken = part.pop_tensors()
    assert part.is_hollow
    small = pickle.dumps(part)
    assert len(small) < 20_000
    for action in (
        part.pop_tensors,
        part.copy_tensors_to_cpu,
        part.restore_tensor_device,
        lambda: part.to_state_dict({}),
    ):
        with pytest.raises(CheckpointingException, match="the tensors are out"):
            action()
    with pytest.raises(CheckpointingException, match="0 tensors for"):
        part.insert_tensors([])
    with pytest.raises(CheckpointingException, match="a tensor of"):
        part.insert_tensors([tensor.double() for tensor in taken])
    with pytest.raises(CheckpointingException, match="1 tensors for"):
        part.insert_tensors(None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="an object of type list in place of"):
        part.insert_tensors([tensor.tolist() for tensor in taken])  # type: ignore[misc]
    assert part.is_hollow
    other = pickle.loads(small)
    other.init_tensors()
    assert [(t.shape, t.dtype) for t in other.tensors] == [(t.shape, t.dtype) for t in taken]
    for place, tensor in zip(other.tensors, taken, strict=True):
        place.copy_(tensor)
    part.insert_tensors(taken)
    for whole in (part, other):
        assert not whole.is_hollow
        with pytest.raises(CheckpointingException, match="the tensors are in place"):
            whole.insert_tensors(taken)
        check_state(whole.to_state_dict(make_state(rank, world, filled=False)), rank, world)


def test_tensors_can_be_taken_out_and_put_back(ranks: Ranks) -> None:
    """A hollow state dict is small and travels as a pickle; with its tensors, or copies of them, it is whole again."""
    ranks.run(2, _hollow)


def test_a_restored_state_may_change() -> None:
    """What a training does to the containers that it has restored is not in what is restored next."""
    part, _ = TensorAwareStateDict.from_state_dict({"args": {"steps": [1]}})
    part.to_state_dict({"args": None})["args"]["steps"].append(2)
    assert part.to_state_dict({}) == {"args": {"steps": [1]}}


def test_copies_are_not_the_callers_tensors() -> None:
    """After copy_tensors_to_cpu training may go on: what is kept does not follow it."""
    weight = make_tensor(1)
    part, _ = TensorAwareStateDict.from_state_dict({"w": ShardedTensor.from_rank_offsets("w", weight)}, "atomic")
    part.copy_tensors_to_cpu()
    weight.zero_()
    part.restore_tensor_device()
    assert [torch.equal(tensor, make_tensor(1)) for tensor in part.tensors] == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: there is nowhere to bring tensors back to")
def test_tensors_go_back_to_their_device(tmp_path: Path) -> None:
    """Copies of device tensors are on the CPU until they are brought back, also from a local checkpoint."""
    state = {"w": ShardedTensor.from_rank_offsets("w", make_tensor(1).cuda())}
    part, _ = TensorAwareStateDict.from_state_dict(state)
    part.copy_tensors_to_cpu(non_blocking=True)
    torch.cuda.synchronize()
    assert [tensor.device.type for tensor in part.tensors] == ["cpu"]
    save_local(part, tmp_path / "0")
    for whole in (part, load_local(tmp_path / "0")):
        whole.restore_tensor_device()
        assert [tensor.device.type for tensor in whole.tensors] == ["cuda"]
        assert [torch.equal(tensor.cpu(), make_tensor(1)) for tensor in whole.tensors] == [True]


def _wrong_algo() -> None:
    part, _ = make_part("fully_parallel")
    part.to_state_dict(make_state(dist.get_rank(), dist.get_world_size(), filled=False), algo="atomic")


def test_a_share_alone_is_not_a_whole(ranks: Ranks) -> None:
    """Shares of a group that are asked for without the group: the same error on all ranks says what to pass."""
    outcomes: list[Failure] = ranks.outcomes(2, _wrong_algo)
    assert {outcome.kind for outcome in outcomes} == {"KeyMismatchError"}
    assert all("algo='fully_parallel'" in outcome.message for outcome in outcomes)


def _asked(strict: str) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    part, _ = make_part("fully_parallel")
    wanted = make_state(rank, world, filled=False)
    del wanted["pairs"]
    wanted["new"] = ShardedTensor.from_rank_offsets("new", torch.zeros(2), replica_id=rank)
    loaded, missing, unexpected = part.to_state_dict(
        wanted, algo="fully_parallel", strict=strict, return_mismatch_keys=True
    )
    return "new" in loaded, sorted(missing), sorted(unexpected)


def test_strictness_is_that_of_a_load(ranks: Ranks) -> None:
    """Keys that are not there, and keys that nobody asks for, are returned, or raised on all ranks."""
    assert ranks.run(2, _asked, "return_all") == [(False, ["w4"], ["new"])] * 2
    for outcome in ranks.outcomes(2, _asked, "raise_all"):
        assert outcome.kind == "KeyMismatchError"
        assert "new" in outcome.message


def test_floats_are_not_cut_to_integers() -> None:
    """A cast is refused or allowed as in a load."""
    part, _ = TensorAwareStateDict.from_state_dict({"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), 1.5))})
    held = torch.zeros(2, dtype=torch.int32)
    wanted = {"w": ShardedTensor.from_rank_offsets("w", held)}
    with pytest.raises(DtypeMismatchError, match=r"'w': stored torch\.float32, wanted torch\.int32"):
        part.to_state_dict(wanted)
    assert not held.any()
    assert part.to_state_dict(wanted, allow_dtype_cast=True)["w"].eq(1).all()


def _recut() -> None:
    rank = dist.get_rank()
    part, _ = make_part("fully_parallel")
    cut = ShardedTensor.from_rank_offsets("w4", torch.zeros(8, 1 + rank), (1, 0, 1))
    shape = ShardedTensor("w4", torch.zeros(8, 1 + rank), cut.dtype, (8, 1 + rank), (8, 3), (0, rank), None)
    part.to_state_dict({"pairs": shape}, algo="fully_parallel")


def test_shards_that_are_cut_otherwise_are_refused(ranks: Ranks) -> None:
    """Nothing is resharded: another cut is an error on all ranks that names the shard."""
    for outcome in ranks.outcomes(2, _recut):
        assert outcome.kind == "KeyMismatchError"
        assert "'w4', (0, 0), (8, 1)" in outcome.message


def test_arguments_are_checked() -> None:
    """Unknown ways to assign and to exchange, and what is no dict, are named; tensors without data cannot be kept."""
    state = {"w": ShardedTensor.from_rank_offsets("w", make_tensor(1))}
    part, _ = TensorAwareStateDict.from_state_dict(state)
    with pytest.raises(CheckpointingException, match="no algo 'half'"):
        TensorAwareStateDict.from_state_dict(state, "half")
    with pytest.raises(CheckpointingException, match="direct"):
        part.to_state_dict(state, exchange_algo="direct")
    for wrong in (torch.ones(2), []):
        with pytest.raises(CheckpointingException, match=r"the state dict to load is .*: expected a dict"):
            part.to_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="has no data"):
        TensorAwareStateDict.from_state_dict({"w": state["w"].without_data()})


def _plain_tensors(algo: str) -> dict[str, Any]:
    rank = dist.get_rank()
    mine = {"everywhere": make_tensor(1)} if rank else {"everywhere": make_tensor(1), "one": make_tensor(2)}
    part, _ = TensorAwareStateDict.from_state_dict(to_sharded_state_dict(mine), algo)
    into = to_sharded_state_dict({key: torch.zeros_like(value) for key, value in mine.items()})
    return part.to_state_dict(into, algo)  # type: ignore[no-any-return]


@pytest.mark.parametrize("algo", MODES)
def test_plain_tensors_need_no_replica_ids(ranks: Ranks, algo: str) -> None:
    """Tensors that the adapters describe are kept and given back, on however many ranks they are."""
    first, second = ranks.run(2, _plain_tensors, algo)
    assert first["one"].equal(make_tensor(2))
    assert first["everywhere"].equal(make_tensor(1))
    assert second["everywhere"].equal(make_tensor(1))


def _lacks(strict: str) -> Any:
    """Each rank keeps an object and a tensor of its own, under keys of its own; rank 1 does not ask for its object."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = ShardedObject("o", rank, (world,), (rank,))
    own = {f"only{n}": ShardedTensor.from_rank_offsets(f"only.{n}", make_tensor(n)) for n in range(2 * rank + 1)}
    state = {"o": shard, **{f"{name}.{rank}": replace(leaf, key=f"{leaf.key}.{rank}") for name, leaf in own.items()}}
    part, _ = TensorAwareStateDict.from_state_dict(state, "atomic")
    wanted = {key: leaf.without_data() for key, leaf in state.items() if rank == 0 or key != "o"}
    return part.to_state_dict(wanted, validate_access_integrity=False, strict=strict, return_mismatch_keys=True)[1:]


def test_strict_modes_know_what_all_ranks_keep(ranks: Ranks) -> None:
    """Ranks keep different shards: a shard of an object that its rank does not ask for is missing on every rank."""
    assert ranks.run(2, _lacks, "return_all") == [({"o"}, set())] * 2
    outcomes = ranks.outcomes(2, _lacks, "raise_all")
    assert {outcome.kind for outcome in outcomes} == {"KeyMismatchError"}
    assert all("Missing keys" in outcome.message and "o/shard_1_2" in outcome.message for outcome in outcomes)
