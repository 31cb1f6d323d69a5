"""The work of ranks with a store in the tests of the contract; importing this registers ``faulty://`` in them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.testing.contract import jobs
from shardckpt.testing.faulty_store import FaultyFileSystem  # noqa: F401 - its import registers faulty://

if TYPE_CHECKING:
    from shardckpt.testing.contract.subject import Subject


def save_version(subject: Subject, url: str, value: int, overwrite: bool = False) -> None:
    """Save a state dict that says the number everywhere."""
    jobs.save_version(subject, url, value, overwrite=overwrite)


def save_error(subject: Subject, url: str) -> tuple[str, str]:
    """Return class and text of the error of a save, with one attempt at each request."""
    os.environ[settings.REMOTE_ATTEMPTS] = "1"
    try:
        return jobs.error_of(jobs.save_version, subject, url, 1, overwrite=True)
    finally:
        os.environ.pop(settings.REMOTE_ATTEMPTS, None)  # ranks may be threads
