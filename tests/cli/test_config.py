"""``shardckpt config``: the settings of a manager."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.cli import main
from shardckpt.manager import CheckpointConfig

if TYPE_CHECKING:
    import pytest


def test_every_setting_is_listed_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each, in plain text, and the same as JSON."""
    assert main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2 : lines.index("")]] == [*CheckpointConfig.model_fields]
    assert "interval                          500           Steps between two saves" in lines
    assert not any(sign in line for line in lines for sign in ("``", ":class:", ":func:"))
    assert main(["config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found if "default" in each] == [*CheckpointConfig.model_fields]
    assert all(each["text"].strip() for each in found)


def test_a_setting_by_another_librarys_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole text of ours is shown; a name that nobody knows is an error with the nearest."""
    assert main(["config", "max_to_keep"]) == 0
    assert capsys.readouterr().out.startswith("keep_latest_k = 10\n    How many of the newest checkpoints to keep")
    assert main(["config", "intervl"]) == 2
    assert "there is no setting 'intervl' (did you mean interval? settings: " in capsys.readouterr().err
    assert main(["config", "timeout"]) == 2
    assert "init_process_group(timeout=" in capsys.readouterr().err
    assert main(["config", "max_to_kep"]) == 2
    assert "there is no setting 'max_to_kep' (did you mean max_to_keep? settings: allow" in capsys.readouterr().err


def test_every_variable_is_listed_with_its_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in force, whether it is set or not; a wrong value and a misspelt name say so, and what was meant."""
    for name in (each for each in [*os.environ] if each.startswith("SHARDCKPT_")):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "3")
    monkeypatch.setenv("SHARDCKPT_REMOTE_PARTS", "many")
    monkeypatch.setenv("SHARDCKPT_REMOTE_THREDS", "8")
    assert main(["config", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out) if "value" in each}
    known = {getattr(settings, name) for name in settings.__all__ if name.isupper()}
    assert {*found} == {*known, "SHARDCKPT_REMOTE_THREDS"}
    assert [found[f"SHARDCKPT_{name}"]["value"] for name in ("IO_THREADS", "DIRECT_IO", "PLUGINS")] == ["3", "1", "-"]
    assert "'many': expected a whole number" in found["SHARDCKPT_REMOTE_PARTS"]["text"]
    assert found["SHARDCKPT_REMOTE_THREDS"]["text"] == "nothing reads it: did you mean SHARDCKPT_REMOTE_THREADS?"
    assert main(["config"]) == 0
    assert any(line.startswith("SHARDCKPT_IO_THREADS        3") for line in capsys.readouterr().out.splitlines())
    assert main(["config", "SHARDCKPT_IO_THREADS"]) == 0
    assert capsys.readouterr().out.startswith("SHARDCKPT_IO_THREADS = 3\n    Threads per rank")
    assert main(["config", "SHARDCKPT_IO_TREADS"]) == 2
    assert "did you mean SHARDCKPT_IO_THREADS?" in capsys.readouterr().err
