"""Values that modules load by code of their own: a load requests them as they are stored, not as they are live.

The live value may have another shape or type than the stored one: extra state is whatever a module returns, observers
of torch's quantization get their sizes in a load, a cache has any number of tensors, a lazy parameter has no shape yet.
All other parameters must have the stored shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from shardckpt.adapters.leaves import describe_leaf, describe_object
from shardckpt.adapters.module_tree import has_load_hook
from shardckpt.adapters.stored_values import request_value
from shardckpt.adapters.versions import walk_modules
from shardckpt.tensors.memory import ORDINARY
from shardckpt.tensors.torch_private import is_wrapper_save_hook
from shardckpt.validation.keys import is_version_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.nn import Module

    from shardckpt.mapping.unstored import StoredNames

_LOADING = frozenset(("load_state_dict", "_load_from_state_dict", "set_extra_state"))
_RESIZING = frozenset(("_load_from_state_dict",))
_SAVING = frozenset(("state_dict", "_save_to_state_dict"))
#: Packages of torch whose modules load nothing but their own values.
_TORCH = ("torch.nn.", "torch.distributed.")


class OwnValues(NamedTuple):
    """The modules that load values by code of their own, as prefixes of names: ``a.b.``, without wrappers' names.

    Attributes:
        loaders: All of them.
        resizers: Those that may give their buffers other shapes.
        growing: Those without modules inside that save by code of their own, too, so that they may have more values
            after a load. The value is the prefix of their keys in ``load_state_dict``.
        params: The names of all parameters.
        buffers: The names of all buffers.
    """

    loaders: frozenset[str]
    resizers: frozenset[str]
    growing: Mapping[str, str]
    params: frozenset[str]
    buffers: frozenset[str]

    def has(self, name: str) -> bool:
        """Return whether a value is loaded by code of its own module, or of a module around it.

        A parameter never is, and a buffer only if its own module is one of the ``resizers``.
        """
        if name in self.buffers:
            return name[: name.rfind(".") + 1] in self.resizers
        return name not in self.params and any(prefix in self.loaders for prefix in _list_parents(name))

    def find_grown(self, name: str) -> str | None:
        """Return the key of a value that no live module has; None if no module may take it."""
        prefix = next((prefix for prefix in _list_parents(name) if prefix in self.growing), None)
        return None if prefix is None or is_version_key(name) else self.growing[prefix] + name.removeprefix(prefix)


def find_own_values(parts: Sequence[Module]) -> OwnValues | None:
    """Return which values the modules load by code of their own; None if no module does so, and none is lazy."""
    if not any(map(_has_own, parts)):  # the usual case, in which no name is needed
        return None
    loaders, resizers, growing = set(), set(), {}
    params: list[str] = []
    buffers: list[str] = []
    for part in parts:
        for module, path, _, name in walk_modules(part):
            if isinstance(module, torch.jit.ScriptModule):  # its tensors are elsewhere, and it has no code of its own
                continue
            prefix, values = f"{name}." if name else "", module.__dict__
            if _loads_itself(module):
                loaders.add(prefix)
                if _decides(module, _RESIZING) or has_load_hook(module, but_torchs=_TORCH):
                    resizers.add(prefix)
                hooks = values["_state_dict_hooks"].values()
                saves = _decides(module, _SAVING) or not all(map(is_wrapper_save_hook, hooks))
                if saves and not values["_modules"]:
                    growing[prefix] = f"{path}." if path else ""
            params += [prefix + each for each in values["_parameters"]]
            buffers += [prefix + each for each in values["_buffers"]]
    return OwnValues(frozenset(loaders), frozenset(resizers), growing, frozenset(params), frozenset(buffers))


def _has_own(part: Module) -> bool:
    """Return whether a module inside loads by code of its own, or is lazy."""
    usual: set[type[Any]] = set()
    for module in part.modules():
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if kind not in usual:
            if issubclass(kind, LazyModuleMixin) or _loads_itself(module):
                return True
            usual.add(kind)
        elif not _LOADING.isdisjoint(module.__dict__) or has_load_hook(module, but_torchs=_TORCH):
            return True
    return False


def _loads_itself(module: Module) -> bool:
    return _decides(module, _LOADING) or has_load_hook(module, but_torchs=_TORCH)


def request_own_values(
    entries: Mapping[str, Any], values: Mapping[str, Any], own: OwnValues, stored: StoredNames, prefix: str
) -> dict[str, Any]:
    """Return the request of a load: values that modules load by code of their own as stored, all others as live."""
    found = dict(entries)
    for name, live in values.items():
        if name not in entries or not (is_lazy(live) or own.has(name)):
            continue
        found[name] = _request(f"{prefix}{name}", live, entries[name], stored, is_buffer=name in own.buffers)
    for key in (*stored.tensors, *stored.objects) if own.growing else ():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name in found or own.find_grown(name) is None:
            continue
        # without a prefix the key may be another module's; keys below an entry are inside of it
        if prefix + name.rpartition(".")[0] and not any(each[:-1] in entries for each in _list_parents(name)):
            found[name] = request_value(stored, key)
    return found


def _request(key: str, live: Any, entry: Any, stored: StoredNames, *, is_buffer: bool) -> Any:
    is_tensor = isinstance(live, torch.Tensor)
    if is_tensor and type(live) not in ORDINARY and not is_lazy(live):
        return entry
    if key in stored.objects:
        return describe_object(None, key, "unchecked") if is_tensor else entry
    if key not in stored.tensors:
        return entry
    dtype, shape = stored.tensors[key]
    keeps_dtype = is_buffer or is_lazy(live)
    if is_tensor and not is_lazy(live) and tuple(live.shape) == shape and (keeps_dtype or live.dtype == dtype):
        return entry
    device = live.device if is_tensor else torch.device("cpu")
    return describe_leaf(
        torch.empty(shape, dtype=live.dtype if keeps_dtype else dtype, device=device), key, "unchecked"
    )


def _decides(module: Module, names: Iterable[str]) -> bool:
    """Return whether a module, or its class outside of torch.nn, defines one of some methods."""
    for name in names:
        owner = next((base for base in type(module).__mro__ if name in vars(base)), None)
        if name in vars(module) or (owner is not None and not f"{owner.__module__}.".startswith(_TORCH)):
            return True
    return False


def _list_parents(name: str) -> Iterator[str]:
    """Yield the prefix of each module around a value, from the outside: ``""``, ``a.`` and ``a.b.`` for ``a.b.c``."""
    yield ""
    end = 0
    while end := name.find(".", end) + 1:
        yield name[:end]
