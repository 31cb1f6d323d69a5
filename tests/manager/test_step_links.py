"""The links ``latest`` and ``best`` that a manager keeps in its folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, ConfigurationError, StorageError, UnknownBackendError
from shardckpt.manager import (
    CheckpointConfig,
    CheckpointManager,
    KeepBest,
    KeepLatest,
    pin_step,
    prune_steps,
    step_links,
)
from tests import backends
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Mapping


def _save(folder: Path | str, losses: Mapping[int, float], **settings: Any) -> CheckpointManager:
    options = {"keep_latest_k": 0, "best_metric": "loss", "links": True} | settings
    manager = CheckpointManager(CheckpointConfig(folder=str(folder), interval=1, **options), {"m": nn.Linear(2, 1)})
    for step, loss in losses.items():
        manager.save(step, metrics={"loss": loss})
        manager.wait()
    return manager


def _links(folder: Path) -> dict[str, str]:
    return {path.name: str(path.readlink()) for path in folder.iterdir() if path.is_symlink()}


@table("mode", ["disabled", "async"])
def test_links_follow_commits(tmp_path: Path, mode: str) -> None:
    """After each commit they lead to the newest step and to the best, by names beside them, also without policies."""
    with _save(tmp_path, {}, async_mode=mode) as manager:
        for step, loss, best in ((1, 0.5, 1), (2, 0.7, 1), (3, 0.1, 3)):
            manager.save(step, metrics={"loss": loss})
            manager.wait()
            assert _links(tmp_path) == {"latest": f"step-{step}", "best": f"step-{best}"}


def test_links_follow_verdicts(tmp_path: Path) -> None:
    """No load takes a step that `verify --mark` finds damaged: links go to another, and come back once it is mended."""
    with _save(tmp_path, {1: 0.5, 2: 0.4, 3: 0.1}):
        pass
    data = tmp_path / "step-3" / backends.data_file(0)
    whole = data.read_bytes()
    data.write_bytes(bytes(byte ^ 1 for byte in whole))
    assert main(["verify", str(tmp_path / "step-3")]) == 1
    assert _links(tmp_path) == {"latest": "step-3", "best": "step-3"}
    assert main(["verify", str(tmp_path / "latest"), "--mark"]) == 1
    assert _links(tmp_path) == {"latest": "step-2", "best": "step-2"}
    data.write_bytes(whole)
    assert main(["verify", str(tmp_path), "--mark"]) == 0
    assert _links(tmp_path) == {"latest": "step-3", "best": "step-3"}


def test_links_do_not_depend_on_what_is_installed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager that has no strategy for the steps ends with an error, and leaves the links to who has."""

    def refuse(*_: Any) -> None:
        raise UnknownBackendError("no strategy for it here")

    with _save(tmp_path, {1: 0.1, 2: 0.4}):
        pass
    monkeypatch.setattr("shardckpt.manager.steps.choose_reader", refuse)
    with _save(tmp_path, {}) as manager, pytest.raises(UnknownBackendError):
        manager.load()
    assert _links(tmp_path) == {"latest": "step-2", "best": "step-1"}


def test_links_hold_no_step_and_are_moved_before_it_goes(tmp_path: Path) -> None:
    """Retention removes what they led to, as if they were not there; a pin keeps the best step, and the link to it."""
    with _save(tmp_path, {1: 0.1, 2: 0.5, 3: 0.4}, keep_latest_k=2):
        assert _links(tmp_path) == {"latest": "step-3", "best": "step-3"}
        assert folders.names_in(tmp_path) == {"step-2", "step-3", "latest", "best", folders.HOLDS}
    pin_step(tmp_path, 3, "paper")
    with _save(tmp_path, {4: 0.8, 5: 0.9}, keep_latest_k=1):
        assert _links(tmp_path) == {"latest": "step-5", "best": "step-3"}


def test_the_best_step_is_that_of_the_policies(tmp_path: Path) -> None:
    """KeepBest of ``retention`` names the metric as for best_step; without a metric there is no link to a best step."""
    policies = [KeepLatest(1), KeepBest("loss", mode="max")]
    with _save(
        tmp_path / "a", {1: 0.9, 2: 0.1, 3: 0.2}, retention=policies, keep_latest_k=10, best_metric=""
    ) as manager:
        assert manager.best_step() == 1
        assert _links(tmp_path / "a") == {"latest": "step-3", "best": "step-1"}
    with _save(tmp_path / "b", {1: 0.9}, best_metric=""):
        assert _links(tmp_path / "b") == {"latest": "step-1"}


def test_links_follow_removals(tmp_path: Path) -> None:
    """A discard and a prune of another process move them, too; a dry run names no link, and moves none."""
    with _save(tmp_path, {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.3}) as manager:
        manager.discard_after(3)
        assert _links(tmp_path) == {"latest": "step-3", "best": "step-1"}
    (kept,) = [each.kept for each in prune_steps(tmp_path, [KeepLatest(1)], dry_run=True) if each.step == 1]
    assert kept == ""
    assert _links(tmp_path) == {"latest": "step-3", "best": "step-1"}
    prune_steps(tmp_path, [KeepLatest(2)])
    assert _links(tmp_path) == {"latest": "step-3", "best": "step-3"}
    folders.damage(tmp_path / "step-3")
    prune_steps(tmp_path, [], damaged=True, older_than=0)
    assert _links(tmp_path) == {"latest": "step-2", "best": "step-2"}


def test_other_links_hold_their_steps(tmp_path: Path) -> None:
    """A link of another name holds its step as ever; so do all where the manager keeps none."""
    with _save(tmp_path, {1: 0.5, 2: 0.4}):
        (tmp_path / "release").symlink_to("step-1")
    with _save(tmp_path, {3: 0.3, 4: 0.2}, keep_latest_k=1):
        assert folders.names_in(tmp_path) == {"step-1", "step-4", "latest", "best", "release", folders.HOLDS}
    with _save(tmp_path, {5: 0.1}, keep_latest_k=1, links=False):
        assert {"step-1", "step-4", "step-5"} <= folders.names_in(tmp_path)


@table("what", ["directory", "file", "link"])
def test_what_is_not_a_link_to_a_step_stays(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """A manager with links refuses to begin where something else has the name; if it comes later, a warning says so."""
    path = tmp_path / "run" / "latest"
    path.parent.mkdir()
    make = {
        "directory": path.mkdir,
        "file": path.touch,
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
    }[what]
    make()
    with pytest.raises(CheckpointingException, match=f"latest is a {what}.*move it, or leave links False"):
        _save(path.parent, {})
    path.rmdir() if what == "directory" else path.unlink()
    with _save(path.parent, {1: 0.5}) as manager:
        path.unlink()
        make()
        manager.save(2, metrics={"loss": 0.1})
        manager.wait()
    assert f"latest is a {what}" in caplog.text
    assert (path.is_dir(), path.is_file(), path.is_symlink()) == (what == "directory", what == "file", what == "link")
    assert str((path.parent / "best").readlink()) == "step-2"


@table("name", ["best", "latest"])
def test_a_link_that_no_manager_made_stays(tmp_path: Path, name: str) -> None:
    """In a folder of steps without links, a link of that name is the user's: a manager with links refuses to begin."""
    _save(tmp_path, {1: 0.5, 2: 0.1}, links=False).close()
    (tmp_path / name).symlink_to("step-1")
    with pytest.raises(CheckpointingException, match=f"{name} is a link to step-1, .*move it, or leave links False"):
        _save(tmp_path, {})
    assert _links(tmp_path) == {name: "step-1"}
    (tmp_path / name).unlink()
    _save(tmp_path, {}).close()
    assert not _links(tmp_path), "before its first save, a killed run would leave what looks like a user's"
    _save(tmp_path, {3: 0.3}).close()
    assert _links(tmp_path) == {"latest": "step-3", "best": "step-2"}


@table(("name", "content"), [("", None), ("metadata.json", None), ("metadata.json", b"{"), ("shardckpt.json", b"{")])
def test_links_of_a_lost_step_are_own(tmp_path: Path, name: str, content: bytes | None) -> None:
    """Where the only step with links was removed or damaged by hand, a restart takes both links for a manager's."""
    _save(tmp_path, {1: 0.1}, links=False).close()
    _save(tmp_path, {2: 0.5}).close()
    assert _links(tmp_path) == {"latest": "step-2", "best": "step-1"}
    path = tmp_path / "step-2" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if content is not None:
        path.write_bytes(content)
    _save(tmp_path, {}).close()
    assert not _links(tmp_path), "before its first save, a killed run would leave what looks like a user's"
    _save(tmp_path, {3: 0.3}).close()
    assert _links(tmp_path) == {"latest": "step-3", "best": "step-1"}


def test_a_rewind_to_before_the_links_removes_them(tmp_path: Path) -> None:
    """Where all steps that are left are of managers without links, the next one begins anew."""
    _save(tmp_path, {1: 0.5}, links=False).close()
    with _save(tmp_path, {2: 0.1}) as manager:
        manager.discard_after(1)
        assert not _links(tmp_path)
    _save(tmp_path, {2: 0.6}).close()
    assert _links(tmp_path) == {"latest": "step-2", "best": "step-1"}


def test_a_kill_leaves_the_link_to_the_older_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the commit and the rename the links lead to older steps, which are there; what is left holds no step."""
    replace = Path.replace

    def die(path: Path, target: Path) -> Path:
        if path.name.endswith(".shardckpt-tmp"):
            raise OSError("killed")
        return replace(path, target)

    _save(tmp_path, {1: 0.5}).close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        _save(tmp_path, {2: 0.1}).close()
    assert "killed" in caplog.text
    left = {".latest.shardckpt-tmp": "step-2", ".best.shardckpt-tmp": "step-2"}
    assert _links(tmp_path) == {"latest": "step-1", "best": "step-1"} | left
    _save(tmp_path, {}).close()  # the next run begins with links that are right
    assert _links(tmp_path) == {"latest": "step-2", "best": "step-2"}
    _save(tmp_path, {3: 0.3}, keep_latest_k=1).close()
    assert folders.names_in(tmp_path) == {"step-3", "latest", "best"}


def test_a_link_that_may_not_be_durable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the directory cannot be synced after a link was moved, a warning says so."""

    def fail(path: Path) -> None:
        raise StorageError(f"cannot sync the directory {path}")

    with _save(tmp_path, {1: 0.5}) as manager:
        monkeypatch.setattr(step_links, "sync_directory", fail)
        manager.save(2, metrics={"loss": 0.7})
        manager.wait()
    assert _links(tmp_path) == {"latest": "step-2", "best": "step-1"}
    assert f"the link {tmp_path / 'latest'} is not kept up to date: cannot sync the directory" in caplog.text


def test_a_newest_step_that_no_link_leads_to_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the newest step is damaged, or could not be looked at, a warning says that links lead to an older one."""
    _save(tmp_path, {1: 0.5, 2: 0.7}).close()
    folders.damage(tmp_path / "step-2")
    _save(tmp_path, {}).close()
    assert _links(tmp_path) == {"latest": "step-1", "best": "step-1"}
    assert caplog.text.count(f"the links of {tmp_path} do not lead to step 2: ") == 1


def test_a_store_has_no_links(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is written there for them, which one warning says; saves and removals are as ever."""
    with _save(f"local://{tmp_path}/run", {1: 0.1, 2: 0.5, 3: 0.4}, keep_latest_k=1) as manager:
        assert manager.steps() == [3]
    (warning,) = (entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING")
    assert f"writes nothing to local://{tmp_path}/run: object stores have no links" in warning
    assert {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")} == {"step-3"}


def test_a_pointer_file_has_another_name(tmp_path: Path) -> None:
    """``latest_pointer="latest"`` beside the link of that name is an error."""
    with pytest.raises(ConfigurationError, match="the name of a link, 'latest': choose another"):
        CheckpointConfig(folder=str(tmp_path), links=True, latest_pointer="latest")
