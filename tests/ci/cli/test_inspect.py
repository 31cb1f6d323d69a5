"""``shardckpt inspect``."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedObject
from tests.backends import Backend, both
from tests.cli.inspect import make_varied

if TYPE_CHECKING:
    from pathlib import Path


def test_who_reads_a_listing_may_stop(tmp_path: Path) -> None:
    """``shardckpt inspect PATH | head -1`` ends without a word about the pipe."""
    dc.save({f"o{n}": ShardedObject(f"object.{n}", n, (1,), (0,)) for n in range(3000)}, tmp_path / "c")
    command = [sys.executable, "-m", "shardckpt", "inspect", str(tmp_path / "c")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


#: What takes longer to import than 100,000 tensors take to be listed.
SLOW_IMPORTS = {"torch", "pydantic", "pluggy", "importlib.metadata", "dataclasses", "inspect", "shardckpt.strategy"}


@pytest.mark.parametrize("how", [[], ["--tree"], ["--sort", "size"], ["--json"], ["--files"]])
@both
def test_inspect_imports_little(backend: Backend, how: list[str], tmp_path: Path) -> None:
    """To list what a checkpoint of ours stores nobody waits for torch, pydantic, plugins or other verbs."""
    make_varied(tmp_path / "c", backend.name)
    code = (
        "import sys; before = {*sys.modules}; from shardckpt.cli import main; code = main(sys.argv[2:])\n"
        "new = sys.modules.keys() - before\n"
        "sys.exit(f'imported: {new & {*sys.argv[1].split()}}' if new & {*sys.argv[1].split()} else code)"
    )
    verbs = {f"shardckpt.cli.{name}" for name in ("diff", "convert", "ls", "verify", "html")}
    done = subprocess.run(
        [sys.executable, "-c", code, " ".join(SLOW_IMPORTS | verbs), "inspect", str(tmp_path / "c"), *how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "m" in done.stdout
