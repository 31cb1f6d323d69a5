from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardckpt import dist_checkpointing as dc
from shardckpt.adapters import load_into, to_sharded_state_dict
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.cli import main
from shardckpt.errors import ShardingError
from shardckpt.maintenance import convert_checkpoint
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from shardckpt_safetensors.index import read_index
from tests.safetensors.conformance.independent_reader import read_checkpoint
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

HEAD, EMBEDDING = "head.weight", "embedding.weight"


def described(**tensors: torch.Tensor) -> dict[str, Any]:
    """Entire tensors of this process."""
    return entire(tensors)


def aliases_of(path: Path) -> dict[str, str]:
    """The stored key of each alias."""
    with dc.open_checkpoint(path) as stored:
        index = read_index(stored._checkpoint.context.reader)
        return {alias: index.keys[number] for alias, number in index.aliases.items()}


def save_tied(path: Path) -> torch.Tensor:
    """Save a tensor under two keys, and another one."""
    weight = torch.randn(6, 4)
    state = {
        HEAD: ShardedTensor.from_rank_offsets(HEAD, weight),
        EMBEDDING: ShardedTensor.from_rank_offsets(EMBEDDING, weight.detach()),
        "bias": ShardedTensor.from_rank_offsets("bias", torch.ones(3)),
    }
    dc.save(state, path, "safetensors")
    return weight


def test_tied_tensors_are_stored_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One payload, two names: each loads, also lazily; inspect lists both, verify and the stranger's reader agree."""
    weight = save_tied(tmp_path / "c")
    assert aliases_of(tmp_path / "c") == {HEAD: EMBEDDING}
    with safe_open(tmp_path / "c" / "rank_0_0.safetensors", framework="pt") as file:
        assert {name for name in file.keys() if not name.startswith("__")} == {EMBEDDING, "bias"}  # noqa: SIM118 - no dict
    wanted = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(6, 4)) for name in (HEAD, EMBEDDING)}
    loaded = dc.load(wanted, tmp_path / "c")
    assert all(torch.equal(loaded[name], weight) for name in wanted)
    with dc.open_checkpoint(tmp_path / "c") as stored:
        assert torch.equal(stored[HEAD][2:4, 1], weight[2:4, 1])
    assert main(["inspect", str(tmp_path / "c")]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert [HEAD, "float32", "6x4"] in rows
    assert [EMBEDDING, "float32", "6x4"] in rows
    assert main(["verify", str(tmp_path / "c")]) == 0
    read_checkpoint(tmp_path / "c")


@table(("gone", "stays"), [(HEAD, EMBEDDING), (EMBEDDING, HEAD)])
def test_one_of_two_names_is_removed(tmp_path: Path, gone: str, stays: str) -> None:
    """The other name keeps the values, whichever of the two was stored."""
    weight = save_tied(tmp_path / "c")
    dc.remove_sharded_tensors(tmp_path / "c", gone)
    assert aliases_of(tmp_path / "c") == {}
    with dc.open_checkpoint(tmp_path / "c") as stored:
        assert sorted(stored) == ["bias", stays]
        assert torch.equal(stored[stays].read(), weight)
    read_checkpoint(tmp_path / "c")


def test_tied_tensors_are_migrated(tmp_path: Path) -> None:
    """In another format each name has its values."""
    weight = save_tied(tmp_path / "c")
    convert_checkpoint(tmp_path / "c", tmp_path / "new", "torch_dist")
    found = dc.load_plain_tensors(tmp_path / "new")
    assert torch.equal(found[HEAD], weight)
    assert torch.equal(found[EMBEDDING], weight)


def test_only_the_same_view_of_the_same_memory_is_tied(tmp_path: Path) -> None:
    """Parts, transposes and other dtypes of one memory, and tensors without elements, have values of their own."""
    base = torch.arange(16.0).view(4, 4)
    tensors = {
        "base": base,
        "rows": base[:2],
        "transposed": base.T,
        "bits": base.view(torch.int32),
        "negated": torch._neg_view(base),
        "flat": base.view(16),
        "empty": torch.empty(0, 4),
        "hollow": torch.empty(0, 4),
        "same": base,
        "again": torch.nn.Parameter(base),
    }
    dc.save(described(**tensors), tmp_path / "c", "safetensors")
    assert aliases_of(tmp_path / "c") == {"base": "again", "same": "again"}
    for name, found in dc.load_plain_tensors(tmp_path / "c").items():
        assert torch.equal(found, tensors[name]), name


def test_aliases_can_be_left(tmp_path: Path) -> None:
    """store_aliases=False: each key has its values in the files, for readers of these."""
    weight = torch.ones(3)
    strategy = SafetensorsSaveShardedStrategy(store_aliases=False)
    dc.save(described(a=weight, b=weight), tmp_path / "c", strategy)
    assert aliases_of(tmp_path / "c") == {}
    with safe_open(tmp_path / "c" / "rank_0_0.safetensors", framework="pt") as file:
        assert {"a", "b"} <= set(file.keys())


@table("background", [False, True])
def test_a_plan_that_is_used_again_looks_at_the_memory(tmp_path: Path, background: bool) -> None:
    """The same descriptions, tied, then not, then tied: each save stores what its tensors have."""

    def save(name: str, **tensors: torch.Tensor) -> None:
        strategy = SafetensorsSaveShardedStrategy()
        request = dc.save(described(**tensors), tmp_path / name, strategy, async_sharded_save=background)
        if request is not None:
            with AsyncCallsQueue() as queue:
                queue.schedule_async_request(request)

    for step, tied in enumerate((True, True, False, False, True)):
        first = torch.full((5,), float(step))
        second = first if tied else first + 100
        save(f"c{step}", a=first, b=second)
        assert aliases_of(tmp_path / f"c{step}") == ({"b": "a"} if tied else {})
        found = dc.load_plain_tensors(tmp_path / f"c{step}")
        assert torch.equal(found["a"], first)
        assert torch.equal(found["b"], second)


def test_an_alias_with_the_name_of_an_object_is_refused(tmp_path: Path) -> None:
    """Names in the index are unique: the error names the key."""
    weight = torch.ones(3)
    state = described(a=weight) | {
        "b": ShardedTensor.from_rank_offsets("o/shard_0_1", weight),
        "o": ShardedObject("o", 1, (1,), (0,)),
    }
    with pytest.raises(ShardingError, match=r"o/shard_0_1.*of a tensor and of an object"):
        dc.save(state, tmp_path / "c", "safetensors")


def _save_by_ranks(path: str, form: str) -> dict[str, str]:
    """Rows over the ranks, and replicas, tied in different ways on each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.full((2, 3), float(rank))
    other = rows.clone() + (0 if form == "tied" else 10 * rank)
    state: dict[str, Any] = {"a": ShardedTensor.from_rank_offsets("a", rows, (0, rank, world))}
    tied = {"tied": True, "untied on rank 1": rank == 0, "untied everywhere": False}[form]
    state["b"] = ShardedTensor.from_rank_offsets("b", rows if tied else other, (0, rank, world))
    full = torch.arange(4.0)  # a replica; the second name of it is on rank 1 alone
    state["full"] = ShardedTensor.from_rank_offsets("full", full, replica_id=rank)
    if rank:
        state["only here"] = ShardedTensor.from_rank_offsets("only here", full)
    empty = torch.empty(0, 2) if rank else torch.ones(1, 2)  # FSDP's uneven shards: nothing on rank 1
    for name in ("x", "y"):
        state[name] = ShardedTensor(name, empty, empty.dtype, tuple(empty.shape), (1, 2), (rank, 0), None)
    dc.save(state, path, "safetensors")
    wanted = {
        name: ShardedTensor.from_rank_offsets(name, torch.empty(2 * world, 3), replica_id=rank) for name in ("a", "b")
    }
    loaded = dc.load(wanted, path)
    assert loaded["a"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert loaded["b"][:, 0].tolist() == ([0.0, 0.0, 1.0, 1.0] if form == "tied" else [0.0, 0.0, 11.0, 11.0])
    return {}


@pytest.mark.parametrize("form", ["tied", "untied on rank 1", "untied everywhere"])
def test_all_ranks_must_have_them_tied(ranks: Ranks, tmp_path: Path, form: str) -> None:
    """One rank where the memory differs, or that has one of the keys alone: each key is stored."""
    ranks.run(2, _save_by_ranks, str(tmp_path / "c"), form)
    assert aliases_of(tmp_path / "c") == {"y": "x"} | ({"b": "a"} if form == "tied" else {})
    read_checkpoint(tmp_path / "c")


class Tied(torch.nn.Module):
    """A language model whose output layer has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def _save_fsdp(path: str) -> list[float]:
    torch.manual_seed(0)
    model = Tied()
    expected = model.embedding.weight.detach().clone()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert model.head.weight is model.embedding.weight
    # as torch's own state_dict gives them: both names, one DTensor
    dc.save(to_sharded_state_dict(model), path, "safetensors")
    with torch.no_grad():
        model.head.weight.zero_()
    load_into(dc.load(to_sharded_state_dict(model), path), model)
    full = model.embedding.weight.full_tensor()  # type: ignore[attr-defined]
    assert torch.equal(full, expected)
    return full.flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.ci)])
def test_a_tied_model_of_fsdp(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """FSDP2's tied parameters are one DTensor: stored once, loaded into both names."""
    ranks.run(world, _save_fsdp, str(tmp_path / "c"))
    with dc.open_checkpoint(tmp_path / "c") as stored:
        names = sorted(stored)
    assert aliases_of(tmp_path / "c") == {names[1]: names[0]}
    assert [name.rpartition("model.")[2] for name in names] == [EMBEDDING, HEAD]
