"""What the tests of matrix share."""

from __future__ import annotations

from tests.ep.live import Case, all_cases


def cases_of(experts: int) -> list[Case]:
    """The cases with a number of experts."""
    return [case for case in all_cases() if case.experts == experts]
