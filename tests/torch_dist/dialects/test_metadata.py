"""Where each dialect keeps its common state, and what is said where that is lost."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.dist_checkpointing import ShardedTensor
from shardckpt.errors import CorruptCheckpointError
from shardckpt_torch_dist import CheckpointStorageWriter
from tests.names import COMMON, INDEX, MARKER, RECORD
from tests.states import error_of
from tests.tables import table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from tests.ranks import Ranks

WITH_COMMON_FILE = ("0.9.0", "0.12.3", "0.13.1", "0.16.1", "0.17.0rc0")
NORM = "decoder.final_layernorm.weight"


def wanted(rank: int = 0) -> dict[str, Any]:
    """A tensor of every golden checkpoint, to fill on every rank."""
    return {"t": ShardedTensor.from_rank_offsets(NORM, torch.full((5,), -1.0), replica_id=rank)}


@pytest.fixture(params=WITH_COMMON_FILE)
def lost(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of a Megatron that wrote ``common.pt``, without it."""
    path = Path(shutil.copytree(GOLDEN / f"mcore-{request.param}", tmp_path / "ckpt"))
    (path / COMMON).unlink()
    return path


def test_a_lost_common_file_is_an_error(lost: Path) -> None:
    """No load goes on without the common state, and no destination is filled; the error names the file."""
    state = wanted()
    for query in (dc.load_common_state_dict, dc.load_content_metadata, lambda path: dc.load(state, path)):
        with pytest.raises(CorruptCheckpointError, match=rf"{re.escape(str(lost / COMMON))} is missing"):
            query(lost)
    assert state["t"].data.eq(-1).all()


def test_tensors_beside_a_lost_common_file_can_be_read(lost: Path) -> None:
    """What the error says to do works: the tensors alone, or an empty common state."""
    with dc.open_checkpoint(lost) as checkpoint:
        assert checkpoint[NORM].read().tolist() == [0, 1, 2, 3, 4]
    assert set(dc.load_plain_tensors(lost)) >= {NORM}
    torch.save({}, lost / COMMON)
    assert dc.load(wanted(), lost)["t"].tolist() == [0, 1, 2, 3, 4]


def _load(path: str) -> None:
    dc.load(wanted(dist.get_rank()), path)


def test_all_ranks_hear_of_a_lost_common_file(ranks: Ranks, lost: Path) -> None:
    """The same error on every rank."""
    first, second = ranks.run(2, error_of, _load, str(lost))
    assert first == second
    assert first[0] == CorruptCheckpointError.__name__
    assert f"{lost / COMMON} is missing" in first[1]


@table("version", WITH_COMMON_FILE)
def test_the_marker_may_be_lost_with_it(tmp_path: Path, version: str) -> None:
    """Without ``metadata.json`` as well, what Megatron alone stores tells that it is no plain DCP directory."""
    path = shutil.copytree(
        GOLDEN / f"mcore-{version}", tmp_path / "ckpt", ignore=shutil.ignore_patterns(COMMON, MARKER)
    )
    with pytest.raises(CorruptCheckpointError, match=rf"{re.escape(str(path / COMMON))} is missing"):
        dc.load(wanted(), path)


def test_common_state_among_the_tensors_needs_no_file() -> None:
    """Megatron 0.19 and later write no such file."""
    assert dc.load(wanted(), GOLDEN / "mcore-0.20.0")["iteration"] == 17


@table("value", [[], "", 5, torch.Size([3])])
def test_a_common_state_that_is_no_dict_is_damage(tmp_path: Path, value: Any) -> None:
    """In the object or in ``common.pt``, it is an error that names the checkpoint, and no fault of the strategy."""
    dcp.save({"common_state/shard_0_1": value}, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "b", no_dist=True)
    torch.save(value, tmp_path / "b" / COMMON)
    for name in ("a", "b"):
        with pytest.raises(
            CorruptCheckpointError, match=rf"{name}: its common state is a \w+, and a save writes a dict"
        ):
            dc.load_common_state_dict(tmp_path / name)


@table("flatten", [True, False])
@table("ours", [True, False])
def test_plain_dcp_has_no_such_file(tmp_path: Path, ours: bool, flatten: bool) -> None:
    """Neither by DCP's own writer nor by ours, with our record or without, whatever the planner says of paths."""
    path = tmp_path / "ckpt"
    writer = CheckpointStorageWriter(path) if ours else dcp.FileSystemWriter(path)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save({"w": torch.arange(5), "steps": 3}, storage_writer=writer, planner=planner, no_dist=True)
    for _ in range(2):
        assert dc.load_common_state_dict(path) == {"steps": 3}
        assert dc.load_plain_tensors(path)["w"].tolist() == [0, 1, 2, 3, 4]
        (path / RECORD).unlink(missing_ok=True)


def test_ours_without_its_record_still_needs_it(tmp_path: Path) -> None:
    """A copy of ours without ``shardckpt.json`` and our index is as Megatron's: its common state is in the file."""
    path = tmp_path / "ckpt"
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3)), "iteration": 3}, path)
    for name in (RECORD, INDEX):
        (path / name).unlink()
    assert dc.load_common_state_dict(path) == {"iteration": 3}
    (path / COMMON).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{re.escape(str(path / COMMON))} is missing"):
        dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3))}, path)


def test_a_lost_record_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where our index shows that ``shardckpt.json`` was lost, a load goes on without digests, and says so."""
    path = tmp_path / "ckpt"
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, path)
    with caplog.at_level(logging.WARNING):
        assert dc.load_plain_tensors(path)["w"].sum() == 3
    assert "no digest" not in caplog.text
    (path / RECORD).unlink()
    with caplog.at_level(logging.WARNING):
        assert dc.load_plain_tensors(path)["w"].sum() == 3
    assert f"{path}: {INDEX} is there and {RECORD} is missing: only" in caplog.text
    assert "no digest is checked" in caplog.text


def test_a_marker_that_another_writer_made(tmp_path: Path) -> None:
    """A ``metadata.json`` beside what DCP's own planner wrote does not ask for Megatron's file."""
    path = tmp_path / "ckpt"
    dcp.save({"w": torch.arange(5), "o": 1}, checkpoint_id=path, no_dist=True)
    (path / MARKER).write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert dc.load_common_state_dict(path) == {"o": 1}


@table("strict", dc.StrictHandling)
def test_a_name_that_is_no_text_is_damage(tmp_path: Path, strict: dc.StrictHandling) -> None:
    """In no mode a number in the place of a tensor's name is another error than that of the damaged file."""
    dcp.save({"w": torch.ones(2), "v": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    file = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata[1] = metadata.state_dict_metadata.pop("v")
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata is not DCP metadata: TypeError: a key is a int"):
        dc.load({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path / "c", strict=strict)
