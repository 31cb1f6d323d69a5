"""How many examples are drawn, and that the same ones are drawn each time."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from shardckpt import dist_checkpointing as dc
from shardckpt.testing.states import Destinations
from tests.tables import in_proof

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hypothesis.strategies import SearchStrategy

    from shardckpt.testing.cases import SaveLoadCase

T = TypeVar("T")

#: A factor for the number of examples of every property: SHARDCKPT_PROPERTY_EXAMPLES=50 pytest tests/property
FACTOR = int(os.environ.get("SHARDCKPT_PROPERTY_EXAMPLES", "1"))
#: Another number draws other examples.
SEED = os.environ.get("SHARDCKPT_PROPERTY_SEED", "0")
#: 1 looks for the smallest example that fails, for minutes.
PHASES = (Phase.generate, Phase.shrink) if os.environ.get("SHARDCKPT_PROPERTY_SHRINK") == "1" else (Phase.generate,)
#: How many times as many examples proof draws.
MOST = 8


def drawn(count: int, most: int | None = None) -> Any:
    """Parametrizes a test by its number of examples: a third by default, most in proof."""
    return pytest.mark.parametrize("count", [max(2, count // 3) * FACTOR, *in_proof((most or count * MOST) * FACTOR)])


def for_all(cases: SearchStrategy[T], count: int, check: Callable[[T], Any]) -> None:
    """Call ``check`` with ``count`` examples; one that it fails with is reported."""

    @seed(zlib.crc32(f"{os.environ['PYTEST_CURRENT_TEST']} {SEED}".encode()))
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(cases)
    def run(case: T) -> None:
        check(case)

    run()


def load(batch: SaveLoadCase, path: Path) -> None:
    """Load what a case wants, and compare it."""
    wanted = Destinations(batch)
    wanted.check(dc.load(wanted.state(), path, validate_access_integrity=batch.validate, allow_dtype_cast=True))
