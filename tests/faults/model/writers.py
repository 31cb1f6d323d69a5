"""What the writers of both models of stores have alike: steps in turn, kills at any moment, undoing after a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: The numbers of the two writers.
WRITERS = (1, 2)


def list_writer_moves(
    state: Any,
    steps: Sequence[str],
    do_step: Callable[[Any, int, Any, str], Iterator[tuple[str, Any]]],
    undo: Callable[[Any, int, Any], Any],
) -> Iterator[tuple[str, Any]]:
    """Yield what each writer may do next, or suffer, and the state after it.

    Args:
        state: Has ``writers`` and ``put_writer``.
        steps: The steps of a save, in turn.
        do_step: Yields the outcomes of a writer's step in a state, with a name.
        undo: Returns the state after a writer that has failed has undone its save.
    """
    for number in WRITERS:
        writer = state.writers[number - 1]
        if writer.status == "undoing":
            yield f"{number}: undo", undo(state, number, writer)
        elif writer.status == "running":
            for name, after in do_step(state, number, writer, steps[writer.at]):
                now = after.writers[number - 1]
                has_ended = now.status == "running" and now.at == len(steps)
                yield f"{number}: {name}", after.put_writer(number, now._replace(status="done")) if has_ended else after
        if writer.is_alive:
            yield f"{number}: killed", state.put_writer(number, writer._replace(status="dead"))
