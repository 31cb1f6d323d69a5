"""Comparing two checkpoints by their indexes and stored fingerprints alone, without torch, which imports in seconds.

Comparisons that need values are left to :func:`shardckpt.maintenance.diff_checkpoints`.
"""

from __future__ import annotations

from itertools import chain
from operator import eq
from typing import TYPE_CHECKING

from shardckpt.engine.outlined import open_by_outline
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance.diff_report import DiffReport, ObjectReport, TensorDifference
from shardckpt.manifest.names import CONTENT, FINGERPRINTS_NAME
from shardckpt.storage.fingerprint_file import parse_fingerprints
from shardckpt.storage.recorded_file import read_recorded_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardckpt.engine.outlined import OutlinedCheckpoint
    from shardckpt.plugins.outline import Outline


def diff_by_fingerprints(
    first: str,
    second: str,
    own_functions: Mapping[tuple[str, int], str],
    *,
    tensors_only: bool = False,
) -> DiffReport | None:
    """Compare two checkpoints of this library like :func:`shardckpt.maintenance.diff_checkpoints`, without torch.

    Args:
        first: A checkpoint.
        second: The same.
        own_functions: The functions that outline the formats of this distribution, as their plugins register them.
        tensors_only: Do not compare objects and common state.

    Returns:
        None if values have to be read: a tensor of both has no fingerprint there, or another; they have not the same
        bytes of their objects, or of a plain common state. And if either is not whole, or has no outline.
    """
    try:
        one, other = (open_by_outline(each, own_functions) for each in (first, second))
        if one is None or other is None:
            return None
        first_prints, second_prints = _read_fingerprints(one, other)
        # no loop over keys, which takes longer than all the rest where there are 100,000
        alone: list[set[str]] = [set(), set()]
        both: Collection[str] = one.outline.keys
        if both != other.outline.keys:
            keys, others = set(both), set(other.outline.keys)
            both, alone = keys & others, [keys - others, others - keys]
        are_same = first_prints == second_prints or all(
            map(eq, map(first_prints.get, both), map(second_prints.get, both))
        )
        if not are_same or not all(map(first_prints.__contains__, both)):
            return None
        objects = None if tensors_only else _compare_objects(one, other)
        if objects is None and not tensors_only:
            return None
    except (CheckpointingException, OSError):  # diff_checkpoints has the better error
        return None
    differences = [
        *(TensorDifference(key, "only in first", text, "") for key, text in _describe(one.outline, alone[0])),
        *(TensorDifference(key, "only in second", "", text) for key, text in _describe(other.outline, alone[1])),
    ]
    differences.sort(key=lambda difference: difference.key)
    return DiffReport(len(both), len(both), tuple(differences), objects)


def find_same(first: Mapping[str, str], second: Mapping[str, str], names: Mapping[str, str]) -> set[str]:
    """Return the keys of tensors with equal stored fingerprints.

    ``first`` and ``second`` are the fingerprints by key, and ``names`` the names in the second of tensors of the first.
    A fingerprint has the shape and the dtype; a transposed tensor of the same shape has another.
    """
    return {key for key, name in names.items() if (known := first.get(key)) is not None and known == second.get(name)}


def _compare_objects(*checkpoints: OutlinedCheckpoint) -> ObjectReport | None:
    """Return the comparison of all but tensors; None if that needs a look at values."""
    one, other = (each.outline for each in checkpoints)
    # the structure of a converted file of torch.save is no value
    if not one.plain_common or one.plain_common != other.plain_common or CONTENT in one.common:
        return None
    names, others = ({*each.objects, *each.plain_objects} for each in (one, other))
    if names != others:
        return None
    first, second = (_read_objects(each) for each in checkpoints)
    is_known = len(first) == len(names) and first == second
    return ObjectReport(len(one.common) + len(one.objects)) if is_known else None


def _read_objects(checkpoint: OutlinedCheckpoint) -> dict[str, tuple[str, bytes]]:
    """Return the encoding and the bytes of each object."""
    place, record, outline = checkpoint.place, checkpoint.record, checkpoint.outline
    return {
        key: (encoding, read_recorded_file(place, record, file, offset, nbytes))
        for key, (encoding, file, offset, nbytes) in zip(
            chain(outline.objects, outline.plain_objects), outline.object_places, strict=False
        )
    }


def _read_fingerprints(*checkpoints: OutlinedCheckpoint) -> Iterator[dict[str, str]]:
    """Yield the fingerprints of each by key; equal bytes are parsed once."""
    parsed: dict[bytes, dict[str, str]] = {}
    for each in checkpoints:
        is_there = FINGERPRINTS_NAME in each.record.list_files()
        data = read_recorded_file(each.place, each.record, FINGERPRINTS_NAME) if is_there else b""
        if data not in parsed:
            parsed[data] = parse_fingerprints(data, FINGERPRINTS_NAME) if is_there else {}
        yield parsed[data]


def _describe(outline: Outline, keys: set[str]) -> list[tuple[str, str]]:
    """Return the keys, each with dtype and shape as text."""
    if not keys:
        return []
    rows = zip(outline.keys, outline.dtypes, outline.shapes, strict=True)
    return [(key, f"{dtype} {list(shape)}") for key, dtype, shape in rows if key in keys]
