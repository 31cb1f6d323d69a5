"""What the tests of proof samples share."""

from __future__ import annotations

README = """
## What is promised

| promise | shown by |
|---|---|
| **Saves** | |
| nothing is lost | `tests/a/`, `tests/test_b.py` (proof) |
| all is fast | `tests/test_fast.py` |
"""
