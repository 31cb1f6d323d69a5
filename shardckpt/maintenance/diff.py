"""Comparing two checkpoints: keys, shapes, dtypes, and values of tensors in bounded memory. Not collective."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.engine.lazy import StoredCheckpoint
from shardckpt.engine.locations import locate
from shardckpt.engine.optimizer_keys import is_optimizer_key
from shardckpt.engine.progress import Progress
from shardckpt.engine.renaming import parse_renames
from shardckpt.engine.streaming import STREAM_BYTES, TensorBox, read_boxes
from shardckpt.errors import CheckpointingException, cut_prefix, parse_globals, prefix_error
from shardckpt.huggingface.folder import resolve_link
from shardckpt.huggingface.models import find_mapping
from shardckpt.maintenance.diff_report import DiffReport, TensorDifference
from shardckpt.maintenance.fingerprint_diff import find_same
from shardckpt.maintenance.object_diff import diff_objects
from shardckpt.maintenance.sources import Reading, have_same_bytes, list_unread_files, open_source
from shardckpt.maintenance.statistics import INTEGERS, is_numeric
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.planning.boxes import Box, cut_box
from shardckpt.plugins.key_mapping import Identity, KeyMapEntry, get_key_map_entries
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.directory import open_directory, retry_if_replaced
from shardckpt.storage.memory_budget import parse_size
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.planning.boxes import Ints
    from shardckpt.plugins.key_mapping import KeyMapping


def diff_checkpoints(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    mapping: str | KeyMapping | None = None,
    prefix: str = "",
    read_values: bool = False,
    tensors_only: bool = False,
    allow_globals: tuple[object, ...] = (),
    memory: int | str = STREAM_BYTES,
    rename: Mapping[str, str] | None = None,
    ignore_dtype: bool = False,
) -> DiffReport:
    """Compare two checkpoints, of any formats and sharding: tensors, objects and common state.

    Of each tensor the values are read only if a checkpoint has no stored fingerprint of it, or they differ. Without
    tolerances the bits are compared: 0.0 and -0.0 differ, and NaN equals NaN of the same bits. A negative tolerance is
    an error.

    Args:
        first: A checkpoint that an installed strategy reads, a Hugging Face folder, or a file of
            ``torch.save`` or safetensors: a path, or, except for files, a URL.
        second: The same.
        rtol: Values differ if ``|first - second| > atol + rtol * |second|``.
        atol: See ``rtol``.
        mapping: How names and shapes of the first become the second's; by default, they are the same. As for
            :func:`shardckpt.huggingface.find_mapping`.
        prefix: Prefix that names of the first have and names of the second lack; its other tensors are left out.
        read_values: Read all values: fingerprints are of the saved values, and do not show damaged files.
        tensors_only: Do not compare objects and common state. With a mapping or a prefix they are not compared either:
            they are of the job, not of the model.
        allow_globals: Classes and functions that pickled objects may name, besides those that every load accepts.
        memory: Bytes of values of both that are in memory at a time. Comparing takes a few times as much.
        rename: Prefixes of keys, and of paths of the common state, of the first, and their new names, applied before
            all else: ``{"optim": "optimizer"}``.
        ignore_dtype: Whether tensors of two dtypes are equal where their values are, both cast to a wider one; else
            they differ whatever the values.
    """
    check_annotated(diff_checkpoints, locals())
    for name, tolerance in {"rtol": rtol, "atol": atol}.items():
        if not tolerance >= 0:  # NaN, too
            raise CheckpointingException(f"{name}={tolerance}: a tolerance is a number that is not negative")

    plugins = get_plugin_manager()
    chosen, budget = find_mapping(mapping), parse_size(memory, "memory")
    how = Reading(parse_globals(allow_globals))
    renamed = how._replace(rename=parse_renames(rename))

    def attempt() -> DiffReport:
        places = locate(first, plugins), locate(second, plugins)
        with ExitStack() as stack:
            one = stack.enter_context(open_source(places[0], plugins, renamed))
            other = stack.enter_context(open_source(places[1], plugins, how))
            unread = [list_unread_files(at, StoredCheckpoint(o)) for at, o in zip(places, (one, other), strict=True)]
            report = _Comparison(one, other, rtol, atol, budget, str(first), ignore_dtype).run(
                chosen, prefix, read_values
            )
            report = replace(report, unread_files=unread[0] | unread[1])
            if tensors_only or prefix or not isinstance(chosen, Identity):
                return report
            common = sorted(unread[0].keys() & unread[1].keys())
            different = [name for name in common if _have_other_bytes(places, name)]
            alone = [
                {each.key for each in report.differences if each.kind == f"only in {side}"}
                for side in ("first", "second")
            ]
            objects, known = diff_objects(one, other, *alone)
            rest = tuple(each for each in report.differences if each.key not in known)
            return replace(report, differences=rest, objects=objects, different_files=tuple(different))

    return retry_if_replaced(attempt, first)


def _have_other_bytes(places: Sequence[Path], name: str) -> bool:
    """Return whether a file differs in two folders; links that are not followed in both are only named as unread."""
    paths = [resolve_link(open_directory(place), name) for place in places]
    return any(path.exists() and not path.is_symlink() for path in paths) and not have_same_bytes(*paths)


class _Pair(NamedTuple):
    """A tensor of the first checkpoint, and one of the second that has some or all of its elements."""

    first: ShardedTensor
    second: ShardedTensor
    link: KeyMapEntry


@dataclass
class _Found:
    """The comparison of a tensor of the first checkpoint.

    Attributes:
        pairs: The tensors of the second that have its elements.
        absent: The other difference, if the second lacks a tensor, or has it with another shape.
    """

    tensor: ShardedTensor
    pairs: list[_Pair] = field(default_factory=list)
    absent: TensorDifference | None = None
    elements: int = 0
    different: int = 0
    largest: list[float] = field(default_factory=list)
    index: Ints | None = None
    #: Of the first checkpoint's values, and of the differences.
    norm: float = 0.0
    changed: float = 0.0

    @property
    def is_only_in_first(self) -> bool:
        """Whether the second checkpoint has nothing of it."""
        return self.absent is not None and self.absent.kind == "only in first"

    def report(self, *, ignore_dtype: bool = False) -> TensorDifference | None:
        """Return the difference, or None."""
        if self.absent is not None:
            return self.absent
        others = [pair.second for pair in self.pairs if pair.second.dtype != self.tensor.dtype and not ignore_dtype]
        if not others and not self.different:
            return None
        shown = others[0] if others else self.pairs[0].second
        absolute, relative = self.largest or (None, None)
        return TensorDifference(
            self.tensor.key,
            "dtype" if others else "values",
            _describe(self.tensor),
            _describe(shown),
            self.elements,
            self.different,
            absolute,
            relative,
            self.index,
            self._relative_norm() if self.largest else None,
        )

    def _relative_norm(self) -> float:
        """Return the norm of the differences, relative to the norm of the first checkpoint's values."""
        if self.changed == 0:
            return 0.0
        ratio = self.changed / self.norm if self.norm else math.inf
        return ratio if math.isfinite(ratio) else math.inf


@dataclass
class _Comparison:
    """A comparison of two open checkpoints; see :func:`diff_checkpoints` for the tolerances and ``memory``."""

    first: OpenCheckpoint
    second: OpenCheckpoint
    rtol: float
    atol: float
    memory: int
    #: How the caller names the first, for those who watch.
    place: str
    #: Whether two dtypes alone are no difference.
    ignore_dtype: bool

    def run(self, mapping: KeyMapping, prefix: str, read_values: bool) -> DiffReport:
        """Compare all tensors."""
        prints = [{} if read_values else StoredCheckpoint(each).fingerprints for each in (self.first, self.second)]
        found, missing, same = self._match(mapping, prefix, *prints)
        # a mapping leads to a folder with the model alone, which has no optimizer's state to compare
        is_left_out = [
            not isinstance(mapping, Identity) and one.is_only_in_first and is_optimizer_key(one.tensor.key)
            for one in found
        ]
        left_out = tuple(one.tensor.key for one, out in zip(found, is_left_out, strict=True) if out)
        found = [one for one, out in zip(found, is_left_out, strict=True) if not out]
        progress = Progress("diff", self.place, sum(map(_count_bytes, self._list_boxes(found))), get_plugin_manager())
        for some in batch_by_bytes(self._cut(found), _count_bytes, self.memory):
            self._compare_values(some)
            progress.add(sum(map(_count_bytes, some)))
        reports = [report for one in found if (report := one.report(ignore_dtype=self.ignore_dtype)) is not None]
        differences = sorted([*reports, *missing], key=lambda difference: difference.key)
        equal = len(same) + len(found) - len(reports)
        # of other dtypes are all that differ without this option, and do not with it
        strict = sum(one.report() is not None for one in found)
        return DiffReport(equal, len(same), tuple(differences), left_out=left_out, of_other_dtype=strict - len(reports))

    def _match(
        self, mapping: KeyMapping, prefix: str, first: Mapping[str, str], second: Mapping[str, str]
    ) -> tuple[list[_Found], list[TensorDifference], set[str]]:
        """Return the first's tensors whose values must be compared, each with the second's; and two other groups.

        These are the tensors that only the second has, and the keys of tensors with equal fingerprints: ``first`` and
        ``second``.
        """
        ones, others = _list_tensors(self.first), _list_tensors(self.second)
        names = {key: cut_prefix(key, prefix) for key in ones if key.startswith(prefix)}
        if prefix and not names:
            raise prefix_error("no tensor of the first", prefix, ones)
        # without an object for each: to make 100,000 objects takes longer than all else
        known = {key: name for key, name in names.items() if name in others} if isinstance(mapping, Identity) else {}
        same = find_same(first, second, known)
        rest = others.keys() - {names[key] for key in same}
        found = []
        for key, name in names.items():
            if key in same:
                continue
            tensor = ShardedTensor.from_global_shape(key, *ones[key])
            one = _Found(tensor)
            links = get_key_map_entries(mapping, name, tensor.global_shape)
            for link in links:
                rest.discard(link.name)
                if link.name not in others:
                    one.absent = one.absent or TensorDifference(key, "only in first", _describe(tensor), "")
                    continue
                other = ShardedTensor.from_global_shape(link.name, *others[link.name])
                if other.global_shape != link.shape:
                    one.absent = TensorDifference(key, "shape", _describe(tensor), _describe(other))
                else:
                    one.pairs.append(_Pair(tensor, other, link))
            if not links:
                one.absent = TensorDifference(key, "only in first", _describe(tensor), "")
            found.append(one)
        pairs = {one.tensor.key: one.pairs[0].second.key for one in found if len(one.pairs) == 1 and not one.absent}
        same |= find_same(first, second, pairs)
        alone = [ShardedTensor.from_global_shape(key, *others[key]) for key in rest]
        return (
            [one for one in found if one.tensor.key not in same],
            [TensorDifference(tensor.key, "only in second", "", _describe(tensor)) for tensor in alone],
            same,
        )

    def _list_boxes(self, found: Iterable[_Found]) -> Iterator[tuple[_Found, _Pair, Box]]:
        """Yield boxes of the first checkpoint's tensors that are compared."""
        return ((one, pair, pair.link.box) for one in found for pair in ([] if one.absent else one.pairs))

    def _cut(self, found: Iterable[_Found]) -> Iterator[tuple[_Found, _Pair, Box]]:
        """Yield parts of these boxes, to be compared one at a time."""
        for one, pair, whole in self._list_boxes(found):
            for box in cut_box(whole, _itemsize(pair), self.memory):
                yield one, pair, box

    def _compare_values(self, some: Sequence[tuple[_Found, _Pair, Box]]) -> None:
        """Compare boxes, in the order of their elements in each tensor."""
        firsts = read_boxes(self.first, [TensorBox(pair.first, box) for _, pair, box in some])
        seconds = read_boxes(self.second, [TensorBox(pair.second, pair.link.to_folder(box)) for _, pair, box in some])
        for (one, pair, box), first, other in zip(some, firsts, seconds, strict=True):
            second = (other.transpose(-1, -2) if pair.link.transposed else other).reshape(first.shape)
            one.elements += first.numel()
            is_same = first.dtype == second.dtype and torch.equal(_view_bytes(first), _view_bytes(second))
            differs = None if is_same else self._find_different(first, second)
            # norms of a tensor that is here whole and equal are not shown, and cost as much as all else
            is_done = is_same and first.numel() == math.prod(one.tensor.global_shape)
            if not is_done and is_numeric(first.dtype) and is_numeric(second.dtype):
                one.norm = math.hypot(one.norm, _norm(_widen(first)))
                # values within the tolerances have changed, too
                one.changed = math.hypot(one.changed, 0.0 if is_same else _norm(_subtract(first, second)))
            if differs is None:
                continue
            one.different += int(differs.sum())
            number = int(differs.flatten().to(torch.uint8).argmax())
            within = [int(place) for place in torch.unravel_index(torch.tensor(number, device="cpu"), first.shape)]
            index = tuple(low + place for low, place in zip(box.offset, within, strict=True))
            one.index = index if one.index is None else min(one.index, index)
            found = _measure(first, second, differs)
            one.largest = [*map(max, one.largest, found)] if one.largest and found else found or one.largest

    def _find_different(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
        """Return which elements differ of values whose dtypes or bits do; None if none does."""
        if first.dtype == second.dtype:
            if not (self.rtol or self.atol) or not is_numeric(first.dtype):
                return (_view_bytes(first) != _view_bytes(second)).any(-1).view(first.shape)
        elif not (is_numeric(first.dtype) and is_numeric(second.dtype)):
            return torch.ones(first.shape, dtype=torch.bool, device="cpu") if first.numel() else None
        close = torch.isclose(_widen(first), _widen(second), rtol=self.rtol, atol=self.atol, equal_nan=True)
        return None if bool(close.all()) else ~close


def _list_tensors(checkpoint: OpenCheckpoint) -> dict[str, tuple[torch.dtype, Ints]]:
    columns = checkpoint.columns()
    return dict(zip(columns.keys, zip(columns.dtypes, columns.shapes, strict=True), strict=True))


def _describe(tensor: ShardedTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.global_shape)}"


def _itemsize(pair: _Pair) -> int:
    return pair.first.dtype.itemsize + pair.second.dtype.itemsize


def _count_bytes(item: tuple[_Found, _Pair, Box]) -> int:
    return item[2].volume * _itemsize(item[1])


def _view_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, of shape (elements, bytes)."""
    return values.contiguous().reshape(-1).view(torch.uint8).view(values.numel(), values.dtype.itemsize)


def _widen(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _subtract(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return differences as float64 or complex128; differences of integers are rounded once."""
    if {one.dtype, other.dtype} <= INTEGERS:
        first, second = one.long(), other.long()
        if max(one.itemsize, other.itemsize) < first.itemsize:
            return first.sub_(second).double()
        # in two halves: float64 has no integers above 2^53, and int64 not all differences
        low = (first & 0xFFFFFFFF).sub_(second & 0xFFFFFFFF).double()
        return (first >> 32).sub_(second >> 32).double().mul_(2.0**32).add_(low)
    return _widen(one) - _widen(other)


def _norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


def _measure(first: torch.Tensor, second: torch.Tensor, differs: torch.Tensor) -> list[float]:
    """Return the largest absolute and relative difference of the elements that differ; none of dtypes without any."""
    if not (is_numeric(first.dtype) and is_numeric(second.dtype)):
        return []
    one, other = first[differs], second[differs]
    absolute = _subtract(one, other).abs()
    relative = torch.where(absolute == 0, 0.0, absolute / _widen(other).abs())
    # NaN is no distance: a value that is not a number is infinitely far from any other, and max() would hide it.
    return [float(values.nan_to_num(math.inf, posinf=math.inf).max()) for values in (absolute, relative)]
