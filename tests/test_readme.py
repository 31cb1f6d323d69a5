from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardckpt import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def _run(code: str, directory: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_two_commands_are_the_first_block() -> None:
    """The README has one shell block, of two commands; .ci/run runs them word for word."""
    (block,) = _blocks("bash")
    demo, tests = block.strip().splitlines()
    assert demo.endswith("shardckpt demo")
    assert tests.endswith("pytest")


def test_the_porting_example_runs(tmp_path: Path) -> None:
    """The example for those who come from Megatron works as it stands."""
    porting, *_ = _blocks("python")
    _run(porting, tmp_path)
    assert (tmp_path / "iter_0000017" / "metadata.json").is_file()


def test_the_training_loop_example_runs(tmp_path: Path) -> None:
    """The example of background saves, parallel loads and lazy reading works as it stands."""
    _, loop, *_ = _blocks("python")
    _run(loop, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-1", "step-2"]


def test_the_example_of_modules_runs(tmp_path: Path) -> None:
    """The example of a module and its optimizer works as it stands."""
    _run(_blocks("python")[3], tmp_path)
    assert (tmp_path / "step-1" / "metadata.json").is_file()


def test_the_example_of_a_manager_runs(tmp_path: Path) -> None:
    """The training loop with a CheckpointManager works as it stands."""
    _run(_blocks("python")[2], tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-20", "step-30", "step-40"]


def test_the_plugin_example_is_a_plugin(tmp_path: Path) -> None:
    """The example strategy, with the entry point of the README, saves, is found again by load, and is listed."""
    plugin = _blocks("python")[4]
    (entry_points,) = _blocks("toml")
    section, line = entry_points.strip().splitlines()
    assert section == "[project.entry-points.shardckpt]"
    (tmp_path / "shardckpt_json.py").write_text(plugin)
    info = tmp_path / "shardckpt_json-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardckpt-json\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardckpt]\n" + line.replace('"', "") + "\n")
    code = """
import sys, torch
from shardckpt import ShardedTensor, dist_checkpointing as dc
from shardckpt.cli import main
whole = torch.arange(12.0).reshape(4, 3)
state = {"w": ShardedTensor.from_rank_offsets("w", whole), "step": 3}
dc.save(state, "c", "json")
halves = [ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, i, 2)) for i in range(2)]
loaded = dc.load({"halves": halves}, "c")
assert torch.equal(torch.cat(loaded["halves"]), whole) and loaded["step"] == 3
assert halves[0].data is loaded["halves"][0]
sys.exit(main(["strategies"]))
"""
    listing = _run(code, tmp_path, PYTHONPATH=str(tmp_path))
    assert re.search(r"^json +1 +load .*shardckpt-json 1.0", listing, re.MULTILINE)


def test_every_error_of_the_gate_table_exists() -> None:
    """The table has a row for every case of the gate."""
    named = set(re.findall(r"`(\w+Error)`", README))
    assert {kind.__name__ for kind in errors.CannotLoadError.__subclasses__()} <= named
    assert all(issubclass(getattr(errors, name), errors.CheckpointingException) for name in named)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", README))))
def test_what_the_readme_points_to_is_there(path: str) -> None:
    """Every test that shows a promise exists."""
    assert (ROOT / path).exists()
