"""When ranks hear of an error: before they write for long, and before some of them meet in a smaller group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt.storage import CheckpointWriter
from tests import backends

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


def _save_with_a_hole(directory: str) -> tuple[str, bool]:
    written: list[str] = []
    create = CheckpointWriter.create

    def counted(self: CheckpointWriter, name: str, *args: Any, **options: Any) -> Any:
        written.append(name)
        return create(self, name, *args, **options)

    shard = ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, dist.get_rank(), 3))  # of three there are two
    with mock.patch.object(CheckpointWriter, "create", counted):
        try:
            dist_checkpointing.save({"w": shard}, f"{directory}/ckpt", validate_access_integrity=False)
        except CheckpointingException as exc:
            return str(exc), bool(written)
    return "", bool(written)


@backends.both_in_proof
def test_a_bad_plan_is_told_before_anything_is_written(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """What the main rank finds in the plan of all ranks ends the save before a rank begins to write its tensors."""
    (message, wrote), *others = gloo_ranks.run(2, _save_with_a_hole, str(tmp_path))
    assert "do not fill 1 tensor exactly: 'w'" in message
    assert not wrote
    assert others == [(message, False)]
