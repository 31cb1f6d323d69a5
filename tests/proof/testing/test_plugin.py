"""What a project gets that has shardckpt and pytest installed, and nothing else of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.ci.testing.test_plugin import run_alone

if TYPE_CHECKING:
    from pathlib import Path

SAVING = """
import torch
import torch.distributed as dist
from shardckpt import ShardedTensor, dist_checkpointing
from shardckpt.testing import FaultyStore

def rows():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((2, 3), float(rank)), (0, rank, world_size))}

def save(path):
    dist_checkpointing.save(rows(), path)
"""

TESTS = """
import pytest
import torch
from saving import rows, save
from shardckpt import CheckpointingException, dist_checkpointing
from shardckpt.testing import RankError

def test_ranks(rank_pool, tmp_path):
    rank_pool.run(2, save, str(tmp_path / "c"))
    assert dist_checkpointing.load_plain_tensors(tmp_path / "c")["w"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2

def test_a_function_that_ranks_cannot_import(rank_pool):
    import types, sys
    module = sys.modules["gone"] = types.ModuleType("gone")
    exec("def function(): pass", vars(module))
    with pytest.raises(RankError, match="No module named 'gone'"):
        rank_pool.run(1, module.function)
    assert rank_pool.run(1, len, "abc") == [3]

def test_faults(rank_pool, faulty_store):
    faulty_store.fails("put", 1)
    with pytest.raises(RankError, match="the store does not answer"):
        rank_pool.run(1, save, faulty_store.url)
    faulty_store.works()
    rank_pool.run(1, save, faulty_store.url)
    assert "metadata.json" in faulty_store.names()

def test_delays(rank_pool, slow_store):
    rank_pool.run(1, save, slow_store.url)
    assert len(dist_checkpointing.load_plain_tensors(slow_store.url)["w"]) == 2
    assert len(slow_store.requests("put")) >= 3
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a project of its own, which has no configuration and no plugins but those installed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    (folder / "pytest.ini").write_text("[pytest]\n")
    variables = {**os.environ, "SHARDCKPT_REMOTE_ATTEMPTS": "1"}
    variables.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=240, check=False)


def test_a_project_has_ranks_and_stores(tmp_path: Path) -> None:
    """In a project without our tests folder the fixtures run ranks, faults and delays, found by the entry point."""
    (tmp_path / "saving.py").write_text(SAVING)
    (tmp_path / "test_saving.py").write_text(TESTS)
    done = run_pytest(tmp_path)
    assert "4 passed" in done.stdout, done.stdout + done.stderr


def test_an_error_that_says_all_is_no_broken_promise(tmp_path: Path) -> None:
    """Of a contract without strategy or with a misspelt claim, and of any such failure, pytest prints one sentence."""
    module = tmp_path / "test_first.py"
    module.write_text(
        "import pytest\n"
        "from tests.testing.wrong_strategies import Contract, StrategyContract\n"
        "class TestX(StrategyContract): pass\n"
        "class TestZ(Contract): support_urls = True\n"
        "class TestY(Contract):\n"
        "    def test_mine(self): pytest.fail('not on this host', pytrace=False)\n"
    )
    shown = run_alone(
        f"{module}::TestX::test_many_tensors",
        f"{module}::TestY::test_mine",
        f"{module}::TestZ::test_many_tensors",
        f"--rootdir={tmp_path}",
    )
    assert "\nTestX sets no strategy, or save_strategy and load_strategy\n" in shown
    assert "\nTestZ.support_urls is no claim, and nothing reads it: did you mean supports_urls?" in shown
    assert "\nnot on this host\n" in shown
    assert "promise" not in shown
