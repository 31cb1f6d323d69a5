"""One program at every world size and without a process group: the same values, the same refusals, the same words."""

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
from tests import backends
from tests.logs import collect_warnings
from tests.states import rank_and_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.backends import Backend
    from tests.ranks import RankPool, Ranks

ROWS, COLUMNS, OBJECTS = 16, 3, 8
CONTENT = {"kind": "worlds"}
COMMON = {"iteration": 17, "args": {"lr": 0.1, "names": ["a", "b"]}}
MODES = [True, False, *(mode.value for mode in dc.StrictHandling)]

#: What is refused, and as what; everything else in the program succeeds.
REFUSALS = {
    "save: existing directory": "StorageError",
    "save: unknown backend": "UnknownBackendError",
    "save: hole": "ShardingError",
    "save: overlap": "ShardingError",
    "save: dtypes disagree": "ShardingError",
    "load: missing directory": "NotACheckpointError",
    "load: other backend": "StrategyMismatchError",
    "load: hole": "ShardingError",
    "load: other shape": "ShapeMismatchError",
    "load: unknown mode": "CheckpointingException",
    "strict=True": "KeyMismatchError",
    "strict=assume_ok_unexpected": "KeyMismatchError",
    "strict=raise_unexpected": "KeyMismatchError",
    "strict=raise_all": "KeyMismatchError",
}

Outcome = tuple[str, Any]


def _values(first: int) -> torch.Tensor:
    return (torch.arange(ROWS * COLUMNS) + first).reshape(ROWS, COLUMNS).float()


def _box(key: str, full: torch.Tensor, low: int, high: int, replica: int = 0) -> ShardedTensor:
    data = full[low:high].clone()
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), tuple(full.shape), (low, 0), None, replica)


def _even(key: str, full: torch.Tensor) -> ShardedTensor:
    rank, world = rank_and_size()
    return ShardedTensor.from_rank_offsets(key, full.chunk(world)[rank].clone(), (0, rank, world))


def _edges() -> tuple[int, int]:
    """Rows of this rank in an uneven cut: one for the first, all that remain for the last, none for some."""
    rank, world = rank_and_size()
    edges = [0] + [min(1 + i * (i + 1) // 2, ROWS) for i in range(world - 1)] + [ROWS]
    return edges[rank], edges[rank + 1]


def _swiglu(key: str, full: torch.Tensor) -> ShardedTensorFactory:
    """A rank's rows of both halves, in one tensor."""
    rank, world = rank_and_size()

    def build(key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key, part.clone(), (0, rank + half * world, 2 * world))
            for half, part in enumerate(data.chunk(2))
        ]

    local = torch.cat([half.chunk(world)[rank] for half in full.chunk(2)])
    return ShardedTensorFactory(key, local, build, torch.cat)


def _objects(*, filled: bool) -> list[ShardedObject]:
    """Every object on every rank; the ranks take turns as main replicas."""
    rank, world = rank_and_size()
    return [
        ShardedObject("rng", {"number": i} if filled else None, (OBJECTS,), (i,), int(i % world != rank))
        for i in range(OBJECTS)
    ]


def _saved() -> dict[str, Any]:
    """An even cut, layers dealt out to the ranks, copies, a factory, objects, common values and a local one."""
    rank, world = rank_and_size()
    layers = range(rank, ROWS, world)
    return {
        "even": _even("even", _values(0)),
        "layers": [
            ShardedTensor.from_rank_offsets("layers", _values(5)[i].clone(), (0, i, ROWS), prepend_axis_num=1)
            for i in layers
        ],
        "copied": ShardedTensor.from_rank_offsets("copied", _values(7).bfloat16(), replica_id=rank),
        "swiglu": _swiglu("swiglu", _values(9)),
        "objects": _objects(filled=True),
        "mine": LocalNonpersistentObject(rank),
        **COMMON,
    }


def _wanted() -> dict[str, Any]:
    """Another layout of it: uneven rows of every tensor, objects, and a common value that is to be replaced."""
    blank = torch.full((ROWS, COLUMNS), -1.0)
    keys = {"even": blank, "layers": blank, "copied": blank.bfloat16(), "swiglu": blank}
    return {
        "rows": {key: _box(key, full, *_edges()) for key, full in keys.items()},
        "objects": _objects(filled=False),
        "mine": LocalNonpersistentObject("here"),
        "iteration": 0,
    }


def _loaded_rows(path: str) -> dict[tuple[str, int], list[float]]:
    """This rank's rows of every tensor, as they were loaded."""
    rows = dc.load(_wanted(), path)["rows"]
    low = _edges()[0]
    return {(key, low + i): row.tolist() for key, tensor in rows.items() for i, row in enumerate(tensor)}


def _loaded_rest(path: str) -> Any:
    loaded = dc.load(_wanted(), path)
    del loaded["rows"]
    return loaded


def _hole() -> dict[str, Any]:
    """The last row is nobody's."""
    low, high = _edges()
    return {"w": _box("w", _values(0), low, min(high, ROWS - 1))}


def _overlap() -> dict[str, Any]:
    """The first row is the last rank's too."""
    rank, world = rank_and_size()
    again = [_box("w", _values(0), 0, 1)] if rank == world - 1 else []
    return {"w": [_box("w", _values(0), *_edges()), *again]}


def _two_dtypes() -> dict[str, Any]:
    """The last rank has a copy of another dtype."""
    rank, world = rank_and_size()
    copies = [_box("w", _values(0).long(), 0, ROWS, replica=1)] if rank == world - 1 else []
    return {"w": [_box("w", _values(0), *_edges()), *copies]}


def _strict(path: str, mode: str | bool) -> Any:
    """What comes of a key that is wanted and not stored and keys that are stored and not wanted, and what is logged."""
    low, high = _edges()
    wanted = {key: _box(key, torch.zeros(ROWS, COLUMNS), low, high) for key in ("even", "absent")}
    with collect_warnings("shardckpt.validation.keys", logging.NOTSET) as records:
        found = dc.load(wanted, path, strict=mode)
    state, *keys = found if isinstance(found, tuple) else (found,)
    return sorted(state), keys, records


def _described(shards: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {key: (type(s).__name__, s.global_shape, getattr(s, "dtype", None), s.data) for key, s in shards.items()}


def _saves(path: str) -> dict[str, Callable[[], Any]]:
    return {
        "save": lambda: dc.save(_saved(), path, content_metadata=CONTENT),
        "save: existing directory": lambda: dc.save(_saved(), path),
        "save: overwrite": lambda: dc.save(_saved(), path, content_metadata=CONTENT, overwrite=True),
        "save: unknown backend": lambda: dc.save(_saved(), path + "-no", ("nonsense", 1)),
        "save: hole": lambda: dc.save(_hole(), path + "-no"),
        "save: overlap": lambda: dc.save(_overlap(), path + "-no"),
        "save: dtypes disagree": lambda: dc.save(_two_dtypes(), path + "-no"),
    }


def _queries(path: str) -> dict[str, Callable[[], Any]]:
    return {
        "load_common_state_dict": lambda: dc.load_common_state_dict(path),
        "load_content_metadata": lambda: dc.load_content_metadata(path),
        "load_plain_tensors": lambda: {key: t.tolist() for key, t in dc.load_plain_tensors(path).items()},
        "load_tensors_metadata": lambda: _described(dc.load_tensors_metadata(path)),
        "load_sharded_metadata": lambda: _described(dc.load_sharded_metadata(path)),
        "check_is_distributed_checkpoint": lambda: dc.check_is_distributed_checkpoint(path),
    }


def _loads(path: str) -> dict[str, Callable[[], Any]]:
    low, high = _edges()
    return {
        "load: missing directory": lambda: dc.load(_wanted(), path + "-no"),
        "load: other backend": lambda: dc.load(_wanted(), path, ("nonsense", 1)),
        "load: hole": lambda: dc.load({"even": _hole()["w"]}, path),
        "load: other shape": lambda: dc.load({"even": _box("even", torch.zeros(ROWS, 2), low, high)}, path),
        "load: unknown mode": lambda: dc.load(_wanted(), path, strict="nonsense"),
        **{f"strict={mode}": lambda mode=mode: _strict(path, mode) for mode in MODES},
        "load": lambda: _loaded_rest(path),
        "listing": lambda: sorted(entry.name for entry in Path(path).parent.iterdir()),
    }


def program(directory: str) -> tuple[dict[str, Outcome], dict[tuple[str, int], list[float]]]:
    """All steps in a row on one rank: what each returned or raised, and the rows that were loaded."""
    path = str(Path(directory) / "ckpt")
    steps = {**_saves(path), **_queries(path), **_loads(path)}
    return {name: _outcome(step, directory) for name, step in steps.items()}, _loaded_rows(path)


def _outcome(step: Callable[[], Any], directory: str) -> Outcome:
    try:
        return "returned", step()
    except CheckpointingException as exc:
        return type(exc).__name__, _without_ranks(str(exc).replace(directory, "DIRECTORY"))


def _without_ranks(message: str) -> str:
    """The message without who says it: alone nobody needs to be named, and rank numbers depend on the size."""
    said = re.sub(r"^rank \d+, in '[^']*': ", "", message)
    said = re.sub(r"; installed: .*", "", said)  # other tests of this process have registered strategies of their own
    return re.sub(r"rank \d+", "rank N", said)


def _merged(results: list[Any]) -> Any:
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
    return _merged([program(str(tmp_path_factory.mktemp("alone")))])


@backends.both_in_proof
def test_alone(alone: Any) -> None:
    """Without a process group every value is right, and exactly what should be refused is."""
    outcomes, rows = alone
    assert {name: kind for name, (kind, _) in outcomes.items() if kind != "returned"} == REFUSALS
    full = {"even": _values(0), "layers": _values(5), "copied": _values(7).bfloat16(), "swiglu": _values(9)}
    assert rows == {(key, i): row.tolist() for key, tensor in full.items() for i, row in enumerate(tensor)}
    objects = [{"number": i} for i in range(OBJECTS)]
    common = {**COMMON, "content_metadata": CONTENT}
    assert outcomes["load"][1] == {"objects": objects, "mine": "here", **common}
    assert outcomes["load_common_state_dict"][1] == common
    assert outcomes["load_content_metadata"][1] == CONTENT
    assert outcomes["load_plain_tensors"][1] == {key: tensor.tolist() for key, tensor in full.items()}
    assert set(outcomes["load_tensors_metadata"][1]) == set(full)
    assert set(outcomes["load_sharded_metadata"][1]) == {*full, *(f"rng/shard_{i}_{OBJECTS}" for i in range(OBJECTS))}
    assert outcomes["listing"][1] == ["ckpt"]


@backends.both_in_proof
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.ci)])
def test_world_size(ranks: Ranks, tmp_path: Path, alone: Any, world: int) -> None:
    """1, 2 and 4 ranks get what one process gets: values, sets of keys, kinds of errors, messages and warnings."""
    _compare(ranks.run(world, program, str(tmp_path)), alone)


@backends.both
@pytest.mark.ci
def test_eight_ranks(many_ranks: RankPool, tmp_path: Path, alone: Any) -> None:
    """So do 8 ranks."""
    _compare(many_ranks.run(8, program, str(tmp_path)), alone)


def _compare(results: list[Any], alone: Any) -> None:
    outcomes, rows = _merged(results)
    assert {name: found for name, found in outcomes.items() if found != alone[0][name]} == {}
    assert outcomes.keys() == alone[0].keys()
    assert rows == alone[1]
