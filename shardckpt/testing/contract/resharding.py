"""The contract's part about ranks: 1 to 4 save, 1 to 4 load, in other layouts; an error of one is everyone's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract import jobs
from shardckpt.testing.contract.claims import Claims, each
from shardckpt.testing.contract.shards import LAYOUTS, make_tensor, whole_shard

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.testing.ranks import Ranks

MIB = 1 << 20
LARGE = 4 * MIB


class ReshardingTests(Claims):
    """Saves and loads of several ranks together."""

    def _layouts(self) -> list[str]:
        flattened = self.get_claim("supports_flattened_range")
        return [name for name in LAYOUTS if flattened or name != "flattened"]

    @each(("savers", "loaders"), [(1, 2), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1), (4, 3)])
    def test_resharding(self, rank_pool: Ranks, path: Path, savers: int, loaders: int) -> None:
        """Saved by n ranks and loaded by m, each tensor in another layout, every element is the global tensor's."""
        layouts, dtypes = self._layouts(), self.get_claim("dtypes")[:4]
        rank_pool.run(savers, jobs.save_layouts, self.subject, str(path), layouts, dtypes)
        rank_pool.run(loaders, jobs.load_layouts, self.subject, str(path), layouts, dtypes, 1 + loaders % 3)

    @each("layout", [*LAYOUTS])
    def test_layout(self, rank_pool: Ranks, path: Path, layout: str) -> None:
        """Tensors that three ranks save in one layout are loaded in it by three ranks and, complete, by one process."""
        if layout == "flattened":
            self.require("supports_flattened_range")
        dtypes = self.get_claim("dtypes")[:2]
        rank_pool.run(3, jobs.save_layouts, self.subject, str(path), [layout], dtypes)
        rank_pool.run(3, jobs.load_layouts, self.subject, str(path), [layout], dtypes, 0)
        for dtype in dtypes:
            tensor = make_tensor(f"{layout}.{dtype}", dtype)
            wanted = whole_shard(f"{layout}.{dtype}", tensor.clone().fill_(1))
            check_same(self.subject.load({"w": wanted}, path)["w"], tensor, f"{layout}.{dtype}")

    @each("parallel", ["save", "load"])
    def test_fully_parallel_wrapper(self, rank_pool: Ranks, path: Path, parallel: str) -> None:
        """The strategy works inside the fully parallel wrappers, which give it other shards than the caller's."""
        layouts, dtypes = ["rows", "replicated", "one rank"], self.get_claim("dtypes")[:2]
        rank_pool.run(3, jobs.save_layouts, self.subject, str(path), layouts, dtypes, parallel == "save")
        rank_pool.run(2, jobs.load_layouts, self.subject, str(path), layouts, dtypes, 1, parallel == "load")

    def test_the_main_replica_is_stored(self, rank_pool: Ranks, path: Path) -> None:
        """Of a shard that several ranks have, the main replica is stored, whichever rank has it."""
        rank_pool.run(3, jobs.save_replicas, self.subject, str(path))
        expected = make_tensor("replica", torch.float32)
        for key in ("replica", "pair"):
            loaded = self.subject.load({"w": whole_shard(key, expected.clone().zero_())}, path)
            check_same(loaded["w"], expected, f"{key!r}, of which rank 1 has the main replica,")

    def test_objects_of_ranks(self, rank_pool: Ranks, path: Path) -> None:
        """An object of each rank, and one that all have, are loaded by any number of ranks."""
        self.require("supports_objects")
        rank_pool.run(3, jobs.save_one_object, self.subject, str(path))
        rank_pool.run(2, jobs.load_one_object, self.subject, str(path), 3)

    def test_common_state_of_the_main_rank(self, rank_pool: Ranks, path: Path) -> None:
        """Where the common state differs between ranks, the main rank's is stored, and all load it."""
        rank_pool.run(2, jobs.save_different_common, self.subject, str(path))
        loaded = self.subject.load({}, path)
        check(loaded.get("step") == 100, f"the common state is {loaded!r}; the main rank has saved step 100")

    def test_the_index_of_all_ranks(self, rank_pool: Ranks, path: Path) -> None:
        """load_index lists, on every rank, the tensors that all ranks have saved."""
        layouts = self._layouts()
        rank_pool.run(3, jobs.save_layouts, self.subject, str(path), layouts, self.get_claim("dtypes")[:1])
        found = rank_pool.run(2, jobs.load_index, self.subject, str(path))
        check(found[0] == found[1], "load_index lists other things on rank 1 than on rank 0")
        dtype = self.get_claim("dtypes")[0]
        expected = sorted((f"{layout}.{dtype}", (12, 8), str(dtype)) for layout in layouts)
        check(found[0] == expected, f"load_index lists {found[0]}, not {expected}")

    @each("failing", [0, 1])
    def test_an_error_of_one_rank(self, rank_pool: Ranks, path: Path, failing: int) -> None:
        """If the disk of one rank fails, all ranks raise the same error, nothing changes, and the next save works."""
        rank_pool.run(2, jobs.save_version, self.subject, str(path), 1)
        found = rank_pool.run(2, jobs.fail_at_fsync, self.subject, str(path), failing)
        (kind, text), left = found[0]
        check(bool(kind), f"rank {failing} could not write to its disk, and the save succeeded")
        check(found[1][0] == (kind, text), f"rank 0 raised {kind}: {text}; rank 1 raised {found[1][0]}")
        check(left == [path.name], f"the failed save has left {left}")

    def test_an_error_of_one_rank_in_a_load(self, rank_pool: Ranks, path: Path) -> None:
        """If one rank cannot load, all ranks raise the same error, and none waits for another."""
        rank_pool.run(2, jobs.save_version, self.subject, str(path), 1)
        broken = str(path.with_name("absent"))
        found = rank_pool.run(2, jobs.fail_to_load, self.subject, str(path), broken)
        check(bool(found[0][0]), "rank 1 has no checkpoint, and the load succeeded")
        check(found[0] == found[1], f"rank 0 raised {found[0]}, rank 1 raised {found[1]}")

    @each("slow", [0, 1, 2])
    def test_a_slow_rank(self, rank_pool: Ranks, path: Path, slow: int) -> None:
        """A rank that takes long to write is waited for: the shards of all ranks are there when save returns."""
        rank_pool.run(3, jobs.save_with_slow_rank, self.subject, str(path), slow)

    def test_a_subgroup(self, rank_pool: Ranks, path: Path) -> None:
        """Some ranks of a job save and load without the others: every collective is of the context's group."""
        rank_pool.run(3, jobs.save_in_subgroup, self.subject, str(path), [1, 2])

    def test_bytes_that_a_rank_reads(self, rank_pool: Ranks, path: Path) -> None:
        """Each of four ranks that load a quarter of a tensor reads less than half of its bytes."""
        self.require_counted_reads()
        rank_pool.run(4, jobs.save_large, self.subject, str(path), LARGE)
        found = rank_pool.run(4, jobs.count_bytes_read, self.subject, str(path), LARGE)
        shown = ", ".join(f"{nbytes / MIB:.1f}" for nbytes in found)
        check(
            max(found) < LARGE // 2, f"the ranks read {shown} MiB, where less than {LARGE / MIB / 2:.1f} are expected"
        )

    def test_bytes_on_disk(self, rank_pool: Ranks, path: Path) -> None:
        """A tensor that three ranks have is stored once, without more bytes than are claimed."""
        self.require("max_stored_ratio")
        rank_pool.run(3, jobs.save_large_replicas, self.subject, str(path), 2 * MIB)
        stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        limit = self.get_claim("max_stored_ratio") * 2 * MIB + 64 * 1024
        check(
            stored <= limit, f"a tensor of 2 MiB that 3 ranks have takes {stored / MIB:.2f} MiB, not {limit / MIB:.2f}"
        )
