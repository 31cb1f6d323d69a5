"""Tests over tables: one test checks every row, and its failure names each row that failed."""

from __future__ import annotations

import functools
import inspect
import reprlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Row = type(pytest.param())


def table(
    names: str | Iterable[str],
    rows: Iterable[Any],
    *,
    ids: Iterable[str] | Callable[[Any], object] | None = None,
) -> Any:
    """Run a test for each row, as ``pytest.mark.parametrize`` does, but as one test.

    Each row has a ``tmp_path``, ``monkeypatch`` and ``capsys`` of its own; other fixtures are the same for all rows.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    several = len(arguments) > 1 or not isinstance(names, str)
    found = [row if isinstance(row, _Row) else pytest.param(*(row if several else (row,))) for row in rows]
    assert found, "a table without rows shows nothing"
    assert not any(row.marks for row in found), "rows of a table are one test, with one set of marks"
    labels = [*ids] if ids is not None and not callable(ids) else [row.id for row in found]
    if callable(ids):
        labels = ["-".join(str(ids(value)) for value in row.values) for row in found]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            failures = []
            for number, (row, label) in enumerate(zip(found, labels, strict=True)):
                given = dict(zip(arguments, row.values, strict=True))
                try:
                    with ExitStack() as stack:
                        test(*args, **_of_one_row(fixtures, number, stack), **given)
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 each row is tried
                    name = label or ", ".join(f"{key}={reprlib.repr(value)}" for key, value in given.items())
                    failures.append((f"row {number} ({name}): {type(error).__name__}: {error}", error))
            if failures:
                texts = "\n".join(text for text, _ in failures)
                raise AssertionError(f"{len(failures)} of {len(found)} rows failed\n{texts}") from failures[0][1]

        signature = inspect.signature(test)
        others = [value for name, value in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def _of_one_row(fixtures: dict[str, Any], number: int, stack: ExitStack) -> dict[str, Any]:
    """Give a row a folder and patches that no other row sees."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    if "monkeypatch" in own:
        own["monkeypatch"] = stack.enter_context(own["monkeypatch"].context())
    if "capsys" in own:
        own["capsys"].readouterr()  # what the row before has printed is not this one's
    return own


def in_proof(*rows: Any) -> list[Any]:
    """Rows of ``pytest.mark.parametrize`` that fail in no other way than one beside them: before a release only."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.proof) for row in rows]
