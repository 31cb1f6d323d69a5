"""The hooks of a CheckpointManager."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class ManagerPart:
    """An ability that a CheckpointManager has, or has not: it calls these hooks of all of its parts, in their order.

    A hook that is not overridden does nothing. One that says `Collective` may only be overridden in a part that every
    rank has.
    """

    #: Names of the states that the part saves and loads itself: the steps' checkpoints do not have them.
    own_states: tuple[str, ...] = ()

    def on_step(self, step: int) -> None:
        """The training has made a step; called by every ``save``, also where nothing is ever saved."""

    def is_preempted(self) -> bool:
        """Collective: whether this step is to be saved, because the training is about to end."""
        return False

    def joins_step(self, step: int, *, due: bool) -> bool:  # noqa: ARG002 - for those who override it
        """Collective: save what is the part's own, at every step.

        Args:
            step: The step.
            due: Whether its checkpoint is to be saved.

        Returns:
            Whether this manager is to save the checkpoint, and not that of another replica.
        """
        return True

    def before_save(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """A step is about to be saved; an error is raised on all ranks, and nothing is saved."""

    def after_save(self, step: int, *, last_step: bool) -> None:
        """Collective: a step was saved, or is being written in the background, unless it is the last."""

    def after_commit(self, step: int) -> None:
        """The checkpoint of a step is durable."""

    def after_load(self, step: int | None) -> None:
        """Collective: a step was loaded; None for a checkpoint that is not this training's, or none."""

    def advance(self, *, blocking: bool = False) -> None:
        """Collective: go on with what is done in the background; ``blocking`` waits until it is done."""

    def close(self, error: BaseException | None = None) -> None:
        """Collective: end the background, when what is on its way is done.

        Args:
            error: Of the training, where it ends by one: then nothing here may wait for other ranks.
        """


__all__ = ["ManagerPart"]
