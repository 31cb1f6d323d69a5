"""One conversion: reading a source, writing it as it goes, and the proof."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt import __version__, settings
from shardckpt.distributed.comm import Comm
from shardckpt.engine.integrity import find_incomplete_files, is_damage
from shardckpt.engine.operation import Operation
from shardckpt.engine.patterns import is_below
from shardckpt.engine.saving import refuse_objects
from shardckpt.engine.space import NO_FORECAST, Forecast, count_stored_bytes
from shardckpt.engine.tensor_sums import TensorSums
from shardckpt.engine.transaction import CheckpointHeader, Transaction
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    format_many,
    listed,
    prefix_error,
)
from shardckpt.huggingface.load_strategy import HuggingFaceLoadStrategy
from shardckpt.huggingface.planning import plan_export, plan_tensors
from shardckpt.huggingface.store_export import find_export
from shardckpt.huggingface.structure import forget_structure, make_state_dict, nest_stored, plain_name
from shardckpt.huggingface.torch_save import TorchFile
from shardckpt.maintenance.content import note_rescue
from shardckpt.maintenance.proof import StagedProof, SummedCheckpoint, TensorProof, list_fingerprints
from shardckpt.maintenance.sources import Reading, warn_of_unread_files
from shardckpt.maintenance.tensor_boxes import DeferredBoxes, cut_tensors
from shardckpt.manifest.names import CONTENT
from shardckpt.mapping.sharded_object import PlainObject, ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.plugins.key_mapping import Identity
from shardckpt.state_dict import list_dcp_values
from shardckpt.storage.abilities import has_local_files
from shardckpt.storage.digest import digest_vote
from shardckpt.storage.journal import Journal, can_resume
from shardckpt.strategy import SaveContext, SaveStrategy
from shardckpt.validation.completeness import GivenShards
from shardckpt.validation.keys import stored_key
from shardckpt.validation.sharding import describe_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.huggingface.hub_tensor import HubTensor
    from shardckpt.huggingface.options import ExportOptions
    from shardckpt.huggingface.rules import RuleMapping
    from shardckpt.mapping.base import ShardedBase, StateDict
    from shardckpt.plugins.manager import PluginManager
    from shardckpt.storage.writer import CheckpointWriter

    #: Opens the source at a location: :func:`shardckpt.maintenance.sources.open_source`, or the merge of several.
    SourceOpener = Callable[[Path, PluginManager, Reading], AbstractContextManager[OpenCheckpoint]]

logger = logging.getLogger(__name__)

#: Bytes of a data file on a store: a process that continues sends the last one again.
OBJECT_BYTES = 1 << 30
#: Targets that are no backends: a Hugging Face folder, a file of torch.save, a folder for stock DCP.
FOLDER: str = "hf"
FILE: str = "torch"
DCP: str = "dcp"


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion, and the proof that it has the values of the source.

    Attributes:
        old: Backend and version of the source; ``("huggingface", 1)`` for a folder or file of safetensors, and
            ``("torch_save", 1)`` for a file of ``torch.save``.
        new: Backend and version of the target, in the same words.
        tensors: Number of tensors that were written.
        objects: Number of objects that were written, without PlainObject shards, which are for other libraries.
        nbytes: Bytes of the tensors' values.
        proof: The fingerprints of each tensor, before and after.
        left_out: Items of the source that the target lacks: keys of tensors, of objects, of the common state, and of
            :class:`~shardckpt.mapping.PlainObject` shards, which are for other libraries; these are the last.
        rewritten: Places of values that a file of ``torch.save`` has as builtin types, with the class that they had.
        resumed: Bytes that an earlier conversion had written before it was killed; these were not written again.
        plain_objects: How many of ``left_out``, the last, are PlainObject shards: values that only other libraries look
            for under these keys.
        unmatched: Keys of tensors that match no rule of the mapping, and have kept their names.
        assets: Paths of the files that were copied with the weights, into a Hugging Face folder.
        damaged: Names of tensors and objects of the source that could not be read, and so were not written; of its
            common state ``"common state"``.
    """

    old: tuple[str, int]
    new: tuple[str, int]
    tensors: int
    objects: int
    nbytes: int
    proof: tuple[TensorProof, ...]
    left_out: tuple[str, ...]
    rewritten: dict[str, str]
    resumed: int = 0
    plain_objects: int = 0
    unmatched: tuple[str, ...] = ()
    assets: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


class _Written(NamedTuple):
    """The items that a conversion has written, and the keys that it has left out; see :class:`ConversionReport`."""

    tensors: Sequence[HubTensor]
    objects: int
    left_out: Collection[str]
    plain_objects: Collection[str]
    rewritten: dict[str, str]
    unmatched: Sequence[str]


@dataclass(frozen=True)
class Conversion:
    """One attempt; the arguments are as for :func:`convert_checkpoint`. Without a saver, ``kind`` says the target."""

    source: Path
    target: Path
    kind: str
    saver: SaveStrategy | None
    plugins: PluginManager
    memory: int
    options: ExportOptions
    allow_globals: tuple[Any, ...]
    overwrite: bool
    is_resumable: bool
    opener: SourceOpener
    #: Returns an identity of the values of the open source; ``""`` if it has none.
    identify: Callable[[OpenCheckpoint], str]
    #: Bytes that reading, and writing, may hold besides the tensors; None: as many as are fast.
    buffers: tuple[int | None, int | None]
    #: Prefixes of the source's keys, each with the prefix that replaces it.
    rename: dict[str, str]
    #: Maps a trainer's names to the Hub's, where Hugging Face folders are read by the trainer's.
    trainer: RuleMapping | None
    #: Whether ``source`` is one of several.
    is_merge: bool
    #: Whether unreadable items are left out.
    skip_damaged: bool
    #: The journals of the written files, once they are known.
    journals: list[Journal] = field(default_factory=list)

    def run(self) -> ConversionReport:
        """Convert, commit, and prove; once more, from the beginning, if the leftovers of a killed run do not fit."""
        try:
            return self._run()
        except CheckpointingException as exc:
            if not any(journal.has_diverged for journal in self.journals):
                raise
            logger.warning("converting %s starts anew: %s", self.source, exc)
        self.journals.clear()
        return self._run()

    def _run(self) -> ConversionReport:
        operation = Operation("convert", self.target, Comm(alone=True), self.plugins)
        with operation.collective_span():
            before = TensorSums(is_logged=self.is_resumable)
            # the proof checks that the source has not changed: after the commit it may
            how = Reading(
                self.allow_globals,
                memory_budget=self.buffers[0],
                check=False,
                rename=self.rename,
                trainer=self.trainer,
                dtype=self.options.casts.dtype,
                skip_damaged=self.skip_damaged,
            )
            with self.opener(self.source, self.plugins, how) as opened:
                self._check(opened)
                warn_of_unread_files(self.source, opened)
                if self.saver is not None:
                    operation.set_strategy(self.saver)
                stored = SummedCheckpoint(
                    *(opened.strategy, opened.context, opened.operation, before),
                    names=opened.names,
                    damaged=opened.damaged,
                )
                index = stored.index()
                # counts the bytes read from source and target: the operation's writer would count them once more
                reads = Operation("convert", self.target, Comm(alone=True), self.plugins)
                reads.start_progress(lambda: 2 * count_stored_bytes(index))
                reads.share_progress(opened.operation)
                # a file has the tensors of the common state and of objects in the same dict
                proof = StagedProof(
                    stored, reads, self.target, self._box_bytes(), has_others=self.kind == FILE, buffers=self.buffers[0]
                )
                written = self._write(operation, proof)
                manifest = opened.context.reader.manifest
            operation.set_nbytes(sum(tensor.nbytes for tensor in written.tensors))
            return ConversionReport(
                old=(manifest.backend, manifest.version),
                new=proof.made,
                tensors=len(written.tensors),
                objects=written.objects,
                nbytes=sum(tensor.nbytes for tensor in written.tensors),
                proof=proof.tensors,
                left_out=(*written.left_out, *written.plain_objects),
                rewritten=written.rewritten,
                resumed=sum(journal.nbytes for journal in self.journals),
                plain_objects=len(written.plain_objects),
                unmatched=tuple(written.unmatched),
                assets=tuple(map(str, self.options.assets)),
                damaged=(*stored.damaged, *(written.plain_objects if self._writes_plain_objects else ())),
            )

    @property
    def _writes_plain_objects(self) -> bool:
        return self.saver is not None and self.saver.stores_plain_objects and not self.options.prefix

    def _make_journal(self, stored: SummedCheckpoint, written: object) -> Journal | None:
        """Return the journal of the written files; None if no other process could go on with it."""
        if not (self.is_resumable and can_resume(self.target)):
            return None
        source, options = self.identify(stored), self.options
        if not source:
            return None
        saver = None if self.saver is None else (self.saver.backend, self.saver.version, self._box_bytes())
        names = sorted(self.rename.items()), options.prefix, sorted(stored.damaged)
        identity = _make_identity(source, self.kind, saver, names, options.casts, sorted(options.leave_out), written)
        self.journals.append(Journal(identity, stored.sums.drain_log))
        return self.journals[-1]

    def _prove(self, proof: StagedProof, tensors: Sequence[HubTensor], staging: Path, files: Path) -> None:
        """Prove the staged files, before they are committed: they have the values of one save of each source."""
        self._restore_sums(proof.stored.sums)
        proof.stored.context.reader.check_unchanged()
        try:
            proof.make(tensors, staging, files)
        except CorruptCheckpointError:
            # the leftovers of a killed run may be at fault: a file of tensors has no digests that would show it
            for journal in self.journals:
                journal.has_diverged |= journal.nbytes > 0
            raise

    def _restore_sums(self, before: TensorSums) -> None:
        """Add the sums of a killed conversion."""
        for journal in self.journals:
            for log in journal.collected:
                before.restore(log)

    @property
    def _is_changed(self) -> bool:
        """Whether names, shapes, dtypes or the set of tensors are to change."""
        options = self.options
        return bool(options.prefix or options.casts or options.leave_out) or not isinstance(options.mapping, Identity)

    def _check(self, opened: OpenCheckpoint) -> None:
        """Refuse a target that would be a copy of the source, unless one is on a store: a copy with a proof then."""
        reader = opened.context.reader
        if self.saver is None or not (has_local_files(self.source) and has_local_files(self.target)):
            return
        # another library's checkpoint of the same name may be of another dialect, and gets digests
        own = self.saver.backend, self.saver.version
        manifest = reader.manifest
        if self.rename or self.is_merge or self.skip_damaged:
            return  # no copy
        if (manifest.backend, manifest.version) != own or manifest.record is None or self._is_changed:
            return
        if bad := find_incomplete_files(None, reader):  # readable items are written anew; a copy would be damaged, too
            faults = listed([f"{file.name} {file.fault}" for file in bad])
            logger.warning("%s is damaged: %s: the items of other files are written anew", self.source, faults)
            return
        stock = ", which stock dcp.load reads" if self.kind == DCP else ""
        raise CheckpointingException(
            f"{self.source} is a {own[0]!r} checkpoint of version {own[1]} already{stock}: copy its directory, or name "
            "another backend or version; to and from URLs convert copies. All its files are there; if `shardckpt "
            f"verify {self.source}` finds it damaged, --skip-damaged writes the readable items"
        )

    def _write(self, operation: Operation, proof: StagedProof) -> _Written:
        if self.kind == FOLDER:
            return self._write_folder(operation, proof)
        stored = proof.stored
        index = stored.index()
        objects, common = self._read_values(stored)
        if self.saver is not None:
            common = note_rescue(common, stored.rescue.add(stored.damaged))
        # the names of values are no tensors'
        others = {*map(plain_name, index), *stored.common()}
        keys = [shard.key for shard in index if isinstance(shard, ShardedTensor)]
        left = {key for key in keys if is_below(key, self.options.leave_out)}
        # a name that nothing has is an error of the plan
        unknown = {
            name for name in self.options.leave_out - others - left if not any(is_below(key, {name}) for key in left)
        }
        options = self.options._replace(leave_out=frozenset(left | unknown))
        found = plan_tensors([s for s in index if isinstance(s, ShardedTensor)], options, others)
        planned, unmatched = found.tensors, found.unmatched
        tensors = list(planned.values())
        is_mapped = isinstance(stored.strategy, HuggingFaceLoadStrategy) and not isinstance(options.mapping, Identity)
        if is_mapped and all(tensor.name == part.key for tensor in tensors for part in tensor.parts):
            logger.warning("the mapping changes no name of a Hugging Face folder; 'megatron' gives Megatron's")
        if self.options.prefix and not tensors:
            without = f"{self.source}: no tensor that would be written"
            raise prefix_error(without, self.options.prefix, map(stored_key, index))
        kept = {part.key for tensor in tensors for part in tensor.parts} | {shard.unique_key for shard in objects}
        left_out = [stored_key(shard) for shard in index if stored_key(shard) not in kept]
        left_out += [key for key in stored.common() if key not in common]
        plain_objects = self._list_plain_objects(stored, objects)
        if self.saver is None:
            rewritten = self._write_file(operation, proof, planned, objects, common)
            if CONTENT in forget_structure(common):  # a file has no place for it
                left_out.append(CONTENT)
        else:
            rewritten = {}
            if not self.saver.supports_objects:
                refuse_objects(objects, self.saver, self.plugins)
            self._write_checkpoint(operation, proof, self.saver, tensors, objects, common)
        self._warn_of_plain_objects(plain_objects)  # when it is written: the target may be refused
        many = sum(not isinstance(shard, PlainObject) for shard in objects)
        return _Written(tensors, many, left_out, plain_objects, rewritten, unmatched)

    def _read_values(self, stored: OpenCheckpoint) -> tuple[list[ShardedObject], StateDict]:
        """Return the objects with their values, those for stock DCP among them, and the common state."""
        if self.options.prefix:
            return [], {}
        described = [shard for shard in stored.index() if isinstance(shard, ShardedObject)]
        values = stored.values([*described])
        objects = [replace(shard, data=value) for shard, value in zip(described, values, strict=True)]
        leave_out = self.options.leave_out
        objects = [shard for shard in objects if not is_below(plain_name(shard), leave_out)]
        common = {key: value for key, value in stored.common().items() if key not in leave_out}
        if self._is_changed or stored.names or stored.damaged:
            common = forget_structure(common)
        if self._writes_plain_objects:
            plain = self._read_plain_objects(stored)
            objects += [shard for shard in plain or () if not is_below(shard.key, leave_out)]
            if self.kind == DCP or plain is None:
                objects += self._describe_common(stored, objects, common)
        return objects, common

    def _read_plain_objects(self, stored: OpenCheckpoint) -> list[PlainObject] | None:
        """Return the objects for stock DCP with their values; None if some are damaged, and damage is to be skipped."""
        with stored.operation.local_phase("reading plain objects"):
            try:
                return stored.read_plain_objects()
            except CheckpointingException as exc:
                if not (self.skip_damaged and is_damage(exc)):
                    raise
                logger.warning(
                    "of objects for readers of other libraries, only those in the common state are written: %s", exc
                )
                return None

    def _describe_common(
        self, stored: OpenCheckpoint, objects: Sequence[ShardedObject], common: StateDict
    ) -> list[PlainObject]:
        """Return the common state by its paths, where stock DCP looks for it; keys that are taken are left out."""
        own = [key for shard in objects for key in ((getattr(shard, "keys", None) or ()), (shard.key,))]
        taken = {key for keys in own for key in keys} | {shard.key for shard in stored.index()}
        values = {key: value for key, value in common.items() if key != CONTENT}
        return [PlainObject(key, value) for key, value in list_dcp_values(values) if key not in taken]

    def _write_checkpoint(
        self,
        operation: Operation,
        proof: StagedProof,
        saver: SaveStrategy,
        tensors: Sequence[HubTensor],
        objects: Sequence[ShardedObject],
        common: StateDict,
    ) -> None:
        stored = proof.stored
        reader = stored.context.reader
        scales = {}
        if not (self._is_changed or stored.damaged):  # else the tensor of the scales may have another name
            scales = {s.key: s.block_scales for s in stored.index() if isinstance(s, ShardedTensor)}
        most = self._box_bytes()
        shards: list[ShardedBase] = [
            *DeferredBoxes(stored, cut_tensors(tensors, most), most, scales).shards,
            *objects,
        ]
        # as the old one: a training that continues from the new one has the same history
        lineage = reader.manifest.lineage
        journal = self._make_journal(stored, tensors)

        def write(writer: CheckpointWriter, save_id: str) -> None:
            comm = operation.comm
            context = SaveContext(
                writer=writer,
                comm=comm,
                save_id=save_id,
                allow_globals=self.allow_globals,
                staging=writer.directory,
                lineage=lineage,
                is_streamed=writer.is_streamed,
                file_bytes=OBJECT_BYTES if journal is not None and writer.is_streamed else 0,
            )
            saver.save(shards, common, context)
            GivenShards(describe_shards(shards), saver).compare(writer.shards, comm)
            # all values were read, here or before a kill: the fingerprints cost nothing more
            self._restore_sums(stored.sums)
            writer.known_fingerprints.update(list_fingerprints(tensors, stored.sums))

        header = CheckpointHeader(saver.backend, saver.version, saver.reader, lineage)
        Transaction(
            operation,
            self.target,
            header,
            overwrite=self.overwrite,
            journal=journal,
            check=partial(self._prove, proof, tensors),
            forecast=Forecast(sum(tensor.nbytes for tensor in tensors)) if saver.stores_all_bytes else NO_FORECAST,
            memory_budget=self.buffers[1],
        ).run(write, common.get(CONTENT))

    def _write_folder(self, operation: Operation, proof: StagedProof) -> _Written:
        stored = proof.stored
        plan = plan_export(stored.index(), self.options, str(self.source))
        journal = self._make_journal(stored, plan.files)
        tensors = plan.tensors
        find_export(self.target)(
            operation,
            None if self.is_merge else self.source,
            self.target,
            plan,
            self.options,
            stored,
            self.overwrite,
            journal,
            lambda staging: self._prove(proof, tensors, staging, staging),
            writing=self.buffers[1],
        ).run()
        kept = {part.key for tensor in tensors for part in tensor.parts}
        left_out = [stored_key(shard) for shard in stored.index() if stored_key(shard) not in kept]
        return _Written(
            tensors, 0, [*left_out, *stored.common()], self._list_plain_objects(stored, ()), {}, plan.planned.unmatched
        )

    def _write_file(
        self,
        operation: Operation,
        proof: StagedProof,
        tensors: dict[str, HubTensor],
        objects: Sequence[ShardedObject],
        common: StateDict,
    ) -> dict[str, str]:
        stored = proof.stored
        if self.target.is_dir() or (self.target.exists() and not self.overwrite):
            raise CheckpointingException(
                f"{self.target} exists: give the name of a new file"
                + ("" if self.target.is_dir() else ", or replace the file (overwrite=True, --overwrite)")
            )
        file = TorchFile(tensors)
        values = {plain_name(shard): shard.data for shard in objects}
        with operation.local_phase("writing"):
            values |= file.stand_ins
            # paths are stored for the names that are stored
            is_named_as_stored = isinstance(self.options.mapping, Identity) and not self.options.prefix
            state_dict = (
                nest_stored(stored, common, values)
                if is_named_as_stored
                else make_state_dict(common, values, self.source)
            )
            written = list(tensors.values())
            journal = self._make_journal(stored, written)
            file.write(
                self.target,
                state_dict,
                stored,
                journal,
                lambda staged: self._prove(proof, written, staged, staged),
            )
        return file.rewritten

    def _list_plain_objects(self, stored: OpenCheckpoint, written: Sequence[ShardedObject]) -> list[str]:
        """Return the keys of the PlainObjects that are not written, without those that are left out by name."""
        kept = {key for shard in written if isinstance(shard, PlainObject) for key in (shard.key, *(shard.keys or ()))}
        with stored.operation.local_phase("reading plain objects"):
            keys = stored.list_plain_objects()
        asked = self.options.leave_out if self._writes_plain_objects else ()
        return [key for key in keys if key not in kept and not is_below(key, asked)]

    def _warn_of_plain_objects(self, keys: Sequence[str]) -> None:
        if keys:
            logger.warning(
                "converting %s: %s leaves out %s for readers of other libraries alone: %s",
                self.source,
                self.saver.backend if self.saver is not None else self.kind,
                format_many(len(keys), "object"),
                listed(keys, limit=3),
            )

    def _box_bytes(self) -> int:
        """Return the most bytes of a box: the writer holds some at a time, one is being read, and one copied."""
        return self.memory // (settings.io_threads() + 3)


def _make_identity(*facts: object) -> str:
    """Return a digest of the source and the options, and of the releases and settings that the bytes depend on.

    Another conversion of the same identity writes the same bytes.
    """
    versions = __version__, torch.__version__, digest_vote(), settings.io_threads()
    return hashlib.sha256(repr((versions, facts)).encode()).hexdigest()
