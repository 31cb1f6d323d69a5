from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from tests.ranks import RankPool


def _raises_of_its_own_module() -> tuple[str, str]:
    comm = Comm()
    name = f"only_rank_1_has_{os.getpid()}"
    if comm.rank == 1:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].OddError = type("OddError", (CheckpointingException,), {"__module__": name})  # type: ignore[attr-defined]
    try:
        with comm.collective_phase("step"):
            if comm.rank == 1:
                raise sys.modules[name].OddError("odd")
    except CheckpointingException as exc:
        return type(exc).__name__, str(exc)
    finally:
        sys.modules.pop(name, None)
    return "", ""


def test_a_class_that_one_rank_has_is_named_on_all(gloo_ranks: RankPool) -> None:
    """A class that some rank cannot import is a RankFailedError on every rank, and the group can be used after it."""
    assert gloo_ranks.run(2, _raises_of_its_own_module) == [("RankFailedError", "rank 1, in 'step': OddError: odd")] * 2
