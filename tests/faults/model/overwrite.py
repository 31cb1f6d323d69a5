"""The overwrite of a checkpoint on a store (``shardckpt/commit/replacement.py``) as a model.

Two saves overwrite a checkpoint, a prune removes what dead ones have left, and a load reads; each save may be killed at
any moment. A store's requests are atomic and seen by all at once. Saves 1 and 2 have generations 1 and 2; what is there
first is checkpoint 0. Whether a process is alive, others know only where it is of their host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.faults.model.explorer import Found, explore
from tests.faults.model.writers import WRITERS, list_writer_moves

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What a save asks of the store, in this order.
STEPS = (
    "look",
    "create claim",
    "put in-progress",
    "look again",
    "put data",
    "check",
    "switch marker",
    "delete old",
    "delete claim",
    "delete in-progress",
)
#: No generation, and no claim.
NONE = -1


class Rules(NamedTuple):
    """The protocol, and what the store does.

    Attributes:
        steps: What a save does, in this order.
        is_conditional: Whether the store creates and replaces objects by a condition; else it ignores conditions.
        knows_processes: Whether saves and prunes know if a process is alive; else they take each for dead.
        deletes: What a save deletes after its switch: ``"replaced"``, the checkpoint that it has replaced; or
            ``"others"``, all generations but its own.
    """

    steps: tuple[str, ...] = STEPS
    is_conditional: bool = True
    knows_processes: bool = True
    deletes: str = "replaced"


class Writer(NamedTuple):
    """A save.

    Attributes:
        at: How many steps it has done.
        status: One of ``running``, ``undoing``, ``failed``, ``done`` and ``dead``.
        seen: The checkpoint that the marker named when it began.
        overruled: The saves whose in-progress objects it does not heed.
        has_claim: Whether the claim was its own.
        must_win: Whether the other save had ended when it began.
    """

    at: int = 0
    status: str = "running"
    seen: int = NONE
    overruled: frozenset[int] = frozenset()
    has_claim: bool = False
    must_win: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether it has begun, and may do more."""
        return self.status in ("running", "undoing") and self.at > 0

    @property
    def has_ended(self) -> bool:
        """Whether it will do no more."""
        return self.status in ("failed", "done", "dead")


class State(NamedTuple):
    """The objects of a URL, and those who use it."""

    claim: int = NONE
    in_progress: frozenset[int] = frozenset()
    #: The checkpoints whose objects are all there.
    whole: frozenset[int] = frozenset({0})
    marker: int = 0
    writers: tuple[Writer, Writer] = (Writer(), Writer())
    #: What a prune will delete, and the in-progress objects that it judged; None if it has not begun.
    pruned: tuple[frozenset[int], frozenset[int]] | None = None
    #: What a reader has found the marker to name, and then whether the objects were there.
    read: int = NONE
    loaded: int = NONE
    #: Whether a save has replaced another's checkpoint without having seen it.
    is_lost: bool = False

    def put_writer(self, number: int, writer: Writer) -> State:
        """The state with this writer in the place of the one before."""
        first, second = self.writers
        return self._replace(writers=(writer, second) if number == 1 else (first, writer))


def explore_overwrites(rules: Rules) -> Found:
    """Search all interleavings of two overwrites, a prune and a load, each save killed at any moment."""
    return explore(State(), lambda state: _list_moves(state, rules), _judge)


def _list_moves(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    yield from list_writer_moves(
        state, rules.steps, lambda at, number, writer, step: _do_step(at, rules, number, writer, step), _undo
    )
    yield from _prune(state, rules)
    if state.read == NONE:
        yield "reader: marker", state._replace(read=state.marker)
    elif state.loaded == NONE:
        # what is gone makes it begin again, which is the state before
        found = state.read if state.read in state.whole else NONE
        yield "reader: data", state._replace(read=found, loaded=found)


def _do_step(state: State, rules: Rules, number: int, writer: Writer, step: str) -> Iterator[tuple[str, State]]:  # noqa: C901, PLR0912
    ahead = state.put_writer(number, writer._replace(at=writer.at + 1))
    failed = state.put_writer(number, writer._replace(at=writer.at + 1, status="undoing"))
    others = state.in_progress - {number} - writer.overruled
    if step == "look":
        yield from _look(state, rules, number, writer)
    elif step == "create claim":
        if state.claim != NONE and rules.is_conditional:
            yield "claim taken", state.put_writer(number, writer._replace(at=writer.at + 1, status="failed"))
        else:
            mine = writer._replace(at=writer.at + 1, has_claim=True)
            yield step, ahead._replace(claim=number).put_writer(number, mine)
    elif step == "put in-progress":
        yield step, ahead._replace(in_progress=state.in_progress | {number})
    elif step == "look again":
        yield step, failed if others or state.marker != writer.seen else ahead
    elif step == "put data":
        yield step, ahead._replace(whole=state.whole | {number})
    elif step == "check":
        is_ours = number in state.in_progress and not others and number in state.whole
        yield step, ahead if is_ours and state.marker == writer.seen else failed
    elif step == "switch marker":
        if rules.is_conditional and state.marker != writer.seen:
            yield "marker taken", failed
        else:
            # a load finds the other's checkpoint gone, which had been reported done, or will be
            lost = state.marker != writer.seen and not rules.is_conditional
            yield step, ahead._replace(marker=number, is_lost=state.is_lost or lost)
    elif step == "delete old":
        gone = {writer.seen} if rules.deletes == "replaced" else state.whole - {number}
        yield step, ahead._replace(whole=state.whole - gone)
    elif step == "delete claim":
        yield step, ahead._replace(claim=NONE if state.claim == number else state.claim)
    else:
        yield step, ahead._replace(in_progress=state.in_progress - {number})


def _look(state: State, rules: Rules, number: int, writer: Writer) -> Iterator[tuple[str, State]]:
    """Read the marker, and overrule the saves that are not known to be alive: their claim goes, their objects stay."""
    other = state.writers[2 - number]
    marks = state.in_progress | ({state.claim} - {NONE})
    begun = writer._replace(
        at=writer.at + 1, seen=state.marker, overruled=state.in_progress, must_win=other.has_ended or other.at == 0
    )
    if marks and rules.knows_processes and other.is_alive:
        yield "look: another's", state.put_writer(number, begun._replace(status="failed", must_win=False))
    else:
        yield "look", state._replace(claim=NONE).put_writer(number, begun)


def _undo(state: State, number: int, writer: Writer) -> State:
    """Delete the own objects, which have the save's id in their names."""
    state = state._replace(whole=state.whole - {number})
    if writer.has_claim and state.claim == number:
        state = state._replace(claim=NONE)
    after = state._replace(in_progress=state.in_progress - {number})
    return after.put_writer(number, writer._replace(status="failed"))


def _prune(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Find what dead saves have left, and remove it in a second step."""
    alive = {number for number in WRITERS if state.writers[number - 1].is_alive}
    if state.pruned is None:
        if state.in_progress and not state.in_progress & alive:
            found = state.whole - {state.marker}
            yield "prune: find", state._replace(pruned=(found, state.in_progress))
    else:
        found, marks = state.pruned
        done = state._replace(pruned=None)
        if state.in_progress == marks:
            gone = (state.whole - {state.marker}) & found
            yield "prune: remove", done._replace(whole=state.whole - gone, in_progress=frozenset())
        else:
            yield "prune: nothing", done


def _judge(state: State) -> str:
    if state.marker not in state.whole:
        return "the marker names what is not whole"
    if state.is_lost:
        return "a checkpoint was replaced that its successor had not seen"
    first, second = state.writers
    for number, writer, other in ((1, first, second), (2, second, first)):
        if writer.status == "done" and number not in (state.marker, other.seen):
            return "a save that reported success is lost"
        if writer.must_win and writer.status == "failed" and not other.is_alive and other.at == 0:
            return "a save alone fails"
    if all(writer.has_ended for writer in state.writers) and not state.in_progress and len(state.whole) > 1:
        return "what is left is not found by a prune"
    return ""
