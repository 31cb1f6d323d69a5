"""megatron.core.dist_checkpointing.gpt_checkpoint_interop: its functions are imported, and refuse to be called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a stand-in: trainers import these functions for models that most jobs do not have."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise CheckpointingException(
            f"{__name__}.{name} has no counterpart in shardckpt: it knows Megatron's models; rename the keys of the "
            "sharded state dict with utils.apply_prefix_mapping before the load"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


__all__: list[str] = []
