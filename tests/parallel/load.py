"""What the tests of load share."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.distributed.comm import Comm
from shardckpt.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from shardckpt.strategy import LoadStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.mapping import ShardedBase
    from shardckpt.strategy import LoadContext
    from tests.backends import Backend
    from tests.ranks import Ranks


WHOLE = {
    "bfloat16": torch.arange(40).to(torch.bfloat16),
    "int64": torch.arange(40) * 2**40,
    "bool": torch.arange(40) % 3 == 0,
    "float8": torch.arange(8).float().to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
}


class Counting(LoadStrategy):
    """Reads through another strategy, and notes how many bytes of tensors it is asked for, and which objects."""

    def __init__(self, strategy: LoadStrategy) -> None:
        self._strategy = strategy
        self.backend, self.version = strategy.backend, strategy.version
        self.nbytes = 0
        self.keys: list[str] = []

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Note, and load."""
        self.nbytes += sum(count_bytes(shard) for shard in wanted)
        self.keys += [shard.key for shard in wanted]
        return self._strategy.load(wanted, context)

    def load_common(self, context: LoadContext) -> dict[str, Any]:
        """As the strategy does."""
        return self._strategy.load_common(context)

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """As the strategy does."""
        return self._strategy.load_index(context)


@contextmanager
def calls(name: str, notes: Any) -> Iterator[list[Any]]:
    """What ``notes(self, *args)`` says of every call of a method of Comm in the meantime."""
    original, noted = getattr(Comm, name), []

    def noting(self: Comm, *args: Any) -> Any:
        noted.append(notes(self, *args))
        return original(self, *args)

    setattr(Comm, name, noting)
    try:
        yield noted
    finally:
        setattr(Comm, name, original)


@contextmanager
def arrivals() -> Iterator[list[int]]:
    """Bytes that come to this rank from others, as tensors."""

    def received(_: Comm, __: Any, receives: Any, *___: Any) -> int:
        return sum(tensor.nbytes for tensor, _ in receives)

    def heard(comm: Comm, routes: Any, *_: Any) -> int:
        return sum(tensor.nbytes for tensor, rank in routes if rank != comm.rank)

    with calls("exchange", received) as sent, calls("broadcast_tensors", heard) as told:
        counts: list[int] = []
        yield counts
        counts.append(sum(sent) + sum(told))


def count_bytes(shard: ShardedBase) -> int:
    """The bytes of a shard."""
    return math.prod(shard.data_shape) * shard.dtype.itemsize if isinstance(shard, ShardedTensor) else 0


def swiglu(key: str, data: torch.Tensor, replica: Any, _: Any, tp: int, tps: int) -> dict[str, ShardedTensor]:
    """Describe the halves of a gated layer as shards of their own."""
    halves = data.chunk(2)
    return {
        name: ShardedTensor.from_rank_offsets(f"{key}.{name}", half.contiguous(), (0, tp, tps), replica_id=replica)
        for name, half in zip("wv", halves, strict=True)
    }


def state_of(tps: int, *, filled: bool) -> dict[str, Any]:
    """Tensor parallel ``tps``, the rest data parallel, rank = dp * tps + tp; the global content is always the same."""
    tp, dp = dist.get_rank() % tps, dist.get_rank() // tps

    def part(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(tps)[tp].clone() if filled else torch.zeros_like(whole.chunk(tps)[tp])

    def same(whole: torch.Tensor) -> torch.Tensor:
        return whole.clone() if filled else torch.zeros_like(whole)

    state: dict[str, Any] = {}
    for number in range(8):
        whole = torch.arange(24 * 32.0).view(24, 32) + number
        state[f"w{number}"] = ShardedTensor.from_rank_offsets(f"w{number}", part(whole), (0, tp, tps), replica_id=dp)
    for name, whole in WHOLE.items():
        state[name] = ShardedTensor.from_rank_offsets(name, same(whole), replica_id=dist.get_rank())
    state["layers"] = [
        ShardedTensor.from_rank_offsets(
            "layers", part(torch.arange(24.0) + layer), (0, layer, 3), (1, tp, tps), replica_id=dp, prepend_axis_num=1
        )
        for layer in range(3)
    ]
    state["swiglu"] = ShardedTensorFactory(
        "swiglu",
        torch.cat([part(torch.arange(24.0)), part(torch.arange(24.0) + 100)]),
        lambda key, data, replica, flat: swiglu(key, data, replica, flat, tp, tps),
        lambda built: torch.cat([built["w"], built["v"]]),
        replica_id=dp,
    )
    turned = torch.arange(48.0).view(8, 6)
    destination = turned.clone() if filled else torch.zeros(6, 8).t()
    state["turned"] = ShardedTensor.from_rank_offsets("turned", destination, replica_id=dist.get_rank())
    state["object"] = ShardedObject("object", {"a": 1} if filled else None, (1,), (0,), replica_id=dist.get_rank())
    return state


def differences(loaded: dict[str, Any], tps: int) -> list[str]:
    """The names whose loaded values are wrong."""
    expected = state_of(tps, filled=True)
    pairs = [(name, loaded[name], expected[name].data) for name in expected if name != "layers"]
    pairs += [(f"layer {n}", loaded["layers"][n], expected["layers"][n].data) for n in range(3)]
    return [name for name, found, value in pairs if not are_equal(found, value)]


def are_equal(found: Any, value: Any) -> bool:
    """Whether two values are the same."""
    if not isinstance(value, torch.Tensor):
        return bool(found == value)
    return found.dtype == value.dtype and found.shape == value.shape and torch.equal(found.double(), value.double())


def save_two_ways(path: str) -> None:
    """Save by two ranks of tensor parallelism."""
    dc.save(state_of(2, filled=True), path)


def wrapped(path: str, group: Any = None, **options: Any) -> tuple[FullyParallelLoadStrategyWrapper, Counting]:
    """The fully parallel load around a strategy that counts."""
    counting = Counting(dc.get_default_load_sharded_strategy(path))
    return FullyParallelLoadStrategyWrapper(counting, group, **options), counting


def load_by(path: str, tps: int, options: dict[str, Any], grouped: bool = False) -> dict[str, Any]:
    """What this rank read, received and got wrong."""
    groups = [dist.new_group([*range(tp, dist.get_world_size(), tps)]) for tp in range(tps)]
    strategy, counting = wrapped(path, groups[dist.get_rank() % tps] if grouped else None, **options)
    wanted = state_of(tps, filled=False)
    for name in ("w7", "bool", "scalar"):
        wanted[name] = wanted[name].without_data()
    destinations = {name: shard.data for name, shard in wanted.items() if isinstance(shard, ShardedTensor)}
    with arrivals() as arrived:
        loaded = dc.load(wanted, path, strategy)
    kept = all(loaded[name] is data for name, data in destinations.items() if data is not None)
    return {
        "wrong": differences(loaded, tps),
        "read": counting.nbytes,
        "objects": counting.keys.count("object"),
        "received": arrived[0],
        "kept": kept,
    }


@pytest.fixture(scope="module")
def checkpoint(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, backend: Backend) -> str:
    """A checkpoint that four ranks have saved."""
    path = str(tmp_path_factory.mktemp("parallel") / "ckpt")
    ranks.run(4, save_two_ways, path)
    return path
