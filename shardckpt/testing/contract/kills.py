"""The contract's part about kills: after a kill at any moment of a save, a load sees the old checkpoint or the new."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardckpt.testing.checks import check
from shardckpt.testing.contract.claims import Claims

if TYPE_CHECKING:
    from pathlib import Path

#: Kills of a first save, and of an overwrite.
KILLS = 12


class KillTests(Claims):
    """Saves that are killed."""

    def test_a_killed_save(self, tmp_path: Path) -> None:
        """After a kill at any step, the path is absent or complete, old or new, and the next save clears up."""
        if not hasattr(os, "fork"):
            pytest.skip("saves are killed in forked processes: this system has none")
        (tmp_path / "subject").write_bytes(pickle.dumps(self.subject))
        path = os.pathsep.join(sys.path)  # the strategy's module is found where this process finds it
        done = subprocess.run(
            [sys.executable, "-m", "shardckpt.testing.contract.killer", str(tmp_path), str(KILLS)],
            env={**os.environ, "PYTHONPATH": path, "SHARDCKPT_IO_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        check(done.returncode == 0, f"the program that kills saves failed: {done.stderr[-3000:]}")
        outcomes = json.loads(done.stdout)
        check(len(outcomes) == 2 * KILLS, f"{len(outcomes)} saves were killed")
        for case, step, steps, killed, state, later, left in outcomes:
            what = f"{case}: killed at step {step} of {steps}"
            allowed = ("old", "new") if case == "overwrite" else ("absent", "new")
            check(killed, f"{what}: the save was not killed there")
            check(state in allowed, f"{what}: a load finds {state}")
            check(later == "new", f"{what}: after the next save a load finds {later}")
            check(not left, f"{what}: the next save has left {left}")
