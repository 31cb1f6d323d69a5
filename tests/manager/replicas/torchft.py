"""What the tests of torchft share."""

from __future__ import annotations

import pytest

torchft = pytest.importorskip("torchft", reason="torchft is not installed here (it has wheels for Linux)")
