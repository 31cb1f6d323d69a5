"""``shardckpt ls`` has two roads, without torch and with it: both say the same, or the first says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import ls, main
from shardckpt.manager import lease_step, list_checkpoints, list_plain, mark_checkpoint, pin_step
from shardckpt.manager.marks import identify_save
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.entries import StrategyAction
from tests.cli.checkpoints import copy_golden, save_plain_dcp
from tests.commit import owners
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[Path]:
    """A folder with sound checkpoints of every kind of ours, all that may be said of one, and what is none."""
    folder = tmp_path / "runs"
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        folders.save(folder, step, loss=loss)
    folders.save(folder, 2, overwrite=True, loss=0.125)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(9)), "objects": {"a": 1}}
    for backend in ("ep", "safetensors", "torch_dist"):
        dc.save(state, folder / backend, (backend, 1), step=7, fingerprints=True)
        dc.save(state, folder / "deeper" / f"epoch_{len(backend)}", (backend, 1))
    dc.save(state, folder / "deeper" / "still" / "last", content_metadata={"shardckpt_manager": [1]})
    for step, verdict in ((1, "verified"), (2, "failed")):
        path = folder / f"step-{step}"
        mark_checkpoint(path, identify_save(path), verdict, checked="digests", files=3, faults=("x is cut",))  # type: ignore[arg-type]
    folders.save(folder, 1, overwrite=True, loss=0.0)  # the mark is about the earlier save
    pin_step(folder, 3, "release 1")
    (folder / "step-3" / "notes.txt").write_text("beside its files")
    owners.leave(folder / "step-1", owners.dead())
    (folder / "logs").mkdir()
    (folder / "logs" / "train.log").write_text("x" * 77)
    (folder / "logs" / "events.out.tfevents.1764288000.host").touch()
    (folder / "empty").mkdir()
    (folder / "latest").write_text("step-3")
    (folder / "newest").symlink_to("step-3")
    with lease_step(folder, 3, holder="an evaluation"):
        yield folder


@table("recursive", [False, True])
def test_both_roads_say_the_same(zoo: Path, recursive: bool) -> None:
    """Of a folder, of the folders in it and of each of its checkpoints, list_plain says what list_checkpoints says."""
    found = list_plain(zoo, ls.FORMATS, recursive=recursive)
    assert found is not None
    assert found == list_checkpoints(zoo, recursive=recursive)
    assert len(found) == (13 if recursive else 10)
    for path in ("step-2", "safetensors", "deeper", "deeper/still"):
        assert list_plain(zoo / path, ls.FORMATS) == list_checkpoints(zoo / path) != []
    known = {each.name: each for each in found}
    assert (known["step-2"].has_failed, known["step-1"].mark, len(known["step-3"].held)) == (True, "", 2)
    assert [known[f"step-{step}"].metrics for step in (1, 2, 3)] == [{"loss": 0.0}, {"loss": 0.125}, {"loss": 0.75}]
    assert known["ep"].fingerprint == known["safetensors"].fingerprint != ""


@table("how", [[], ["--json"], ["-r"]])
def test_both_roads_print_the_same(
    zoo: Path, how: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ls prints, and its exit code, are the same with the road without torch and without it."""
    monkeypatch.setattr(ls.time, "time", lambda: (zoo / "step-1").stat().st_mtime + 5)
    found = []
    for road in (list_plain, lambda *_, **__: None):
        monkeypatch.setattr("shardckpt.manager.summaries.list_plain", road)
        code = main(["ls", str(zoo), *how])
        found.append((code, *capsys.readouterr()))
    assert found[0] == found[1]
    assert found[0][0] == 1  # a mark says that step 2 has failed


def _flip_record(folder: Path) -> None:
    path = folder / "step-1" / "shardckpt.json"
    path.write_bytes(path.read_bytes().replace(b'"world_size"', b'"world_sizf"'))


def _add_hidden_file(folder: Path) -> None:
    (folder / ".metadata").touch()


#: What only a reader can judge.
OTHERS: dict[str, Callable[[Path], Any]] = {
    "a cut file": lambda folder: folders.damage(folder / "step-1"),
    "a lost record": lambda folder: (folder / "step-1" / "shardckpt.json").unlink(),
    "a lost marker": lambda folder: (folder / "step-1" / "metadata.json").unlink(),
    "a changed record": _flip_record,
    "another version": lambda folder: folders.say_backend(folder / "step-1", "torch_dist", 9),
    "a dead save": lambda folder: (folder / "step-9").mkdir() or (folder / "step-9" / "x.txt").touch(),
    "Megatron's": lambda folder: copy_golden("0.16.1", folder),
    "plain DCP": save_plain_dcp,
    "a loose file": lambda folder: torch.save({"w": torch.ones(2)}, folder / "w.pt"),
    "a hidden file": _add_hidden_file,
    "Megatron's legacy": lambda folder: (folder / "legacy" / "mp_rank_00").mkdir(parents=True),
    "files of no known kind": lambda folder: (folder / "x").mkdir() or (folder / "x" / "events.0").touch(),
}


@table("kind", OTHERS)
def test_what_only_a_reader_can_judge_is_left_to_readers(kind: str, tmp_path: Path) -> None:
    """A folder with one thing that is no sound checkpoint of ours, and may be one, has no plain listing."""
    folders.save_all(tmp_path, 1, 2)
    assert list_plain(tmp_path, ls.FORMATS) is not None
    OTHERS[kind](tmp_path)
    assert list_plain(tmp_path, ls.FORMATS) is None
    assert list_checkpoints(tmp_path)


def test_nothing_is_left_to_readers_too(tmp_path: Path) -> None:
    """An empty folder, one that is not there, a file and a URL have no plain listing."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "nowhere", tmp_path / "file", tmp_path, "memory://x"):
        assert list_plain(path, ls.FORMATS) is None


def test_own_formats_are_those_that_plugins_register() -> None:
    """The formats that are known without a look at plugins are those that the plugins of this distribution read."""
    entries = get_plugin_manager().registry.entries(StrategyAction.LOAD_SHARDED)
    own = [entry for entry in entries if entry.distribution.startswith("shardckpt ")]
    assert {(entry.backend, entry.version) for entry in own} == ls.FORMATS
