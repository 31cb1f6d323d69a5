"""Parts of local checkpoints on the disks of ranks: what the tests of this folder save, damage and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardckpt.local import CliqueReplication, LocalCheckpointManager, TensorAwareStateDict
from shardckpt.local.parts import PartId
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.logs import collect_warnings


def get_rank() -> int:
    """Return this rank, or 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks, or 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def make_state(step: int, nbytes: int = 4096) -> dict[str, Any]:
    """Return a tensor of this rank's, some that all have, an object, and common state."""
    rank, world = get_rank(), get_world_size()
    mine = torch.arange(nbytes // 4, dtype=torch.int32) + 1000 * step + rank
    return {
        "mine": ShardedTensor.from_rank_offsets("mine", mine[None], (0, rank, world)),
        "all": [
            ShardedTensor.from_rank_offsets(f"all{n}", torch.full((101,), step + n), replica_id=rank) for n in range(3)
        ],
        "object": ShardedObject("o", {"rank": rank, "step": step}, (world,), (rank,)),
        "step": step,
    }


def make_part(step: int, nbytes: int = 4096) -> TensorAwareStateDict:
    """Return this rank's part of the state of a step."""
    return TensorAwareStateDict.from_state_dict(make_state(step, nbytes))[0]


def check_part(part: TensorAwareStateDict, step: int, nbytes: int = 4096) -> None:
    """Check that a part gives the state of the step back."""
    wanted, expected = make_state(0, nbytes), make_state(step, nbytes)
    loaded = part.to_state_dict(wanted, algo="fully_parallel")
    assert torch.equal(loaded["mine"], expected["mine"].data)
    for got, shard in zip(loaded["all"], expected["all"], strict=True):
        assert torch.equal(got, shard.data)
    assert loaded["object"] == {"rank": get_rank(), "step": step}
    assert loaded["step"] == step


def get_root(base: str) -> Path:
    """Return the directory that stands for this rank's disk."""
    return Path(base, f"node{get_rank()}")


def make_manager(base: str, cliques: tuple[int, int] | None = None, keep: int = 1) -> LocalCheckpointManager:
    """Return a manager of this rank's disk."""
    return LocalCheckpointManager(get_root(base), CliqueReplication(*cliques) if cliques else None, keep=keep)


def list_names(base: str) -> list[tuple[int, int]]:
    """Return (step, rank) of the parts on this rank's disk; nothing else is there."""
    parts = [PartId.parse(path.name) for path in get_root(base).iterdir()]
    assert None not in parts
    return sorted((part.save.step, part.rank) for part in parts if part is not None)


def find_directory(root: Path, step: int, rank: int) -> Path:
    """Return where a part is on a disk."""
    (found,) = [
        path for path in root.iterdir() if (p := PartId.parse(path.name)) and (p.save.step, p.rank) == (step, rank)
    ]
    return found


def read_contents(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory, by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def save_steps(base: str, cliques: tuple[int, int] | None, steps: list[int], keep: int = 1, nbytes: int = 4096) -> Any:
    """Save steps, and return the names of the parts on this rank's disk."""
    manager = make_manager(base, cliques, keep)
    for step in steps:
        manager.save(make_part(step, nbytes), step)
    assert manager.find_latest() == steps[-1]
    return list_names(base)


def load_step(
    base: str, cliques: tuple[int, int] | None, expected: int, step: int | None = None, nbytes: int = 4096
) -> Any:
    """Load, check the values, and return what was logged."""
    manager = make_manager(base, cliques)
    with collect_warnings() as logged:
        latest = manager.find_latest()
        part = manager.load(step)
    assert step is not None or latest is not None
    check_part(part, expected, nbytes)
    return logged
