"""Advise how to compare two checkpoints whose tensors have no name in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import escape_text, format_many, name_call

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt.maintenance.diff_report import DiffReport


def advise_names(report: DiffReport, options: Any) -> str:
    """Return advice on the options that pair the names; ``""`` if some are paired, or a side has no name to pair."""
    first, second = _list_unpaired(report, "first"), _list_unpaired(report, "second")
    has_pairs = report.equal or len(first) + len(second) < len(report.differences)
    if has_pairs or options.mapping or not first or not second:
        return ""
    if options.prefix:
        common = first.keys() & second.keys()
        same = f"{format_many(len(common), 'tensor')} with the same name"
        return f"without --prefix {options.prefix}, {same}" if common else ""
    advice = _advise_prefix({*first}, {*second}, options) or _advise_megatron({*first}, {*second}, options)
    return advice or _advise_renames(first, second, options)


def _list_unpaired(report: DiffReport, place: str) -> dict[str, str]:
    """Return the shapes, by key, of tensors that only the ``"first"`` or only the ``"second"`` checkpoint has."""
    unpaired = [difference for difference in report.differences if difference.kind == f"only in {place}"]
    # a description is "dtype shape"; a cast changes the dtype alone
    return {difference.key: getattr(difference, place).partition(" ")[2] for difference in unpaired}


def _advise_prefix(first: set[str], second: set[str], options: Any) -> str:
    places = options.first, options.second
    for longer, shorter, (one, other) in ((first, second, places), (second, first, places[::-1])):
        if prefix := _find_prefix(longer, shorter):
            return (
                f"no name is in both, but {one} has the names of {other} behind the prefix {prefix!r}: "
                f"{_show_call(options, one, other, '--prefix', prefix)}"
            )
    return ""


def _find_prefix(longer: set[str], shorter: set[str]) -> str:
    """Return the prefix that turns at least half of the shorter names into longer ones; ``""`` if there is none.

    Prefixes of an optimizer's state do not count: its keys contain the model's names.
    """
    from shardckpt.engine.optimizer_keys import is_optimizer_key

    # each prefix that fits some name would do to start with; the longest name fits the fewest
    sample = max(shorter, key=len)
    prefixes = {key.removesuffix(sample) for key in longer if key.endswith(sample)}
    counts = {
        prefix: sum(f"{prefix}{key}" in longer for key in shorter)
        for prefix in prefixes
        if not is_optimizer_key(prefix)
    }
    best = max(counts, key=lambda prefix: (counts[prefix], prefix), default="")
    return best if best and 2 * counts[best] >= len(shorter) else ""


def _advise_megatron(first: set[str], second: set[str], options: Any) -> str:
    from shardckpt.huggingface.megatron import MEGATRON_NAME

    places = options.first, options.second
    for megatron, hub, (one, other) in ((first, second, places), (second, first, places[::-1])):
        if MEGATRON_NAME in megatron and "model.embed_tokens.weight" in hub:
            call = _show_call(options, one, other, "--mapping", "megatron")
            return f"no name is in both, since {one} has Megatron's: {call}"
    return ""


def _advise_renames(first: dict[str, str], second: dict[str, str], options: Any) -> str:
    """Return the call with renames that fit shapes and ends of names; without any, the options to choose from."""
    from shardckpt.maintenance.suggested_renames import suggest_renames

    if renames := suggest_renames(first, second):
        call = _show_call(options, options.first, options.second, *_list_rename_options(renames.items()))
        return f"no name is in both, but some have the same end: {call}"
    one, other = (escape_text(min(names)) for names in (first, second))
    return (
        f"no name is in both (the first has {one}, the second {other}): --rename OLD=NEW reads names of the first as "
        f"others, --prefix {one.partition('.')[0]}. takes only names behind it, and --mapping MODEL_TYPE compares with "
        "the Hub's names"
    )


def _show_call(options: Any, first: str, second: str, *added: str) -> str:
    """Return the call that compares two checkpoints, with the options that were given and the added ones."""
    words = ["diff", first, second, *added]
    if first == options.first:  # the renames are for the first
        words += _list_rename_options(options.rename)
    for option, value in (("--rtol", options.rtol), ("--atol", options.atol), ("--html", options.html)):
        words += [option, str(value)] if value else []
    words += ["--read"] * options.read
    words += ["--ignore-dtype"] * options.ignore_dtype
    if options.tensors_only and not {"--prefix", "--mapping"} & {*added}:  # these compare tensors alone
        words.append("--tensors-only")
    return escape_text(name_call(*words))


def _list_rename_options(renames: Iterable[tuple[str, str]]) -> list[str]:
    return [word for old, new in renames for word in ("--rename", f"{old}={new}")]
