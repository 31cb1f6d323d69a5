from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardckpt.distributed.comm import Comm
from shardckpt.validation.keys import (
    compare_common,
)

if TYPE_CHECKING:
    from tests.ranks import RankPool


def _compares_common() -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardckpt.validation.keys").addHandler(handler)
    comm = Comm()
    common = {"step": 3, "args": {"rank": comm.rank, "lr": 0.1}, "fn": None if comm.rank else {1}}
    compare_common(common, None, comm)
    compare_common(common, lambda c: {**c, "args": None, "fn": None}, comm)
    compare_common({"f": lambda: 0}, None, comm)
    return records


def test_common_state_that_differs_is_warned_of(gloo_ranks: RankPool) -> None:
    """The rank whose common state is not the one stored says where; what the caller takes out does not count."""
    first, second = gloo_ranks.run(2, _compares_common)
    assert first == []
    (warning,) = second
    assert "rank 1: common state differs" in warning
    assert "('args', 'rank')" in warning
    assert "('fn',)" in warning
    assert "step" not in warning
