"""``shardckpt config``: the settings of a manager."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardckpt.cli import main
from shardckpt.manager import CheckpointConfig

if TYPE_CHECKING:
    import pytest


def test_every_setting_is_listed_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each, in plain text, and the same as JSON."""
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*CheckpointConfig.model_fields]
    assert "interval                          500           Steps between two saves" in lines
    assert not any(sign in line for line in lines for sign in ("``", ":class:", ":func:"))
    assert main(["config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found] == [*CheckpointConfig.model_fields]
    assert all(each["text"].strip() for each in found)


def test_a_setting_by_another_librarys_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole text of ours is shown; a name that nobody knows is an error with the nearest."""
    assert main(["config", "max_to_keep"]) == 0
    assert capsys.readouterr().out.startswith("keep_latest_k = 10\n    How many of the newest checkpoints to keep")
    assert main(["config", "intervl"]) == 2
    assert "there is no setting 'intervl' (did you mean interval? settings: " in capsys.readouterr().err
