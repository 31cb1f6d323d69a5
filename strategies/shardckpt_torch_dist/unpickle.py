"""The one guarded reader of pickles: globals come from an allow-list or not at all, and there is no other path."""

from __future__ import annotations

import _compat_pickle
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError
from shardckpt_torch_dist.globals import (
    METADATA_TABLE,
    OBJECT_TABLE,
    STAND_IN_PACKAGES,
    Table,
    numpy_global,
    stand_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class _AllowListUnpickler(pickle.Unpickler):
    """Resolves globals from a table; ``extra`` is asked first for what it lacks."""

    def __init__(
        self,
        data: bytes,
        table: Table,
        source: str,
        extra: Callable[[str, str], Any] | None = None,
        storage: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._table = table
        self._source = source
        self._extra = extra
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        module, name = _python3(module, name)
        found = self._table.get((module, name))
        if found is None and self._extra is not None:
            found = self._extra(module, name)
        if found is None and module == "torch":
            dtype = getattr(torch, name, None)
            found = dtype if isinstance(dtype, torch.dtype) else None
        if found is None:
            raise UnsafePickleError(
                f"{self._source}: the pickle asks for {module}.{name}, which is not on the allow-list; nothing was "
                f"run. If you trust whoever wrote the checkpoint, pass allow_globals=[{name.rpartition('.')[2]}] with "
                f"that class or function of {module}"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise CorruptCheckpointError(f"{self._source}: a pickle outside an archive refers to a tensor storage")
        return self._storage(pid)


def load_metadata(data: bytes, source: str) -> Any:
    """What a ``.metadata`` file says, as inert records with the attributes of DCP's classes."""
    return _load(_AllowListUnpickler(data, METADATA_TABLE, source), source)


def load_object(
    data: bytes,
    source: str,
    torch_global: Callable[[str, str], Any],
    storage: Callable[[Any], Any],
    allow_globals: Iterable[Any] = (),
) -> Any:
    """What the pickle inside a ``torch.save`` archive says.

    Args:
        data: The pickle.
        source: Named in errors.
        torch_global: Gives the functions that rebuild tensors, or None.
        storage: Turns a persistent id into a storage.
        allow_globals: Classes and functions that the caller allows, besides torch's registered safe globals; each
            by itself, or as (class or function, "module.name").
    """
    allowed = dict(map(_named, (*torch.serialization.get_safe_globals(), *allow_globals)))

    def extra(module: str, name: str) -> Any:
        if (module, name) in allowed:
            return allowed[module, name]
        if module.partition(".")[0] in STAND_IN_PACKAGES:
            return stand_in(module, name)
        return torch_global(module, name) or numpy_global(module, name)

    return _load(_AllowListUnpickler(data, OBJECT_TABLE, source, extra, storage), source)


def _python3(module: str, name: str) -> tuple[str, str]:
    """A global by its name of today: pickles of protocol 2, as torch writes them, name builtins as Python 2 did."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _named(item: Any) -> tuple[tuple[str, str], Any]:
    """The (module, name) that a pickle writes for an allowed global, and the global."""
    if isinstance(item, tuple):
        module, _, name = item[1].rpartition(".")
        return (module, name), item[0]
    return (getattr(item, "__module__", ""), getattr(item, "__qualname__", "")), item


def _load(unpickler: pickle.Unpickler, source: str) -> Any:
    try:
        return unpickler.load()
    except CheckpointingException as exc:
        if str(exc).startswith(source):
            raise
        raise type(exc)(f"{source}: {exc}") from exc
    except Exception as exc:  # whatever a damaged pickle makes the machine do
        raise CorruptCheckpointError(f"{source}: the pickle is damaged: {type(exc).__name__}: {exc}") from exc


__all__ = ["load_metadata", "load_object"]
