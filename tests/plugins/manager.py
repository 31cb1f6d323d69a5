"""What the tests of manager share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.plugins.hookspecs import Event, hookimpl
from shardckpt.plugins.manager import get_plugin_manager

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


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A plugin of this process that sees the events of a test."""
    recorder = Recorder()
    get_plugin_manager().register(recorder)
    yield recorder
    get_plugin_manager().unregister(recorder)
