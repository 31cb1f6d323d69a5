"""What the tests of overwrite share."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import dist_checkpointing
from shardckpt.commit import commit
from shardckpt.errors import StorageError
from tests.faults import samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


OLD, NEW = 1, 2


def add_foreign(directory: Path) -> dict[str, bytes]:
    """Put files of all sorts beside a checkpoint's, and say which."""
    (directory / "logs" / "deep").mkdir(parents=True)
    (directory / "empty").mkdir()
    files = {"notes.txt": b"mine", "logs/a.log": b"", "logs/deep/b.log": b"deep", "model.safetensors": b"\0" * 9}
    for name, content in files.items():
        (directory / name).write_bytes(content)
    (directory / "latest").symlink_to("notes.txt")
    (directory / "run.sh").write_bytes(b"#!/bin/sh\n")
    (directory / "run.sh").chmod(0o755)
    return {**files, "run.sh": b"#!/bin/sh\n"}


def overwrite(target: Path) -> None:
    """Save the new version in the place of whatever is there."""
    samples.save(target, NEW, overwrite=True)


def refuse_parent(parent: Path, reason: str) -> None:
    """A save below a parent that nothing can be written to fails with its name and the reason."""
    with pytest.raises(StorageError, match=rf"cannot create the staging directory {parent}.*{reason}"):
        dist_checkpointing.save(samples.state_dict(NEW), parent / "ckpt")
    assert list(parent.iterdir()) == []


def no_exchange(*_: Any) -> bool:
    """A system without RENAME_EXCHANGE."""
    return False


def die_between_renames(target: Path, save: Callable[[Path], object]) -> None:
    """Let a process die between the two renames of a save that replaces a checkpoint, where there is no exchange."""
    rename = os.rename

    class Died(BaseException):
        """The process is no more."""

    def die(source: Path, destination: Path) -> None:
        if destination == target:
            raise Died
        rename(source, destination)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shardckpt.commit.commit.exchange", no_exchange)
        patched.setattr("shardckpt.commit.commit.discard_staging", lambda _: None)
        patched.setattr("os.rename", die)
        with pytest.raises(Died):
            save(target)


@dataclass
class Interruption:
    """Lets one of the calls that replace a directory fail, before or after it was done.

    Attributes:
        error: What to raise.
        number: Which call.
        after: Whether it was done.
        calls: The calls so far, by name.
    """

    error: BaseException
    number: int
    after: bool
    calls: list[str] = field(default_factory=list)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, counted, and failing if its turn has come."""

        def counted(*arguments: Any) -> Any:
            self.calls.append(name)
            now = len(self.calls) == self.number
            if now and not self.after:
                raise self.error
            result = call(*arguments)
            if now:
                raise self.error
            return result

        return counted

    @contextmanager
    def in_overwrites(self, monkeypatch: pytest.MonkeyPatch, target: Path, *, exchanges: bool) -> Iterator[None]:
        """Count the calls by which an overwrite of ``target`` replaces it, with or without RENAME_EXCHANGE."""
        sync = commit.sync_directory

        def sync_named(path: Path) -> None:
            self.around("sync parent" if path == target.parent else "sync", sync)(path)

        swap = commit.exchange if exchanges else no_exchange
        with monkeypatch.context() as patched:
            patched.setattr("shardckpt.commit.commit.exchange", self.around("exchange", swap))
            patched.setattr("shardckpt.commit.commit.sync_directory", sync_named)
            patched.setattr("os.rename", self.around("rename", os.rename))
            yield
