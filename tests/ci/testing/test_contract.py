"""The contract, run on (torch_dist, 1)."""

from __future__ import annotations

from tests.testing.claims import TorchDistClaims


class TestTorchDist(TorchDistClaims):
    """(torch_dist, 1) keeps all that it claims."""
