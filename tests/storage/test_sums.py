"""Sums of what ranks store: added up, they are the fingerprints of the tensors, however these are cut and spread."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning import Box, Boxes
from shardckpt.storage import PackedShards, pack_columns, sum_shards
from shardckpt.storage.fingerprint_file import parse_fingerprints
from shardckpt.storage.sums import add_sums, pack_fingerprints, split_sums

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool]


def _make(seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    data = torch.randint(0, most, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(tuple(shape))


def _cut(shape: tuple[int, ...], rng: random.Random, depth: int) -> list[Box]:
    boxes = [Box.from_shape(shape)]
    for _ in range(depth if shape else 0):
        box = boxes.pop(rng.randrange(len(boxes)))
        axis = rng.randrange(len(shape))
        at = rng.randrange(1, box.shape[axis]) if box.shape[axis] > 1 else box.shape[axis]
        for low, size in ((0, at), (at, box.shape[axis] - at)):
            if size or not box.shape[axis]:
                offset = (*box.offset[:axis], box.offset[axis] + low, *box.offset[axis + 1 :])
                boxes.append(Box(offset, (*box.shape[:axis], size, *box.shape[axis + 1 :])))
            if not box.shape[axis]:
                break
    return boxes


def _sum_rank(tensors: dict[str, torch.Tensor], held: list[tuple[str, Box]]) -> bytes:
    keys = sorted({key for key, _ in held})
    boxes = Boxes()
    for key, box in held:
        boxes.add(keys.index(key), *box)
    whole = [tensors[key] for key in keys]
    stored = PackedShards.pack(
        keys, [t.dtype for t in whole], [tuple(t.shape) for t in whole], boxes.table(), ["object/shard_0_1"]
    )
    views = [tensors[key][box.within(Box.from_shape(tensors[key].shape))] for key, box in held]
    return sum_shards(stored, views, {})


def _fingerprint(tensors: dict[str, torch.Tensor], rng: random.Random, world: int, depth: int) -> dict[str, str]:
    """Cut tensors, deal their boxes to ranks, and add up the sums of the ranks."""
    held: list[list[tuple[str, Box]]] = [[] for _ in range(world)]
    for key, tensor in tensors.items():
        for box in _cut(tuple(tensor.shape), rng, depth):
            held[rng.randrange(world)].append((key, box))
    return add_sums(_sum_rank(tensors, some) for some in held)


#: Scalars; rows shorter than a block, and of several.
_SHAPES = st.just(()) | st.builds(
    lambda head, last: (*head, last), st.lists(st.integers(0, 5), max_size=2), st.integers(0, 300)
)


@settings(max_examples=15, deadline=None)
@given(
    shapes=st.lists(_SHAPES, min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    world=st.integers(1, 5),
    depth=st.integers(0, 6),
    seed=st.integers(0, 1 << 30),
)
def test_they_do_not_depend_on_layout_or_world(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, world: int, depth: int, seed: int
) -> None:
    """Tensors of any dtype, cut anyhow and dealt to any number of ranks, have the fingerprints of the whole ones."""
    tensors = {f"t{number}": _make(seed + number, shape, dtype) for number, shape in enumerate(shapes)}
    expected = _fingerprint(tensors, random.Random(0), 1, 0)
    assert list(expected) == sorted(tensors)
    assert _fingerprint(tensors, random.Random(seed), world, depth) == expected


@settings(max_examples=15, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), seed=st.integers(0, 1 << 30))
def test_any_change_shows(shape: tuple[int, ...], seed: int) -> None:
    """One bit flipped, two elements swapped, two tensors swapped: other fingerprints, of these tensors alone."""
    rng = random.Random(seed)
    tensors = {name: _make(seed + number, shape, torch.int32) for number, name in enumerate("abc")}
    before = _fingerprint(tensors, rng, 2, 3)
    flat = tensors["a"].view(-1)
    flat[rng.randrange(len(flat))] ^= 1 << rng.randrange(31)
    after = _fingerprint(tensors, rng, 2, 3)
    assert [key for key in before if before[key] != after[key]] == ["a"]
    swapped = {"a": tensors["b"], "b": tensors["a"], "c": tensors["c"]}
    assert [key for key, value in _fingerprint(swapped, rng, 2, 3).items() if value != after[key]] == ["a", "b"]
    first, second = rng.randrange(len(flat)), rng.randrange(len(flat))
    if flat[first] != flat[second]:
        flat[[first, second]] = flat[[second, first]]
        assert _fingerprint(tensors, rng, 2, 3)["a"] != after["a"]


def test_a_tensor_that_is_stored_twice_has_none() -> None:
    """Where two ranks have written the same elements, a sum over both would be that of other values: there is none."""
    tensors = {"a": torch.ones(4, 4), "b": torch.ones(3)}
    ranks = [("a", Box((0, 0), (4, 4))), ("b", Box((0,), (3,)))], [("a", Box((0, 0), (4, 4)))]
    assert list(add_sums(_sum_rank(tensors, [*held]) for held in ranks)) == ["b"]


def test_owners_add_up_the_same() -> None:
    """Sums that are sent to the owners of the keys give the same fingerprints as sums that one rank adds up."""
    tensors = {f"t{number}": _make(number, (number, 3), torch.float32) for number in range(20)}
    sums = _sum_rank(tensors, [(key, Box.from_shape(tensor.shape)) for key, tensor in tensors.items()])
    owned = split_sums([sums], lambda key: int(key[1:]) % 3)
    assert sorted(owned) == [0, 1, 2]
    assert {key: value for part in owned.values() for key, value in add_sums([part]).items()} == add_sums([sums])


def test_the_file_has_16_bytes_a_tensor() -> None:
    """Fingerprints are read as they were written, also none; a file that was cut is damaged."""
    found = {f"layer.{number}": f"{number:032x}" for number in range(1000)}
    for some in (found, {}):
        assert parse_fingerprints(pack_fingerprints(some), "here") == some
    assert len(pack_fingerprints(found)) < 1000 * (16 + len('"layer.999",')) + 1000
    with pytest.raises(CorruptCheckpointError, match="here"):
        parse_fingerprints(pack_fingerprints(found)[:-1], "here")


def test_those_of_another_algorithm_count_as_none() -> None:
    """What an earlier or later release stored by other sums is not compared with today's: there are none."""
    column = torch.zeros(1, 16, dtype=torch.uint8)
    for name in ("fingerprints", "fingerprints_3"):
        assert parse_fingerprints(pack_columns({"keys": ["a"], name: column}), "here") == {}
    with pytest.raises(CorruptCheckpointError, match="fingerprints_2"):
        parse_fingerprints(pack_columns({"keys": ["a"]}), "here")
