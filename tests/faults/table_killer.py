"""Program: kill a save whose tables of digests are in files of their own at every file system call, as ``killer``."""

from __future__ import annotations

from typing import Any

from shardckpt.chunks import LocalPlan
from shardckpt.distributed import Comm
from shardckpt.storage import writer
from tests.faults.killer import Killer, main

_gather_up_to = Comm.gather_up_to


def _gather_plans_alone(self: Comm, limit: int, value: Any) -> list[Any] | None:
    """Gather plans, so that the index is one file; refuse to gather tables of digests."""
    return _gather_up_to(self, limit, value) if isinstance(value, LocalPlan) else None


if __name__ == "__main__":
    # one process stands for many ranks: its tables are moved, however few
    Comm.gather_up_to = _gather_plans_alone  # type: ignore[method-assign]
    writer._INLINE_TABLE = 0
    main(Killer)
