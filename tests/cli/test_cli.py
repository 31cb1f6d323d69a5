from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import __version__
from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.engine.integrity import save_integrity_manifest
from shardckpt.mapping import ShardedObject, ShardedTensor

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["strategies", "--help"]])
def test_help_and_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help names every verb, the version is the package's."""
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    out = capsys.readouterr().out
    expected = {
        "--help": ("demo", "strategies", "inspect", "verify", "migrate", "remove", "prune", "export"),
        "--version": (__version__,),
    }
    assert all(text in out for text in expected.get(arguments[0], ("usage",)))


def test_strategies_lists_the_built_ins(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each strategy: backend, version, what it does, who brought it."""
    assert main(["strategies"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["torch_dist", "1"] in [row[:2] for row in rows]
    assert {row[2] for row in rows if row[:1] == ["torch_dist"]} == {"load", "save"}
    assert all(f"shardckpt {__version__}" in " ".join(row) for row in rows if row[:1] == ["torch_dist"])


def test_inspect_lists_what_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys with dtype, shape and bytes, objects and common state; a prefix lists a part."""
    state = {
        "w": ShardedTensor.from_rank_offsets("model.w", torch.ones(2, 3)),
        "o": ShardedObject("rng", 1, (1,), (0,)),
        "iteration": 3,
    }
    dc.save(state, tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model.w", "float32", "2x3", "24"] in rows
    assert ["rng/shard_0_1", "object"] in rows
    assert ["iteration", "common"] in rows
    assert main(["inspect", str(tmp_path / "c"), "model."]) == 0
    assert "rng" not in capsys.readouterr().out


def test_verify_says_as_written_or_what_is_wrong(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for a whole checkpoint, 1 with the file and the reason for a damaged one."""
    assert main(["verify", str(checkpoint)]) == 0
    assert "__0_0.distcp" in capsys.readouterr().out
    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    data[-800] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(data)
    assert main(["verify", str(checkpoint)]) == 1
    assert "digest differs" in capsys.readouterr().out


def test_verify_lets_other_files_be(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file beside the checkpoint's is listed as foreign and no reason to fail; a missing one of its own is."""
    (checkpoint / "tokenizer.json").write_text("{}")
    assert main(["verify", str(checkpoint)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "tokenizer.json" in line]
    assert "not a file of this checkpoint" in row
    (checkpoint / "common.pt").unlink()
    assert main(["verify", str(checkpoint)]) == 1
    assert "common.pt" in capsys.readouterr().out


def golden(version: str, to: Path) -> Path:
    """A copy of a checkpoint that Megatron wrote, which has no digests."""
    return Path(shutil.copytree(GOLDEN / f"mcore-{version}", to / "golden"))


def plain_dcp(to: Path) -> Path:
    """A directory of plain DCP: tensors and values."""
    dcp.save({"a": torch.arange(50), "b": torch.ones(4, 5), "steps": 3}, checkpoint_id=to / "dcp", no_dist=True)
    return to / "dcp"


@pytest.mark.parametrize("version", ["0.9.0", "0.12.3", "0.13.1", "0.16.1", "0.17.0rc0", "0.20.0", "dcp"])
def test_verify_judges_what_has_no_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str) -> None:
    """3 for a foreign checkpoint whose files are as its index says, with what was checked and what was not."""
    path = plain_dcp(tmp_path) if version == "dcp" else golden(version, tmp_path)
    (path / "notes.txt").write_text("other people's")
    (path / "__9_0.distcp").write_bytes(b"of an older save")
    assert main(["verify", str(path)]) == 3
    *rows, last = capsys.readouterr().out.splitlines()
    said = dict(line.split(maxsplit=2)[::2] for line in rows[2:])
    assert said.keys() == {file.name for file in path.iterdir()}
    foreign = {name for name, text in said.items() if text == "not a file of this checkpoint"}
    assert foreign == {"notes.txt", "__9_0.distcp"}
    assert {said[name] for name in said.keys() - foreign} == {"its structure is valid; it has no digest"}
    assert "intact as far as can be checked without digests. Checked: they exist" in last
    assert "Not checked: their values" in last


def spoil(path: Path, how: str) -> None:
    """Damage a file, or let it be gone."""
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        cuts = {"cut by a byte": whole[:-1], "cut to a half": whole[: len(whole) // 2], "cut to nothing": b""}
        path.write_bytes(cuts.get(how, whole + b"\0" if how == "extended" else bytes(len(whole))))


SPOILT = ("cut by a byte", "cut to a half", "cut to nothing", "missing", "extended", "zeros")


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("version", ["0.9.0", "0.16.1", "0.20.0", "dcp"])
def test_verify_finds_damage_without_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, how: str
) -> None:
    """1 for any file of a foreign checkpoint that is cut, missing, longer or overwritten, which is named."""
    path = plain_dcp(tmp_path) if version == "dcp" else golden(version, tmp_path)
    for file in sorted(path.iterdir()):
        if version == "dcp" and file.name == ".metadata" and how == "missing":
            continue  # it is what makes a directory one of plain DCP's
        content = file.read_bytes()
        spoil(file, how)
        assert main(["verify", str(path)]) == 1, file.name
        shown = "".join(capsys.readouterr())
        assert str(file) in shown
        assert "intact as far as" not in shown
        file.write_bytes(content)
    assert main(["verify", str(path)]) == 3


def test_a_whole_and_a_cut_checkpoint_are_not_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A data file that is cut to 3,000 bytes is named, with what it should have."""
    path = golden("0.16.1", tmp_path)
    with (path / "__0_0.distcp").open("r+b") as file:
        file.truncate(3000)
    assert main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert "__0_0.distcp ends at 3,000 bytes, and .metadata lists 7,697" in out
    assert "damaged: 1 of 9 files" in out


def test_verify_finds_an_index_with_a_hole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Elements that the index names nowhere are missing, whatever the files have."""
    path = plain_dcp(tmp_path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    (index,) = [index for index in metadata.storage_data if index.fqn == "b"]
    del metadata.storage_data[index]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert main(["verify", str(path)]) == 1
    assert "of tensor 'b' of shape (4, 5) it lists 0 elements" in capsys.readouterr().out


def test_verify_lets_items_be_that_were_removed(tmp_path: Path) -> None:
    """Bytes behind the last item that is named are no fault if they are items: an older removal has left them."""
    path = plain_dcp(tmp_path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    last = max(metadata.storage_data, key=lambda index: metadata.storage_data[index].offset)
    del metadata.storage_data[last], metadata.state_dict_metadata[last.fqn], metadata.planner_data[last.fqn]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert main(["verify", str(path)]) == 3


@pytest.mark.parametrize("kind", ["absent", "empty", "other files", "a file", "unknown backend"])
def test_verify_has_no_answer_for_what_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """2, with the reason on standard error, for what is no checkpoint and for what nothing installed reads."""
    path = tmp_path / "x"
    if kind == "a file":
        path.write_text("text")
    elif kind != "absent":
        path.mkdir()
    if kind == "other files":
        (path / "notes.txt").write_text("text")
    elif kind == "unknown backend":
        (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    assert main(["verify", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("shardckpt verify: ")
    assert str(path) in shown.err


@pytest.mark.parametrize("ours", [True, False])
def test_verify_has_no_answer_where_a_file_cannot_be_read(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ours: bool
) -> None:
    """2, not 1, where the system does not let a file be read: that says nothing of its bytes."""
    path = checkpoint if ours else golden("0.16.1", tmp_path)
    opened = os.open

    def refused(name: Any, *args: Any, **options: Any) -> int:
        if os.fspath(name).endswith("__0_0.distcp"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return opened(name, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    assert main(["verify", str(path)]) == 2
    out = capsys.readouterr().out
    assert "__0_0.distcp: Permission denied (EACCES)" in out
    assert "cannot be checked: 1 of" in out


def test_verify_of_a_file_without_digest_among_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``integrity.json`` leaves out is judged by structure: 3 if that is sound, 1 if it is missing."""
    path = golden("0.16.1", tmp_path)
    save_integrity_manifest(path)
    assert main(["verify", str(path)]) == 0
    assert "intact: every byte of 9 files was read" in capsys.readouterr().out
    content = json.loads((path / "integrity.json").read_text())
    del content["files"]["common.pt"]
    (path / "integrity.json").write_text(json.dumps(content))
    assert main(["verify", str(path)]) == 3
    assert "8 of 9 files were compared with digests; checked of the others: they exist" in capsys.readouterr().out
    (path / "common.pt").unlink()
    assert main(["verify", str(path)]) == 1
    assert f"{path / 'common.pt'}: No such file" in capsys.readouterr().out


def test_verify_names_a_lost_json_file(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``shardckpt.json`` where our index shows that it was there, ``metadata.json`` where Megatron wrote the rest."""
    (checkpoint / "shardckpt.json").unlink()
    assert main(["verify", str(checkpoint)]) == 1
    assert f"{checkpoint / 'shardckpt.json'}, which has the digests, is missing" in capsys.readouterr().out
    (checkpoint / "shardckpt-index.safetensors").unlink()
    assert main(["verify", str(checkpoint)]) == 3
    path = golden("0.16.1", tmp_path)
    (path / "metadata.json").unlink()
    assert main(["verify", str(path)]) == 1
    assert f"{path / 'metadata.json'} is missing, which Megatron writes last" in capsys.readouterr().out


def test_verify_says_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Help has all four."""
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {code}  " in out for code in range(4))


@pytest.mark.parametrize("how", ["missing", "cut to a half"])
@pytest.mark.parametrize("version", ["ours", "0.16.1", "0.20.0", "dcp"])
def test_inspect_works_where_a_data_file_is_missing(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], version: str, how: str
) -> None:
    """Everything is listed, and the file is named with the keys that are in it, by all of them or by a prefix."""
    made = {"ours": lambda: checkpoint, "dcp": lambda: plain_dcp(tmp_path)}
    path = made.get(version, lambda: golden(version, tmp_path))()
    key = {"ours": "w", "dcp": "a"}.get(version, "decoder.final_layernorm.weight")
    assert main(["inspect", str(path)]) == 0
    before = capsys.readouterr().out
    assert "incomplete" not in before
    spoil(path / "__0_0.distcp", how)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    has_common = version in ("ours", "0.16.1") or how != "missing"
    rows = [line.split() for line in before.splitlines()[3:]]
    assert [row for row in rows if has_common or row[-1] != "common"] == [
        line.split()
        for line in out.splitlines()[3 : 3 + len(rows)]
        if not line.startswith(("the common", "incomplete"))
    ]
    assert ("the common state cannot be read: " in out) != has_common
    (said,) = [line for line in out.splitlines() if line.startswith("incomplete: __0_0.distcp ")]
    assert ("is missing" if how == "missing" else "bytes, ") in said
    assert key in said
    assert main(["inspect", str(path), key]) == 0
    out = capsys.readouterr().out
    assert f"1 tensors and objects cannot be read completely: {key}" in out


def test_inspect_works_where_the_common_state_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tensors are listed, and the file is named."""
    path = golden("0.16.1", tmp_path)
    (path / "common.pt").unlink()
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "decoder.final_layernorm.weight" in out
    assert f"the common state cannot be read: {path / 'common.pt'} is missing" in out
    assert "incomplete: common.pt is missing" in out


def test_a_prefix_that_nothing_begins_with(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1, with the prefix and the keys that there are, by every verb that takes one; nothing is made or changed."""
    verbs = (["inspect"], ["remove"], ["remove", "--dry-run"])
    for verb, *options in verbs:
        assert main([verb, str(checkpoint), "x", *options]) == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "a key that begins with 'x' (keys: w)" in shown.err
    assert main(["export", str(checkpoint), str(checkpoint.parent / "hf"), "--prefix", "x"]) == 1
    assert "whose key begins with 'x'; it has 'w'" in capsys.readouterr().err
    assert not (checkpoint.parent / "hf").exists()


def test_errors_go_to_standard_error_with_the_verb(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal is one message, without a traceback."""
    assert main(["inspect", str(checkpoint) + "x"]) == 1
    assert main(["verify", str(checkpoint) + "x"]) == 2
    assert main(["migrate", str(checkpoint), str(checkpoint) + "2"]) == 1
    err = capsys.readouterr().err
    assert "shardckpt verify: " in err
    assert "does not exist" in err
    assert "shardckpt migrate: " in err
    assert "Traceback" not in err


def test_a_wrong_call_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    """Argparse's convention for a call that cannot be taken."""
    with pytest.raises(SystemExit, match="2"):
        main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_who_reads_a_listing_may_stop(tmp_path: Path) -> None:
    """``shardckpt inspect PATH | head -1`` ends without a word about the pipe."""
    dc.save({f"o{n}": ShardedObject(f"object.{n}", n, (1,), (0,)) for n in range(3000)}, tmp_path / "c")
    command = [sys.executable, "-m", "shardckpt", "inspect", str(tmp_path / "c")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""
