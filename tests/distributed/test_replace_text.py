"""Errors whose text is replaced by a longer one."""

from __future__ import annotations

from typing import Any

import pytest

from shardckpt.distributed import replace_text
from shardckpt.errors import CannotLoadError, CheckpointingException, KeyMismatchError


class DriverError(CannotLoadError):
    """A plugin's class whose constructor takes no text."""

    def __init__(self, *, driver: str) -> None:
        super().__init__(f"the driver {driver} is missing")
        self.driver = driver


class OwnTextError(KeyMismatchError):
    """A class that makes its text from its attributes."""

    key = "w"

    def __str__(self) -> str:
        return f"no {self.key}"


class PairError(DriverError):
    """A class that its own ``__new__`` does not make of one argument."""

    def __new__(cls, first: Any, second: Any) -> Any:
        """Take both."""
        return super().__new__(cls, first, second)

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(driver=f"{first}-{second}")


class MissingFileError(FileNotFoundError, CheckpointingException):
    """A class whose nearest base class without a text of its own is not of the family."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CannotLoadError("odd"), CannotLoadError),
        (DriverError(driver="x"), DriverError),
        (PairError(1, 2), PairError),
        (OwnTextError(), KeyMismatchError),
        (MissingFileError(2, "gone"), CheckpointingException),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_a_text_is_replaced(error: CheckpointingException, kind: type[CheckpointingException]) -> None:
    """The new error has the new text, attributes, traceback, and the class or its nearest base that can have them."""
    with pytest.raises(type(error)):
        raise error
    error.path, error.shared_by = "a", 1  # type: ignore[attr-defined]
    replaced = replace_text(error, f"step 3: {error}")
    assert type(replaced) is kind
    assert str(replaced) == f"step 3: {error}"
    assert replaced.__traceback__ is error.__traceback__ is not None
    assert (replaced.path, replaced.shared_by) == ("a", None)  # type: ignore[attr-defined]
    assert getattr(replaced, "driver", None) == getattr(error, "driver", None)
