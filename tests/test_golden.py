from __future__ import annotations

import importlib.util
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from tests.states import columns, layers, replicated, rows, uneven
from tests.tables import in_proof, table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks import Ranks

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


def _common(version: str) -> dict[str, Any]:
    common: dict[str, Any] = {"iteration": 17, "args": {"hidden_size": 8, "lr": 0.1, "names": ["a", "b"]}}
    return common if version in WITHOUT_CONTENT_METADATA else {**common, "content_metadata": CONTENT}


def _edges(size: int, count: int) -> list[tuple[int, int]]:
    """Where ``count`` pieces of an axis begin and end, as even as can be."""
    return list(pairwise(size * index // count for index in range(count + 1)))


LAYOUTS: tuple[Layout, ...] = (rows, columns, uneven, replicated, layers)


def _layers(full: torch.Tensor) -> list[ShardedTensor]:
    """As the model has them: two layers on every rank, by a prepended axis, each split over the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    low, high = _edges(full.shape[1], world)[rank]
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


def _swiglu(full: torch.Tensor) -> ShardedTensorFactory:
    """A rank's part of both halves of a tensor, in one local tensor."""
    half = full.shape[0] // 2
    low, high = _edges(half, dist.get_world_size())[dist.get_rank()]
    parts = [(low, high), (half + low, half + high)]
    shape = tuple(full.shape)

    def build(key: str, data: torch.Tensor, replica_id: Any, _: slice | None) -> list[ShardedTensor]:
        return [
            ShardedTensor(key, part, part.dtype, tuple(part.shape), shape, (start, 0), None, replica_id)
            for part, (start, _) in zip(data.chunk(2), parts, strict=True)
        ]

    return ShardedTensorFactory(SWIGLU, torch.cat([full[a:b] for a, b in parts]), build, torch.cat)


def _flattened(full: torch.Tensor) -> ShardedTensor:
    """As Megatron's distributed optimizer asked until 0.15; at 4 ranks exactly as it was saved."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cells = 1 if world % 2 else 2
    cell = full.chunk(cells)[rank % cells]
    low, high = _edges(cell.numel(), world // cells)[rank // cells]
    part = slice(low + (low > 0), high + (high < cell.numel()))
    data = cell.reshape(-1)[part]
    return ShardedTensor.from_rank_offsets_flat(
        FLATTENED, data, tuple(cell.shape), (0, rank % cells, cells), flattened_range=part
    )


def _objects() -> dict[str, list[ShardedObject]]:
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


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.dtype == expected.dtype and torch.equal(got, expected)


def _check_layout(path: str, full: dict[str, torch.Tensor], layout: Layout) -> None:
    """Load all tensors under a layout, into memory that holds other values, and compare every element."""
    blank = {key: torch.full_like(tensor, -1) for key, tensor in full.items()}
    wanted = {key: layout(key, tensor) for key, tensor in blank.items()}
    loaded = dc.load(wanted, path)
    for key, tensor in full.items():
        for got, asked, expected in zip(loaded[key], wanted[key], layout(key, tensor), strict=True):
            assert expected.data is not None
            assert got is asked.data, (layout.__name__, key)
            assert _same(got, expected.data), (layout.__name__, key, got, expected.data)


def check_model(path: str, version: str) -> None:
    """Load everything that is stored, as a training job describes it, and compare it with the table."""
    full = global_tensors(version)
    plain = [key for key in full if key not in (QKV, SWIGLU, FLATTENED)]

    def describe(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        sharded: dict[str, Any] = {key: rows(key, tensors[key])[0] for key in plain}
        sharded.update(layers=_layers(tensors[QKV]), glu=_swiglu(tensors[SWIGLU]))
        if FLATTENED in tensors:
            sharded["flat"] = _flattened(tensors[FLATTENED])
        return sharded

    wanted = describe({key: torch.full_like(tensor, -1) for key, tensor in full.items()})
    mine = LocalNonpersistentObject(f"of rank {dist.get_rank()}")
    loaded = dc.load({**wanted, **_objects(), "iteration": 0, "mine": mine}, path, strict="raise_all")
    for key, expected in describe(full).items():
        shards = expected if isinstance(expected, list) else [expected]
        got = loaded.pop(key)
        for tensor, shard in zip(got if isinstance(got, list) else [got], shards, strict=True):
            assert _same(tensor, shard.data), (key, tensor, shard.data)
    _check_objects(loaded)
    assert loaded.pop("mine") == mine.unwrap()
    assert loaded == _common(version)


def _check_objects(loaded: dict[str, Any]) -> None:
    """Compare both grids of objects, and take them out."""
    assert loaded.pop("decoder.layers.0._extra_state") == list(EXTRA.values())
    states = loaded.pop("rng_state")
    assert all(_same(state["state"], torch.tensor(state["state"].tolist())) for state in states)
    assert [{**state, "state": state["state"].tolist()} for state in states] == list(RNG.values())


def _check_allocated(path: str, full: dict[str, torch.Tensor]) -> None:
    """Load whole tensors without memory given for them."""
    wanted = {key: replicated(key, tensor)[0].without_data() for key, tensor in full.items()}
    loaded = dc.load(wanted, path)
    assert all(_same(loaded[key], tensor) for key, tensor in full.items())


def _load_golden(version: str) -> bool:
    path = str(GOLDEN / f"mcore-{version}")
    full = global_tensors(version)
    for layout in LAYOUTS:
        _check_layout(path, full, layout)
    check_model(path, version)
    _check_allocated(path, full)
    return importlib.util.find_spec("megatron") is None


@pytest.mark.parametrize("world", [3, *in_proof(1, 2, 4)])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_loads_at_any_world_size(ranks: Ranks, version: str, world: int) -> None:
    """Every tensor, object and common value of every Megatron release loads under every layout, without Megatron."""
    assert ranks.run(world, _load_golden, version) == [True] * world


@table("version", VERSIONS)
def test_the_queries_describe_a_golden_checkpoint(version: str) -> None:
    """What is stored, at its true shape, common state and content metadata: without a process group."""
    path = GOLDEN / f"mcore-{version}"
    full = global_tensors(version)
    assert dc.check_is_distributed_checkpoint(path)
    assert dc.load_common_state_dict(path) == _common(version)
    assert dc.load_content_metadata(path) == _common(version).get("content_metadata")
    tensors = dc.load_tensors_metadata(path)
    described = {key: (shard.global_shape, shard.local_shape, shard.dtype) for key, shard in tensors.items()}
    assert described == {key: (tuple(t.shape), tuple(t.shape), t.dtype) for key, t in full.items()}
    assert all(shard.data is None for shard in tensors.values())
    objects = {f"decoder.layers.0._extra_state/shard_{tp}_2" for tp in range(2)}
    objects |= {f"rng_state/shard_{dp}.{tp}_2.2" for dp in range(2) for tp in range(2)}
    assert set(dc.load_sharded_metadata(path)) == set(full) | objects
    plain = dc.load_plain_tensors(path)
    assert set(plain) == set(full)
    assert all(_same(plain[key], tensor) for key, tensor in full.items())


def test_every_golden_checkpoint_is_read() -> None:
    """No golden checkpoint lies there without a test that reads it."""
    assert {path.name for path in GOLDEN.glob("mcore-*")} == {f"mcore-{version}" for version in VERSIONS}
