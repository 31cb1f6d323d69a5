"""What the command prints of texts that others wrote."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import shardckpt.cli
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.cli.output import escaped_logs
from shardckpt.cli.table import grouped_table, table
from shardckpt.errors import CheckpointingException, escape_text, listed
from shardckpt.manager import mark_checkpoint
from shardckpt.manager.marks import identify_save
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.backends import Backend, both
from tests.damage import flip

if TYPE_CHECKING:
    import pytest

#: Erases the line, goes up one, writes over it; a C1 control, a bell, an override of the direction, a row of its own.
HOSTILE = "w\x1b[2K\x1b[1A\rall intact\x9b1A\x07\u202eerongi\u2066\nverify: intact"
SHOWN = r"w\x1b[2K\x1b[1A\rall intact\x9b1A\x07\u202eerongi\u2066\nverify: intact"


def _save(path: Path, value: float) -> None:
    state = {
        "tensor": ShardedTensor.from_rank_offsets(f"model.{HOSTILE}.w", torch.full((4,), value)),
        "object": ShardedObject(f"object.{HOSTILE}", {"a": value}, (1,), (0,)),
        f"common.{HOSTILE}": value,
    }
    dc.save(state, path)


@both
def test_no_text_of_a_file_moves_the_cursor(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys, labels, marks, names of files and errors are printed escaped, on one line each, by every verb."""
    run = tmp_path / "run"
    one, two = str(run / "step-1"), str(run / "step-2")
    _save(run / "step-1", 1.0)
    _save(run / "step-2", 2.0)
    mark_checkpoint(one, identify_save(one), "failed", checked="digests", files=1, faults=[HOSTILE])
    (run / HOSTILE.replace("/", "")).mkdir()
    torch.save({HOSTILE: torch.ones(2)}, tmp_path / "x.pt")
    torch.save({HOSTILE: torch.ones(2)}, run / f"{HOSTILE}.pt")
    key = f"model.{HOSTILE}.w"
    other = "ep" if backend.name == "torch_dist" else "torch_dist"
    calls: list[tuple[int, bool, list[str]]] = [
        (0, True, ["pin", str(run), "1", "--label", HOSTILE]),
        (0, True, ["pin", str(run)]),
        (1, True, ["ls", str(run)]),
        (0, True, ["inspect", one]),
        (0, True, ["inspect", one, "--tree"]),
        (0, False, ["inspect", one, "--files"]),
        (0, True, ["inspect", f"{run / HOSTILE}.pt", "--files"]),
        (0, True, ["inspect", one, f"{key}[0:2]"]),
        (2, True, ["inspect", one, "model.none"]),
        (2, True, ["inspect", one, "none[0]"]),
        (1, True, ["diff", one, two]),
        (1, True, ["diff", one, str(tmp_path / "x.pt")]),
        (0, True, ["convert", one, str(tmp_path / "converted"), "--to", other, "--verbose"]),
        (0, True, ["convert", str(tmp_path / "x.pt"), str(tmp_path / "from file"), "-v"]),
        (2, True, ["convert", one, str(tmp_path / "none.pt"), "--to", "torch", "--prefix", "model.none"]),
        (2, True, ["merge", one, str(tmp_path / "x.pt"), str(tmp_path / "merged")]),
        (0, False, ["export", one, str(tmp_path / "exported")]),
        (0, True, ["remove", one, "model", "--dry-run"]),
        (2, True, ["remove", one, "none"]),
        (2, False, ["convert", str(run / HOSTILE), str(tmp_path / "nothing")]),
        (2, False, ["--traceback", "convert", str(run / HOSTILE), str(tmp_path / "nothing")]),
    ]
    capsys.readouterr()
    for code, is_shown, call in calls:
        found = main(call)
        out, err = capsys.readouterr()
        assert escape_text(out + err, "\n") == out + err, call
        assert not any(line.startswith("verify: intact") for line in (out + err).splitlines()), call
        assert (found, SHOWN in out + err) == (code, is_shown), (call, out, err)
    main(["inspect", one, "--json"])
    assert [tensor["key"] for tensor in json.loads(capsys.readouterr().out)["tensors"]] == [key]
    main(["diff", one, two, "--json"])
    assert json.loads(capsys.readouterr().out)["differences"][0]["key"] == key


def test_verify_names_a_damaged_checkpoint_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder of checkpoints, the line about a damaged one begins with its whole name."""
    name = HOSTILE.replace("/", "")
    _save(tmp_path / name, 1.0)
    _save(tmp_path / "other", 1.0)
    flip(tmp_path / name / "__0_0.distcp")
    assert main(["verify", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{tmp_path}/{SHOWN}: damaged") for line in lines), lines


def test_a_cell_is_one_line() -> None:
    """A line end in a cell begins no row, and other cells stay in their columns."""
    rows = table(("key", "bytes"), [("a\nb", 1), ("c", 2)]).split("\n")
    assert rows[2:] == [r"a\nb  1", "c     2"]
    assert grouped_table(("key", "kind"), ["a\rb"], [0], [["x"]]).split("\n")[2:] == [r"a\rb  x"]


def test_what_is_printable_stays() -> None:
    """Letters of any script stay; what is none is escaped, with bytes that are no text among them."""
    assert escape_text("Größe 模型 ∑ é") == "Größe 模型 ∑ é"
    assert escape_text(f"a\n\t\x1b\x7f\x85\u200b\u2028{os.fsdecode(bytes([0xE9]))}", "\n") == (
        "a\n\\t\\x1b\\x7f\\x85\\u200b\\u2028\\udce9"
    )
    assert listed(["a\nb", "c"], "\n") == "a\\nb\nc"
    assert str(CheckpointingException("a\x1b\nb")) == "a\\x1b\nb"


def test_logs_without_handlers_are_escaped() -> None:
    """What a library logs to standard error for want of handlers is escaped, too, and only while a verb runs."""
    record = logging.LogRecord("other", logging.WARNING, "", 0, "lines\n%s %d", ("a\n\x1b", 1), None)
    handler = logging.lastResort
    assert handler is not None
    with escaped_logs():
        assert handler.format(record) == "lines\na\\n\\x1b 1"
    assert handler.formatter is None


def test_a_log_is_said_once_a_call() -> None:
    """A verb may look at a checkpoint several times: the same text is said once, and again by the next call."""
    records = [logging.LogRecord("other", logging.WARNING, "", 0, "%s", (text,), None) for text in ("a", "a", "b")]
    handler = logging.lastResort
    assert handler is not None
    for _ in range(2):
        with escaped_logs():
            assert [bool(handler.filter(record)) for record in records] == [True, False, True]


def test_no_other_module_of_the_command_prints() -> None:
    """Verbs print by `say` and `say_error` alone."""
    folder = Path(shardckpt.cli.__file__).parent
    for path in sorted(folder.glob("*.py")):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        text = path.read_text()
        if path.name != "output.py":
            assert "print" not in names, path
            assert "stderr" not in text, path
            assert "stdout.write" not in text, path


def test_a_reader_who_has_left_before_an_error_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shardckpt ls none --json | true`: the document of the error finds no reader, and there is no traceback."""

    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return descriptor

    descriptor = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY)
    try:
        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["ls", str(tmp_path / "none"), "--json"]) == 141
    finally:
        os.close(descriptor)


def test_a_closed_standard_error_is_no_error_of_the_verb(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Python has no standard error, verbs do their work, and errors still have their exit code."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["verify", str(checkpoint)]) == 0
    assert main(["convert", str(checkpoint), str(tmp_path / "new.pt"), "--to", "torch"]) == 0
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert "none" not in capsys.readouterr().out


def test_a_character_that_the_terminal_lacks_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with an umlaut is shown by its escape where standard output is ASCII."""
    dc.save({"w": ShardedTensor.from_rank_offsets("f\u00fcr.w", torch.ones(2))}, tmp_path)
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(["inspect", str(tmp_path)]) == 0
    assert rb"f\xfcr.w" in out.getvalue()
