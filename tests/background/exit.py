"""What the tests of exit share."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests import programs

if TYPE_CHECKING:
    from pathlib import Path

TOGETHER = """
    import datetime, os, sys, time, torch, torch.distributed as dist
    from shardckpt import dist_checkpointing as dc
    from shardckpt.async_save import AsyncCallsQueue
    from shardckpt.mapping import ShardedTensor

    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{{sys.argv[3]}}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds={start}))
    queue = AsyncCallsQueue(persistent={persistent})
    state = {{"w": ShardedTensor.from_rank_offsets("w", torch.ones(1 << 20), (0, rank, 2))}}
    queue.schedule_async_request(dc.save(state, sys.argv[1], async_sharded_save=True))
    {end}
"""


def write_script(program: str, folder: Path) -> str:
    """Write a program, and return its path."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(program))
    return str(script)


def start_script(program: str, folder: Path, *arguments: str) -> programs.Program:
    """Start a program from a file."""
    script = write_script(program, folder)
    return programs.start("", *arguments, file=script, warnings_are_errors=True, one_output=True)


def end_together(tmp_path: Path, *, persistent: bool, end: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of two ranks that have begun a save behind them."""
    # a loaded machine may take long to start and connect both
    program = TOGETHER.format(persistent=persistent, end=end, start=programs.START_TIMEOUT)
    processes = [
        start_script(program, tmp_path, str(tmp_path / "c"), str(rank), str(tmp_path / "store")) for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=2 * programs.START_TIMEOUT)[0] for process in processes]
    return [process.returncode for process in processes], outputs
