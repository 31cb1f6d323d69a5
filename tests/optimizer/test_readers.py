"""Through whose reader optimizer state is loaded."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.fsdp import fully_shard
from torch.futures import Future

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, KeyMismatchError, UnsafePickleError
from shardckpt.optimizer_state import load_sharded_optimizer_state_dict
from shardckpt_torch_dist import CheckpointStorageReader
from tests.adapters.models import made_model
from tests.optimizer.loading import assert_same, train_steps
from tests.tables import table

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
except ImportError:  # torch before 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class _InMemory(StorageReader):
    """A reader of a store that no path leads to: whole tensors and bytes in a dict."""

    def __init__(self, metadata: Any, content: dict[str, Any]) -> None:
        self.metadata, self.content, self.calls = metadata, content, list[str]()

    def reset(self, checkpoint_id: Any = None) -> None:
        raise AssertionError("nobody has given another path")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("read_metadata")
        return self.metadata

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        assert metadata is self.metadata
        self.calls.append("set_up_storage_reader")

    def prepare_local_plan(self, plan: Any) -> Any:
        return replace(plan, storage_data="mine")

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return [replace(plan, storage_data=(plan.storage_data, rank)) for rank, plan in enumerate(plans)]

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        assert plan.storage_data == ("mine", dist.get_rank() if dist.is_initialized() else 0)
        self.calls.append("read_data")
        for item in plan.items:
            value = self.content[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(value))
                continue
            first = zip(item.storage_offsets, item.storage_index.offset, item.lengths, strict=True)
            part = value[tuple(slice(low + base, low + base + size) for low, base, size in first)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class _Subclass(CheckpointStorageReader):
    """Counts what it reads."""

    count = 0

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        self.count += len(plan.items)
        return super().read_data(plan, planner)


class _Archives(dcp.FileSystemReader):
    """A subclass of torch's own."""


def _in_memory(path: Path) -> _InMemory:
    """All of a checkpoint in memory."""
    reader = dcp.FileSystemReader(path)
    metadata = reader.read_metadata()
    content: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "size"):
            content[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    dcp.load(content, storage_reader=reader, no_dist=True)
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "size"):
            info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
            data = (path / info.relative_path).read_bytes()
            content[key] = data[info.offset : info.offset + info.length]
    return _InMemory(metadata, content)


def _saved(path: Path, options: StateDictOptions | None = None) -> tuple[Any, dict[str, Any]]:
    """A model, and what its optimizer had when torch saved both."""
    model = made_model(1, layers=2)
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": torch.tensor(0.003), "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    train_steps(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": get_model_state_dict(model), "optimizer": state}, checkpoint_id=path, no_dist=True)
    return model, get_optimizer_state_dict(model, optimizer)


@table("options", [None, FLAT], ids=["nested", "flattened"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_any_reader_of_torch_is_taken(tmp_path: Path, options: StateDictOptions | None) -> None:
    """Ours, its subclass, torch's, fsspec's and one over a dict: each gives what the path gives."""
    model, _ = _saved(tmp_path / "c", options)
    params = get_model_state_dict(model)
    expected = load_sharded_optimizer_state_dict(params, "optimizer", tmp_path / "c")
    assert expected["optimizer"]["state"].keys() == {n for n, param in model.named_parameters() if param.requires_grad}
    subclass, memory = _Subclass(tmp_path / "c"), _in_memory(tmp_path / "c")
    readers: list[StorageReader] = [
        CheckpointStorageReader(tmp_path / "c"),
        subclass,
        dcp.FileSystemReader(tmp_path / "c"),
        _Archives(tmp_path / "c"),
        FsspecReader(f"file://{tmp_path}/c"),
        memory,
    ]
    for reader in readers:
        found = load_sharded_optimizer_state_dict(params, optimizer_key="optimizer", storage_reader=reader)
        assert_same(found, expected)
    assert subclass.count
    assert memory.calls == ["read_metadata", *(["set_up_storage_reader", "read_data"] * 2)]


class _Setting:
    """An object of a class that no loader knows."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_our_readers_allow_list_counts(tmp_path: Path) -> None:
    """What our reader allows, a load through it allows, and a load through any other reader does not."""
    model, _ = _saved(tmp_path / "first")
    params = get_model_state_dict(model)
    state = {"state": {name: {"setting": _Setting()} for name in params}, "param_groups": []}
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "c", no_dist=True)
    ours = CheckpointStorageReader(tmp_path / "c", allow_globals=[_Setting])
    found = load_sharded_optimizer_state_dict(params, "optimizer", ours)["optimizer"]["state"]
    assert all(type(slots["setting"]) is _Setting for slots in found.values())
    for reader in (CheckpointStorageReader(tmp_path / "c"), _in_memory(tmp_path / "c")):
        with pytest.raises(UnsafePickleError, match="_Setting"):
            load_sharded_optimizer_state_dict(params, "optimizer", reader)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_a_reader_lacks_is_said(tmp_path: Path) -> None:
    """A key that is not there, a chunk that nobody stored, an item that is left out, the reader's own error."""
    model, _ = _saved(tmp_path / "c")
    params = get_model_state_dict(model)
    reader = _in_memory(tmp_path / "c")
    with pytest.raises(KeyMismatchError, match=r"no state of an optimizer 'optim'; its top-level names are model, opt"):
        load_sharded_optimizer_state_dict(params, "optim", reader)
    key = next(key for key in reader.content if key.endswith("exp_avg"))
    entry = reader.metadata.state_dict_metadata[key]
    reader.metadata.state_dict_metadata[key] = replace(entry, chunks=[])
    with pytest.raises(CorruptCheckpointError, match=rf"'{key}': the stored chunks do not have each element"):
        load_sharded_optimizer_state_dict(params, "optimizer", reader)
    reader.metadata.state_dict_metadata[key] = entry

    class Careless(_InMemory):
        def read_data(self, plan: Any, planner: Any) -> Future[None]:
            return super().read_data(replace(plan, items=plan.items[1:]), planner)

    with pytest.raises(CheckpointingException, match=r"Careless\.read_data has not read all of optimizer\."):
        load_sharded_optimizer_state_dict(params, "optimizer", Careless(reader.metadata, reader.content))
    del reader.content[key]
    with pytest.raises(CheckpointingException, match=f"KeyError: '{key}'"):
        load_sharded_optimizer_state_dict(params, "optimizer", reader)


def _sharded(path: Path) -> list[bool]:
    """State of FSDP2's parameters, through a reader over a dict and by the path."""
    model = made_model(1, layers=2)
    fully_shard(model)
    params = get_model_state_dict(model)
    by_path = load_sharded_optimizer_state_dict(params, "optimizer", path)["optimizer"]
    found = load_sharded_optimizer_state_dict(params, "optimizer", _in_memory(path))["optimizer"]
    assert found["param_groups"] == by_path["param_groups"]
    return [
        type(value) is type(by_path["state"][name][slot])
        and torch.equal(_local(value), _local(by_path["state"][name][slot]))
        for name, slots in found["state"].items()
        for slot, value in slots.items()
    ]


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_ranks_read_their_parts_through_any_reader(ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks each reader gets the plan of its rank, and each rank the state of its shards."""
    _saved(tmp_path / "c")
    for same in ranks.run(2, _sharded, tmp_path / "c"):
        assert same
        assert all(same)


def _of_another_save(path: Path) -> None:
    reader = _in_memory(path)
    if dist.get_rank():
        removed = next(key for key in reader.content if key.startswith("optimizer."))
        del reader.metadata.state_dict_metadata[removed]
    load_sharded_optimizer_state_dict(get_model_state_dict(made_model(1, layers=2)), "optimizer", reader)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_readers_of_different_saves_are_an_error(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks whose readers list other tensors get the same error."""
    _saved(tmp_path / "c")
    first, second = (outcome.message for outcome in ranks.outcomes(2, _of_another_save, tmp_path / "c"))
    assert first == second
    assert "ranks disagree on metadata" in first
