"""Program: kill a plain ``dcp.save`` through our storage writer at every file system call, as ``killer`` does ours."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from shardckpt_torch_dist import CheckpointStorageReader, CheckpointStorageWriter
from tests.faults.killer import LATER, NEW, OLD, Killer, main

if TYPE_CHECKING:
    from pathlib import Path

_KEYS = ("large", "small", "half")


class DcpKiller(Killer):
    """Saves and loads with DCP's own functions."""

    def _prepare(self) -> None:
        if self._case != "fresh":
            self._write(self._pristine / "ckpt", OLD)

    def _change(self) -> None:
        self._write(self._target(), NEW)

    def _found(self, directory: Path) -> str:
        CheckpointStorageReader(directory).read_metadata()  # dcp.load makes one error of all that it may raise
        for name, version in (("old", OLD), ("new", NEW)):
            if not _differences(directory, version):
                return name
        return f"mixed: not new in {_differences(directory, NEW)}"

    def _later(self) -> str:
        try:
            self._write(self._target(), LATER)
        except BaseException as exc:  # noqa: BLE001 - DCP's is one
            return f"{type(exc).__name__}: {exc}"
        wrong = _differences(self._target(), LATER)
        lost = "" if self._foreign_kept() else "other files are lost"
        return f"wrong values in {wrong}" if wrong else lost

    def _write(self, target: Any, version: int) -> None:
        writer = CheckpointStorageWriter(target, overwrite=self._case != "fresh" or version == LATER)
        dcp.save(_state(version), storage_writer=writer)

    def _warm_up(self) -> None:
        scratch = self._folder / "warm"
        for _ in range(2):
            dcp.save(_state(OLD), storage_writer=CheckpointStorageWriter(scratch, overwrite=True))
        _differences(scratch, OLD)


def _state(version: int) -> dict[str, Any]:
    return {
        "large": torch.arange(3 << 18, dtype=torch.float32) + version,
        "small": torch.arange(40) + version,
        "half": (torch.arange(33) + version).to(torch.bfloat16),
        "step": version,
    }


def _differences(directory: Any, version: int) -> list[str]:
    found: dict[str, Any] = {**{key: torch.zeros_like(_state(0)[key]) for key in _KEYS}, "step": -1}
    dcp.load(found, storage_reader=CheckpointStorageReader(directory))
    wrong = [key for key in _KEYS if not torch.equal(found[key], _state(version)[key])]
    return [*wrong, *([] if found["step"] == version else ["step"])]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(DcpKiller)
