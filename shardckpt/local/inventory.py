"""The inventory of all ranks' disks: which saves are complete, and which ranks have which part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CannotLoadError, IncompleteCheckpointError, NotACheckpointError
from shardckpt.local.parts import PartId, SaveId
from shardckpt.planning.shard_copies import find_holders

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Inventory:
    """The parts on all disks; the same on every rank.

    ``parts_of_ranks`` has for each rank the parts on its disk, with what is wrong with each; ``""`` for nothing.
    """

    def __init__(self, parts_of_ranks: Sequence[Mapping[PartId, str]]) -> None:
        self.world_size = len(parts_of_ranks)
        #: The ranks on whose disks each part is undamaged, ascending.
        self.holders = find_holders([part for part, fault in parts.items() if not fault] for parts in parts_of_ranks)
        #: The ranks with damaged parts, and the fault of each.
        self.faults = [(rank, why) for rank, parts in enumerate(parts_of_ranks) for why in parts.values() if why]
        found = {part.save for parts in parts_of_ranks for part in parts}
        #: The saves of as many ranks as there are now, the newest last.
        self.saves = sorted(save for save in found if save.world_size == self.world_size)
        #: The saves of another number of ranks, the newest last.
        self.foreign = sorted(found - set(self.saves))
        #: The saves with every part on some disk, the newest last.
        self.complete = [save for save in self.saves if not self.find_missing(save)]

    def find_missing(self, save: SaveId) -> list[int]:
        """Return the ranks whose part of a save is undamaged on no disk."""
        return [rank for rank in range(save.world_size) if PartId(save, rank) not in self.holders]

    def find_latest(self) -> SaveId | None:
        """Return the newest complete save, or None if there is none."""
        return self.complete[-1] if self.complete else None

    def find_other_holders(self, part: PartId) -> list[int]:
        """Return the ranks that have an undamaged copy of a part of another rank."""
        return [rank for rank in self.holders.get(part, ()) if rank != part.rank]

    def list_superseded(self, save: SaveId, keep: int) -> set[SaveId]:
        """Return the saves to remove when ``save`` is complete: all older ones but ``keep - 1`` complete steps."""
        # by step: a crash may have left two complete saves of one, and the newer one is kept
        older = list({other.step: other for other in self.complete if other.step < save.step}.values())
        kept = older[max(len(older) - keep + 1, 0) :]
        return {other for other in (*self.saves, *self.foreign) if other < save} - set(kept)

    def list_later(self, step: int) -> set[SaveId]:
        """Return the saves of later steps, complete or not."""
        return {save for save in (*self.saves, *self.foreign) if save.step > step}

    def list_loadable(self, step: int | None) -> list[SaveId]:
        """Return the complete saves of a step, or of all steps for None, the newest first.

        If there is none, that is a CannotLoadError: the subclass and the text say why.
        """
        if complete := _of_step(self.complete, step):
            return complete[::-1]
        incomplete, foreign = _of_step(self.saves, step), _of_step(self.foreign, step)
        instead = "load the last global checkpoint with dist_checkpointing.load()"
        steps = ", ".join(str(save.step) for save in self.complete)
        steps = f" (complete steps: {steps})" if steps else ""
        if incomplete:
            raise IncompleteCheckpointError(f"{self._describe_lost(incomplete[-1])}; {instead}{steps}")
        if foreign:
            raise CannotLoadError(
                f"{self._describe_foreign(foreign[-1])}: a local checkpoint needs as many as saved it; {instead}, "
                "which takes any number of ranks"
            )
        what = "local checkpoint" if step is None else f"local checkpoint of step {step}"
        raise NotACheckpointError(f"there is no {what} on the disks of {self.world_size} ranks; {instead}{steps}")

    def list_faults(self) -> list[str]:
        """Return warnings: of damaged parts, and of saves newer than the latest complete one that cannot be loaded."""
        texts = [f"rank {rank} has a damaged part, which is ignored: {fault}" for rank, fault in self.faults]
        latest = self.find_latest()
        newer = [save for save in self.saves if latest is None or save > latest]
        texts += [f"{self._describe_lost(save)}; it is ignored" for save in newer]
        if self.foreign and (latest is None or self.foreign[-1].step > latest.step):
            texts.append(f"{self._describe_foreign(self.foreign[-1])}: it is ignored")
        return texts

    def describe_later(self, step: int) -> str:
        """Return a warning of complete steps after one that is saved, or ``""`` if there is none."""
        latest = self.find_latest()
        if latest is None or latest.step <= step:
            return ""
        return (
            f"there are steps after {step}, the newest is {latest.step}: a later load takes that one; "
            f"manager.discard_after({step}) removes them"
        )

    def _describe_lost(self, save: SaveId) -> str:
        ranks = ", ".join(map(str, self.find_missing(save)))
        return f"step {save.step} is incomplete: no disk has an undamaged part of ranks {ranks}"

    def _describe_foreign(self, save: SaveId) -> str:
        return f"step {save.step} was saved by {save.world_size} ranks, and there are {self.world_size}"


def _of_step(saves: Sequence[SaveId], step: int | None) -> list[SaveId]:
    return [save for save in saves if step in (None, save.step)]
