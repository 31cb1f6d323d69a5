"""The contract's part about background saves."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue, release_memory
from shardckpt.distributed.comm import Comm
from shardckpt.distributed.pickling import unpickle_trusted
from shardckpt.errors import CheckpointingException
from shardckpt.strategy import AsyncSaveStrategy, PlanContext
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract import jobs
from shardckpt.testing.contract.claims import Claims, each
from shardckpt.testing.contract.shards import whole_shard

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from shardckpt.testing.ranks import Ranks


class BackgroundTests(Claims):
    """Saves behind the training, and plans that are used again."""

    def _require(self, way: str) -> None:
        self.require("supports_async")
        if way == "process":
            self.require("supports_async_process")

    @each(("way", "ranks", "saves"), [("thread", 1, 1), ("thread", 2, 1), ("process", 2, 2)])
    def test_background_save(self, rank_pool: Ranks, path: Path, way: str, ranks: int, saves: int) -> None:
        """A background save stores the state of the moment when it was scheduled, however it changes then."""
        self._require(way)
        paths = [str(path.with_name(f"step-{n}")) for n in range(saves)]
        rank_pool.run(ranks, jobs.save_in_background, self.subject, paths, way == "process")

    def test_saves_in_flight(self, rank_pool: Ranks, path: Path) -> None:
        """Several saves that are scheduled before the first is written each keep their own state."""
        self._require("thread")
        paths = [str(path.with_name(f"step-{n}")) for n in range(3)]
        rank_pool.run(2, jobs.save_in_background, self.subject, paths, False, False)

    def test_plans_are_used_again(self, rank_pool: Ranks, path: Path) -> None:
        """Background saves by one strategy, one after the other, each store the values of their own moment."""
        self._require("thread")
        paths = [str(path.with_name(f"step-{n}")) for n in range(4)]
        rank_pool.run(2, jobs.save_in_background, self.subject, paths, False)

    def test_plans_in_the_foreground(self, path: Path) -> None:
        """Saves by one strategy store their own values, and shards of another shape, dtype or number get a new plan."""
        saver = self.subject.make_saver()
        states: list[dict[str, torch.Tensor]] = [
            {"w": torch.full((4, 3), 1.0), "b": torch.full((3,), 1.0)},
            {"w": torch.full((4, 3), 2.0), "b": torch.full((3,), 2.0)},
            {"w": torch.full((5, 3), 3.0), "b": torch.full((3,), 3.0)},
            {"w": torch.full((5, 3), 4.0)},
            {"w": torch.full((5, 3), 5, dtype=torch.int32), "b": torch.full((3,), 5.0)},
            {"b": torch.full((5, 3), 6.0), "w": torch.full((3,), 6, dtype=torch.int32)},
            {"w": torch.full((4, 3), 7.0), "b": torch.full((3,), 7.0)},
        ]
        for number, tensors in enumerate(states):
            state = {key: whole_shard(key, tensor) for key, tensor in tensors.items()}
            dist_checkpointing.save({**state, "step": number}, path, saver, overwrite=True)
            wanted = {key: whole_shard(key, torch.zeros_like(tensor)) for key, tensor in tensors.items()}
            loaded = self.subject.load(wanted, path)
            check(loaded["step"] == number, f"save {number} has stored the common state of save {loaded['step']}")
            for key, tensor in tensors.items():
                check_same(loaded[key], tensor, f"save {number} by one strategy: {key!r}")
        release_memory()

    def test_the_work_can_be_pickled(self) -> None:
        """The work of a planned save goes to another process and writes no tensor by itself."""
        self._require("process")
        saver = self.subject.make_saver()
        if not isinstance(saver, AsyncSaveStrategy):
            check(condition=False, message=f"supports_async = True, and {type(saver).__name__} is no AsyncSaveStrategy")
            return
        shard = whole_shard("w", torch.ones(4))
        prepared = saver.prepare([shard], {}, PlanContext(comm=Comm(alone=True), save_id="0" * 32))
        check(
            any(tensor.data_ptr() == shard.data.data_ptr() for tensor in prepared.work.tensors),  # type: ignore[union-attr]
            "work.tensors does not list the shard's tensor: a background save could not copy it in time",
        )
        check(len(prepared.work.keys) == len(prepared.work.tensors), "work.keys has no key for each of work.tensors")
        unpickle_trusted(pickle.dumps(prepared.work))

    def test_a_failed_background_save(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the disk fails behind the training, finalizing raises, nothing is left, and the next save works."""
        self._require("thread")
        raised = False
        with monkeypatch.context() as patch, AsyncCallsQueue() as queue:
            patch.setattr("os.fsync", _broken)
            state = jobs.make_version(1, with_objects=self.subject.with_objects)
            try:
                queue.schedule_async_request(self.subject.save(state, path, async_sharded_save=True))
                queue.maybe_finalize_async_calls(blocking=True)
            except CheckpointingException:
                raised = True
        check(raised, "the disk failed, and the background save succeeded")
        check(not list(path.parent.iterdir()), "the failed background save has left files")
        self.save_version(path, 2)
        self.check_version(path, 2)


def _broken(_fd: int) -> None:
    raise OSError(28, "No space left on device")
