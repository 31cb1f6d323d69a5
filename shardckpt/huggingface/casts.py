"""Choose the tensors of an export that are cast: each by itself, and none that holds more than the weights do."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.engine.patterns import check_patterns, matches_any
from shardckpt.errors import CheckpointingException, show_given
from shardckpt.huggingface.dtypes import is_castable, parse_dtype

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch

#: Tensors that models compute with in float32 whatever their weights are: the bias by which a router of
#: DeepSeek-V3's kind chooses experts, which bfloat16 makes equal, and the logarithm of a state-space model's decay.
#: transformers: ``_keep_in_fp32_modules_strict``; vLLM and SGLang create both parameters in float32.
_FLOAT32_NAMES = ("*e_score_correction_bias", "*.A_log")


class Casts(NamedTuple):
    """The casts of an export.

    ``dtype`` is the target of floating-point tensors of 16 bits and more; None keeps their dtypes. ``named`` are
    patterns of names with the dtype of the tensors that match, which they get whatever they hold. ``keep`` are patterns
    of names that keep their dtype.
    """

    dtype: torch.dtype | None = None
    named: tuple[tuple[str, torch.dtype], ...] = ()
    keep: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Return whether anything may be cast."""
        return self.dtype is not None or bool(self.named)

    def choose(self, name: str, dtype: torch.dtype, model: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which a tensor is written; ``model`` is the result of :func:`find_model_dtype`."""
        if not is_castable(dtype) or matches_any(name, self.keep):
            return dtype
        for pattern, target in self.named:
            if fnmatchcase(name, pattern):
                return target
        is_wider = model is not None and dtype.itemsize > model.itemsize
        if self.would_narrow(name, dtype) and (is_wider or matches_any(name, _FLOAT32_NAMES)):
            return dtype
        return self.dtype or dtype

    def would_narrow(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a tensor would lose by a cast that the caller has asked for, unless it is kept by name."""
        if self.dtype is None or not is_castable(dtype) or matches_any(name, self.keep):
            return False
        return dtype.itemsize > self.dtype.itemsize

    def check_patterns(self, names: Collection[str]) -> None:
        """Raise KeyMismatchError if a pattern matches no name."""
        check_patterns("keep", self.keep, names)
        check_patterns("dtype", [pattern for pattern, _ in self.named], names)


def parse_casts(dtype: torch.dtype | str | Mapping[str, torch.dtype | str] | None, keep: Collection[str] = ()) -> Casts:
    """Parse a caller's ``dtype`` and ``keep``.

    ``dtype`` is a dtype or its name; or dtypes by patterns of names as of :mod:`fnmatch`; ``"*"`` stands for
    the others: ``{"*": "bfloat16", "*.A_log": "bfloat16"}``. It is an error if one is no floating-point dtype of 16
    bits or more, or if ``keep`` is given without a dtype.
    """
    kept = tuple(keep)
    if kept and not dtype:
        raise CheckpointingException("keep (--keep) names tensors that are not cast: give a dtype (--dtype), too")
    if dtype is None or not hasattr(dtype, "items"):
        return Casts(parse_dtype(dtype), keep=kept)
    if wrong := [pair for pair in dtype.items() if not isinstance(pair[0], str) or pair[1] is None]:
        shown = ": ".join(map(show_given, wrong[0]))
        raise CheckpointingException(
            f"dtype={{{shown}}}: give dtypes by patterns of names, as "
            "{'*': 'bfloat16'}; keep (--keep) has the patterns of tensors that are not cast"
        )
    parsed = {
        pattern: parse_dtype(found, "dtype" if pattern == "*" else f"dtype of {pattern!r}")
        for pattern, found in dtype.items()
    }
    named = tuple((pattern, found) for pattern, found in parsed.items() if found is not None and pattern != "*")
    return Casts(parsed.get("*"), named, kept)


def find_model_dtype(tensors: Iterable[tuple[torch.dtype, int]]) -> torch.dtype | None:
    """Return the dtype that most elements of a model's floating-point tensors have; None if it has none."""
    counts: Counter[torch.dtype] = Counter()
    for dtype, count in tensors:
        if is_castable(dtype):
            counts[dtype] += count
    return counts.most_common(1)[0][0] if counts else None
