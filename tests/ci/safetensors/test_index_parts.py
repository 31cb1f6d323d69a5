from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.plan_cache.saves import MODES, Plans, in_mode
from tests.engine.plan_cache.saves import save as save_in_turn
from tests.safetensors.index_parts import check_content, list_parts, path
from tests.safetensors.parts import InParts, make_state

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

__all__ = ["path"]  # fixtures


def _save_in_mode(path: str, mode: str) -> list[int]:
    def run() -> list[int]:
        counts = []
        for number in range(3):
            with Plans() as plans:
                save_in_turn(make_state(), f"{path}{number}", InParts())
            counts.append(plans.count)
        return counts

    return in_mode(mode, run)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", MODES)
def test_later_saves_write_the_same_parts(gloo_ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """A cached plan keeps the merged parts: in the foreground and behind it, the third save plans nothing."""
    counts = gloo_ranks.run(2, _save_in_mode, str(tmp_path / "c"), mode)
    assert [count[2] for count in counts] == [0, 0]
    check_content(tmp_path / "c2")
    for name in list_parts(tmp_path / "c0"):
        assert (tmp_path / "c0" / name).read_bytes() == (tmp_path / "c2" / name).read_bytes()
