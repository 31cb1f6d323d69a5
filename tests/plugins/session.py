"""What tests/test_third_party_plugin.py runs with the Python of the environment that has the plugin.

``python -m tests.plugins.session save BACKEND DIR DTYPE...``, ``load DIR DTYPE...``, ``commands LINE...``,
``refusal DIR...``.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.errors import CannotLoadError
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.faults.forks import fork, wait
from tests.states import columns, flattened, layers, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROWS, COLUMNS = 12, 6
COMMON = {"step": 11, "args": {"lr": 0.25, "stages": ["warm", "cool"], "resume": None}}
SAVERS, LOADERS = 2, 3
GROUP_TIMEOUT, RUN_TIMEOUT = 8.0, 60.0  # seconds


def whole(dtype: torch.dtype) -> torch.Tensor:
    """The global tensor of a dtype: values that every one of them holds exactly."""
    numbers = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    return (numbers % 3 == 0) if dtype == torch.bool else (numbers % 16).to(dtype)


_LAYOUTS = (rows, columns, flattened, layers)


def _state(dtypes: Sequence[str], *, shift: int) -> dict[str, Any]:
    """Every dtype under every layout, a scalar and an object that all ranks have, and common state."""
    rank = dist.get_rank()
    tensors = {
        f"{dtype}.{number}": _LAYOUTS[(number + shift) % len(_LAYOUTS)](
            f"{dtype}.{number}", whole(getattr(torch, dtype))
        )
        for dtype in dtypes
        for number in range(len(_LAYOUTS))
    }
    scalar = ShardedTensor.from_rank_offsets("scale", torch.tensor(0.5), replica_id=rank)
    seen = ShardedObject("seen", {"files": ["a", "b"], "line": 7}, (1,), (0,), replica_id=rank)
    return {"tensors": tensors, "scale": scalar, "seen": seen, **COMMON}


def _save(backend: str, directory: str, dtypes: Sequence[str]) -> None:
    dc.save(_state(dtypes, shift=0), directory, backend)


def _load(directory: str, dtypes: Sequence[str]) -> int:
    """Load every key under another layout than it was saved in, and compare; the number of shards compared."""
    expected, wanted = _state(dtypes, shift=1), _state(dtypes, shift=1)
    shards = [shard for shards in wanted["tensors"].values() for shard in shards]
    for shard in (*shards, wanted["scale"]):
        shard.data.zero_()
    loaded = dc.load({name: wanted[name] for name in ("tensors", "scale", "seen")}, directory)
    for key, values in loaded["tensors"].items():
        for value, shard in zip(values, expected["tensors"][key], strict=True):
            assert value.dtype == shard.data.dtype, key
            assert torch.equal(value.float(), shard.data.float()), key
    assert loaded["scale"].item() == 0.5
    assert loaded["seen"] == expected["seen"].data
    assert {name: loaded[name] for name in COMMON} == COMMON
    return len(shards)


def _run_on_ranks(world: int, function: Callable[[], object]) -> None:
    """Run a function on every rank of a group of forks, which have imported torch already."""
    with tempfile.TemporaryDirectory() as folder:

        def be(rank: int) -> None:
            torch.set_num_threads(1)
            method = f"file://{folder}/store"
            dist.init_process_group("gloo", method, dt.timedelta(seconds=GROUP_TIMEOUT), world, rank)
            function()
            dist.barrier()
            dist.destroy_process_group()

        statuses = wait([fork(lambda rank=rank: be(rank)) for rank in range(world)], RUN_TIMEOUT)  # type: ignore[misc]
    if any(status != 0 for status in statuses.values()):
        raise SystemExit(f"{world} ranks ended with {list(statuses.values())}: see above")


def save(backend: str, directory: str, *dtypes: str) -> None:
    """Save with 2 ranks, load with 3 under other layouts, and say what is stored."""
    _run_on_ranks(SAVERS, lambda: _save(backend, directory, dtypes))
    _run_on_ranks(LOADERS, lambda: _load(directory, dtypes))


def load(directory: str, *dtypes: str) -> dict[str, Any]:
    """Load with 3 ranks, and list what is stored."""
    _run_on_ranks(LOADERS, lambda: _load(directory, dtypes))
    stored = dc.load_tensors_metadata(directory)
    return {key: [str(shard.dtype), list(shard.global_shape)] for key, shard in stored.items()}


def commands(*lines: str) -> list[tuple[int, str]]:
    """Exit status of each command line of ``shardckpt``, and what it printed."""
    found = []
    for line in lines:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            found.append((main(shlex.split(line)), out.getvalue()))
    return found


def refusal(*directories: str) -> list[dict[str, Any]]:
    """The error of each load; and whether the built-in backend works beside it."""
    return [{**_error(directory), "builtin": _builtin_works()} for directory in directories]


def _error(directory: str) -> dict[str, str]:
    try:
        dc.load({}, directory)
    except CannotLoadError as exc:
        return {"kind": type(exc).__name__, "message": str(exc)}
    return {"kind": "", "message": "it loaded"}


def _builtin_works() -> bool:
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "builtin"
        dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))}, path)
        return torch.equal(dc.load_plain_tensors(path)["w"], torch.ones(3))


if __name__ == "__main__":
    command = {"save": save, "load": load, "commands": commands, "refusal": refusal}[sys.argv[1]]
    print(json.dumps(command(*sys.argv[2:])))  # noqa: T201 - the answer
