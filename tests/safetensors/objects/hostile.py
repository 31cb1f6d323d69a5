"""What the tests of hostile share."""

from __future__ import annotations

WHAT = "object 'rng'"
