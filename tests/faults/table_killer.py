"""Program: kill a save whose tables of digests are in files of their own at every file system call, as ``killer``."""

from __future__ import annotations

from shardckpt.engine.transaction import Transaction
from shardckpt.storage import writer
from tests.faults.killer import Killer, main

if __name__ == "__main__":
    # one process stands for many ranks: its tables are moved, however few
    Transaction._move_tables = lambda _self, files_writer, files: files_writer.move_tables(files)  # type: ignore[method-assign]
    writer._INLINE_TABLE = 0
    main(Killer)
