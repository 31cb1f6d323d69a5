"""Leases and pins of steps: they keep a step from being removed or replaced, by whichever process.

How they are stored, and how a removal or a save treats them, is in :mod:`shardckpt.commit.holds`.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING

from shardckpt.commit.holds import MARK_SECONDS, Hold, describe_process, make_hold
from shardckpt.errors import CheckpointingException, listed, name_known
from shardckpt.manager.any_steps import AnySteps
from shardckpt.manager.step_names import parse_number
from shardckpt.manager.step_resolution import check_step, find_newest
from shardckpt.manager.steps import StepFolder
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    import os
    from collections.abc import Collection
    from types import TracebackType

    from typing_extensions import Self

logger = logging.getLogger(__name__)

#: Seconds that a lease waits for a removal or a save under way, which takes one rename or one object.
_PATIENCE = 10.0
_SHORTEST_LEASE = 3.0
_LONGEST_LEASE = 10 * 366 * 86400.0


class Lease:
    """Keeps a step from being removed while it is read, by any process's retention; see :func:`lease_step`.

    A thread renews it. It ends with the block, and by itself some time after its process or host has died.

    Attributes:
        step: The step.
        path: The checkpoint's path or URL, for ``load`` or ``open_checkpoint``.
    """

    def __init__(self, folder: StepFolder, step: int, holder: str, seconds: float) -> None:
        self.step = step
        self.path = folder.location(step)
        self._folder, self._holds, self._seconds = folder, folder.holds, seconds
        self._name, self._hold = make_hold(folder.names.name(step), "lease", holder, seconds)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="shardckpt-lease", daemon=True)
        self._holds.put(self._name, self._hold)
        try:
            self._check_kept()
            self._thread.start()
        except BaseException:
            self._holds.drop(self._name)
            raise

    @property
    def is_held(self) -> bool:
        """Whether it still holds: it was not closed, and could be renewed in time."""
        return not self._closed.is_set() and self._hold.is_current

    def close(self) -> None:
        """End the lease. May be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._holds.drop(self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_kept(self) -> None:
        """Wait for a change that began before the lease was written, and raise if the step is gone after it."""
        deadline = time.monotonic() + _PATIENCE
        while (change := self._holds.find_change(self._hold.directory)) is not None:
            if time.monotonic() > deadline:
                raise CheckpointingException(
                    f"{self._folder}: step {self.step} is {change}: lease another step, or try again"
                )
            time.sleep(0.02)
        check_step(self._folder, self.step)

    def _renew(self) -> None:
        while not self._closed.wait(self._seconds / 3):
            renewed = self._hold.model_copy(update={"until": time.time() + self._seconds})
            try:
                self._holds.put(self._name, renewed)
            except Exception:  # the next turn tries again, and `is_held` says whether that was in time
                logger.warning("cannot renew the lease of step %d in %s", self.step, self._folder, exc_info=True)
            else:
                self._hold = renewed


def lease_step(
    folder: str | os.PathLike[str], step: int = -1, *, holder: str | None = None, seconds: float = 600.0
) -> Lease:
    """Keep a step from being removed while this process reads it. Not collective: one process calls for all that read.

    Example::

        with lease_step("checkpoints") as lease, open_checkpoint(lease.path) as checkpoint:
            evaluate(checkpoint)

    Args:
        folder: The directory or URL of the steps.
        step: The step; -1 for the newest that can be loaded.
        holder: Who holds it, for people: named where the step is not removed. By default the host and process id.
        seconds: How long the lease outlives this process at most; a living one renews it in time. On the same host a
            dead process's lease ends at once.

    Returns:
        The lease: a context manager.

    Raises:
        CannotLoadError: there is no such step, or it cannot be loaded.
        StorageError: the folder cannot be written to: a lease is a file in it.
    """
    check_annotated(lease_step, locals())
    if not _SHORTEST_LEASE <= seconds <= _LONGEST_LEASE:  # NaN, too
        raise CheckpointingException(
            f"seconds={seconds}: give {_SHORTEST_LEASE} or more, so that a lease is renewed in time, and at most "
            f"{_LONGEST_LEASE:.0f}, ten years; to keep a step for longer, pin it (pin_step)"
        )
    steps = StepFolder(folder, get_plugin_manager())
    chosen = find_newest(steps) if step < 0 else int(step)
    if chosen is None:
        raise CheckpointingException(f"{steps} has no checkpoint to lease")
    return Lease(steps, chosen, holder or describe_process(), seconds)


def find_holds(folder: str | os.PathLike[str]) -> dict[str, list[Hold]]:
    """Return the leases and pins of a folder that count now, by the name of the step's directory. Not collective.

    The steps may be named in any way.
    """
    return StepFolder(folder, get_plugin_manager()).holds.find()


def pin_step(folder: str | os.PathLike[str], step: int | str, label: str) -> None:
    """Keep a step, whatever the retention policies of any process say, until :func:`unpin_step`. Not collective.

    Args:
        folder: The directory or URL of the steps.
        step: The step, or the name of its directory, such as ``ckpt_000010``.
        label: Why it is kept, for people: ``"release 1.2"``. A step may have several; one label may be on several.

    Raises:
        CannotLoadError: there is no such step, or it cannot be loaded.
        CheckpointingException: the label is empty, the step is being removed, or it is a link to another step.
        StorageError: the folder cannot be written to.
    """
    check_annotated(pin_step, locals())
    if not label.strip():
        raise CheckpointingException(f"step {step}: a pin needs a label that says why the step is kept")
    steps, step = find_step(folder, step)
    link = steps.place / steps.names.name(step)
    # a removal of the link's target would not find a pin under another name
    with wrap_os_errors("access", link):
        is_other = link.is_symlink() and link.resolve().parent == steps.place.resolve()
    if is_other:
        raise CheckpointingException(
            f"{link} is a link, which no policy removes: pin the step itself, {link.resolve()}"
        )
    # a lease first: it looks for a removal under way, and waits for it
    with Lease(steps, step, f"the pin {label!r}", MARK_SECONDS):
        steps.holds.put(*make_hold(steps.names.name(step), "pin", label, None))


def unpin_step(folder: str | os.PathLike[str], step: int | str, label: str) -> None:
    """Take a pin away; no error if the step does not have it, or does not exist. Not collective."""
    check_annotated(unpin_step, locals())
    steps, step = find_step(folder, step)
    steps.holds.drop(make_hold(steps.names.name(step), "pin", label, None)[0])


def find_step(folder: str | os.PathLike[str], step: int | str, *, also: Collection[str] = ()) -> tuple[StepFolder, int]:
    """Return a folder with the way in which the directory of a step is named, and the step.

    ``step`` is the step, or the name of its directory; of a step that is not there, the names are a manager's. It is an
    error if several directories are of this step. ``also`` has words that the caller takes in place of a step: the
    error of a misspelt one asks about it.
    """
    steps = AnySteps(folder, get_plugin_manager())
    if not isinstance(step, str):
        step = parse_number(step, str(steps), "its number, or the name of its directory")
        found = [each for each in steps.list_namings() if step in each.steps()]
        if len(found) > 1:
            names = [each.names.name(step) for each in found]
            raise CheckpointingException(f"{steps} has several directories of step {step}: name one, {listed(names)}")
        return (found[0] if found else steps), step
    numbered = re.fullmatch(r"(.*\D|)[0-9]+", step)
    for each in steps.list_namings() + (steps.list_namings(numbered[1]) if numbered else []):
        if (number := each.names.parse(step)) is not None:
            return each, number
    known = [name for name in steps.directories() if not name.startswith(".") and name[-1].isdecimal()]
    raise CheckpointingException(
        f"{steps} has no directory of a step {step!r} {name_known(step, known, 'directories', also=also)}"
    )
