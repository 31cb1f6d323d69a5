"""What the command says of a bucket that is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.cli import main
from tests.tables import table

if TYPE_CHECKING:
    import pytest

_PLACE = "s3://no-such-bucket-here/team/step-1"


@table(
    "call",
    [
        *(f"{verb} {_PLACE}" for verb in ("ls", "verify", "inspect", "prune", "pin", f"diff {_PLACE}")),
        *(f"{verb} {_PLACE} new" for verb in ("convert", "export", "migrate")),
        f"prune {_PLACE} --keep-latest 1",
        f"merge {_PLACE} {_PLACE} new",
    ],
)
def test_a_missing_bucket_is_one_line(s3: str, capsys: pytest.CaptureFixture[str], call: str) -> None:
    """Every verb exits with 2, and says in one line that the bucket does not exist at this endpoint."""
    assert s3
    assert main(call.split()) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1, shown
    assert "the bucket does not exist" in shown.err
    assert not shown.out
