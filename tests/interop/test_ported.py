from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.compat.rewritten import SCRIPT, STRATEGIES, run, run_script

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop.runner import Megatron
    from tests.ranks import RankPool


@pytest.mark.parametrize("world", [1, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))])
@pytest.mark.slow
def test_the_ported_script_is_code_for_megatron(
    megatron: Callable[[str], Megatron], tmp_path: Path, world: int
) -> None:
    """The script that tests/compat ports runs as it is under Megatron, at every number of ranks."""
    megatron("0.16.1").run(world, "call", str(SCRIPT), "train", str(tmp_path))


@pytest.mark.slow
def test_one_job_goes_on_in_both(ranks: RankPool, megatron: Callable[[str], Megatron], tmp_path: Path) -> None:
    """What the job saved here, Megatron resumes; what it saved there, the ported job resumes; the format is one."""
    ranks.run(2, run, "train", str(tmp_path / "here"))
    megatron("0.16.1").run(2, "call", str(SCRIPT), "train", str(tmp_path / "there"))
    for world in (1, 4):
        for name, steps in (("first", "4"), ("second", "3")):
            megatron("0.16.1").run(world, "call", str(SCRIPT), "resume", str(tmp_path / "here"), name, steps)
            ranks.run(world, run, "resume", str(tmp_path / "there"), name, steps)


def test_a_strategy_of_megatrons_kind_runs_in_both(
    ranks: RankPool, megatron: Callable[[str], Megatron], tmp_path: Path
) -> None:
    """One strategy, unchanged but for the import rule, reads here what it wrote under Megatron, and the other way."""
    there, here = str(tmp_path / "there"), str(tmp_path / "here")
    megatron("0.16.1").run(2, "call", str(STRATEGIES), "save", there, "3")
    ranks.run(2, run_script, STRATEGIES, "save", here, "4")
    for world in (1, 2):
        ranks.run(world, run_script, STRATEGIES, "load", there, "3")
        megatron("0.16.1").run(world, "call", str(STRATEGIES), "load", here, "4")
