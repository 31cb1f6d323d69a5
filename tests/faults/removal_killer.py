"""Program: kill a removal of keys at every file system call, as ``killer`` does a save.

``python -m tests.faults.removal_killer FOLDER CASE COUNT`` begins with the checkpoint that stands at
``FOLDER/pristine/ckpt``; every key that begins with ``gone`` is removed from it.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing
from shardckpt.engine.integrity import verify_integrity_manifest
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest import INTEGRITY_NAME, RECORD_NAME
from tests.faults.killer import Killer, main

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "gone"


class RemovalKiller(Killer):
    """Removes the same keys, again and again, each time to another end."""

    def _prepare(self) -> None:
        self._old = _content(self._pristine / "ckpt")
        self._new = {key: value for key, value in self._old.items() if not key.startswith(PREFIX)}

    def _change(self) -> None:
        dist_checkpointing.remove_sharded_tensors(self._target(), PREFIX)

    def _found(self, directory: Path) -> str:
        found = _content(directory)
        for name, expected in (("old", self._old), ("new", self._new)):
            if _same(found, expected):
                return _faults(directory) or name
        return f"mixed: {sorted(found)}"

    def _later(self) -> str:
        """Nothing if the removal can be done (again), else what is wrong."""
        try:
            self._change()
        except CheckpointingException as exc:
            return f"{type(exc).__name__}: {exc}"
        state = self._state()
        return "" if state == "new" else state

    def _warm_up(self) -> None:
        scratch = self._folder / "warm"
        shutil.copytree(self._pristine / "ckpt", scratch)
        dist_checkpointing.remove_sharded_tensors(scratch, PREFIX)
        _content(scratch)


def _content(directory: Path) -> dict[str, Any]:
    """Every tensor, the names of the objects and the common state."""
    stored = dist_checkpointing.load_sharded_metadata(directory)
    tensors = dist_checkpointing.load_plain_tensors(directory)
    return {**dict.fromkeys(stored), **tensors, "common state": dist_checkpointing.load_common_state_dict(directory)}


def _same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    if found.keys() != expected.keys():
        return False
    pairs = [(found[key], expected[key]) for key in expected]
    return all(torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b for a, b in pairs)


def _faults(directory: Path) -> str:
    """What does not fit the digests, where there are any."""
    try:
        if (directory / INTEGRITY_NAME).exists():
            verify_integrity_manifest(directory)
        if (directory / RECORD_NAME).exists():
            return "; ".join(result.fault for result in verify_checkpoint(directory) if result.fault)
    except CheckpointingException as exc:
        return str(exc)
    return ""


if __name__ == "__main__":
    main(RemovalKiller)
