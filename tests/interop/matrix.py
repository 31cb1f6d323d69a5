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


def each_writer(*, own_classes: bool | None = None) -> list[object]:
    """Writers as parameters; releases of Megatron are slow: installing and running one takes as long as 200 tests.

    They are proof: what they wrote is golden, and loads in the default run.
    """
    chosen = [name for name, writer in WRITERS.items() if own_classes in (None, writer.own_classes)]
    return [name if name == "shardckpt" else pytest.param(name, marks=pytest.mark.proof) for name in chosen]
