"""A job that has saved and loaded ends like any other: nothing that we import lets its process group live on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.faults.programs import ROOT, run_in_new_interpreter

if TYPE_CHECKING:
    from pathlib import Path

#: What imports modules of torch that make functions with the default group, and packages that may.
_LATE = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed._shard", "import transformers")


def _rooms() -> list[str]:
    """Every module that imports such modules, and every package's door."""
    found = []
    for base, pattern in ((ROOT, "shardckpt/**/*.py"), (ROOT / "strategies", "shardckpt_*/**/*.py")):
        for path in sorted(base.glob(pattern)):
            text, name = path.read_text(), ".".join(path.relative_to(base).with_suffix("").parts)
            if path.stem == "__init__" or any(late in text for late in _LATE):
                found.append(name.removesuffix(".__init__"))
    return found


def _threads_left(rooms: list[str]) -> dict[str, int]:
    done = run_in_new_interpreter("finished_jobs", "threads", *rooms, timeout=30 * len(rooms))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(1800)
def test_no_module_keeps_a_group() -> None:
    """Whatever of ours is imported when there is a group, destroy_process_group ends the threads of gloo.

    So it is for every single module that imports torch.distributed.checkpoint or FSDP, and for every package.
    """
    rooms = _rooms()
    assert len(rooms) > 30
    assert _threads_left(rooms) == dict.fromkeys(rooms, 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("jobs", [pytest.param(2, marks=pytest.mark.ci), pytest.param(5, marks=pytest.mark.proof)])
def test_jobs_end_well(tmp_path: Path, jobs: int) -> None:
    """Jobs of three ranks that save, load and end exit with 0, however late the threads of gloo come to run."""
    done = run_in_new_interpreter("finished_jobs", "exits", str(tmp_path), str(jobs), "3", timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == [0] * 3 * jobs
