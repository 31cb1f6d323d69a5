"""The command at work in a bucket with 24 checkpoints of twelve origins, six of them damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ci.cli.test_zoo import FILES, ask, bucket, check_listing, zoo
from tests.remote.conftest import endpoint, s3

if TYPE_CHECKING:
    import pytest

__all__ = ["bucket", "endpoint", "s3", "zoo"]  # fixtures


def test_ls_lists_all_of_a_bucket(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same of a bucket."""
    code, rows = ask(capsys, "ls", "-r", bucket)
    assert code == 1
    check_listing(rows, bucket, FILES)


def test_damaged_steps_of_a_bucket_are_removed(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The store says when objects were written: what is young stays, and goes, all of it, where that is asked for."""
    code, found = ask(capsys, "prune", f"{bucket}/llama", "--damaged")
    assert code == 0
    kept = {each["step"]: each["kept"] for each in found["steps"]}
    assert "ago, and a save or a copy may go on" in kept[600]
    assert ask(capsys, "prune", f"{bucket}/llama", "--damaged", "--older-than", 0, "--verify")[0] == 1
    code, found = ask(capsys, "ls", f"{bucket}/llama")
    assert {each["name"]: each["state"] for each in found} == {f"step-{step}": "whole" for step in (100, 200, 300, 400)}
