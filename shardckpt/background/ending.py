"""The end of a program that runs on several ranks: whether they can still finalize a background save together."""

from __future__ import annotations

import datetime as dt
import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardckpt.errors import CommunicationError
from shardckpt.tensors import group_store

if TYPE_CHECKING:
    from shardckpt.distributed import Comm

logger = logging.getLogger(__name__)

#: Seconds that a rank waits at its end for the other ranks. A job in which one rank fails ends that much later.
END_TIMEOUT = 20.0


def meet_at_end(name: str, comm: Comm, group: dist.ProcessGroup | None) -> str:
    """Collective: wait until the programs of all ranks end.

    It uses the store of the process group, not a collective of torch, because a rank that is not at its end would not
    take part.

    Args:
        name: What is to be finalized; the same on all ranks, and used for nothing else.
        comm: The ranks.
        group: The process group of ``comm``; None for the default one.

    Returns:
        ``""`` if all ranks are there, and may call collectives; else the reason why they may not.
    """
    store = _store(comm, name, group)
    if store is None:
        return "the process group was destroyed before"
    counter, met = "ranks", "met"
    try:
        if store.add(counter, 1) == comm.world_size:
            store.set(met, b"1")
        store.wait([met], dt.timedelta(seconds=END_TIMEOUT))
    except RuntimeError:  # nobody serves the store any more, or the time is over
        with suppress(RuntimeError):
            if store.check([met]):  # the last one came just now, and goes on with the others
                return ""
        _leave(store, counter, comm.world_size)
        return f"another rank has not ended within {END_TIMEOUT:g} s, or ended before"
    return ""


def say(text: str, comm: Comm) -> None:
    """Report to the user: the main rank on stderr, however logging is configured; other ranks log an error."""
    if comm.rank == 0 and sys.stderr is not None:
        sys.stderr.write(f"shardckpt: {text}\n")
        sys.stderr.flush()
    else:
        logger.error("%s", text)


def _store(comm: Comm, name: str, group: dist.ProcessGroup | None) -> Any:
    """The store of the group of ranks, with keys for what is to be finished; None if the group was destroyed."""
    if dist.is_initialized():
        with suppress(CommunicationError, ValueError):  # ValueError: of a group that someone still refers to
            comm.members  # noqa: B018 - a default group that was made since is another one
            return group_store(dist.group.WORLD if group is None else group, f"shardckpt/{name}")
    return None


def _leave(store: Any, counter: str, world_size: int) -> None:
    """Let a rank that ends later not believe that all are there."""
    try:
        store.add(counter, -world_size)
    except RuntimeError:
        logger.debug("the store is gone", exc_info=True)


__all__ = ["END_TIMEOUT", "meet_at_end", "say"]
