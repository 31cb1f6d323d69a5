from __future__ import annotations

import dataclasses
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import (
    CorruptCheckpointError,
    DtypeMismatchError,
    IncompleteCheckpointError,
    NotACheckpointError,
    ShardingError,
    StrategyMismatchError,
    UnsafePickleError,
)
from shardckpt.mapping import ShardedTensor
from shardckpt_torch_dist import CheckpointStorageReader, CheckpointStorageWriter, ShardedLoadPlanner
from tests.damage import flip
from tests.golden_checkpoints import VERSIONS
from tests.interop.sample import check_equal
from tests.names import METADATA, data_file
from tests.states import run_here
from tests.tables import in_proof, table
from tests.torch_dist import plain_states
from tests.torch_dist.dcp.storage_reader import load_by_reader
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks

SAVED = 2


#: Set by a pickle that is run.
ran: list[str] = []


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, ("unpickled",)


def _failure(function: Callable[[], Any]) -> BaseException:
    """What is in DCP's one error."""
    with pytest.raises(CheckpointException) as caught:
        function()
    return next(iter(caught.value.failures.values()))[0]


# What others wrote.


def _stock_save(path: str, options: dict[str, Any]) -> None:
    dcp.save(plain_states.state(SAVED), storage_writer=dcp.FileSystemWriter(path, **options))


@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False}], ids=str)
@pytest.mark.parametrize("writers", [0, 2, *in_proof(4)])
def test_it_reads_what_stock_dcp_wrote(ranks: Ranks, tmp_path: Path, writers: int, options: dict[str, Any]) -> None:
    """Directories of FileSystemWriter, of 1 to 4 ranks and several files a rank, load at 1, 2 and 4 ranks."""
    path = str(tmp_path / "c")
    (ranks.run if writers else run_here)(writers, _stock_save, path, options)
    for world in (1, 2, 4):
        ranks.run(world, plain_states.load, path, SAVED, CheckpointStorageReader)


@table("version", VERSIONS)
def test_it_reads_megatrons_checkpoints_at_their_true_shapes(version: str) -> None:
    """Every dialect of Megatron's, flattened optimizer shards among them, gives what our own load gives."""
    path = GOLDEN / f"mcore-{version}"
    expected = dc.load_plain_tensors(path)
    found = load_by_reader({key: torch.zeros_like(tensor) for key, tensor in expected.items()}, path)
    check_equal(found, expected, version)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized:UserWarning")
def test_nested_dicts_are_made_from_the_metadata_alone(tmp_path: Path) -> None:
    """DCP's conversion to one state dict, which knows nothing beforehand, gets all nested values through our reader."""
    for writer in (CheckpointStorageWriter, dcp.FileSystemWriter):
        path = tmp_path / writer.__name__
        dcp.save(plain_states.state(SAVED), storage_writer=writer(path))
        plain_states.check(_load_state_dict_from_keys(storage_reader=CheckpointStorageReader(path)), SAVED)


# Into what.


def test_destinations_of_any_kind_are_filled(tmp_path: Path) -> None:
    """Other dtypes, strided views, parameters and large tensors, in place."""
    saved = {"small": plain_states.numbers(6, 4), "large": plain_states.numbers(3 << 18)}
    saved |= {"parameter": torch.ones(3), "view": plain_states.numbers(1 << 10, 300)}
    dcp.save(saved, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    memory = torch.zeros(300, 1 << 10)
    parameter = torch.nn.Parameter(torch.zeros(3))
    load_by_reader({"small": (small := torch.zeros(6, 4, dtype=torch.float64)), "view": memory.t()}, tmp_path / "c")
    load_by_reader({"large": (large := torch.zeros(3 << 18)), "parameter": parameter}, tmp_path / "c")
    check_equal(small, saved["small"].double(), "small")
    check_equal(memory.t().contiguous(), saved["view"], "view")
    check_equal(large, saved["large"], "large")
    check_equal(parameter.detach(), saved["parameter"], "parameter")


class _OneSlot(DefaultLoadPlanner):
    """Reads into one scratch tensor, and copies from it on commit: no other item may be read meanwhile."""

    slot: torch.Tensor | None = None

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        assert self.slot is None
        self.slot = torch.empty(tuple(read_item.lengths), dtype=super().resolve_tensor(read_item).dtype)
        return self.slot

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        assert tensor.data_ptr() == self.slot.data_ptr() or not tensor.numel()
        super().resolve_tensor(read_item).copy_(self.slot)
        self.slot = None


def _load_by_slot(path: str) -> None:
    plain_states.load(path, SAVED, CheckpointStorageReader, _OneSlot())


def test_a_planner_with_scratch_is_asked_for_one_tensor_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    """A planner that fills its destinations on commit gets items one after the other, whatever their sizes."""
    dcp.save(plain_states.state(SAVED), storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    ranks.run(2, _load_by_slot, str(tmp_path / "c"))


class _WrongShape(DefaultLoadPlanner):
    """Gives destinations that do not fit."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.zeros(*read_item.lengths, 2)


def test_a_destination_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    """A planner's tensor of another shape than its item is refused, by name."""
    dcp.save({"w": torch.ones(3)}, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    failure = _failure(lambda: load_by_reader({"w": torch.zeros(3)}, tmp_path / "c", _WrongShape()))
    assert isinstance(failure, ShardingError)
    assert "'w'" in str(failure)


@table("planner", [None, ShardedLoadPlanner, _OneSlot])
def test_floats_are_not_cut_to_integers(tmp_path: Path, planner: Any) -> None:
    """A cast that would lose what values mean is refused by name before anything is filled, unless it is asked for."""
    dcp.save({"a": torch.ones(3), "w": torch.full((3,), 2.5)}, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    made = planner or (lambda: None)
    state = {"w": torch.zeros(3, dtype=torch.uint8)}
    failure = _failure(lambda: load_by_reader(state, tmp_path / "c", made()))
    assert isinstance(failure, DtypeMismatchError)
    assert "'w': stored torch.float32, wanted torch.uint8" in str(failure)
    assert not state["w"].any()
    assert load_by_reader(state, tmp_path / "c", made(), allow_dtype_cast=True)["w"].eq(2).all()
    assert load_by_reader({"w": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "c", made())["w"].eq(2.5).all()


@table("planner", [None, ShardedLoadPlanner, _OneSlot])
def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path, planner: Any) -> None:
    """A value that a cast would change is an error by name, and rounded or infinite ones are none."""
    saved = {"w": torch.tensor([0.1, float("inf"), 1e5]), "n": torch.tensor([2**24 + 1, 3])}
    dcp.save(saved, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    made = planner or (lambda: None)
    for key, wanted, said in (("w", torch.float16, "100000.0 would be inf"), ("n", torch.float32, "16777217 would be")):
        state = {key: torch.zeros(saved[key].shape, dtype=wanted)}
        failure = _failure(lambda: load_by_reader(state, tmp_path / "c", made()))  # noqa: B023
        assert isinstance(failure, DtypeMismatchError)
        assert f"{key!r}: stored {saved[key].dtype}, wanted {wanted}: {said}" in str(failure)
        loaded = load_by_reader(state, tmp_path / "c", made(), allow_dtype_cast=True)[key]
        assert torch.equal(loaded, saved[key].to(wanted))
    held = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    assert torch.equal(load_by_reader(held, tmp_path / "c", made())["w"], saved["w"].bfloat16())


def test_a_planner_refuses_or_allows_casts_of_shards(tmp_path: Path) -> None:
    """ShardedTensors go by their planner's word, through our reader and through DCP's."""
    dcp.save({"w": torch.full((3,), 2.5)}, checkpoint_id=tmp_path / "c")
    for reader in (CheckpointStorageReader, FileSystemReader):
        held = torch.zeros(3, dtype=torch.int64)
        state = {"w": ShardedTensor.from_rank_offsets("w", held)}
        failure = _failure(lambda: dcp.load(state, storage_reader=reader(tmp_path / "c"), planner=ShardedLoadPlanner()))  # noqa: B023
        assert isinstance(failure, DtypeMismatchError)
        assert not held.any()
        planner = ShardedLoadPlanner(allow_dtype_cast=True)
        dcp.load(state, storage_reader=reader(tmp_path / "c"), planner=planner)
        assert held.eq(2).all()


# What is damaged.


def test_damaged_bytes_are_an_error_where_they_are_read(tmp_path: Path) -> None:
    """One flipped bit is an error that names the tensor and the file; tensors elsewhere in the file load."""
    saved = {"first": plain_states.numbers(3 << 18), "last": plain_states.numbers(3 << 18, first=5)}
    dcp.save(saved, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    file = tmp_path / "c" / data_file(0)
    flip(file, file.stat().st_size - 100_000)
    failure = _failure(lambda: load_by_reader({"last": torch.zeros(3 << 18)}, tmp_path / "c"))
    assert isinstance(failure, CorruptCheckpointError)
    assert "last" in str(failure)
    assert data_file(0) in str(failure)
    check_equal(load_by_reader({"first": torch.zeros(3 << 18)}, tmp_path / "c")["first"], saved["first"], "first")


def test_damaged_metadata_is_an_error(tmp_path: Path) -> None:
    """A flipped bit in ``.metadata`` is never read as another state."""
    dcp.save({"w": torch.ones(3)}, storage_writer=CheckpointStorageWriter(tmp_path / "c"))
    flip(tmp_path / "c" / METADATA, 200)
    with pytest.raises(CorruptCheckpointError, match="digest differs"):
        CheckpointStorageReader(tmp_path / "c").read_metadata()


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((path / METADATA).read_bytes())
    change(metadata)
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def test_a_chunk_that_a_stock_save_lost_is_an_error(tmp_path: Path) -> None:
    """What DCP's worker threads lost is named when it is wanted, not left as it was; other tensors load."""
    dcp.save({"a": torch.ones(3), "b": torch.ones(4)}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    _edit(tmp_path / "c", lambda metadata: metadata.storage_data.pop(MetadataIndex("b", (0,))))
    failure = _failure(lambda: load_by_reader({"b": torch.zeros(4)}, tmp_path / "c"))
    assert isinstance(failure, CorruptCheckpointError)
    assert "the save lost it" in str(failure)
    check_equal(load_by_reader({"a": torch.zeros(3)}, tmp_path / "c")["a"], torch.ones(3), "a")


def test_a_path_that_would_make_a_giant_list_is_refused(tmp_path: Path) -> None:
    """Indices in the stored paths are those of lists that were saved: others would fill the memory."""
    dcp.save({"a": [torch.ones(3)]}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    _edit(tmp_path / "c", lambda metadata: metadata.planner_data.update({"a.0": ("a", 1 << 40)}))
    with pytest.raises(CorruptCheckpointError, match="cannot be at"):
        CheckpointStorageReader(tmp_path / "c").read_metadata()


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    """A missing directory, one without metadata, and another backend's are errors of their own."""
    with pytest.raises(NotACheckpointError):
        CheckpointStorageReader(tmp_path / "c").read_metadata()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.distcp").write_bytes(b"x")
    with pytest.raises(IncompleteCheckpointError):
        CheckpointStorageReader(tmp_path / "c").read_metadata()
    marker = '{"sharded_backend":"other","sharded_backend_version":1}'
    (tmp_path / "c" / "metadata.json").write_text(marker)
    with pytest.raises(StrategyMismatchError, match="other"):
        CheckpointStorageReader(tmp_path / "c").read_metadata()
    assert CheckpointStorageReader.validate_checkpoint_id(tmp_path / "c")
    assert not CheckpointStorageReader.validate_checkpoint_id(tmp_path / "d")


# What would run code.


class _Raw(DefaultSavePlanner):
    """Stores objects as bare pickles."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(pickle.dumps(self.lookup_object(write_item.index), protocol=2))
        return super().resolve_data(write_item)


@table("planner", [None, _Raw], ids=["archive", "bare"])
def test_an_object_that_runs_code_is_refused(tmp_path: Path, planner: Any) -> None:
    """Stock dcp.load runs what a stored object says; with our reader the planner never gets such bytes."""
    dcp.save({"x": Trap()}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), planner=planner and planner())
    failure = _failure(lambda: load_by_reader({"x": None}, tmp_path / "c"))
    assert isinstance(failure, UnsafePickleError)
    assert "'x'" in str(failure)
    assert ran == []


def test_a_pickle_before_an_archive_is_refused(tmp_path: Path) -> None:
    """Bytes that are a pickle at their front and an archive at their end are what torch.load would run: refused."""
    dcp.save({"x": 1}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    archive = (tmp_path / "c" / data_file(0)).read_bytes()
    front = pickle.dumps(Trap(), protocol=2)
    (tmp_path / "c" / data_file(0)).write_bytes(front + archive)

    def longer(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(info, length=len(front) + len(archive))

    _edit(tmp_path / "c", longer)
    failure = _failure(lambda: load_by_reader({"x": None}, tmp_path / "c"))
    assert isinstance(failure, UnsafePickleError)
    assert ran == []
