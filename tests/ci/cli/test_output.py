"""What the command prints of texts that others wrote."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def test_no_file_gets_the_descriptor_of_standard_error(checkpoint: Path, tmp_path: Path) -> None:
    """With `2>&-` descriptor 2 is the null device's: nothing that writes there writes into a file."""
    code = (
        "import os, sys; from shardckpt.cli import main; code = main(sys.argv[1:]); "
        "print(os.readlink('/proc/self/fd/2'), code)"
    )
    command = ["sh", "-c", 'exec "$0" "$@" 2>&-', sys.executable, "-c", code]
    for arguments, expected in (
        (["convert", str(checkpoint), str(tmp_path / "new"), "--to", "ep"], 0),
        (["verify", str(tmp_path / "none")], 2),
    ):
        done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
        assert done.stdout.splitlines()[-1] == f"/dev/null {expected}"
