from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.torch_versions import call

if TYPE_CHECKING:
    from pathlib import Path


def test_a_command_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    """No process of an environment that is about to be removed goes on."""
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a writer
    os.set_blocking(reader, True)
    program = f"(echo started; exec sleep 600) >{tmp_path}/fifo & wait"
    assert call(["bash", "-c", program], 3) == -signal.SIGKILL
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "started\n"  # up to the end: nobody has it open any more
