"""What the tests of world sizes share."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from tests.logs import collect_warnings
from tests.states import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.backends import Backend

ROWS, COLUMNS, OBJECTS = 16, 3, 8
CONTENT = {"kind": "worlds"}
COMMON = {"iteration": 17, "args": {"lr": 0.1, "names": ["a", "b"]}}
MODES = [True, False, *(mode.value for mode in dc.StrictHandling)]
Outcome = tuple[str, Any]


def values(first: int) -> torch.Tensor:
    """A tensor of numbers."""
    return (torch.arange(ROWS * COLUMNS) + first).reshape(ROWS, COLUMNS).float()


def box(key: str, full: torch.Tensor, low: int, high: int, replica: int = 0) -> ShardedTensor:
    """Describe a range of rows."""
    data = full[low:high].clone()
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), tuple(full.shape), (low, 0), None, replica)


def even(key: str, full: torch.Tensor) -> ShardedTensor:
    """Describe equal shares of rows."""
    rank, world = rank_and_size()
    return ShardedTensor.from_rank_offsets(key, full.chunk(world)[rank].clone(), (0, rank, world))


def own_rows() -> tuple[int, int]:
    """Rows of this rank in an uneven cut: one for the first, all that remain for the last, none for some."""
    rank, world = rank_and_size()
    edges = [0] + [min(1 + i * (i + 1) // 2, ROWS) for i in range(world - 1)] + [ROWS]
    return edges[rank], edges[rank + 1]


def swiglu(key: str, full: torch.Tensor) -> ShardedTensorFactory:
    """A rank's rows of both halves, in one tensor."""
    rank, world = rank_and_size()

    def build(key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key, part.clone(), (0, rank + half * world, 2 * world))
            for half, part in enumerate(data.chunk(2))
        ]

    local = torch.cat([half.chunk(world)[rank] for half in full.chunk(2)])
    return ShardedTensorFactory(key, local, build, torch.cat)


def each_object(*, filled: bool) -> list[ShardedObject]:
    """Every object on every rank; the ranks take turns as main replicas."""
    rank, world = rank_and_size()
    return [
        ShardedObject("rng", {"number": i} if filled else None, (OBJECTS,), (i,), int(i % world != rank))
        for i in range(OBJECTS)
    ]


def saved() -> dict[str, Any]:
    """An even cut, layers dealt out to the ranks, copies, a factory, objects, common values and a local one."""
    rank, world = rank_and_size()
    layers = range(rank, ROWS, world)
    return {
        "even": even("even", values(0)),
        "layers": [
            ShardedTensor.from_rank_offsets("layers", values(5)[i].clone(), (0, i, ROWS), prepend_axis_num=1)
            for i in layers
        ],
        "copied": ShardedTensor.from_rank_offsets("copied", values(7).bfloat16(), replica_id=rank),
        "swiglu": swiglu("swiglu", values(9)),
        "objects": each_object(filled=True),
        "mine": LocalNonpersistentObject(rank),
        **COMMON,
    }


def other_layout() -> dict[str, Any]:
    """Another layout of it: uneven rows of every tensor, objects, and a common value that is to be replaced."""
    blank = torch.full((ROWS, COLUMNS), -1.0)
    keys = {"even": blank, "layers": blank, "copied": blank.bfloat16(), "swiglu": blank}
    return {
        "rows": {key: box(key, full, *own_rows()) for key, full in keys.items()},
        "objects": each_object(filled=False),
        "mine": LocalNonpersistentObject("here"),
        "iteration": 0,
    }


def loaded_rows(path: str) -> dict[tuple[str, int], list[float]]:
    """This rank's rows of every tensor, as they were loaded."""
    rows = dc.load(other_layout(), path)["rows"]
    low = own_rows()[0]
    return {(key, low + i): row.tolist() for key, tensor in rows.items() for i, row in enumerate(tensor)}


def loaded_rest(path: str) -> Any:
    """Load all but the rows."""
    loaded = dc.load(other_layout(), path)
    del loaded["rows"]
    return loaded


def hole() -> dict[str, Any]:
    """The last row is nobody's."""
    low, high = own_rows()
    return {"w": box("w", values(0), low, min(high, ROWS - 1))}


def overlap() -> dict[str, Any]:
    """The first row is the last rank's too."""
    rank, world = rank_and_size()
    again = [box("w", values(0), 0, 1)] if rank == world - 1 else []
    return {"w": [box("w", values(0), *own_rows()), *again]}


def two_dtypes() -> dict[str, Any]:
    """The last rank has a copy of another dtype."""
    rank, world = rank_and_size()
    copies = [box("w", values(0).long(), 0, ROWS, replica=1)] if rank == world - 1 else []
    return {"w": [box("w", values(0), *own_rows()), *copies]}


def load_strictly(path: str, mode: str | bool) -> Any:
    """What comes of a key that is wanted and not stored and keys that are stored and not wanted, and what is logged."""
    low, high = own_rows()
    wanted = {key: box(key, torch.zeros(ROWS, COLUMNS), low, high) for key in ("even", "absent")}
    with collect_warnings("shardckpt.validation.keys", logging.NOTSET) as records:
        found = dc.load(wanted, path, strict=mode, on_unused="ignore")
    state, *keys = found if isinstance(found, tuple) else (found,)
    return sorted(state), keys, records


def described(shards: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What shards say of themselves."""
    return {key: (type(s).__name__, s.global_shape, getattr(s, "dtype", None), s.data) for key, s in shards.items()}


def saves(path: str) -> dict[str, Callable[[], Any]]:
    """The calls that save."""
    return {
        "save": lambda: dc.save(saved(), path, content_metadata=CONTENT),
        "save: existing directory": lambda: dc.save(saved(), path),
        "save: overwrite": lambda: dc.save(saved(), path, content_metadata=CONTENT, overwrite=True),
        "save: unknown backend": lambda: dc.save(saved(), path + "-no", ("nonsense", 1)),
        "save: hole": lambda: dc.save(hole(), path + "-no"),
        "save: overlap": lambda: dc.save(overlap(), path + "-no"),
        "save: dtypes disagree": lambda: dc.save(two_dtypes(), path + "-no"),
    }


def queries(path: str) -> dict[str, Callable[[], Any]]:
    """The calls that ask."""
    return {
        "load_common_state_dict": lambda: dc.load_common_state_dict(path),
        "load_content_metadata": lambda: dc.load_content_metadata(path),
        "load_plain_tensors": lambda: {key: t.tolist() for key, t in dc.load_plain_tensors(path).items()},
        "load_tensors_metadata": lambda: described(dc.load_tensors_metadata(path)),
        "load_sharded_metadata": lambda: described(dc.load_sharded_metadata(path)),
        "check_is_distributed_checkpoint": lambda: dc.check_is_distributed_checkpoint(path),
    }


def loads(path: str) -> dict[str, Callable[[], Any]]:
    """The calls that load."""
    low, high = own_rows()
    return {
        "load: missing directory": lambda: dc.load(other_layout(), path + "-no"),
        "load: other backend": lambda: dc.load(other_layout(), path, ("nonsense", 1)),
        "load: hole": lambda: dc.load({"even": hole()["w"]}, path),
        "load: other shape": lambda: dc.load({"even": box("even", torch.zeros(ROWS, 2), low, high)}, path),
        "load: unknown mode": lambda: dc.load(other_layout(), path, strict="nonsense"),
        **{f"strict={mode}": lambda mode=mode: load_strictly(path, mode) for mode in MODES},
        "load": lambda: loaded_rest(path),
        "listing": lambda: sorted(entry.name for entry in Path(path).parent.iterdir()),
    }


def program(directory: str) -> tuple[dict[str, Outcome], dict[tuple[str, int], list[float]]]:
    """All steps in a row on one rank: what each returned or raised, and the rows that were loaded."""
    path = str(Path(directory) / "ckpt")
    steps = {**saves(path), **queries(path), **loads(path)}
    return {name: outcome(step, directory) for name, step in steps.items()}, loaded_rows(path)


def outcome(step: Callable[[], Any], directory: str) -> Outcome:
    """What a call returned or raised."""
    try:
        return "returned", step()
    except CheckpointingException as exc:
        return type(exc).__name__, without_ranks(str(exc).replace(directory, "DIRECTORY"))


def without_ranks(message: str) -> str:
    """The message without who says it: alone nobody needs to be named, and rank numbers depend on the size."""
    said = re.sub(r"^rank \d+, in '[^']*': ", "", message)
    said = re.sub(r"; installed: .*", "", said)  # other tests of this process have registered strategies of their own
    # two shards of one key are of two ranks, or in two places of one
    said = re.sub(r"twice, (by|both times by) .*: (give each a key of its own, or )?give", "twice: give", said)
    return re.sub(r"rank \d+", "rank N", said)


def merged(results: list[Any]) -> Any:
    """What all ranks say, after checking that they say the same, and the rows of all."""
    for outcomes, _ in results:
        assert outcomes == results[0][0]
    rows = {place: row for _, mine in results for place, row in mine.items()}
    assert len(rows) == sum(len(mine) for _, mine in results)
    return results[0][0], rows


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> Iterator[Any]:
    """What the program gives without a process group."""
    assert not dist.is_initialized()
    return merged([program(str(tmp_path_factory.mktemp("alone")))])


def compare(results: list[Any], alone: Any) -> None:
    """What ranks found is what one process found."""
    outcomes, rows = merged(results)
    assert {name: found for name, found in outcomes.items() if found != alone[0][name]} == {}
    assert outcomes.keys() == alone[0].keys()
    assert rows == alone[1]
