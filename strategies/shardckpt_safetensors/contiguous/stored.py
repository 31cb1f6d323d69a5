"""The files of a stored checkpoint that other tools open: their names of tensors, which a removal of keys keeps."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError
from shardckpt.huggingface import encode_weights_index
from shardckpt.manifest import HUB_INDEX
from shardckpt.storage import HeaderEntry, encode_header, parse_head, parse_json, read_header
from shardckpt.tensors import PAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.storage import CheckpointReader

#: Most commas in the header of a file: enough for a million tensors.
_MOST_COMMAS = 1 << 23


class StoredFolder:
    """The content of the files with contiguous tensors, under the names that other tools know.

    ``files`` has, for each of the files, the entry that begins at each offset.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        record = reader.manifest.record
        self.files: dict[str, dict[int, HeaderEntry]] = {}
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
            self.files[name] = {
                entry.start: HeaderEntry(key, entry.kind, entry.shape, entry.stop - entry.start)
                for key, entry in entries.items()
                if entry.start < entry.stop
            }

    def lay_out(self, name: str, kept: Sequence[int]) -> tuple[bytes, list[int]]:
        """Return the head of a file with fewer tensors, and where each begins then, in bytes: nothing is padded.

        ``kept`` says where the payloads that stay begin now, ascending.
        """
        entries = [self.files[name][start] for start in kept]
        head = encode_header(entries, self._metadata[name], align=PAGE)
        return head, list(accumulate((entry.nbytes for entry in entries), initial=len(head)))[:-1]

    def renew(self, kept: Mapping[str, Sequence[int]]) -> bytes:
        """Return the folder's index of the kept payloads; ``kept`` has their new starts, by file."""
        found = [(name, self.files[name][start]) for name in self.files for start in kept.get(name, ())]
        return encode_weights_index({entry.name: name for name, entry in found}, sum(e.nbytes for _, e in found))
