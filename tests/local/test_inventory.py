from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from shardckpt.local.inventory import Inventory
from shardckpt.local.parts import PartId, SaveId

_some = st.builds(SaveId, st.integers(0, 5), st.integers(0, 3), st.just(2))
_disks = st.lists(st.sets(st.builds(PartId, _some, st.integers(0, 1)), max_size=12), min_size=2, max_size=2)


#: Two saves of step 2, as a crash leaves them.
_twice = [{PartId(SaveId(step, stamp, 2), rank) for step, stamp in ((1, 0), (2, 0), (2, 1))} for rank in range(2)]


@example(_twice, SaveId(3, 0, 2), 3)
@given(_disks, _some, st.integers(1, 3))
def test_retention_keeps_what_is_newest(disks: list[set[PartId]], saved: SaveId, keep: int) -> None:
    """What goes is older than what was saved, and so many complete steps stay with it as there are, up to the limit."""
    disks = [disk | {PartId(saved, rank)} for rank, disk in enumerate(disks)]
    inventory = Inventory([dict.fromkeys(disk, "") for disk in disks])
    gone = inventory.list_superseded(saved, keep)
    assert all(save < saved for save in gone)
    stay = [save for save in inventory.complete if save not in gone]
    newest = {save.step: save for save in inventory.complete if save.step < saved.step}
    older = [newest[step] for step in sorted(newest)]
    assert saved in stay
    assert [save for save in stay if save.step < saved.step] == older[len(older) - min(keep - 1, len(older)) :]
    assert not [save for save in set(inventory.saves) - set(inventory.complete) - gone if save < saved]
