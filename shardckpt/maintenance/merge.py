"""Merging the weights of several checkpoints into one, in bounded memory. Not collective."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from numbers import Real
from typing import TYPE_CHECKING, Any, get_args

import torch

from shardckpt.engine.locations import locate, refuse_overlap
from shardckpt.engine.renaming import parse_renames
from shardckpt.errors import CheckpointingException, check_choice, format_many, listed, show_given
from shardckpt.huggingface.names import parse_leave_out
from shardckpt.maintenance.convert import run_conversion
from shardckpt.maintenance.merge_weights import check_weights
from shardckpt.maintenance.merged_source import MergeRules, Missing, Optimizer, merge_opened
from shardckpt.maintenance.sources import Reading, identify_source, open_source, warn_of_unread_files
from shardckpt.storage.memory_budget import check_memory_budget, parse_size
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.maintenance.conversion import ConversionReport
    from shardckpt.plugins.key_mapping import KeyMapping
    from shardckpt.plugins.manager import PluginManager

logger = logging.getLogger(__name__)

#: The budget if the caller names none, and the least: the writer has half.
_BUDGET, _LEAST_BUDGET = "256MiB", 32 << 20
#: The dtypes in which sums are computed, by the names of the command line.
_ACCUMULATORS = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
_TWO = 2
#: Of the budget, the part in which all sources together keep the ends of segments for their next reads, and the least
#: bytes of each source: one segment of the file that is being read, and one of the file before.
_KEPT_PART, _LEAST_KEPT = 8, 2 << 20


@dataclass(frozen=True)
class MergeReport:
    """The result of a merge.

    Attributes:
        sources: The checkpoints that were merged.
        weights: Their weights, divided by their sum; of slerp ``1 - t`` and ``t``.
        base: The number of the source that objects and common state are from.
        conversion: The report of the conversion, with the proof: ``before`` are the fingerprints of the merged values,
            ``after`` the fingerprints of the same values, read again. ``left_out`` has the items of the sources that
            the merge lacks.
    """

    sources: tuple[str, ...]
    weights: tuple[float, ...]
    base: int
    conversion: ConversionReport


def merge_checkpoints(
    sources: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    to: Any = None,
    *,
    weights: Sequence[float] | None = None,
    slerp: float | None = None,
    accumulate: str | torch.dtype = "fp32",
    optimizer: Optimizer = "average",
    missing: Missing = "error",
    base: int = -1,
    memory_budget: int | str = _BUDGET,
    overwrite: bool = False,
    mapping: str | KeyMapping | None = None,
    dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None = None,
    keep: Collection[str] = (),
    prefix: str | None = None,
    strict: bool = False,
    cut_vocabulary: bool = False,
    leave_out: Collection[str] = (),
    assets: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    allow_globals: tuple[Any, ...] = (),
    rename: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None = None,
    skip_damaged: bool = False,
) -> MergeReport:
    """Write the weighted average, or the spherical interpolation, of checkpoints: completely or not at all.

    Sources may be of any formats and sharding; they need the same keys. Each element is added up in ``accumulate``,
    smallest term first, and rounded once, to the dtype that is written: the bits depend on the values and their weights
    alone, not on the order of sources, the memory, the sharding or the number of threads. All that is read is checked
    against its digests, and the written values are read again, as for :func:`convert_checkpoint`.

    Floating-point and complex tensors are merged; where dtypes differ, in the one that holds both. All other tensors,
    8-bit floats among them, must be equal in all sources. Objects and common state come from one source.

    Example::

        merge_checkpoints(["step-80", "step-90", "step-100"], "soup")
        merge_checkpoints(last_ten, "ema", weights=compute_ema_weights(10, 0.9), optimizer="drop")
        merge_checkpoints(["math", "code"], "both", "hf", slerp=0.5)

    Args:
        sources: Two checkpoints or more, of any kind that :func:`convert_checkpoint` reads. They are not changed.
        target: As ``new`` of :func:`convert_checkpoint`.
        to: As for :func:`convert_checkpoint`; by default, the default backend.
        weights: A number for each source; they are divided by their sum. By default all are equal.
            :func:`compute_ema_weights` and :func:`compute_wsm_weights` make the weights of an exponential moving
            average and of a decay of the learning rate; ``[1 - t, t]`` interpolates two linearly.
        slerp: For two sources: interpolate each tensor, flattened, along the sphere, this far from the first to the
            second; nearly parallel ones linearly. Each tensor is read twice. Optimizer state is interpolated linearly.
        accumulate: ``"fp32"`` or ``"fp64"``: the dtype of sums. float64 tensors, and elements that are too large for a
            sum in float32, are always added up in float64.
        optimizer: The treatment of the optimizer's state: ``"average"`` merges it like the model; ``"drop"`` does not
            write it; ``"base"`` takes it from ``base``. It is known by its keys: ``optimizer.``, ``optim.`` and others.
        missing: The treatment of tensors that not all sources have: ``"error"``; ``"drop"``: they are not written; or
            ``"available"``: they are merged from the sources that have them.
        base: The number of the source that objects, common state and key order are from: by default, the last.
        memory_budget: Bytes, or text such as ``"256MiB"``, of tensors and sums that are in memory at a time, at least
            32 MiB. To that come buffers of up to 32 MiB, and the ends of segments that were read and are used next: an
            eighth of it, or 2 MiB a source if that is more.
        overwrite: As for :func:`convert_checkpoint`.
        mapping: How names and shapes change when the merge is written; see :func:`convert_checkpoint`. With
            ``"megatron"``, Hugging Face folders merge with Megatron's checkpoints: each is read by Megatron's names.
        dtype: As for :func:`convert_checkpoint`; values are rounded once, from the accumulator to it.
        keep: As for :func:`convert_checkpoint`.
        prefix: As for :func:`convert_checkpoint`.
        strict: As for :func:`convert_checkpoint`.
        cut_vocabulary: As for :func:`convert_checkpoint`.
        leave_out: Names of tensors and objects of the sources, and entries of the common state, that are not written.
        assets: As for :func:`convert_checkpoint`.
        max_shard_size: As for :func:`convert_checkpoint`.
        allow_globals: As for :func:`convert_checkpoint`.
        rename: As for :func:`convert_checkpoint`, of every source; or a list with one, or None, for each source.
        skip_damaged: As for :func:`convert_checkpoint`, of every source; see ``missing`` for values that others have.

    Returns:
        A report of the written items, with the proof.

    Raises:
        KeyMismatchError: Not all sources have the same tensors.
        ShapeMismatchError: A tensor has several shapes, or dtypes that cannot be merged.
        CheckpointingException: Tensors that are not floating-point differ; weights do not fit; or as for
            :func:`convert_checkpoint`.
    """
    check_annotated(merge_checkpoints, locals())
    sources = _list_given("sources", sources, "checkpoints")
    places = [str(source) for source in sources]
    chosen = _choose_weights(places, weights, slerp)
    budget = parse_size(memory_budget, "memory_budget")
    check_memory_budget(budget, _LEAST_BUDGET, "to merge takes")
    if not -len(places) <= base < len(places):
        raise CheckpointingException(f"base={base}: there are {len(places)} sources, numbered from 0")
    check_choice("optimizer", optimizer, get_args(Optimizer))
    check_choice("missing", missing, get_args(Missing))
    if accumulate not in [*_ACCUMULATORS]:  # a list has no hash
        raise CheckpointingException(f"accumulate={accumulate!r}: expected 'fp32' or 'fp64'")
    if optimizer == "average" and min(chosen) < 0:
        raise CheckpointingException(
            f"weights={list(chosen)} has a negative one, by which an optimizer's second moments may become negative: "
            "leave the optimizer out, or take that of one source (optimizer='drop' or 'base', --optimizer)"
        )
    rules = MergeRules(
        weights=tuple(chosen),
        base=int(base) % len(places),
        slerp=None if slerp is None else chosen[1],
        accumulate=_ACCUMULATORS[accumulate],
        optimizer=optimizer,
        missing=missing,
        leave_out=parse_leave_out(leave_out),
        memory=budget // 2,
    )
    renames = _spread_renames(rename, len(places))
    # boxes are small, and end inside segments: else most segments would be read, and checked, twice
    kept_bytes = max(budget // _KEPT_PART // len(places), _LEAST_KEPT)
    left_out: list[str] = []
    steps: list[str] = []
    identities: list[str] = []
    damaged: list[str] = []

    @contextmanager
    def open_merge(_: Path, plugins: PluginManager, how: Reading) -> Iterator[OpenCheckpoint]:
        found = [locate(place, plugins) for place in sources]
        # unlike a conversion, it is no other form of one source
        refuse_overlap(found, locate(target, plugins))
        with ExitStack() as stack:
            each = [how._replace(kept_bytes=kept_bytes, rename=names) for names in renames]
            opened = [stack.enter_context(open_source(*one)) for one in zip(found, repeat(plugins), each)]
            for place, one in zip(found, opened, strict=True):
                warn_of_unread_files(place, one)
            identities[:] = map(identify_source, found, opened)
            damaged[:] = [f"{place}: {key}" for place, one in zip(places, opened, strict=True) for key in one.damaged]
            merged, strategy = merge_opened(opened, places, rules)
            yield merged
            left_out[:] = strategy.left_out
            steps[:] = strategy.list_averaged_steps()

    def identify(_: OpenCheckpoint) -> str:
        facts = [getattr(rules, name) for name in MergeRules.__dataclass_fields__ if name != "leave_out"]
        names = [sorted(each.items()) for each in renames]
        return repr(("merge", identities, facts, sorted(rules.leave_out), names, damaged)) if all(identities) else ""

    conversion = run_conversion(
        sources[rules.base],
        target,
        to,
        open_merge,
        memory=budget // 2,
        overwrite=overwrite,
        mapping=mapping,
        dtype=dtype,
        keep=keep,
        prefix=prefix,
        strict=strict,
        cut_vocabulary=cut_vocabulary,
        leave_out=(),
        assets=assets,
        max_shard_size=max_shard_size,
        allow_globals=allow_globals,
        identify=identify,
        others=[source for number, source in enumerate(sources) if number != rules.base],
        skip_damaged=skip_damaged,
    )
    if averaged := [key for key in steps if key not in conversion.left_out]:
        logger.warning(
            "the optimizer's step counts are averaged as its moments are (%s): a training from the merge corrects "
            "their bias by the average; optimizer='base' or 'drop' (--optimizer) takes one source's state, or none",
            listed(averaged, limit=2),
        )
    everything = dict.fromkeys([*conversion.left_out, *left_out])
    divisor = sum(chosen)
    return MergeReport(
        tuple(places),
        tuple(weight / divisor for weight in chosen),
        rules.base,
        replace(conversion, left_out=tuple(everything), damaged=tuple(damaged)),
    )


def _list_given(argument: str, given: Any, what: str) -> list[Any]:
    """Return a caller's ordered list; a text, whose letters would be meant, or a set is an error."""
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, os.PathLike, Mapping, AbstractSet)):
        raise CheckpointingException(f"{argument}={show_given(given)}: give a list of {what}, in their order")
    return list(given)


def _is_number(given: object, kind: type) -> bool:
    """Return whether a value is a number of a kind of :mod:`numbers`, as numpy's are, too; to mypy no int is one."""
    return isinstance(given, kind)


def _spread_renames(
    rename: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None, count: int
) -> list[dict[str, str]]:
    if not isinstance(rename, Sequence):
        return [parse_renames(rename)] * count
    if len(rename) != count:
        raise CheckpointingException(f"rename is a list of {len(rename)}, for {count} sources: one for each, or None")
    return [parse_renames(each) for each in rename]


def _choose_weights(places: Sequence[str], weights: Sequence[float] | None, slerp: float | None) -> Sequence[float]:
    if len(places) < _TWO:
        raise CheckpointingException(
            f"{format_many(len(places), 'source')}: a merge takes two checkpoints or more; of a command, DST stands "
            "behind them"
        )
    if slerp is None:
        given: list[Any] = [1.0] * len(places) if weights is None else _list_given("weights", weights, "numbers")
        # numpy's, too; True and texts are none, which is said below
        chosen = [float(each) if _is_number(each, Real) and not isinstance(each, int) else each for each in given]
        check_weights(chosen, len(places))
        return chosen
    slerp = float(slerp)
    if weights is not None or len(places) != _TWO or not 0 <= slerp <= 1:
        also = "" if weights is None else " and weights"
        raise CheckpointingException(
            f"slerp {slerp:g} of {format_many(len(places), 'source')}{also}: it takes two, a number from 0 to 1, which "
            "is the second, and no weights"
        )
    return 1 - slerp, slerp
