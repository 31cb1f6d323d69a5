"""Everyone who saves by everyone who loads: the sample at 4 ranks, loaded at 1, 2 and 4, every value compared.

Then checkpoints from which keys were removed here, and code that was ported. All that needs a release of Megatron-Core
is in this file: one worker of pytest runs it, and starts each release once.

No release of megatron-core is left out for a dtype: all save and load native float8, bool and complex as they are.
What releases cannot do is in ``writers.py``: shards of unequal size, which they then replicate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop import here
from tests.interop.matrix import WORLDS, each_writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.interop.runner import Megatron
    from tests.ranks import Ranks

    Releases = Callable[[str], Megatron]
    Saved = Callable[[str], str]


@pytest.mark.parametrize("writer", each_writer())
def test_shardckpt_loads(ranks: Ranks, saved: Saved, writer: str) -> None:
    """What anyone saved loads here, where Megatron is not importable, and every query describes it."""
    for world in (*WORLDS, 3):
        assert ranks.run(world, here.load, saved(writer)) == [True] * world
    here.check_queries(saved(writer), writer)
