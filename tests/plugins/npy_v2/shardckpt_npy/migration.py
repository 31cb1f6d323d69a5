"""From version 1 to 2: the same ``.npy`` files, and an index that names their dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.strategy import Migration
from shardckpt_npy.files import COMMON, INDEX, dtype_name, read_json, read_plain, write_json

if TYPE_CHECKING:
    from shardckpt.storage import CheckpointReader, CheckpointWriter


class AddDtypes(Migration):
    """Rewrites (npy, 1) as (npy, 2)."""

    backend = "npy"
    from_version = 1
    to_version = 2

    def migrate(self, reader: CheckpointReader, writer: CheckpointWriter) -> None:
        """Copy the data files, and add to every tensor's entry the dtype that its file says."""
        index = read_json(reader, INDEX)
        for entry in index:
            if "file" in entry:
                entry["dtype"] = dtype_name(read_plain(reader, entry["file"]).dtype)
                writer.write(entry["file"], reader.read(entry["file"]))
        write_json(writer, INDEX, index)
        writer.write(COMMON, reader.read(COMMON))
