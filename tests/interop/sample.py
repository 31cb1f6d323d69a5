"""One state dict in two vocabularies: Megatron's classes and ours describe it by the same calls, at any world size."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

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
    "e4m3": ((4, 6), torch.float8_e4m3fn),
    "e5m2": ((4, 6), torch.float8_e5m2),
    "layers.e4m3": ((2, 4, 4), torch.float8_e4m3fn),
    "mask": ((4, 6), torch.bool),
    "phases": ((4, 6), torch.complex64),
    "half": ((4, 6), torch.float16),
    "scale": ((), torch.float32),
    "deep": ((2, 2, 2, 2, 2, 2), torch.float64),
    "layers.uneven": ((2, 7, 2), torch.int64),
}
#: Tensors that the ranks do not divide: shards of unequal size.
UNEVEN = ("uneven", "layers.uneven")


def whole_tensors() -> dict[str, torch.Tensor]:
    """Every global tensor; no two of a dtype begin with the same value."""
    return {
        key: _numbers(torch.Size(shape).numel(), 3 * number, dtype).reshape(shape)
        for number, (key, (shape, dtype)) in enumerate(_SHAPES.items())
    }


def blank_tensors() -> dict[str, torch.Tensor]:
    """The same tensors with other values, which a load has to replace."""
    return {
        key: ~tensor if tensor.dtype == torch.bool else torch.full_like(tensor, -1)
        for key, tensor in whole_tensors().items()
    }


def _numbers(count: int, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Values in a row; of float8 it is the bits that are in a row, not-a-numbers and infinities among them."""
    row = torch.arange(count) + first
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return (row * 11 % 256).to(torch.uint8).view(dtype)
    return row % 3 == 0 if dtype == torch.bool else row.to(dtype)


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


def stored_common(*, content_metadata: bool) -> dict[str, Any]:
    """What a checkpoint's common state is, with or without content metadata."""
    return {**common(), **({"content_metadata": CONTENT_METADATA} if content_metadata else {})}


def state(vocabulary: Any, rank: int, world: int, *, filled: bool, uneven: Collection[str] = UNEVEN) -> dict[str, Any]:
    """The state dict of one rank.

    Args:
        vocabulary: A module that has ShardedTensor and its kind.
        rank: The rank.
        world: The number of ranks; an even one is tensor parallel 2 by data parallel, rank = 2·dp + tp.
        filled: Whether it has its values, or others that a load has to replace.
        uneven: Those of :data:`UNEVEN` whose shards the vocabulary can describe; the others are replicated.
    """
    part = _Part(vocabulary, rank, world, whole_tensors() if filled else blank_tensors())
    return {
        "model": {**part.model(), "glu": _swiglu(part), "uneven": part.uneven("uneven", cut="uneven" in uneven)},
        "layers": [part.layer(0), part.layer(1)],
        "layers.uneven": part.uneven("layers.uneven", cut="layers.uneven" in uneven),
        "objects": [_object(part, number, filled=filled) for number in range(len(objects()))],
        "mine": _local(vocabulary)(rank),
        **(common() if filled else {"iteration": 0}),
    }


def uneven_shards(vocabulary: Any, rank: int, world: int, key: str) -> list[Any]:
    """One rank's shards of one tensor of :data:`UNEVEN`."""
    return _Part(vocabulary, rank, world, whole_tensors()).uneven(key, cut=True)


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
    """Compare plain values: tensors by dtype, shape and every bit, all else by type and value."""
    if isinstance(expected, torch.Tensor):
        assert (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape), (place, loaded, expected)
        assert torch.equal(_bits(loaded), _bits(expected)), (place, loaded, expected)
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """What torch.equal compares where tensors of float8 cannot be compared, nor values that are not numbers."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


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


class _Part:
    """What one rank has of the tensors, described by a vocabulary."""

    def __init__(self, vocabulary: Any, rank: int, world: int, full: dict[str, torch.Tensor]) -> None:
        self.vocabulary, self.rank, self.world, self.full = vocabulary, rank, world, full
        self._tp = (rank % 2, 2) if world % 2 == 0 else (0, 1)  # index and count
        self._dp = (rank // self._tp[1], world // self._tp[1])
        self._everywhere = (0, self._tp[0], self._dp[0])

    def model(self) -> dict[str, Any]:
        """Tensors along one and two axes, with replicas and without."""
        (tp, dp), shard = (self._tp, self._dp), self.shard
        return {
            "columns": shard("columns.weight", (0, *tp), replica=dp[0]),
            "rows": shard("rows.weight", (1, *tp), replica=dp[0]),
            "step": shard("step", replica=self._everywhere),
            "scale": shard("scale", replica=self._everywhere),
            "grid": shard("grid", (0, *dp), (1, *tp)),
            "cells": [shard("cells", (0, row, 2), (1, *tp), replica=dp[0]) for row in range(2)],
            "deep": shard("deep", (2, *tp), (5, *dp)),
            "dtypes": {key: shard(key, (0, *dp), (1, *tp)) for key in ("e4m3", "e5m2", "mask", "phases", "half")},
        }

    def layer(self, layer: int) -> dict[str, Any]:
        """Tensors below one and two prepended axes."""
        experts = range(4 * self.rank // self.world, 4 * (self.rank + 1) // self.world)
        return {
            "qkv": self.shard("layers.qkv", (1, self.rank, self.world), layers=(layer,)),
            "e4m3": self.shard("layers.e4m3", (2, self.rank, self.world), layers=(layer,)),
            "experts": [self.shard("layers.experts", layers=(layer, expert)) for expert in experts],
        }

    def uneven(self, key: str, *, cut: bool) -> list[Any]:
        """A tensor of :data:`UNEVEN`, cut by rank or replicated."""
        layers: list[tuple[int, ...]] = [(0,), (1,)] if key.startswith("layers.") else [()]
        if cut:
            return [self.shard(key, (len(at), self.rank, self.world), layers=at) for at in layers]
        return [self.shard(key, replica=self._everywhere, layers=at) for at in layers]

    def shard(self, key: str, *cuts: tuple[int, int, int], replica: Any = 0, layers: tuple[int, ...] = ()) -> Any:
        """Piece i of n along every axis of ``cuts``, below leading indices that become prepended axes.

        A regular grid where the pieces are equal, a box where they are not.
        """
        full = self.full[key]
        boxes = [(index, index + 1) for index in layers] + [(0, size) for size in full.shape[len(layers) :]]
        for axis, index, count in cuts:
            size = full.shape[axis]
            boxes[axis] = (size * index // count, size * (index + 1) // count)
        data = full[tuple(slice(*box) for box in boxes)].clone()
        data = data.reshape(data.shape[len(layers) :])
        more = {"replica_id": replica, "prepend_axis_num": len(layers)}
        if all(full.shape[axis] % count == 0 for axis, _, count in cuts):
            stacked = [(axis, index, full.shape[axis]) for axis, index in enumerate(layers)]
            return self.vocabulary.ShardedTensor.from_rank_offsets(key, data, *stacked, *cuts, **more)
        offset = tuple(low for low, _ in boxes)
        return self.vocabulary.ShardedTensor(
            key, data, data.dtype, tuple(data.shape), tuple(full.shape), offset, None, **more
        )


def _swiglu(part: _Part) -> Any:
    """A rank's part of both halves of a tensor, in one local tensor."""
    full, rank, world, vocabulary = part.full["glu"], part.rank, part.world, part.vocabulary
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


def _object(part: _Part, number: int, *, filled: bool) -> Any:
    """One object, on every rank; the ranks take turns as main replicas."""
    unique_key, value = list(objects().items())[number]
    replica = int(number % part.world != part.rank)
    described = part.vocabulary.ShardedObject.empty_from_unique_key(unique_key, replica_id=replica)
    described.data = value if filled else None
    return described


def _local(vocabulary: Any) -> Any:
    """LocalNonpersistentObject, by whichever name the vocabulary has it."""
    return getattr(vocabulary, "LocalNonpersistentObject", None) or vocabulary.LocalNonpersitentObject


__all__ = [
    "CONTENT_METADATA",
    "UNEVEN",
    "blank_tensors",
    "check",
    "check_equal",
    "check_tensors",
    "common",
    "flattened",
    "flattened_tensor",
    "objects",
    "state",
    "stored_common",
    "uneven_shards",
    "whole_tensors",
]
