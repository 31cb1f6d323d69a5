"""Compare the keys of a load with the checkpoint's, and the common state of ranks: Megatron's strict modes."""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from shardckpt.distributed.pickling import try_pickle
from shardckpt.errors import (
    CheckpointingException,
    KeyMismatchError,
    ask_nearest,
    check_choice,
    escape_text,
    format_many,
    listed,
    show_given,
)
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import dict_list_map_outplace, diff
from shardckpt.tensors.inner import get_outer_key

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import CommonStateDict, ShardedBase

logger = logging.getLogger(__name__)

#: Trainers' names for the tensors of a model: torch's tutorials, torchtitan's manager, Lightning, many scripts.
_MODELS = frozenset(("model", "state_dict", "model_state_dict"))
#: The entries of the state dict of an optimizer.
_OPTIMIZER_PARTS = frozenset(("state", "param_groups"))
#: A key of the state of an optimizer whose parameters are numbers: `optimizer.state.0.exp_avg`.
_NUMBERED = re.compile(r"(\w+\.)?\w+\.state\.\d+\.")

_SHOWN = 20
#: How many keys stand before the advice.
_FEW = 3
#: The part of a key below which the versions of a model's modules are stored.
VERSIONS = "_versions"
#: Their key ends with a digest; an object's may be followed by its place in it.
_VERSION_KEY = re.compile(rf"(?:^|\.){VERSIONS}\.[0-9a-f]{{16}}(?:/|$)")
_DIGITS = re.compile(r"\d+")
#: The end of the name of an object in a grid of ranks.
_IN_GRID = re.compile(r"/shard_(\d+(\.\d+)*)?_(\d+(\.\d+)*)?$")
#: The beginning of messages about stored keys that nothing asks for.
UNUSED_KEYS = "unused keys in the checkpoint"
#: The treatment of stored tensors and objects that nothing asks for.
OnUnused: TypeAlias = Literal["warn", "error", "ignore"]


class StrictHandling(Enum):
    """A load's handling of keys that do not match, by Megatron's names.

    Megatron's words are the reverse of torch's: *unexpected* keys are wanted and not in the checkpoint (torch:
    missing); *missing* keys are in the checkpoint and wanted by no rank (torch: unexpected).

    ``ASSUME_OK_UNEXPECTED``, the default, raises if keys are unexpected, and does not look for missing ones. The others
    log, raise, return or ignore: ``*_UNEXPECTED`` the unexpected keys, ``*_ALL`` both.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @property
    def checks_all(self) -> bool:
        """Whether missing keys matter, too: then the ranks exchange their wanted keys."""
        return self in (self.LOG_ALL, self.RAISE_ALL, self.RETURN_ALL)

    @property
    def raises(self) -> bool:
        """Whether a load fails if keys do not match."""
        return self in (self.ASSUME_OK_UNEXPECTED, self.RAISE_UNEXPECTED, self.RAISE_ALL)

    @property
    def returns_keys(self) -> bool:
        """Whether a load returns the keys that do not match, together with the state dict."""
        return self in (self.RETURN_UNEXPECTED, self.RETURN_ALL)

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether the mode compares keys before it loads (Megatron's name)."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether the mode needs every rank's keys (Megatron's name)."""
        return val.checks_all

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether a load returns the keys that do not match (Megatron's name)."""
        return val.returns_keys


def parse_strict_flag(strict: str | bool | StrictHandling) -> StrictHandling:
    """Return the mode of a load's ``strict``: a mode or its value; True raises on every mismatch, False logs it."""
    if isinstance(strict, bool):
        return StrictHandling.RAISE_ALL if strict else StrictHandling.LOG_ALL
    if isinstance(strict, StrictHandling):
        return strict
    try:
        return StrictHandling(strict)
    except ValueError:
        modes = [mode.value for mode in StrictHandling]
        near = ask_nearest(strict, modes)
        raise CheckpointingException(
            f"strict={show_given(strict)}: {near}expected True, False or one of {', '.join(modes)}"
        ) from None


def parse_on_unused(value: str) -> OnUnused:
    """Return the value of ``on_unused``; raise CheckpointingException if there is no such one."""
    check_choice("on_unused", value, get_args(OnUnused))
    return value  # type: ignore[return-value]


@dataclass(frozen=True)
class KeyMismatch:
    """Keys of a load that do not match, in Megatron's words (see :class:`StrictHandling`).

    They are the keys of tensors and objects (``layer._extra_state``), as Megatron's callers filter them.

    Attributes:
        missing: Keys in the checkpoint that no rank wants, or objects with a shard that no rank wants; empty if the
            mode does not look for them.
        unexpected: Keys that this rank wants and the checkpoint lacks. Of an object it may be some shards.
        absent: The shards that this rank wants and the checkpoint lacks, by :func:`stored_key`.
        warning: The warning about unused keys, to log once the load has succeeded, on the main rank; else ``""``.
    """

    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    warning: str = ""


def stored_key(shard: ShardedBase) -> str:
    """Return the name under which a shard is stored: a tensor's key, an object's unique key."""
    if type(shard) is ShardedTensor:  # most are, and to ask whether one is an instance of another class is slow
        return shard.key
    return shard.unique_key if isinstance(shard, ShardedObject) else shard.key


def is_version_key(key: str) -> bool:
    """Return whether versions of modules are stored there: a checkpoint or a model may lack them."""
    return VERSIONS in key and _VERSION_KEY.search(key) is not None


def name_keys(shards: Iterable[ShardedBase]) -> dict[str, str]:
    """Return the key of each shard by the name under which it is stored."""
    return {stored_key(shard): shard.key for shard in shards}


def use_bare_keys(shards: Iterable[ShardedBase], stored: Collection[str], prefix: str) -> bool:
    """Take a prefix off the keys of shards, in place, if the checkpoint has them without it; return whether that is so.

    torchtitan stores the tensors of a model at the top level, without ``model.``, since 0.2, and so does
    ``dcp.save(model.state_dict())``. Of a transformer these may begin with ``model.`` themselves, next to ``lm_head``:
    they are taken to lack it only where each shard is found so.
    """
    prefixed = [shard for shard in shards if shard.key.startswith(prefix)]
    bare = [shard.key.removeprefix(prefix) in stored for shard in prefixed]
    if any(key.startswith(prefix) for key in stored):
        are_bare = all(bare) and not all(shard.key in stored for shard in prefixed)
    else:
        are_bare = any(bare)
    if are_bare:
        for shard in prefixed:
            shard.key = shard.key.removeprefix(prefix)
    return are_bare


def compare_keys(
    wanted: Sequence[ShardedBase],
    stored: Mapping[str, str],
    strict: StrictHandling,
    comm: Comm,
    everywhere: Mapping[str, str] | None = None,
    *,
    on_unused: OnUnused = "ignore",
    counts_unused: Callable[[str], bool] = lambda _: True,
) -> KeyMismatch:
    """Collective: return the keys of a load and of the checkpoint that do not match; log or raise them by the mode.

    ``stored`` are the keys that this rank can load, as :func:`name_keys` returns them, without the common state.
    ``everywhere`` are the keys that all ranks together can load, the same on every rank; by default ``stored``, which
    then is the same on every rank. ``on_unused`` is the treatment of stored tensors and objects that no rank asks for,
    if the mode does not look for them; ``IGNORE_ALL`` does not warn. ``counts_unused`` returns whether a key counts as
    unused. ``strict`` and ``on_unused`` are the same on every rank, and so is the KeyMismatchError.
    """
    everywhere = stored if everywhere is None else everywhere
    mine = name_keys(wanted)
    not_stored = frozenset(name for name in mine if name not in stored)
    absent = {name: mine[name] for name in not_stored if not is_version_key(mine[name])}
    unused: dict[str, str] = {}
    incomplete: dict[str, str] = {}
    if strict.checks_all:
        names = sorted(name for name, key in everywhere.items() if not is_version_key(key))
        unused = {name: everywhere[name] for name in _find_unused(names, mine, comm)}
        incomplete = _find_incomplete(wanted, everywhere)
    if (absent or unused or incomplete) and not (strict.returns_keys or strict is StrictHandling.IGNORE_ALL):
        used = {key for name, key in everywhere.items() if name not in unused}
        unexpected = _join_shards(absent, set(stored.values())) | set(incomplete.values())
        text = describe_mismatch(_join_shards(unused, used), unexpected, _advise(wanted, absent, stored, strict))
        with comm.local_phase("comparing keys"):
            if strict.raises:
                raise KeyMismatchError(text)
        logger.warning("%s", text)
    is_silent = on_unused == "ignore" or (on_unused == "warn" and strict is StrictHandling.IGNORE_ALL)
    warning = ""
    if not (is_silent or strict.checks_all):
        warning = _describe_unused(mine, everywhere, on_unused, comm, counts_unused)
    return KeyMismatch(
        missing=frozenset(unused.values()),
        unexpected=frozenset(absent.values()) | incomplete.keys(),
        absent=not_stored,
        warning=warning if comm.is_main else "",
    )


def _find_unused(names: Sequence[str], mine: Collection[str], comm: Comm) -> list[str]:
    """Collective: return the names of stored items that no rank asks for.

    ``names`` are the same on every rank, in the same order, so that one flag for each is sent. ``mine`` are the names
    that this rank asks for.
    """
    used = comm.largest(*(name in mine for name in names))
    return [name for name, is_used in zip(names, used, strict=True) if not is_used]


def _advise(
    wanted: Sequence[ShardedBase], absent: Mapping[str, str], stored: Mapping[str, str], strict: StrictHandling
) -> str:
    """Return what to do about keys that the checkpoint lacks, as far as its own keys show that."""
    renamed = _suggest_names(set(absent.values()), set(stored.values()))
    advice = renamed + _advise_of_codes(absent.values(), stored.values()) + _advise_of_grids(wanted, absent, stored)
    if not advice:
        asked = name_keys(wanted)
        advice = _suggest_nearest(absent, {key for name, key in stored.items() if name not in asked})
    if strict is StrictHandling.ASSUME_OK_UNEXPECTED and not renamed:  # else the rest is nothing
        advice += "\nTo load the rest, pass strict='log_unexpected'."
    return advice


def _advise_of_codes(absent: Iterable[str], stored: Iterable[str]) -> str:
    """Return advice about keys under which there are only the tensors inside a quantized one."""
    found = sorted({*absent} & {get_outer_key(key) for key in stored})
    if not found:
        return ""
    return (
        f"\nQuantized tensors are stored by their codes and scales: {listed(found)}. Quantize the model as it was at "
        "the save, or save values: dequantize=True of to_sharded_state_dict or CheckpointConfig"
    )


def _advise_of_grids(wanted: Sequence[ShardedBase], absent: Collection[str], stored: Mapping[str, str]) -> str:
    """Return advice about objects that another grid of ranks has stored, such as ``rng_state``."""
    objects = (shard for shard in wanted if isinstance(shard, ShardedObject))
    grids = {shard.key: shard.global_shape for shard in objects if shard.unique_key in absent}
    others = {
        key: f"{key} as {grid}, wanted as {grids[key]}"
        for name, key in stored.items()
        if key in grids
        and _IN_GRID.search(name)  # of a damaged index it may be anything
        # an object may be missing in a grid of the same shape
        and (grid := ShardedObject.empty_from_unique_key(name).global_shape) != grids[key]
    }
    if not others:
        return ""
    return (
        f"\nObjects are stored by another grid of ranks: {listed(list(others.values()))}. Ask for them as they are "
        "stored, or leave them out of the state dict and begin that state (such as random numbers) anew"
    )


def _describe_unused(
    mine: Collection[str],
    stored: Mapping[str, str],
    on_unused: OnUnused,
    comm: Comm,
    counts: Callable[[str], bool],
) -> str:
    """Collective: return which stored tensors and objects no rank asks for, ``""`` if none; see :func:`compare_keys`.

    ``stored`` has the key of each stored tensor and object by its name, the same on every rank. ``counts`` says of a
    key whether it should have been asked for. If there are some, and ``on_unused`` is ``"error"``, every rank raises.
    """

    def list_counted(names: Iterable[str]) -> list[str]:
        return sorted(name for name in names if counts(key := stored[name]) and not is_version_key(key))

    left = list_counted(stored.keys() - mine)
    # nearly always all ranks ask for the same; pipeline stages do not, and only together know the unused keys
    if not comm.all_equal("\n".join(left).encode()):
        left = _find_unused(list_counted(stored), mine, comm)
    if not left or len(left) == len(list_counted(stored)):  # a load of the common state alone asks for nothing
        return ""
    unused = dict.fromkeys(stored[name] for name in left)
    parts = Counter(key.partition(".")[0] for key in unused)
    counted = listed([f"{count} of {part}" for part, count in parts.items()], limit=5)
    text = f"{UNUSED_KEYS}, which nothing asks for: {len(unused)} ({counted}): {listed(list(unused), limit=5)}"
    if on_unused == "error":
        with comm.local_phase("comparing keys"):
            raise KeyMismatchError(f"{text}; ask for them, or pass on_unused='warn' or 'ignore'")
    return f"{text} (on_unused='ignore' is silent, 'error' refuses)"


def find_usual_names(keys: Iterable[str]) -> dict[str, str]:
    """Return a checkpoint's names of the model and its optimizer that differ from ours, and ours.

    A section with ``state`` or ``param_groups`` is an optimizer. All may be inside one entry, as ``app`` of torch's
    tutorial. ``keys`` are those of a checkpoint, and the dotted paths of its common state, if they are known.
    """
    paths = [key.split(".") for key in keys]
    outer = {path[0] for path in paths}
    inner = {path[1] for path in paths if len(path) > 1}
    is_wrapped = len(outer) == 1 and not outer & _MODELS and bool(inner & _MODELS)
    depth, before = (1, f"{min(outer)}.") if is_wrapped else (0, "")
    sections = {path[depth] for path in paths if len(path) > depth}
    found = {name: name for name in sections}
    optimizers = {path[depth] for path in paths if len(path) > depth + 1 and path[depth + 1] in _OPTIMIZER_PARTS}
    if "optimizer" not in sections and len(optimizers) == 1:
        found[optimizers.pop()] = "optimizer"
    if "model" not in sections and len(models := sections & _MODELS) == 1:
        found[models.pop()] = "model"
    return {f"{before}{old}": new for old, new in found.items() if f"{before}{old}" != new}


def _suggest_names(absent: Collection[str], stored: Collection[str]) -> str:
    """Return advice about keys that the checkpoint has by other names; ``""`` if there are none."""
    usual = {
        old: new for old, new in find_usual_names(stored).items() if any(key.startswith(f"{new}.") for key in absent)
    }
    named = [f"{new!r} as {old!r}" for old, new in sorted(usual.items())]
    is_asked = any(key.startswith("optimizer.") for key in absent)
    if is_asked and any(map(_NUMBERED.match, stored)):  # optimizer.state_dict() itself was saved
        named.append("numbers for the parameters of the optimizer")
    if not named:
        return _suggest_prefix(absent, stored)
    return (
        f"\nThe checkpoint has {listed(named)}: a CheckpointManager loads it as it is, by initial_load_path=... and "
        "initial_load_model_only=False"
    )


def _suggest_prefix(absent: Collection[str], stored: Collection[str]) -> str:
    """Return advice about keys that are stored with something before them, or without their first part."""
    bare = {key: tail for key in absent if (tail := key.partition(".")[2]) in stored}
    if bare:  # as torchtitan stores a model's
        key, tail = min(bare.items())
        prefix = key.removesuffix(tail)
        return (
            f"\nThe checkpoint has {tail!r} and not {key!r} ({format_many(len(bare), 'key')} so): describe the "
            f"keys without {prefix!r}; to_sharded_state_dict(model) puts nothing before the names of the model"
        )
    key = min(absent, default="")
    # one walk over the stored keys: thousands may end with a short key, and thousands be absent
    dots = max((key.count(".") for key in absent), default=0)
    counts = Counter(name.removesuffix(tail) for name in stored for tail in _list_tails(name, dots) if tail in absent)
    prefixes = sorted(prefix for prefix in counts if key and prefix + key in stored)
    if not prefixes:
        return ""
    prefix = max(prefixes, key=counts.__getitem__)
    many = format_many(counts[prefix], "key")
    return (
        f"\nThe checkpoint has {prefix + key!r} and not {key!r} ({many} so), as of a model that was saved with "
        f"its optimizer: describe the model by to_sharded_state_dict(model, prefix={prefix!r}), or put {prefix!r} "
        "before its keys"
    )


def _list_tails(key: str, dots: int) -> list[str]:
    """Return the rest of a dotted key after each dot, with at most so many dots: ``b.c`` and ``c`` of ``a.b.c``."""
    parts = key.rsplit(".", dots + 1)
    return [".".join(parts[first:]) for first in range(1, len(parts))]


def _suggest_nearest(absent: Mapping[str, str], unused: Collection[str]) -> str:
    """Return the unused stored key that the first absent one may be a misspelling of."""
    key = min(absent.values(), default="")
    without_numbers = _DIGITS.sub("", key)  # another layer's is no misspelling
    near = ask_nearest(key, [name for name in unused if _DIGITS.sub("", name) != without_numbers])
    return near and f"\n{escape_text(key)}: {near.strip()}"


def _find_incomplete(wanted: Sequence[ShardedBase], stored: Mapping[str, str]) -> dict[str, str]:
    """Return the wanted objects that are stored with only some of their shards, as errors show them, by key."""
    grids = {shard.key: math.prod(shard.global_shape) for shard in wanted if isinstance(shard, ShardedObject)}
    counts = Counter(stored.values())
    return {
        key: f"{key} (the checkpoint has {counts[key]} of its {format_many(count, 'shard')})"
        for key, count in grids.items()
        if 0 < counts[key] < count
    }


def _join_shards(names: Mapping[str, str], others: Collection[str]) -> set[str]:
    """Return the keys of unmatched shards; if other shards of a key match, the names of the unmatched ones instead."""
    return {name if key in others else key for name, key in names.items()}


def compare_common(
    common: CommonStateDict, preprocess: Callable[[CommonStateDict], CommonStateDict] | None, comm: Comm
) -> None:
    """Collective: warn on every rank whose common state is not the main rank's, which is the one that is stored.

    ``preprocess`` gets a copy, and returns the state without the values that may differ.
    """
    if comm.world_size == 1:
        return
    with comm.local_phase("preparing the common state"):
        mine = dict_list_map_outplace(lambda leaf: leaf, common)
        mine = mine if preprocess is None else preprocess(mine)
    data = try_pickle(mine)
    if comm.all_equal(data or os.urandom(8)):  # random bytes differ: states that cannot be pickled are compared below
        return
    stored = comm.broadcast(None if data is None else mine)  # a strategy may store values that pickle refuses
    places = ([], [], []) if stored is None else diff(stored, mine)
    if any(places):
        only_main, only_here, different = places
        logger.warning(
            "rank %d: common state differs from the main rank's, which is stored: only there %s, only here %s, "
            "different %s",
            comm.rank,
            only_main[:_SHOWN],
            only_here[:_SHOWN],
            [path for path, *_ in different[:_SHOWN]],
        )


def describe_mismatch(missing: Collection[str], unexpected: Collection[str], advice: str = "") -> str:
    """Return which keys do not match as text, the sense before Megatron's words and torch's; empty if all match.

    ``unexpected`` has keys that are wanted and not in the checkpoint. ``advice`` is a line of its own after the number
    of keys and the first one, before the others.
    """
    # Megatron's callers look for its two terms, with capitals
    kinds = [
        (
            "In the state dict, not in the checkpoint (Megatron: Unexpected keys; torch: missing keys)",
            sorted(unexpected),
        ),
        (
            "In the checkpoint, not in the state dict of any rank (Megatron: Missing keys; torch: unexpected keys)",
            sorted(missing),
        ),
    ]
    counts = [f"{len(keys)}: " * (len(keys) > _FEW) for _, keys in kinds]
    first = [
        f"{kind}: {count}{listed(keys, limit=_FEW)}" for (kind, keys), count in zip(kinds, counts, strict=True) if keys
    ]
    others = [
        f"{kind.partition(' (')[0]}, after the first {_FEW}: {listed(keys[_FEW:])}"
        for kind, keys in kinds
        if len(keys) > _FEW
    ]
    return "\n".join([*first, *filter(None, [advice.strip("\n")]), *others])
