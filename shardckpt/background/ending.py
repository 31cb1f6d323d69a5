"""At the end of a program: check whether all ranks can still finalize a background save together."""

from __future__ import annotations

import datetime as dt
import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardckpt.errors import CommunicationError
from shardckpt.tensors.torch_private import group_store

if TYPE_CHECKING:
    from shardckpt.distributed.comm import Comm

logger = logging.getLogger(__name__)

#: Seconds that a rank waits at its end for the other ranks: so much later a job ends in which one rank failed.
END_TIMEOUT = 20.0


def wait_for_all_ends(name: str, comm: Comm, group: dist.ProcessGroup | None) -> str:
    """Collective: wait until the programs of all ranks end, for 20 s at most.

    Return ``""`` if all ranks have arrived and may call collectives; else the reason why they may not. ``name``
    identifies the save to finalize: the same on all ranks, and used once. ``group`` is the process group of ``comm``;
    None for the default one.
    """
    # The store, not a collective of torch: a rank that still trains would not join that one, and this rank would hang
    # until the group's timeout.
    store: Any = None
    if dist.is_initialized():
        with suppress(CommunicationError, ValueError):  # ValueError: destroyed, and still referred to
            comm.members  # noqa: B018 - raises if the default group is a newer one
            store = group_store(dist.group.WORLD if group is None else group, f"shardckpt/{name}")
    if store is None:
        return "the process group was destroyed before"
    counter, met = "ranks", "met"
    try:
        if store.add(counter, 1) == comm.world_size:
            store.set(met, b"1")
        store.wait([met], dt.timedelta(seconds=END_TIMEOUT))
    except RuntimeError:  # the rank that serves the store has ended, or the time is over
        with suppress(RuntimeError):  # the store is gone
            if store.check([met]):  # the last rank has just arrived, and continues
                return ""
            store.add(counter, -comm.world_size)  # a rank that ends later must not take this one for present
        return f"another rank has not ended within {END_TIMEOUT:g} s, or ended before"
    return ""


def say(text: str, comm: Comm) -> None:
    """Report to the user: rank 0 on stderr, whatever the logging configuration; other ranks log an error."""
    if comm.rank == 0 and sys.stderr is not None:
        sys.stderr.write(f"shardckpt: {text}\n")
        sys.stderr.flush()
    else:
        logger.error("%s", text)
