"""Sums of the bits of each rank's shards: added up over all ranks, they are fingerprints of the tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt import settings
from shardckpt.manifest.names import FINGERPRINTS_NAME
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.planning.table import make_column
from shardckpt.storage.columns import Columns, pack_columns
from shardckpt.storage.fingerprint_file import FINGERPRINTS_COLUMN, SUM_BYTES, parse_fingerprints
from shardckpt.storage.packed_shards import describe_specs, list_specs
from shardckpt.storage.workers import Workers
from shardckpt.tensors.fingerprint import finish_fingerprint, sum_boxes
from shardckpt.tensors.torch_private import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from shardckpt.planning.boxes import Ints
    from shardckpt.storage.packed_shards import PackedShards
    from shardckpt.storage.reader import CheckpointReader

#: Most bytes and boxes that a thread sums at a time, unless one tensor has more.
_JOB_BYTES, _JOB_BOXES = 16 << 20, 4096

_Box = tuple[torch.Tensor, "Ints", "Ints"]


class _Part(NamedTuple):
    """A rank's contribution to a tensor: its key, dtype and global shape, elements, and both sums."""

    key: str
    dtype: str
    shape: Ints
    elements: int
    sums: tuple[int, int]


def sum_shards(stored: PackedShards, tensors: Sequence[torch.Tensor], aliases: Mapping[str, str]) -> bytes:
    """Return the sums of a rank's boxes of each tensor, packed; several threads compute them.

    ``aliases`` has further keys of tensors, and the key by which each is stored. A tensor that has no values that can
    be read is a ShardingError.
    """
    keys, dtypes, shapes = list_specs(stored.specs)
    table, _ = stored.unpack_boxes()
    numbers = table.spec.tolist()
    boxes: list[_Box] = [
        (tensor, tuple(offset[: len(shapes[number])]), shapes[number])
        for number, tensor, offset in zip(numbers, tensors, table.offset.tolist(), strict=True)
    ]
    jobs = batch_by_bytes(boxes, lambda box: box[0].nbytes, _JOB_BYTES, _JOB_BOXES)
    found = Workers(settings.io_threads(), "shardckpt-sums").each(_sum_job, enumerate(jobs))
    of_boxes = [sums for _, part in sorted(found.items()) for sums in part]
    counts, totals = [0] * len(keys), [(0, 0)] * len(keys)
    for number, (first, second), tensor in zip(numbers, of_boxes, tensors, strict=True):
        counts[number] += tensor.numel()
        totals[number] = totals[number][0] + first, totals[number][1] + second
    parts = list(map(_Part, keys, dtypes, shapes, counts, totals))
    known = {part.key: part for part in parts}
    parts += [known[key]._replace(key=alias) for alias, key in aliases.items() if key in known]
    return _pack(parts)


def _sum_job(boxes: Sequence[_Box]) -> list[tuple[int, int]]:
    with one_thread():
        return sum_boxes(boxes)


def split_sums(parts: Iterable[bytes], find_owner: Callable[[str], int]) -> dict[int, bytes]:
    """Return a rank's sums by the rank that adds up the sums of a key."""
    owned: dict[int, list[_Part]] = defaultdict(list)
    for part in _unpack(parts):
        owned[find_owner(part.key)].append(part)
    return {owner: _pack(some) for owner, some in owned.items()}


def add_sums(parts: Iterable[bytes]) -> dict[str, str]:
    """Return the fingerprints of tensors, from the sums of all ranks, sorted by key.

    A tensor has none if the ranks have not summed as many elements as it has: some are stored twice, or not at all.
    """
    totals: dict[tuple[str, str, Ints], list[int]] = {}
    for part in _unpack(parts):
        total = totals.setdefault(part[:3], [0, 0, 0])
        for number, value in enumerate((part.elements, *part.sums)):
            total[number] += value
    return {
        key: finish_fingerprint(dtype, shape, sums)
        for (key, dtype, shape), (count, *sums) in sorted(totals.items())
        if count == math.prod(shape)
    }


def pack_fingerprints(fingerprints: Mapping[str, str]) -> bytes:
    """Return the bytes of the file with the fingerprints of tensors: columns of their keys, and of 16 bytes each."""
    data = b"".join(map(bytes.fromhex, fingerprints.values()))
    return pack_columns({"keys": list(fingerprints), FINGERPRINTS_COLUMN: _as_rows(data)})


def read_fingerprints(reader: CheckpointReader) -> dict[str, str]:
    """Return the fingerprints by key that a checkpoint has stored; none if it has no file of them."""
    record = reader.manifest.record
    if record is None or FINGERPRINTS_NAME not in record.list_files():
        return {}
    return parse_fingerprints(reader.read(FINGERPRINTS_NAME), str(reader.directory / FINGERPRINTS_NAME))


def _pack(parts: Sequence[_Part]) -> bytes:
    sums = b"".join((number % (1 << 64)).to_bytes(8, "little") for part in parts for number in part.sums)
    specs = describe_specs(*([getattr(part, name) for part in parts] for name in ("key", "dtype", "shape")))
    return pack_columns({**specs, "counts": make_column([part.elements for part in parts]), "sums": _as_rows(sums)})


def _unpack(parts: Iterable[bytes]) -> Iterator[_Part]:
    for data in parts:
        columns = Columns(data, "the sums of a rank")
        raw = bytes(columns.raw("sums"))
        rows = zip(*list_specs(columns), columns.integers("counts").tolist(), strict=True)
        for number, (key, dtype, shape, count) in enumerate(rows):
            start = number * SUM_BYTES
            first, second = (int.from_bytes(raw[low : low + 8], "little") for low in (start, start + 8))
            yield _Part(key, dtype, shape, count, (first, second))


def _as_rows(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, SUM_BYTES, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, SUM_BYTES)
