from __future__ import annotations

import os
import tempfile
import textwrap
from typing import TYPE_CHECKING

import pytest

from shardckpt.background.staging import release_memory
from tests import programs
from tests.background import jobs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("persistent", [False, True], ids=["thread", "process"])
def test_staging_without_files_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool) -> None:
    """A Python without memfd_create stages in files that have no name: nothing is left of them."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    release_memory()
    jobs.one_save(str(tmp_path / "c"), persistent)
    assert not list(folder.iterdir())
    release_memory()


def test_staged_memory_is_not_shared_with_forks() -> None:
    """A fork of a process that has staged before gets memory of its own: neither sees what the other stages."""
    program = """
        import os, torch
        from shardckpt.background.staging import stage
        class Work:
            def __init__(self, value): self.tensors, self.keys = [torch.full((1000,), value)], ["key"]
        stage(Work(1.0)).release()
        ours = stage(Work(2.0))
        ours.release()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            staged = stage(Work(3.0))
            os.write(writer, staged.path.encode())
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(reader, 100).decode() != ours.path
        again = stage(Work(4.0))
        assert again.path == ours.path
        with again.open() as work:
            assert work.tensors[0].eq(4).all()
    """
    done = programs.run(textwrap.dedent(program))
    assert done.returncode == 0, done.stderr
