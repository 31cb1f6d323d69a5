"""The pool of gloo ranks that tests share: the one that authors of strategies get, with the format of the test."""

from __future__ import annotations

from typing import Any

from shardckpt import testing
from shardckpt.testing import RankError
from shardckpt.testing import RankFailure as Failure
from shardckpt.testing.ranks import RUN_TIMEOUT, Ranks
from tests import backends, programs, workers


class RankPool(testing.RankPool):
    """A pool whose ranks save by the format of the test that runs them."""

    preloaded = (*testing.RankPool.preloaded, *programs.PRELOADED)

    def outcomes(self, world_size: int, function: Any, *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Run a function on every rank, as the class that this one extends does."""
        format_name = backends.current().name
        return super().outcomes(
            world_size, workers.run_with, programs.address(), format_name, function, *args, timeout=timeout
        )


__all__ = ["RUN_TIMEOUT", "Failure", "RankError", "RankPool", "Ranks"]
