"""What killed saves leave: gone with the next save or by ``shardckpt prune``, but never what lives or the only copy."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.engine.pruning import prune_leftovers
from tests import programs
from tests.commit import owners
from tests.engine.pruning import NEW, OLD, list_names, save_version
from tests.faults import samples

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_others_have_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stopped process, another host and an older release keep what they have; the log says what and why."""
    target = tmp_path / "ckpt"
    process, staging = owners.saver(target)
    try:
        process.send_signal(signal.SIGSTOP)
        far, older = owners.leave(target, owners.elsewhere()), owners.leave(target, None)
        save_version(target)
        assert list_names(tmp_path) == sorted(["ckpt", staging.name, far.name, older.name])
        assert (staging / "data").read_bytes() == b"so far"
        assert f"{staging} (process {process.pid} of this host is alive)" in caplog.text
        assert f"{far} (of a process of another host" in caplog.text
        assert f"{older} (of an older release" in caplog.text
        assert "shardckpt prune" in caplog.text
    finally:
        owners.end(process)
    caplog.clear()
    save_version(target)
    assert not staging.exists()
    assert far.exists()


def test_a_background_save_keeps_its_directory(tmp_path: Path) -> None:
    """A save that waits to be written outlives another save to the place, and every prune, and then commits."""
    target = tmp_path / "ckpt"
    with AsyncCallsQueue(persistent=False) as queue:
        request = dc.save(samples.state_dict(NEW), target, async_sharded_save=True, overwrite=True)
        assert request is not None
        (staging,) = tmp_path.iterdir()
        save_version(target, OLD)
        program = (
            "import sys\nfrom shardckpt.cli import main\nsys.exit(main(['prune', sys.argv[1], '--older-than', '0']))"
        )
        done = programs.run(program, str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert f"kept: process {os.getpid()} of this host is alive" in done.stdout
        assert prune_leftovers(tmp_path)[0].kept
        assert list_names(tmp_path) == sorted(["ckpt", staging.name])
        queue.schedule_async_request(request)
    assert list_names(tmp_path) == ["ckpt"]
    assert samples.differences(samples.load(target), NEW) == []
