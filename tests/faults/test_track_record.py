from __future__ import annotations

import re
from pathlib import Path

_FAULTS = Path(__file__).parent
_ROW = re.compile(r"\| (\d{4}-\d\d-\d\d) \| ([^|]+) \| ([^|]+) \| `([^`|]+)::(test_\w+)` \|")


def test_each_fault_has_its_test() -> None:
    """Every line of the track record has a date, a fault, how it was found, and a test that exists and runs."""
    lines = (_FAULTS / "TRACK_RECORD.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| 20")]
    assert len(rows) >= 40
    for row in rows:
        found = _ROW.fullmatch(row)
        assert found is not None, row
        text = (_FAULTS.parents[1] / found[4]).read_text()
        head, is_there, _ = text.partition(f"def {found[5]}(")
        assert is_there, row
        assert "mark.skip" not in head[-200:].rpartition("\n\n")[2], row


def test_no_fault_stands_twice() -> None:
    """A fault has one line."""
    text = (_FAULTS / "TRACK_RECORD.md").read_text()
    faults = [found[2] for found in _ROW.finditer(text)]
    assert len(faults) == len(set(faults)) > 0
