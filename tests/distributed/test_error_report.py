from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.distributed import Comm, ErrorReport
from shardckpt.errors import CheckpointingException, RankFailedError, ShardingError, StorageError
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks import Ranks


class PluginError(ShardingError):
    """A class that shares its name with one of shardckpt.errors."""


class listed(CheckpointingException):  # noqa: N801 - that is the point
    """A class that shares its name with a function of shardckpt.errors."""


class CodeError(CheckpointingException):
    """A class whose constructor takes other arguments."""

    def __init__(self, code: int, *, path: str) -> None:
        super().__init__(f"{path}: code {code}")
        self.code = code
        self.lock = threading.Lock()  # it cannot be pickled


class OwnTextError(CheckpointingException):
    """A class that makes its text from its attributes."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class LockTextError(OwnTextError):
    """A class whose text needs what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(0)
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return f"locked: {self.lock.locked()}"


class BrokenTextError(CheckpointingException):
    """A class that has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class PairError(CheckpointingException):
    """A class that wants two arguments when it is made, and has one."""

    def __new__(cls, first: Any, second: Any) -> Any:
        """Take both."""
        return super().__new__(cls, first)

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(f"{first} and {second}")


class DiskError(CheckpointingException, OSError):
    """A class that is an error of the system, too."""


class MissingFileError(StorageError, FileNotFoundError):
    """A class of two bases, of which one keeps the file's name outside of the error's attributes."""


class ForeignError(Exception):
    """A class from outside the family, whose constructor takes other arguments."""

    def __init__(self, code: int, *, path: str) -> None:
        super().__init__(f"{path}: code {code}")
        self.code = code


class ForeignFileError(FileNotFoundError):
    """A class from outside the family, whose base makes the text."""


class SealedError(Exception):
    """A class from outside the family that permits no subclass."""

    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses")


class EndError(StopIteration):
    """A class that ends the generator that it leaves."""


def _local_error() -> CheckpointingException:
    class LocalError(CheckpointingException):
        """A class that no other process can import."""

    return LocalError("odd")


def _replaced_error() -> CheckpointingException:
    """An error whose class is not the one that its name says."""
    return type("PluginError", (CheckpointingException,), {"__module__": __name__})("odd")


FAILED = "shardckpt.errors.RankFailedError"


#: What makes an error; its class on every rank, and the end of its text.
ERRORS: dict[str, tuple[Callable[[], Exception], str, str]] = {
    "plugin": (lambda: PluginError("odd"), f"{__name__}.PluginError", "odd"),
    "unlucky name": (lambda: listed("odd"), f"{__name__}.listed", "odd"),
    "other arguments": (lambda: CodeError(7, path="f"), f"{__name__}.CodeError", "f: code 7"),
    "own text": (lambda: OwnTextError(7), f"{__name__}.OwnTextError", "code 7"),
    "of the system": (lambda: DiskError(28, "full"), f"{__name__}.DiskError", "[Errno 28] full"),
    "local": (_local_error, FAILED, "LocalError: odd"),
    "replaced": (_replaced_error, FAILED, "PluginError: odd"),
    "text of a lock": (LockTextError, FAILED, "LockTextError: locked: False"),
    "no text": (BrokenTextError, FAILED, "BrokenTextError: (the error has no text: its __str__ failed)"),
    "of two bases": (
        lambda: MissingFileError(2, "no such file", "f"),
        f"{__name__}.MissingFileError",
        "[Errno 2] no such file: 'f'",
    ),
    "foreign": (lambda: ForeignError(7, path="f"), f"{__name__}.ForeignError", "f: code 7"),
    "foreign, of the system": (
        lambda: ForeignFileError(2, "no such file", "f"),
        f"{__name__}.ForeignFileError",
        "[Errno 2] no such file: 'f'",
    ),
    "foreign, sealed": (lambda: SealedError("odd"), FAILED, "SealedError: odd"),
    "foreign, of a generator": (lambda: EndError("odd"), FAILED, "EndError: odd"),
    "of Python": (lambda: KeyError("odd"), FAILED, "KeyError: 'odd'"),
}


def _class_and_texts(case: str) -> tuple[str, str, bool]:
    """The class of the error that the last rank raises, as every rank raises it, and its texts."""
    comm, error = Comm(), ERRORS[case][0]()
    try:
        with comm.collective_phase("step"):
            if comm.rank == comm.world_size - 1:
                raise error
    except Exception as exc:  # noqa: BLE001 - the test decides
        return f"{type(exc).__module__}.{type(exc).__name__}", str(exc), "rank 1, in 'step': " in _shown(exc)
    return "", "", False


def _shown(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@table("case", ERRORS)
def test_a_class_does_not_depend_on_the_number_of_ranks(ranks: Ranks, case: str) -> None:
    """An error has the same class on one rank and on every one of two, which also say which rank failed and where."""
    _, kind, text = ERRORS[case]
    alone = ranks.run(1, _class_and_texts, case)
    both = ranks.run(2, _class_and_texts, case)
    assert [found for found, *_ in alone + both] == [kind] * 3
    assert all(shown.endswith(text) for _, shown, _ in alone + both)
    assert both[0] == both[1]
    assert both[0][2]


def _attributes() -> tuple[Any, Any]:
    comm = Comm()
    try:
        with comm.collective_phase("step"):
            if comm.rank == 1:
                raise CodeError(7, path="f")
    except CodeError as exc:
        return exc.code, getattr(exc, "lock", None)
    return None, None


def test_attributes_arrive_where_they_can(ranks: Ranks) -> None:
    """What an error carries is the same on every rank; what cannot be pickled is on none."""
    assert ranks.run(2, _attributes) == [(7, None), (7, None)]


def _raises(case: str, rank: int) -> None:
    comm = Comm()
    with comm.collective_phase("step"):
        if comm.rank == rank:
            error = ERRORS[case][0]()
            raise error


def _caught_as_itself(rank: int) -> tuple[Any, ...]:
    """What a caller that catches a plugin's class from outside the family finds in the error."""
    try:
        _raises("foreign, of the system", rank)
    except ForeignFileError as exc:
        copies = pickle.loads(pickle.dumps(exc)), copy.copy(exc)
        is_same = all((type(one), str(one), vars(one)) == (type(exc), str(exc), vars(exc)) for one in copies)
        return exc.errno, exc.filename, type(exc.__cause__), isinstance(exc, CheckpointingException), is_same
    return ()


def test_a_plugins_class_joins_the_family(ranks: Ranks) -> None:
    """A class from outside the family is caught as itself and as one of the family, and the error is picklable."""
    assert ranks.run(1, _caught_as_itself, 0) == [(2, "f", ForeignFileError, True, True)]
    assert ranks.run(2, _caught_as_itself, 1) == [
        (2, "f", type(None), True, True),
        (2, "f", ForeignFileError, True, True),
    ]


def _passes_two_groups() -> list[str]:
    outer = Comm()
    try:
        with outer.collective_phase("outer"):
            _raises("foreign", 1)
    except ForeignError as exc:
        return [type(exc).__name__, str(exc), str(exc.code)]
    return []


def test_a_plugins_class_passes_two_groups(ranks: Ranks) -> None:
    """An error that has joined the family passes the ranks of an outer operation as any other does."""
    text = "rank 0, in 'outer': rank 1, in 'step': f: code 7"
    assert ranks.run(2, _passes_two_groups) == [["ForeignError", text, "7"]] * 2


def _fails_again_on_the_way_out() -> list[str]:
    comm = Comm()
    try:
        with comm.local_phase("operation"):
            try:
                _raise_on_rank_1(comm)
            finally:
                raise OSError("and the disk is full")
    except CheckpointingException as exc:
        return [type(exc).__name__, str(exc)]


def _raise_on_rank_1(comm: Comm) -> None:
    with comm.collective_phase("step"):
        if comm.rank == 1:
            raise CodeError(7, path="f")


def test_what_fails_later_does_not_change_the_class(ranks: Ranks) -> None:
    """An error of any class stays the error of all ranks when cleaning up fails after it."""
    assert ranks.run(2, _fails_again_on_the_way_out) == [["CodeError", "rank 1, in 'step': f: code 7"]] * 2


def _both_fail() -> None:
    comm = Comm()
    with comm.collective_phase("step"):
        raise (PluginError, ShardingError)[comm.rank]("odd")


def test_all_that_failed_are_told(ranks: Ranks) -> None:
    """An error of another class with the same text is another error: the text of all has both ranks."""
    outcomes = ranks.outcomes(2, _both_fail)
    assert {outcome.message for outcome in outcomes} == {"rank 0, in 'step': odd\nrank 1, in 'step': odd"}
    assert {outcome.kind for outcome in outcomes} == {"PluginError"}


@pytest.mark.parametrize(
    "path", ["os:system", "builtins:print", "builtins:ValueError", "shardckpt.errors:listed", "torch:save", "", "x"]
)
def test_a_report_makes_errors_only(path: str) -> None:
    """A report that names anything but an exception class, or one of Python's own, makes nothing, and calls nothing."""
    assert ErrorReport("rank 1", "x", path, "true", {}).rebuild("true") is None


def test_large_attributes_stay_at_home() -> None:
    """An attribute as large as a tensor does not travel with the error."""
    error = ShardingError("odd")
    error.data, error.key = bytes(1 << 20), "w"  # type: ignore[attr-defined]
    rebuilt = ErrorReport.of(error, "here").rebuild("there: odd")
    assert isinstance(rebuilt, ShardingError)
    assert (str(rebuilt), vars(rebuilt)) == ("there: odd", {"key": "w"})


def test_an_error_of_one_process_is_the_one_that_was_raised() -> None:
    """On one rank an error of the family keeps its identity, and with it all of its attributes."""
    error = CodeError(7, path="f")
    with pytest.raises(CodeError) as caught, Comm().collective_phase("step"):
        raise error
    assert caught.value is error
    with pytest.raises(RankFailedError, match=r"^in 'step': LocalError: odd$"), Comm().collective_phase("step"):
        raise _local_error()


def test_no_constructor_is_called() -> None:
    """A class whose ``__new__`` wants other arguments than the error's ``args`` is made again, and copied."""
    rebuilt = ErrorReport.of(PairError(1, 2), "planning").rebuild("text")
    assert (type(rebuilt), str(rebuilt)) == (PairError, "text")
