"""``shardckpt inspect`` says the metrics of a step, with torch and without."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardckpt.cli import inspect as inspect_
from shardckpt.cli import main
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_page_has_them_too(tmp_path: Path) -> None:
    """The data of the page that inspect --html writes has the metrics of the step."""
    folders.save(tmp_path, 1, loss=0.25)
    assert main(["inspect", str(tmp_path / "step-1"), "--html", str(tmp_path / "page.html")]) == 0
    assert '"metrics":{"loss":0.25}' in (tmp_path / "page.html").read_text().replace(" ", "")


@table("outline", [True, False])
def test_inspect_has_the_metrics_of_the_step(
    outline: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line has what the manager was given for the step, JSON too; a checkpoint without any has none."""
    folders.save(tmp_path, 1, loss=1 / 3, ppl=12.0)
    folders.save(tmp_path, 2)
    if not outline:
        monkeypatch.setattr(inspect_, "_read_outline", lambda _: None)
    for step, line, metrics in ((1, ", loss 0.333333, ppl 12", {"loss": 1 / 3, "ppl": 12.0}), (2, "", {})):
        assert main(["inspect", str(tmp_path / f"step-{step}")]) == 0
        title = capsys.readouterr().out.splitlines()[0]
        assert title.partition(", id ")[2][32:] == line
        assert main(["inspect", str(tmp_path / f"step-{step}"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["metrics"] == metrics
