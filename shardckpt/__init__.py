"""shardckpt: sharded checkpoints for PyTorch.

``shardckpt.dist_checkpointing`` saves and loads. Importing this package imports neither torch nor pydantic: each
name is imported at first use.
"""

from __future__ import annotations

import importlib
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shardckpt import dist_checkpointing
    from shardckpt.archive import decode_object, encode_object
    from shardckpt.errors import CheckpointingException
    from shardckpt.maintenance import fingerprint
    from shardckpt.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
    from shardckpt.plugins import Event, hookimpl
    from shardckpt.storage import CheckpointReader, CheckpointWriter, FileWriter
    from shardckpt.strategy import (
        AsyncSaveStrategy,
        BackgroundWork,
        LoadContext,
        LoadStrategy,
        Migration,
        PlanContext,
        PreparedSave,
        SaveContext,
        SaveStrategy,
    )

__version__ = "0.1.0"


def lazy_getattr(package: str, names: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` that imports a module of it when one of its names is first used.

    ``dir`` of the package lists the names before that, too.

    Args:
        package: The package's name.
        names: Names that the package offers, by the module that has them, relative to the package; a module's own name
            stands for the module.

    Returns:
        The function. It raises AttributeError for any other name.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the package's
        for module, offered in names.items():
            if name in offered:
                found = importlib.import_module(f"{package}.{module}")
                # the next use finds the name itself
                return vars(sys.modules[package]).setdefault(name, found if name == module else getattr(found, name))
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    own = vars(sys.modules[package])
    own["__dir__"] = lambda: sorted({*own, *chain.from_iterable(names.values())})
    return __getattr__


__getattr__ = lazy_getattr(
    __name__,
    {
        "archive": ("decode_object", "encode_object"),
        "dist_checkpointing": ("dist_checkpointing",),
        "errors": ("CheckpointingException",),
        "maintenance": ("fingerprint",),
        "mapping": ("LocalNonpersistentObject", "ShardedObject", "ShardedTensor", "ShardedTensorFactory"),
        "plugins": ("Event", "hookimpl"),
        "storage": ("CheckpointReader", "CheckpointWriter", "FileWriter"),
        "strategy": (
            "AsyncSaveStrategy",
            "BackgroundWork",
            "LoadContext",
            "LoadStrategy",
            "Migration",
            "PlanContext",
            "PreparedSave",
            "SaveContext",
            "SaveStrategy",
        ),
    },
)


__all__ = [
    "AsyncSaveStrategy",
    "BackgroundWork",
    "CheckpointReader",
    "CheckpointWriter",
    "CheckpointingException",
    "Event",
    "FileWriter",
    "LoadContext",
    "LoadStrategy",
    "LocalNonpersistentObject",
    "Migration",
    "PlanContext",
    "PreparedSave",
    "SaveContext",
    "SaveStrategy",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "__version__",
    "decode_object",
    "dist_checkpointing",
    "encode_object",
    "fingerprint",
    "hookimpl",
]
