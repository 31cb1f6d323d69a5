"""A search, breadth first, through every state that a model can reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    State = TypeVar("State", bound=Hashable)


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        states: Number of states that were reached.
        broken: The invariant that one of them breaks; ``""`` if none does.
        path: The steps that lead there, as few as possible.
    """

    states: int
    broken: str = ""
    path: tuple[str, ...] = ()


def explore(
    start: State, list_moves: Callable[[State], Iterable[tuple[str, State]]], judge: Callable[[State], str]
) -> Found:
    """Visit every state that can be reached, once; stop at the first that is broken.

    Args:
        start: The first state.
        list_moves: Returns what may happen next: the step's name, and the state after it.
        judge: Returns the invariant that a state breaks; ``""`` if it breaks none.
    """
    reached: dict[State, tuple[State, str] | None] = {start: None}
    front = [start]
    while front:
        behind = []
        for state in front:
            if broken := judge(state):
                return Found(len(reached), broken, _trace_path(reached, state))
            for name, after in list_moves(state):
                if after not in reached:
                    reached[after] = state, name
                    behind.append(after)
        front = behind
    return Found(len(reached))


def _trace_path(reached: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    path = []
    while (step := reached[state]) is not None:
        state, name = step
        path.append(name)
    return tuple(reversed(path))
