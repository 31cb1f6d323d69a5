"""Options of parameter groups that keep their live values in a load: another learning rate, the moments as saved."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from shardckpt.adapters.group_options import GROUPS, list_options
from shardckpt.errors import CheckpointingException, ask_nearest, format_many, listed
from shardckpt.state_dict import are_equal, of_type

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

#: Stands for the names of all options.
_ALL = "all"


def list_option_names(optimizers: Iterable[Optimizer]) -> list[str]:
    """Return the names of the options that some group has now."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, GROUPS, ()))
    return sorted({name for group in groups for name in list_options(group)})


def choose_options(keep: Collection[str] | str, names: Collection[str]) -> list[str]:
    """Return the names of the options that keep their live values.

    ``keep`` has their names, or is one name or ``"all"``; a name that no group has is an error.
    """
    wanted = [keep] if isinstance(keep, str) else [*keep]
    unknown = [name for name in wanted if name not in names and (name != _ALL or not names)]
    if unknown:
        there = listed([*map(repr, names)]) if names else "there are none, without an optimizer"
        raise CheckpointingException(
            f"keep_options: {listed([*map(repr, unknown)])} is no option of the optimizers' groups: "
            f"{ask_nearest(unknown[0], names)}{there}"
        )
    return [name for name in names if name in wanted or _ALL in wanted]


def replace_inner_options(saved: Any, live: Any, kept: Collection[str]) -> Any:
    """Return a state dict of a wrapper's own structure, with the kept options in the groups of optimizers inside.

    ``live`` is the wrapper's present state; groups are paired by their place.
    """
    if isinstance(saved, dict) and isinstance(live, dict):
        found = {name: replace_inner_options(value, live.get(name), kept) for name, value in saved.items()}
        pairs = _pair(saved.get(GROUPS), live.get(GROUPS))
        if pairs and all(isinstance(each, dict) for pair in pairs for each in pair):
            found[GROUPS] = [{**group, **select(own, kept)} for group, own in pairs]
        return of_type(saved, found)
    if pairs := _pair(saved, live):
        return of_type(saved, [replace_inner_options(value, own, kept) for value, own in pairs])
    return saved


def _pair(saved: Any, live: Any) -> list[tuple[Any, Any]]:
    """Return the items of two lists in pairs, if both are lists of one length."""
    both = isinstance(saved, list) and isinstance(live, list) and len(saved) == len(live)
    return list(zip(saved, live, strict=True)) if both else []


def select(group: Mapping[str, Any], kept: Collection[str]) -> dict[str, Any]:
    """Return the kept options that a group has."""
    return {name: group[name] for name in kept if name in group}


def set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Set options of an optimizer's groups to the very objects that they were: a graph may have their addresses."""
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


def log_kept(kept: Sequence[str], pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Log the kept options, and the saved values that differ.

    ``pairs`` has the options of each group, and the options that were saved for it.
    """
    texts: dict[str, None] = {}
    for group, saved in pairs:
        for name, value in select(group, kept).items():
            differs = name in saved and not are_equal(saved[name], value)
            texts[f"{name}={value!r}" + (f" (saved: {saved[name]!r})" if differs else "")] = None
    logger.info("keep_options: the live values stay in %s: %s", format_many(len(pairs), "group"), listed(texts))
