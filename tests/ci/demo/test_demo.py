"""``shardckpt demo`` as its user meets it: a process with an exit status, its report and its errors."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.demo.demo import TIME_LIMIT, all_end, demo, linux_only, started

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["demo"]  # fixtures


@linux_only
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.ci),
        pytest.param(signal.SIGTERM, marks=pytest.mark.proof),
        pytest.param(signal.SIGKILL, marks=pytest.mark.ci),
    ],
)
def test_the_end_of_the_demo_is_the_end_of_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, a terminated or a killed demo leaves no rank behind."""
    demo, pids = started(tmp_path)
    with demo:
        demo.send_signal(number)
        demo.communicate(timeout=TIME_LIMIT)

    assert demo.returncode != 0
    assert all_end(pids)
