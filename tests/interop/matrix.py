"""What the tests of matrix share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.interop.writers import WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.interop.runner import Megatron

    Releases = Callable[[str], Megatron]
    Saved = Callable[[str], str]

NEWEST = "0.16.1"
WORLDS = (1, 2, 4)


def each_writer(*, own_classes: bool | None = None, read_here: bool = True) -> list[object]:
    """Writers as parameters; releases of Megatron are slow: installing and running one takes as long as 200 tests.

    Where nothing of ours reads (``read_here=False``), what Megatron wrote is a control of the test, and in proof.
    """
    chosen = [name for name, writer in WRITERS.items() if own_classes in (None, writer.own_classes)]
    marks = {n: tier_of(n) if read_here else pytest.mark.proof for n in chosen}
    return [n if n == "shardckpt" else pytest.param(n, marks=marks[n]) for n in chosen]


def tier_of(release: str) -> pytest.MarkDecorator:
    """The newest release in CI, the others in proof: their goldens load in the default run."""
    return pytest.mark.ci if release == NEWEST else pytest.mark.proof
