"""One state dict in two vocabularies: Megatron's classes and ours describe it by the same calls, at any world size."""

from __future__ import annotations

import argparse
from typing import Any

import torch

CONTENT_METADATA = {"distrib_optim_sharding_type": "fully_sharded_model_space", "writer": "interop"}

_SHAPES = {
    "columns.weight": ((8, 6), torch.float32),
    "rows.weight": ((4, 8), torch.bfloat16),
    "step": ((3,), torch.int64),
    "grid": ((4, 6), torch.float32),
    "cells": ((4, 6), torch.bfloat16),
    "layers.qkv": ((2, 4, 4), torch.float32),
    "layers.experts": ((2, 4, 3, 2), torch.float32),
    "uneven": ((7, 3), torch.int64),
    "glu": ((8, 3), torch.float32),
}


def whole_tensors() -> dict[str, torch.Tensor]:
    """Every global tensor; no two begin with the same value."""
    return {
        key: (torch.arange(torch.Size(shape).numel()) + 3 * number).reshape(shape).to(dtype)
        for number, (key, (shape, dtype)) in enumerate(_SHAPES.items())
    }


def objects() -> dict[str, dict[str, Any]]:
    """Every object, by the name under which it is stored."""
    places = [(row, column) for row in range(2) for column in range(2)]
    return {
        **{f"layers.0._extra_state/shard_{i}_2": {"amax": [1.5 + i, 2.0], "index": i} for i in range(2)},
        **{f"rng/shard_{r}.{c}_2.2": {"place": (r, c), "state": torch.arange(4) + 10 * r + c} for r, c in places},
    }


def common() -> dict[str, Any]:
    """What is not sharded."""
    return {
        "iteration": 17,
        "args": argparse.Namespace(hidden_size=8, lr=0.1, names=["a", "b"]),
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.9, 0.95)}]},
    }


def state(vocabulary: Any, rank: int, world: int, *, filled: bool, boxes: bool = True) -> dict[str, Any]:
    """The state dict of one rank.

    Args:
        vocabulary: A module that has ShardedTensor and its kind.
        rank: The rank.
        world: The number of ranks; an even one is tensor parallel 2 by data parallel, rank = 2·dp + tp.
        filled: Whether it has its values, or others that a load has to replace.
        boxes: Whether the vocabulary can describe shards of unequal size; else a tensor that has some is replicated.
    """
    full = whole_tensors()
    if not filled:
        full = {key: torch.full_like(tensor, -1) for key, tensor in full.items()}
    tps = 1 if world % 2 else 2
    dps, tp, dp = world // tps, rank % tps, rank // tps
    everywhere = (0, tp, dp)

    def shard(key: str, *cuts: tuple[int, int, int], replica: Any = 0, layers: tuple[int, ...] = ()) -> Any:
        return _shard(vocabulary, key, full[key], cuts, replica, layers)

    experts = range(4 * rank // world, 4 * (rank + 1) // world)
    return {
        "model": {
            "columns": shard("columns.weight", (0, tp, tps), replica=dp),
            "rows": shard("rows.weight", (1, tp, tps), replica=dp),
            "step": shard("step", replica=everywhere),
            "grid": shard("grid", (0, dp, dps), (1, tp, tps)),
            "cells": [shard("cells", (0, row, 2), (1, tp, tps), replica=dp) for row in range(2)],
            "uneven": shard("uneven", (0, rank, world)) if boxes else shard("uneven", replica=everywhere),
            "glu": _swiglu(vocabulary, full["glu"], rank, world),
        },
        "layers": [
            {
                "qkv": shard("layers.qkv", (1, rank, world), layers=(layer,)),
                "experts": [shard("layers.experts", layers=(layer, expert)) for expert in experts],
            }
            for layer in range(2)
        ],
        "objects": [_object(vocabulary, rank, world, number, filled=filled) for number in range(len(objects()))],
        "mine": _local(vocabulary)(rank),
        **(common() if filled else {"iteration": 0}),
    }


def flattened_tensor() -> torch.Tensor:
    """The tensor that :func:`flattened` describes, at its true shape."""
    return torch.arange(48).reshape(8, 6) + 0.5


def flattened(vocabulary: Any, rank: int) -> Any:
    """A shard as Megatron's distributed optimizer had it until 0.15, for 4 ranks: half of a flattened grid cell."""
    tp, dp = rank % 2, rank // 2
    cell = flattened_tensor().chunk(2)[tp]
    part = slice(0, 13) if dp == 0 else slice(13, 24)
    return vocabulary.ShardedTensor.from_rank_offsets_flat(
        "flattened", cell.reshape(-1)[part].clone(), tuple(cell.shape), (0, tp, 2), flattened_range=part
    )


def check(loaded: dict[str, Any], expected: dict[str, Any], vocabulary: Any) -> None:
    """Compare a loaded state dict with the filled description of it, value for value and leaf for leaf.

    Raises:
        AssertionError: it names the first place that differs.
    """
    assert set(loaded) - {"content_metadata", "megatron"} == set(expected), (set(loaded), set(expected))
    for name, part in expected.items():
        _compare(vocabulary, loaded[name], part, name)


def check_tensors(loaded: dict[str, torch.Tensor]) -> None:
    """Compare whole tensors, by key, with all that there are."""
    expected = whole_tensors()
    assert set(loaded) == set(expected)
    for key, tensor in expected.items():
        check_equal(loaded[key], tensor, key)


def check_equal(loaded: Any, expected: Any, place: str) -> None:
    """Compare plain values: tensors by dtype, shape and every element, all else by type and value."""
    if isinstance(expected, torch.Tensor):
        assert loaded.dtype == expected.dtype, (place, loaded.dtype, expected.dtype)
        assert torch.equal(loaded, expected), (place, loaded, expected)
    elif isinstance(expected, dict):
        assert set(loaded) == set(expected), (place, loaded, expected)
        for name in expected:
            check_equal(loaded[name], expected[name], f"{place}.{name}")
    elif isinstance(expected, list | tuple):
        assert isinstance(loaded, type(expected)), (place, loaded, expected)
        assert len(loaded) == len(expected), (place, loaded, expected)
        for number, part in enumerate(expected):
            check_equal(loaded[number], part, f"{place}.{number}")
    else:
        assert isinstance(loaded, type(expected)), (place, loaded, expected)
        assert loaded == expected, (place, loaded, expected)


def _compare(vocabulary: Any, loaded: Any, expected: Any, place: str) -> None:
    if isinstance(expected, dict):
        assert set(loaded) == set(expected), (place, set(loaded), set(expected))
        for name, part in expected.items():
            _compare(vocabulary, loaded[name], part, f"{place}.{name}")
    elif isinstance(expected, list):
        assert len(loaded) == len(expected), (place, loaded)
        for number, part in enumerate(expected):
            _compare(vocabulary, loaded[number], part, f"{place}.{number}")
    elif isinstance(expected, _local(vocabulary)):
        check_equal(loaded, expected.unwrap(), place)
    elif isinstance(expected, vocabulary.ShardedBase):
        check_equal(loaded, expected.data, place)
    else:
        check_equal(loaded, expected, place)


def _shard(
    vocabulary: Any,
    key: str,
    full: torch.Tensor,
    cuts: tuple[tuple[int, int, int], ...],
    replica: Any,
    layers: tuple[int, ...],
) -> Any:
    """Piece i of n along every axis that ``cuts`` names, below leading indices that become prepended axes.

    A regular grid where the pieces are equal, a box where they are not.
    """
    boxes = [(index, index + 1) for index in layers] + [(0, size) for size in full.shape[len(layers) :]]
    for axis, index, count in cuts:
        size = full.shape[axis]
        boxes[axis] = (size * index // count, size * (index + 1) // count)
    data = full[tuple(slice(*box) for box in boxes)].clone()
    data = data.reshape(data.shape[len(layers) :])
    more = {"replica_id": replica, "prepend_axis_num": len(layers)}
    if all(full.shape[axis] % count == 0 for axis, _, count in cuts):
        stacked = [(axis, index, full.shape[axis]) for axis, index in enumerate(layers)]
        return vocabulary.ShardedTensor.from_rank_offsets(key, data, *stacked, *cuts, **more)
    offset = tuple(low for low, _ in boxes)
    return vocabulary.ShardedTensor(key, data, data.dtype, tuple(data.shape), tuple(full.shape), offset, None, **more)


def _swiglu(vocabulary: Any, full: torch.Tensor, rank: int, world: int) -> Any:
    """A rank's part of both halves of a tensor, in one local tensor."""
    half = full.shape[0] // 2
    low, high = half * rank // world, half * (rank + 1) // world
    regular = half % world == 0

    def build(key: str, data: torch.Tensor, replica_id: Any, *_: Any) -> list[Any]:
        pieces = [piece.contiguous() for piece in data.chunk(2)]
        if regular:
            cells = [(0, rank, 2 * world), (0, rank + world, 2 * world)]
            return [
                vocabulary.ShardedTensor.from_rank_offsets(key, piece, cell, replica_id=replica_id)
                for piece, cell in zip(pieces, cells, strict=True)
            ]
        shape = tuple(full.shape)
        return [
            vocabulary.ShardedTensor(key, piece, piece.dtype, tuple(piece.shape), shape, (start, 0), None, replica_id)
            for piece, start in zip(pieces, (low, half + low), strict=True)
        ]

    local = torch.cat([full[low:high], full[half + low : half + high]])
    return vocabulary.ShardedTensorFactory("glu", local, build, torch.cat)


def _object(vocabulary: Any, rank: int, world: int, number: int, *, filled: bool) -> Any:
    """One object, on every rank; the ranks take turns as main replicas."""
    unique_key, value = list(objects().items())[number]
    described = vocabulary.ShardedObject.empty_from_unique_key(unique_key, replica_id=int(number % world != rank))
    described.data = value if filled else None
    return described


def _local(vocabulary: Any) -> Any:
    """LocalNonpersistentObject, by whichever name the vocabulary has it."""
    return getattr(vocabulary, "LocalNonpersistentObject", None) or vocabulary.LocalNonpersitentObject


__all__ = [
    "CONTENT_METADATA",
    "check",
    "check_equal",
    "check_tensors",
    "common",
    "flattened",
    "flattened_tensor",
    "objects",
    "state",
    "whole_tensors",
]
