"""``shardckpt prune --damaged``: damaged steps, and those whose save did not end."""

from __future__ import annotations

import json
import shlex
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardckpt.cli import main
from shardckpt.errors import StorageError
from shardckpt.maintenance import mending
from shardckpt.manager import garbage_collection, lease_step, prune_steps
from tests.cli.checkpoints import damage
from tests.commit import owners
from tests.damage import flip
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clock import Clock


def _prune(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict[str, str]:
    """What became of each step, by the name of its directory."""
    assert main(["prune", *map(str, arguments), "--damaged", "--json"]) == code
    steps = json.loads(capsys.readouterr().out)["steps"]
    return {each["path"].rpartition("/")[2]: each["error"] or each["kept"] or each["fault"] for each in steps}


def _make(folder: Path, name: str = "step-{}") -> None:
    """Five steps, of which the second is cut, and the newest is a save that did not end."""
    folders.save_all(folder, 1, 2, 3, 4, 5, name=name)
    folders.damage(folder / name.format(2))
    folders.lose_marker(folder / name.format(5))


def test_the_running_save_of_another_host_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--older-than 0 removes damaged steps at once, and not what a process that cannot be seen from here has begun."""
    _make(tmp_path)
    begun = owners.leave(tmp_path / "step-6", owners.elsewhere())
    assert _prune(capsys, tmp_path, "--older-than", 0)["step-2"].startswith("damaged: ")
    assert begun.exists()
    assert not (tmp_path / "step-2").exists()


@table("name", ["step-{}", "ckpt_{:06}", "epoch_{}", "iter_{:07}", "step_{}"])
def test_damaged_steps_go_whatever_their_names(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No policy is needed; a dry run says the same and removes nothing; the rows say what was wrong."""
    _make(tmp_path, name)
    before = folders.names_in(tmp_path)
    for dry_run in (["--dry-run"], []):
        assert folders.names_in(tmp_path) == before
        found = _prune(capsys, tmp_path, "--older-than", 0, *dry_run)
        assert [found[name.format(step)] for step in (1, 3, 4)] == ["it has all its files, by their sizes"] * 3
        assert found[name.format(2)].startswith("damaged: __0_0.distcp has ")
        assert found[name.format(5)].startswith("incomplete: ")
    assert folders.names_in(tmp_path) == {name.format(step) for step in (1, 3, 4)}


def test_what_may_still_be_written_stays(tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Another library's save, or a copy, looks like a dead one: within an hour of its last write nothing goes."""
    _make(tmp_path)
    clock.advance(hours=0.9)
    found = _prune(capsys, tmp_path)
    assert found["step-5"] == (
        "it was written to 54 min ago, and a save or a copy may go on: it is removed after 1 h, or at once by "
        "--older-than 0"
    )
    assert "54 min ago" in found["step-2"]
    clock.advance(hours=0.2)
    _prune(capsys, tmp_path)
    assert folders.names_in(tmp_path) == {"step-1", "step-3", "step-4"}


def test_policies_do_not_count_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Together both apply: of the sound ones the latest stays, and --keep-step keeps a damaged one, too."""
    _make(tmp_path)
    found = _prune(capsys, tmp_path, "--keep-latest", 1, "--keep-step", 2, "--older-than", 0)
    assert found["step-2"] == "--keep-step names it"
    assert folders.names_in(tmp_path) == {"step-2", "step-4"}


def test_verify_finds_flipped_bits_in_all_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --verify all steps are read, and those that fail go, as a dry run says; what is marked is not read again."""
    folders.save_all(tmp_path, 1, 2, 3)
    for step in (1, 3):
        data = tmp_path / f"step-{step}" / "__0_0.distcp"
        data.write_bytes(bytes(data.stat().st_size))
    assert _prune(capsys, tmp_path)["step-1"] == "it has all its files, by their sizes"
    dry = _prune(capsys, tmp_path, "--verify", "--dry-run", code=1)
    assert dry["step-3"].startswith("marked failed on ")
    assert folders.names_in(tmp_path) == {"step-1", "step-2", "step-3"}  # a dry run writes nothing
    assert _prune(capsys, tmp_path, "--verify", code=1) == dry
    assert folders.names_in(tmp_path) == {"step-2", ".shardckpt-marks"}
    assert main(["prune", str(tmp_path), "--damaged", "--verify"]) == 0
    assert f"{tmp_path}/step-2  marked as verified" in capsys.readouterr().out


def test_what_is_held_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pin, a lease and a link keep a damaged step, and its row says which; a link itself is no step to remove."""
    folders.save_all(tmp_path, 1, 2, 3, 4)
    assert main(["pin", str(tmp_path), "1", "--label", "paper"]) == 0
    with lease_step(tmp_path, 2, holder="a reader"):
        for step in (1, 2, 3):
            folders.damage(tmp_path / f"step-{step}")
        (tmp_path / "best").symlink_to("step-3")
        (tmp_path / "step-9").symlink_to("step-3")
        capsys.readouterr()
        for dry_run in (["--dry-run"], []):
            found = _prune(capsys, tmp_path, "--older-than", 0, *dry_run)
            assert found["step-1"] == "pinned as 'paper'"
            assert found["step-2"].startswith("leased by a reader")
            assert "best is a link to it" in found["step-3"]
    assert {"step-1", "step-2", "step-3", "step-4", "step-9"} <= folders.names_in(tmp_path)


def test_the_last_steps_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no step can be loaded, all stay: what is left of them may be all that there is."""
    folders.save_all(tmp_path, 1, 2)
    for step in (1, 2):
        folders.damage(tmp_path / f"step-{step}")
    found = _prune(capsys, tmp_path, "--older-than", 0)
    assert all("no step that is whole is left without it" in kept for kept in found.values())
    assert folders.names_in(tmp_path) == {"step-1", "step-2"}


def test_a_damaged_record_is_mended_as_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The row of a step with a damaged record says a way, and this way ends with a whole checkpoint."""
    folders.save_all(tmp_path, 1, 2)
    step, new = tmp_path / "step-1", str(tmp_path / "new")
    (step / "shardckpt.json").write_text("{")
    way = f"move it away: then `shardckpt convert {step} NEW` writes the rest anew"
    assert way in _prune(capsys, tmp_path, "--older-than", 0)["step-1"]
    assert "shardckpt.json is damaged: only" in caplog.text
    assert main(["convert", str(step), new]) == 2
    assert way in capsys.readouterr().err
    (step / "shardckpt.json").unlink()
    assert main(["convert", str(step), new]) == 0
    assert main(["verify", new]) == 0


def test_a_step_that_is_too_new_and_was_edited_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its row says to upgrade; no row says that --damaged removes it, or that a conversion reads it."""
    folders.save_all(tmp_path, 1, 2)
    for name, key in (("metadata.json", "sharded_backend_version"), ("shardckpt.json", "version")):
        file = tmp_path / "step-2" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: 99}))
    kept = _prune(capsys, tmp_path, "--older-than", 0)["step-2"]
    assert "of version 99, newer than the installed readers" in kept
    assert "convert" not in kept
    assert main(["prune", str(tmp_path), "--keep-latest", "1", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)["steps"][1]["kept"]
    assert kept.endswith("Restore it from a copy; --damaged says whether it may go")
    assert folders.names_in(tmp_path) == {"step-1", "step-2"}


@table("lost", ["metadata.json", "shardckpt.json", "metadata.json cut", "shardckpt.json cut"])
def test_what_can_be_mended_stays(tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A step whose data is all there, and of which a description is lost or damaged, is kept with the reason."""
    folders.save_all(tmp_path, 1, 2)
    name, _, is_cut = lost.partition(" ")
    if is_cut:
        (tmp_path / "step-1" / name).write_text("{")
    else:
        (tmp_path / "step-1" / name).unlink()
    kept = _prune(capsys, tmp_path, "--older-than", 0)["step-1"]
    way = f"`shardckpt convert {tmp_path}/step-1 NEW` writes the checkpoint anew, or says what it needs"
    way += "; else remove it by hand"
    known = "by the sizes of its files" + (
        f", and no digest says whether its values are as written: {way}" * (name == "shardckpt.json")
    )
    assert kept.startswith(f"the data is all there, {known}; damaged: ")
    assert (f"`shardckpt verify {tmp_path}/step-1 --repair` writes it back" in kept) == (name == "metadata.json")
    assert name in kept
    damage(tmp_path / "step-1" / "__0_0.distcp", "cut to a half")
    assert _prune(capsys, tmp_path, "--older-than", 0)["step-1"].startswith("damaged: ")
    assert folders.names_in(tmp_path) == {"step-2"}


@table(
    "lost",
    [".metadata", "tensors.fingerprints", ".metadata cut", ".metadata metadata.json", "shardckpt-index.safetensors"],
)
def test_what_is_read_without_a_file_stays(tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that lacks only what no load reads is kept, and the call that the row names writes it anew, whole."""
    folders.save_all(tmp_path, 0, 2)
    step, new = tmp_path / "step-1", tmp_path / "new"
    assert main(["convert", str(tmp_path / "step-0"), str(tmp_path / "st"), "--to", "safetensors"]) == 0
    assert main(["convert", str(tmp_path / "st"), str(step), "--to", "torch_dist"]) == 0  # with fingerprints
    names = lost.removesuffix(" cut").split()
    for name in names:
        damage(step / name, "cut to a half" if lost.endswith(" cut") else "missing")
    capsys.readouterr()
    kept = _prune(capsys, tmp_path, "--older-than", 0)["step-1"]
    option = " --skip-damaged" if "metadata.json" in names else ""
    assert "the data is all there, by the sizes of its files: " in kept
    assert f": `shardckpt convert {step} NEW{option}` writes the checkpoint anew" in kept
    assert main(["convert", str(step), str(new), *option.split()]) == 0
    assert main(["diff", str(tmp_path / "step-0"), str(new)]) == 0
    damage(step / "common.pt", "cut to a half")
    capsys.readouterr()
    assert _prune(capsys, tmp_path, "--older-than", 0)["step-1"].startswith("damaged: ")


def test_a_mark_hides_no_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that is marked for a file that no load reads stays, and the call of its row, with blanks, writes it anew.

    One that is marked for its data goes.
    """
    run, new = tmp_path / "a run", tmp_path / "new"
    folders.save_all(run, 1, 2, 3)
    source = shutil.copytree(run / "step-1", tmp_path / "source")
    flip(run / "step-1" / ".metadata")
    flip(run / "step-2" / "__0_0.distcp")
    assert main(["verify", str(run), "--mark"]) == 1
    capsys.readouterr()
    found = _prune(capsys, run, "--older-than", 0)
    call = f"`shardckpt convert '{run}/step-1' NEW --skip-damaged`"
    assert found["step-1"].startswith(f"the data is all there, as it was written: {call} writes the checkpoint anew")
    assert found["step-2"].startswith("marked failed on ")
    assert folders.names_in(run) >= {"step-1", "step-3"}
    assert not (run / "step-2").exists()
    (words,) = [shlex.split(part) for part in found["step-1"].split("`") if part.startswith("shardckpt ")]
    assert main([str(new) if word == "NEW" else word for word in words[1:]]) == 0
    assert main(["diff", str(source), str(new)]) == 0


@table("lost", ["", "index.safetensors", "common.safetensors", "rank_0_0.safetensors cut"])
def test_a_step_without_its_json_files_stays(tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a copy has left both JSON files out, and nothing else, the step stays, and the call that it names reads it.

    Where the index, the common state or data is missing or short, it is a save that did not end.
    """
    folders.save_all(tmp_path / "run", 0, 2)
    source, step, new = tmp_path / "run" / "step-0", tmp_path / "run" / "step-1", str(tmp_path / "new")
    assert main(["convert", str(source), str(step), "--to", "safetensors"]) == 0
    for path in step.glob("*.json"):
        path.unlink()
    if lost:
        damage(step / lost.removesuffix(" cut"), "cut by a byte" if lost.endswith(" cut") else "missing")
    capsys.readouterr()
    kept = _prune(capsys, tmp_path / "run", "--older-than", 0)["step-1"]
    assert step.exists() is not bool(lost)
    if lost:
        assert kept.startswith("incomplete: ")
        return
    assert kept.startswith("the data is all there, by the sizes of its files, and no digest says whether its values")
    assert f": `shardckpt convert {step} NEW --skip-damaged` writes" in kept
    assert main(["convert", str(step), new, "--skip-damaged"]) == 0
    assert main(["diff", str(source), new]) == 0


def test_what_cannot_be_read_now_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk or the store does not answer, nobody can say whether a step can be mended: it is not removed."""
    folders.save_all(tmp_path, 1, 2)
    folders.damage(tmp_path / "step-1")

    def fail(*_: object) -> None:
        raise StorageError("the store does not answer")

    monkeypatch.setattr(mending, "find_incomplete_files", fail)
    kept = _prune(capsys, tmp_path, "--older-than", 0)["step-1"]
    assert kept.startswith("the rest of it cannot be read now: the store does not answer; damaged: ")


def test_what_no_save_wrote_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of pictures by a step's name, an empty one and whole checkpoints of others' formats are no damage."""
    folders.save_all(tmp_path, 1, name="epoch_{}")
    (tmp_path / "epoch_2").mkdir()
    (tmp_path / "epoch_2" / "sample.png").write_text("a picture")
    (tmp_path / "epoch_3").mkdir()
    (tmp_path / "epoch_4").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "epoch_4" / "pytorch_model.bin")
    folders.save_all(tmp_path, 5, name="epoch_{}")
    folders.say_backend(tmp_path / "epoch_5", "nobodys", 1)
    found = _prune(capsys, tmp_path, "--older-than", 0)
    assert found["epoch_2"] == "nothing in it shows that a save wrote it: remove it by hand"
    assert folders.names_in(tmp_path) == {f"epoch_{number}" for number in range(1, 6)}


def test_other_libraries_steps_go_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory of plain DCP without its index, or without a data file, is removed."""
    for step in (1, 2, 3):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / f"iter_{step:07}", no_dist=True)
    (tmp_path / "iter_0000001" / ".metadata").unlink()
    next((tmp_path / "iter_0000002").glob("*.distcp")).unlink()
    _prune(capsys, tmp_path, "--older-than", 0)
    assert folders.names_in(tmp_path) == {"iter_0000003"}


def test_whole_steps_of_any_format_count_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut folder of the Hub's layout goes where a whole one is beside it, which no manager's load would take."""
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    damage(tmp_path / "checkpoint-2" / "model.safetensors", "cut by a byte")
    found = _prune(capsys, tmp_path, "--older-than", 0)
    assert found["checkpoint-1"] == "it has all its files, by their sizes"
    assert folders.names_in(tmp_path) == {"checkpoint-1"}


@table("change", ["saved anew", "the other is gone"])
def test_a_step_is_looked_at_again(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was chosen stays if it is sound by the time of its removal, or if the one in its place is not."""
    _make(tmp_path)
    remove = garbage_collection._try_to_remove

    def change_first(*arguments: Any) -> str | None:
        if change == "saved anew":
            folders.save(tmp_path, 2, overwrite=True)
        else:
            folders.damage(tmp_path / "step-4")
        return remove(*arguments)

    monkeypatch.setattr(garbage_collection, "_try_to_remove", change_first)
    kept = {each.step: each.kept for each in prune_steps(tmp_path, [], damaged=True, older_than=0)}
    assert kept[2] == (
        "another process has removed it, or saves it anew"
        if change == "saved anew"
        else "since it was chosen, step 4, which was to stay, was removed or damaged"
    )
    assert "step-2" in folders.names_in(tmp_path)


def test_damaged_steps_of_a_store_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a store does not say when objects were written, --older-than 0 is needed, and the row says so."""
    url = f"local://{tmp_path}/run"
    for step in (1, 2):
        folders.save(url, step)
    folders.damage(tmp_path / "run" / "step-1")
    found = _prune(capsys, url)
    assert "--older-than" in found["step-1"]
    assert _prune(capsys, url, "--older-than", 0)["step-1"].startswith("damaged: ")
    assert not (tmp_path / "run" / "step-1" / "metadata.json").exists()
    assert folders.is_intact(url + "/step-2", 2)


@pytest.mark.parametrize("place", ["{}", "local://{}"])
def test_what_goes_beside_steps_is_said(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a killed save has left goes with the steps that no policy keeps: once in the answer, in the dry run, too."""
    url = place.format(tmp_path / "run")
    for step in (1, 2):
        folders.save(url, step)
    if place == "{}":
        owners.leave(tmp_path / "run" / "step-3", owners.dead())
    else:
        (tmp_path / "run" / "step-3").mkdir()
        said = f"save {'5' * 32} of process 1 on host, begun 2026-01-01 00:00:00 UTC\nowner {owners.dead().text}\n"
        (tmp_path / "run" / "step-3" / f".shardckpt-uploading-{'5' * 32}").write_text(said)
    answers = []
    for options in (["--dry-run"], []):
        assert main(["prune", url, "--keep-latest", "1", "--json", *options]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    dry, done = answers
    assert [each["path"].rpartition("/")[2] for each in done["steps"]] == ["step-1", "step-2"]
    assert len(done["leftovers"]) == 1
    assert done == dry | {"dry_run": False}


def test_damaged_overwrites_of_a_store_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An overwrite at a URL is below it: one that lacks only its record stays, one that lacks data goes."""
    url = f"local://{tmp_path}/run"
    for step in (1, 2, 1):
        folders.save(url, step, overwrite=True)
    (generation,) = (path for path in (tmp_path / "run" / "step-1").iterdir() if path.is_dir())
    (generation / "shardckpt.json").unlink()
    assert _prune(capsys, url, "--older-than", 0)["step-1"].startswith("the data is all there, by the sizes")
    damage(generation / "__0_0.distcp", "missing")
    assert _prune(capsys, url, "--older-than", 0)["step-1"].startswith("damaged: ")
    assert not [path for path in (tmp_path / "run").rglob("step-1/**/*") if path.is_file()]


@table("option", ["--names=step-", "--keep-step=1", "--verify"])
def test_options_for_steps_go_with_damaged(tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They need something that chooses steps, and --damaged does; without, the error says what is missing."""
    folders.save_all(tmp_path, 1, 2)
    with pytest.raises(SystemExit, match="2"):
        main(["prune", str(tmp_path), option])
    assert "alone chooses no step to remove" in capsys.readouterr().err
    assert set(_prune(capsys, tmp_path, option)) == {"step-1", "step-2"}


def test_ls_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder with damaged steps; not of a sound one, of the damaged step itself, or of what is deeper."""
    _make(tmp_path / "run")
    command = f"2 steps damaged, incomplete or marked as failed: `shardckpt prune {tmp_path}/run --damaged --dry-run`"
    assert main(["ls", f"{tmp_path}/run"]) == 1
    assert command in capsys.readouterr().out
    for arguments in (["-r", str(tmp_path)], [f"{tmp_path}/run/step-2"], [f"{tmp_path}/run/step-5"]):
        assert main(["ls", *arguments]) == 1
        assert "prune" not in capsys.readouterr().out
    _prune(capsys, f"{tmp_path}/run", "--older-than", 0)
    assert main(["ls", f"{tmp_path}/run"]) == 0
    assert "prune" not in capsys.readouterr().out
