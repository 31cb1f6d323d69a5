"""Program: kill a save whose files are in folders at every file system call, as ``killer`` does a flat one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing
from shardckpt.dist_checkpointing import ShardedTensor
from tests.faults.killer import NEW, OLD, Killer, main
from tests.trees import LoadTree, SaveTree

if TYPE_CHECKING:
    from pathlib import Path


class TreeKiller(Killer):
    """Saves by the tree strategy, again and again, each time to another end."""

    def _change(self) -> None:
        dist_checkpointing.save(_state(NEW), self._target(), SaveTree(), overwrite=self._case != "fresh")

    def _prepare(self) -> None:
        if self._case != "fresh":
            dist_checkpointing.save(_state(OLD), self._pristine / "ckpt", SaveTree())
            # other people's, in a folder of the checkpoint
            (self._pristine / "ckpt" / "arrays" / "w0" / "notes").write_bytes(b"kept")

    def _found(self, directory: Path) -> str:
        loaded = _load(directory)
        kept = directory / "arrays" / "w0" / "notes"
        if self._case != "fresh" and kept.read_bytes() != b"kept":
            return "other files are lost"
        values = {(key, value) for key, tensor in loaded.items() if key != "step" for value in tensor.tolist()}
        for name, version in (("old", OLD), ("new", NEW)):
            if values == {(f"w{n}", float(version)) for n in range(3)} and loaded["step"] == version:
                return name
        return f"mixed: {values}"

    def _later(self) -> str:
        dist_checkpointing.save(_state(9), self._target(), SaveTree(), overwrite=True)
        found = _load(self._target())
        is_later = found["step"] == 9 and all(found[f"w{n}"].tolist() == [9.0] * 5 for n in range(3))
        return "" if is_later and self._foreign_kept() else "not what was saved, or other files are lost"

    def _warm_up(self) -> None:
        for overwrite in (False, True):
            dist_checkpointing.save(_state(OLD), self._folder / "warm", SaveTree(), overwrite=overwrite)
        _load(self._folder / "warm")


def _state(version: int) -> dict[str, Any]:
    tensors = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", torch.full((5,), float(version))) for n in range(3)}
    return {**tensors, "step": version}


def _load(directory: Path) -> dict[str, Any]:
    return dist_checkpointing.load(_state(-1), directory, LoadTree())


if __name__ == "__main__":
    main(TreeKiller)
