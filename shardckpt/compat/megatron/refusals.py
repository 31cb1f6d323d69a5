"""Megatron's names without a counterpart here: importing one raises an error that says what to use instead."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_ROOT = "shardckpt.compat.megatron.dist_checkpointing"

#: Instead of Megatron's writers in the background.
QUEUE = "dist_checkpointing.save(..., async_sharded_save=True) plans, and an AsyncCallsQueue writes and finalizes"


def make_refusal(module: str, instead: str) -> ImportError:
    """Return the error for a name or module that is not here, which says what to do ``instead``."""
    return ImportError(f"{module} has no counterpart in shardckpt: {instead}", name=module)


def make_refusing_getattr(
    module: str, refused: Mapping[str, str], imported: Mapping[str, Collection[str]] = MappingProxyType({})
) -> Callable[[str], Any]:
    """Make a module's ``__getattr__`` that refuses names, and finds those that Megatron's module imports from others.

    ``refused`` says what to do instead, by name. ``imported`` has names of other modules, which callers import from
    this one too, by the module, relative to :mod:`shardckpt.compat.megatron.dist_checkpointing`. The function raises
    ImportError for refused names, and AttributeError for any other name.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the module's
        if name in refused:
            # `from module import name` shows the text of an ImportError, but not of an AttributeError
            raise make_refusal(f"{module}.{name}", refused[name])
        for source, names in imported.items():
            if name in names:
                # lazy: Megatron's modules import each other in circles
                return getattr(importlib.import_module(f"{_ROOT}.{source}"), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__
