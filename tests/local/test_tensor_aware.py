from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.adapters import to_sharded_state_dict
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    DtypeMismatchError,
    KeyMismatchError,
    NotACheckpointError,
)
from shardckpt.local.local_checkpoint import load_local, save_local
from shardckpt.local.tensor_aware import TensorAwareStateDict
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from tests.names import METADATA

if TYPE_CHECKING:
    from shardckpt.local.memory_shards import KeptShards
    from tests.ranks import Failure, RankPool

MODES = ("atomic", "fully_parallel")


def _whole(number: int, shape: tuple[int, ...] = (8, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) + 100 * number).reshape(shape).to(dtype)


def _halves(rank: int, world: int, key: str, data: torch.Tensor, replica_id: Any, _: slice | None) -> list[Any]:
    cells = ((0, rank, 2 * world), (0, rank + world, 2 * world))
    return [
        ShardedTensor.from_rank_offsets(key, half, cell, replica_id=replica_id)
        for half, cell in zip(data.chunk(2), cells, strict=True)
    ]


def _state(rank: int, world: int, *, filled: bool = True, data: bool = True) -> dict[str, Any]:
    """Tensors that all ranks have, that pairs of ranks have and that one has, a factory's, objects and common state."""
    tp, dp = rank % 2, rank // 2

    def shard(number: int, value: torch.Tensor, *cells: tuple[int, int, int], **kwargs: Any) -> ShardedTensor:
        value = value.clone() if filled else torch.full_like(value, -1)
        made = ShardedTensor.from_rank_offsets(f"w{number}", value, *cells, **kwargs)
        return made if data else made.without_data()

    half = _whole(5).chunk(2)[tp].contiguous() if filled else torch.full((4, 3), -1.0)
    return {
        "everywhere": [shard(n, _whole(n), replica_id=rank) for n in range(4)],
        "pairs": shard(4, _whole(4, dtype=torch.bfloat16).chunk(2)[tp], (0, tp, 2), replica_id=dp),
        "glu": ShardedTensorFactory("glu", half, lambda *args: _halves(tp, 2, *args), torch.cat, dp),
        "mine": shard(6, _whole(6).chunk(world)[rank], (0, rank, world)),
        "flat": _flat(rank, world, filled=filled, data=data),
        "object": ShardedObject("o", {"rank": rank} if filled else None, (world,), (rank,)),
        "local": LocalNonpersistentObject(f"rank {rank}"),
        "iteration": 7 if filled else 0,
        "nested": {"rank": rank, "empty": []},
    }


def _flat(rank: int, world: int, *, filled: bool, data: bool) -> ShardedTensor:
    """A slice of a flattened grid cell, as Megatron's distributed optimizer had it until 0.15."""
    tp, dp, dps = rank % 2, rank // 2, world // 2
    part = slice(12 * dp // dps, 12 * (dp + 1) // dps)
    values = _whole(7).chunk(2)[tp].reshape(-1)[part].clone()
    values = values if filled else torch.full_like(values, -1)
    made = ShardedTensor.from_rank_offsets_flat("flat", values, (4, 3), (0, tp, 2), flattened_range=part)
    return made if data else made.without_data()


def _check(loaded: dict[str, Any], rank: int, world: int) -> None:
    """Every leaf is what the filled state has there."""
    expected = _state(rank, world)
    assert set(loaded) == set(expected)
    for got, shard in zip(loaded["everywhere"], expected["everywhere"], strict=True):
        assert torch.equal(got, shard.data), shard.key
    for name in ("pairs", "glu", "mine", "flat"):
        assert loaded[name].dtype == expected[name].data.dtype
        assert torch.equal(loaded[name], expected[name].data), name
    assert loaded["object"] == {"rank": rank}
    assert loaded["local"] == f"rank {rank}"
    assert loaded["iteration"] == 7
    assert loaded["nested"] == {"rank": rank, "empty": []}


def _made(algo: str, **kwargs: Any) -> tuple[TensorAwareStateDict, KeptShards | None]:
    return TensorAwareStateDict.from_state_dict(_state(dist.get_rank(), dist.get_world_size()), algo, **kwargs)


def _round_trip(algo: str, data: bool, exchange_algo: str) -> list[int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    part, _ = _made(algo)
    wanted = _state(rank, world, filled=False, data=data)
    destinations = [leaf.data for leaf in wanted["everywhere"]]
    loaded = part.to_state_dict(wanted, algo=algo, exchange_algo=exchange_algo)
    _check(loaded, rank, world)
    if data:
        assert all(got is given for got, given in zip(loaded["everywhere"], destinations, strict=True))
    return [sum(tensor.nbytes for tensor in part.tensors), len(list(part.tensors))]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("algo", MODES)
def test_a_state_dict_comes_back_as_it_was(ranks: RankPool, world: int, algo: str) -> None:
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
    state = {"w": ShardedTensor.from_rank_offsets("w", _whole(1)), "step": 3}
    for algo in MODES:
        part, _ = TensorAwareStateDict.from_state_dict(state, algo)
        loaded = part.to_state_dict({"w": state["w"].without_data(), "step": 0}, algo=algo)
        assert torch.equal(loaded["w"], _whole(1))
        assert loaded["step"] == 3
        assert part.to_state_dict({}) == {"step": 3}


def _cached() -> list[bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    _, first = _made("fully_parallel")
    _, second = _made("fully_parallel", cached_metadata=first)
    state = _state(rank, world)
    if rank == 0:  # one rank of four has another shard than last time
        state["more"] = ShardedTensor.from_rank_offsets("more", _whole(9))
    part, third = TensorAwareStateDict.from_state_dict(state, cached_metadata=second)
    wanted = {"more": state["more"].without_data()} if rank == 0 else {"glu": state["glu"]}
    loaded = part.to_state_dict(wanted, algo="fully_parallel", validate_access_integrity=False)
    assert rank != 0 or torch.equal(loaded["more"], _whole(9))
    return [second is first, third is first]


def test_an_assignment_is_kept_while_no_rank_has_other_shards(ranks: RankPool) -> None:
    """What is passed back as cached_metadata is used again, and made anew on all ranks as soon as one differs."""
    assert ranks.run(4, _cached) == [[True, False]] * 4


def _with_an_empty_shard() -> None:
    rows = 2 * dist.get_rank()
    shard = ShardedTensor("w", torch.full((rows, 3), 7.0), torch.float32, (rows, 3), (2, 3), (0, 0), None)
    part, _ = TensorAwareStateDict.from_state_dict({"w": shard})
    loaded = part.to_state_dict({"w": shard.without_data()}, algo="fully_parallel")
    assert loaded["w"].tolist() == [[7.0] * 3] * rows


def test_an_empty_shard_keeps_none_of_another(ranks: RankPool) -> None:
    """A rank without rows, whose shard has another one's offset, is not taken for a holder of that one's rows."""
    ranks.run(2, _with_an_empty_shard)


def _hollow() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    part, _ = _made("atomic")
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
        _check(whole.to_state_dict(_state(rank, world, filled=False)), rank, world)


def test_tensors_can_be_taken_out_and_put_back(ranks: RankPool) -> None:
    """A hollow state dict is small and travels as a pickle; with its tensors, or copies of them, it is whole again."""
    ranks.run(2, _hollow)


def test_copies_are_not_the_callers_tensors() -> None:
    """After copy_tensors_to_cpu training may go on: what is kept does not follow it."""
    weight = _whole(1)
    part, _ = TensorAwareStateDict.from_state_dict({"w": ShardedTensor.from_rank_offsets("w", weight)}, "atomic")
    part.copy_tensors_to_cpu()
    weight.zero_()
    part.restore_tensor_device()
    assert [torch.equal(tensor, _whole(1)) for tensor in part.tensors] == [True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: there is nowhere to bring tensors back to")
def test_tensors_go_back_to_their_device(tmp_path: Path) -> None:
    """Copies of device tensors are on the CPU until they are brought back, also from a local checkpoint."""
    state = {"w": ShardedTensor.from_rank_offsets("w", _whole(1).cuda())}
    part, _ = TensorAwareStateDict.from_state_dict(state)
    part.copy_tensors_to_cpu(non_blocking=True)
    torch.cuda.synchronize()
    assert [tensor.device.type for tensor in part.tensors] == ["cpu"]
    save_local(part, tmp_path / "0")
    for whole in (part, load_local(tmp_path / "0")):
        whole.restore_tensor_device()
        assert [tensor.device.type for tensor in whole.tensors] == ["cuda"]
        assert [torch.equal(tensor.cpu(), _whole(1)) for tensor in whole.tensors] == [True]


def _wrong_algo() -> None:
    part, _ = _made("fully_parallel")
    part.to_state_dict(_state(dist.get_rank(), dist.get_world_size(), filled=False), algo="atomic")


def test_a_share_alone_is_not_a_whole(ranks: RankPool) -> None:
    """Shares of a group that are asked for without the group: the same error on all ranks says what to pass."""
    outcomes: list[Failure] = ranks.outcomes(2, _wrong_algo)
    assert {outcome.kind for outcome in outcomes} == {"KeyMismatchError"}
    assert all("algo='fully_parallel'" in outcome.message for outcome in outcomes)


def _asked(strict: str) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    part, _ = _made("fully_parallel")
    wanted = _state(rank, world, filled=False)
    del wanted["pairs"]
    wanted["new"] = ShardedTensor.from_rank_offsets("new", torch.zeros(2), replica_id=rank)
    loaded, missing, unexpected = part.to_state_dict(
        wanted, algo="fully_parallel", strict=strict, return_mismatch_keys=True
    )
    return "new" in loaded, sorted(missing), sorted(unexpected)


def test_strictness_is_that_of_a_load(ranks: RankPool) -> None:
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
    part, _ = _made("fully_parallel")
    cut = ShardedTensor.from_rank_offsets("w4", torch.zeros(8, 1 + rank), (1, 0, 1))
    shape = ShardedTensor("w4", torch.zeros(8, 1 + rank), cut.dtype, (8, 1 + rank), (8, 3), (0, rank), None)
    part.to_state_dict({"pairs": shape}, algo="fully_parallel")


def test_shards_that_are_cut_otherwise_are_refused(ranks: RankPool) -> None:
    """Nothing is resharded: another cut is an error on all ranks that names the shard."""
    for outcome in ranks.outcomes(2, _recut):
        assert outcome.kind == "KeyMismatchError"
        assert "'w4', (0, 0), (8, 1)" in outcome.message


def test_arguments_are_checked() -> None:
    """Unknown ways to assign and to exchange are named, and tensors without data cannot be kept."""
    state = {"w": ShardedTensor.from_rank_offsets("w", _whole(1))}
    part, _ = TensorAwareStateDict.from_state_dict(state)
    with pytest.raises(CheckpointingException, match="no algo 'half'"):
        TensorAwareStateDict.from_state_dict(state, "half")
    with pytest.raises(CheckpointingException, match="direct"):
        part.to_state_dict(state, exchange_algo="direct")
    with pytest.raises(CheckpointingException, match="has no data"):
        TensorAwareStateDict.from_state_dict({"w": state["w"].without_data()})


def _save_locally(root: str, algo: str) -> None:
    part, _ = _made(algo)
    part.copy_tensors_to_cpu()
    save_local(part, Path(root, str(dist.get_rank())))
    with pytest.raises(CheckpointingException, match="not empty"):
        save_local(part, Path(root, str(dist.get_rank())))
    save_local(part, Path(root, str(dist.get_rank())), overwrite=True)


def _load_locally(root: str, algo: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    part = load_local(Path(root, str(rank)))
    part.restore_tensor_device()
    _check(part.to_state_dict(_state(rank, world, filled=False), algo=algo), rank, world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("algo", MODES)
def test_local_checkpoints_come_back(ranks: RankPool, tmp_path: Path, world: int, algo: str) -> None:
    """Each rank saves into its own folder and loads from it, and all together have the whole state again."""
    ranks.run(world, _save_locally, str(tmp_path), algo)
    ranks.run(world, _load_locally, str(tmp_path), algo)


def _saved(path: Path) -> TensorAwareStateDict:
    state = {"w": ShardedTensor.from_rank_offsets("w", _whole(1)), "list": [1, {"a": None}]}
    part, _ = TensorAwareStateDict.from_state_dict(state)
    save_local(part, path)
    return part


def test_a_damaged_local_checkpoint_is_refused(tmp_path: Path) -> None:
    """Any byte of its tensors or its common state that has changed is noticed."""
    _saved(tmp_path / "0")
    for path in sorted(tmp_path.glob("0/*")):
        if path.suffix == ".json" or path.name == METADATA:  # which a load of ours does not read
            continue
        content = path.read_bytes()
        path.write_bytes(
            content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
        )
        with pytest.raises(CorruptCheckpointError):
            load_local(tmp_path / "0")
        path.write_bytes(content)
    assert [torch.equal(tensor, _whole(1)) for tensor in load_local(tmp_path / "0").tensors] == [True]


def test_what_is_no_local_checkpoint_is_refused(tmp_path: Path) -> None:
    """No directory, a checkpoint of all ranks, and a state dict without its tensors: each is named."""
    from shardckpt import dist_checkpointing

    with pytest.raises(NotACheckpointError):
        load_local(tmp_path / "none")
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", _whole(1))}, tmp_path / "whole")
    with pytest.raises(CheckpointingException, match="not a local checkpoint"):
        load_local(tmp_path / "whole")
    part = _saved(tmp_path / "0")
    part.pop_tensors()
    with pytest.raises(CheckpointingException, match="the tensors are out"):
        save_local(part, tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_a_missing_shard_is_a_key_mismatch(tmp_path: Path) -> None:
    """A local checkpoint that lacks an object or tensor that is wanted says which, and fills nothing."""
    _saved(tmp_path / "0")
    destination = torch.zeros(8, 3)
    wanted = {
        "w": ShardedTensor.from_rank_offsets("w", destination),
        "o": ShardedObject("o", None, (1,), (0,)),
    }
    with pytest.raises(KeyMismatchError, match="o/shard_0_1"):
        load_local(tmp_path / "0").to_state_dict(wanted)
    assert not destination.any()


def _plain_tensors(algo: str) -> dict[str, Any]:
    rank = dist.get_rank()
    mine = {"everywhere": _whole(1)} if rank else {"everywhere": _whole(1), "one": _whole(2)}
    part, _ = TensorAwareStateDict.from_state_dict(to_sharded_state_dict(mine), algo)
    into = to_sharded_state_dict({key: torch.zeros_like(value) for key, value in mine.items()})
    return part.to_state_dict(into, algo)  # type: ignore[no-any-return]


@pytest.mark.parametrize("algo", MODES)
def test_plain_tensors_need_no_replica_ids(ranks: RankPool, algo: str) -> None:
    """Tensors that the adapters describe are kept and given back, on however many ranks they are."""
    first, second = ranks.run(2, _plain_tensors, algo)
    assert first["one"].equal(_whole(2))
    assert first["everywhere"].equal(_whole(1))
    assert second["everywhere"].equal(_whole(1))
