"""What the tests of planners share."""

from __future__ import annotations

from tests.ep.live import Case, order

EP_FSDP = [
    Case(order(("efsdp", 2), ("ep", 2)), fsdp_dim=1),
    Case(order(("ep", 2), ("efsdp", 2)), fsdp_dim=0),
    Case(order(("ep", 4), ("efsdp", 1)), counts=(1, 4, 0, 3)),
    Case(order(("replicate", 2), ("ep", 2)), kind="local"),
]
