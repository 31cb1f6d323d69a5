from __future__ import annotations

import subprocess
import sys

from tests.tree import GOLDEN


def test_nothing_foreign_is_imported() -> None:
    """A load needs and imports neither zarr nor numcodecs nor Megatron."""
    code = (
        "import sys; from shardckpt import dist_checkpointing as dc; dc.load_plain_tensors(sys.argv[1]);"
        "assert not {'zarr', 'numcodecs', 'tensorstore', 'megatron'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, str(GOLDEN / "zarr-mcore-0.7.0")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
