"""What the disks of all ranks have together: which saves are complete, and who has which part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CannotLoadError, IncompleteCheckpointError, NotACheckpointError
from shardckpt.local.parts import PartId, SaveId
from shardckpt.planning import find_holders

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Inventory:
    """The parts on all disks; the same on every rank.

    Args:
        everyone: Of each rank, the parts on its disk and what is wrong with them.
    """

    def __init__(self, everyone: Sequence[Mapping[PartId, str]]) -> None:
        self.world_size = len(everyone)
        #: Of each part that is not damaged, the ranks on whose disks it is.
        self.holders = find_holders([part for part, fault in parts.items() if not fault] for parts in everyone)
        #: (rank, part, what is wrong with it).
        self.faults = [(rank, part, why) for rank, parts in enumerate(everyone) for part, why in parts.items() if why]
        found = {part.save for parts in everyone for part in parts}
        #: The saves of as many ranks as there are now, the newest last; those of others.
        self.saves = sorted(save for save in found if save.world_size == self.world_size)
        self.foreign = sorted(found - set(self.saves))
        #: Those of which every part is on some disk.
        self.complete = [save for save in self.saves if not self.missing(save)]

    def missing(self, save: SaveId) -> list[int]:
        """The ranks whose part of a save is on no disk."""
        return [rank for rank in range(save.world_size) if PartId(save, rank) not in self.holders]

    def latest(self) -> SaveId | None:
        """The newest complete save."""
        return self.complete[-1] if self.complete else None

    def others(self, part: PartId) -> list[int]:
        """The ranks on whose disks a part is whole, but for the one whose it is."""
        return [rank for rank in self.holders.get(part, ()) if rank != part.rank]

    def superseded(self, save: SaveId, keep: int) -> set[SaveId]:
        """What goes once a save is complete: all that is older, but for so many complete steps that ``keep`` stay."""
        older = [other for other in self.complete if other.step < save.step]
        kept = older[max(len(older) - keep + 1, 0) :]
        return {other for other in (*self.saves, *self.foreign) if other < save} - set(kept)

    def loadable(self, step: int | None) -> list[SaveId]:
        """The complete saves of a step, or of any, the newest first.

        Raises:
            CannotLoadError: there is none.
        """
        found = [save for save in reversed(self.complete) if step in (None, save.step)]
        if not found:
            raise self._refusal(step)
        return found

    def complaints(self) -> list[str]:
        """What is damaged, and which saves that are newer than the latest complete one do not count."""
        texts = [f"rank {rank} has a damaged part, which does not count: {fault}" for rank, _, fault in self.faults]
        latest = self.latest()
        newer = [save for save in self.saves if latest is None or save > latest]
        texts += [f"{self._lost(save)}; it is left out" for save in newer]
        if self.foreign and (latest is None or self.foreign[-1].step > latest.step):
            texts.append(f"{self._of_others(self.foreign[-1])}: it is left out")
        return texts

    def _refusal(self, step: int | None) -> CannotLoadError:
        """Why nothing can be loaded."""
        instead = "load the last global checkpoint with dist_checkpointing.load()"
        asked = [save for save in self.saves if step in (None, save.step)]
        if asked:
            return IncompleteCheckpointError(f"{self._lost(asked[-1])}; {instead}{self._there()}")
        strange = [save for save in self.foreign if step in (None, save.step)]
        if strange:
            return CannotLoadError(
                f"{self._of_others(strange[-1])}: local checkpoints need as many; {instead}, which takes any number"
            )
        what = "local checkpoint" if step is None else f"local checkpoint of step {step}"
        return NotACheckpointError(
            f"there is no {what} on the disks of {self.world_size} ranks; {instead}{self._there()}"
        )

    def _there(self) -> str:
        steps = ", ".join(str(save.step) for save in self.complete)
        return f" (complete steps: {steps})" if steps else ""

    def _lost(self, save: SaveId) -> str:
        ranks = ", ".join(map(str, self.missing(save)))
        return f"step {save.step} is incomplete: on no disk is a whole part of ranks {ranks}"

    def _of_others(self, save: SaveId) -> str:
        return f"step {save.step} was saved by {save.world_size} ranks, and there are {self.world_size}"


__all__ = ["Inventory"]
