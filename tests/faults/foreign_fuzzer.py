"""Program: change files that other libraries wrote at random, and say what everything that reads them makes of it.

``python -m tests.faults.foreign_fuzzer FOLDER LIBRARY COUNT`` prints verdicts as ``tests.faults.fuzzer`` does.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from shardckpt.cli import main as run_command
from shardckpt.engine import locate
from shardckpt.maintenance.sources import open_source
from shardckpt.plugins import get_plugin_manager
from tests.faults.fuzzer import Fuzzer
from tests.faults.hostile import report_on
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.hostile import Report, Watch


def _make_state() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.arange(24.0).reshape(4, 6), "b.bias": torch.arange(6).to(torch.bfloat16)}


def _save_torch(base: Path) -> None:
    base.mkdir(parents=True)
    torch.save(_make_state(), base / "pytorch_model.bin")


def _copy(name: str) -> Callable[[Path], object]:
    return lambda base: shutil.copytree(GOLDEN / name, base)


#: How the checkpoint of each library is made.
LIBRARIES: dict[str, Callable[[Path], object]] = {
    "Megatron-Core 0.9": _copy("mcore-0.9.0"),
    "Megatron-Core 0.20": _copy("mcore-0.20.0"),
    "Megatron-Core's zarr": _copy("zarr-mcore-0.15.3"),
    "torch_checkpointing": _copy("torch-checkpointing-0.1.1/safetensors-2"),
    "DeepSpeed": _copy("deepspeed/zero1"),
    "DeepSpeed universal": _copy("deepspeed/universal-zero1"),
    "plain DCP": lambda base: dcp.save({"model": _make_state(), "step": 7}, checkpoint_id=base, no_dist=True),
    "Hugging Face": _copy("shardckpt-0.1.0/exported"),
    "files of torch.save": _save_torch,
}


class ForeignFuzzer(Fuzzer):
    """Changes the files of another library's checkpoint, again and again."""

    def __init__(self, folder: Path, library: str) -> None:
        self._library = library
        super().__init__(folder)

    def _make(self) -> None:
        LIBRARIES[self._library](self._base)
        _read(self._base)
        for run in _QUERIES.values():
            run(self._base)

    def _put(self, name: str, content: bytes, number: int) -> None:
        (self._path / name).write_bytes(content)

    def _report(self, watch: Watch) -> Report:
        return report_on(self._path, watch, _read, _QUERIES)


def _read(path: Path) -> list[str]:
    """Read all values, with which nothing is compared."""
    plugins = get_plugin_manager()
    with open_source(locate(path, plugins), plugins) as opened:
        opened.values([*opened.index()])
        opened.common()
    return []


def _run(verb: str, path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run_command([verb, str(path), "--json"])


_QUERIES = {verb: partial(_run, verb) for verb in ("verify", "ls", "inspect")}


def main() -> None:
    """Print the verdicts."""
    torch.set_num_threads(1)
    folder, library, count = sys.argv[1:]
    verdicts = ForeignFuzzer(Path(folder), library).verdicts(int(count))
    json.dump(verdicts, sys.stdout)


if __name__ == "__main__":
    main()
