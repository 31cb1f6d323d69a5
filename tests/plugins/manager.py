"""What the tests of manager share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.plugins.hookspecs import Event, hookimpl
from tests.plugged import registered

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorder:
    """Keeps the events that it sees."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        """Keep an event."""
        self.events.append(event)

    def states(self, phase: str) -> list[str]:
        """The states of a phase, in order."""
        return [event.state for event in self.events if event.phase == phase]

    def find(self, state: str, phase: str = "") -> list[Event]:
        """The events of a phase, or of operations, that have a state, in order."""
        return [event for event in self.events if (event.state, event.phase) == (state, phase)]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A plugin of this process that sees the events of a test."""
    with registered(Recorder()) as recorder:
        yield recorder
