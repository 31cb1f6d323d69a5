from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.background.exit import end_together

if TYPE_CHECKING:
    from pathlib import Path


@backends.both_in_proof
@pytest.mark.parametrize(
    "end",
    [
        "rank and os._exit(3)",  # it never comes to its end
        pytest.param("rank and time.sleep(6)", marks=pytest.mark.proof),  # later than any rank waits
    ],
)
def test_ranks_that_end_apart_lose_the_save_and_say_so(tmp_path: Path, end: str) -> None:
    """A rank waits for the others' ends for a bounded time, whatever has become of them, and says what is lost."""
    end = f"from shardckpt.background import ending; ending.END_TIMEOUT = 2.0; {end}"
    codes, outputs = end_together(tmp_path, persistent=False, end=end)
    assert codes[0] == 0, outputs
    assert f"a background save was not finalized: {tmp_path}/c is absent" in outputs[0]
    assert "another rank has not ended within 2 s, or ended before" in outputs[0]
    assert "not finalized" in outputs[1] or codes[1] == 3
    assert not (tmp_path / "c").exists()
