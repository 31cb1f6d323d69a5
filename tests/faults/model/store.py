"""The commit protocol of object stores (``shardckpt/commit/upload.py``) as a model: two writers, one reader, kills.

A store's requests are atomic and seen by all at once. Both writers use the same names for their data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.faults.model.explorer import Found, explore
from tests.faults.model.writers import WRITERS, list_writer_moves

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What a writer asks of the store, in this order.
STEPS = (
    "look",
    "create claim",
    "put in-progress",
    "look again",
    "put data",
    "check",
    "create marker",
    "delete claim",
    "delete in-progress",
)


class Rules(NamedTuple):
    """The protocol, and what the store and its users do.

    Attributes:
        steps: What a writer does, in this order.
        is_conditional: Whether the store creates an object only where there is none; else it replaces it.
        is_patient: Whether users overwrite an unfinished save only once its process has ended, as they are told to.
    """

    steps: tuple[str, ...] = STEPS
    is_conditional: bool = True
    is_patient: bool = True


class Writer(NamedTuple):
    """A save.

    Attributes:
        at: How many steps it has done.
        status: One of ``running``, ``undoing``, ``failed``, ``done`` and ``dead``.
        must_win: Whether there was no checkpoint, and the other writer had ended, when it began.
        has_claim: Whether the claim was its own.
    """

    at: int = 0
    status: str = "running"
    must_win: bool = False
    has_claim: bool = False

    def go_on(self) -> Writer:
        """The writer after its next step."""
        return self._replace(at=self.at + 1)

    @property
    def is_alive(self) -> bool:
        """Whether it has begun, and may do more."""
        return self.status in ("running", "undoing") and self.at > 0

    @property
    def has_ended(self) -> bool:
        """Whether it will do no more."""
        return self.status in ("failed", "done", "dead")


class State(NamedTuple):
    """The objects of a folder by whose they are, 0 where there is none, and those who use it."""

    claim: int = 0
    in_progress: frozenset[int] = frozenset()
    data: int = 0
    marker: int = 0
    writers: tuple[Writer, Writer] = (Writer(), Writer())
    #: The writer whose marker a reader has found; None before.
    read: int | None = None
    #: What a reader has loaded: the marker's writer and the data's.
    loaded: tuple[int, int] | None = None

    def put_writer(self, number: int, writer: Writer) -> State:
        """The state with this writer in the place of the one before."""
        first, second = self.writers
        return self._replace(writers=(writer, second) if number == 1 else (first, writer))


def explore_store(rules: Rules) -> Found:
    """Search all interleavings of two saves and a load, each save killed at any moment."""
    return explore(State(), lambda state: _list_moves(state, rules), _judge)


def _list_moves(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    yield from list_writer_moves(
        state, rules.steps, lambda at, number, writer, step: _do_step(at, rules, number, writer, step), _undo
    )
    if state.read is None and state.marker:
        yield "reader: marker", state._replace(read=state.marker)
    if state.read is not None and state.loaded is None:
        yield "reader: data", state._replace(loaded=(state.read, state.data))


def _do_step(state: State, rules: Rules, number: int, writer: Writer, step: str) -> Iterator[tuple[str, State]]:  # noqa: C901, PLR0912
    ahead, failing = state.put_writer(number, writer.go_on()), writer._replace(at=writer.at + 1, status="undoing")
    failed = state.put_writer(number, failing)
    others = state.in_progress - {number}
    if step == "look":
        yield from _look(state, rules, number, writer)
    elif step == "create claim":
        if state.claim and rules.is_conditional:
            yield "claim taken", state.put_writer(number, failing._replace(status="failed"))
        else:
            yield step, ahead._replace(claim=number).put_writer(number, writer.go_on()._replace(has_claim=True))
    elif step == "put in-progress":
        yield step, ahead._replace(in_progress=state.in_progress | {number})
    elif step == "look again":
        yield step, failed if state.marker or others else ahead
    elif step == "put data":  # only while the in-progress object is there
        yield step, ahead._replace(data=number) if number in state.in_progress else failed
    elif step == "check":
        is_ours = not state.marker and not others and number in state.in_progress and state.data
        yield step, ahead if is_ours else failed
    elif step == "create marker":
        if state.marker and rules.is_conditional:
            yield "marker taken", failed
        else:
            yield step, ahead._replace(marker=number)
    elif step == "delete claim":
        yield step, ahead._replace(claim=0)
    else:
        yield step, ahead._replace(in_progress=state.in_progress - {number})


def _look(state: State, rules: Rules, number: int, writer: Writer) -> Iterator[tuple[str, State]]:
    """List the folder; delete what an unfinished save has left, in one step, if the user says overwrite=True."""
    other = state.writers[2 - number]
    left = state.claim or state.in_progress
    is_free = not (left or state.data or state.marker)
    begun = writer.go_on()._replace(must_win=other.has_ended and not state.marker)
    if is_free:
        yield "look", state.put_writer(number, begun)
    elif state.marker or not left:
        yield "look: not empty", state.put_writer(number, writer._replace(at=1, status="failed"))
    else:
        yield "look: another's", state.put_writer(number, writer._replace(at=1, status="failed"))
        if not (rules.is_patient and other.is_alive):
            cleared = state._replace(claim=0, in_progress=frozenset(), data=0)
            yield "look: overwrite", cleared.put_writer(number, begun)


def _undo(state: State, number: int, writer: Writer) -> State:
    """Delete the own objects, and no other save's."""
    if not (state.marker or state.in_progress - {number}):
        state = state._replace(data=0)
    if writer.has_claim and state.claim == number:
        state = state._replace(claim=0)
    after = state._replace(in_progress=state.in_progress - {number})
    return after.put_writer(number, writer._replace(status="failed"))


def _judge(state: State) -> str:
    if state.marker and state.data != state.marker:
        return "a marker without its data"
    if state.loaded is not None and state.loaded[0] != state.loaded[1]:
        return "a mixture was loaded"
    if sum(writer.status == "done" for writer in state.writers) > 1:
        return "two winners"
    for number in WRITERS:
        writer = state.writers[number - 1]
        if writer.must_win and writer.status == "failed":
            return "what a killed save left blocks the next one"
        if writer.status == "done" and state.marker != number:
            return "a save that reported success is lost"
    return ""
