"""What the ranks of a large save move to make the index in parts: bytes are counted, and bounded for 16 M boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.simulation.index_parts import (
    count_opening,
    count_planning,
    make_plan,
    move_plan,
    replay_planning,
    write_index,
)
from shardckpt.mapping import ShardedTensor
from tests.safetensors.parts import InParts
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

RANKS, SHARDS = 256, 64


class _Few(InParts):
    part_rows = 64


class _Parts(InParts):
    part_rows = 1 << 10
    page_rows = 128


KINDS = pytest.mark.parametrize(
    "linked", [pytest.param(False, marks=pytest.mark.proof, id="plain"), pytest.param(True, id="ties and scales")]
)


@KINDS
def test_no_rank_receives_what_all_send(linked: bool) -> None:
    """Of 256 ranks with 64 shards each, none sends more than 32 KiB; what one receives are mostly the files' names.

    So it is where half of the tensors are scales of the others, and one is tied to another.
    """
    found = count_planning(RANKS, SHARDS, _Parts(), linked=linked)
    assert len(found.parts) > 8
    assert max(found.sent) <= 32 << 10
    assert max(found.received) <= 1_200 << 10
    assert make_plan(0, RANKS, SHARDS, linked=linked).nbytes * RANKS > max(found.received)
    assert (len(found.rest.aliases), len(found.rest.scales)) == ((1, SHARDS // 2) if linked else (0, 0))


@pytest.mark.parametrize("linked", in_proof(False, True))
def test_the_count_is_that_of_a_save(linked: bool) -> None:
    """The counted bytes are, rank by rank, those that the strategy's own planning moves; plans are moved as made."""
    found = count_planning(72, 4, _Few(), linked=linked)
    replay = replay_planning(72, 4, _Few(), linked=linked)
    assert found.sent == replay.sent
    assert found.received == replay.received_by
    assert move_plan(make_plan(0, 72, 4), 5) == make_plan(5, 72, 4)


def test_opening_for_one_rank_reads_few_pages(tmp_path: Path) -> None:
    """Of an index of 16,384 boxes, a rank reads the heads, and of each of its tensors one or two pages."""
    found = count_planning(RANKS, SHARDS, _Parts())
    nbytes = write_index(found, tmp_path / "c", RANKS, "crc32")
    data = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    wanted = [ShardedTensor.from_rank_offsets(f"layers.{n}.weight", data, (0, 77, RANKS)) for n in (3, 33)]
    record = (tmp_path / "c" / "shardckpt.json").stat().st_size
    index = (tmp_path / "c" / "index.safetensors").stat().st_size
    opened = count_opening(tmp_path / "c", wanted)
    assert opened - record - index < 0.2 * nbytes
