"""One rule of exit codes for all verbs: 0 as it should be, 1 found damage or a difference, 2 could not do its work."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import shardckpt.cli
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.manifest import parse_json
from shardckpt.mapping import ShardedTensor
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two steps, of which the second is whole, half-written, cut, damaged, or has lost its marker."""
    root = tmp_path_factory.mktemp("zoo")
    for name in ("whole", "half", "index", "cut", "flipped", "lost"):
        for step in (1, 2):
            tensor = ShardedTensor.from_rank_offsets("model.w", torch.full((64,), float(step)))
            dc.save({"model.w": tensor, "args": {"lr": 0.1}}, root / name / f"step-{step}", "torch_dist", step=step)
    for name, kept in (("half", ()), ("index", ("shardckpt-index.safetensors",))):  # what a copy that was killed leaves
        for path in (root / name / "step-2").iterdir():
            if path.suffix != ".distcp" and path.name not in kept:
                path.unlink()
    data = root / "cut" / "step-2" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-7])
    _flip(root / "flipped" / "step-2" / "__0_0.distcp")
    (root / "lost" / "step-2" / "metadata.json").unlink()
    (root / "empty").mkdir()
    (root / "unread" / "orbax").mkdir(parents=True)
    (root / "unread" / "orbax" / "_CHECKPOINT_METADATA").write_text("{}")
    return root


#: Calls by what they are called on, and their exit code.
CODES: list[tuple[int, str]] = [
    # whole
    *((0, call) for call in ("ls whole", "ls whole/step-1", "verify whole", "inspect whole/step-2", "pin whole")),
    *((0, call) for call in ("diff whole/step-1 whole/step-1", "prune whole", "prune whole --keep-latest 1 --verify")),
    *(
        (0, call)
        for call in ("inspect whole/step-1 args.lr", "inspect whole/step-1 model.w[0]", "strategies", "config")
    ),
    # something is different, damaged or incomplete, and was read as far as it goes
    (1, "diff whole/step-1 whole/step-2"),
    *((1, f"{verb} {kind}") for verb in ("ls", "verify") for kind in ("half", "index", "cut", "lost")),
    *((1, f"{verb} {kind}/step-2") for verb in ("ls", "verify") for kind in ("half", "index", "cut", "lost")),
    *((1, call) for call in ("verify flipped", "verify flipped/step-2", "verify whole flipped/step-2")),
    *((1, f"inspect {kind}/step-2") for kind in ("cut", "lost")),
    (1, "inspect lost/step-2 model.w[]"),
    (1, "inspect cut/step-2 args.lr"),
    (1, "prune flipped --keep-latest 1 --verify --dry-run"),
    # sizes are as they should be, and values are not read
    *((0, call) for call in ("ls flipped", "inspect flipped/step-2", "inspect flipped/step-2 args", "prune cut")),
    # what no reader here reads is listed as that, and not verified; a folder without a checkpoint is listed, too
    *((code, f"{verb} {kind}") for verb, code in (("ls", 1), ("verify", 2)) for kind in ("unread", "unread/orbax")),
    *((code, f"{verb} empty") for verb, code in (("ls", 0), ("verify", 2))),
    # the work needs bytes that are not there, or not as written
    *((2, f"inspect {kind}/step-2") for kind in ("half", "index")),
    *((2, f"inspect {kind}/step-2 model.w[]") for kind in ("half", "cut", "flipped")),
    *((2, f"diff {kind}/step-1 {kind}/step-2") for kind in ("half", "index", "cut", "flipped", "lost")),
    *((2, f"convert {kind}/step-2 new --to ep") for kind in ("half", "cut", "flipped", "lost")),
    *((2, f"merge {kind}/step-1 {kind}/step-2 new") for kind in ("half", "cut", "flipped", "lost")),
    *((2, f"migrate {kind}/step-2 new --to ep") for kind in ("half", "cut", "flipped", "lost")),
    *((2, f"export {kind}/step-2 new") for kind in ("half", "cut", "flipped", "lost")),
    *((2, f"remove {kind}/step-2 model") for kind in ("half", "lost")),
    *((2, f"pin {kind} 2 --label a") for kind in ("half", "cut", "lost")),
    # a wrong path, also beside a damaged one
    *((2, f"{verb} none") for verb in ("ls", "verify", "inspect", "prune", "pin")),
    *((2, f"verify {kind}/step-2 none") for kind in ("whole", "cut", "half")),
    *((2, f"diff {kind}/step-2 none") for kind in ("whole", "flipped")),
    *((2, f"{verb} none new") for verb in ("convert", "export", "migrate")),
    (2, "merge whole/step-1 none new"),
    (2, "remove none model"),
    # a step where the folder of steps was meant: nothing would be done
    *((2, f"prune {kind}/step-2{how}") for kind in ("whole", "half") for how in ("", " --keep-latest 1")),
    (2, "pin whole/step-1"),
    # mistyped names
    (2, "inspect whole/step-1 modle."),
    (2, "inspect cut/step-2 modle."),
    (2, "remove whole/step-1 modle."),
    (2, "diff whole/step-1 whole/step-1 --prefix modle."),
    (2, "convert whole/step-1 new --prefix modle."),
    (2, "export whole/step-1 new --prefix modle."),
    (2, "prune whole --keep-latest 1 --keep-best los"),
    (2, "pin whole 2 --label none --remove"),
    (2, "ls whole --metric los"),
    (2, "config keep_latset"),
    # a store that no plugin serves, and one without such a folder
    *((2, f"{verb} nowhere://bucket/x") for verb in ("ls", "verify", "inspect", "prune", "pin")),
    *((2, f"{verb} memory://none/x") for verb in ("ls", "verify", "inspect", "prune", "pin")),
]


@table("code, call", CODES, ids=[call for _, call in CODES])
def test_exit_codes_follow_one_rule(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, call: str
) -> None:
    """The same with --json, which prints one document; standard error has nothing but failures, one line each."""
    shutil.copytree(zoo, tmp_path / "zoo")
    monkeypatch.chdir(tmp_path / "zoo")
    arguments = call.split()
    assert main([*arguments, "--json"]) == code, capsys.readouterr().err
    found = parse_json(capsys.readouterr().out.encode())
    assert not isinstance(found, dict) or ("error" in found) == (code == 2), found
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert bool(shown.out) == (code != 2) or arguments[0] == "verify", shown
    reasons = [line for line in shown.err.splitlines() if not line.startswith(" ")]
    assert bool(reasons) if code == 2 else code == 1 or not reasons, shown.err
    assert all(line.startswith(f"shardckpt {arguments[0]}: ") for line in reasons)


def test_the_rule_is_tried_with_every_verb() -> None:
    """All verbs of ours that have an answer are in the table."""
    verbs = {*shardckpt.cli._VERBS} - {*shardckpt.cli._WITHOUT_JSON}
    assert {call.split()[0] for _, call in CODES} == verbs


def test_ls_of_a_file_that_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a wrong argument, and the error says what the file is; beside checkpoints in a folder it is none."""
    folders.save(tmp_path, 1)
    (tmp_path / "train.log").write_text("loss 1")
    assert main(["ls", str(tmp_path / "train.log")]) == 2
    assert f"{tmp_path}/train.log is no checkpoint: of no format that is known here" in capsys.readouterr().err
    assert main(["ls", str(tmp_path)]) == 0
