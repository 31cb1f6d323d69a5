from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tests import backends, programs
from tests.remote import jobs
from tests.remote.background import PERSISTENT

if TYPE_CHECKING:
    from pathlib import Path


@backends.both_in_proof
@PERSISTENT
def test_a_save_in_flight_at_the_end_of_one_process_is_finished(tmp_path: Path, persistent: bool) -> None:
    """A program that ends right after scheduling leaves a whole checkpoint at the URL, event loops and all."""
    script = tmp_path / "train.py"
    program = f"""
        import sys
        sys.path.insert(0, {str(programs.ROOT)!r})
        from shardckpt import dist_checkpointing as dc
        from shardckpt.async_save import AsyncCallsQueue
        from tests.remote import jobs

        queue = AsyncCallsQueue(persistent={persistent})
        queue.schedule_async_request(dc.save(jobs.state(3.0), sys.argv[1], async_sharded_save=True))
    """
    script.write_text(textwrap.dedent(program))
    url = f"{'local' if persistent else 'looped'}://{tmp_path}/c"
    done = programs.run("", url, file=str(script), warnings_are_errors=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    jobs.check(url, 3.0)
