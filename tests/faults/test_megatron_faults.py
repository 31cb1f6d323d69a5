"""Severe faults of Megatron's dist_checkpointing, each done here as it was observed there."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt.tensors import LARGE
from shardckpt_torch_dist import TorchDistSaveShardedStrategy
from tests.faults import samples
from tests.tables import in_proof, table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.ranks import Ranks

OLD, NEW = 5, 9

# Stale common state: a common.pt of an older save wins over the common state that lies among the tensors.


def test_a_common_file_of_an_older_save_is_not_read(tmp_path: Path) -> None:
    """Where 0.19 and later wrote over an older checkpoint, the common state is theirs, not the one that was left."""
    shutil.copytree(GOLDEN / "mcore-0.20.0", tmp_path / "ckpt", copy_function=shutil.copyfile)
    assert not (tmp_path / "ckpt" / "common.pt").exists()
    expected = dc.load_common_state_dict(tmp_path / "ckpt")
    (tmp_path / "ckpt").chmod(0o755)
    torch.save({"iteration": 7, "content_metadata": {"writer": "older"}}, tmp_path / "ckpt" / "common.pt")
    assert expected["iteration"] == 17
    assert dc.load_common_state_dict(tmp_path / "ckpt") == expected
    assert dc.load({}, tmp_path / "ckpt") == expected
    assert dc.load_content_metadata(tmp_path / "ckpt") == expected["content_metadata"]


# Mixed content: an overwrite that did not end leaves new tensors under the old marker.


class _Unfinished(TorchDistSaveShardedStrategy):
    """Writes all of its files, looks at the target, and is ended before the save is."""

    def __init__(self, look: Callable[[], Any]) -> None:
        super().__init__()
        self.look = look
        self.seen: Any = None

    def save(self, *args: Any) -> None:
        super().save(*args)
        self.seen = self.look()
        raise KeyboardInterrupt


def _content(target: str) -> dict[str, Any]:
    """All that the checkpoint holds, read by this rank alone, as text that can be compared."""
    tensors = {key: tensor.tolist() for key, tensor in dc.load_plain_tensors(target).items()}
    return {**tensors, "common": dc.load_common_state_dict(target)}


def _overwrite_unfinished(target: str) -> list[dict[str, Any]]:
    """The content before an overwrite, between its last byte and its commit, and after it was interrupted."""
    samples.save(target, OLD)
    strategy, before = _Unfinished(lambda: _content(target)), _content(target)
    with pytest.raises(KeyboardInterrupt):
        samples.save(target, NEW, sharded_strategy=strategy, overwrite=True)
    assert samples.find_wrong(Path(target), OLD) == []
    return [before, strategy.seen, _content(target)]


@pytest.mark.parametrize("world", [1, 3])
def test_an_overwrite_that_is_not_finished_changes_nothing(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Until the commit, a load gives the old checkpoint whole, even when all files of the new one are written."""
    for before, between, after in ranks.run(world, _overwrite_unfinished, str(tmp_path / "ckpt")):
        assert before["common"]["iteration"] == OLD
        assert between == before
        assert after == before


def test_a_background_save_that_is_not_finalized_changes_nothing(tmp_path: Path) -> None:
    """A background overwrite that is written and never finalized is not there: the old checkpoint is, whole."""
    dc.save(samples.state_dict(OLD), tmp_path / "ckpt")
    request = dc.save(samples.state_dict(NEW), tmp_path / "ckpt", async_sharded_save=True, overwrite=True)
    assert request is not None
    request.staged().run()
    assert samples.differences(samples.load(tmp_path / "ckpt"), OLD) == []


# Errors of one rank: what only the main rank can see, the others must hear of.


def _main_rank_finds(directory: str) -> list[tuple[str, str]]:
    """Kind and text of what this rank gets where only the main rank looks; then all ranks save, at the same place."""
    rank, world = dist.get_rank(), dist.get_world_size()
    target, wanted = Path(directory) / "ckpt", samples.template(rank, world)
    plain = Path(directory) / "plain"
    if rank == 0:
        plain.mkdir()
        (plain / "notes.txt").write_text("not a checkpoint")
    dist.barrier()
    attempts: list[Callable[[], Any]] = [
        lambda: dc.load(wanted, target),
        lambda: dc.load(wanted, plain),
        lambda: dc.save(wanted, plain),
    ]
    found = []
    for attempt in attempts:
        with pytest.raises(CheckpointingException) as raised:
            attempt()
        found.append((type(raised.value).__name__, str(raised.value)))
    samples.save(target, NEW)  # to a directory that nobody has made
    assert samples.find_wrong(target, NEW) == []
    return found


@pytest.mark.parametrize("world", [2, *in_proof(4)])
def test_what_the_main_rank_finds_all_ranks_raise(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """A directory that is missing, is no checkpoint or is not empty is the same error on every rank; they go on."""
    results = ranks.run(world, _main_rank_finds, str(tmp_path))
    assert results == [results[0]] * world
    kinds = [kind for kind, _ in results[0]]
    assert kinds == ["NotACheckpointError", "IncompleteCheckpointError", "StorageError"]
    for _, text in results[0]:
        assert text.startswith("rank 0, in ")
        assert str(tmp_path) in text


# Serialised buckets: the second thread is started when the first has written.


@table("files", [1, 2])
def test_two_threads_write_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """With two file threads, two tensors are being written at one time, to one file as to two."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "2")
    together, have_met, pwritev = threading.Barrier(2), threading.Event(), os.pwritev

    def meeting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if sum(buffer.nbytes for buffer in buffers) >= LARGE and not have_met.is_set():
            together.wait(60)  # for the other tensor's write; one that is cut short is gone on with
            have_met.set()
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", meeting)
    full = {key: torch.full((LARGE,), number, dtype=torch.int16) for number, key in enumerate("ab")}
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in full.items()}
    dc.save(state, tmp_path / "ckpt", TorchDistSaveShardedStrategy(thread_count=files))
    assert len(list((tmp_path / "ckpt").glob("*.distcp"))) == files
    for key, tensor in dc.load_plain_tensors(tmp_path / "ckpt").items():
        assert torch.equal(tensor, full[key])


# Uneven shards below prepended axes: chunks with as many offsets as axes, and fewer sizes.

LAYERS, ROWS, COLUMNS = 2, 7, 3


def _layers(full: torch.Tensor) -> list[ShardedTensor]:
    """Rows of every layer, in as many uneven parts as there are ranks."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    low, high = ROWS * rank // world, ROWS * (rank + 1) // world
    parts = [full[layer, low:high].clone() for layer in range(LAYERS)]
    return [
        ShardedTensor(
            "w", part, part.dtype, tuple(part.shape), tuple(full.shape), (layer, low, 0), None, prepend_axis_num=1
        )
        for layer, part in enumerate(parts)
    ]


def _whole() -> torch.Tensor:
    return torch.arange(float(LAYERS * ROWS * COLUMNS)).view(LAYERS, ROWS, COLUMNS)


def _save_layers(path: str) -> None:
    dc.save({"w": _layers(_whole())}, path)


def _load_layers(path: str) -> bool:
    loaded = dc.load({"w": _layers(torch.zeros(LAYERS, ROWS, COLUMNS))}, path)["w"]
    return all(torch.equal(part, shard.data) for part, shard in zip(loaded, _layers(_whole()), strict=True))


@pytest.mark.parametrize("world", [3, *in_proof(2, 4)])
def test_uneven_shards_below_a_prepended_axis(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Their chunks have every axis in offsets and sizes, fill the tensor, and load at any size and by plain DCP."""
    path = str(tmp_path / "ckpt")
    ranks.run(world, _save_layers, path)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata["w"]
    assert sorted(tuple(chunk.offsets) for chunk in stored.chunks) == [
        (layer, ROWS * rank // world, 0) for layer in range(LAYERS) for rank in range(world)
    ]
    for chunk in stored.chunks:
        assert (len(chunk.sizes), chunk.sizes[0], chunk.sizes[2]) == (3, 1, COLUMNS)
    assert sum(chunk.sizes.numel() for chunk in stored.chunks) == LAYERS * ROWS * COLUMNS
    for other in (1, 2, 3, 4):
        assert all(ranks.run(other, _load_layers, path))
    plain = {"w": torch.zeros(LAYERS, ROWS, COLUMNS)}
    dcp.load(plain, checkpoint_id=path)
    assert torch.equal(plain["w"], _whole())
