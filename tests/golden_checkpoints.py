"""What the tests of golden checkpoints share."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from tests.states import rows

if TYPE_CHECKING:
    from collections.abc import Callable

    Layout = Callable[[str, torch.Tensor], list[ShardedTensor]]


VERSIONS = ("0.9.0", "0.12.3", "0.13.1", "0.16.1", "0.17.0rc0", "0.20.0")


WITH_FLATTENED = ("0.9.0", "0.12.3", "0.13.1")


WITHOUT_CONTENT_METADATA = ("0.9.0", "0.12.3")


QKV = "decoder.layers.self_attention.linear_qkv.weight"


SWIGLU = "decoder.layers.1.mlp.linear_fc1.weight"


FLATTENED = "optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc1.weight"


TENSORS = {
    "decoder.layers.0.mlp.linear_fc1.weight": ((8, 6), torch.float32),
    "decoder.layers.0.mlp.linear_fc2.weight": ((4, 8), torch.bfloat16),
    "decoder.final_layernorm.weight": ((5,), torch.float32),
    "optimizer.step": ((3,), torch.int64),
    "grid": ((4, 6), torch.float32),
    QKV: ((2, 4, 4), torch.float32),
    SWIGLU: ((8, 3), torch.float32),
    FLATTENED: ((8, 6), torch.float32),
}


EXTRA = {(tp,): {"amax": [1.5 + tp, 2.0], "tp": tp} for tp in range(2)}


RNG = {
    (dp, tp): {"dp": dp, "tp": tp, "state": [number + 10 * (2 * dp + tp) for number in range(4)]}
    for dp in range(2)
    for tp in range(2)
}


CONTENT = {"distrib_optim_sharding_type": "fully_sharded_model_space", "writer": "golden"}


def global_tensors(version: str) -> dict[str, torch.Tensor]:
    """The table of ``golden/README.md``: every global tensor, whole."""
    return {
        key: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        for key, (shape, dtype) in TENSORS.items()
        if key != FLATTENED or version in WITH_FLATTENED
    }


def common_of(version: str) -> dict[str, Any]:
    """The common state of a version."""
    common: dict[str, Any] = {"iteration": 17, "args": {"hidden_size": 8, "lr": 0.1, "names": ["a", "b"]}}
    return common if version in WITHOUT_CONTENT_METADATA else {**common, "content_metadata": CONTENT}


def cut_evenly(size: int, count: int) -> list[tuple[int, int]]:
    """Where ``count`` pieces of an axis begin and end, as even as can be."""
    return list(pairwise(size * index // count for index in range(count + 1)))


def two_layers(full: torch.Tensor) -> list[ShardedTensor]:
    """As the model has them: two layers on every rank, by a prepended axis, each split over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    low, high = cut_evenly(full.shape[1], world)[rank]
    grid = None if full.shape[1] % world else (2, world, 1)
    return [
        ShardedTensor(
            QKV,
            full[layer, low:high],
            full.dtype,
            (high - low, full.shape[2]),
            tuple(full.shape),
            (layer, low, 0),
            grid,
            prepend_axis_num=1,
        )
        for layer in range(2)
    ]


def swiglu(full: torch.Tensor) -> ShardedTensorFactory:
    """A rank's part of both halves of a tensor, in one local tensor."""
    half = full.shape[0] // 2
    low, high = cut_evenly(half, dist.get_world_size())[dist.get_rank()]
    parts = [(low, high), (half + low, half + high)]
    shape = tuple(full.shape)

    def build(key: str, data: torch.Tensor, replica_id: Any, _: slice | None) -> list[ShardedTensor]:
        return [
            ShardedTensor(key, part, part.dtype, tuple(part.shape), shape, (start, 0), None, replica_id)
            for part, (start, _) in zip(data.chunk(2), parts, strict=True)
        ]

    return ShardedTensorFactory(SWIGLU, torch.cat([full[a:b] for a, b in parts]), build, torch.cat)


def flattened(full: torch.Tensor) -> ShardedTensor:
    """As Megatron's distributed optimizer asked until 0.15; at 4 ranks exactly as it was saved."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cells = 1 if world % 2 else 2
    cell = full.chunk(cells)[rank % cells]
    low, high = cut_evenly(cell.numel(), world // cells)[rank // cells]
    part = slice(low + (low > 0), high + (high < cell.numel()))
    data = cell.reshape(-1)[part]
    return ShardedTensor.from_rank_offsets_flat(
        FLATTENED, data, tuple(cell.shape), (0, rank % cells, cells), flattened_range=part
    )


def grid_objects() -> dict[str, list[ShardedObject]]:
    """Every object of both grids on every rank; the ranks take turns as main replicas."""
    rank, world = dist.get_rank(), dist.get_world_size()
    grids: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
        ("decoder.layers.0._extra_state", EXTRA, (2,)),
        ("rng_state", RNG, (2, 2)),
    )
    return {
        key: [
            ShardedObject(key, None, shape, place, int(number % world != rank)) for number, place in enumerate(values)
        ]
        for key, values, shape in grids
    }


def same_tensor(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are the same."""
    return got.dtype == expected.dtype and torch.equal(got, expected)


def check_model(path: str, version: str) -> None:
    """Load everything that is stored, as a training job describes it, and compare it with the table."""
    full = global_tensors(version)
    plain = [key for key in full if key not in (QKV, SWIGLU, FLATTENED)]

    def describe(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        sharded: dict[str, Any] = {key: rows(key, tensors[key])[0] for key in plain}
        sharded.update(layers=two_layers(tensors[QKV]), glu=swiglu(tensors[SWIGLU]))
        if FLATTENED in tensors:
            sharded["flat"] = flattened(tensors[FLATTENED])
        return sharded

    wanted = describe({key: torch.full_like(tensor, -1) for key, tensor in full.items()})
    mine = LocalNonpersistentObject(f"of rank {dist.get_rank()}")
    loaded = dc.load({**wanted, **grid_objects(), "iteration": 0, "mine": mine}, path, strict="raise_all")
    for key, expected in describe(full).items():
        shards = expected if isinstance(expected, list) else [expected]
        got = loaded.pop(key)
        for tensor, shard in zip(got if isinstance(got, list) else [got], shards, strict=True):
            assert same_tensor(tensor, shard.data), (key, tensor, shard.data)
    check_objects(loaded)
    assert loaded.pop("mine") == mine.unwrap()
    assert loaded == common_of(version)


def check_objects(loaded: dict[str, Any]) -> None:
    """Compare both grids of objects, and take them out."""
    assert loaded.pop("decoder.layers.0._extra_state") == list(EXTRA.values())
    states = loaded.pop("rng_state")
    assert all(same_tensor(state["state"], torch.tensor(state["state"].tolist())) for state in states)
    assert [{**state, "state": state["state"].tolist()} for state in states] == list(RNG.values())
