"""What real saves did, in the words of the models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.faults.model import directory
from tests.names import MARKERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_STAGING = r"\.ckpt\.shardckpt-staging-\*-\*"
_ASIDE = r"\.ckpt\.shardckpt-replaced-\*-\*"
_FILE = re.compile(rf"[<\"]RUN/(?:jobs/)?{_STAGING}/([^>\"]+)[>\"]")
_WRITES = ("pwrite", "write(", "fallocate", "ftruncate", "openat")
#: What a call that changes names in the parent directory is in the model.
_RENAMES = (
    ("make staging", rf"mkdir\(\S*{_STAGING}\""),
    ("aside", rf"rename\(\S*{_STAGING}\", \S*{_ASIDE}\""),
    ("exchange", rf"renameat2\(.*{_ASIDE}\".*/ckpt\", RENAME_EXCHANGE"),
    ("publish", rf"rename\(\S*{_STAGING}\", \S*/ckpt\""),
    ("target aside", rf"rename\(\S*/ckpt\", \S*{_ASIDE}\""),
)


def name_calls(lines: Iterable[str]) -> list[str]:  # noqa: C901 - a branch for each kind of call
    """The steps of the model of directories that a trace of system calls shows, in order.

    Args:
        lines: What strace printed of one save to ``RUN/.../ckpt``, with ``*`` for what differs between runs.

    Returns:
        The steps. The writes of all files of a kind are one step at the last of them, their fsyncs likewise. A call
        that the model does not know is its own name.
    """
    steps: list[tuple[int, str]] = []
    last: dict[str, int] = {}
    written, synced = set[str](), set[str]()
    is_committed = False
    lines = list(lines)
    for number, line in enumerate(lines):
        if line.partition(" = ")[2].startswith("-1"):
            continue
        file = _FILE.search(line)
        if file and line.startswith((*_WRITES, "fsync(")) and ("O_RDONLY" not in line):
            kind = "marker" if file[1] in MARKERS else "data"
            if line.startswith("fsync(") and is_folder(file[1], lines):
                continue
            if line.startswith("fsync("):
                synced.add(file[1])
                last[f"sync {kind}"] = number
                continue
            written.add(file[1])
            last[f"write {kind}"] = number
            if file[1] in synced:
                steps.append((number, f"write {file[1]} after its fsync"))
        elif line.startswith("fsync(") and re.search(rf"/{_STAGING}>", line):
            steps.append((number, "sync staging"))
        elif line.startswith("fsync(") and is_committed:
            steps.append((number, "sync parent"))
        elif line.startswith(("rename(", "renameat2(", "mkdir(")):
            name = next((name for name, pattern in _RENAMES if re.match(pattern, line)), "")
            if re.match(rf"rename\(\S*{_ASIDE}\", \S*{_STAGING}\"", line):
                name = "remove old" if is_committed else "back"
            is_committed |= name in ("exchange", "publish")
            if name:
                steps.append((number, name))
        elif line.startswith(("unlink(", "unlinkat(", "rmdir(")) and "-discarded" not in line:
            steps.append((number, line))
    steps += [(len(lines), f"no fsync of {name}") for name in sorted(written - synced)]
    return [name for _, name in sorted([*steps, *((number, name) for name, number in last.items())])]


def is_folder(name: str, lines: Iterable[str]) -> bool:
    """Whether the trace makes a folder of that name in the staging directory."""
    return any(line.startswith("mkdir(") and f'/{name}"' in line for line in lines)


def find_departure(steps: Sequence[str], rules: directory.Rules) -> str:
    """Follow a save's steps in the model of directories, where nobody else does anything; ``""`` if it has them all.

    Args:
        steps: What :func:`name_calls` returned.
        rules: What the model is to be.
    """
    state = directory.make_start(rules)
    for step in steps:
        state = _skip(state, rules, {"look"})
        if step == "remove old" and state.names[3] == -1:
            return f"{step!r}: nothing was replaced"
        name, after = directory.do_next(state, rules, 1)
        if name != step:
            return f"the save does {step!r} where the model has {name!r}"
        state = after
    state = _skip(state, rules, {"remove old"} if state.names[3] == -1 else set())
    status = state.writers[0].status
    return (
        ""
        if status == "done"
        else f"the save ends where the model goes on with {directory.do_next(state, rules, 1)[0]!r}"
    )


def _skip(state: directory.State, rules: directory.Rules, names: set[str]) -> directory.State:
    """Take a step that no call shows: looking at the target, and removing nothing."""
    if state.writers[0].status == "running":
        name, after = directory.do_next(state, rules, 1)
        if name in names:
            return after
    return state


def name_requests(requests: Iterable[tuple[str, str]]) -> list[str]:
    """The steps of the model of stores that a save's requests show, in order.

    Args:
        requests: Of each ``list``, ``create``, ``put`` or ``delete``, and the object's name.
    """
    found = [method if method == "list" else f"{method} {_name_object(name)}" for method, name in requests]
    steps: list[str] = []
    for step, behind in zip(found, [*found[1:], ""], strict=True):
        if step != "list":
            name = step
        elif not steps:
            name = "look"
        elif steps[-1] == "put in-progress":
            name = "look again"
        elif behind == "create marker":
            name = "check"
        elif "look again" in steps and "check" not in steps:
            continue  # each upload asks whether the folder is still its own
        else:
            name = step
        # each file; and the second claim, which asks whether the store keeps its conditions
        if not (steps[-1:] == [name] and name in ("put data", "create claim")):
            steps.append(name)
    return steps


def name_overwrite(requests: Iterable[tuple[str, str]]) -> list[str]:
    """The steps of the model of overwrites that a save's requests show, in order; see :func:`name_requests`.

    Names of objects in the generation begin with the folder's name.
    """
    steps: list[str] = []
    for method, name in requests:
        folder, _, inner = name.rpartition("/")
        if method == "list":
            # the generation is nobody else's; and the check asks only what the switch's listing asks again
            step = "" if folder else {0: "look", 3: "look again", 5: "check"}.get(len(steps), "")
        elif method == "delete":
            is_old = not _is_mark(name) and (not folder or steps[-1] != "delete old" or not _is_mark(inner))
            step = "delete old" if is_old else "" if folder else f"delete {_name_object(name)}"
        elif folder:
            step = "" if _is_mark(inner) else "put data"
        else:
            step = "switch marker" if method == "replace" else f"{method} {_name_object(name)}"
        if step and steps[-1:] != [step]:
            steps.append(step)
    return steps


def _is_mark(name: str) -> bool:
    return name.startswith(".shardckpt-uploading-")


def _name_object(name: str) -> str:
    if name == "metadata.json":
        return "marker"
    if name.startswith(".shardckpt-uploading-"):
        return "claim" if name.endswith("-claim") else "in-progress"
    return "data"
