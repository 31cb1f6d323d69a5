"""List a module's tensors by full name in one walk, or read its state dict where classes or hooks change its content.

``get_model_state_dict`` finds each name by attributes, and detaches each tensor: 40 to 60 µs a tensor in every save.
Nothing is remembered between two walks, so a module may be wrapped or changed in any way between them.
"""

from __future__ import annotations

from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from shardckpt.adapters.versions import METADATA, VERSION, get_version, has_version, walk_modules
from shardckpt.errors import ShardingError
from shardckpt.tensors.torch_private import (
    find_wrapped_child,
    is_fsdp2_hook,
    is_wrapper_load_hook,
    is_wrapper_save_hook,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from collections.abc import Set as AbstractSet

    from torch.nn import Module

#: By defining one of these, a class or a module decides itself about the content of its state dict.
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
#: torch's state-dict functions ask modules that have this for other names.
_MODIFIERS = "_fqn_modifiers"
_DECIDING = frozenset((*_METHODS, _MODIFIERS))
#: By defining one of these, a class or a module decides itself how it is loaded.
_LOADING = frozenset(("load_state_dict", "_load_from_state_dict"))


class _UnusualError(Exception):
    """The state dict of a module may have more than its tensors, or other names."""


class _Tree:
    """The tensors of a tree of modules in the order of its state dict, in lists: a model may have 20,000.

    An _UnusualError says that torch must be asked.

    Args:
        only_parameters: Whether to leave out the persistent buffers. Classes and hooks add no parameters to the state
            dict of a module, so only code that renames parameters matters then.

    Attributes:
        names: Their full names.
        owners: The modules' own dicts, live, in which they are: a hook may put others there.
        keys: Their keys in these.
        buffers: The numbers of the buffers.
        versions: The versions of modules by name, of classes that have one: see :func:`has_version`.
        hooks: The functions to run before they are read; modules that FSDP2 shards together have one.
    """

    def __init__(self, root: Module, *, only_parameters: bool) -> None:
        self.names: list[str] = []
        self.owners: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.buffers: set[int] = set()
        self.versions: dict[str, Any] = {}
        self.hooks: set[Callable[..., Any]] = set()
        self._only_parameters = only_parameters
        self._walk(root)
        if not only_parameters and not all(map(is_fsdp2_hook, self.hooks)):
            raise _UnusualError

    def read(self) -> list[Any]:
        """Return the tensors that are there now."""
        return list(map(getitem, self.owners, self.keys))

    def _walk(self, root: Module) -> None:
        # One loop without calls: most modules of a model are leaves, and each has a dozen objects to look at.
        names, owners, keys = self.names, self.owners, self.keys
        wrapped: dict[type[Any], str] = {}  # of each class: the child whose name is left out
        versioned: set[type[Any]] = set()
        waiting: list[tuple[Module, str]] = [(root, "")]
        while waiting:
            module, prefix = waiting.pop()
            values, kind = module.__dict__, type(module)
            if kind not in wrapped:
                wrapped[kind] = _check_class(kind, only_parameters=self._only_parameters)
                versioned |= {kind} if has_version(kind) else set()
            if kind in versioned or VERSION in values:
                self.versions[prefix[:-1]] = get_version(module)
            # the names one by one: to look for the module's twenty in a set takes four times as long
            if values["_state_dict_hooks"] or (
                "state_dict" in values
                or "_save_to_state_dict" in values
                or "get_extra_state" in values
                or _MODIFIERS in values
            ):
                _check_module(values, only_parameters=self._only_parameters)
            if values["_state_dict_pre_hooks"]:
                self.hooks.update(values["_state_dict_pre_hooks"].values())
            owner = values["_parameters"]
            for name, tensor in owner.items():
                if tensor is not None:
                    names.append(prefix + name)
                    owners.append(owner)
                    keys.append(name)
            if values["_buffers"] and not self._only_parameters:
                self._add_buffers(prefix, values["_buffers"], values["_non_persistent_buffers_set"])
            children = values["_modules"]
            if children:
                unnamed = wrapped[kind]
                waiting += [
                    (child, prefix if name == unnamed else f"{prefix}{name}.")
                    for name, child in reversed(children.items())  # the first one is taken next
                    if child is not None
                ]

    def _add_buffers(self, prefix: str, buffers: dict[str, Any], left_out: Container[str]) -> None:
        found = [name for name, tensor in buffers.items() if tensor is not None and name not in left_out]
        self.buffers.update(range(len(self.names), len(self.names) + len(found)))
        self.names += [prefix + name for name in found]
        self.owners += [buffers] * len(found)
        self.keys += found


class StateColumns(NamedTuple):
    """The content of a module's state dict, in lists: a model may have 20,000 tensors.

    Attributes:
        names: The full names of parameters and persistent buffers, without the names of wrappers.
        tensors: These themselves, not detached.
        buffers: The numbers of the buffers.
        versions: The versions of modules by name, of classes that have one: see :func:`has_version`.
    """

    names: list[str]
    tensors: list[torch.Tensor]
    buffers: AbstractSet[int]
    versions: dict[str, Any]

    def by_name(self) -> dict[str, torch.Tensor] | None:
        """Return the tensors by name; None if two have one name."""
        found = dict(zip(self.names, self.tensors, strict=True))
        return found if len(found) == len(self.names) else None

    def name_parameters(self) -> dict[int, str]:
        """Return the name of each parameter by its id, the first of a tied one."""
        pairs = list(zip(map(id, self.tensors), self.names, strict=True))
        if self.buffers:
            pairs = [pair for number, pair in enumerate(pairs) if number not in self.buffers]
        return dict(reversed(pairs))


def list_state_tensors(module: Module) -> dict[str, torch.Tensor] | None:
    """Return the tensors of :func:`list_state_columns` by name; None if two have one name."""
    columns = list_state_columns(module)
    return None if columns is None else columns.by_name()


def list_state_columns(module: Module) -> StateColumns | None:
    """Return the content of torch's ``get_model_state_dict``, with the parameters and buffers themselves, not detached.

    Parameters of FSDP2 that are not sharded at this time become so, as by ``state_dict()``. The result is None if that
    may do more than list them: a class or a hook changes the state dict, FSDP1, TorchScript.
    """
    try:
        tree = _Tree(module, only_parameters=False)
    except _UnusualError:
        return None
    with torch.no_grad():
        for hook in tree.hooks:
            hook(module, "", False)
    return StateColumns(tree.names, tree.read(), tree.buffers, tree.versions)


def name_parameters(module: Module) -> dict[int, str] | None:
    """Return the full name of each parameter by its id, the first of a tied one; None if torch must be asked."""
    try:
        tree = _Tree(module, only_parameters=True)
    except _UnusualError:
        return None
    return StateColumns(tree.names, tree.read(), tree.buffers, tree.versions).name_parameters()


class ReadState(NamedTuple):
    """A module's own state dict.

    Attributes:
        values: The values by names without the names of wrappers.
        keys: For each name the key that ``load_state_dict`` takes.
        metadata: The metadata of each module from classes and hooks, by its path, apart from the values.
    """

    values: dict[str, Any]
    keys: dict[str, str]
    metadata: Mapping[str, dict[str, Any]]


def read_state_dict(module: Module) -> ReadState | None:
    """Return a module's own state dict; None if torch must be asked: FSDP1, and classes that rename.

    Its classes and hooks decide about its content: extra state, more tensors or others than it has. Two values of one
    name are a ShardingError.
    """
    try:
        prefixes = _list_prefixes(module)
    except _UnusualError:
        return None
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    state = module.state_dict()
    for key, value in state.items():
        # a hook may add any name below its module's
        end = len(key)
        while (end := key.rfind(".", 0, end) + 1) and key[:end] not in prefixes:
            end -= 1
        name = prefixes[key[:end]] + key[end:]
        if name in values:
            raise ShardingError(f"{keys[name]!r} and {key!r} of the state dict have the name {name!r} without wrappers")
        values[name], keys[name] = value, key
    return ReadState(values, keys, getattr(state, METADATA, {}))


def only_copies(module: Module) -> bool:
    """Return whether ``load_state_dict`` does no more than copy each value into the parameter or buffer of its name."""
    usual: dict[type[Any], bool] = {}
    for each in module.modules():
        values, kind = each.__dict__, type(each)
        if kind not in usual:
            usual[kind] = all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _LOADING)
        if (
            not usual[kind]
            or not _LOADING.isdisjoint(values)
            or values["_load_state_dict_post_hooks"]
            or has_load_hook(each)
        ):
            return False
    return True


def has_load_hook(module: Module, *, but_torchs: tuple[str, ...] = ()) -> bool:
    """Return whether a hook may change the values that a module is given to load.

    Hooks of torch's modules whose names begin with one of ``but_torchs`` do not count.
    """
    if not (found := module.__dict__["_load_state_dict_pre_hooks"]):
        return False
    hooks = [getattr(hook, "hook", hook) for hook in found.values()]
    return not all(
        is_fsdp2_hook(hook)
        or is_wrapper_load_hook(hook)
        or f"{getattr(hook, '__module__', '')}.".startswith(but_torchs)
        for hook in hooks
    )


def _list_prefixes(root: Module) -> dict[str, str]:
    """Return the prefix of each module's keys in a state dict, and the same without the names of wrappers."""
    found = {}
    checked: set[type[Any]] = set()
    for module, _, key, name in walk_modules(root):
        if not isinstance(module, torch.jit.ScriptModule):
            if type(module) not in checked:
                _check_class(type(module), only_parameters=True)
                checked.add(type(module))
            _check_module(module.__dict__, only_parameters=True)
        found[f"{key}." if key else ""] = f"{name}." if name else ""
    return found


def _check_class(kind: type[Any], *, only_parameters: bool) -> str:
    """Return the child whose name is left out, or ""; raise if the class of a module decides about its state dict."""
    is_usual = only_parameters or all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _METHODS)
    # modules of TorchScript have their tensors elsewhere, and FSDP1 has flat ones
    others = (torch.jit.ScriptModule, FullyShardedDataParallel)
    if not is_usual or hasattr(kind, _MODIFIERS) or issubclass(kind, others):
        raise _UnusualError
    return find_wrapped_child(kind)


def _check_module(values: dict[str, Any], *, only_parameters: bool) -> None:
    """Raise if the attributes or hooks of a module decide about its state dict."""
    if only_parameters:
        is_usual = _MODIFIERS not in values
    else:
        is_usual = _DECIDING.isdisjoint(values) and all(map(is_wrapper_save_hook, values["_state_dict_hooks"].values()))
    if not is_usual:
        raise _UnusualError
