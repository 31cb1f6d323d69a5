"""The files of a stored checkpoint that other tools open: their names of tensors, which a removal of keys keeps."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.errors import CorruptCheckpointError
from shardckpt.huggingface import encode_weights_index
from shardckpt.manifest import HUB_INDEX
from shardckpt.storage import HeaderEntry, encode_header, parse_head, parse_json, read_header
from shardckpt.tensors import PAGE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.storage import CheckpointReader

#: Where each tensor of a file begins, and its entry, ascending.
Entries: TypeAlias = "list[tuple[int, HeaderEntry]]"

#: Most commas in the header of a file: enough for a million tensors.
_MOST_COMMAS = 1 << 23


class StoredFolder:
    """The content of the files with contiguous tensors, under the names that other tools know."""

    def __init__(self, reader: CheckpointReader) -> None:
        record = reader.manifest.record
        self._entries: dict[str, Entries] = {}
        self._metadata: dict[str, dict[str, str]] = {}
        if record is None or HUB_INDEX not in {file.name for file in record.files}:
            return
        try:
            weight_map = parse_json(reader.read(HUB_INDEX))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise CorruptCheckpointError(f"{reader.directory / HUB_INDEX} is damaged: {exc!r:.200}") from exc
        for name in names:
            source, size = f"{reader.directory / name}", reader.size(name)
            self._metadata[name], entries = parse_head(read_header(reader, name), size, source, _MOST_COMMAS)
            # one without bytes is before the one that begins at its place
            self._entries[name] = [
                (entry.start, HeaderEntry(key, entry.kind, entry.shape, entry.stop - entry.start))
                for key, entry in sorted(entries.items(), key=lambda pair: (pair[1].start, pair[1].stop))
            ]

    @property
    def files(self) -> Collection[str]:
        """The names of the files."""
        return self._entries.keys()

    def select(self, file: str, kept: Entries, gone: Entries) -> Entries:
        """Return the entries of a file that stay, ascending, given our own of those that stay and of those that go.

        Several without bytes may be at one place, and equal: then the names of those that go say which stay.
        """
        places = {start if entry.nbytes else (start, entry.kind, entry.shape) for start, entry in kept}
        removed = [(start, f".{entry.name}") for start, entry in gone if not entry.nbytes]

        def stays(start: int, entry: HeaderEntry) -> bool:
            if entry.nbytes:
                return start in places
            is_named = any(start == at and name.endswith(f".{entry.name}") for at, name in removed)
            return not is_named and (start, entry.kind, entry.shape) in places

        return [pair for pair in self._entries[file] if stays(*pair)]

    def lay_out(self, file: str, kept: Entries) -> tuple[bytes, dict[int, int]]:
        """Return the head of a file with fewer tensors, and where those begin then, by where they begin now.

        Nothing is padded.
        """
        head = encode_header([entry for _, entry in kept], self._metadata[file], align=PAGE)
        ends = accumulate((entry.nbytes for _, entry in kept), initial=len(head))
        return head, {start: new for (start, _), new in zip(kept, ends, strict=False)}


def encode_index(kept: Mapping[str, Entries]) -> bytes:
    """Return the index of a folder of the kept entries of each file."""
    found = [(file, entry) for file, entries in kept.items() for _, entry in entries]
    return encode_weights_index({entry.name: file for file, entry in found}, sum(e.nbytes for _, e in found))
