"""Folders of runs, loose files and folders of other formats: each is listed, verified, or counted as skipped."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.commit import leftovers
from shardckpt.mapping import ShardedTensor
from shardckpt.storage.places import list_names
from tests.commit import owners
from tests.damage import flip
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What is a checkpoint in the folder, at any depth.
DEEP = {
    *(f"team/run-{run}/step-{step}" for run in ("a", "b") for step in (1, 2)),
    *("team/run-b/last.ckpt", "team/hub", "bin", "lightning/epoch=3-step=100.ckpt"),
    *("plain", "loose.pt", "weights.safetensors", "shards", "legacy/iter_0000100"),
}


def _save(path: Path | str) -> None:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, path)


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A folder with checkpoints of many kinds, some in folders, and with what is none."""
    tensors = {"w": torch.ones(3)}
    for run in ("a", "b"):
        for step in (1, 2):
            (tmp_path / "team" / f"run-{run}").mkdir(parents=True, exist_ok=True)
            _save(tmp_path / "team" / f"run-{run}" / f"step-{step}")
    for folder in ("team/hub", "bin", "lightning", "shards", "legacy/iter_0000100/mp_rank_00", "empty", "logs"):
        (tmp_path / folder).mkdir(parents=True)
    save_file(tensors, tmp_path / "team" / "hub" / "model.safetensors")
    save_file(tensors, tmp_path / "weights.safetensors")
    for file in (
        *("team/run-b/last.ckpt", "bin/pytorch_model.bin", "lightning/epoch=3-step=100.ckpt", "loose.pt"),
        *("shards/pytorch_model-00001-of-00001.bin", "legacy/iter_0000100/mp_rank_00/model_optim_rng.pt"),
    ):
        torch.save(tensors, tmp_path / file)
    (tmp_path / "shards" / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}})
    )
    (tmp_path / "logs" / "train.log").write_text("loss")
    dcp.save(tensors, checkpoint_id=tmp_path / "plain", no_dist=True)
    (tmp_path / "team" / "loop").symlink_to("loop")
    return tmp_path


def test_ls_counts_what_is_in_folders(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of checkpoints says how many it has, and the last lines say how to list them."""
    main(["ls", str(zoo)])
    out = capsys.readouterr().out
    said = {line.split()[0]: line for line in out.splitlines()}
    assert said["team"].endswith("a folder of 6 checkpoints")
    assert said["bin"].endswith("whole")
    assert said["shards"].endswith("whole")
    assert said["empty"].endswith("no checkpoint: an empty directory")
    assert said["loose.pt"].endswith("whole")
    assert f"8 more in 3 folders, by the names of files: `shardckpt ls -r {zoo}` lists them" in out
    main(["ls", str(zoo), "--json"])
    assert {each["name"]: each["inside"] for each in json.loads(capsys.readouterr().out) if each["inside"]} == {
        "team": 6,
        "lightning": 1,
        "legacy": 1,
    }


def test_ls_lists_folders_in_folders(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With -r each checkpoint has a row, by its path; the count of a folder is that of its rows."""
    assert main(["ls", "-r", str(zoo), "--json"]) == 1  # one is of a format that is not read
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found.keys() == DEEP | {"empty", "logs"}
    assert {name for name, each in found.items() if each["state"] == "unreadable"} == {"legacy/iter_0000100"}
    assert {each["state"] for name, each in found.items() if name.startswith(("team", "bin", "shards"))} == {"whole"}
    assert all(each["path"] == f"{zoo}/{name}" for name, each in found.items())


def test_leftovers_in_folders_are_said(zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a killed save left in a folder of checkpoints is said by ls, ls -r and prune of what is around it."""
    owners.leave(zoo / "team" / "run-a" / "step-3", owners.dead())
    advice = f"`shardckpt prune {zoo}/team/run-a --dry-run` names them"
    for call in (["ls", zoo / "team"], ["ls", "-r", zoo], ["ls", zoo / "team" / "run-a"], ["prune", zoo / "team"]):
        main([*map(str, call)])
        said = [line for line in capsys.readouterr().out.splitlines() if "1 hidden directory of" in line]
        assert len(said) == 1, call
        assert said[0].endswith(advice)


@table("options", [[], ["-r"]])
def test_leftovers_are_looked_for_once_in_each_folder(
    zoo: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Next to a thousand runs are not a million names to read."""
    listed: list[Path] = []

    def list_once(place: Path) -> list[str]:
        listed.append(place)
        return list_names(place)

    monkeypatch.setattr(leftovers, "list_names", list_once)
    main(["ls", *options, str(zoo / "team")])
    assert len(listed) == len({*listed}) > 1


def test_verify_counts_what_it_skips(
    zoo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no checkpoint itself is counted and named; with -r it is verified. A folder of runs alone says so."""
    assert main(["verify", str(zoo)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("skipped: 5: empty (an empty directory), ")
    assert "team (a folder of 6 checkpoints)" in last
    assert last.endswith("; -r verifies the checkpoints in folders")
    assert main(["verify", "-r", str(zoo), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert {str(Path(each["checkpoint"]).relative_to(zoo)) for each in found if not each["skipped"]} == DEEP
    assert {each["checkpoint"]: each["skipped"] for each in found if each["skipped"]} == {
        str(zoo / "empty"): "an empty directory",
        str(zoo / "logs"): "it has train.log",
    }
    monkeypatch.chdir(zoo)  # what is skipped is named as what is not: by the path that was given
    assert main(["verify", ".", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"logs", "team"} <= {each["checkpoint"] for each in found if each["skipped"]}
    assert main(["verify", str(zoo / "team" / "run-a")]) == 0
    assert main(["verify", str(zoo / "legacy")]) == 2
    assert main(["verify", "-r", str(zoo / "team")]) == 0
    capsys.readouterr()
    (zoo / "plain").rename(zoo / "team" / "run-a" / "plain")
    (zoo / "team" / "hub").rename(zoo / "hub")
    assert main(["verify", str(zoo / "team")]) == 2
    said = "team has 6 checkpoints in its folders run-a, run-b, and none itself: give one of them, or -r for all"
    assert said in capsys.readouterr().err
    assert main(["inspect", str(zoo / "team")]) == 2
    assert 'a folder of 6 checkpoints: give one, such as "run-b/last.ckpt"' in capsys.readouterr().err
    assert main(["prune", str(zoo / "team"), "--keep-latest", "1"]) == 2
    assert "checkpoints are in its folders run-a, run-b: give one of these" in capsys.readouterr().err


@pytest.fixture
def bucket() -> Iterator[str]:
    """A folder in memory, as of a bucket."""
    yield "memory://zoo/team"
    fsspec.filesystem("memory").store.clear()


def test_a_bucket_is_listed_and_verified_alike(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of runs on a store is no empty directory; its checkpoints are listed with -r; files are named."""
    for run in ("a", "b"):
        for step in (1, 2):
            _save(f"{bucket}/run-{run}/step-{step}")
    fsspec.filesystem("memory").pipe("/zoo/team/loose.pt", b"x" * 70)
    assert main(["ls", bucket]) == 0
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert said["run-a"].endswith("a folder of 2 checkpoints")
    assert said["loose.pt"].endswith("no checkpoint: a file on a store, where none is read: copy it to this machine")
    assert "4 checkpoints in 2 folders" in said["4"]
    assert main(["ls", "-r", bucket, "--json"]) == 0
    names = {each["name"] for each in json.loads(capsys.readouterr().out)}
    assert names == {"loose.pt", *(f"run-{run}/step-{step}" for run in ("a", "b") for step in (1, 2))}
    assert main(["verify", bucket]) == 2
    assert "4 checkpoints in its folders run-a, run-b, and none itself" in capsys.readouterr().err
    assert main(["verify", "-r", bucket]) == 0
    out = capsys.readouterr().out
    assert "4 checkpoints: 4 intact" in out
    assert "skipped: 1: loose.pt (a file on a store" in out


def test_the_calls_that_are_named_work_as_they_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ls, verify, prune, inspect and errors name between backquotes goes into a shell as it is, with blanks."""
    run = tmp_path / "a run's"
    folders.save_all(run, 1, 2, 3, 4)
    (run / "step-1" / "shardckpt-index.safetensors").unlink()
    (run / "step-2" / "metadata.json").unlink()
    flip(run / "step-3" / ".metadata")
    owners.leave(run / "step-9", owners.dead())
    for words in (["ls", run], ["verify", run], ["prune", run, "--damaged", "--dry-run"], ["inspect", run / "step-2"]):
        main([*map(str, words)])
    said = "".join(capsys.readouterr())
    calls = {tuple(shlex.split(call)[1:]) for call in said.split("`") if call.startswith("shardckpt ")}
    assert {call[0] for call in calls} == {"convert", "prune", "verify"}
    for number, call in enumerate(sorted(calls)):
        assert main([str(tmp_path / f"new-{number}") if word == "NEW" else word for word in call]) == 0, call
