"""The contract, run on (safetensors, 1): a file of its own, that another worker runs beside ``test_contract.py``."""

from __future__ import annotations

from tests.testing.claims import SafetensorsClaims


class TestSafetensors(SafetensorsClaims):
    """(safetensors, 1) keeps all that it claims."""
