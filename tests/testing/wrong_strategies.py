"""Strategies that are wrong, each in one way: changed versions of ``blocks``, and the contract for each.

pytest does not collect this file by itself: ``test_mutations.py`` names it, and each class must fail the test that its
docstring and the table of ``shardckpt/testing/README.md`` name.
"""

# ruff: noqa: D102 - the docstring of a class says what is wrong with it
from __future__ import annotations

import dataclasses
import json
import os
import pickle
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Box
from shardckpt.strategy import PreparedSave, SaveStrategy
from shardckpt.tensors import plain_cpu, tensor_bytes
from shardckpt.testing import StrategyContract
from shardckpt.testing.tensors import DTYPES
from tests.testing.blocks import (
    COMMON,
    INDEX,
    AddExtents,
    Entry,
    LoadBlocks,
    SaveBlocks,
    SaveBlocks1,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.storage import CheckpointReader, CheckpointWriter


class Contract(StrategyContract):
    """What the right version passes; a subclass puts a wrong part in."""

    save_strategy = SaveBlocks
    load_strategy = LoadBlocks
    supports_async = True
    supports_async_process = True
    supports_urls = True
    claims_safety = True
    previous_save_strategy = SaveBlocks1
    migration = AddExtents


class _DropsLast(Work):
    def write(self, writer: CheckpointWriter) -> list[Entry]:
        return super().write(writer)[: max(len(self.entries) - 1, 1)]


class SaveDropsLast(SaveBlocks):
    """Its index lacks the last item of a rank."""

    work = _DropsLast


class SaveDoublesAsFloats(SaveBlocks):
    """It stores float64 as float32."""

    def describe(self, shard: ShardedTensor, box: Box) -> Entry:
        entry = super().describe(shard, box)
        return entry.model_copy(update={"dtype": "float32"}) if entry.dtype == "float64" else entry

    class work(Work):  # noqa: N801, D106 - the attribute of the base
        def encode(self, tensor: torch.Tensor) -> memoryview:
            return super().encode(tensor.float() if tensor.dtype == torch.float64 else tensor)


class LoadReadsAll(LoadBlocks):
    """It reads every file, whatever is requested."""

    def load(self, wanted: Any, context: Any) -> list[Any]:
        for file in context.reader.manifest.record.files:
            context.reader.read(file.name)
        return super().load(wanted, context)


class SaveRaces(SaveStrategy):
    """The main rank writes the index from what other ranks have written so far, without waiting for them."""

    backend, version, reader = SaveBlocks.backend, SaveBlocks.version, SaveBlocks.reader

    def save(self, shards: Any, common: Any, context: Any) -> None:
        inner = SaveBlocks()
        work: Any = inner.prepare(shards, common, context).work
        entries = work.write(context.writer)
        name = f"part_{context.comm.rank}.json"
        context.writer.write(name, json.dumps([entry.model_dump() for entry in entries]).encode())
        if context.comm.is_main:
            parts = sorted(context.writer.directory.glob("part_*.json"))
            found = [Entry(**entry) for part in parts for entry in json.loads(part.read_text() or "[]")]
            inner.write_index(found, context.writer)


class LoadLeaksFiles(LoadBlocks):
    """It opens a file and never closes it."""

    _opened: ClassVar[list[int]] = []

    def read(self, reader: CheckpointReader, name: str) -> bytes:
        self._opened.append(os.open(reader.directory / name, os.O_RDONLY))
        return super().read(reader, name)


class _ForgetsFsync(Work):
    def write_common(self, writer: CheckpointWriter, data: bytes) -> None:
        real = os.fsync
        os.fsync = lambda _fd: None
        try:
            (writer.directory / COMMON).write_bytes(data)
            writer.adopt(COMMON)
        finally:
            os.fsync = real


class SaveForgetsFsync(SaveBlocks):
    """It records a file that was never made durable."""

    work = _ForgetsFsync


class SaveStoresReplicas(SaveBlocks):
    """It stores every replica, not the main one alone."""

    def is_mine(self, shard: Any, context: Any) -> bool:
        return True


class SaveMisreadsReplicaIds(SaveBlocks):
    """It takes a replica_id that begins with 0 for the main one."""

    def is_mine(self, shard: Any, context: Any) -> bool:
        replica = shard.replica_id
        return (replica if isinstance(replica, int) else replica[0]) == 0


class _IgnoresStrides(Work):
    def encode(self, tensor: torch.Tensor) -> memoryview:
        start = tensor.storage_offset() * tensor.itemsize
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return tensor_bytes(raw[start : start + tensor.nbytes].clone())


class SaveIgnoresStrides(SaveBlocks):
    """It writes memory as it lies there, not in the order of the elements."""

    work = _IgnoresStrides


class SaveScalarsAsVectors(SaveBlocks):
    """It stores a scalar as a vector of one element."""

    def describe(self, shard: ShardedTensor, box: Box) -> Entry:
        entry = super().describe(shard, box)
        return entry if entry.shape else entry.model_copy(update={"shape": (1,), "offset": (0,), "extent": (1,)})


class SaveForgetsEmpty(SaveBlocks):
    """Its index has no tensors without elements."""

    def write_index(self, entries: list[Entry], writer: CheckpointWriter) -> None:
        super().write_index([entry for entry in entries if entry.nbytes or not entry.dtype], writer)


class SaveLowersKeys(SaveBlocks):
    """It stores keys in lower case."""

    def describe(self, shard: ShardedTensor, box: Box) -> Entry:
        entry = super().describe(shard, box)
        return entry.model_copy(update={"key": entry.key.lower()})


class SavePickles(SaveBlocks):
    """It pickles the common state as it is."""

    def encode_common(self, common: Any, context: Any) -> bytes:
        return pickle.dumps(common)


class LoadPickles(LoadBlocks):
    """It unpickles the common state without an allow-list."""

    def load_common(self, context: Any) -> Any:
        return pickle.loads(context.reader.read(COMMON))


class LoadPastTheReader(LoadBlocks):
    """It opens files by itself, so that no digest is checked."""

    def read_range(self, reader: CheckpointReader, entry: Entry) -> bytearray:
        with (reader.directory / entry.file).open("rb") as file:
            file.seek(entry.start)
            return bytearray(file.read(entry.nbytes))


class LoadFollowsNames(LoadPastTheReader):
    """It opens whatever file the index names, anywhere."""


class LoadResolvesNames(LoadPastTheReader):
    """It opens whatever file the index names, by a path from which ``..`` is resolved."""

    def read_range(self, reader: CheckpointReader, entry: Entry) -> bytearray:
        with (reader.directory / entry.file).resolve().open("rb") as file:
            file.seek(entry.start)
            return bytearray(file.read(entry.nbytes))


class _HoldsTensors(Work):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.own = self.tensors
        self.tensors, self.keys = [], []

    def data(self) -> list[memoryview]:
        time.sleep(0.5)  # as a slow disk makes it: the training has gone on by then
        return [*(self.encode(tensor) for tensor in self.own), *map(memoryview, self.objects)]


class SaveHoldsTensors(SaveBlocks):
    """Its work reads the caller's tensors when it writes, not the copies in ``work.tensors``."""

    work = _HoldsTensors


class SaveReusesObjects(SaveBlocks):
    """By a cached plan it stores the objects and the common state of the first save again."""

    caches_plan = True

    def prepare(self, shards: Any, common: Any, context: Any) -> PreparedSave:
        prepared = super().prepare(shards, common, context)
        work: Any = prepared.work
        return dataclasses.replace(prepared, plan=(work.objects, work.common))

    def replan(self, plan: Any, shards: Any, common: Any, context: Any) -> PreparedSave:
        prepared = super().prepare(shards, common, context)
        objects, state = plan
        return dataclasses.replace(prepared, work=dataclasses.replace(prepared.work, objects=objects, common=state))  # type: ignore[type-var]


class SaveWaitsForAll(SaveBlocks):
    """It waits for every rank of the job, not for those that save."""

    def make_work(self, mine: Any, common: Any, context: Any) -> Work:
        if dist.is_initialized():
            dist.barrier()
        return super().make_work(mine, common, context)


class _SpoilsTensors(Work):
    def encode(self, tensor: torch.Tensor) -> memoryview:
        data = tensor_bytes(plain_cpu(tensor).clone()).cast("B")
        tensor.zero_()
        return data


class SaveSpoilsTensors(SaveBlocks):
    """It uses the caller's tensors as scratch memory."""

    work = _SpoilsTensors


class _LeavesFiles(Work):
    def write_common(self, writer: CheckpointWriter, data: bytes) -> None:
        Path(tempfile.mkstemp()[1]).write_bytes(data)
        super().write_common(writer, data)


class SaveLeavesFiles(SaveBlocks):
    """It leaves a temporary file."""

    work = _LeavesFiles


class LoadAnything(LoadBlocks):
    """It says that it reads every version of every backend."""

    def cannot_load(self, manifest: Any) -> str | None:
        return None


class LoadForgetsOffsets(LoadBlocks):
    """It takes the first layer of a prepended axis for each."""

    def fill(self, shard: ShardedTensor, target: Any, wanted: Box, entries: Any, context: Any) -> None:
        lead = shard.prepend_axis_num
        moved = Box((0,) * lead + wanted.offset[lead:], wanted.shape)
        super().fill(shard, target, moved, entries, context)


class SaveIndexOfMain(SaveBlocks):
    """Its index has what the main rank wrote."""

    def finish(self, results: Any, context: Any) -> None:
        super().finish(results[:1], context)


class LoadCachesIndex(LoadBlocks):
    """It keeps the index of a path, whatever is saved there since."""

    _known: ClassVar[dict[str, list[Entry]]] = {}

    def read_index(self, reader: CheckpointReader) -> list[Entry]:
        name = str(reader.directory)
        return self._known.setdefault(name, self._known.get(name) or super().read_index(reader))


class LoadTrustsIndex(LoadBlocks):
    """It takes an index as it is."""

    def parse_index(self, reader: CheckpointReader) -> list[Entry]:
        return [Entry.model_construct(**entry) for entry in json.loads(self.read(reader, INDEX))]


class LoadReplacesDestinations(LoadBlocks):
    """It puts new memory into the caller's shards."""

    def load(self, wanted: Sequence[Any], context: Any) -> list[Any]:
        for shard in wanted:
            if isinstance(shard, ShardedTensor) and shard.data is not None:
                shard.data = torch.zeros_like(shard.data)
        return super().load(wanted, context)


class LoadFailsLate(LoadBlocks):
    """It catches the reader's errors, and gives zeros."""

    def read_range(self, reader: CheckpointReader, entry: Entry) -> bytearray:
        try:
            return super().read_range(reader, entry)
        except Exception:  # noqa: BLE001 - that is what is wrong
            return bytearray(entry.nbytes)


class DropObjects(AddExtents):
    """A migration that loses the objects."""

    def migrate(self, reader: CheckpointReader, writer: CheckpointWriter) -> None:
        record = reader.manifest.record
        for file in record.files if record else ():
            data = reader.read(file.name)
            if file.name == INDEX:
                entries = [entry for entry in json.loads(data) if entry["dtype"]]
                data = json.dumps([{"extent" if n == "size" else n: v for n, v in e.items()} for e in entries]).encode()
            writer.write(file.name, data)


class SaveUnpicklable(SaveBlocks):
    """Its work cannot go to another process."""

    class work(Work):  # noqa: N801, D106 - the attribute of the base
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.late = lambda: self.entries


class SaveCutsLarge(SaveBlocks):
    """It stores the first 8 MiB of a tensor, and zeros for the rest."""

    class work(Work):  # noqa: N801, D106 - the attribute of the base
        def encode(self, tensor: torch.Tensor) -> memoryview:
            data = tensor_bytes(plain_cpu(tensor).clone()).cast("B")
            data[8 << 20 :] = bytes(max(len(data) - (8 << 20), 0))
            return data


class LoadComparesIndexes(LoadBlocks):
    """It takes two saves for one if their indexes are equal, though the values differ."""

    def identify(self, reader: CheckpointReader) -> bytes:
        return reader.read(INDEX)


class LoadNeverCompares(LoadBlocks):
    """It does not ask whether the ranks have read one save."""

    def load(self, wanted: Any, context: Any) -> list[Any]:
        index = self.read_index(context.reader)
        return [self.value(shard, index, context) for shard in wanted]


class SaveDeniesObjects(SaveBlocks):
    """It says that it stores no objects, which the contract claims."""

    supports_objects = False


#: For each wrong strategy: what it does, the save or load strategy or migration, and the test that catches it.
WRONG: dict[str, tuple[type[Any], str]] = {
    "loses the last item of a rank from its index": (SaveDropsLast, "test_many_tensors"),
    "stores float64 as float32": (SaveDoublesAsFloats, f"test_dtype[dtype{DTYPES.index(torch.float64)}]"),
    "reads every file at each load": (LoadReadsAll, "test_bytes_read_for_a_key"),
    "writes the index without waiting for the other ranks": (SaveRaces, "test_a_slow_rank[1]"),
    "leaves files open": (LoadLeaksFiles, "test_nothing_stays_open"),
    "forgets an fsync": (SaveForgetsFsync, "test_every_file_is_synced"),
    "stores every replica": (SaveStoresReplicas, "test_bytes_on_disk"),
    "takes a replica id that begins with 0 for the main one": (
        SaveMisreadsReplicaIds,
        "test_the_main_replica_is_stored",
    ),
    "writes memory in the order in which it lies there": (SaveIgnoresStrides, "test_memory_layout[transposed]"),
    "stores scalars as vectors": (SaveScalarsAsVectors, "test_shape[shape0]"),
    "forgets tensors without elements": (SaveForgetsEmpty, "test_shape[shape2]"),
    "takes keys that differ in case for one": (SaveLowersKeys, "test_key[case]"),
    "unpickles without an allow-list": (LoadPickles, "test_a_pickle_runs_nothing[common state]"),
    "opens files past the reader": (LoadPastTheReader, "test_a_flipped_bit"),
    "opens files that the index names outside of the directory": (LoadFollowsNames, "test_hostile_names"),
    "resolves such names to paths before it opens them": (LoadResolvesNames, "test_hostile_names"),
    "reads the caller's tensors behind the training": (SaveHoldsTensors, "test_background_save[thread-1-1]"),
    "stores old objects and common state by a cached plan": (SaveReusesObjects, "test_plans_are_used_again"),
    "waits for ranks that do not save": (SaveWaitsForAll, "test_a_subgroup"),
    "changes the caller's tensors": (SaveSpoilsTensors, "test_the_callers_state_stays"),
    "leaves temporary files": (SaveLeavesFiles, "test_nothing_is_left_elsewhere"),
    "says that it reads every version": (LoadAnything, "test_it_says_what_it_reads"),
    "forgets the offset along a prepended axis": (LoadForgetsOffsets, "test_prepended_axes"),
    "lists what the main rank wrote": (SaveIndexOfMain, "test_the_index_of_all_ranks"),
    "keeps the index of a path that was saved to again": (LoadCachesIndex, "test_an_overwrite_replaces_everything"),
    "trusts the numbers of an index": (LoadTrustsIndex, "test_hostile_numbers"),
    "loads into other memory than the caller's": (LoadReplacesDestinations, "test_destination[window]"),
    "takes damage for zeros": (LoadFailsLate, "test_a_flipped_bit"),
    "loses the objects in a migration": (DropObjects, "test_a_migration"),
    "has work that cannot be pickled": (SaveUnpicklable, "test_the_work_can_be_pickled"),
    "cuts large tensors": (SaveCutsLarge, "test_a_large_tensor"),
    "takes two saves with equal indexes for one": (LoadComparesIndexes, "test_saves_are_told_apart"),
    "never compares the saves that the ranks read": (LoadNeverCompares, "test_saves_are_told_apart"),
    "denies objects that the contract claims": (SaveDeniesObjects, "test_objects_are_stored_or_refused"),
}


def _contract(part: type[Any]) -> type[Contract]:
    """The contract with the wrong part in the place of the right one."""
    attribute = (
        "save_strategy"
        if issubclass(part, SaveStrategy)
        else "migration"
        if issubclass(part, AddExtents)
        else "load_strategy"
    )
    parts = {attribute: part, "__module__": __name__}
    if part is LoadPickles:
        parts["save_strategy"] = SavePickles
    return type(f"Test{part.__name__}", (Contract,), parts)


class TestRight(Contract):
    """The right version, which passes the same tests."""


for _part, _ in WRONG.values():
    globals()[f"Test{_part.__name__}"] = _contract(_part)
