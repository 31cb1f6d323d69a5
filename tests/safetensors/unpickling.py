"""Program and jobs: load a checkpoint of (safetensors, 1) where nothing that is stored can be unpickled."""

from __future__ import annotations

import pickle
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.dist_checkpointing import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

_WEIGHT = torch.arange(48.0).view(12, 4)
#: What unpickles, as (object, attribute): C and Python, and torch's reader of files.
_UNPICKLERS: tuple[tuple[Any, str], ...] = (
    (pickle, "load"),
    (pickle, "loads"),
    (pickle, "Unpickler"),
    (pickle, "_load"),
    (pickle, "_loads"),
    (pickle, "_Unpickler"),
    (torch, "load"),
)


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("something is unpickled")


def make_state() -> dict[str, Any]:
    """Return a tensor, an object with a tensor, and common state with one."""
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", _WEIGHT.clone()),
        "rng": ShardedObject("rng", {"seed": 3, "state": torch.ones(2)}, (1,), (0,)),
        "step": 5,
        "scale": torch.tensor(2.5),
    }


def _load(path: Path, rank: int = 0) -> None:
    """Load all that is stored, and check it."""
    wanted = {
        "weight": ShardedTensor("weight", None, _WEIGHT.dtype, (12, 4), (12, 4), (0, 0), None, replica_id=rank),
        "rng": ShardedObject("rng", None, (1,), (0,), replica_id=rank),
    }
    loaded = dist_checkpointing.load(wanted, path)
    assert torch.equal(loaded["weight"], _WEIGHT)
    assert (loaded["rng"]["seed"], loaded["rng"]["state"].tolist()) == (3, [1.0, 1.0])
    assert (loaded["step"], loaded["scale"].item()) == (5, 2.5)
    with dist_checkpointing.open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint["weight"][1:3], _WEIGHT[1:3])
    assert dist_checkpointing.load_common_state_dict(path)["step"] == 5


def load_on_rank(path: str) -> tuple[set[bytes], set[bytes]]:
    """Load on a rank of a group.

    Returns:
        What this rank has pickled for others, and what it has unpickled.
    """
    sent: set[bytes] = set()
    received: set[bytes] = set()
    real = {(owner, name): getattr(owner, name) for owner, name in _UNPICKLERS}
    dumps = pickle.dumps

    def recording_dumps(value: Any) -> bytes:
        data = dumps(value)
        sent.add(data)
        return data

    def recording_loads(data: Any) -> Any:
        received.add(bytes(data).rstrip(b"\0"))  # behind a message is padding; its last byte is the opcode STOP
        with _replaced(real):  # the tensors in a message go through torch.load
            return real[pickle, "loads"](data)

    guards = {**dict.fromkeys(_UNPICKLERS, _refuse), (pickle, "loads"): recording_loads}
    with _replaced({**guards, (pickle, "dumps"): recording_dumps}):
        _load(Path(path), dist.get_rank())
    return sent, received


@contextmanager
def _replaced(values: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Put values in the place of attributes until the block ends."""
    with ExitStack() as stack:
        for (owner, name), value in values.items():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


if __name__ == "__main__":
    for _owner, _name in _UNPICKLERS:
        setattr(_owner, _name, _refuse)
    _load(Path(sys.argv[1]))
    sys.stdout.write(" ".join(name for name in sys.modules if name.startswith("shardckpt")))
