"""Lay out a rank's items in files, balanced by bytes: each position is known before anything is written."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.planning import assign_holders
from shardckpt.tensors import page_offset
from shardckpt_torch_dist.archive import ARCHIVE_ALIGN, make_frame
from shardckpt_torch_dist.dialects import Item
from shardckpt_torch_dist.plan.write_plan import FilePlan, WritePlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shardckpt_torch_dist.plan.items import LocalItems


class FileLayout(NamedTuple):
    """A rank's files, and where its items are in them.

    Attributes:
        work: The write plan.
        files: The names of the files.
        boxes: (number of the file, start, length) of each box, in bytes.
        objects: The item of each object, by unique key.
    """

    work: WritePlan
    files: list[str]
    boxes: list[tuple[int, int, int]]
    objects: dict[str, Item]


def lay_out(items: LocalItems, archives: Mapping[str, bytes], rank: int, count: int, hint: str | None) -> FileLayout:
    """Assign the items to files by bytes, and give each a position.

    Args:
        items: The rank's items.
        archives: The archives of its objects, by unique key. They come first in a file, as in Megatron's files.
        rank: The rank, for the names of the files.
        count: How many files.
        hint: Items whose keys begin with it go to ``count`` separate files, whose names begin with it; None for none.

    Returns:
        The files, and the position of each item.
    """
    keys = [items.keys[number] for number in items.boxes.spec]
    names = [*keys, *archives]
    sizes = [*map(_nbytes, items.tensors), *(0 for _ in archives)]  # objects count as 0: only tensors are balanced
    chosen = [""] * len(names)
    for prefix, numbers in _group_by_hint(names, hint):
        files = [f"{prefix}__{rank}_{n}.distcp" for n in range(count)]
        bins = assign_holders([tuple(range(count))] * len(numbers), [sizes[n] for n in numbers]) if count > 1 else None
        for number, bucket in zip(numbers, bins or itertools.repeat(0), strict=False):
            chosen[number] = files[bucket]
    work = WritePlan([], items.tensors, keys, [], archives)
    layout = FileLayout(work, list(dict.fromkeys(chosen)), [], {})
    by_name = {name: FilePlan(name) for name in layout.files}
    work.files.extend(by_name.values())
    ends = dict.fromkeys(by_name, 0)
    for (key, archive), file in zip(archives.items(), chosen[len(keys) :], strict=True):
        by_name[file].objects.append(key)
        layout.objects[key] = Item(file, ends[file], len(archive))
        ends[file] += padded_length(len(archive))
    numbered = {name: number for number, name in enumerate(layout.files)}
    for number, (tensor, file) in enumerate(zip(items.tensors, chosen, strict=False)):
        start = ends[file]
        # The padding in the head depends on the position, so an archive is sized only once its start is known.
        head, tail = make_frame(tensor.dtype, tuple(tensor.shape), start, page_offset(tensor))
        length = len(head) + sizes[number] + len(tail)
        work.lengths.append(length)
        by_name[file].tensors.append(number)
        layout.boxes.append((numbered[file], start, length))
        ends[file] = start + padded_length(length)
    for name, nbytes in ends.items():
        by_name[name].nbytes = nbytes
    return layout


def padded_length(length: int) -> int:
    """Return the length of an archive in bytes, rounded up to where the next one begins."""
    return length + -length % ARCHIVE_ALIGN


def _nbytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _group_by_hint(names: Sequence[str], hint: str | None) -> list[tuple[str, list[int]]]:
    """Return the prefixes of file names, each with the numbers of the items that go to such files."""
    if not hint:
        return [("", list(range(len(names))))]
    hinted = [number for number, name in enumerate(names) if name.startswith(hint)]
    return [(hint, hinted), ("", sorted(set(range(len(names))).difference(hinted)))]


__all__ = ["FileLayout", "lay_out", "padded_length"]
