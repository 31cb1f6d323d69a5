"""Whatever is killed, at any file system call, leaves the old or the new: not only a save in the foreground."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.kill import bad
from tests.faults.operation_kill import MANY, RANKS, SOME, outcomes_of
from tests.faults.programs import needs_strace
from tests.faults.report_sets import OF_ONE_FORMAT
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_strace


#: Kills of a rank in CI: each needs a group of its own.
GROUPS = 5
_OPERATIONS = ("thread", "training", *RANKS, "convert", "export", "manager", "local checkpoints")


#: CI kills some operations over one place by one format, in turn; all of them, at more calls, are proof, and in the
#: report.
_SOME = (("torch_dist", "existing", "old"), ("safetensors", "fresh", "absent"))
_ALL = (*_SOME, ("torch_dist", "fresh", "absent"), ("safetensors", "existing", "old"))

_CASES = pytest.mark.parametrize(
    ("backend", "case", "before", "most"),
    [
        pytest.param(*_SOME[1], SOME, marks=pytest.mark.ci),
        *(pytest.param(*each, MANY, marks=pytest.mark.proof) for each in _ALL),
    ],
    indirect=["backend"],
    scope="module",
)


@pytest.mark.parametrize(
    ("operation", "backend", "case", "before", "most"),
    [
        *(
            pytest.param(operation, *_SOME[number % 2], SOME, marks=pytest.mark.ci)
            for number, operation in enumerate(("thread", "convert"))
        ),
        *(pytest.param(operation, *each, MANY, marks=pytest.mark.proof) for operation in _OPERATIONS for each in _ALL),
    ],
    indirect=["backend"],
    scope="module",
)
def test_a_killed_operation_leaves_old_or_new(disk: Path, operation: str, most: int, case: str, before: str) -> None:
    """The same holds for saves by a thread, a training whose process saves, ranks, a manager, conversions, exports."""
    count = most * GROUPS // SOME if operation in RANKS else most
    assert bad(outcomes_of(operation, disk, case, count), {before, "new"}) == []


@_CASES
def test_a_killed_process_of_a_training_commits_nothing(disk: Path, most: int, case: str, before: str) -> None:
    """After a kill of the process that saves for a training, which lives, what was there before is there."""
    assert bad(outcomes_of("process", disk, case, most), {before}) == []


@backends.both_in_proof
@pytest.mark.parametrize("most", [SOME, pytest.param(MANY, marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    "operation", ["prune", *in_proof("migrate", "pin", "unpin", "mark", "pointer", "links", "contiguous")]
)
def test_a_killed_change_of_a_checkpoint_leaves_old_or_new(
    disk: Path, operation: str, most: int, backend: backends.Backend
) -> None:
    """The same holds for a prune, which never touches the checkpoint, a migration, and what is noted of a step."""
    if OF_ONE_FORMAT.get(operation, backend.name) != backend.name:
        pytest.skip("one format shows it")
    assert bad(outcomes_of(operation, disk, "existing", most), {"old", "new"}) == []
