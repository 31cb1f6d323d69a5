"""Saves of the same shards, one after the other, in the foreground or behind the program."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, release_memory
from shardckpt.chunks import save as planning
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

#: How saves follow each other, over and over.
MODES: dict[str, tuple[str, ...]] = {
    "foreground": ("foreground",),
    "background": ("background",),
    "in turn": ("background", "foreground"),
}
_ways: list[Iterator[str]] = [itertools.repeat("background")]


def in_mode(mode: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call the function in a process that remembers no saves, and makes them in one of the ``MODES``."""
    _ways[0] = itertools.cycle(MODES[mode])
    release_memory()
    return function(*args)


class Plans:
    """Counts how often this process prepares a save in the long way."""

    def __init__(self) -> None:
        self.count = 0
        self._local_items = planning.collect_items

    def __enter__(self) -> Self:
        planning.collect_items = self._counted  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        planning.collect_items = self._local_items  # type: ignore[attr-defined]

    def _counted(self, shards: Sequence[Any], left_out: Any = ()) -> Any:
        self.count += 1
        return self._local_items(shards, left_out)


def save(state: dict[str, Any], path: object, strategy: Any = None, **options: Any) -> None:
    """A save in the mode of this process."""
    if next(_ways[0]) == "foreground":
        dc.save(state, str(path), strategy, **options)
        return
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(dc.save(state, str(path), strategy, async_sharded_save=True, **options))  # type: ignore[arg-type]


def tensor(key: str, data: torch.Tensor, *offsets: tuple[int, int, int], **fields: Any) -> ShardedTensor:
    """A shard."""
    return ShardedTensor.from_rank_offsets(key, data, *offsets, **fields)


def first() -> ShardedTensor:
    """The whole of a tensor."""
    return tensor("w", torch.arange(16.0).view(4, 4))


def check(path: object, expected: dict[str, torch.Tensor]) -> None:
    """A checkpoint has these tensors, and no others."""
    found = dc.load_plain_tensors(str(path))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value.detach()), key
