"""The contract's part about object stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract import jobs, store_jobs
from shardckpt.testing.contract.claims import Claims
from shardckpt.testing.contract.shards import box_shard, make_tensor

if TYPE_CHECKING:
    import pytest

    from shardckpt.testing.faulty_store import FaultyStore
    from shardckpt.testing.ranks import Ranks

MIB = 1 << 20


class StoreTests(Claims):
    """Checkpoints at URLs."""

    def test_url(self, rank_pool: Ranks, faulty_store: FaultyStore) -> None:
        """Two ranks save to a store, two load from it, and nothing but the checkpoint's objects is there."""
        self.require("supports_urls")
        rank_pool.run(2, store_jobs.save_version, self.subject, faulty_store.url, 1)
        rank_pool.run(2, jobs.load_and_check, self.subject, faulty_store.url, 1)

    def test_a_store_that_fails(self, rank_pool: Ranks, faulty_store: FaultyStore) -> None:
        """If an upload fails, all ranks raise the same error and nothing loads; the next save clears up."""
        self.require("supports_urls")
        url = faulty_store.url
        for number in (1, 2, 3):
            faulty_store.fails("put", number)
            found = rank_pool.run(2, store_jobs.save_error, self.subject, url)
            faulty_store.works()
            check(bool(found[0][0]), f"upload {number} and all after it failed, and the save succeeded")
            check(found[0] == found[1], f"rank 0 raised {found[0]}, rank 1 raised {found[1]}")
            kind, _ = jobs.error_of(dist_checkpointing.load, {}, url)
            check(bool(kind), f"upload {number} failed, and the URL loads as a checkpoint")
        rank_pool.run(2, store_jobs.save_version, self.subject, url, 2, True)
        rank_pool.run(2, jobs.load_and_check, self.subject, url, 2)

    def test_requested_ranges(self, faulty_store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """A slice of one of eight shards fetches less than half of the tensor's bytes from a store."""
        self.require("supports_urls")
        self.require("reads_only_requested")
        monkeypatch.setenv("SHARDCKPT_REMOTE_ATTEMPTS", "1")
        tensor = make_tensor("w", torch.float32, (4096, 256))
        cuts = [(slice(n * 512, (n + 1) * 512), slice(None)) for n in range(8)]
        self.subject.save({"w": [box_shard("w", tensor, cut) for cut in cuts]}, faulty_store.url)
        faulty_store.forget()
        with dist_checkpointing.open_checkpoint(faulty_store.url, self.subject.make_loader()) as opened:
            check_same(opened["w"][513:515], tensor[513:515], "two rows of the second shard")
        fetched = sum(request.nbytes for request in faulty_store.requests("read"))
        check(fetched < 2 * MIB, f"{fetched / MIB:.1f} MiB were fetched for a slice of a shard of 0.5 MiB")
