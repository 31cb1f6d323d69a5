"""Read ``metadata.pkl``: how each tensor is cut, and which file of each rank has it.

torch_checkpointing writes it if an item has a resharder: a pickle of plain dicts, version 2.0, or 1.0 before. It lists
the tensors of these items only. The items without a resharder are not in it.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.archive import load_metadata
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, VersionTooNewError, format_many
from shardckpt.planning import Box, Ints, Split, list_held_boxes

if TYPE_CHECKING:
    from collections.abc import Sequence

METADATA_FILE = "metadata.pkl"

_VERSIONS = ("1.0", "2.0")
#: More ranks than any job has, and more boxes than a tensor is cut into: a few bytes could ask for any number.
_MOST_RANKS, _MOST_CHUNKS = 1 << 20, 1 << 22


class Chunk(NamedTuple):
    """A box of a global tensor, and where it is: its offset, along every axis, in the local tensor of a rank's file."""

    box: Box
    place: Ints
    rank: int


class Layout(NamedTuple):
    """The file of an item on one rank; its form is ``torch``, ``json``, ``raw`` or ``safetensors``."""

    file: str
    form: str


@dataclass(frozen=True)
class Declared:
    """A tensor as the metadata declares it.

    Attributes:
        shape: Its global shape.
        chunks: Its boxes in the files of the ranks; each box once.
        copies: Ranks that have all of it, or nothing of it if they have other parts of the model; empty if it is cut.
        is_exact: Whether a local tensor has nothing but its chunks.
    """

    dtype: torch.dtype
    shape: Ints
    chunks: list[Chunk]
    copies: Ints = ()
    is_exact: bool = True


@dataclass(frozen=True)
class DeclaredItem:
    """An item with a resharder.

    It has its tensors by path, and its file on each rank. ``holders`` are ranks that have, between them, every tensor
    of the item.
    """

    tensors: dict[tuple[str | int, ...], Declared]
    layouts: dict[int, Layout]
    holders: list[int]


def parse_metadata(data: bytes, source: str) -> dict[str, DeclaredItem]:
    """Parse the metadata; return the items with a resharder, by key.

    A version that is not known here is a VersionTooNewError, a class or function in its pickle an UnsafePickleError.
    """
    raw = load_metadata(data, source)
    try:
        # Types are not checked: a type that torch_checkpointing does not write raises one of the errors below.
        version = raw.get("version", "1.0")
        if version not in _VERSIONS:
            raise VersionTooNewError(
                f"{source} is of version {version!r}; this reader knows {' and '.join(_VERSIONS)}: install a newer "
                "shardckpt, or load the checkpoint with torch_checkpointing and save it here"
            )
        ranks = raw["world_size"]
        if type(ranks) is not int or not 0 < ranks <= _MOST_RANKS:
            raise CorruptCheckpointError(f"a save of {ranks!r} ranks does not exist")
        items = raw["metadata"] if version == "2.0" else _group_items(raw)
        return {key: _parse_item(key, item, ranks) for key, item in items.items()}
    except CheckpointingException as exc:
        raise exc if str(exc).startswith(source) else type(exc)(f"{source}: {exc}") from exc
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as exc:
        raise CorruptCheckpointError(
            f"{source} is not metadata of torch_checkpointing: {type(exc).__name__}: {exc}"
        ) from exc


def _group_items(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the content of version 1.0, which lists paths with the item's key in front, as version 2.0 has it."""
    items: dict[str, Any] = {}
    for text, groups in raw["metadata"].items():
        key, *path = json.loads(text)
        item = items.setdefault(key, {"nested_path_to_metadata": {}, "rank_to_layout_info": {}})
        item["nested_path_to_metadata"][json.dumps(path)] = groups
    for rank, layouts in raw["rank_to_layout_info_mappings"].items():
        for key, item in items.items():
            item["rank_to_layout_info"][rank] = layouts.get(key)
    return items


def _parse_item(key: str, raw: dict[str, Any], ranks: int) -> DeclaredItem:
    groups = {tuple(json.loads(text)): found for text, found in raw["nested_path_to_metadata"].items()}
    tensors = {path: _parse_tensor(f"{key}{list(path)}", found, ranks) for path, found in groups.items()}
    holders = sorted({min(map(int, group["ranks"])) for found in groups.values() for group in found})
    layouts = {int(rank): parse_layout(key, int(rank), found) for rank, found in raw["rank_to_layout_info"].items()}
    if sorted(layouts) != list(range(ranks)):
        found = format_many(len(layouts), "rank")
        raise CorruptCheckpointError(f"item {key!r} has files of {found}, and {ranks} saved")
    return DeclaredItem(tensors, layouts, holders)


def parse_layout(key: str, rank: int, raw: dict[str, Any] | None) -> Layout:
    """Return the file of an item on a rank; without an entry, the default one.

    The class that a JSON layout names is not imported: the value is plain JSON.
    """
    if raw is None:
        return Layout(f"{key}_{rank}.pt", "torch")
    form = str(raw["serialization_format"]["type"]).removesuffix("Serialization").lower()
    if form not in ("torch", "json", "raw", "safetensors"):
        raise CorruptCheckpointError(f"item {key!r} has an unknown serialization format {form!r:.80}")
    return Layout(str(raw["file_path"]), form)


def _parse_tensor(name: str, groups: Sequence[dict[str, Any]], ranks: int) -> Declared:
    """Return a tensor of one or several groups of ranks; each group says how its ranks have cut it."""
    found: Declared | None = None
    copies: Ints = ()
    for group in groups:
        packed = group["sharding_metadata"]
        data = packed["data"]
        dtype, shape = _parse_dtype(data["dtype"]), _parse_ints(data["global_shape"])
        if packed["type"] == "DTensorShardingMetadata":
            mesh = data["mesh_spec"]
            placements = tuple(map(parse_placement, map(dict.copy, data["placements"])))
            holders = _parse_ints(mesh["mesh_data"])
            chunks = cut_by_mesh(shape, _parse_ints(mesh["mesh_shape"]), holders, placements)
            is_cut = any(way is not None for way in placements)
            copies = copies if is_cut else holders
        elif packed["type"] == "default_tensor_v1":
            corners = (data["global_offsets"], data["local_offsets"], data["local_sizes"])
            boxes = [tuple(map(_parse_ints, corner)) for corner in zip(*corners, strict=True)]
            first = min(map(int, group["ranks"]))  # of equal chunks one is enough
            chunks = tuple(Chunk(Box(offset, size), place, first) for offset, place, size in boxes)
        else:
            raise CorruptCheckpointError(
                f"{name} is described by {packed['type']!r:.80}, a class of another library: load it there and save it "
                "with plain tensors or DTensors"
            )
        if any(not 0 <= rank < ranks for rank in (*copies, *(chunk.rank for chunk in chunks))):
            raise CorruptCheckpointError(f"{name} is on a rank that did not save: {ranks} ranks did")
        if found is None:
            found = Declared(dtype, shape, list(chunks))
        elif (found.dtype, found.shape) != (dtype, shape):
            raise CorruptCheckpointError(f"{name} has shape {found.shape} on one rank and {shape} on another")
        else:
            found.chunks.extend(chunks)
    if found is None:
        raise CorruptCheckpointError(f"{name} is on no rank")
    is_exact = all(group["sharding_metadata"]["type"] == "DTensorShardingMetadata" for group in groups)
    return Declared(found.dtype, found.shape, drop_copies(found.chunks), copies, is_exact)


def drop_copies(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return each box once: of equal boxes the one of the first rank."""
    found: dict[Box, Chunk] = {}
    for chunk in chunks:
        found.setdefault(chunk.box, chunk)
    return list(found.values())


def _parse_dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"this torch has no dtype {name!r:.80}")
    return dtype


def _parse_ints(values: Sequence[int]) -> Ints:
    if any(type(value) is not int or value < 0 for value in values):
        raise CorruptCheckpointError("a shape, an offset or a rank is negative or not an integer")
    return tuple(values)


def parse_placement(raw: dict[str, Any]) -> tuple[int, int] | None:
    """Return (axis, split factor) of a placement that shards, None of one that replicates."""
    kind = raw["type"]
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "StridedShard"):
        raise CorruptCheckpointError(f"a tensor has the placement {kind!r:.80}")
    dim, factor = raw["dim"], raw.get("split_factor", 1)
    if type(dim) is not int or type(factor) is not int or factor < 1:
        raise CorruptCheckpointError("a placement has no axis, or no split factor")
    return dim, factor


@functools.lru_cache(4096)
def cut_by_mesh(
    shape: Ints, mesh_shape: Ints, ranks: Ints, placements: tuple[tuple[int, int] | None, ...]
) -> tuple[Chunk, ...]:
    """Return the boxes that the ranks of a mesh hold of a tensor; of replicas only the first rank's.

    Cached, because the layers of a model repeat shapes.
    """
    if len(mesh_shape) != len(placements) or math.prod(mesh_shape) != len(ranks):
        raise CorruptCheckpointError(f"a mesh of shape {mesh_shape} has {len(ranks)} ranks")
    _check_chunks(shape, placements, len(ranks))
    chunks: list[Chunk] = []
    for rank, place in zip(ranks, product(*map(range, mesh_shape)), strict=True):
        replicates = any(index and not way for index, way in zip(place, placements, strict=True))
        if not replicates:
            chunks += cut_for_rank(shape, mesh_shape, place, placements, rank)
    return tuple(chunks)


def _check_chunks(shape: Ints, placements: Sequence[tuple[int, int] | None], ranks: int) -> None:
    """Raise CorruptCheckpointError if a tensor is cut into more boxes than any is."""
    if ranks * math.prod(way[1] for way in placements if way is not None) > _MOST_CHUNKS:
        raise CorruptCheckpointError(f"a tensor of shape {shape} is cut into more than {_MOST_CHUNKS:,} boxes")


def cut_for_rank(
    shape: Ints,
    mesh_shape: Sequence[int],
    coordinates: Sequence[int],
    placements: Sequence[tuple[int, int] | None],
    rank: int,
) -> list[Chunk]:
    """Return the boxes that a rank holds of a tensor; ``placements`` are, by mesh axis, of :func:`parse_placement`."""
    _check_chunks(shape, placements, 1)
    steps = zip(placements, mesh_shape, coordinates, strict=True)
    splits = [Split(way[0], count, index, way[1]) for way, count, index in steps if way is not None]
    return [Chunk(box, place, rank) for box, place in list_held_boxes(shape, splits)]
