"""Print a failed contract in pytest: the promise, the event instead, its place, and the page that documents it."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

#: Packages whose frames are not an author's; a wrapper that hypothesis makes has none.
_OTHERS = {"shardckpt", "torch", "_pytest", "pytest", "pluggy", "fsspec", "hypothesis", "", *sys.stdlib_module_names}
#: Behind it, errors of ranks have tracebacks.
_BLANK = "\n\n"


def explain(item: pytest.Item, error: pytest.ExceptionInfo[BaseException]) -> Any:
    """Return a short traceback from the test on, unless ``--tb`` asks for more, and the broken promise below it.

    Args:
        item: The test: a method of a contract, which has ``contract_page`` and ``describe_subject``.
        error: The error that it raised.
    """
    test = item.obj  # type: ignore[attr-defined]
    style = item.config.getoption("tbstyle", "auto")
    names = [entry.frame.code.raw.co_name for entry in error.traceback]
    if test.__name__ in names:
        error.traceback = error.traceback[names.index(test.__name__) :]
    shown = error.getrepr(style="short" if style == "auto" else style, chain=style != "auto")
    shown.addsection("broken promise", describe(test, error.value))
    return shown


def describe(test: Any, error: BaseException) -> str:
    """Return lines with the promise, the event, where it was noticed, and where the promise is documented.

    Args:
        test: The bound method of a contract.
        error: The error that it raised.
    """
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    lines = [
        f"{test.__self__.describe_subject()} does not keep a promise, {test.__name__}",
        f"promised:   {' '.join((test.__doc__ or test.__name__).split())}",
        f"happened:   {kind}{str(error).strip().partition(_BLANK)[0] or 'no text'}",
    ]
    names = [name for name in test.__code__.co_consts if isinstance(name, str)]
    lines += [f"claimed:    {name} = True" for name in names if getattr(test.__self__, name, None) is True]
    checks = [frame for frame in _list_frames(error) if frame.name == test.__name__]
    lines += [f"checked at: {frame.filename}:{frame.lineno}" for frame in checks[-1:]]
    theirs = [frame for frame in _list_frames(error, of_others=False) if frame.name != test.__name__]
    lines += [f"raised at:  {frame.filename}:{frame.lineno}, {frame.name}" for frame in theirs[-1:]]
    return "\n".join([*lines, f"documented: {test.__self__.contract_page}"])


def _list_frames(error: BaseException | None, *, of_others: bool = True) -> list[traceback.FrameSummary]:
    """Return the frames of an error and of its causes, or those alone that may be an author's."""
    found = []
    while error is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if of_others or package not in _OTHERS:
                found.append(traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name))
        error = error.__cause__
    return found
