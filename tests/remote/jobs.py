"""What ranks do with a checkpoint at a URL; module-level, so that processes find it by name."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest import mock

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.mapping import ShardedObject, ShardedTensor
from tests.remote import store  # noqa: F401 - it registers faulty://, in the ranks too
from tests.shared import shared_by_ranks
from tests.states import rank_and_size

ROWS, COLUMNS = 24, 1000
_TWO_ATTEMPTS = shared_by_ranks(partial(mock.patch.dict, os.environ, {settings.REMOTE_ATTEMPTS: "2"}))


def whole(value: float) -> torch.Tensor:
    """The global tensor."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + value


def state(value: float) -> dict[str, Any]:
    """Rows of a tensor, a replica, an object and common state, all of which say ``value``."""
    rank, world = rank_and_size()
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", whole(value).chunk(world)[rank].clone(), (0, rank, world)),
        "bias": ShardedTensor.from_rank_offsets("bias", torch.full((7,), value, dtype=torch.bfloat16), replica_id=rank),
        "object": ShardedObject("object", {"value": value}, (1,), (0,), replica_id=rank),
        "iteration": int(value),
    }


def save(url: str, value: float, **options: Any) -> None:
    """Save."""
    dc.save(state(value), url, content_metadata={"value": value}, **options)


def check(url: str, value: float, **options: Any) -> None:
    """The checkpoint says ``value`` everywhere."""
    loaded = dc.load(state(-1.0), url, **options)
    for key, expected in state(value).items():
        found = loaded[key]
        if isinstance(expected, ShardedTensor):
            assert torch.equal(found, expected.data), key
        else:
            assert found == (expected.data if isinstance(expected, ShardedObject) else expected), key


def save_in_background(url: str, value: float, persistent: bool) -> None:
    """Save behind the training, and finalize."""
    with AsyncCallsQueue(persistent) as queue:
        request = dc.save(state(value), url, async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)


def error_of(action: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Class and text of what the action raises, with two attempts at each request; nothing for no error."""
    try:
        with _TWO_ATTEMPTS():
            action(*arguments, **options)
    except Exception as exc:  # noqa: BLE001 - the test decides
        return type(exc).__name__, str(exc)
    return "", ""
