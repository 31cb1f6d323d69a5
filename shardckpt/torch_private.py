"""Every private name of torch that the core needs, in one place, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datetime as dt


def group_timeout(group: Any) -> dt.timedelta:
    """How long a rank waits in the group's collectives: torch tells no one, and a gloo twin needs the same."""
    backend = group._get_backend(group._device_types[0])  # noqa: SLF001
    return backend.options._timeout  # type: ignore[no-any-return]  # noqa: SLF001


__all__ = ["group_timeout"]
