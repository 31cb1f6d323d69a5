"""The training script that users copy, run by ranks that stay between tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardckpt.adapters import to_sharded_state_dict
from shardckpt.demo import train
from shardckpt.demo.model import ByteTransformer, MixtureOfExperts, feed_forward
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import build_copy, dict_list_map_outplace, nested_values
from tests.demo.train import read_reports
from tests.tables import table

if TYPE_CHECKING:
    from tests.ranks import Ranks


@table(("world_size", "options"), [(9, []), (3, ["--ep", "3"]), (4, ["--ep", "3"])])
def test_ranks_that_cannot_share_the_work_are_refused(
    world_size: int, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ranks than sequences, or ranks that experts cannot be split over, are one line before any rank waits."""
    monkeypatch.setenv("WORLD_SIZE", f"{world_size}")
    with pytest.raises(SystemExit, match=f"{world_size} ranks: "):
        train.main(["--dir", "unused", *options])


def _take_a_step(folder: str) -> int:
    return len(read_reports(Path(folder), "--steps", "1", "--interval", "1"))


def test_a_number_of_ranks_may_not_divide_the_sequences(ranks: Ranks, tmp_path: Path) -> None:
    """Five ranks train, though they do not divide the sequences of a step."""
    assert ranks.run(5, _take_a_step, str(tmp_path)) == [2] * 5


def _shards(ep: int, key: str) -> tuple[tuple[int, ...], list[int]]:
    """The global shape of a key, and the first row of this rank's shard and the one behind its last."""
    model = ByteTransformer(MixtureOfExperts if ep else feed_forward)
    train.shard(model, ep)
    (shard,) = (
        shard
        for shard in nested_values(dict_list_map_outplace(build_copy, to_sharded_state_dict(model)))
        if isinstance(shard, ShardedTensor) and shard.key == key
    )
    first = shard.global_offset[0]
    return shard.global_shape, [first, first + shard.local_shape[0]]


@pytest.mark.parametrize(
    ("ep", "key", "shape", "rows"),
    [
        (0, "embedding.weight", (257, 250), [[0, 65], [65, 130], [130, 195], [195, 257]]),
        (2, "blocks.0.network.experts.up", (7, 250, 100), [[0, 2], [4, 6], [2, 4], [6, 7]]),
        (4, "blocks.0.network.experts.up", (7, 250, 100), [[0, 2], [2, 4], [4, 6], [6, 7]]),
    ],
)
def test_shards_are_uneven(ranks: Ranks, ep: int, key: str, shape: tuple[int, ...], rows: list[list[int]]) -> None:
    """The demo shows tensors that 4 ranks do not divide, and experts split over ep first, by FSDP2 inside."""
    assert ranks.run(4, _shards, ep, key) == [(shape, part) for part in rows]
