"""The write plan of a rank: its data files, with the objects and the tensors in each."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from shardckpt.chunks import ChunkWork, append_run, cut_runs
from shardckpt.errors import ShardingError
from shardckpt_safetensors.encoded_index import EncodedIndex
from shardckpt_safetensors.index_header import make_header
from shardckpt_safetensors.index_names import COMMON_FILE, INDEX_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shardckpt.storage import CheckpointWriter, FileWriter, PackedShards
    from shardckpt_safetensors.contiguous import ContiguousWork
    from shardckpt_safetensors.index_parts import EncodedPart


class Payload(NamedTuple):
    """An object as bytes, and the codec that made them."""

    codec: str
    data: bytes


class FilePlan(NamedTuple):
    """A file to write: a header, then objects, then tensors, each with padding behind it.

    Attributes:
        head: Its first bytes: the header.
        objects: Bytes of padding behind each object, by unique key.
        positions: The tensors, by their positions among the rank's, ascending.
        sizes: Bytes of each of these.
        tails: Bytes of padding behind each of these.
        nbytes: Bytes of the file.
    """

    name: str
    head: bytes
    objects: dict[str, int]
    positions: list[int]
    sizes: list[int]
    tails: list[int]
    nbytes: int


@dataclass(kw_only=True)
class WritePlan(ChunkWork[EncodedIndex, Payload]):
    """Everything that a rank writes.

    ``contiguous`` are the files with contiguous tensors, which come after the items' files; None if there are none.
    ``parts`` are the parts of the index that this rank writes, by file name.
    """

    # the contiguous tensors' part has the assets, which are read anew
    own_fields: ClassVar[frozenset[str]] = ChunkWork.own_fields | {"contiguous"}

    files: list[FilePlan]
    parts: dict[str, EncodedPart] = field(default_factory=dict)
    contiguous: ContiguousWork | None = None

    def list_stored(self) -> list[tuple[PackedShards, list[torch.Tensor], Mapping[str, str]]]:
        """Return the boxes that this rank stores, their values, and further keys of the tensors."""
        if self.contiguous is None:
            return super().list_stored()
        boxes = sum(len(file.positions) for file in self.files)
        views = boxes + self.contiguous.views.size
        contiguous: list[tuple[PackedShards, list[torch.Tensor], Mapping[str, str]]]
        contiguous = [(self.contiguous.views, self.tensors[boxes:views], self.contiguous.aliases)]
        if self.stored is not None:
            contiguous.append((self.stored, self.tensors[:boxes], self.aliases))
        return contiguous

    def write_files(self, writer: CheckpointWriter) -> None:
        """Write all files, each item at its planned position."""
        boxes = sum(len(file.positions) for file in self.files)
        shared = [] if self.contiguous is None else self.contiguous.begin(writer, self.tensors[boxes:])
        unfinished = self.write_data(writer, self.files, self._write_data_files)
        if self.global_files is not None:
            files = self.global_files
            index = files.index.to_bytes(make_header(files.save_id, files.lineage))
            # The index comes first: it is finished while the last tensors are still being written.
            unfinished[:0] = [writer.begin(INDEX_FILE, index, keys=0), writer.begin(COMMON_FILE, files.common)]
        for name, part in self.parts.items():
            into = writer.create(name, len(part.data))
            for piece in part.cut():
                into.append_small((piece,), keys=0, what="the index")
            unfinished.append(into)
        for into in unfinished:
            writer.finish(into)
        if self.contiguous is not None:
            self.contiguous.finish(writer, shared)
        written = sorted(position for file in self.files for position in file.positions)
        self.record_written(writer, written, [key for file in self.files for key in file.objects])

    def _write_data_files(self, writer: CheckpointWriter, files: Sequence[FilePlan]) -> list[FileWriter]:
        """Write data files concurrently; return them, for the caller to finish."""
        unfinished: list[FileWriter] = []
        runs: list[tuple[FilePlan, range, FileWriter]] = []
        for file in files:
            into = writer.create(file.name, file.nbytes)
            into.append_small((file.head,), keys=0, what="the header")
            for key, tail in file.objects.items():
                into.append_small((self.objects[key].data, bytes(tail)), what=key)
            unfinished.append(into)
            sizes = list(map(add, file.sizes, file.tails))
            runs += ((file, run, into) for run in cut_runs(sizes))
        # In the order of the tensors, which alternates between the files, so that all are written concurrently.
        for file, run, into in sorted(runs, key=lambda found: found[0].positions[found[1][0]]):
            self._append_run(file, run, into)
        return unfinished

    def _append_run(self, file: FilePlan, run: range, into: FileWriter) -> None:
        """Append tensors that follow each other in a file."""
        tensors = [self.tensors[file.positions[n]] for n in run]
        keys = [self.keys[file.positions[n]] for n in run]
        for key, tensor, n in zip(keys, tensors, run, strict=True):
            nbytes = tensor.numel() * tensor.dtype.itemsize
            if nbytes != file.sizes[n]:
                raise ShardingError(f"tensor {key!r} has {nbytes} bytes, and {file.sizes[n]} were planned for it")
        append_run(into, tensors, keys, [(b"", bytes(file.tails[n])) for n in run])
