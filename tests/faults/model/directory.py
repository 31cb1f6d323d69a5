"""The commit protocol of directories (``shardckpt/commit/commit.py``) as a model: two writers, a reader, a power cut.

A directory's names, and a file's bytes, survive a power cut once they are synced; before, each may or may not. Renames
in the parent directory survive in their order: a cut keeps the first few since the last sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.faults.model.explorer import Found, explore

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What a writer does, in this order; ``commit`` is one rename to the target, or an exchange with it.
STEPS = (
    "make staging",
    "write data",
    "sync data",
    "write marker",
    "sync marker",
    "sync staging",
    "commit",
    "sync parent",
    "remove old",
)
_WRITERS = (1, 2)
#: Where a name of the parent directory stands in :attr:`State.names`.
_TARGET, _STAGING, _ASIDE = 0, (0, 1, 2), (0, 3, 4)
_NOBODY = -1


class Rules(NamedTuple):
    """The protocol, and where it runs.

    Attributes:
        steps: What a writer does, in this order.
        overwrite: Whether there is an old checkpoint, which both writers may replace.
        can_exchange: Whether the file system exchanges two names in one step.
        holds: Whether a reader holds the directory open that it has found.
        digests: Whether a reader compares what it reads with the marker.
    """

    steps: tuple[str, ...] = STEPS
    overwrite: bool = True
    can_exchange: bool = True
    holds: bool = True
    digests: bool = True


class Directory(NamedTuple):
    """What a checkpoint's directory has: 0 for nothing, 1 for what only memory has, 2 for what a power cut spares.

    Attributes:
        data: The files of the tensors.
        marker: The files that make it a checkpoint.
        names: The directory's entries: 2 once it was synced after the last was made.
    """

    data: int = 0
    marker: int = 0
    names: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it loads."""
        return bool(self.data and self.marker)

    def list_after_cut(self) -> Iterator[Directory]:
        """What a power cut may leave of it."""
        for data in {self.data if self.names == 2 else 0, self.data} if self.data == 2 else {0, self.data}:
            for marker in (
                {self.marker if self.names == 2 else 0, self.marker} if self.marker == 2 else {0, self.marker}
            ):
                yield Directory(data and 2, marker and 2, 2)


_OLD = Directory(2, 2, 2)


class Writer(NamedTuple):
    """A save.

    Attributes:
        at: How many steps it has done.
        rename: The part of the commit that comes next; ``""`` before and after it.
        status: One of ``running``, ``done``, ``failed`` and ``dead``.
        must_win: Whether nobody else was alive when it began.
    """

    at: int = 0
    rename: str = ""
    status: str = "running"
    must_win: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether it has begun, and may do more."""
        return self.status == "running" and self.at > 0


class State(NamedTuple):
    """A parent directory, what its names stand for, and those who use it.

    A name stands for the directory of the old checkpoint (0), or of a writer (1, 2).
    """

    names: tuple[int, ...]
    #: What the names were since the parent was last synced, the oldest first.
    synced: tuple[tuple[int, ...], ...]
    directories: tuple[Directory, Directory, Directory]
    writers: tuple[Writer, Writer] = (Writer(), Writer())
    #: Directories that came to the target, in this order, and how many of them are reported durable.
    history: tuple[int, ...] = ()
    reported: int = 0
    #: Whether the power was cut, which happens once.
    was_cut: bool = False
    #: The directory whose marker a reader has read, and what it loaded: the marker's and the data's.
    read: int = _NOBODY
    loaded: tuple[int, int] | None = None

    def put_writer(self, number: int, writer: Writer) -> State:
        """The state with this writer in the place of the one before."""
        first, second = self.writers
        return self._replace(writers=(writer, second) if number == 1 else (first, writer))

    def put_directory(self, number: int, directory: Directory) -> State:
        """The state with this content of a directory."""
        directories = list(self.directories)
        directories[number] = directory
        return self._replace(directories=(directories[0], directories[1], directories[2]))

    def move(self, **slots: int) -> State:
        """The state after names were changed in one step: ``_0=1`` gives the first name the directory 1."""
        names = list(self.names)
        for slot, number in slots.items():
            names[int(slot[1:])] = number
        history = self.history if names[_TARGET] in (self.names[_TARGET], _NOBODY) else (*self.history, names[_TARGET])
        return self._replace(names=tuple(names), synced=(*self.synced, tuple(names)), history=history)

    def rename(self, old: int, new: int) -> State:
        """The state after one name was renamed to another."""
        return self.move(**{f"_{old}": _NOBODY, f"_{new}": self.names[old]})


def explore_directory(rules: Rules) -> Found:
    """Search all interleavings of two saves and a load, with kills of each save and a power cut at any moment."""
    return explore(make_start(rules), lambda state: _list_moves(state, rules), lambda state: _judge(state, rules))


def make_start(rules: Rules) -> State:
    """The state before anybody has done anything."""
    names = (0 if rules.overwrite else _NOBODY, _NOBODY, _NOBODY, _NOBODY, _NOBODY)
    old = _OLD if rules.overwrite else Directory()
    history = (0,) if rules.overwrite else ()
    return State(names, (names,), (old, Directory(), Directory()), history=history, reported=len(history))


def do_next(state: State, rules: Rules, number: int) -> tuple[str, State]:
    """The next step of a writer that runs: its name, and the state after it."""
    writer = state.writers[number - 1]
    return _do_rename(state, rules, number, writer) if writer.rename else _do_step(state, rules, number)


def _list_moves(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    for number in _WRITERS:
        writer = state.writers[number - 1]
        if writer.status == "running":
            name, after = do_next(state, rules, number)
            yield f"{number}: {name}", after
        if writer.is_alive:
            yield f"{number}: killed", state.put_writer(number, writer._replace(status="dead"))
    if not state.was_cut:
        yield from _cut_power(state)
    yield from _read(state, rules)


def _cut_power(state: State) -> Iterator[tuple[str, State]]:
    writers = [writer._replace(status="dead") if writer.is_alive else writer for writer in state.writers]
    for names in set(state.synced):
        for first in set(state.directories[1].list_after_cut()):
            for second in set(state.directories[2].list_after_cut()):
                yield (
                    "power cut",
                    state._replace(
                        names=names,
                        synced=(names,),
                        directories=(state.directories[0], first, second),
                        writers=(writers[0], writers[1]),
                        was_cut=True,
                        read=_NOBODY,
                        loaded=None,
                    ),
                )


def _read(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    target = state.names[_TARGET]
    if state.loaded is not None:
        return
    if state.read == _NOBODY:
        if target != _NOBODY and state.directories[target].marker:
            yield "reader: marker", state._replace(read=target)
        return
    found = state.read if rules.holds else target
    if found == _NOBODY or not state.directories[found].data or (rules.digests and found != state.read):
        yield "reader: error, again", state._replace(read=_NOBODY)  # honest: it is another, or gone
    else:
        yield "reader: data", state._replace(loaded=(state.read, found))


def _do_step(state: State, rules: Rules, number: int) -> tuple[str, State]:  # noqa: C901 - a branch for each step
    writer = state.writers[number - 1]
    step = rules.steps[writer.at]
    if step == "make staging":
        return step, _begin(state, rules, number, writer)
    own = state.directories[number]
    after = state
    if step == "write data":
        after = state.put_directory(number, own._replace(data=1, names=1))
    elif step == "sync data":
        after = state.put_directory(number, own._replace(data=own.data and 2))
    elif step == "write marker":
        after = state.put_directory(number, own._replace(marker=1, names=1))
    elif step == "sync marker":
        after = state.put_directory(number, own._replace(marker=own.marker and 2))
    elif step == "sync staging":
        after = state.put_directory(number, own._replace(names=2))
    elif step == "sync parent":
        after = state._replace(synced=(state.names,))
        if number in state.history:
            after = after._replace(reported=max(state.reported, state.history.index(number) + 1))
    elif step == "commit":
        target = state.names[_TARGET]
        if target != _NOBODY and not rules.overwrite:
            return "target taken", _fail(state, number)
        return "look", state.put_writer(number, writer._replace(rename="publish" if target == _NOBODY else "aside"))
    else:
        after = _remove_old(state, number)
    return step, _pass(after, rules, number)


def _pass(state: State, rules: Rules, number: int) -> State:
    """The state with the writer's step behind it."""
    writer = state.writers[number - 1]
    at = writer.at + 1
    is_done = at == len(rules.steps)
    if is_done and number in state.history:
        state = state._replace(reported=max(state.reported, state.history.index(number) + 1))
    return state.put_writer(number, writer._replace(at=at, rename="", status="done" if is_done else "running"))


def _begin(state: State, rules: Rules, number: int, writer: Writer) -> State:
    """Restore or remove what a dead writer has left, and make a staging directory."""
    other = 3 - number
    is_dead = state.writers[other - 1].status == "dead"
    if is_dead and (aside := state.names[_ASIDE[other]]) != _NOBODY:
        if state.names[_TARGET] == _NOBODY and rules.overwrite:
            state = state.rename(_ASIDE[other], _TARGET)
            state = state._replace(synced=(state.names,))
        elif state.names[_TARGET] != _NOBODY and state.directories[state.names[_TARGET]].is_whole:
            state = _delete(state, _ASIDE[other], aside)
    if is_dead and (left := state.names[_STAGING[other]]) != _NOBODY:
        state = _delete(state, _STAGING[other], left)
    must_win = not state.writers[other - 1].is_alive and (rules.overwrite or state.names[_TARGET] == _NOBODY)
    # the other may still begin: then this one may lose
    must_win &= state.writers[other - 1].at > 0
    begun = state.put_writer(number, writer._replace(must_win=must_win))
    return _pass(begun.move(**{f"_{_STAGING[number]}": number}), rules, number)


def _delete(state: State, slot: int, number: int) -> State:
    """Remove a directory: the rename before it is durable, and a power cut keeps none of the removed files."""
    state = state.move(**{f"_{slot}": _NOBODY})
    if number in state.names:
        return state
    return state._replace(synced=(state.names,)).put_directory(number, Directory())


def _remove_old(state: State, number: int) -> State:
    """Rename what was replaced to the name of a staging directory, and remove it."""
    if (old := state.names[_ASIDE[number]]) == _NOBODY:
        return state
    # no sync comes before the removal of the files: the parent's, which made the exchange durable, is enough
    return state.move(**{f"_{_ASIDE[number]}": _NOBODY}).put_directory(old, Directory())


def _fail(state: State, number: int) -> State:
    """Discard the staging directory, if there is one."""
    own = state.names[_STAGING[number]]
    if own != _NOBODY:
        state = state.move(**{f"_{_STAGING[number]}": _NOBODY}).put_directory(own, Directory())
    return state.put_writer(number, state.writers[number - 1]._replace(status="failed", rename=""))


def _do_rename(state: State, rules: Rules, number: int, writer: Writer) -> tuple[str, State]:
    """The next rename of a commit."""
    staging, aside = _STAGING[number], _ASIDE[number]
    name = writer.rename
    follow = {"aside": "exchange" if rules.can_exchange else "back", "back": "target aside", "target aside": "publish"}
    if name == "publish":
        if state.names[_TARGET] != _NOBODY:  # not an empty directory: the rename is refused
            return "publish refused", _fail(state, number)
        return name, _pass(state.rename(staging, _TARGET), rules, number)
    if name == "exchange":
        if state.names[_TARGET] == _NOBODY:
            return "exchange refused", _fail(state.rename(aside, staging), number)
        moved = state.move(**{f"_{aside}": state.names[_TARGET], f"_{_TARGET}": state.names[aside]})
        return name, _pass(moved, rules, number)
    if name == "target aside" and state.names[_TARGET] == _NOBODY:
        return "target gone", _fail(state, number)
    old, new = {"aside": (staging, aside), "back": (aside, staging), "target aside": (_TARGET, aside)}[name]
    return name, state.rename(old, new).put_writer(number, writer._replace(rename=follow[name]))


def _judge(state: State, rules: Rules) -> str:  # noqa: PLR0911 - one line for each invariant
    target = state.names[_TARGET]
    if target != _NOBODY and not state.directories[target].is_whole:
        return "the target is not whole"
    if state.loaded is not None and state.loaded[0] != state.loaded[1]:
        return "a mixture was loaded"
    if rules.overwrite and target == _NOBODY:
        if rules.can_exchange:
            return "the target is gone"
        if not any(n != _NOBODY and state.directories[n].is_whole for n in (state.names[slot] for slot in _ASIDE[1:])):
            return "no whole checkpoint is left"
    durable = state.history[max(state.reported - 1, 0) :]
    is_moment_without = target == _NOBODY and (not state.reported or not rules.can_exchange)
    if state.was_cut and target not in durable and not is_moment_without:
        return "a save that reported success is lost"
    if not rules.overwrite and sum(writer.status == "done" for writer in state.writers) > 1:
        return "two winners"
    for writer in state.writers:
        if writer.must_win and writer.status == "failed":
            return "what a killed save left blocks the next one"
    return ""
