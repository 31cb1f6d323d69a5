"""Versions of modules, by which their own ``_load_from_state_dict`` knows state of an older class, and upgrades it.

``state_dict()`` has them next to the tensors, in an attribute that only pickles keep. Here they are an object.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import is_first_warning
from shardckpt.tensors.torch_private import find_wrapped_child, is_wrapper_save_hook

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch.nn import Module

logger = logging.getLogger(__name__)

#: The attribute of modules that has their version, and the attribute of state dicts that has all of a module's.
VERSION, METADATA = "_version", "_metadata"


def has_version(kind: type[Any]) -> bool:
    """Return whether a class of modules has a version that is not torch's: torch.nn's classes load without theirs."""
    owner = next((base for base in kind.__mro__ if VERSION in vars(base)), None)
    return owner is not None and not owner.__module__.startswith("torch.nn.")


def list_versions(root: Module, metadata: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the versions of modules by full name, without the names of wrappers; see :func:`has_version`.

    ``metadata`` is the state dict's metadata of each module, by path. If hooks have added entries to it, all its plain
    values stand in the place of the version.
    """
    found: dict[str, Any] = {}
    for module, path, _, name in walk_modules(root):
        own = metadata.get(path, {})
        kept = {key: value for key, value in own.items() if _is_plain(value)}
        left_out = tuple(key for key in own if key not in kept)
        if left_out and is_first_warning(__name__, name, left_out):
            logger.warning(
                "hooks of the module %r put %s into its metadata: only plain values are stored", name, left_out
            )
        if kept.keys() - {"version"}:
            found[name] = kept
        elif has_version(type(module)) or VERSION in vars(module):
            found[name] = get_version(module)
    return found


def get_version(module: Module) -> Any:
    """Return the version of a module as it is stored: a dict by itself would pass for metadata."""
    version = getattr(module, VERSION)
    return {"version": version} if isinstance(version, dict) else version


def _is_plain(value: Any) -> bool:
    """Return whether any load accepts a value: numbers, texts, and containers of these."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def add_versions(root: Module, state: dict[str, Any], stored: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a state dict for ``load_state_dict`` with the stored versions; the same one if none are stored.

    ``stored`` has the versions by name, of each pipeline stage for example. Where those of a name differ, the module's
    own is chosen if it is among them, else None, as from a checkpoint without versions.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for versions in stored:
        for name, version in versions.items():
            found.setdefault(name, []).append(version if isinstance(version, dict) else {"version": version})
    if not found:
        return state
    named: dict[str, Any] = OrderedDict(state)
    metadata = {
        path: _choose(found[name], getattr(module, VERSION))
        for module, path, _, name in walk_modules(root)
        if name in found
    }
    setattr(named, METADATA, metadata)
    return named


def _choose(stored: list[dict[str, Any]], live: Any) -> dict[str, Any]:
    first, *others = stored
    fallback = first if all(other == first for other in others) else {"version": None}
    return next((each for each in stored if each.get("version") == live), fallback)


class NamedModule(NamedTuple):
    """A module inside another one.

    Attributes:
        path: Its path by the names of children, wrappers among them.
        key: The prefix of its keys in a state dict, without the last dot: its path without names that hooks leave out.
        name: The same without the names of all wrappers.
    """

    module: Module
    path: str
    key: str
    name: str


def walk_modules(root: Module) -> Iterator[NamedModule]:
    """Yield each module, a shared one under each of its names."""
    wrapped: dict[type[Any], str] = {}  # of each class: the child whose name is left out
    waiting = [NamedModule(root, "", "", "")]
    while waiting:
        yield (found := waiting.pop())
        module, path, key, name = found
        kind = type(module)
        if kind not in wrapped:
            wrapped[kind] = find_wrapped_child(kind)
        # hooks of activation checkpoints leave out their own names
        is_hidden = any(map(is_wrapper_save_hook, module._state_dict_hooks.values()))  # noqa: SLF001
        for child, each in module._modules.items():  # noqa: SLF001
            if each is not None:
                is_wrapped = child == wrapped[kind]
                child_key = key if is_wrapped and is_hidden else _join(key, child)
                child_name = name if is_wrapped else _join(name, child)
                waiting.append(NamedModule(each, _join(path, child), child_key, child_name))


def _join(path: str, child: str) -> str:
    return f"{path}.{child}" if path else child
