"""Every private name of torch that the core needs, in one place, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datetime as dt
    from typing import TypeGuard


def group_timeout(group: Any) -> dt.timedelta:
    """How long a rank waits in the group's collectives: torch tells no one, and a gloo twin needs the same."""
    backend = group._get_backend(group._device_types[0])  # noqa: SLF001
    return backend.options._timeout  # type: ignore[no-any-return]  # noqa: SLF001


def split_factor(placement: Any) -> int | None:
    """The ``split_factor`` of a ``_StridedShard``, as FSDP2 over tensor parallelism has it; None for others.

    (It is a subclass of Shard in some releases of torch; none of its public names tells it apart.)
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def is_sharded_tensor(value: object) -> TypeGuard[Any]:
    """Whether it is a ShardedTensor of torch's, as FSDP1 makes them: the class has no public place."""
    if not any(kind.__module__.startswith("torch.distributed._shard") for kind in type(value).__mro__):
        return False  # and the module need not be loaded to know
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return isinstance(value, ShardedTensor)


__all__ = ["group_timeout", "is_sharded_tensor", "split_factor"]
