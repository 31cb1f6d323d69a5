"""The hooks that a CheckpointManager calls on its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class ManagerPart:
    """One optional ability of a CheckpointManager, which calls each hook on all of its parts, in their order.

    A hook that is not overridden does nothing. A part that not every rank has (retention is the main rank's alone) must
    not call other ranks in a hook: the ranks without the part would not answer.
    """

    #: Names of the states that the part saves and loads itself. The steps' checkpoints do not contain them.
    own_states: tuple[str, ...] = ()

    def on_step(self, step: int) -> None:
        """Called first by every ``save``, whether it saves the step or not."""

    def is_preempted(self) -> bool:
        """Collective: return whether to save this step, whatever the interval, because the process is to be killed."""
        return False

    def joins_step(self, step: int, *, due: bool) -> bool:  # noqa: ARG002 - parts that override it use them
        """Collective: save the part's own states; called at every step.

        ``due`` says whether a checkpoint of the step is to be saved. Return whether this manager saves it; False if the
        manager of another replica does.
        """
        return True

    def before_save(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Called before a step is saved. An error is raised on all ranks, and nothing is saved.

        It must not call other ranks: another rank may have failed in the same phase, and would not answer.
        """

    def list_removable(self, step: int) -> list[str]:  # noqa: ARG002 - parts that override it use it
        """Return the steps that could go, for the error of a step without space; called on the main rank."""
        return []

    def list_kept(self) -> list[str]:
        """Return the steps that stay, each with the reason, for the same error; called on the main rank."""
        return []

    def make_room(self, step: int) -> list[int]:  # noqa: ARG002 - parts that override it use it
        """Remove steps that may go already, when there is no space for a step; return them. Called on the main rank.

        It raises nothing: that there is no space is the error.
        """
        return []

    def after_save(self, step: int, *, last_step: bool) -> None:
        """Collective: called after the save of a step, or after it began in the background.

        With ``last_step`` it has ended: the last step is never saved in the background.
        """

    def after_commit(self, step: int) -> None:
        """Called when the checkpoint of a step is durable."""

    def after_discard(self, newest: int) -> None:
        """Called when the steps after one were removed; ``newest`` is the newest complete step that is left."""

    def after_load(self, step: int | None) -> None:
        """Collective: called after a load; None if no step was loaded, but an initial checkpoint or nothing."""

    def advance(self, *, blocking: bool = False) -> None:
        """Collective: finish background saves that are done; if ``blocking``, wait until it has done everything."""

    def close(self, error: BaseException | None = None) -> None:
        """Collective: finish the background work, and end its threads and processes.

        ``error`` is the error that ended the training, if one did. Then the hook must not wait for other ranks, which
        may still be training.
        """
