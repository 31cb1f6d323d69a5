"""A program of each system whose names are here, as its users write it: only its import lines change.

Megatron's is ``tests/compat/training.py``, which ``tests/compat/test_training.py`` runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.compat.rewritten import SCRIPT, ported, run_script
from tests.tables import in_proof, table

if TYPE_CHECKING:
    from tests.ranks import RankPool

PROGRAMS = Path(__file__).with_name("programs")


def _run(name: str, function: str, *args: Any) -> None:
    run_script(PROGRAMS / name, function, *args)


@table("program", [SCRIPT, *sorted(PROGRAMS.glob("*.py"))], ids=lambda path: path.name)
def test_only_import_lines_change(program: Path) -> None:
    """A program of another system becomes ours by lines that import: no other line is touched, and there are some."""
    text = program.read_text()
    pairs = [pair for pair in zip(text.splitlines(), ported(text).splitlines(), strict=True) if pair[0] != pair[1]]
    assert pairs
    assert all(line.startswith("from ") and " import " in line for pair in pairs for line in pair)


@pytest.mark.parametrize("world", [2, *in_proof(4)])
def test_experts_are_trained_exported_and_resumed_as_in_mindspeed(
    gloo_ranks: RankPool, tmp_path: Path, world: int
) -> None:
    """Experts plain, or sharded by FSDP: the exported files have each tensor, and a resumed training the same bits."""
    gloo_ranks.run(world, _run, "mindspeed_moe.py", "run", str(tmp_path))


def test_experts_are_loaded_by_the_planner_of_plain_dcp(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Of a checkpoint with all experts each rank gets its own, sharded by FSDP: every bit of them, and of the rest."""
    gloo_ranks.run(4, _run, "ep_load.py", "run", str(tmp_path))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fsdps_program_of_2023_resumes(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """``optimizer_key=`` and ``storage_reader=`` are taken by torch's names, and FSDP1 goes on with the result."""
    gloo_ranks.run(2, _run, "fsdp_2023.py", "run", str(tmp_path))


@pytest.mark.parametrize("mode", ["async", *in_proof("async_with_pinned_mem", "disabled")])
def test_torchtitans_loop_of_spring_2025_resumes(gloo_ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """Loaded, saved in the loop and closed: a job stopped behind a save ends with the bits of one that was not."""
    gloo_ranks.run(2, _run, "torchtitan_loop.py", "run", str(tmp_path), mode)
