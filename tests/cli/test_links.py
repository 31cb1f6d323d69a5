"""Links in a folder of checkpoints: what verbs call them, and where they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from shardckpt import ShardedTensor, dist_checkpointing
from shardckpt.cli import main
from shardckpt.engine.amounts import format_bytes
from shardckpt.errors import CheckpointingException
from shardckpt.manager import list_checkpoints, pin_step
from shardckpt.manager.listing import find_checkpoints
from tests.manager import folders

if TYPE_CHECKING:
    from pathlib import Path


def _save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}, path)


def test_a_link_has_a_name_of_its_own(tmp_path: Path) -> None:
    """A link is listed by its own name, and is verified by it if what it leads to is not in the folder itself.

    ``latest`` and ``best`` that lead to a step are no further rows: the step's says so.
    """
    runs = tmp_path / "runs"
    _save(runs / "step-1")
    _save(tmp_path / "elsewhere" / "release")
    (runs / "best").symlink_to(tmp_path / "elsewhere" / "release")
    (runs / "latest").symlink_to("step-1")
    (runs / "newest").symlink_to("step-1")
    assert {each.name: each.links for each in list_checkpoints(runs)} == {
        "step-1": ("latest",),
        "best": (),
        "newest": (),
    }
    assert sorted(find_checkpoints(str(runs)).paths) == [f"{runs}/best", f"{runs}/step-1"]


def test_what_links_lead_to_is_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``newest -> step-2`` has a row, and adds neither a checkpoint nor bytes to the sums."""
    for step in (1, 2):
        _save(tmp_path / f"step-{step}")
    main(["ls", str(tmp_path)])
    (sums,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("2 checkpoints, 2 whole, ")]
    (tmp_path / "newest").symlink_to("step-2")
    main(["ls", str(tmp_path)])
    out = capsys.readouterr().out
    assert "\nnewest " in out
    assert f"{sums}; 1 row of the same by another path" in out.splitlines()


def test_a_link_to_a_hidden_folder_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``step-1 -> .step-1.v2`` is a checkpoint for ``ls`` of the folder above: nothing else lists what is hidden."""
    _save(tmp_path / "runs" / ".step-1.v2")
    (tmp_path / "runs" / "step-1").symlink_to(".step-1.v2")
    main(["ls", str(tmp_path)])
    assert "a folder of 1 checkpoint" in capsys.readouterr().out


def test_the_cache_of_the_hub_is_listed(tmp_path: Path) -> None:
    """A model in the Hub's cache is a folder of links to files whose names are digests: ``ls -r`` finds it."""
    for name in ("a", "b"):
        blobs, snapshot = (tmp_path / f"models--org--{name}" / each for each in ("blobs", "snapshots/1f"))
        for folder in (blobs, snapshot):
            folder.mkdir(parents=True)
        save_file({"w": torch.ones(2)}, blobs / "5e")
        (blobs / "c0").write_text("{}")
        for file, digest in (("model.safetensors", "5e"), ("config.json", "c0")):
            (snapshot / file).symlink_to(f"../../blobs/{digest}")
    found = list_checkpoints(tmp_path, recursive=True)
    assert [(each.name, each.state) for each in found] == [
        (f"models--org--{name}/snapshots/1f", "whole") for name in ("a", "b")
    ]


def test_links_are_not_counted_from_above(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``ls`` of the folder above counts each checkpoint once; what a link leads out to counts there."""
    for step in (1, 2):
        _save(tmp_path / "runs" / f"step-{step}")
    _save(tmp_path / "elsewhere")
    for name, target in (("latest", "step-2"), ("best", "step-1"), ("base", "../elsewhere")):
        (tmp_path / "runs" / name).symlink_to(target)
    torch.save({"w": torch.ones(2)}, tmp_path / "runs" / "3.pt")
    (tmp_path / "runs" / "newest.pt").symlink_to("3.pt")
    main(["ls", str(tmp_path)])
    assert "a folder of 3 checkpoints" in capsys.readouterr().out
    (tmp_path / "elsewhere").rename(tmp_path / "runs" / "other")
    (tmp_path / "runs" / "base").unlink()
    main(["ls", str(tmp_path)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"4 checkpoints in 1 folder, by the names of files: `shardckpt ls -r {tmp_path}` lists them", (
        "and no word of 0 of them here"
    )
    main(["ls", str(tmp_path / "runs")])
    assert "\n4 checkpoints, 4 whole" in capsys.readouterr().out


def test_ls_and_ls_r_come_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ls counts in folders is what ls -r has rows of, each once, and the bytes on disk are the same, too."""
    for step in (1, 2):
        _save(tmp_path / "a" / "run" / f"step-{step}")
    torch.save([1], tmp_path / "a" / "list.pt")
    (tmp_path / "a" / "train.log").write_text("x" * 5000)
    (tmp_path / "b").mkdir()
    _save(tmp_path / "b" / "step-3")
    for name, target in (("run", "../a/run"), ("one", "../a/run/step-1"), ("list.pt", "../a/list.pt")):
        (tmp_path / "b" / name).symlink_to(target)
    (tmp_path / "all").symlink_to("a")
    main(["ls", str(tmp_path)])
    out = capsys.readouterr().out
    assert "\n4 checkpoints in 2 folders, by the names of files: " in out
    main(["ls", "-r", str(tmp_path)])
    out = capsys.readouterr().out
    assert "\n3 checkpoints, 3 whole, " in out
    assert "; 1 more by the names of files: no checkpoint" in out
    nbytes = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file() and not each.is_symlink())
    assert f"\non disk: {format_bytes(nbytes)}: " in out
    assert f", other files {format_bytes(5000)}" in out


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Verbs name the link that was given, or that a path goes through, and where it leads; ls -r counts such links."""
    _save(tmp_path / "run" / "step-1")
    for name, target in (("gone", "/nonexistent/step-9"), ("loop", "loop")):
        (tmp_path / "run" / name).symlink_to(target)
    for call in (
        "inspect gone",
        "verify gone",
        "ls gone",
        "inspect gone/step-1",
        "diff step-1 gone",
        "prune gone",
        "pin gone",
    ):
        verb, *paths = call.split()
        assert main([verb, *(f"{tmp_path}/run/{each}" for each in paths)]) == 2, call
        said = capsys.readouterr().err
        assert f"{tmp_path}/run/gone is a link that leads nowhere: to /nonexistent/step-9" in said, call
    assert main(["ls", "-r", str(tmp_path)]) == 0
    assert "\n2 links leading nowhere: run/gone, run/loop\n" in capsys.readouterr().out


def test_links_to_folders_are_followed_and_end(tmp_path: Path) -> None:
    """A recursive listing goes through a link to a folder of checkpoints, and not through one to a folder around it."""
    runs = tmp_path / "runs"
    _save(runs / "step-1")
    _save(tmp_path / "elsewhere" / "release")
    (runs / "more").symlink_to(tmp_path / "elsewhere")
    (runs / "self").symlink_to(".")
    (tmp_path / "elsewhere" / "back").symlink_to(runs)
    assert [each.name for each in list_checkpoints(runs, recursive=True)] == ["step-1", "more/release"]


def test_a_link_is_not_pinned(tmp_path: Path) -> None:
    """A pin of a link is an error that names the step: a removal of that step would not see the pin."""
    _save(tmp_path / "step-1")
    (tmp_path / "step-7").symlink_to("step-1")
    with pytest.raises(CheckpointingException, match=r"pin the step itself, .*/step-1"):
        pin_step(tmp_path, 7, "release")


def test_no_verb_writes_to_a_word_for_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--overwrite`` of ``latest`` would replace the step behind it, and a new one of its name would hide it."""
    for step in (1, 2):
        _save(tmp_path / f"step-{step}")
    (tmp_path / "latest").symlink_to("step-2")
    before = (tmp_path / "step-2" / "shardckpt.json").read_bytes()
    one = str(tmp_path / "step-1")
    for word in ("latest", "best"):
        to = [str(tmp_path / word), "--overwrite"]
        for call in (["convert", one, *to], ["export", one, *to], ["merge", one, one, *to], ["migrate", one, *to]):
            assert main(call) == 2, call
            assert "stands for a step of its folder, and nothing was written" in capsys.readouterr().err, call
    assert (tmp_path / "step-2" / "shardckpt.json").read_bytes() == before
    assert not (tmp_path / "best").exists()
    assert main(["convert", one, str(tmp_path / "exports" / "latest"), "--to", "safetensors"]) == 0


def test_no_verb_writes_to_a_word_at_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A URL that ends with ``latest`` beside steps, or a ``file://`` URL, is refused as a path is."""
    _save(tmp_path / "step-1")
    fsspec.filesystem("memory").store.clear()
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(4.0))}, "memory://words/step-1")
    for url in ("memory://words/latest", "memory://words/best/", f"file://{tmp_path}/latest"):
        assert main(["convert", str(tmp_path / "step-1"), url, "--to", "safetensors"]) == 2, url
        assert "stands for a step of its folder, and nothing was written" in capsys.readouterr().err, url
    assert main(["convert", str(tmp_path / "step-1"), "memory://exports/latest", "--to", "safetensors"]) == 0
    assert main(["convert", str(tmp_path / "step-1"), "memory://exports/step-1", "--to", "safetensors"]) == 0
    # it has that name itself
    again = ["convert", str(tmp_path / "step-1"), "memory://exports/latest", "--to", "safetensors", "--overwrite"]
    assert main(again) == 0
    fsspec.filesystem("memory").store.clear()


def test_keys_are_not_removed_by_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`remove FOLDER/latest` would take the optimizer out of the step that a training goes on from."""
    folders.save_all(tmp_path, 1, 2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-2").iterdir()}
    for is_link in (False, True):
        if is_link:
            (tmp_path / "latest").symlink_to("step-2")
        assert main(["remove", str(tmp_path / "latest"), ""]) == 2
        assert "stands for a step of its folder, and nothing was written: give the step" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-2").iterdir()} == before
