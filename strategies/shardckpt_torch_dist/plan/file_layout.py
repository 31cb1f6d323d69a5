"""Where a rank's items go: balanced over files by bytes, each at a place that is known before anything is written."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.planning import assign_holders
from shardckpt.tensors import page_place
from shardckpt_torch_dist.archive import ARCHIVE_ALIGN, fitted
from shardckpt_torch_dist.dialects import Item
from shardckpt_torch_dist.plan.write_plan import PlannedFile, SaveWork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shardckpt_torch_dist.plan.items import LocalItems


class Placed(NamedTuple):
    """A rank's files, and where its items are in them.

    Attributes:
        work: The files to write.
        files: Their names.
        boxes: (file, start, length) of every box.
        objects: The item of every object, by unique key.
    """

    work: SaveWork
    files: list[str]
    boxes: list[tuple[int, int, int]]
    objects: dict[str, Item]


def place(items: LocalItems, archives: Mapping[str, bytes], rank: int, count: int, hint: str | None) -> Placed:
    """Assign the items to ``count`` files; those whose keys begin with the hint to as many files of their own.

    Objects, of which there are archives by unique key, come first in a file, as Megatron has it.
    """
    keys = [items.keys[number] for number in items.boxes.spec]
    names = [*keys, *archives]
    sizes = [*map(_nbytes, items.tensors), *(0 for _ in archives)]
    chosen = [""] * len(names)
    for prefix, numbers in _groups(names, hint):
        files = [f"{prefix}__{rank}_{n}.distcp" for n in range(count)]
        bins = assign_holders([tuple(range(count))] * len(numbers), [sizes[n] for n in numbers]) if count > 1 else None
        for number, bucket in zip(numbers, bins or itertools.repeat(0), strict=False):
            chosen[number] = files[bucket]
    work = SaveWork([], items.tensors, keys, [], archives)
    placed = Placed(work, list(dict.fromkeys(chosen)), [], {})
    by_name = {name: PlannedFile(name) for name in placed.files}
    work.files.extend(by_name.values())
    ends = dict.fromkeys(by_name, 0)
    for (key, archive), file in zip(archives.items(), chosen[len(keys) :], strict=True):
        by_name[file].objects.append(key)
        placed.objects[key] = Item(file, ends[file], len(archive))
        ends[file] += padded(len(archive))
    numbered = {name: number for number, name in enumerate(placed.files)}
    for number, (tensor, file) in enumerate(zip(items.tensors, chosen, strict=False)):
        start = ends[file]
        head, tail = fitted(tensor.dtype, tuple(tensor.shape), start, page_place(tensor))
        length = len(head) + sizes[number] + len(tail)
        work.lengths.append(length)
        by_name[file].tensors.append(number)
        placed.boxes.append((numbered[file], start, length))
        ends[file] = start + padded(length)
    for name, nbytes in ends.items():
        by_name[name].nbytes = nbytes
    return placed


def padded(length: int) -> int:
    """Bytes from an archive's beginning to the next one's."""
    return length + -length % ARCHIVE_ALIGN


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _groups(names: Sequence[str], hint: str | None) -> list[tuple[str, list[int]]]:
    """Prefixes of file names, and the numbers of the items that go there."""
    if not hint:
        return [("", list(range(len(names))))]
    hinted = [number for number, name in enumerate(names) if name.startswith(hint)]
    return [(hint, hinted), ("", sorted(set(range(len(names))).difference(hinted)))]


__all__ = ["Placed", "padded", "place"]
