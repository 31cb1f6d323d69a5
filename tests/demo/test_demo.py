"""``shardckpt demo`` as its user meets it: a process with an exit status, its report and its errors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from shardckpt.cli import main
from shardckpt.demo.launch import TOLERANCE, Layout, Run, check
from shardckpt.errors import CheckpointingException
from tests.demo.demo import demo
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["demo"]  # fixtures


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo never writes among other files: it exits 2 and says why, before anything starts."""
    (tmp_path / "mine").write_text("kept")
    assert main(["demo", "--dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"shardckpt demo: {tmp_path} is not empty: give --dir a directory that is new or empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_cannot_be_made_is_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path below a file is a failure with the operating system's reason, not a traceback."""
    (tmp_path / "file").write_text("")
    assert main(["demo", "--dir", str(tmp_path / "file" / "below")]) == 2
    reason = f"cannot create the directory {tmp_path}/file/below: Not a directory (ENOTDIR)"
    assert capsys.readouterr() == ("", f"shardckpt demo: {reason}\n")


def _runs(layout: Layout, state: str = "digest") -> list[Run]:
    """Two groups that agree, but for what is given of the second."""
    good = Run(Layout(2), {1: 3.0, 2: 2.0, 3: 1.5}, "digest")
    return [good, Run(layout, {2: 2.0, 3: 1.5}, state)]


def test_results_that_agree_pass_the_check() -> None:
    """Losses within the tolerance and equal digests are a success."""
    check(_runs(Layout(2)))
    check(_with_loss(Layout(1), 1.5 * (1 + TOLERANCE / 2)))


def _with_loss(layout: Layout, loss: float) -> list[Run]:
    first, second = _runs(layout)
    return [first, replace(second, losses={2: 2.0, 3: loss})]


@table(
    ("runs", "reason"),
    [
        (_with_loss(Layout(1), 1.5 * (1 + TOLERANCE * 2)), "losses of 1 rank differ by 2.0e-05, more than the toler"),
        (_with_loss(Layout(2), 1.5 * (1 + TOLERANCE / 2)), "losses of 2 ranks differ by 5.0e-06, more than the toler"),
        (_with_loss(Layout(1), float("nan")), "losses of 1 rank differ by inf"),
        (
            _runs(Layout(1), state="another"),
            "1 rank loaded a model and an optimizer that differ from those that 2 ranks saved",
        ),
    ],
)
def test_results_that_differ_fail_the_check(runs: list[Run], reason: str) -> None:
    """A loss beyond the tolerance, any other with the same ranks, a NaN, or a state with another bit fails the demo."""
    with pytest.raises(CheckpointingException, match=reason):
        check(runs)
