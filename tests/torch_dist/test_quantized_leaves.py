"""Quantized tensors as plain leaves of a state dict that dcp.load fills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor
from shardckpt_torch_dist import CheckpointStorageReader, ShardedLoadPlanner
from tests.torch_dist.te_stand_in import FirstFloat8StandIn, Float8StandIn, MXFP8StandIn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

KINDS = [Float8StandIn, MXFP8StandIn, FirstFloat8StandIn]
FULL = ((torch.arange(64 * 128) * 37 % 1001 - 500) / 128).reshape(64, 128).bfloat16()


def _empty(kind: Any, *shape: int) -> Any:
    return kind.quantized(torch.ones(shape, dtype=FULL.dtype))


def _save_in_chunks(path: Path) -> None:
    """Save in four chunks; stock DCP reads them, too."""
    parts = [part.contiguous() for part in FULL.chunk(4)]
    shards = [ShardedTensor.from_rank_offsets("w", part, (0, number, 4)) for number, part in enumerate(parts)]
    dc.save({"w": shards}, path)


def _fill(leaf: Any, path: Path, planner: DefaultLoadPlanner | None = None) -> None:
    """Fill a leaf through our reader, by a planner, or by torch's own."""
    dcp.load({"w": leaf}, storage_reader=CheckpointStorageReader(path), planner=planner, no_dist=True)


def test_a_leaf_is_filled_from_several_chunks(tmp_path: Path) -> None:
    """Our planner quantizes a plain leaf of each class once, by our reader and by torch's."""
    _save_in_chunks(tmp_path / "c")
    for kind in KINDS:
        for reader in (CheckpointStorageReader(tmp_path / "c"), dcp.FileSystemReader(tmp_path / "c")):
            leaf = _empty(kind, 64, 128)
            dcp.load({"w": leaf}, storage_reader=reader, planner=ShardedLoadPlanner(), no_dist=True)
            assert (leaf.bits(), leaf.times) == (kind.quantized(FULL).bits(), 1)


def _load_dtensor(path: str) -> bool:
    local = _empty(Float8StandIn, 32, 128)
    mesh = init_device_mesh("cpu", (2,))
    leaf = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    dcp.load({"w": leaf}, storage_reader=CheckpointStorageReader(path), planner=ShardedLoadPlanner())
    values = FULL.chunk(2)[dist.get_rank()].contiguous()
    return bool(local.bits() == Float8StandIn.quantized(values).bits())


def test_the_local_part_of_a_dtensor_is_filled(ranks: Ranks, tmp_path: Path) -> None:
    """A DTensor whose local tensor is quantized and stored in two chunks is filled on each rank."""
    _save_in_chunks(tmp_path / "c")
    assert ranks.run(2, _load_dtensor, str(tmp_path / "c")) == [True, True]


def test_views_of_one_leaf_are_refused(tmp_path: Path) -> None:
    """Leaves that share scales are refused, as ShardedTensors are, before anything is filled."""
    dcp.save({"a": FULL[:32].clone(), "b": FULL[32:].clone()}, checkpoint_id=tmp_path / "c", no_dist=True)
    whole = _empty(Float8StandIn, 64, 128)
    before = whole.bits()
    halves = {
        key: Float8StandIn(whole._data[rows], whole._scale_inv, whole.dtype)
        for key, rows in (("a", slice(0, 32)), ("b", slice(32, 64)))
    }
    with pytest.raises(CheckpointException, match="'a' and 'b' would be loaded into views of one quantized tensor"):
        dcp.load(halves, checkpoint_id=tmp_path / "c", planner=ShardedLoadPlanner(), no_dist=True)
    assert whole.bits() == before


def test_torchs_own_planner_is_refused_by_name(tmp_path: Path) -> None:
    """What torch's planner cannot fill through our reader is an error that says what can; one chunk is filled."""
    _save_in_chunks(tmp_path / "c")
    leaf = _empty(Float8StandIn, 64, 128)
    before = leaf.bits()
    error = r"ShardingError: tensor 'w': DefaultLoadPlanner fills .*Float8StandIn.*ShardedLoadPlanner\(\)"
    with pytest.raises(CheckpointException, match=error):
        _fill(leaf, tmp_path / "c")
    assert leaf.bits() == before
    dcp.save({"w": FULL}, checkpoint_id=tmp_path / "one", no_dist=True)
    _fill(leaf, tmp_path / "one")
    assert leaf.bits() == Float8StandIn.quantized(FULL).bits()


class _CopiesBack(DefaultLoadPlanner):
    """Fills a quantized leaf by a plain copy, and commits it, as an author's planner may."""

    def __init__(self) -> None:
        super().__init__()
        self._plain = torch.empty_like(FULL)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.transform_tensor(read_item, self._plain)  # type: ignore[no-any-return]

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.state_dict["w"].copy_(self._plain)


def test_a_planner_that_commits_is_trusted(tmp_path: Path) -> None:
    """A planner with its own commit_tensor puts parts back itself, and is not refused."""
    _save_in_chunks(tmp_path / "c")
    leaf = _empty(Float8StandIn, 64, 128)
    _fill(leaf, tmp_path / "c", _CopiesBack())
    assert leaf.bits() == Float8StandIn.quantized(FULL).bits()


class _KeepsABuffer(DefaultLoadPlanner):
    """Reads into a plain tensor of its own, which the caller quantizes after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros_like(FULL)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.transform_tensor(read_item, self.plain)  # type: ignore[no-any-return]


class _Logs(DefaultLoadPlanner):
    """Overrides resolve_tensor, and adds nothing to DCP's."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)  # type: ignore[no-any-return]


def test_a_planner_with_a_buffer_is_trusted_and_a_subclass_is_not(tmp_path: Path) -> None:
    """Parts of a buffer of the planner's own are filled; parts that are copies are refused, whoever resolves them."""
    _save_in_chunks(tmp_path / "c")
    planner, leaf = _KeepsABuffer(), _empty(Float8StandIn, 64, 128)
    _fill(leaf, tmp_path / "c", planner)
    assert torch.equal(planner.plain, FULL)
    with pytest.raises(CheckpointException, match="'w': _Logs fills"):
        _fill(leaf, tmp_path / "c", _Logs())


class _OwnNames(DefaultLoadPlanner):
    """Finds destinations by names of its own, which lookup_tensor does not know."""

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        raise KeyError(index.fqn)

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return self.transform_tensor(read_item, self.destination(read_item))  # type: ignore[no-any-return]

    def destination(self, read_item: Any) -> torch.Tensor:
        return self.state_dict[read_item.dest_index.fqn]  # type: ignore[no-any-return]


class _OwnNamesAndBuffer(_OwnNames):
    """Reads into a buffer of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros_like(FULL)

    def destination(self, read_item: Any) -> torch.Tensor:
        return self.plain


def test_a_planner_whose_lookup_fails_loses_nothing(tmp_path: Path) -> None:
    """Where lookup_tensor raises, parts that are copies are refused; buffers, plain and whole tensors are filled."""
    _save_in_chunks(tmp_path / "c")
    leaf, plain = _empty(Float8StandIn, 64, 128), torch.zeros_like(FULL)
    before = leaf.bits()
    with pytest.raises(CheckpointException, match=r"'w': _OwnNames fills .*lookup_tensor raised KeyError: 'w'"):
        _fill(leaf, tmp_path / "c", _OwnNames())
    assert leaf.bits() == before
    _fill(plain, tmp_path / "c", _OwnNames())
    assert torch.equal(plain, FULL)
    planner = _OwnNamesAndBuffer()
    _fill(leaf, tmp_path / "c", planner)
    assert torch.equal(planner.plain, FULL)
    dcp.save({"w": FULL}, checkpoint_id=tmp_path / "one", no_dist=True)
    _fill(leaf, tmp_path / "one", _OwnNames())
    assert leaf.bits() == Float8StandIn.quantized(FULL).bits()
