"""``--json``: the answer of every verb, and its errors, as one JSON document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import shardckpt.cli
from shardckpt import dist_checkpointing as dc
from shardckpt import hookimpl
from shardckpt.cli import Output, add_json, main
from shardckpt.cli.encode import Rows, encode_json
from shardckpt.maintenance import TensorDifference
from shardckpt.manifest import parse_json
from shardckpt.mapping import ShardedTensor
from tests.plugged import registered
from tests.tables import table

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


class _Named(NamedTuple):
    name: str
    found: tuple[int, ...]


@table(
    ("value", "text"),
    [
        (_Named("a", (1, 2)), '{"name": "a", "found": [1, 2]}'),
        ([float("nan"), float("inf"), -float("inf"), 0.5], '["nan", "inf", "-inf", 0.5]'),
        ({3: torch.float32, (1, 2): {4}}, '{"3": "torch.float32", "(1, 2)": [4]}'),
        ({10, 9.5, "b", "a"}, '[9.5, 10, "a", "b"]'),
        (frozenset(map(str, range(8))), '["0", "1", "2", "3", "4", "5", "6", "7"]'),
        ({1: "a", "1": "b"}, '[[1, "a"], ["1", "b"]]'),
        (Rows([{"a": None}]), '[{"a": null}]'),
        ("ä\x1b\n", '"\\u00e4\\u001b\\n"'),
        (torch.Size([2, 3]), "[2, 3]"),
    ],
)
def test_answers_are_strict_json(value: object, text: str) -> None:
    """What JSON has not has another form, of which nothing is lost, and our own strict parser reads it.

    Named tuples are objects by their fields, dicts of which two keys have one text pairs, other values texts.
    """
    assert encode_json(value) == text
    parse_json(text.encode())


class _Counts:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    @hookimpl
    def shardckpt_commands(self, subparsers: Any) -> None:
        parser = subparsers.add_parser("count")
        parser.set_defaults(run=lambda _: self.answer)
        add_json(parser)


def test_a_plugins_verb_prints_its_output_in_either_form(capsys: pytest.CaptureFixture[str]) -> None:
    """The Output of a plugin's verb is text, or JSON with the option that ``add_json`` adds, with its exit code."""
    with registered(_Counts(Output(lambda: {"keys": 2}, lambda: ["2 keys"], 1))):
        assert main(["count"]) == 1
        assert main(["count", "--json"]) == 1
    assert capsys.readouterr().out == '2 keys\n{"keys": 2}\n'


def test_a_plugins_verb_with_json_and_no_output_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A verb with ``--json`` that returns an exit code has no answer to print: the error says what to return."""
    with registered(_Counts(0)):
        assert main(["count", "--json"]) == 2
    (out, err) = capsys.readouterr()
    assert "the verb 'count' has --json, and its run returned 0: return an Output" in err
    assert json.loads(out)["error"]["type"] == "PluginError"


def test_a_dataclass_is_an_object() -> None:
    """Fields have their names, and infinities are texts."""
    said = json.loads(encode_json(TensorDifference("w", "values", "", "", max_absolute=float("inf"), index=(1,))))
    assert (said["key"], said["max_absolute"], said["index"]) == ("w", "inf", [1])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two steps, which is the working directory."""
    for step in (1, 2):
        tensor = ShardedTensor.from_rank_offsets("model.w", torch.full((4,), float(step)))
        dc.save({"model.w": tensor, "lr": float("nan")}, tmp_path / f"step-{step}", step=step)
    monkeypatch.chdir(tmp_path)
    return tmp_path


#: A call of each verb, its exit code, and what its answer has.
CALLS: list[tuple[str, int, str]] = [
    ("ls .", 0, "0.name"),
    ("inspect step-1", 0, "tensors.0.key"),
    ("inspect step-1 --tree", 0, "tensors.0.key"),
    ("inspect step-1 common", 0, "value.lr"),
    ("inspect step-1 model.w[]", 0, "norm"),
    ("inspect step-1 --html page.html", 0, "page"),
    ("diff step-1 step-2", 1, "differences.0.max_absolute"),
    ("verify step-1", 0, "0.files.0.checked"),
    ("verify none", 2, "0.error"),
    ("export step-1 hub", 0, "files.0.name"),
    ("convert step-1 new", 2, "error.type"),
    ("convert step-1 new.pt --to torch", 0, "proof.0.before"),
    ("merge step-1 step-2 merged", 0, "conversion.proof.0.names.0"),
    ("migrate step-1 as-ep --to ep", 0, "proof.0.after"),
    ("remove step-1 model.w", 0, "keys.0"),
    ("remove step-1 none", 2, "error.message"),
    ("pin . 2 --label a", 0, "pinned"),
    ("pin .", 0, "0.holder"),
    ("prune . --keep-latest 1 --verify", 0, "steps.0.path"),
    ("strategies", 0, "strategies.0.backend"),
    ("config", 0, "0.name"),
]


def _look_up(found: Any, path: str) -> Any:
    for part in path.split("."):
        found = found[int(part) if isinstance(found, list) else part]
    return found


def test_every_verb_answers_in_one_json_document(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is one strict JSON document, whether the exit code is 0, 1 or 2, and has what the text has."""
    assert place.is_dir()
    tried = set()
    for call, code, path in CALLS:
        arguments = call.split()
        assert main([*arguments, "--json"]) == code, call
        out = capsys.readouterr().out
        found = parse_json(out.encode())
        assert _look_up(found, path) is not None, (call, found)
        if "error" in path and isinstance(found, dict):
            assert found["exit_code"] == code
        tried.add(arguments[0])
    assert tried == {*shardckpt.cli._VERBS} - {*shardckpt.cli._WITHOUT_JSON}


def test_an_interrupt_is_an_answer_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C leaves a program with a document that says so, and the shell's exit code."""

    def stop(_: argparse.Namespace) -> Output:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardckpt.cli.ls.run", stop)
    assert main(["ls", str(tmp_path), "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {
        "error": {"type": "KeyboardInterrupt", "message": "interrupted; nothing was written"},
        "exit_code": 130,
    }
