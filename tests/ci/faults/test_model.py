"""The commit protocols, searched through: two saves and a load interleaved, kills, a power cut; and real traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.model import directory
from tests.faults.model.traces import find_departure, name_calls
from tests.faults.programs import ask, needs_strace

if TYPE_CHECKING:
    from pathlib import Path


@needs_strace
@pytest.mark.parametrize(
    ("case", "rules"),
    [
        pytest.param("fresh", directory.Rules(overwrite=False), marks=pytest.mark.proof),
        ("existing", directory.Rules()),
        pytest.param("existing, no exchange", directory.Rules(can_exchange=False), marks=pytest.mark.proof),
    ],
)
def test_a_real_save_to_a_directory_is_a_path_of_the_model(tmp_path: Path, case: str, rules: directory.Rules) -> None:
    """The system calls of a real save are the model's steps in the model's order; exchanged, they are not."""
    lines = [point["line"] for point in ask("killer", "foreground", tmp_path, case, 0)["points"]]
    steps = name_calls(lines)
    assert find_departure(steps, rules) == ""
    for first, second in [("sync staging", "publish"), ("sync staging", "aside"), ("sync data", "write data")]:
        if first in steps and second in steps:
            swapped = [{first: second, second: first}.get(step, step) for step in steps]
            assert find_departure(swapped, rules) != ""
    assert find_departure([step for step in steps if step != "sync parent"], rules) != ""
