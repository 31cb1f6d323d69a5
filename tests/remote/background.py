"""What the tests of background share."""

from __future__ import annotations

import pytest

PERSISTENT = pytest.mark.parametrize(
    "persistent", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["thread", "process"]
)
