"""What the tests of traffic share."""

from __future__ import annotations

KIB, MIB = 1 << 10, 1 << 20
