"""Whether the process lives that a temporary directory belongs to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from shardckpt import ShardedTensor, dist_checkpointing
from shardckpt.commit import owner as module
from shardckpt.commit.owner import Owner
from tests.commit import owners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say when a process started")


def test_names_say_the_whole_owner() -> None:
    """An owner comes back from its 32 digits, whatever its process id and start are."""
    for owner in (Owner.current(), Owner(0, 1, 0), Owner((1 << 48) - 1, (1 << 32) - 1, (1 << 48) - 1)):
        assert len(owner.text) == 32
        assert Owner.from_text(owner.text) == owner


def test_an_id_that_is_used_again_is_another_process() -> None:
    """The process that has the id now started at another time: the owner is dead."""
    current = Owner.current()
    assert current._replace(start=current.start - 1).is_alive() is False


def test_without_a_start_an_id_says_whether_its_process_lives() -> None:
    """A process that could not read its own start has 0 in its names: no other process takes it for dead."""
    assert Owner.current()._replace(start=0).is_alive() is True


def test_ids_that_no_process_can_have() -> None:
    """A name that was made up is no error."""
    assert Owner.current()._replace(pid=(1 << 32) - 1).is_alive() is False


def test_of_other_hosts_nothing_is_known() -> None:
    """Equal process ids and host names say nothing where the boot or the namespace is another."""
    assert owners.elsewhere().is_alive() is None


def test_a_hidden_process_is_alive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the system hides of other users' processes (hidepid) makes none of them dead."""
    current = Owner.current()
    own = Path("/proc")
    for name in ("sys", "self"):
        (tmp_path / name).symlink_to((own / name).readlink() if name == "self" else own / name)
    monkeypatch.setattr(module, "_PROC", tmp_path)
    monkeypatch.setattr(module, "_digest_host", lambda: current.host)
    assert current.is_alive() is True


def test_without_proc_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a system that does not tell boots and starts, an owner is neither alive nor dead."""
    monkeypatch.setattr(module, "_PROC", tmp_path)
    owner = Owner.current()
    assert (owner.pid, owner.host) == (os.getpid(), 0)
    assert owner.is_alive() is None


def test_a_save_has_one_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A system that tells less of the process when the save begins than a moment later does not make it fail."""
    tell = module._digest_host
    monkeypatch.setattr(module, "_digest_host", lambda: tell() if any(tmp_path.iterdir()) else 0)
    value = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
    dist_checkpointing.save({"w": value}, tmp_path / "ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
