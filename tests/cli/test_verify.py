"""``shardckpt verify``: with digests, and by structure where there are none."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardckpt import ShardedTensor, dist_checkpointing
from shardckpt.cli import main
from shardckpt.engine.integrity import save_integrity_manifest
from shardckpt.manager import list_checkpoints
from shardckpt.plugins import get_plugin_manager
from tests.cli.checkpoints import DAMAGES, copy_golden, damage, save_plain_dcp
from tests.damage import flip
from tests.manager import folders
from tests.plugged import registered
from tests.plugins.manager import Recorder
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def test_verify_says_as_written_or_what_is_wrong(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 for a whole checkpoint, 1 with the file and the reason for a damaged one."""
    assert main(["verify", str(checkpoint)]) == 0
    assert "__0_0.distcp" in capsys.readouterr().out
    data = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    data[-800] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(data)
    assert main(["verify", str(checkpoint)]) == 1
    assert "digest differs" in capsys.readouterr().out


def test_verify_of_a_relative_path_names_no_other_file(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row has the fault by the file's name: no path of another file is left where the checkpoint's is taken out."""
    damage(checkpoint / "__0_0.distcp", "zeros")
    monkeypatch.chdir(checkpoint.parent)
    assert main(["verify", checkpoint.name]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("__0_0.distcp")]
    assert "of __0_0.distcp are not those that were written" in row
    assert "/" not in row


def test_verify_lets_other_files_be(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file beside the checkpoint's is listed as foreign and no reason to fail; a missing one of its own is."""
    (checkpoint / "tokenizer.json").write_text("{}")
    assert main(["verify", str(checkpoint)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "tokenizer.json" in line]
    assert "not a file of this checkpoint" in row
    (checkpoint / "common.pt").unlink()
    assert main(["verify", str(checkpoint)]) == 1
    assert "common.pt" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["missing", "flipped"])
def test_verify_says_how_to_mend_what_has_lost_no_data(
    checkpoint: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a file that no load reads the row names the conversion that writes all anew; beside lost data it does not."""
    lost, new = checkpoint / ".metadata", checkpoint.parent / "new"
    flip(lost) if how == "flipped" else damage(lost, how)
    option = " --skip-damaged" if how == "flipped" else ""
    for repair in ([], ["--repair"]):
        assert main(["verify", str(checkpoint), *repair, "--json"]) == 1
        (result,) = [file for file in json.loads(capsys.readouterr().out)[0]["files"] if file["name"] == ".metadata"]
        way = f"the data is all there, as it was written: `shardckpt convert {checkpoint} NEW{option}` writes"
        assert result["note"].startswith(way)
    assert main(["convert", str(checkpoint), str(new), *option.split()]) == 0
    assert main(["verify", str(new)]) == 0
    flip(checkpoint / "__0_0.distcp")
    capsys.readouterr()
    assert main(["verify", str(checkpoint)]) == 1
    assert "the data is all there" not in capsys.readouterr().out


@table("version", ["0.9.0", "0.12.3", "0.13.1", "0.16.1", "0.17.0rc0", "0.20.0", "dcp"])
def test_verify_judges_what_has_no_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str) -> None:
    """0 for a foreign checkpoint whose files are as its index says, with what was checked and what was not."""
    path = save_plain_dcp(tmp_path) if version == "dcp" else copy_golden(version, tmp_path)
    (path / "notes.txt").write_text("other people's")
    (path / "__9_0.distcp").write_bytes(b"of an older save")
    assert main(["verify", str(path), "--require-digests"]) == 1
    assert "intact by " in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    said = dict(line.split(maxsplit=2)[::2] for line in rows[2:])
    assert said.keys() == {file.name for file in path.iterdir()}
    foreign = {name for name, text in said.items() if text == "not a file of this checkpoint"}
    assert foreign == {"notes.txt", "__9_0.distcp"}
    by_structure = {name for name, text in said.items() if text == "its structure is valid; it has no digest"}
    assert by_structure == {name for name in said if name in ("metadata.json", ".metadata")}
    others = said.keys() - foreign - by_structure
    assert {said[name] for name in others} == {"it has the CRC-32 of its values; it has no digest"}
    assert f"without digests. {len(others)} of {len(said) - 2} files were compared with the CRC-32" in last
    assert "checked of the others: they exist" in last


@table("how", DAMAGES)
@table("version", ["0.9.0", "0.16.1", "0.20.0", "dcp"])
def test_verify_finds_damage_without_digests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, how: str
) -> None:
    """1 for any file of a foreign checkpoint that is cut, missing, longer or overwritten, which is named."""
    path = save_plain_dcp(tmp_path) if version == "dcp" else copy_golden(version, tmp_path)
    for file in sorted(path.iterdir()):
        if version == "dcp" and file.name == ".metadata" and how == "missing":
            continue  # it is what makes a directory one of plain DCP's
        content = file.read_bytes()
        damage(file, how)
        assert main(["verify", str(path)]) == 1, file.name
        out = capsys.readouterr().out
        rows = [line for line in out.splitlines() if line.split(" ")[0] == file.name]
        assert all("is valid" not in row and str(path) not in row for row in rows)  # the path stands below the rows
        assert rows or out.startswith(f"{path}: damaged: ")
        assert file.name in out
        assert "intact by " not in out
        file.write_bytes(content)
    assert main(["verify", str(path)]) == 0


def test_a_whole_and_a_cut_checkpoint_are_not_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A data file that is cut to 3,000 bytes is named, with what it should have."""
    path = copy_golden("0.16.1", tmp_path)
    with (path / "__0_0.distcp").open("r+b") as file:
        file.truncate(3000)
    assert main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert " ends at 3,000 bytes, and .metadata lists 7,697" in out
    assert "damaged: 1 of 9 files" in out


def test_verify_finds_an_index_with_a_hole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Elements that the index names nowhere are missing, whatever the files have."""
    path = save_plain_dcp(tmp_path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    (index,) = [index for index in metadata.storage_data if index.fqn == "b"]
    del metadata.storage_data[index]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert main(["verify", str(path)]) == 1
    assert "of tensor 'b' of shape (4, 5) it lists 0 elements" in capsys.readouterr().out


def test_verify_lets_items_be_that_were_removed(tmp_path: Path) -> None:
    """Bytes behind the last item that is named are no fault if they are items: an older removal has left them."""
    path = save_plain_dcp(tmp_path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    last = max(metadata.storage_data, key=lambda index: metadata.storage_data[index].offset)
    del metadata.storage_data[last], metadata.state_dict_metadata[last.fqn], metadata.planner_data[last.fqn]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert main(["verify", str(path)]) == 0


def test_verify_says_that_nothing_reads_what_is_intact(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right digests of a format that nothing here reads are no answer (2), and marked as what they are."""
    version = "shardckpt.strategy.LoadStrategy.cannot_load"
    monkeypatch.setattr(version, lambda *_: "it is too new")
    assert main(["verify", str(checkpoint), "--mark"]) == 2
    out = capsys.readouterr().out
    assert "intact: every byte of" in out
    assert "nothing here reads it: is a" in out
    assert main(["verify", str(checkpoint.parent), "--json"]) == 2
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], bool(row["unread"])) == ("intact", True)


@table("kind", ["absent", "empty", "other files", "a file", "unknown backend"])
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
        (path / "metadata.json").write_text('{"sharded_backend": "tensorstore", "sharded_backend_version": 1}')
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
    path = checkpoint if ours else copy_golden("0.16.1", tmp_path)
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


def test_what_was_checked_is_said_of_sound_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of damaged files it is not said that they are what an index says; a fault of several lines is one cell."""
    torch.save({"w": torch.ones(300)}, tmp_path / "cut.pt")
    os.truncate(tmp_path / "cut.pt", 900)
    torch.save({"w": torch.nn.Linear(2, 2)}, tmp_path / "model.pt")
    assert main(["verify", str(tmp_path / "cut.pt")]) == 1
    assert capsys.readouterr().out.endswith("/cut.pt: damaged: 1 of 1 file\n")
    assert main(["verify", str(tmp_path / "model.pt")]) == 2
    assert "\\n" not in capsys.readouterr().out
    (copy_golden("0.16.1", tmp_path) / "common.pt").unlink()
    assert main(["verify", str(tmp_path / "golden")]) == 1
    assert "1 of 9 files. 6 of 8 files without a fault were" in capsys.readouterr().out


def test_verify_of_a_file_without_digest_among_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``integrity.json`` leaves out is judged by structure: 0 if that is sound, 1 if it is missing."""
    path = copy_golden("0.16.1", tmp_path)
    save_integrity_manifest(path)
    assert main(["verify", str(path)]) == 0
    assert "intact: every byte of 9 files was read" in capsys.readouterr().out
    content = json.loads((path / "integrity.json").read_text())
    del content["files"]["common.pt"]
    (path / "integrity.json").write_text(json.dumps(content))
    assert main(["verify", str(path)]) == 0
    assert "8 of 9 files were compared with digests; checked of the others: they exist" in capsys.readouterr().out
    (path / "common.pt").unlink()
    assert main(["verify", str(path)]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("common.pt ")]
    assert " No such file" in row
    assert str(path) not in row


def test_verify_names_a_lost_json_file(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``shardckpt.json`` where our index shows that it was there, ``metadata.json`` where Megatron wrote the rest."""
    (checkpoint / "shardckpt.json").unlink()
    assert main(["verify", str(checkpoint)]) == 1
    assert "shardckpt.json, which has the digests, is missing" in capsys.readouterr().out
    (checkpoint / "shardckpt-index.safetensors").unlink()
    assert main(["verify", str(checkpoint)]) == 0
    path = copy_golden("0.16.1", tmp_path)
    (path / "metadata.json").unlink()
    assert main(["verify", str(path)]) == 1
    assert " is missing, which Megatron writes last" in capsys.readouterr().out


def _make_state() -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}


@table("how", ["lost", "cut", "lost, of a store", "lost, with hashes", "lost, beside others"])
def test_a_lost_metadata_json_is_written_back(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error, ls and prune name one call, which writes the very bytes and says so; after it all is intact."""
    place = f"local://{tmp_path}/run" if "store" in how else f"{tmp_path}/run"
    for step in (1, 2):
        dist_checkpointing.save(
            {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))},
            f"{place}/step-{step}",
            verify_integrity="hashes" in how,
        )
    marker = tmp_path / "run" / "step-1" / "metadata.json"
    written = marker.read_bytes()
    damage(marker, "cut by a byte" if how == "cut" else "missing")
    for verb in ("ls", "verify", "prune --damaged --dry-run --older-than 0"):
        main([verb.split()[0], place, *verb.split()[1:]])
        assert f"`shardckpt verify {place}/step-1 --repair`" in capsys.readouterr().out, verb
    assert main(["verify", place if "others" in how else f"{place}/step-1", "--repair"]) == 0
    said = capsys.readouterr().out
    assert "metadata.json" in said
    assert "was lost or damaged, and was written back as shardckpt.json says" in said
    assert "intact" in said
    assert "without digests" not in said
    assert marker.read_bytes() == written
    assert main(["verify", f"{place}/step-1", "--repair"]) == 0
    assert "every byte" in capsys.readouterr().out
    assert sorted(path.name for path in marker.parent.iterdir()) == sorted(
        path.name for path in (tmp_path / "run" / "step-2").iterdir()
    )


@table("fault", ["a flipped byte", "a cut record", "another save's", "another hash", "being overwritten"])
def test_what_is_damaged_is_not_repaired(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where something does not match its digest, or nothing says what metadata.json had, none is written."""
    step = tmp_path / "step-1"
    place = f"local://{step}" if fault == "being overwritten" else str(step)
    dist_checkpointing.save(_make_state(), place, verify_integrity=fault == "another hash")
    before = '{"sharded_backend": "zarr", "sharded_backend_version": 1}' if fault == "another save's" else "{"
    (step / "metadata.json").write_text(before)
    if fault == "a flipped byte":
        damage(step / "__0_0.distcp", "zeros")
    elif fault == "a cut record":
        damage(step / "shardckpt.json", "cut by a byte")
    elif fault == "another hash":
        found = json.loads((step / "integrity.json").read_text())
        found["files"]["metadata.json"] = "0" * 64
        (step / "integrity.json").write_text(json.dumps(found))
    elif fault == "being overwritten":
        (step / f"generation-{'5' * 32}").mkdir()
        (step / f"generation-{'5' * 32}" / "common.pt").write_bytes(b"new")
    assert main(["verify", place, "--repair"]) == 1
    assert "written back as" not in capsys.readouterr().out
    assert (step / "metadata.json").read_text() == before


def test_a_file_with_the_suffix_of_a_checkpoint_is_not_skipped(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read among good checkpoints is an error by its name, as it is alone: a script sees it by 2."""
    (tmp_path / "model.pt").write_bytes(b"garbage" * 100)
    assert main(["verify", str(tmp_path)]) == main(["verify", str(tmp_path / "model.pt")]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("model.pt is of no format that is known here") == 2
    assert "skipped" not in shown.out


def test_verify_of_many(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder stands for the checkpoints in it; bad files are listed below its path; the exit code is the highest."""
    plain = save_plain_dcp(tmp_path)
    (tmp_path / "logs").mkdir()
    assert main(["verify", str(tmp_path), str(checkpoint)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "2 checkpoints: 2 intact (1 without digests)",
        "skipped: 1: logs (an empty directory)",
    ]
    damage(checkpoint / "common.pt", "zeros")
    assert main(["verify", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(f"{checkpoint}: damaged: 1 of ")
    assert [line.split()[0] for line in shown.splitlines()[3:4]] == ["common.pt"]
    assert "__0_0.distcp" not in shown
    assert main(["verify", str(plain), str(checkpoint), str(tmp_path / "nowhere"), "--json"]) == 2
    shown = capsys.readouterr()
    whole, damaged, absent = json.loads(shown.out)
    assert [each["exit_code"] for each in (whole, damaged, absent)] == [0, 1, 2]
    assert [each["state"] for each in (whole, damaged, absent)] == ["intact", "damaged", "unreadable"]
    assert [file["name"] for file in damaged["files"] if file["fault"]] == ["common.pt"]
    assert absent["error"] in shown.err


def test_what_is_here_is_named_without_a_path(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``verify .`` names the checkpoints in the working directory as ``ls`` does, not as ``./name``."""
    save_plain_dcp(checkpoint.parent)
    monkeypatch.chdir(checkpoint.parent)
    for options in ([], ["-r"]):
        assert main(["verify", ".", *options]) == 0
        rows = capsys.readouterr().out.splitlines()[2:4]
        assert {row.split()[0] for row in rows} == {each.name for each in checkpoint.parent.iterdir()}


def test_verify_says_in_its_answer_why_there_are_no_files(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row of the table has the reason; of one path, too, which a log of standard output alone must show."""
    half, orbax = tmp_path / "step-2", tmp_path / "orbax"
    for path in (half, orbax):
        path.mkdir()
    (half / "__0_0.distcp").write_bytes((checkpoint / "__0_0.distcp").read_bytes())
    (orbax / "_CHECKPOINT_METADATA").write_bytes(b"")
    assert main(["verify", str(checkpoint), str(half), str(orbax)]) == 2
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert (
        rows[str(half)].partition("  -  ")[2].lstrip(" -").startswith("incomplete: not a distributed checkpoint, or ")
    )
    assert "  unreadable: a checkpoint of Orbax (JAX), which is not read here: " in rows[str(orbax)]
    assert main(["verify", str(half)]) == 1
    shown = capsys.readouterr()
    assert (shown.out.startswith(f"{half}: incomplete: not a distributed checkpoint, or "), shown.err) == (True, "")


def test_the_row_of_what_nothing_reads_is_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the reason as ``ls`` has it; what each reader says is on standard error alone."""
    newer = checkpoint.with_name("newer")
    shutil.copytree(checkpoint, newer)
    (newer / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 99}')
    (newer / "shardckpt.json").unlink()
    assert main(["verify", str(newer.parent)]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("newer than the installed readers") == 1
    assert "does not say which release reads it\n" in shown.out
    assert shown.err.count("\n  installed readers: ") == 1


def test_verify_reports_its_progress(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of ``verify`` count up to all bytes of the files; the command's own observer is gone afterwards."""
    hook = get_plugin_manager().hook.shardckpt_event
    with registered(Recorder()) as recorder:
        before = len(hook.get_hookimpls())
        assert main(["verify", str(checkpoint)]) == 0
        assert len(hook.get_hookimpls()) == before
    seen = recorder.events
    record = json.loads((checkpoint / "shardckpt.json").read_text())
    total = sum(file["size"] for file in record["files"])
    assert {(event.operation, event.state, event.total) for event in seen} == {("verify", "progress", total)}
    assert [seen[0].nbytes, seen[-1].nbytes] == [0, total]


def test_verify_reports_its_progress_without_digests(tmp_path: Path) -> None:
    """Bytes that are compared with a CRC-32 are counted as they are read, up to the size of all files."""
    path = save_plain_dcp(tmp_path)
    with registered(Recorder()) as recorder:
        assert main(["verify", str(path)]) == 0
    seen = recorder.events
    total = sum(file.stat().st_size for file in path.iterdir())
    assert {(event.operation, event.state, event.total) for event in seen} == {("verify", "progress", total)}
    assert [seen[0].nbytes, seen[-1].nbytes] == [0, total]


def test_verify_says_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Help has all three."""
    with pytest.raises(SystemExit, match="0"):
        main(["verify", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {code}  " in out for code in range(3))


@table(
    "lost, word", [(".metadata", "damaged"), ("metadata.json", "damaged"), (".metadata metadata.json", "incomplete")]
)
def test_three_verbs_say_one_word_of_a_lost_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str, word: str
) -> None:
    """Of a checkpoint as Megatron and plain DCP write it, `ls`, `verify` and `inspect` say the same, for one reason."""
    step = tmp_path / "step-1"
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, step, ("torch_dist", 1))
    for name in ("shardckpt.json", "shardckpt-index.safetensors", *lost.split()):
        (step / name).unlink()
    listed = list_checkpoints(step)
    assert [each.state for each in listed] == [word]
    codes = {verb: main([verb, str(step)]) for verb in ("verify", "inspect")}
    shown = capsys.readouterr()
    assert codes == {"verify": 1, "inspect": 1 if lost == "metadata.json" else 2}
    reason = listed[0].reason.removeprefix("is ")
    assert f"{step}: {word}: " in shown.out
    said = next(line for line in f"{shown.out}{shown.err}".splitlines()[::-1] if reason in line)
    assert f"{word}: " in said.partition(reason)[0]


def test_one_checkpoint_stops_no_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickle that names a class which no reader takes is one row: the others are verified, and all are told."""
    for step in (1, 2):
        dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    flip(tmp_path / "step-1" / ".metadata", b"TensorProperties")
    for paths in ([str(tmp_path)], [str(tmp_path / "step-1")], ["-r", str(tmp_path), str(tmp_path / "step-2")]):
        assert main(["verify", *paths]) == 2
        said = capsys.readouterr()
        assert "TypeError" not in said.err
        assert "UensorProperties" in said.err + said.out
        assert len(paths) == 1 or "1 intact" in said.out


def test_json_says_what_intact_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint without digests is intact as far as its CRC-32 or structure goes, and the document says which."""
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, tmp_path / "c")
    assert main(["verify", *(str(tmp_path / name) for name in ("a.pt", "a.safetensors", "c", "none")), "--json"]) == 2
    rows = {row["checkpoint"]: row["checked"] for row in json.loads(capsys.readouterr().out)}
    assert [*rows.values()] == ["crc32", "structure", "digests", "nothing"]


def test_what_cannot_be_marked_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --mark a folder of the Hub, or a file, is read as without: it is said that it has no mark."""
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert main(["convert", str(tmp_path / "w.pt"), str(tmp_path / "hf"), "--to", "hf"]) == 0
    capsys.readouterr()
    for name in ("hf", "w.pt"):
        assert main(["verify", str(tmp_path / name), "--mark"]) == 2  # for nothing else was to be marked
        said = capsys.readouterr().out
        assert "intact by " in said
        assert "not marked" in said
        assert "a copy of an intact one by `shardckpt convert` can be marked" in said
    folders.save(tmp_path / "steps", 1)
    assert main(["verify", str(tmp_path / "w.pt"), str(tmp_path / "steps" / "step-1"), "--mark"]) == 0
    assert main(["verify", str(tmp_path / "none"), "--mark"]) == 2


def test_the_last_lines_count_verdicts_and_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Intact ones are counted first, each checkpoint once; a reason for no mark is said once, with all names."""
    folders.save_all(tmp_path, 1, 2, 3)
    folders.damage(tmp_path / "step-1")
    folders.lose_marker(tmp_path / "step-2")
    for name in "ab":
        save_plain_dcp(tmp_path / name)
    assert main(["verify", "-r", str(tmp_path), "--mark"]) == 1
    counts, marked, unmarked, advice = capsys.readouterr().out.splitlines()[-4:]
    assert counts == "5 checkpoints: 3 intact (2 without digests), 1 damaged, 1 incomplete"
    assert marked == "marked: 1 verified, 1 failed"
    names = ", ".join(str(next((tmp_path / name).iterdir())) for name in "ab")
    assert unmarked.startswith(f"not marked: 2: {names}: it has no record of a save of ours (")
    assert advice == "a copy of an intact one by `shardckpt convert` can be marked"


def test_a_lost_record_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The row of the file has it; standard error is empty."""
    folders.save(tmp_path, 1)
    (tmp_path / "step-1" / "shardckpt.json").unlink()
    assert main(["verify", str(tmp_path / "step-1")]) == 1
    assert "shardckpt.json, which has the digests, is missing" in capsys.readouterr().out
    assert caplog.text == ""


def test_ls_says_the_fault_of_a_failed_step_once(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a step that is cut and marked as failed for it, the cell has the verdict, and the fault once."""
    damage(checkpoint / "__0_0.distcp", "cut to a half")
    assert main(["verify", "--mark", str(checkpoint)]) == 1
    capsys.readouterr()
    assert main(["ls", str(checkpoint.parent)]) == 1
    said = capsys.readouterr().out
    assert "marked failed on " in said
    assert said.count("were written") == 1
