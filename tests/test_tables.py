from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def test_every_row_is_tried_and_each_that_failed_is_named(tmp_path: Path) -> None:
    """Rows after one that fails are tried, too; one that skips has failed; each has a folder of its own."""
    tried = []

    @table(("number", "text"), [(1, "a"), (2, "b"), pytest.param(3, "c", id="third"), (4, "d")])
    def check(number: int, text: str, tmp_path: Path) -> None:
        (tmp_path / "once").mkdir()
        tried.append(text)
        assert number != 2, "wrong"
        if number == 3:
            pytest.skip("no row may")

    with pytest.raises(AssertionError) as caught:
        check(tmp_path=tmp_path)
    assert tried == ["a", "b", "c", "d"]
    heading, second, third = (line for line in str(caught.value).splitlines() if "row" in line)
    assert (heading, third) == ("2 of 4 rows failed", "row 2 (third): Skipped: no row may")
    assert second.startswith("row 1 (number=2, text='b'): AssertionError: wrong")


def test_a_table_has_rows_and_one_tier() -> None:
    """A table without a row, or with a row of another tier, is an error where it is written."""
    with pytest.raises(AssertionError, match="without rows"):
        table("number", [])
    with pytest.raises(AssertionError, match="one set of marks"):
        table("number", [pytest.param(1, marks=pytest.mark.proof)])
