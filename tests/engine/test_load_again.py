"""Later loads of a process, which need not parse what an earlier one has: they see what the files have by then."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest import RECORD_NAME
from shardckpt.mapping import ShardedTensor
from shardckpt.tensors import tensor_bytes
from tests import backends
from tests.resources import list_open
from tests.safetensors.parts import InParts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends import Backend

pytestmark = backends.both


def describe(values: torch.Tensor) -> dict[str, Any]:
    """Return a state of one tensor."""
    return {"w": ShardedTensor.from_rank_offsets("w", values)}


def load(path: Path, *shape: int) -> torch.Tensor:
    """Load that tensor into new memory, with its rows as a slice of it."""
    return dc.load(describe(torch.zeros(shape)), path)["w"]


def test_a_checkpoint_that_replaced_another_is_what_is_loaded(tmp_path: Path) -> None:
    """After an overwrite a load has the new shapes and values, and refuses the old shapes."""
    for rows in (4, 6, 4):
        values = torch.rand(rows, 3)
        dc.save(describe(values), tmp_path / "c", overwrite=True)
        for _ in range(2):
            assert torch.equal(load(tmp_path / "c", rows, 3), values)
        with pytest.raises(Exception, match="shape"):
            load(tmp_path / "c", rows + 1, 3)


def test_damage_after_a_load_is_found_by_the_next(tmp_path: Path, backend: Backend) -> None:
    """One bit of any file that a load needs is noticed, though the same bytes were good a moment ago."""
    path = tmp_path / "c"
    values = torch.rand(4, 3)
    dc.save(describe(values), path)
    for name in (backend.index, RECORD_NAME, backend.common, backend.data_file(0)):
        load(path, 4, 3)
        good = (path / name).read_bytes()
        # a load of (safetensors, 1) does not need all of a data file: its values lie behind a header
        place = max(good.find(bytes(tensor_bytes(values))), len(good) // 2)
        (path / name).write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CorruptCheckpointError):
            load(path, 4, 3)
        (path / name).write_bytes(good)


def test_what_a_caller_changes_is_not_in_the_next_load(tmp_path: Path) -> None:
    """Content metadata and the writer of a record belong to the caller, who may change them."""
    dc.save(describe(torch.rand(4, 3)), tmp_path / "c", content_metadata={"kind": ["a"]})
    dc.load_content_metadata(tmp_path / "c")["kind"].append("b")  # type: ignore[index]
    assert dc.load_content_metadata(tmp_path / "c") == {"kind": ["a"]}
    with dc.open_checkpoint(tmp_path / "c") as stored:
        assert stored.record is not None
        stored.record.writer["shardckpt"] = "changed"
    with dc.open_checkpoint(tmp_path / "c") as stored:
        assert stored.record is not None
        assert stored.record.writer["shardckpt"] != "changed"


def test_no_file_stays_open(tmp_path: Path, backend: Backend) -> None:
    """What is kept of a checkpoint keeps no descriptor, of an index in parts either: disks can be unmounted."""
    values = torch.rand(40, 3)
    state = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", values[n:]) for n in range(20)}
    for name, strategy in {"one": None, "parts": InParts() if backend.name == "safetensors" else None}.items():
        dc.save(state, tmp_path / name, strategy)
        for _ in range(2):
            dc.load(state, tmp_path / name)
        gc.collect()
        assert list_open(tmp_path) == []
