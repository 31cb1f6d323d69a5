"""What the contract catches: strategies that are wrong in one way each fail a test that is named."""

from __future__ import annotations

from tests.readmes import READMES
from tests.testing.wrong_strategies import WRONG


def test_the_table_of_the_readme() -> None:
    """The README's table has every wrong strategy, with the test that catches it."""
    section = READMES["shardckpt/testing/README.md"].partition("## What it catches\n")[2].partition("\n## ")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if "` |" in line]
    assert rows == [[what, test.partition("[")[0]] for what, (_, test) in WRONG.items()]
    assert len(rows) >= 20
