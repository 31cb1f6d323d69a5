"""Program: kill a save whose tables of digests are in files of their own at every file system call, as ``killer``."""

from __future__ import annotations

from shardckpt.distributed import Comm
from shardckpt.storage import writer
from tests.faults.killer import Killer, main

if __name__ == "__main__":
    # one process stands for many ranks: its tables are moved, however few
    Comm.gather_up_to = lambda _self, _limit, _value: None  # type: ignore[method-assign]
    writer._INLINE_TABLE = 0
    main(Killer)
