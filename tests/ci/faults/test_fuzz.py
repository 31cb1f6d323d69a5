"""Files that were changed at random: what opens them refuses them, or loads them, within bounds, and does no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.foreign_fuzzer import LIBRARIES
from tests.faults.programs import ask

if TYPE_CHECKING:
    from pathlib import Path


@backends.both_in_proof
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.proof)])
def test_mutants_of_every_file(tmp_path: Path, count: int) -> None:
    """Mutants of each file, with and without digests, are errors of the family, or load: no crash, time or memory."""
    found: list[str] = ask("fuzzer", tmp_path, count)
    assert [verdict for verdict in found if verdict not in ("refused", "loaded")] == []
    assert found.count("refused") > len(found) // 2


@pytest.mark.proof
def test_mutants_of_an_index_in_parts(tmp_path: Path) -> None:
    """So are those of an index whose tensors are in several files."""
    found: list[str] = ask("fuzzer", tmp_path, 25, "parts")
    assert [verdict for verdict in found if verdict not in ("refused", "loaded")] == []
    assert found.count("refused") > len(found) // 2


@pytest.mark.parametrize(
    "library",
    [each if each == "files of torch.save" else pytest.param(each, marks=pytest.mark.proof) for each in LIBRARIES],
)
def test_mutants_of_what_other_libraries_wrote(tmp_path: Path, library: str) -> None:
    """So are those of another library's files, for whatever reads them."""
    found: list[str] = ask("foreign_fuzzer", tmp_path, library, 40)
    assert [verdict for verdict in found if verdict not in ("refused", "loaded")] == []
