"""torch_checkpointing from PyPI writes what the golden checkpoints have, and it is read here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing
from tests import interop
from tests.torch_checkpointing.golden import GOLDEN

if TYPE_CHECKING:
    from tests.sites import Sites

SCRIPT = Path(interop.__file__).with_name("torch_checkpointing_script.py")


def test_what_the_release_writes_is_what_the_golden_checkpoints_have(tmp_path: Path, sites: Sites) -> None:
    """Every tensor and the common state of each directory are equal, bit for bit."""
    package = sites("torch_checkpointing-0.1.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(package), "GOLDEN_PORT": port, "OMP_NUM_THREADS": "1"}
    written = tmp_path / "written"
    subprocess.run([sys.executable, str(SCRIPT), str(written)], check=True, env=environment, timeout=240)
    names = sorted(path.name for path in GOLDEN.iterdir())
    assert sorted(path.name for path in written.iterdir()) == names
    for name in names:
        with (
            dist_checkpointing.open_checkpoint(written / name) as ours,
            dist_checkpointing.open_checkpoint(GOLDEN / name) as golden,
        ):
            assert (set(ours), ours.objects, ours.common) == (set(golden), golden.objects, golden.common)
            for key in golden:
                if not key.startswith("local."):  # which differs between ranks, and is refused
                    assert torch.equal(ours[key].read(), golden[key].read()), f"{name}: {key}"
